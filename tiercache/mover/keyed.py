"""What a pool's threads do at a key tier: ask it, and read from it into staging, verified. Trouble is a miss."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from tiercache.keys import chain_keys
from tiercache.mover.job import RunningJob
from tiercache.remote import KeyTier, frame_nbytes, verified
from tiercache.tiers.base import Rows
from tiercache.types import Bools, CopyJob

__all__ = ["KeyTierSpec", "KeyedReads"]

_CHAINS = 16
"""Prompts whose keys are kept: the jobs of one load share them."""
_NO_DEADLINE_S = 3600.0


@dataclass(frozen=True, slots=True)
class KeyTierSpec:
    """A key tier and what its keys are made of."""

    tier: KeyTier
    namespace_digest: bytes
    symbol_nbytes: int
    threads: int = 8
    ident_salt: int = 0
    """Mixed into the idents in frames, where one ident stands for other bytes under another namespace."""


class KeyedReads:
    """See the module. Safe to call from several threads."""

    def __init__(self, spec: KeyTierSpec, block_nbytes: int) -> None:
        self._spec = spec
        self._tier = spec.tier
        self._salt = np.uint64(spec.ident_salt)
        self._block_nbytes = block_nbytes
        self.value_nbytes = frame_nbytes(block_nbytes)
        self._chains: OrderedDict[tuple[bytes, bytes], list[bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def keys(self, job: CopyJob) -> list[bytes]:
        """Keys of a job's blocks. SHA-256 over the whole prompt, once for all jobs of a load."""
        assert job.symbols is not None
        name = (job.epoch, job.symbols)
        with self._lock:
            chain = self._chains.get(name)
            if chain is not None:
                self._chains.move_to_end(name)
        if chain is None:
            chain = chain_keys(job.symbols, self._spec.symbol_nbytes, self._spec.namespace_digest, job.epoch)
            with self._lock:
                self._chains[name] = chain
                if len(self._chains) > _CHAINS:
                    self._chains.popitem(last=False)
        return [chain[at] for at in job.src_slots.tolist()]

    def find(self, running: RunningJob) -> Bools:
        """Which blocks of a job the key tier says it has."""
        job = running.job
        try:
            return _per_key(self._tier.find(self.keys(job), job.deadline_s or _NO_DEADLINE_S), job.n)
        except OSError:
            running.fail("io")
            return np.zeros(job.n, dtype=np.bool_)

    def read(self, running: RunningJob, rows: Rows) -> Bools:
        """Read a job's blocks into `rows[n, value_nbytes]`; which of them came, and are the blocks asked for."""
        job = running.job
        try:
            came = _per_key(self._tier.get(self.keys(job), rows, job.deadline_s or _NO_DEADLINE_S), job.n)
        except OSError:
            running.fail("io")
            came = np.zeros(job.n, dtype=np.bool_)
        if running.cancelled or not came.any():
            running.fail("missing")
            return np.zeros(job.n, dtype=np.bool_)
        good: Bools = came & verified(rows, self._block_nbytes, job.idents ^ self._salt)
        if (came & ~good).any():
            running.fail("checksum")
        elif not came.all():
            running.fail("missing")
        return good


def _per_key(answer: object, n: int) -> Bools:
    """A tier's answer to a batch of n keys. ValueError where it is none: numpy would spread a single value over all."""
    ok = np.asarray(answer, dtype=np.bool_)
    if ok.shape != (n,):
        raise ValueError(f"a key tier answered {n} keys with {ok.shape} values")
    return ok
