"""Caches and planners filled to a wanted shape."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiercache import DRAM, KVLayout, NVMe, TieredKVCache
from tiercache.keys import Prompt, encode_prompt, symbol_nbytes
from tiercache.planner import Load, Planner
from tiercache.policy import make_policy
from tiercache.types import CopyJob, JobResult, LevelSpec

__all__ = [
    "BLOCK_TOKENS",
    "LONG_BLOCKS",
    "Ids",
    "PlannerRig",
    "branched",
    "memory_cache",
    "random_ids",
    "store_all",
    "tiered_cache",
]

Ids = NDArray[np.int32]
BLOCK_TOKENS = 16
LONG_BLOCKS = 8192
"""Of the long prompt: 131,072 tokens."""
_WAIT_S = 60.0
_VOCABULARY = 100_000


def random_ids(rng: np.random.Generator, blocks: int) -> Ids:
    """Token ids of that many blocks."""
    return rng.integers(0, _VOCABULARY, blocks * BLOCK_TOKENS).astype(np.int32)


def store_all(cache: TieredKVCache, ids: Ids, end: int, block_nbytes: int, begin: int = 0) -> None:
    """Store blocks `[begin, end)` of a prompt, in as many calls as the cache's bounds ask for. Bytes are zeros."""
    while begin < end:
        rows = np.zeros((end - begin, block_nbytes), np.uint8)
        ticket = cache.store(ids[: end * BLOCK_TOKENS], rows, start=begin)
        assert ticket.wait(_WAIT_S) and ticket.stored + ticket.present > 0, ticket
        begin += ticket.stored + ticket.present


def branched(cache: TieredKVCache, ids: Ids, nodes: int, others: int, block_nbytes: int) -> None:
    """Store a prompt so that its path is `nodes` runs of equal length, among `others` other prompts of 4 blocks.

    A run ends where another prompt branches off. A path of several runs comes in 16 pieces between other prompts, so
    that its slots are not one stretch. Branches are made from the far end, so that each store walks a short path.
    """
    rng = np.random.default_rng(nodes)
    blocks = len(ids) // BLOCK_TOKENS
    pieces = 1 if nodes == 1 else 16
    for piece in range(pieces):
        store_all(cache, ids, blocks * (piece + 1) // pieces, block_nbytes, blocks * piece // pieces)
        for _ in range(others * piece // pieces, others * (piece + 1) // pieces):
            store_all(cache, random_ids(rng, 4), 4, block_nbytes)
    step = blocks // nodes
    for at in range((nodes - 1) * step, 0, -step):
        branch = np.concatenate([ids[: at * BLOCK_TOKENS], random_ids(rng, 1)])
        store_all(cache, branch, at + 1, block_nbytes, at)


def memory_cache(slots: int, block_nbytes: int) -> TieredKVCache:
    """Over DRAM alone."""
    layout = KVLayout((block_nbytes,), "uint8")
    return TieredKVCache([DRAM(slots * layout.stride)], layout=layout, block_tokens=BLOCK_TOKENS)


def tiered_cache(path: Path, slots: int, block_nbytes: int) -> TieredKVCache:
    """Over DRAM and NVMe with as many slots each; what it holds is on NVMe when it is closed."""
    layout = KVLayout((block_nbytes,), "uint8")
    tiers = [DRAM(slots * layout.stride), NVMe(path, slots * layout.stride, write_after_s=None)]
    return TieredKVCache(tiers, layout=layout, namespace="bench", block_tokens=BLOCK_TOKENS, exclusive=False)


class PlannerRig:
    """A planner whose copies all succeed at once: what deciding costs, without a byte moved."""

    def __init__(self, dram: int, nvme: int | None = None, block_nbytes: int = 256 << 10) -> None:
        specs = [LevelSpec("dram", dram, block_nbytes)]
        if nvme is not None:
            specs.append(LevelSpec("nvme", nvme, block_nbytes, persistent=True, pool_threads=8))
        self.planner = Planner(specs, symbol_nbytes(BLOCK_TOKENS), make_policy("reuse"), epoch=b"bench")
        self.block_nbytes = block_nbytes
        self.jobs = 0
        self._now = 1000.0

    def now(self) -> float:
        """Time passes with every call."""
        self._now += 1e-3
        return self._now

    def settle(self) -> None:
        """Answer every job, also those that follow."""
        while messages := self.planner.take_messages():
            for message in messages:
                if isinstance(message, CopyJob):
                    self.jobs += 1
                    ok = np.ones(message.n, dtype=np.bool_)
                    result = JobResult(message.id, ok, message.n * self.block_nbytes, 0.0)
                    self.planner.commit(result, self.now())

    def drain(self) -> None:
        """Write everything to the last level."""
        self.planner.drain(self.now())
        self.settle()

    def store(self, prompt: Prompt, start: int = 0) -> int:
        """Store blocks `[start, n)`; returns how many were taken."""
        plan = self.planner.plan_store(prompt.symbols, prompt.n, start, self.planner.epoch, self.now(), 1)
        self.settle()
        return plan.accepted

    def load(self, ids: Ids, endpoint: int = 0) -> Load:
        """Lookup, plan_load, and all commits, as a cache does it for a prompt."""
        prompt = encode_prompt(ids, BLOCK_TOKENS)
        found = self.planner.lookup(prompt.symbols, prompt.n, self.now(), prompt.tail)
        load = self.planner.plan_load(prompt.symbols, found.blocks, self.planner.epoch, self.now(), endpoint)
        self.settle()
        return load

    def release(self, load: Load) -> None:
        """End the hold of a load."""
        self.planner.release_load(load, self.now())
        self.settle()
