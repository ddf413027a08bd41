"""Pins: blocks that callers hold where they are, until they let go or for a time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np

from tiercache.index import Path
from tiercache.planner.state import PlannerState
from tiercache.types import Slots

__all__ = ["Pins"]

Held = Sequence[tuple[int, Slots]]


class Pins:
    """Takes and ends explicit pins; `PlannerState.pinned` lists the open ones."""

    def __init__(self, state: PlannerState) -> None:
        self.state = state
        self._ends: list[tuple[float, int, Held]] = []
        """A heap of the pins that end by themselves: when, a number, what `end` takes."""
        self._numbers = itertools.count()

    def take(self, path: Path, until: float) -> list[tuple[int, Slots]]:
        """Hold the readable blocks of a path, within bounds; returns (level, slots) for `end`."""
        state, residency = self.state, self.state.residency
        gathered = residency.index.gather(path)
        best = residency.best_level(residency.states(gathered), state.online_levels())
        held = []
        for level in range(residency.levels):
            slots = gathered[level, best == level].astype(np.int32)
            slots = slots[: state.may_hold(level, slots)]
            if len(slots):
                state.hold(level, slots)
                held.append((level, slots))
        state.pinned.extend(held)
        if held and until < np.inf:
            heapq.heappush(self._ends, (until, next(self._numbers), held))
        return held

    def end(self, held: Held) -> None:
        """Let go. A second time does nothing."""
        state, mine = self.state, {id(slots) for _, slots in held}
        ended = [each for each in state.pinned if id(each[1]) in mine]
        state.pinned = [each for each in state.pinned if id(each[1]) not in mine]
        for level, slots in ended:
            state.let_go(level, slots)
        if len(self._ends) > 2 * len(state.pinned) + 8:  # most were ended before their time
            open_pins = {id(slots) for _, slots in state.pinned}
            self._ends = [each for each in self._ends if id(each[2][0][1]) in open_pins]
            heapq.heapify(self._ends)

    def end_due(self) -> None:
        """Let go of the pins whose time is over."""
        while self._ends and self._ends[0][0] <= self.state.now:
            self.end(heapq.heappop(self._ends)[2])
