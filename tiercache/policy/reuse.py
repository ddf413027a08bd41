"""Reuse: recency plus what is learnt of each class of blocks, the default policy.

A block's key is its last use plus `STRENGTH * gap * ln p`: p is the share of the blocks of its class that are used
again, gap the mean time between two uses. A block of a class of which half comes back so leaves as if it had been used
1.4 gaps earlier. As long as nothing is learnt all classes are alike, and this is leaf-first LRU exactly.

The class of a use: how many new blocks the request brought (powers of two), how often the block was used before (0, 1,
more), and whether it is a partial tail. A use is "again" when it comes before WINDOW times the capacity has passed
through the first level, whether or not the block was still there: what left is remembered as long (ghosts). p has a
prior of PRIOR observations at the mean of all classes, and old observations fade, so that it follows the load.

A persistent level has the same order with a longer window, WINDOW_BELOW times its own capacity. What is worth a write
there is judged by a third: the capacity itself, for as long it holds what is not used.

Everything is counted by runs of blocks. The uses of one instant are one `_Instant`, and blocks know theirs by their
`last_use`; along a path `last_use` never rises, so the two ends of a stretch tell whether all of it is of one instant.

Per-block reference, measured on real traces: see docs/policy.md.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import first_false, true_at
from tiercache.index import Node
from tiercache.policy.base import MARK, Stretches
from tiercache.types import Idents, Uses

__all__ = ["Reuse"]

STRENGTH = 2.0
WINDOW = 4
"""Capacities of the first level; after that a block that was not used again counts as one that never is."""
WINDOW_BELOW = 2
"""The same for a persistent level, in its capacities; also measured by what passes through the first."""
PRIOR = 30.0
FADE = 0.995
"""Of all observations, every FADE_EVERY requests."""
FADE_EVERY = 50
GAP_FADE = 0.9999
"""Of the gaps, per block."""
LONGEST_GAP = 8.0
"""A gap counts at most as this many mean ones: a quiet night says nothing of how soon blocks are used again."""
_SIZES, _USES = 8, 3
_CLASSES = _SIZES * _USES * 2
_FEWEST_INSTANTS, _MOST_INSTANTS = 1 << 10, 1 << 16
"""As many as the first window has blocks are remembered in each window, within these bounds, however little passes
through the level."""


@dataclass(slots=True, eq=False)
class _Instant:
    """All blocks whose last use was at one time."""

    time: float
    taken: int
    """Slots given out until then, those of its own request too where that stored before it was noted."""
    over: int = 0
    """How many windows are over for it."""
    waiting: Counter[int] = field(default_factory=Counter)
    """Per class, blocks of which it is not known yet whether they are used again."""
    ghosts: list[int] = field(default_factory=list)
    """First idents of stretches that left the tree since."""


@dataclass(slots=True, eq=False)
class _Ghost:
    """A stretch of blocks that left the tree."""

    idents: Idents
    uses: Uses
    kinds: bytes
    instant: _Instant


class _Window:
    """What is used again before so much has passed through the first level: per class how many blocks were observed and
    how many of them were used again, and the mean time between two uses."""

    def __init__(self, length: int = 0) -> None:
        self.length = length
        """Slots of the first level given out."""
        self.instants: deque[_Instant] = deque()
        """Those for which this is the first window that is not over, oldest first."""
        self.seen = [0.0] * _CLASSES
        self.again = [0.0] * _CLASSES
        self.observed = 0.0
        """Blocks, of all classes; never fades."""
        self.gap_sum = self.gap_count = 0.0
        self.gap = 0.0
        """Mean seconds between two uses, as of the beginning of this request; 0 while too few are known."""
        self._mean = 0.5

    def count(self, counts: Iterable[tuple[int, int]], again: bool) -> None:
        """So many blocks of each class were used again, or were not. A negative number (a clock that stands still joins
        what should be apart) counts as none."""
        for kind, signed in counts:
            count = max(0, signed)
            self.seen[kind] += count
            self.observed += count
            if again:
                self.again[kind] += count

    def count_gap(self, seconds: float, n: int) -> None:
        """n blocks were used again after that time."""
        gap = min(seconds, LONGEST_GAP * self.gap or math.inf)
        if gap > 0:
            faded = GAP_FADE**n
            self.gap_sum = self.gap_sum * faded + gap * (1 - faded) / (1 - GAP_FADE)
            self.gap_count = self.gap_count * faded + (1 - faded) / (1 - GAP_FADE)

    def fade(self) -> None:
        """Old observations count less."""
        self.seen = [each * FADE for each in self.seen]
        self.again = [each * FADE for each in self.again]
        self._mean = (sum(self.again) + 1) / (sum(self.seen) + 2)

    def of(self, kind: int) -> float:
        """The share that is used again; the mean of all classes counts as PRIOR observations."""
        return (self.again[kind] + PRIOR * self._mean) / (self.seen[kind] + PRIOR)

    def bonus(self, kind: int) -> float:
        """Seconds."""
        return STRENGTH * self.gap * math.log(self.of(kind))


class Reuse:
    """See the module."""

    name = "reuse"

    def __init__(self) -> None:
        self._soon = self._held = self._below = _Window()
        """Of the first level; while a persistent level holds what is not used; of that level's order."""
        self._windows = [self._soon]
        """Those that differ, shortest first."""
        self._most = 0
        self._requests = 0
        self._instants: dict[float, _Instant] = {}
        self._ghosts: dict[int, _Ghost] = {}
        """By the ident of their first block."""
        self._now = _Instant(-math.inf, 0)
        self._size = 0
        self._bonuses: dict[int, tuple[float, float]] = {}
        """Of this request, by class: in memory, on a persistent level."""

    def open(self, capacity: int, below: int) -> None:
        """See Policy."""
        first = WINDOW * capacity
        windows = {length: _Window(length) for length in (first, max(first, below), max(first, WINDOW_BELOW * below))}
        self._windows = list(windows.values())
        self._soon, self._below = self._windows[0], self._windows[-1]
        self._held = windows[max(first, below)]
        self._most = min(_MOST_INSTANTS, max(_FEWEST_INSTANTS, first))

    def clear(self) -> None:
        """See Policy."""
        self._instants.clear()
        self._ghosts.clear()
        for window in self._windows:
            window.instants.clear()

    # -- a request --------------------------------------------------------------------------------------------------

    def begin(self, now: float, new: int, taken: int, goes_on: bool) -> None:
        """See Policy."""
        self._expire(taken)
        self._requests += not goes_on
        if not goes_on and self._requests % FADE_EVERY == 0:
            for window in self._windows:
                window.fade()
        for window in self._windows:
            window.gap = window.gap_sum / window.gap_count if window.gap_count >= PRIOR else 0.0
        self._size = min(_SIZES - 1, new.bit_length())
        self._bonuses.clear()
        instant = self._instants.get(now)
        if instant is None:
            instant = self._instants[now] = _Instant(now, taken)
            self._soon.instants.append(instant)
        self._now = instant

    def _expire(self, taken: int) -> None:
        """Count what was not used again in a window that is over for it, and let it pass into the next, or be
        forgotten."""
        for i, window in enumerate(self._windows):
            waiting, oldest = window.instants, taken - window.length
            while waiting and (waiting[0].taken < oldest or len(waiting) > self._most):
                instant = waiting.popleft()
                instant.over = i + 1
                window.count(instant.waiting.items(), again=False)
                if instant.over < len(self._windows):
                    self._windows[instant.over].instants.append(instant)
                else:
                    self._forget(instant)

    def _forget(self, instant: _Instant) -> None:
        del self._instants[instant.time]
        for ident in instant.ghosts:
            ghost = self._ghosts.get(ident)
            if ghost is not None and ghost.instant is instant:
                del self._ghosts[ident]

    def place(self, stretches: Stretches) -> None:
        """See Policy."""
        for node, begin, end in stretches:
            at = begin
            while at < end:
                ghost = self._ghosts.pop(node.idents.item(at), None)
                if ghost is None:
                    return  # nor is anything below it remembered: it left earlier
                limit = min(end - at, len(ghost.idents))
                same = first_false(node.idents[at : at + limit] == ghost.idents[:limit])
                self._came_back(ghost.instant, ghost.kinds[:same])
                node.uses[at : at + same] = ghost.uses[:same]
                at += same
                if same < len(ghost.idents):  # the rest is on another branch, or did not come along
                    self._remember(_Ghost(ghost.idents[same:], ghost.uses[same:], ghost.kinds[same:], ghost.instant))

    def again(self, stretches: Stretches) -> None:
        """See Policy."""
        before: _Instant | None = None
        kinds: list[bytes] = []
        for node, begin, end in stretches:
            if node.marks is None:
                continue
            for first, last, instant in self._stretches(node, begin, end):
                if instant is not before:  # one whole path mostly has one instant
                    self._came_back(before, b"".join(kinds))
                    before, kinds = instant, []
                kinds.append(node.marks["kind"][first:last].tobytes())
        self._came_back(before, b"".join(kinds))

    def mark(self, stretches: Stretches) -> None:
        """See Policy."""
        for node, begin, end in stretches:
            if node.marks is None:
                node.marks = np.zeros(node.n, dtype=MARK)
            tail = end - 1 if node.partial and end == node.n else end
            for first, last in _alike(node.uses, begin, tail):
                self._mark(node.marks, first, last, self._kind(node.uses.item(first), 0))
            if tail < end:
                self._mark(node.marks, tail, end, self._kind(node.uses.item(tail), 1))

    def _kind(self, uses: int, partial: int) -> int:
        """Class of a block that was used so often before this request."""
        return (self._size * _USES + (uses if uses < _USES else _USES - 1)) * 2 + partial

    def _mark(self, marks: NDArray[np.void], begin: int, end: int, kind: int) -> None:
        bonuses = self._bonuses.get(kind)
        if bonuses is None:
            bonuses = self._bonuses[kind] = (self._soon.bonus(kind), self._below.bonus(kind))
        marks[begin:end] = (*bonuses, kind)
        self._now.waiting[kind] += end - begin

    def worth(self, node: Node, at: int) -> float:
        """See Policy."""
        if node.marks is None or self._held.observed < PRIOR:
            return 1.0
        return self._held.of(node.marks["kind"].item(at))

    def move(self, stretches: Stretches) -> None:
        """See Policy."""
        for node, begin, end in stretches:
            if node.marks is None:
                node.marks = np.zeros(node.n, dtype=MARK)
            for first, last, instant in self._stretches(node, begin, end):
                for kind, count in _counts(node.marks["kind"][first:last].tobytes()):
                    if instant is not None:  # else it was given up meanwhile, and waits once more
                        instant.waiting[kind] -= count
                    self._now.waiting[kind] += count

    def leave(self, node: Node, begin: int, end: int) -> None:
        """See Policy."""
        if node.marks is None:
            return
        for first, last, instant in self._stretches(node, begin, end):
            if instant is not None:
                kinds = node.marks["kind"][first:last].tobytes()
                self._remember(_Ghost(node.idents[first:last].copy(), node.uses[first:last].copy(), kinds, instant))

    # -- counting ---------------------------------------------------------------------------------------------------

    def _remember(self, ghost: _Ghost) -> None:
        first = ghost.idents.item(0)
        self._ghosts[first] = ghost
        ghost.instant.ghosts.append(first)

    def _stretches(self, node: Node, begin: int, end: int) -> list[tuple[int, int, _Instant | None]]:
        """Bounds of the stretches last used at one instant, and that instant (None: forgotten)."""
        times = node.last_use
        return [(a, b, self._instants.get(times.item(a))) for a, b in _alike(times, begin, end)]

    def _came_back(self, instant: _Instant | None, kinds: bytes) -> None:
        """Blocks last used then are used now; those of the same instant are one use."""
        if instant is None:
            return
        counts = _counts(kinds)
        for kind, count in counts:
            instant.waiting[kind] -= count
        if instant is self._now:
            return
        for window in self._windows[instant.over :]:
            window.count(counts, again=True)
            window.count_gap(self._now.time - instant.time, len(kinds))


def _alike(values: NDArray[np.generic], begin: int, end: int) -> list[tuple[int, int]]:
    """Bounds of the stretches of one value within `[begin, end)`, where values never rise."""
    if begin == end or values.item(begin) == values.item(end - 1):
        return [(begin, end)] * (begin < end)
    values = values[begin:end]
    cuts = (true_at(values[1:] != values[:-1]) + begin + 1).tolist()
    return list(itertools.pairwise([begin, *cuts, end]))


def _counts(kinds: bytes) -> list[tuple[int, int]]:
    """How often each class occurs."""
    found = []
    while kinds:
        kind, n = kinds[0], len(kinds)
        kinds = kinds.replace(kinds[:1], b"")
        found.append((kind, n - len(kinds)))
    return found
