"""The fixed scenario of the k-th fault: two lives of a cache over real tiers, then two more without any fault."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from cache_kit import BLOCK_TOKENS, LAYOUT, bits, blocks_of, eventually, is_clean, open_cache, prompt
from kth_points import planted

from tiercache import TieredKVCache, directory
from tiercache.assembly import Seams
from tiercache.errors import ConfigError
from tiercache.testing.faults import FaultPlan, FaultyFiles

END_S = 5.0
"""No future, ticket, flush or close of the scenario may take longer; without a fault each takes milliseconds."""
READING = ("preadv",)
A, B, C = prompt(1, 2, 3, 4), prompt(1, 5, 6), prompt(7, 8, 9)
MORE = [prompt(20 + i, 40 + i) for i in range(6)]
LATE = [prompt(60 + i, 80 + i) for i in range(2)]


def open_now() -> Counter[str]:
    """Open files and our threads: what a closed cache must leave none of."""
    gc.collect()
    files = (f"{fd.name}: {_target(fd)}" for fd in Path("/proc/self/fd").iterdir())
    threads = (each.name for each in threading.enumerate() if each.name.startswith("tiercache-"))
    return Counter([*files, *threads])


def left_since(before: Counter[str]) -> list[str]:
    """What is open now and was not then; what others close meanwhile does not matter."""
    return [each for each in open_now() - before if not each.endswith("gone")]


def _target(fd: Path) -> str:
    try:
        return str(fd.readlink())
    except OSError:
        return "gone"


class Scenario:
    """Runs once, with one fault planted (or none); asserts as it goes."""

    def __init__(self, path: Path, plan: FaultPlan, hbm: bool) -> None:
        self.path = path
        self.plan = plan
        self.hbm = hbm
        self.epoch = 0
        self.stored: dict[tuple[int, ...], int] = {}
        """Prompts whose blocks were accepted -> how many blocks."""
        self.acked: dict[tuple[int, ...], int] = {}
        """Of those, what a flush or a close said is on NVMe."""
        self.owned = set(directory._owned)
        """Directories of others that are locked in this process."""
        self.opened: list[TieredKVCache] = []
        self.refused: list[str] = []
        """What a constructor said."""

    def abandon(self) -> None:
        """After a failed assertion: close what is open, so that the next run starts clean."""
        for cache in self.opened:
            cache.close(0.0)

    # -- the verbs, each of which must end in time and tell the truth -------------------------------------------------

    def open(self, seams: Seams | None = None) -> TieredKVCache:
        """Open the cache; where the fault is in the way, that is a ConfigError that leaves nothing, and the next try
        works."""
        before = open_now()
        began = time.monotonic()
        try:
            return self._open(seams)
        except ConfigError as error:
            assert self.plan.fired, error
            self.refused.append(str(error))
        assert time.monotonic() - began < END_S
        assert eventually(lambda: not left_since(before), 2.0), (left_since(before), self.refused)
        assert directory._owned <= self.owned, "a directory that could not be opened is still locked"
        return self._open(seams)

    def _open(self, seams: Seams | None) -> TieredKVCache:
        slots = {"hbm_slots": 6, "dram_slots": 8} if self.hbm else {"dram_slots": 12}
        cache = open_cache(self.path, nvme_slots=64, seams=seams or Seams(), **slots)
        self.opened = [cache]
        return cache

    def store(self, cache: TieredKVCache, tokens: Any) -> None:
        have = cache.lookup(tokens).blocks
        ticket = cache.store(tokens, blocks_of(tokens, have, version=self.epoch), have)
        assert ticket.wait(END_S), f"a ticket does not end: {self.plan}"
        end = have + ticket.accepted
        if end:
            self.stored[tuple(tokens.tolist())] = end

    def flush(self, cache: TieredKVCache) -> bool:
        there = {tokens: cache.lookup(np.array(tokens)).blocks for tokens in self.stored}
        began = time.monotonic()
        done = cache.flush(END_S, to="nvme")
        assert time.monotonic() - began < END_S, f"a flush does not end: {self.plan}"
        if done:
            self._acknowledge(there)
        return done

    def load(self, cache: TieredKVCache, tokens: Any, into_out: bool = False) -> int:
        match = cache.lookup(tokens)
        out = np.full((match.blocks, *LAYOUT.block_shape), 7.0, np.float32) if into_out and match.blocks else None
        with cache.load(match, out).result(END_S) as loaded:
            assert loaded.block_count <= match.blocks
            got = bits(loaded.blocks if out is None else out[: loaded.block_count])
            assert got == bits(blocks_of(tokens, version=self.epoch)[: loaded.block_count]), f"wrong bytes: {self.plan}"
            return loaded.block_count

    def close(self, cache: TieredKVCache) -> None:
        there = {tokens: cache.lookup(np.array(tokens)).blocks for tokens in self.stored}
        began = time.monotonic()
        if cache.close(END_S):
            self._acknowledge(there)
        assert time.monotonic() - began < END_S, f"close does not end: {self.plan}"
        assert directory._owned <= self.owned

    # -- the lives ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Both lives with the fault, both without; everything asserted."""
        before = open_now()
        with planted(self.plan, self.path):
            seams = Seams(file_ops=FaultyFiles(self.plan))
            self._first_life(self.open(seams))
            self._second_life(self.open(seams))
        self._nothing_left(before)
        self._third_life(self.open())
        self._nothing_left(before)
        self._fourth_life(self.open())
        self._nothing_left(before)

    def _first_life(self, cache: TieredKVCache) -> None:
        for tokens in (A, B):
            self.store(cache, tokens)
        self.flush(cache)
        for tokens in MORE:
            self.store(cache, tokens)
            cache.flush(END_S)
        self.flush(cache)
        held = cache.load(cache.lookup(B)).result(END_S)
        self.load(cache, A, into_out=True)
        self.load(cache, A)
        cache.prefetch(cache.lookup(MORE[0])).result(END_S)
        self.store(cache, C)
        held.release()
        self._check(cache)
        dropped = cache.invalidate(MORE[1][:BLOCK_TOKENS], timeout=END_S)
        assert dropped in (0, 1, 2)
        assert cache.lookup(MORE[1]).blocks == 0
        self._forget(MORE[1])
        cache.bump_epoch("second", timeout=END_S)
        self.epoch = 1
        self.stored.clear()
        self.acked.clear()
        assert cache.lookup(A).blocks == 0
        for tokens in (A, C, *MORE):
            self.store(cache, tokens)
            cache.flush(END_S)
        self.flush(cache)
        self.load(cache, MORE[0])
        self._check(cache)
        self.close(cache)

    def _second_life(self, cache: TieredKVCache) -> None:
        for tokens in (A, C, *MORE[:3]):
            self.load(cache, tokens, into_out=tokens is C)
        self._acked_is_there(cache)
        self.store(cache, LATE[0])
        self.flush(cache)
        self._check(cache)
        self.close(cache)

    def _third_life(self, cache: TieredKVCache) -> None:
        """Without faults: what was acknowledged is there, what was hit heals, and everything works."""
        self._acked_is_there(cache)
        for tokens in (A, C, *MORE, *LATE):
            for _ in range(4):  # a store may be cut for want of room, which is being made then
                self.store(cache, tokens)
                cache.flush(END_S)
            assert self.load(cache, tokens, into_out=True) == len(tokens) // BLOCK_TOKENS, f"not healed: {self.plan}"
        assert self.flush(cache), f"a clean flush fails: {self.plan}"
        assert is_clean(cache)
        self.close(cache)

    def _fourth_life(self, cache: TieredKVCache) -> None:
        for tokens in (A, C, *MORE, *LATE):
            assert self.load(cache, tokens, into_out=True) == len(tokens) // BLOCK_TOKENS, (
                f"lost after a clean close: {self.plan}"
            )
        assert is_clean(cache)
        self.close(cache)

    def _acknowledge(self, there: dict[tuple[int, ...], int]) -> None:
        for tokens, blocks in there.items():
            self.acked[tokens] = max(blocks, self.acked.get(tokens, 0))

    # -- what must hold -----------------------------------------------------------------------------------------------

    def _forget(self, tokens: Any) -> None:
        self.stored.pop(tuple(tokens.tolist()), None)
        self.acked.pop(tuple(tokens.tolist()), None)

    def _acked_is_there(self, cache: TieredKVCache) -> None:
        lost = []
        for key, blocks in self.acked.items():
            tokens = np.array(key, dtype=np.int32)
            got = self.load(cache, tokens, into_out=True)  # needs no room above
            if got < blocks:  # the fault may have hit this very load
                got = self.load(cache, tokens, into_out=True)
            if got < blocks:
                lost.append((key, got, blocks))
        hit = self.plan.fired and (self.plan.kind in READING or self.plan.effect == "wrong")
        assert len(lost) <= bool(hit) * 2, f"acknowledged and lost: {lost}, {self.plan}, {self.refused}"

    def _check(self, cache: TieredKVCache) -> None:
        """Quiet and clean, while the cache is in use."""
        self.flush(cache)
        assert is_clean(cache), self.plan
        link, mover = cache._link, cache.stack.mover
        for lock in (link.lock, cache._building, mover._lock, cache.stack.catalog._lock):
            assert eventually(lambda lock=lock: not lock.locked()), f"a lock is held: {self.plan}"
        assert not mover._live or eventually(lambda: not mover._live), self.plan
        credits = cache.stack.planner.state.credits
        assert all(c.jobs == c.inbound == c.outbound == c.held == c.delayed == c.lost_jobs == 0 for c in credits)

    def _nothing_left(self, before: Counter[str]) -> None:
        assert eventually(lambda: not left_since(before), 5.0), (left_since(before), self.plan)
