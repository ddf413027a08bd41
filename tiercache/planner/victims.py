"""Victims: the order in which blocks leave each level.

Per level, the nodes whose last block there is a leaf of that level are filed by (policy key, deepest first) in one of
two sorted lists: droppable at once (a copy below, or no level below, or a partial tail), or to be copied first.
A node whose last block is pinned or in flight is in neither. Only nodes that changed are filed again: O(log n) each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from tiercache.arrays import as_index, true_at
from tiercache.index import Node
from tiercache.planner.state import PlannerState
from tiercache.slots import BAD, RESIDENT
from tiercache.types import COLD

__all__ = ["Victims"]

PRIORITY_STEP_S = 1e10
"""Between two priorities: more than any two uses lie apart, so that they never mix; still exact to 0.1 ms."""

Positions: TypeAlias = NDArray[np.int64]

_EVICTABLE = frozenset((int(RESIDENT), int(BAD)))


class Victims:
    """Ordered leaves per level. Call `refile` before reading."""

    def __init__(self, state: PlannerState) -> None:
        self.state = state
        self._lists: list[dict[bool, Any]] = [
            {True: SortedList(), False: SortedList()} for _ in range(state.residency.levels)
        ]
        self._charged: list[Any] = [SortedList() for _ in range(state.residency.levels)]
        """Of the droppable ones, those with a charge."""
        self._bonus = ["below" if spec.persistent else "bonus" for spec in state.specs]
        """Per level, which of a block's marks counts in its order."""

    def refile(self, level: int) -> None:
        """File the nodes that changed since the last call, as far as this level needs it.

        What a restart found is filed when its level is asked for: none of it leaves before, and the first prompt need
        not wait for it.
        """
        residency = self.state.residency
        if residency.restored and self.state.is_last(level):
            residency.stale.update(residency.restored)
            residency.restored.clear()
        fresh: list[dict[bool, list[Any]]] = [{True: [], False: []} for _ in range(residency.levels)]
        while residency.stale:
            node, _ = residency.stale.popitem()
            for each in range(residency.levels):
                is_leaf = node.held[each] > 0 and node.kids[each] == 0 and node.parent is not None
                new = self._place_of(node, each) if is_leaf else None
                old = node.filed[each]
                if new != old or not node.charge:
                    self._uncharge(each, old)
                if new is not None and new != old and node.charge:
                    self._charged[each].add(new[1])
                if new == old:
                    continue
                if old is not None:
                    self._lists[each][old[0]].remove(old[1])
                if new is not None:
                    fresh[each][new[0]].append(new[1])
                node.filed[each] = new
        for each, lists in enumerate(fresh):  # together: after a restart they are all there are
            for droppable, keys in lists.items():
                if keys:
                    self._lists[each][droppable].update(keys)

    def clear(self) -> None:
        """Forget every node (new epoch)."""
        for lists in self._lists:
            for each in lists.values():
                each.clear()
        for charged in self._charged:
            charged.clear()
        self.state.residency.stale.clear()

    def count(self, level: int, droppable: bool) -> int:
        """Nodes filed."""
        return len(self._lists[level][droppable])

    def nth(self, level: int, droppable: bool, n: int) -> tuple[Node, int] | None:
        """The n-th coldest node and the position of its last block in this level; None past the end."""
        return self._at(level, self._lists[level][droppable], n)

    def nth_charged(self, level: int, n: int) -> tuple[Node, int] | None:
        """The same among those with a charge."""
        return self._at(level, self._charged[level], n)

    def _at(self, level: int, entries: Any, n: int) -> tuple[Node, int] | None:
        nodes = self.state.residency.index.nodes
        while n < len(entries):
            node = nodes[entries[n][2]]
            if not self._is_misjudged(level, node):
                return node, last_position(node, level)
            self.state.residency.stale[node] = None
            self.refile(level)
        return None

    def _is_misjudged(self, level: int, node: Node) -> bool:
        """Has what a write of it is worth changed sides since it was filed?"""
        return self.state.write_limit is not None and node.filed[level] != self._place_of(node, level)

    def _uncharge(self, level: int, place: tuple[bool, tuple[float, int, int]] | None) -> None:
        if place is not None and self._charged[level]:
            self._charged[level].discard(place[1])

    def key_of(self, level: int, droppable: bool, n: int) -> tuple[float, int, int] | None:
        """The filing key of the n-th coldest node."""
        entries = self._lists[level][droppable]
        return entries[n] if n < len(entries) else None

    def coldest_run(self, level: int, node: Node, last: int, want: int, droppable: bool) -> int:
        """Start of the longest stretch that ends at `last` and may leave together with it: at most `want` blocks,
        all unpinned, of the same last use and of the same kind."""
        residency = self.state.residency
        begin = max(0, last + 1 - want)
        row = node.slots[begin : last + 1, level]
        table = residency.tables[level]
        where = as_index(row)
        state = table.state[where]
        fits = (row >= 0) & (table.pins[where] == 0)
        fits &= (state == RESIDENT) | (state == BAD)
        fits &= node.last_use[begin : last + 1] == node.last_use[last]
        if node.marks is not None:
            bonuses = node.marks[self._bonus[level]][begin : last + 1]
            fits &= bonuses == bonuses[-1]
        if node.hints is not None:
            priorities = node.hints["priority"][begin : last + 1]
            fits &= priorities == priorities[-1]
        if not self.state.is_last(level):
            below = residency.copy_below(node, begin, last + 1, level)
            if node.partial and last == node.n - 1:
                below[-1] = True
            if not (droppable and (node.charge or self._is_spare(level, node, last))):
                fits &= below == droppable
        wrong = true_at(~fits)
        return begin + (int(wrong[-1]) + 1 if len(wrong) else 0)

    def key(self, level: int, node: Node, at: int) -> float:
        """Of one block in this level's order, in seconds: the larger, the longer it stays. Use, bonus, priority."""
        key: float = node.last_use.item(at)
        if node.marks is not None:
            key += node.marks[self._bonus[level]].item(at)
        if node.hints is not None:
            priority = node.hints["priority"].item(at)
            if priority != COLD:
                key += priority * PRIORITY_STEP_S
            elif not self.state.specs[level].persistent:
                key = -math.inf
        return key

    def alike(self, level: int, node: Node, at: Positions) -> list[tuple[int, int]]:
        """Bounds of the stretches of neighbours among these blocks of a run that have one key in this level's order."""
        if len(at) == 0:
            return []
        keys = node.last_use[at] if node.marks is None else node.last_use[at] + node.marks[self._bonus[level]][at]
        unlike = (at[1:] != at[:-1] + 1) | (keys[1:] != keys[:-1])
        if node.hints is not None:
            priorities = node.hints["priority"][at]
            unlike |= priorities[1:] != priorities[:-1]
        cuts = np.flatnonzero(unlike) + 1
        ends = [*(at[cuts - 1] + 1).tolist(), int(at[-1]) + 1]
        return list(zip([int(at[0]), *at[cuts].tolist()], ends, strict=True))

    def check(self) -> Iterator[str]:
        """Does every node stand where it belongs, and nothing else? O(everything)."""
        entries = [{kind: set(each) for kind, each in lists.items()} for lists in self._lists]
        charged = [set(each) for each in self._charged]
        for node in self.state.residency.index.walk_nodes():
            for level in range(self.state.residency.levels):
                is_leaf = node.held[level] > 0 and node.kids[level] == 0
                place = self._place_of(node, level) if is_leaf else None
                if node.charge and place is not None and place[1] not in charged[level]:
                    yield f"node {node.id} is missing among the charged of level {level}"
                elif node.charge and place is not None:
                    charged[level].discard(place[1])
                filed = node.filed[level]
                if filed is not None and place is not None and self.state.write_limit is not None:
                    place = (filed[0], place[1])  # what a write is worth may have changed meanwhile: see `nth`
                if filed != place:
                    yield f"node {node.id} is filed as {node.filed[level]} in level {level}, should be {place}"
                elif place is not None and place[1] not in entries[level][place[0]]:
                    yield f"node {node.id} is missing from the order of level {level}"
                elif place is not None:
                    entries[level][place[0]].discard(place[1])
        for level, lists in enumerate(entries):
            if any(lists.values()):
                yield f"level {level}: the order holds {lists} of nodes that are gone"
        for level, rest in enumerate(charged):
            if rest:
                yield f"level {level}: {rest} are filed among the charged and are not"

    def _place_of(self, node: Node, level: int) -> tuple[bool, tuple[float, int, int]] | None:
        """Of a leaf of this level; None where it may not leave now."""
        residency = self.state.residency
        last = last_position(node, level)
        slot = node.slots.item(last, level)
        table = residency.tables[level]
        if table.pins.item(slot) or table.state.item(slot) not in _EVICTABLE:
            return None
        droppable = (
            self.state.is_last(level)
            or bool(residency.copy_below(node, last, last + 1, level)[0])
            or (node.partial and last == node.n - 1)
            or self._is_spare(level, node, last)
            or node.charge > 0  # it can be fetched again, or is computed again; only what is ordinary is worth a copy
        )
        return droppable, (self.key(level, node, last), -(node.depth + last), node.id)

    def _is_spare(self, level: int, node: Node, last: int) -> bool:
        """Would this block be written to a persistent level next, is that not worth it, and does nothing hang below it
        on any level?"""
        if level + 1 == len(self.state.specs) or not self.state.specs[level + 1].persistent:
            return False
        return last == node.n - 1 and not any(node.kids) and not self.state.is_worth_writing(node, last)


def last_position(node: Node, level: int) -> int:
    """Position of the last block of a run that has a slot in `level`; there must be one."""
    if node.slots.item(node.n - 1, level) >= 0:
        return node.n - 1
    return int(np.flatnonzero(node.slots[:, level] >= 0)[-1])
