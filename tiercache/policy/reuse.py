"""Reuse: recency plus what is learnt of each class of blocks, the default policy.

A block's key is its last use plus `STRENGTH * gap * ln p`: p is the share of the blocks of its class that are used
again, gap the mean time between two uses. A block of a class of which half comes back so leaves as if it had been used
1.4 gaps earlier. As long as nothing is learnt all classes are alike, and this is leaf-first LRU exactly.

The class of a use: how many new blocks the request brought (powers of two), how often the block was used before (0, 1,
more), and whether it is a partial tail. A use is "again" when it comes before WINDOW times the capacity has passed
through the first level, whether or not the block was still there: what left is remembered as long (ghosts). p has a
prior of PRIOR observations at the mean of all classes, and old observations fade, so that it follows the load.

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
"""As many as the window has blocks are remembered, within these bounds, however little passes through the level."""


@dataclass(slots=True, eq=False)
class _Instant:
    """All blocks whose last use was at one time."""

    time: float
    taken: int
    """Slots given out until then, those of its own request too where that stored before it was noted."""
    late: bool = False
    """The window is over for it, and only a persistent level would still hold its blocks."""
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


class _Shares:
    """Per class, how many blocks were observed, and how many of them were used again."""

    def __init__(self) -> None:
        self.seen = [0.0] * _CLASSES
        self.again = [0.0] * _CLASSES
        self.observed = 0.0
        """Blocks, of all classes; never fades."""
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

    def fade(self) -> None:
        """Old observations count less."""
        self.seen = [each * FADE for each in self.seen]
        self.again = [each * FADE for each in self.again]
        self._mean = (sum(self.again) + 1) / (sum(self.seen) + 2)

    def of(self, kind: int) -> float:
        """The share that is used again; the mean of all classes counts as PRIOR observations."""
        return (self.again[kind] + PRIOR * self._mean) / (self.seen[kind] + PRIOR)


class Reuse:
    """See the module."""

    name = "reuse"

    def __init__(self) -> None:
        self._window = self._horizon = self._most = 0
        self._soon, self._ever = _Shares(), _Shares()
        """Used again within the window; before a persistent level would have let go of it."""
        self._gap_sum = self._gap_count = 0.0
        self._gap = 0.0
        """Mean seconds between two uses, as of the beginning of this request; 0 while too few are known."""
        self._requests = 0
        self._instants: dict[float, _Instant] = {}
        self._order: deque[_Instant] = deque()
        self._late: deque[_Instant] = deque()
        self._ghosts: dict[int, _Ghost] = {}
        """By the ident of their first block."""
        self._now = _Instant(-math.inf, 0)
        self._size = 0
        self._bonuses: dict[int, float] = {}
        """Of this request, by class."""

    def open(self, capacity: int, below: int) -> None:
        """See Policy."""
        self._window = WINDOW * capacity
        self._horizon = max(self._window, below)
        self._most = min(_MOST_INSTANTS, max(_FEWEST_INSTANTS, self._window))

    def clear(self) -> None:
        """See Policy."""
        self._instants.clear()
        self._order.clear()
        self._late.clear()
        self._ghosts.clear()

    # -- a request --------------------------------------------------------------------------------------------------

    def begin(self, now: float, new: int, taken: int, goes_on: bool) -> None:
        """See Policy."""
        self._expire(taken)
        self._requests += not goes_on
        if not goes_on and self._requests % FADE_EVERY == 0:
            self._soon.fade()
            self._ever.fade()
        self._size = min(_SIZES - 1, new.bit_length())
        self._gap = self._gap_sum / self._gap_count if self._gap_count >= PRIOR else 0.0
        self._bonuses.clear()
        instant = self._instants.get(now)
        if instant is None:
            instant = self._instants[now] = _Instant(now, taken)
            self._order.append(instant)
        self._now = instant

    def _expire(self, taken: int) -> None:
        """Count what was not used again: when its window is over, and when a persistent level would let go of it."""
        order, late = self._order, self._late
        while order and (order[0].taken < taken - self._window or len(order) > self._most):
            instant = order.popleft()
            instant.late = True
            late.append(instant)
            self._soon.count(instant.waiting.items(), again=False)
        while late and (late[0].taken < taken - self._horizon or len(late) > self._most):
            instant = late.popleft()
            self._ever.count(instant.waiting.items(), again=False)
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
        bonus = self._bonuses.get(kind)
        if bonus is None:
            bonus = self._bonuses[kind] = self._bonus(kind)
        marks["kind"][begin:end] = kind
        marks["bonus"][begin:end] = bonus
        self._now.waiting[kind] += end - begin

    def _bonus(self, kind: int) -> float:
        return STRENGTH * self._gap * math.log(self._soon.of(kind))

    def worth(self, node: Node, at: int) -> float:
        """See Policy."""
        if node.marks is None or self._ever.observed < PRIOR:
            return 1.0
        return self._ever.of(node.marks["kind"].item(at))

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
        self._ever.count(counts, again=True)
        if instant.late:
            return
        self._soon.count(counts, again=True)
        gap, n = min(self._now.time - instant.time, LONGEST_GAP * self._gap or math.inf), len(kinds)
        if gap > 0:
            faded = GAP_FADE**n
            self._gap_sum = self._gap_sum * faded + gap * (1 - faded) / (1 - GAP_FADE)
            self._gap_count = self._gap_count * faded + (1 - faded) / (1 - GAP_FADE)


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
