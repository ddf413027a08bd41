"""Evicting one block must not depend on how many are resident."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from bench.fill import BLOCK_TOKENS, PlannerRig
from bench.pairs import Pairs
from bench.rows import row
from bench.scale import Scale
from tiercache.keys import Prompt, encode_prompt

_FEWEST = 10_000
_AT_A_TIME = 64
"""Blocks evicted one by one in one timing."""
_RUN = 16


class FullLevel:
    """A planner whose one level is full of runs of 16 blocks."""

    def __init__(self, resident: int) -> None:
        self.rig = PlannerRig(resident, block_nbytes=4096)
        self._next = 0
        while self.table.free:
            self.add(min(_RUN, self.table.free))

    @property
    def table(self):
        """Slots of the level."""
        return self.rig.planner.state.residency.tables[0]

    def prompt(self, blocks: int) -> Prompt:
        """A prompt that was never there."""
        self._next += 1
        ids = np.full(blocks * BLOCK_TOKENS, self._next, dtype=np.int32)
        return encode_prompt(ids, BLOCK_TOKENS)

    def add(self, blocks: int) -> None:
        """Store a new prompt."""
        assert self.rig.store(self.prompt(blocks)) == blocks

    def refill(self) -> None:
        """Store runs until the level is full."""
        while self.table.free:
            self.add(min(_RUN, self.table.free))

    def evict(self, count: int) -> int:
        """Evict blocks one by one; how many went."""
        room, table = self.rig.planner.room, self.table
        before = table.free
        for _ in range(count):
            room.free(0, table.free + 1)
        return table.free - before

    def store(self, prompts: list[Prompt]) -> int:
        """Store prompts of one block, each of which evicts one; how many were taken."""
        return sum(self.rig.store(each) for each in prompts)


@pytest.fixture(scope="module")
def few(scale: Scale) -> FullLevel:
    return FullLevel(scale.pick(_FEWEST, _FEWEST, 2_000))


@pytest.fixture(scope="module", params=[100_000, 1_000_000])
def many(request: pytest.FixtureRequest, scale: Scale) -> tuple[FullLevel, int]:
    resident = request.param
    return FullLevel(scale.pick(resident, min(resident, 300_000), 4_000)), resident


@pytest.mark.parametrize("kind", ["evict", "store"])
def test_eviction(kind: str, few: FullLevel, many: tuple[FullLevel, int], pairs: Pairs, scale: Scale) -> None:
    level, resident = many

    def run(one: FullLevel, prompts: list[Prompt]) -> int:
        return one.evict(_AT_A_TIME) if kind == "evict" else one.store(prompts)

    def check(done: int) -> None:
        assert done == _AT_A_TIME

    def refill() -> None:
        for each in (few, level):
            if kind == "evict":
                each.refill()
            assert each.table.free == 0

    pairs.run(
        row(f"eviction/{kind}/{resident}"),
        partial(run, level),
        {"10,000 resident": partial(run, few)},
        fresh=lambda: [level.prompt(1) for _ in range(_AT_A_TIME)],
        check=check,
        after=refill,
        pairs=scale.pick(25, 15, 2),
        warmup=2,
        resident=level.table.capacity,
        blocks_per_timing=_AT_A_TIME,
    )
