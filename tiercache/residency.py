"""Residency: which block is where. The tree and the slot tables, changed only together.

It keeps, per node and level, how many blocks have a slot (`held`) and how many children have any below (`kids`), and
collects in `stale` the nodes whose place in the eviction order may have changed. It decides nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import as_index, counting, each_once, present, stretches_of
from tiercache.expiry import Expiry
from tiercache.index import ABSENT, Leaving, Node, Path, PrefixIndex
from tiercache.keys import INT32_MIN
from tiercache.slots import FREE, NO_OWNER, RESIDENT, SlotTable
from tiercache.types import Bools, Floats, Hints, Idents, LevelSpec, Slots, Uses

__all__ = ["Listener", "Residency"]


class Listener(Protocol):
    """Hears of every readable copy that comes and goes, while the change is made: it looks, and changes nothing."""

    def changed(self, node: Node, begin: int, end: int, level: int, readable: bool) -> None:
        """Blocks `[begin, end)` of a run got readable copies in `level`, or lose those that they had."""
        ...

    def cleared(self) -> None:
        """All copies in all levels went at once."""
        ...


class Residency:
    """The index and one `SlotTable` per level.

    Invariant (no faults): every block in the tree has a slot in some level, and so do all its ancestors; in a
    persistent level the ancestors have one in that very level.
    """

    def __init__(self, specs: Sequence[LevelSpec], width: int, leaving: Leaving | None = None) -> None:
        """leaving: see `PrefixIndex`."""
        self.specs = tuple(specs)
        self.width = width
        self.tables = [SlotTable(spec.capacity) for spec in specs]
        self._leaving = leaving
        self.index = PrefixIndex(width, self.tables, leaving)
        self.stale: dict[Node, None] = {}
        self.charged = [0] * len(self.specs)
        """Slots per level of runs that have a charge."""
        self.restored: dict[Node, None] = {}
        """The same of what a restart found, as far as its own level goes; in other levels it has no place."""
        self.expiry = Expiry()
        self.listener: Listener | None = None

    @property
    def levels(self) -> int:
        """Number of levels."""
        return len(self.specs)

    def forget_tree(self) -> None:
        """Start over with an empty tree. The caller has let go of every owned slot."""
        self.index = PrefixIndex(self.width, self.tables, self._leaving)
        self.charged = [0] * self.levels
        self.stale.clear()
        self.restored.clear()
        self.expiry.clear()
        if self.listener is not None:
            self.listener.cleared()

    # -- a node and its slots -----------------------------------------------------------------------------------

    def place(self, node: Node, at: int, level: int, slots: Slots) -> None:
        """Give blocks `[at, at + n)` of a run these slots of `level` (they had none there)."""
        n = len(slots)
        if n == 0:
            return
        assert (node.slots[at : at + n, level] < 0).all()
        node.slots[at : at + n, level] = slots
        table = self.tables[level]
        where = as_index(slots)
        table.owner[where] = node.id
        table.pos[where] = counting(at, at + n)
        self._count(node, level, n)

    def place_on(self, path: Path, positions: NDArray[np.int64], slots: Slots, level: int = 0) -> None:
        """Give the blocks at these path positions (ascending) their slots of `level` (they had none there)."""
        starts = path.starts()
        node_of = np.searchsorted(starts, positions, side="right") - 1
        for begin, end in stretches_of(positions, node_of):
            node = path.nodes[int(node_of[begin])]
            self.place(node, int(positions[begin] - starts[node_of[begin]]), level, slots[begin:end])

    def unplace(self, node: Node, begin: int, end: int, level: int) -> Slots:
        """Take the slots of blocks `[begin, end)` in `level` away from the run and return them. They are not freed."""
        slots = present(node.slots[begin:end, level])
        if len(slots):
            if self.listener is not None:
                self._tell(level, slots, False)
            node.slots[begin:end, level] = ABSENT
            self.tables[level].owner[as_index(slots)] = NO_OWNER
            self._count(node, level, -len(slots))
        return slots

    def _count(self, node: Node, level: int, change: int) -> None:
        """Adjust `held`, and `kids` up the path as far as a subtree starts or stops having blocks in `level`."""
        self.stale[node] = None
        node.whole = None
        before = node.held[level] > 0 or node.kids[level] > 0
        node.held[level] += change
        if node.charge:
            self.charged[level] += change
        after = node.held[level] > 0 or node.kids[level] > 0
        step = int(after) - int(before)
        parent = node.parent
        while step and parent is not None:
            self.stale[parent] = None
            before = parent.held[level] > 0 or parent.kids[level] > 0
            parent.kids[level] += step
            after = parent.held[level] > 0 or parent.kids[level] > 0
            step = int(after) - int(before)
            parent = parent.parent

    def extend(
        self, path: Path, symbols: bytes, idents: Idents, partial: bool, charge: int | None = None
    ) -> tuple[Node, int]:
        """`PrefixIndex.extend`; the nodes that it split or made are filed anew."""
        touched = path.nodes[-1:]
        node, at = self.index.extend(path, symbols, idents, partial, charge)
        for each in (*touched, *path.nodes[-1:], node):
            self.stale[each] = None
            self.expiry.note(each)
        return node, at

    def split(self, node: Node, at: int) -> Node:
        """`PrefixIndex.split`; both parts are filed anew."""
        head = self.index.split(node, at)
        for each in (head, node):
            self.stale[each] = None
            self.expiry.note(each)
        return head

    def set_charge(self, node: Node, charge: int) -> None:
        """Change the charge of a run, and what is charged with it."""
        step = int(charge > 0) - int(node.charge > 0)
        node.charge = charge
        if step:
            self.charged = [count + step * held for count, held in zip(self.charged, node.held, strict=True)]
            self.stale[node] = None

    def attach_runs(
        self,
        level: int,
        parents: Sequence[int],
        bounds: Sequence[int],
        symbols: bytes,
        slots: Slots,
        arrays: tuple[Idents, Floats, Uses],
        hints: Hints | None = None,
    ) -> None:
        """Build a tree of runs that lie side by side in these arrays (idents, last use, uses), all of them in `level`.

        Run i is `bounds[i]` to `bounds[i + 1]` and hangs below run `parents[i]`, which comes before it (-1: the root).
        The tree is empty before, and its slots are taken.
        """
        index, width = self.index, self.width
        table = self.tables[level]
        rows = np.full((len(slots), self.levels), ABSENT, dtype=np.int32)
        rows[:, level] = slots
        idents, last_use, uses = arrays
        words = np.frombuffer(symbols, dtype=np.int32).reshape(len(slots), -1).min(axis=1)
        plain = (np.minimum.reduceat(words, bounds[:-1]) != INT32_MIN).tolist()
        said = None if hints is None else self._said(hints, bounds)
        nodes: list[Node] = []
        for i, above in enumerate(parents):
            begin, end = bounds[i], bounds[i + 1]
            parent = nodes[above] if above >= 0 else index.root
            part = slice(begin, end)  # copied, so that a run which leaves gives its memory back
            node = index.attach_run(
                parent,
                symbols[begin * width : end * width],
                idents[part].copy(),
                rows[part].copy(),
                last_use[part].copy(),
                uses[part].copy(),
                plain[i],
            )
            if said is not None and hints is not None and said[i]:
                node.hints = hints[part].copy()
            node.held[level] = node.n
            parent.kids[level] += 1
            nodes.append(node)
        if hints is not None:
            firsts = np.minimum.reduceat(hints["expires"], bounds[:-1])
            ending = np.flatnonzero(firsts < np.inf).tolist()
            self.expiry.note_all([nodes[i].id for i in ending], firsts[ending].tolist())
        lengths = np.diff(bounds)
        table.owner[slots] = np.repeat(np.array([node.id for node in nodes], dtype=np.int32), lengths)
        table.pos[slots] = np.arange(len(slots)) - np.repeat(bounds[:-1], lengths)
        for node in nodes if self.listener is not None else ():
            self.listener.changed(node, 0, node.n, level, True)  # type: ignore[union-attr]
        self.restored.update((node, None) for node in nodes if not node.children)  # the others are in no order

    @staticmethod
    def _said(hints: Hints, bounds: Sequence[int]) -> list[bool]:
        """Per run: was anything said of any of its blocks?"""
        blocks = (hints["priority"] != 0) | (hints["expires"] < np.inf)
        said: list[bool] = np.logical_or.reduceat(blocks, bounds[:-1]).tolist()
        return said

    def trim(self, node: Node) -> None:
        """Drop trailing blocks without any slot, and the ancestors' likewise when the node goes."""
        current: Node | None = node
        while current is not None and current.parent is not None:
            parent = current.parent
            gone = self.index.trim(current)
            if gone:
                self.restored.pop(current, None)
            self.stale[current] = None
            self.stale[parent] = None
            if not gone:
                return
            current = parent

    # -- slots, by number ---------------------------------------------------------------------------------------

    def runs_of(self, level: int, slots: Slots) -> list[tuple[Node, int, int]]:
        """Group owned slots into stretches `(node, begin, end)` that lie side by side in one run, in given order."""
        table = self.tables[level]
        owner, pos = table.owner[slots], table.pos[slots]
        keep = owner != NO_OWNER
        owner, pos = owner[keep], pos[keep]
        if len(owner) == 0:
            return []
        cuts = np.flatnonzero((np.diff(owner) != 0) | (np.diff(pos) != 1)) + 1
        bounds = [0, *cuts.tolist(), len(owner)]
        nodes = self.index.nodes
        return [(nodes[int(owner[a])], int(pos[a]), int(pos[b - 1]) + 1) for a, b in itertools.pairwise(bounds)]

    def mark_stale(self, level: int, slots: Slots) -> None:
        """The owners of these slots may have to be filed anew."""
        self.stale.update((node, None) for node in self.owners(level, slots))

    def owners(self, level: int, slots: Slots) -> list[Node]:
        """The nodes that own these slots, each once."""
        owners = self.tables[level].owner[as_index(slots)]
        nodes = self.index.nodes
        return [nodes[owner] for owner in each_once(owners) if owner != NO_OWNER]

    def set_state(self, level: int, slots: Slots, state: np.uint8) -> None:
        """These slots, which nodes own, are in another state now."""
        if self.listener is not None:
            self._tell(level, slots, bool(state == RESIDENT))
        self.tables[level].state[as_index(slots)] = state
        for node in self.owners(level, slots):
            node.whole = None

    def _tell(self, level: int, slots: Slots, readable: bool) -> None:
        """These slots, which nodes own, are about to become readable, or to be so no more; some may be so already."""
        was_readable = self.tables[level].state[as_index(slots)] == RESIDENT
        for node, begin, end in self.runs_of(level, slots[was_readable != readable]):
            self.listener.changed(node, begin, end, level, readable)  # type: ignore[union-attr]

    def pin(self, level: int, slots: Slots) -> None:
        """One more user of these slots."""
        self.tables[level].pin(slots)
        self.mark_stale(level, slots)

    def unpin(self, level: int, slots: Slots) -> None:
        """One user fewer of these slots."""
        self.tables[level].unpin(slots)
        self.mark_stale(level, slots)

    # -- along a path -------------------------------------------------------------------------------------------

    def states(self, gathered: NDArray[np.int32]) -> NDArray[np.uint8]:
        """State per level and block `uint8[levels, n]` of gathered slots; FREE where a block has none."""
        states = np.zeros(gathered.shape, dtype=np.uint8)
        for level, table in enumerate(self.tables):
            where = as_index(gathered[level])
            if isinstance(where, slice):
                states[level] = table.state[where]
            else:
                states[level] = np.where(where >= 0, table.state[where], FREE)
        return states

    def is_whole(self, node: Node) -> bool:
        """Has every block of this run a readable copy in level 0? Remembered until a slot of it changes, so that most
        lookups need no array but the prompt's own."""
        if node.whole is None:
            row = node.slots[:, 0]
            node.whole = bool((row >= 0).all() and (self.tables[0].state[as_index(row)] == RESIDENT).all())
        return node.whole

    def best_level(self, states: NDArray[np.uint8], online: Sequence[bool]) -> NDArray[np.int8]:
        """Fastest online level with a readable copy per block, -1: none."""
        best = np.full(states.shape[1], -1, dtype=np.int8)
        for level in range(self.levels - 1, -1, -1):
            if online[level]:
                best[states[level] == RESIDENT] = level
        return best

    def copy_below(self, node: Node, begin: int, end: int, level: int) -> Bools:
        """Per block of the stretch: is there a readable copy in a slower level?"""
        below = np.zeros(end - begin, dtype=np.bool_)
        for lower in range(level + 1, self.levels):
            row = node.slots[begin:end, lower]
            below |= (row >= 0) & (self.tables[lower].state[as_index(row)] == RESIDENT)
        return below

    def subtree(self, node: Node) -> list[Node]:
        """The node and all below it, parents first."""
        found = [node]
        for each in found:
            found.extend(each.children.values())
        return found

    def path_to(self, node: Node, take: int) -> Path:
        """The path from the root to block `take - 1` of `node`."""
        nodes = [node]
        above = node.parent
        while above is not None and above.parent is not None:
            nodes.append(above)
            above = above.parent
        nodes.reverse()
        return Path(nodes, take)
