"""Bytes into and out of DRAM, against one thread's memcpy of the same bytes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest

from bench.fill import BLOCK_TOKENS, Ids, memory_cache, random_ids
from bench.pairs import Pairs
from bench.payload import Payload
from bench.rows import row
from bench.scale import Scale
from tiercache import Loaded, Match, Ticket, TieredKVCache

_WAIT_S = 60.0
_IDLE_S = 0.001
_SIZES = {64 << 10: 2048, 256 << 10: 1024, 1 << 20: 256, 2 << 20: 256}
"""Blocks a call, per size of a block."""
_ROUNDS_HELD = 4
"""The cache holds the blocks of so many calls, so that each timed store evicts and none meets an untouched page."""


class Bench:
    """A full cache, a source whose stamps change each round, and a destination, all touched."""

    def __init__(self, block_nbytes: int, blocks: int, rounds_held: int = _ROUNDS_HELD) -> None:
        self.payload = Payload(block_nbytes)
        self.blocks = blocks
        self.source = self.payload.rows(blocks)
        self.target = np.ones_like(self.source)
        self.cache: TieredKVCache = memory_cache(rounds_held * blocks, block_nbytes)
        self._rng = np.random.default_rng(block_nbytes)
        self._rounds = itertools.count(1)
        self.round = 0
        self.last: Ids
        for _ in range(rounds_held + 1):
            self.next_prompt()
            self.stored(self.store(None))
        self.next_prompt()

    def next_prompt(self) -> None:
        """The source gets the bytes of a new round, under a prompt that was never there."""
        self.round = next(self._rounds)
        self.payload.stamp(self.source, self.round)
        self.last = random_ids(self._rng, self.blocks)

    def store(self, _: object) -> Ticket:
        """Work of a store: until the caller may reuse its blocks."""
        ticket = self.cache.store(self.last, self.source)
        assert ticket.wait(_WAIT_S)
        return ticket

    def stored(self, ticket: Ticket) -> None:
        """Every block arrived, and every byte is in its slot."""
        assert ticket.stored == self.blocks, ticket
        with self.cache.load(self.cache.lookup(self.last)).result(_WAIT_S) as loaded:
            assert loaded.block_count == self.blocks
            begin = 0
            for part in loaded.parts:
                self.payload.check(part, self.round, begin)
                begin += len(part)

    def load(self, match: Match) -> Loaded:
        """Work of a load into the caller's rows."""
        return self.cache.load(match, out=self.target).result(_WAIT_S)

    def loaded(self, loaded: Loaded) -> None:
        """Every byte of the destination is that of the round."""
        assert loaded.block_count == self.blocks
        self.payload.check(self.target, self.round)
        self.target[:, ::BLOCK_TOKENS] = 0

    def copy(self, _: object) -> None:
        """The reference: one memcpy."""
        np.copyto(self.target, self.source)


@pytest.fixture(scope="module", params=list(_SIZES), ids=lambda nbytes: f"{nbytes >> 10}KiB")
def bench(request: pytest.FixtureRequest, scale: Scale) -> Iterator[Bench]:
    blocks = _SIZES[request.param]
    made = Bench(request.param, scale.pick(blocks, min(blocks, 256), 4))
    yield made
    made.cache.close()


def test_store(bench: Bench, pairs: Pairs, scale: Scale) -> None:
    nbytes = bench.payload.block_nbytes
    pairs.run(
        row(f"dram/store/{nbytes}"),
        bench.store,
        {"memcpy": bench.copy},
        check=bench.stored,
        after=bench.next_prompt,
        pairs=scale.pick(15, 9, 2),
        warmup=2,
        blocks=bench.blocks,
    )


def test_load(bench: Bench, pairs: Pairs, scale: Scale) -> None:
    bench.stored(bench.store(None))
    match = bench.cache.lookup(bench.last)
    pairs.run(
        row(f"dram/load/{bench.payload.block_nbytes}"),
        lambda _: bench.load(match),
        {"memcpy": bench.copy},
        check=bench.loaded,
        pairs=scale.pick(15, 9, 2),
        warmup=2,
        blocks=bench.blocks,
    )


@pytest.mark.parametrize("pause", ["busy", "idle"])
@pytest.mark.parametrize("verb", ["store", "load"])
def test_latency(verb: str, pause: str, pairs: Pairs, scale: Scale) -> None:
    bench = Bench(256 << 10, 1, rounds_held=512)
    if verb == "load":
        bench.stored(bench.store(None))
    match = bench.cache.lookup(bench.last)

    def fresh() -> None:
        if pause == "idle":
            time.sleep(_IDLE_S)

    pairs.run(
        row(f"dram/latency/{verb}/{pause}"),
        bench.store if verb == "store" else lambda _: bench.load(match),
        {"memcpy": bench.copy},
        fresh=fresh,
        check=bench.stored if verb == "store" else bench.loaded,
        after=bench.next_prompt if verb == "store" else lambda: None,
        pairs=scale.pick(201, 101, 3),
        warmup=scale.pick(10, 10, 1),
    )
    bench.cache.close()
