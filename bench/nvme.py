"""A directory that is read as a whole, and one that is written as a whole, again and again."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np

from bench.fill import BLOCK_TOKENS, random_ids
from bench.payload import Payload
from bench.store_dir import Tree, build, open_store
from tiercache import Loaded, Match, TieredKVCache
from tiercache.tiers.nvme import NVMeTier, slots_file

__all__ = ["Reader", "Writer"]

_WAIT_S = 120.0
_LITTLE_DRAM_BLOCKS = 4
"""For a read: next to nothing comes from there."""
_STORED_NBYTES = 256 << 20
"""Stored in one call before a durable write."""


class Reader:
    """A directory with one long prompt, its blocks in shuffled slots, and rows to load it into."""

    def __init__(self, path: Path, payload: Payload, total_nbytes: int) -> None:
        self.path, self.payload, self.total_nbytes = path, payload, total_nbytes
        tree = Tree(1, total_nbytes // payload.block_nbytes)
        self.blocks, self.ids = tree.blocks, tree.prompt(0)
        slots = np.random.default_rng(0).permutation(self.blocks).astype(np.int32)
        build(path, tree, payload, slots)
        self.out = np.ones((self.blocks, payload.block_nbytes), np.uint8)

    @property
    def file(self) -> Path:
        """The payload file: what fio reads, too."""
        return self.path / slots_file(0)

    def open(self, depth: int) -> TieredKVCache:
        """A cache that reads with so many threads."""
        cache = open_store(
            self.path, self.blocks, self.payload, _LITTLE_DRAM_BLOCKS * self.payload.block_nbytes, threads=depth
        )
        assert cache.stack is not None
        tier = cache.stack.tiers[-1]
        assert isinstance(tier, NVMeTier) and tier.direct, "O_DIRECT does not work at --bench-dir: take another disk"
        return cache

    def match(self, cache: TieredKVCache) -> Match:
        """The prompt, which is on NVMe but for a little that the last load left in DRAM."""
        found = cache.lookup(self.ids)
        assert found.blocks == self.blocks and found.by_tier["dram"] <= _LITTLE_DRAM_BLOCKS, found
        return found

    def load(self, cache: TieredKVCache, match: Match) -> Loaded:
        """The work: everything into the rows."""
        return cache.load(match, out=self.out).result(_WAIT_S)

    def check(self, loaded: Loaded) -> None:
        """Every byte; then the rows are spoilt."""
        assert loaded.block_count == self.blocks
        self.payload.check(self.out)
        self.out[:, ::BLOCK_TOKENS] ^= 255


class Writer:
    """A cache whose DRAM takes everything, and whose NVMe is written whole, again and again."""

    def __init__(self, path: Path, payload: Payload, total_nbytes: int, **options: object) -> None:
        self.payload, self.blocks = payload, total_nbytes // payload.block_nbytes
        self.path, self._options = path, options
        self._rows = payload.rows(min(self.blocks, _STORED_NBYTES // payload.block_nbytes))
        dram = total_nbytes + 3 * self._rows.nbytes  # a quarter of it may be in flight
        self.cache = open_store(path, self.blocks, payload, dram, **options)
        self._rng, self._rounds = np.random.default_rng(1), itertools.count(1)
        self.round = 0
        self.commits = 1
        """Of the last flush: each synced the data."""

    def fill(self) -> None:
        """A new prompt in DRAM; nothing else anywhere."""
        self.cache.invalidate([], timeout=_WAIT_S)
        self.round = next(self._rounds)
        self.ids = random_ids(self._rng, self.blocks)
        for begin in range(0, self.blocks, len(self._rows)):
            rows = self._rows[: self.blocks - begin]
            self.payload.stamp(rows, self.round, begin)
            ticket = self.cache.store(self.ids[: (begin + len(rows)) * BLOCK_TOKENS], rows, start=begin)
            assert ticket.wait(_WAIT_S) and ticket.stored == len(rows), ticket
        assert self.cache.stats().tiers[-1].held == 0, "something was written before the clock ran"

    def flush(self, _: object) -> bool:
        """The work: all of it on NVMe, synced and claimed."""
        before = self.cache.stats().mover["commits"]
        flushed = self.cache.flush(_WAIT_S, to="nvme")
        self.commits = max(1, self.cache.stats().mover["commits"] - before)
        return flushed

    def check(self, flushed: bool) -> None:
        """Nothing is left to write."""
        assert flushed and self.cache.stats().tiers[-1].held == self.blocks

    def close_and_check(self) -> None:
        """Every byte of the last round, after a restart."""
        assert self.cache.close()
        with open_store(
            self.path, self.blocks, self.payload, _LITTLE_DRAM_BLOCKS * self.payload.block_nbytes, **self._options
        ) as cache:
            out = np.ones((self.blocks, self.payload.block_nbytes), np.uint8)
            assert cache.load(cache.lookup(self.ids), out=out).result(_WAIT_S).block_count == self.blocks
        self.payload.check(out, self.round)
