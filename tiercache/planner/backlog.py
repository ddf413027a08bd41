"""Backlog: blocks that wait to be written to the last level, in order, each at most once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercache.types import LevelSpec, Slots

__all__ = ["Backlog"]

_PASSED_OVER = 8
"""Entries that one run leaves for later before it stops; bounds its cost."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    number: int
    level: int
    slots: Slots


class Backlog:
    """Slots by level, oldest first. Bounded: a slot that is queued is not queued again, so by the slots there are.

    A slot may get another block while it waits; then that one is written.
    """

    def __init__(self, specs: Sequence[LevelSpec]) -> None:
        self._entries: deque[_Entry] = deque()
        self._queued: list[NDArray[np.bool_]] = [np.zeros(spec.capacity, dtype=np.bool_) for spec in specs]
        self.added = 0
        """Entries ever added: a mark for `is_over`."""

    def __len__(self) -> int:
        return len(self._entries)

    def is_over(self, mark: int) -> bool:
        """Was all that was here when `added` was `mark` written or given up?"""
        return not self._entries or self._entries[0].number >= mark

    def add(self, level: int, slots: Slots) -> None:
        """Queue these slots, but for those that are queued."""
        slots = slots[~self._queued[level][slots]]
        if len(slots):
            self._queued[level][slots] = True
            self._entries.append(_Entry(self.added, level, slots))
            self.added += 1

    def clear(self) -> None:
        """Give up all."""
        self._entries.clear()
        for queued in self._queued:
            queued[:] = False

    def run(self, write: Callable[[int, Slots], tuple[bool, Slots]]) -> None:
        """Call `write(level, slots)` for entries in order. It returns whether it is of use to go on, and the slots
        that must wait, which keep their place."""
        waiting: list[_Entry] = []
        go_on = True
        while self._entries and go_on and len(waiting) < _PASSED_OVER:
            entry = self._entries.popleft()
            go_on, rest = write(entry.level, entry.slots)
            self._queued[entry.level][entry.slots] = False
            if len(rest):
                self._queued[entry.level][rest] = True
                waiting.append(_Entry(entry.number, entry.level, rest))
        self._entries.extendleft(reversed(waiting))
