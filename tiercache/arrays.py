"""Short arrays, read without giving the GIL away.

numpy gives the GIL away, at any size, for argmax and argmin, sorts, searches, ranges and counts, and for reads and
writes at positions that are not int64 (slots are int32). Where several threads share a cache, another one takes it
then, in the midst of the planner's lock, and runs into that lock in turn: two switches of threads for each such call.
Slots mostly lie side by side, and masks are mostly all alike: both need none of those calls, and less time.
"""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

from tiercache.types import Bools, Slots

__all__ = [
    "as_index",
    "ascending",
    "count_levels",
    "counting",
    "each_once",
    "first_false",
    "first_true",
    "present",
    "stretches_of",
    "true_at",
]

_LISTED = 64
"""Up to so many numbers a list is compared sooner than an array."""
_NUMBERS = np.arange(1 << 14, dtype=np.int32)
_NUMBERS.flags.writeable = False
_NUMBER_BYTES = _NUMBERS.tobytes()
_NONE = np.empty(0, dtype=np.int64)
_NONE.flags.writeable = False


def as_index(slots: Slots) -> slice | Slots:
    """These slots as an index: a slice where each is one more than the one before it (and none negative).

    Reading through it gives a view then, else a copy: use the value before anything changes what it was read from.
    """
    n = len(slots)
    if n == 0:
        return slice(0, 0)
    first = slots.item(0)
    if first < 0 or slots.item(n - 1) - first != n - 1:
        return slots
    if n <= _LISTED:
        follow = slots.tolist() == list(range(first, first + n))
    elif n <= len(_NUMBERS):  # comparing bytes costs a third of comparing numbers
        follow = (slots - first).tobytes() == _NUMBER_BYTES[: 4 * n]
    else:
        follow = bool((slots[1:] - slots[:-1] == 1).all())
    return slice(first, first + n) if follow else slots


def ascending(slots: Slots) -> Slots:
    """The slots sorted; a copy. At no cost where they lie side by side in either direction."""
    if isinstance(as_index(slots), slice):
        return slots.copy()
    back = slots[::-1]
    return back.copy() if isinstance(as_index(back), slice) else np.sort(slots)


def present(slots: Slots) -> Slots:
    """Those that are slots, without the -1 of blocks that have none; a copy."""
    return slots.copy() if isinstance(as_index(slots), slice) else slots[slots >= 0].astype(np.int32)


def first_true(mask: Bools) -> int:
    """Index of the first True, or the length where there is none."""
    at = mask.tobytes().find(1)
    return len(mask) if at < 0 else at


def first_false(mask: Bools) -> int:
    """Index of the first False, or the length where there is none."""
    at = mask.tobytes().find(0)
    return len(mask) if at < 0 else at


def true_at(mask: Bools) -> NDArray[np.int64]:
    """Indices of True, as `np.flatnonzero`."""
    return np.flatnonzero(mask) if 1 in mask.tobytes() else _NONE


def each_once(numbers: Slots) -> list[int]:
    """The numbers in order, each once, where equal ones lie side by side as the owners of slots do."""
    if len(numbers) > _LISTED:
        numbers = np.concatenate((numbers[:1], numbers[1:][numbers[1:] != numbers[:-1]]))
    return list(dict.fromkeys(numbers.tolist()))


def count_levels(labels: NDArray[np.int8], levels: int) -> tuple[int, ...]:
    """How often each of the numbers below `levels` (under 128) occurs."""
    found = labels.tobytes()
    return tuple(found.count(level) for level in range(levels))


def counting(begin: int, end: int) -> NDArray[np.int32]:
    """The numbers from `begin` to `end` (exclusive); only to be read."""
    return _NUMBERS[begin:end] if end <= len(_NUMBERS) else np.arange(begin, end, dtype=np.int32)


def stretches_of(positions: NDArray[np.int64] | NDArray[np.int32], label: NDArray[np.generic]) -> list[tuple[int, int]]:
    """Bounds of the stretches of `positions` that follow each other and carry one label.

    `label` is per path position where it is longer than `positions`, else per entry.
    """
    if len(positions) == 0:
        return []
    mine = label if len(label) == len(positions) else label[positions]
    cuts = true_at((positions[1:] - positions[:-1] != 1) | (mine[1:] != mine[:-1])) + 1
    bounds = [0, *cuts.tolist(), len(positions)]
    return list(itertools.pairwise(bounds))
