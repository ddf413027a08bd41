"""Expiry: which runs of blocks have an end in time, in order. It decides nothing and drops nothing."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from tiercache.index import Node

__all__ = ["Expiry"]


class Expiry:
    """A heap over runs by the first end among their blocks.

    A run that went, or whose end was put off, is found out when its entry's time has come; an entry names its run by
    number, and there is one for each number at most, so that what was dropped long ago holds no memory.
    """

    def __init__(self) -> None:
        self.next = math.inf
        """No block of any run ends before (wall-clock seconds)."""
        self._heap: list[tuple[float, int]] = []
        self._entry: dict[int, float] = {}

    def note(self, node: Node) -> None:
        """Something was said of this run, or it was cut in two, or looked at. O(its blocks)."""
        if node.hints is None:
            return
        first = float(node.hints["expires"].min())
        if first < self._entry.get(node.id, math.inf):
            self._entry[node.id] = first
            heapq.heappush(self._heap, (first, node.id))
            self.next = self._heap[0][0]

    def knows(self, node: Node) -> bool:
        """Is this run looked at by the time its first block ends?"""
        first = math.inf if node.hints is None else float(node.hints["expires"].min())
        return first >= self._entry.get(node.id, math.inf)

    def note_all(self, numbers: list[int], firsts: list[float]) -> None:
        """The runs of these numbers, none of which was noted before, and when the first of their blocks ends."""
        self._entry.update(zip(numbers, firsts, strict=True))
        self._heap.extend(zip(firsts, numbers, strict=True))
        heapq.heapify(self._heap)
        self.next = self._heap[0][0] if self._heap else math.inf

    def due(self, now: float) -> Iterator[int]:
        """Numbers of the runs that may have a block which ended by `now`; each must be noted again, where it is there
        still. Do not note while it runs."""
        while self._heap and self._heap[0][0] <= now:
            time, number = heapq.heappop(self._heap)
            if self._entry.get(number) == time:
                del self._entry[number]
                yield number
        self.next = self._heap[0][0] if self._heap else math.inf

    def clear(self) -> None:
        """The tree is empty."""
        self._heap.clear()
        self._entry.clear()
        self.next = math.inf
