"""Room: frees slots by dropping blocks that may go at once, and takes whole subtrees away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tiercache.arrays import true_at
from tiercache.index import Node
from tiercache.planner.state import PlannerState
from tiercache.planner.victims import Victims
from tiercache.slots import BAD, WRITING
from tiercache.types import Bools, Slots

__all__ = ["Protect", "Room"]

Protect = Mapping[int, int]
"""Node id -> that many leading blocks of its run are no victims (the path that room is made for)."""
_NOTHING: Protect = {}
_PASSED_OVER = 256
"""Victims that `free` looks at and leaves alone before it gives up; bounds its cost."""


class Room:
    """Drops. Never copies, never waits."""

    def __init__(self, state: PlannerState, victims: Victims) -> None:
        self.state = state
        self.victims = victims

    def free(self, level: int, want: int, protect: Protect = _NOTHING, *, spare_above: bool = False) -> int:
        """Drop the coldest droppable blocks until `want` slots are free; returns min(want, free slots).

        `spare_above`: not the copies of blocks that are in a faster level too. A write there must not take them: it
        would only change which block of that level lacks a copy, and the one that lost it would be written next.
        """
        table = self.state.residency.tables[level]
        skip = 0
        while table.free < want and skip < _PASSED_OVER:
            self.victims.refile(level)
            victim = self.victims.nth(level, True, skip)
            if victim is None:
                break
            node, last = victim
            if not self.drop_tail(level, node, last, want - table.free, protect, spare_above):
                skip += 1
        return min(want, table.free)

    def drop_tail(
        self,
        level: int,
        node: Node,
        last: int,
        want: int,
        protect: Protect = _NOTHING,
        spare_above: bool = False,
    ) -> int:
        """Drop up to `want` blocks that end at `last`; 0 where none may go."""
        floor = protect.get(node.id, 0)
        begin = max(floor, self.victims.coldest_run(level, node, last, want, True))
        if spare_above:
            above = true_at(np.asarray((node.slots[begin : last + 1, :level] >= 0).any(axis=1)))
            begin += int(above[-1]) + 1 if len(above) else 0
        if begin > last:
            return 0
        begin, elsewhere = self._alike(level, node, begin, last + 1)
        if not elsewhere and not self._is_leaf_everywhere(node, last) and not self._take_descendants(node, last):
            return 0
        self.drop(level, node, begin, last + 1)
        return last + 1 - begin

    def _alike(self, level: int, node: Node, begin: int, end: int) -> tuple[int, bool]:
        """Start of the stretch before `end` in which all blocks, or none, have a slot in another level; and which."""
        elsewhere = _has_another(level, node, begin, end)
        unlike = true_at(elsewhere != elsewhere[-1])
        return begin + (int(unlike[-1]) + 1 if len(unlike) else 0), bool(elsewhere[-1])

    @staticmethod
    def _is_leaf_everywhere(node: Node, last: int) -> bool:
        return last == node.n - 1 and not any(node.kids)

    def _take_descendants(self, node: Node, last: int) -> bool:
        """A block whose only copy goes takes along what lives under it in faster levels, unless that is in use."""
        residency = self.state.residency
        for each in residency.subtree(node):
            begin = last + 1 if each is node else 0
            for other, table in enumerate(residency.tables):
                row = each.slots[begin:, other]
                row = row[row >= 0]
                if table.pins[row].any() or (table.state[row] == WRITING).any():
                    return False
        if last + 1 < node.n or node.children:
            self.take_away(node, last + 1, evicted=True)
        return True

    def drop(self, level: int, node: Node, begin: int, end: int, in_place: bool = False) -> None:
        """Evict a stretch of unpinned blocks from a level."""
        state = self.state
        slots = state.residency.unplace(node, begin, end, level)
        state.residency.tables[level].give(slots)
        state.forget(level, slots)
        state.counters[level].evicted += len(slots)
        if in_place:
            state.counters[level].dropped_in_place += len(slots)
        state.residency.trim(node)

    def drop_in_place(self, level: int, node: Node, last: int, want: int) -> int:
        """Evict blocks that were never copied below, where they are leaves everywhere; returns how many."""
        begin = self.victims.coldest_run(level, node, last, want, False)
        begin, elsewhere = self._alike(level, node, begin, last + 1)
        if not elsewhere and not self._is_leaf_everywhere(node, last):
            return 0
        self.drop(level, node, begin, last + 1, in_place=True)
        return last + 1 - begin

    def take_away(self, node: Node, begin: int, *, evicted: bool = False) -> int:
        """Remove blocks `[begin, n)` of a run and all below it from every level, also those in use.

        Slots in use become DETACHED until their pins go. Returns how many blocks were removed.
        """
        residency, removed = self.state.residency, 0
        nodes = residency.subtree(node)
        for each in reversed(nodes):
            first = begin if each is node else 0
            removed += each.n - first
            for level in range(residency.levels):
                slots = residency.unplace(each, first, each.n, level)
                self.let_go(level, slots, evicted)
            if each is not node:
                residency.index.trim(each)
                residency.restored.pop(each, None)
                residency.stale[each] = None
        residency.trim(node)
        return removed

    def leave_level(self, level: int, node: Node, begin: int) -> None:
        """Remove blocks `[begin, n)` of a run and all below it from one level, also those in use; blocks that have
        no other copy go from the tree, with all that is below them."""
        residency = self.state.residency
        nodes = residency.subtree(node)
        for each in reversed(nodes):
            first = begin if each is node else 0
            slots = residency.unplace(each, first, each.n, level)
            self.let_go(level, slots, False)
        self._sweep(nodes)

    def lose_copies(self, level: int, slots: Slots) -> None:
        """These slots do not hold what they should, also those in use. Blocks that have no other slot go from the
        tree, with all that is below them."""
        residency = self.state.residency
        runs = residency.runs_of(level, slots)
        for node, begin, end in runs:
            self.let_go(level, residency.unplace(node, begin, end, level), False)
        self._sweep([node for node, _, _ in runs])

    def spoil(self, level: int, slots: Slots) -> None:
        """These readable slots were found wrong. They become BAD where the block must keep its place: in a persistent
        level, or where it has no other slot."""
        residency = self.state.residency
        for node, begin, end in residency.runs_of(level, slots):
            row = node.slots[begin:end, level].astype(np.int32)
            spare = _has_another(level, node, begin, end)
            if self.state.specs[level].persistent:
                spare[:] = False
            residency.set_state(level, row[~spare], BAD)
            residency.stale[node] = None
            self.lose_copies(level, row[spare])

    def _sweep(self, nodes: Sequence[Node]) -> None:
        """Blocks of these runs that have no slot any more go from the tree, with all that is below them."""
        for node in nodes:
            if node.parent is None:
                continue
            gone = (node.slots < 0).all(axis=1)
            if gone.any():
                self.take_away(node, int(gone.argmax()))

    def let_go(self, level: int, slots: Slots, evicted: bool) -> None:
        """Free slots that no node owns any more, now or when their last pin goes."""
        if len(slots) == 0:
            return
        self.state.residency.tables[level].let_go(slots)
        self.state.forget(level, slots)
        if evicted:
            self.state.counters[level].evicted += len(slots)
        else:
            self.state.counters[level].detached += len(slots)


def _has_another(level: int, node: Node, begin: int, end: int) -> Bools:
    """Per block of a stretch: has it a slot in a level other than this one?"""
    has = node.slots[begin:end] >= 0
    has[:, level] = False
    return np.asarray(has.any(axis=1))
