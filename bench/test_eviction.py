"""Evicting one block must not depend on how many are resident."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest

from bench.fill import BLOCK_TOKENS, PlannerRig
from bench.pairs import Pairs
from bench.rows import Row, row
from bench.scale import Scale
from tiercache.keys import Prompt, encode_prompt

_FEWEST = 10_000
_AT_A_TIME = 64
"""Blocks evicted one by one in one timing."""
_RUN = 16
_IDS = itertools.count()


class FullLevel:
    """A planner whose first level is full of runs of 16 blocks; `below`: slots of an NVMe level under it."""

    def __init__(self, resident: int, below: int | None = None) -> None:
        self.rig = PlannerRig(resident, below, block_nbytes=4096)
        self.refill()

    @property
    def table(self):
        """Slots of the level."""
        return self.rig.planner.state.residency.tables[0]

    def prompt(self, blocks: int) -> Prompt:
        """A prompt that was never in any level."""
        ids = np.full(blocks * BLOCK_TOKENS, next(_IDS), dtype=np.int32)
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
    measure(row(f"eviction/{kind}/{many[1]}"), few, many[0], pairs, scale)


def test_eviction_over_nvme(pairs: Pairs, scale: Scale) -> None:
    few, many = scale.pick((_FEWEST, 100_000), (_FEWEST, 50_000), (2_000, 4_000))
    levels = [FullLevel(resident, 6 * resident) for resident in (few, many)]
    measure(row("eviction/tiered/100000"), *levels, pairs, scale)


def measure(what: Row, few: FullLevel, many: FullLevel, pairs: Pairs, scale: Scale) -> None:
    """The same number of blocks through two full levels."""
    only_evict = what.id.startswith("eviction/evict/")

    def run(level: FullLevel, prompts: list[Prompt]) -> None:
        assert (level.evict(_AT_A_TIME) if only_evict else level.store(prompts)) == _AT_A_TIME

    def refill() -> None:
        if only_evict:
            few.refill()
            many.refill()

    pairs.run(
        what,
        partial(run, many),
        {"10,000 resident": partial(run, few)},
        fresh=lambda: [many.prompt(1) for _ in range(_AT_A_TIME)],
        after=refill,
        pairs=scale.pick(25, 15, 2),
        warmup=2,
        resident=many.table.capacity,
        blocks_per_timing=_AT_A_TIME,
    )
