"""Offer: how long a load of what was found would take, how much of it is worth that, and when a level is measured."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import count_levels, counting, true_at
from tiercache.planner.cost import best_offer
from tiercache.planner.state import PlannerState
from tiercache.slots import RESIDENT, WRITING
from tiercache.types import CALLER

__all__ = ["PROBE_NBYTES", "REMEASURE_S", "Offers"]

PROBE_NBYTES = 16 << 20
"""What a probe reads at most; and at most a sixteenth of the level's slots, which it pins meanwhile (one at least)."""
REMEASURE_S = 10.0
"""How old the last measurement of a level is before it is measured anew since blocks of it were withheld. (What is
never offered is never loaded, and one bad minute of a disk would be remembered for ever.)"""


@dataclass(slots=True, eq=False)
class Offers:
    """See the module. Mutates, for a probe: pins, credits, jobs, outbox."""

    state: PlannerState
    measures: bool = False
    """Somebody compares loads with a recompute: levels are measured, each as soon as it holds blocks."""

    def load_s(self, by_level: Sequence[int], states: NDArray[np.uint8], best: NDArray[np.int8]) -> float:
        """Seconds that a load of these leading blocks would take. states, best: of them and maybe more."""
        copied = by_level
        if self.state.credits[0].inbound:
            blocks = sum(by_level)
            copied = count_levels(best[:blocks][states[0, :blocks] != WRITING], len(by_level))
        slowest = 0.0
        for level, count in enumerate(by_level):
            if count and (seconds := self.level_s(level, copied[level])) > slowest:
                slowest = seconds
        return slowest

    def choose(
        self, blocks: int, states: NDArray[np.uint8] | None, best: NDArray[np.int8] | None, block_s: float
    ) -> tuple[int, float]:
        """How many of the leading readable blocks are worth a load, where a block saves so many seconds of prefill; and
        the seconds of that load. states, best: None where all are readable in level 0."""
        self.measures = True
        if states is None or best is None:
            return best_offer([(0, blocks, self.level_s(0, 0), self._each_s(0))], block_s)
        under_way = (states[0, :blocks] == WRITING) & (best[:blocks] != 0)  # a load joins them: they are in the queue
        label = 2 * best[:blocks] + under_way
        bounds = [0, *(true_at(label[1:] != label[:-1]) + 1).tolist(), blocks]
        stretches = []
        for begin, end in itertools.pairwise(bounds):
            level, joined = divmod(int(label[begin]), 2)
            each_s = 0.0 if joined else self._each_s(level)
            stretches.append((level, end - begin, self.level_s(level, 0), each_s))
        return best_offer(stretches, block_s)

    def level_s(self, level: int, blocks: int) -> float:
        """Seconds until a level has copied so many blocks, after all that is ahead of them."""
        state = self.state
        cost, more = state.costs[level], blocks + state.credits[level].queued
        nbytes = state.ahead_nbytes(level) + more * state.residency.specs[level].block_nbytes
        return cost.latency_s + nbytes * cost.s_per_byte

    def _each_s(self, level: int) -> float:
        return self.state.costs[level].s_per_byte * self.state.specs[level].block_nbytes

    # -- probes -------------------------------------------------------------------------------------------------

    def measure_new(self) -> None:
        """Probe the levels that hold blocks and were never measured."""
        if self.measures:
            for level, cost in enumerate(self.state.costs[: len(self.state.specs)]):
                if not cost.jobs and self.state.measured_at[level] < 0:
                    self._probe(level)

    def measure_again(self, withheld: NDArray[np.int8] | None) -> None:
        """Probe the levels from which blocks were withheld (per block its level; None: all of level 0), where the last
        measurement is old."""
        counts = (1,) if withheld is None else count_levels(withheld, len(self.state.specs))
        for level, count in enumerate(counts):
            if count and self.state.now - self.state.measured_at[level] >= REMEASURE_S:
                self._probe(level)

    def _probe(self, level: int) -> None:
        """Have some readable blocks of a level read, if it has any to spare."""
        state, spec = self.state, self.state.specs[level]
        table = state.residency.tables[level]
        if table.free == spec.capacity or not state.online(level) or state.credits[level].jobs >= state.limits.jobs:
            return
        most = min(PROBE_NBYTES // spec.block_nbytes, spec.capacity // 16)
        most = min(max(1, most), state.outbound_room(level))
        slots = true_at(np.asarray(table.state == RESIDENT))[:most].astype(np.int32)
        if len(slots) == 0:
            return
        runs = state.residency.runs_of(level, slots)
        idents = np.concatenate([node.idents[begin:end] for node, begin, end in runs])
        state.submit("probe", (level, slots), (CALLER, counting(0, len(slots))), idents)
        state.measured_at[level] = state.now
        state.totals.probes += 1
