"""What a pool's threads do at a key tier: ask it, read from it into staging, verified, and write to it from staging,
sealed. Trouble is a miss."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

from tiercache.keys import chain_keys
from tiercache.mover.job import RunningJob
from tiercache.remote import KeyTier, frame_nbytes, seal_rows, verified
from tiercache.tiers.base import Rows
from tiercache.types import Bools, CopyJob

__all__ = ["KeyTierSpec", "KeyedJobs"]

_CHAINS = 16
"""Prompts whose keys are kept: the jobs of one load share them."""
_NO_DEADLINE_S = 3600.0
_ASK_AGAIN_S = 1.0
"""Between two questions about the tier itself."""
_AFTER_TROUBLE_S = 10.0
"""Likewise, where it could not say."""
_SHARE = 0.25
"""Of what is left of a write's time, that the question how full the tier is may take."""


@dataclass(frozen=True, slots=True)
class KeyTierSpec:
    """A key tier and what its keys are made of."""

    tier: KeyTier
    namespace_digest: bytes
    symbol_nbytes: int
    threads: int = 8
    write_threads: int = 0
    ident_salt: int = 0
    """Mixed into the idents in frames, where one ident stands for other bytes under another namespace."""


class KeyedJobs:
    """See the module. Safe to call from several threads."""

    def __init__(self, spec: KeyTierSpec, block_nbytes: int) -> None:
        self._spec = spec
        self._tier = spec.tier
        self._salt = np.uint64(spec.ident_salt)
        self._block_nbytes = block_nbytes
        self.value_nbytes = frame_nbytes(block_nbytes)
        self.transport = "unknown"
        """What the tier last said to have measured."""
        self.endpoint = str(getattr(spec.tier, "endpoint", ""))
        self._transport = getattr(spec.tier, "transport", None)
        self._pressure = getattr(spec.tier, "pressure", None)
        self._ask_at = {"pressure": 0.0, "transport": 0.0}
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
        return [chain[at] for at in job.positions.tolist()]

    def find(self, running: RunningJob) -> Bools:
        """Which blocks of a job the key tier says it has."""
        job = running.job
        keys, left_s = self.keys(job), _left_s(running)
        if left_s <= 0:
            running.fail("deadline")
            return np.zeros(job.n, dtype=np.bool_)
        try:
            return _per_key(self._tier.find(keys, left_s), job.n)
        except OSError as error:
            running.fail(_reason(error))
            return np.zeros(job.n, dtype=np.bool_)

    def read(self, running: RunningJob, rows: Rows) -> Bools:
        """Read a job's blocks into `rows[n, value_nbytes]`; which of them came, and are the blocks asked for."""
        job = running.job
        keys, left_s = self.keys(job), _left_s(running)
        if left_s <= 0:
            running.fail("deadline")
            return np.zeros(job.n, dtype=np.bool_)
        try:
            came = _per_key(self._tier.get(keys, rows, left_s), job.n)
        except OSError as error:
            running.fail(_reason(error))
            came = np.zeros(job.n, dtype=np.bool_)
        if running.cancelled or not came.any():
            running.fail("missing")
            return np.zeros(job.n, dtype=np.bool_)
        good: Bools = came & verified(rows, self._block_nbytes, job.idents ^ self._salt)
        running.bad = came & ~good
        if running.bad.any():
            running.fail("checksum")
        elif not came.all():
            running.fail("missing")
        return good

    def write(self, running: RunningJob, rows: Rows) -> Bools:
        """Seal a job's blocks, whose payload lies in `rows[n, value_nbytes]`, and put them there; which were taken."""
        job = running.job
        seal_rows(rows, self._block_nbytes, job.idents ^ self._salt)
        keys, left_s = self.keys(job), _left_s(running)
        if left_s <= 0:
            running.fail("deadline")
            return np.zeros(job.n, dtype=np.bool_)
        try:
            taken = _per_key(self._tier.put(keys, rows, left_s), job.n)
        except OSError as error:
            running.fail(_reason(error))
            return np.zeros(job.n, dtype=np.bool_)
        if not taken.all():
            running.fail("refused")
        return taken

    def remove_wrong(self, running: RunningJob) -> int:
        """Remove the values of a job that were found wrong, so that the next write heals them. How many are gone."""
        left_s = _left_s(running)
        if not running.bad.any() or running.cancelled or left_s <= 0:
            return 0
        keys = [key for key, wrong in zip(self.keys(running.job), running.bad.tolist(), strict=True) if wrong]
        try:
            return int(_per_key(self._tier.remove(keys, left_s), len(keys)).sum())
        except OSError:
            return 0

    def look_at_tier(self, running: RunningJob) -> None:
        """Ask the tier about itself, at most once a second: what carries its bytes; by a write, how full it is, which
        may not take what the write has left: blocks that were taken would count as late."""
        if self._transport is not None and self._is_time_for("transport"):
            self.transport = str(self._transport())
        if running.job.kind != "write" or self._pressure is None or (left_s := _left_s(running)) <= 0:
            return
        if self._is_time_for("pressure"):
            try:
                pressure = self._pressure(left_s * _SHARE)
            except OSError:
                with self._lock:
                    self._ask_at["pressure"] = time.monotonic() + _AFTER_TROUBLE_S
                return
            running.pressure = None if pressure is None else float(pressure)

    def _is_time_for(self, what: str) -> bool:
        now = time.monotonic()
        with self._lock:
            if now < self._ask_at[what]:
                return False
            self._ask_at[what] = now + _ASK_AGAIN_S
            return True


def _left_s(running: RunningJob) -> float:
    """Seconds until the job's deadline."""
    deadline_s = running.job.deadline_s
    return _NO_DEADLINE_S if deadline_s is None else running.ready_at + deadline_s - time.monotonic()


def _reason(error: OSError) -> str:
    return "deadline" if isinstance(error, TimeoutError) else "io"


def _per_key(answer: object, n: int) -> Bools:
    """A tier's answer to a batch of n keys. ValueError where it is none: numpy would spread a single value over all."""
    ok = np.asarray(answer, dtype=np.bool_)
    if ok.shape != (n,):
        raise ValueError(f"a key tier answered {n} keys with {ok.shape} values")
    return ok
