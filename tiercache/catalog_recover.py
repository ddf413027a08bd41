"""The catalog's reasoning over whole arrays: what is reachable, what may be claimed, what goes first. No I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tiercache.catalog_rows import RowTable
from tiercache.types import ROOT, Bools, Floats, Slots

__all__ = ["BUSY", "CLAIMED", "CLAIMING", "EMPTY", "LOST", "OK", "WAIT", "WRITTEN", "Tree", "judge", "oldest", "trace"]

EMPTY: Final = 0
"""State of a slot: nothing known of it."""
BUSY: Final = 1
"""A job is about to write it, or is writing it."""
WRITTEN: Final = 2
"""Written, not claimed."""
CLAIMING: Final = 3
"""Synced, and part of a transaction that has not succeeded yet."""
CLAIMED: Final = 4
"""In the catalog."""

OK: Final = 0
LOST: Final = 1
WAIT: Final = 2


@dataclass(frozen=True, slots=True, eq=False)
class Tree:
    """The reachable part of a slot table: n slots, parents before children."""

    slots: Slots
    parents: NDArray[np.int64]
    """Index within `slots`, ROOT for a first block."""
    depths: NDArray[np.int32]
    """1 for a first block."""


def trace(rows: RowTable, claimed: Bools, root_ident: int) -> Tree:
    """Keep of the `claimed` slots those that a chain of parents, each of the ident its child expects, joins to a root.

    Cycles are left out, and so is every block whose ident another one has already, with what hangs on it.
    O(n log depth), vectorised.
    """
    reached, depths = _walk(rows, claimed, root_ident)
    slots = np.flatnonzero(reached)
    idents = rows["ident"][slots]
    ascending = np.sort(idents)
    if (ascending[1:] == ascending[:-1]).any():
        slots = slots[np.argsort(depths[slots], kind="stable")]
        single = np.zeros(len(rows), dtype=np.bool_)
        single[slots[np.unique(rows["ident"][slots], return_index=True)[1]]] = True
        reached, depths = _walk(rows, single, root_ident)
        slots = np.flatnonzero(reached)
    near = depths[slots]
    if len(near) and int(near.max()) < 1 << 16:
        near = near.astype(np.uint16)  # sorted by radix
    slots = slots[np.argsort(near, kind="stable")]
    place = np.empty(len(rows) + 1, dtype=np.int64)
    place[slots] = np.arange(len(slots))
    place[ROOT] = ROOT
    parents = place[rows["parent_slot"][slots]]
    return Tree(slots.astype(np.int32), parents, depths[slots])


def _walk(rows: RowTable, claimed: Bools, root_ident: int) -> tuple[Bools, NDArray[np.int32]]:
    """Per slot: whether it hangs on a root, and its distance from above the root (pointer doubling)."""
    n = len(rows)
    root, nowhere = n, n + 1
    parent = np.ascontiguousarray(rows["parent_slot"])
    expected = np.ascontiguousarray(rows["parent_ident"])
    ident = np.ascontiguousarray(rows["ident"])
    above = np.full(n + 2, nowhere, dtype=np.int32)
    above[root] = root
    above[:n][claimed & (parent == ROOT) & (expected == np.uint64(root_ident))] = root
    inner = np.flatnonzero(claimed & (parent >= 0) & (parent < n))
    inner = inner[claimed[parent[inner]] & (ident[parent[inner]] == expected[inner])]
    above[inner] = parent[inner]
    depths = np.ones(n + 2, dtype=np.int32)
    depths[n:] = 0
    for _ in range(n.bit_length() + 1):
        further = above[above]
        if np.array_equal(further, above):
            break
        depths += depths[above]
        above = further
    return above[:n] == root, depths[:n]


def judge(slots: Slots, rows: RowTable, state: NDArray[np.uint8], root_ident: int) -> NDArray[np.int8]:
    """Which of `slots` (all WRITTEN, each once) may be claimed now: OK, LOST or WAIT per slot.

    OK: the parent is a root, claimed, or OK itself. WAIT: the parent is being written, or waits, or was written later
    than these. LOST: the parent holds nothing or something else, or is LOST.
    """
    n = len(slots)
    if n == 0:
        return np.empty(0, dtype=np.int8)
    parent = rows["parent_slot"][slots].astype(np.int64)
    expected = rows["parent_ident"][slots]
    inside = (parent >= 0) & (parent < len(rows))
    at = np.where(inside, parent, 0)
    same = inside & (rows["ident"][at] == expected)
    parent_state = np.where(inside, state[at], EMPTY)
    above = np.full(n + 3, n + LOST, dtype=np.int64)
    above[n:] = np.arange(n, n + 3)
    here = above[:n]
    here[(parent == ROOT) & (expected == np.uint64(root_ident))] = n + OK
    here[same & ((parent_state == CLAIMED) | (parent_state == CLAIMING))] = n + OK
    here[parent_state == BUSY] = n + WAIT
    fresh = np.flatnonzero(same & (parent_state == WRITTEN))
    order = np.argsort(slots)
    where = np.minimum(np.searchsorted(slots, parent[fresh], sorter=order), n - 1)
    among = order[where]
    here[fresh] = np.where(slots[among] == parent[fresh], among, n + WAIT)
    for _ in range(n.bit_length() + 1):
        further = above[above]
        if np.array_equal(further, above):
            break
        above = further
    verdict = above[:n] - n
    return np.where(verdict < 0, LOST, verdict).astype(np.int8)


def oldest(tree: Tree, last_use: Floats, count: int) -> Bools:
    """Mark `count` blocks of `tree` that go first: least recently used, and never a block before what hangs on it."""
    n = len(tree.slots)
    recent = last_use.copy()
    bounds = np.flatnonzero(np.diff(tree.depths)) + 1
    for begin, end in zip(bounds[::-1].tolist(), [n, *bounds[::-1].tolist()], strict=False):
        np.maximum.at(recent, tree.parents[begin:end], recent[begin:end])
    going = np.lexsort((-tree.depths, recent))[:count]
    marks = np.zeros(n, dtype=np.bool_)
    marks[going] = True
    return marks
