"""PrefixIndex: a radix tree over prompts whose edges are runs of blocks.

One memory compare per node on the way down. A node splits only where two prompts diverge; slots are named by number
everywhere else, so a split under a running job is harmless. Everything per block is an array over the node's run.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from tiercache.arrays import true_at
from tiercache.keys import INT32_MIN
from tiercache.slots import SlotTable
from tiercache.types import Floats, Hints, Idents, Uses, no_hints
from tiercache.words import common_words, shared_words

__all__ = ["Node", "Path", "PrefixIndex", "Walk"]

ABSENT = -1
_APPEND_LIMIT = 4096
"""Blocks up to which a leaf's run grows in place; bounds what one append copies."""
_SCAN_LIMIT = 16
"""Children up to which the one with the longest common prefix is found by a scan; beyond, in a sorted list."""


_NO_CHILDREN: dict[bytes, Node] = {}
"""What every leaf has for children; never changed. Most nodes are leaves."""


class Node:
    """A run of n blocks: arrays of n, and `run`, which may be longer until it is compacted (the first n count)."""

    __slots__ = (
        "charge",
        "children",
        "depth",
        "exits",
        "filed",
        "held",
        "hints",
        "id",
        "idents",
        "kids",
        "last_use",
        "marks",
        "n",
        "order",
        "parent",
        "partial",
        "plain",
        "run",
        "slots",
        "uses",
        "whole",
    )

    def __init__(
        self,
        node_id: int,
        parent: Node | None,
        depth: int,
        run: bytes,
        idents: Idents,
        slots: NDArray[np.int32],
        last_use: Floats,
        uses: Uses,
        plain: bool,
    ) -> None:
        n, levels = len(slots), slots.shape[1]
        self.id = node_id
        self.parent = parent
        self.depth = depth
        """Blocks on the path before this run."""
        self.children: dict[bytes, Node] = _NO_CHILDREN
        self.order: Any = None
        """First symbols of the children, sorted; only when there are many."""
        self.run = run
        self.n = n
        self.idents = idents
        self.slots = slots
        """`int32[n, levels]`, contiguous, so that the slots along a path are the nodes' bytes side by side."""
        self.last_use = last_use
        self.uses = uses
        self.marks: NDArray[np.void] | None = None
        """What the eviction policy keeps per block (`policy.MARK`); None: nothing."""
        self.hints: Hints | None = None
        """What callers said of each block; None: nothing."""
        self.held = [0] * levels
        """Blocks of this run that have a slot, per level."""
        self.kids = [0] * levels
        """Children in whose subtree some block has a slot, per level."""
        self.whole: bool | None = None
        """Has every block a readable copy in level 0? None: to be looked up (`Residency.is_whole`)."""
        self.plain = plain
        """No word of the run is INT32_MIN, which hashed and padded symbols have and token ids are not."""
        self.partial = False
        """The last block is a partial tail: matches whole only, has no children, is never demoted."""
        self.charge = 0
        """Uses after which this run, which came from a remote tier or was computed under one that did, is ordinary; 0:
        it is. What hangs below is charged at least as much."""
        self.exits = 0
        """Lookups that left the cached path within or right after this run."""
        self.filed: list[tuple[bool, tuple[float, int, int]] | None] = [None] * levels
        """Where the eviction order files this node: (droppable at once, key), per level."""

    def __repr__(self) -> str:
        return f"Node(id={self.id}, blocks {self.depth}..{self.depth + self.n}, held={self.held}, kids={self.kids})"


class Path:
    """Nodes from the root down: all blocks of each belong to the path, of the last one the first `take` (at least 1).

    Iteration gives (node, blocks of it). Nodes alone in a list, since a tuple for each costs more than finding it.
    """

    __slots__ = ("nodes", "take")

    def __init__(self, nodes: list[Node], take: int) -> None:
        self.nodes = nodes
        self.take = take
        """Blocks of the last node; 0 for an empty path."""

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[tuple[Node, int]]:
        return zip(self.nodes, self.takes(), strict=True)

    def __repr__(self) -> str:
        return f"Path({len(self.nodes)} nodes, {self.blocks} blocks)"

    @property
    def blocks(self) -> int:
        """Blocks of the prompt on the path."""
        return self.nodes[-1].depth + self.take if self.nodes else 0

    @property
    def end(self) -> tuple[Node, int]:
        """The last node and how many of its blocks belong to the path."""
        return self.nodes[-1], self.take

    def takes(self) -> list[int]:
        """Blocks of each node that belong to the path."""
        return [node.n for node in self.nodes[:-1]] + [self.take] * bool(self.nodes)

    def starts(self) -> NDArray[np.int64]:
        """Path position of each node's first block, and one more entry: the blocks of the path."""
        return np.array([node.depth for node in self.nodes] + [self.blocks], dtype=np.int64)

    def copy(self) -> Path:
        """Another path over the same nodes."""
        return Path(self.nodes.copy(), self.take)

    def is_plain(self) -> bool:
        """No symbol on it has a word INT32_MIN."""
        return not self.nodes or all(map(attrgetter("plain"), self.nodes))

    def idents(self) -> Idents:
        """Ident per block (a copy)."""
        return _joined([node.idents for node in self.nodes], self.take, np.uint64)

    def uses(self) -> Uses:
        """Uses per block (a copy)."""
        return _joined([node.uses for node in self.nodes], self.take, np.uint32)

    def last_use(self) -> Floats:
        """Last use per block (a copy)."""
        return _joined([node.last_use for node in self.nodes], self.take, np.float64)

    def hints(self) -> Hints | None:
        """What was said of each block (a copy); None: nothing of any."""
        if all(node.hints is None for node in self.nodes):
            return None
        found = [no_hints(take) if node.hints is None else node.hints[:take] for node, take in self]
        return np.concatenate(found)

    def shorten(self, blocks: int) -> Path:
        """The path of the first `blocks` blocks (all, where it has no more)."""
        if blocks >= self.blocks:
            return self
        count = bisect_left(self.nodes, blocks, key=attrgetter("depth"))
        return Path(self.nodes[:count], blocks - self.nodes[count - 1].depth if count else 0)


Leaving: TypeAlias = Callable[[Node, int, int], None]


class Walk(NamedTuple):
    """How far a prompt follows the tree. Valid until the tree changes."""

    path: Path
    blocks: int
    """Whole blocks of the prompt on the path."""
    words: int
    """Leading int32 words (tokens, for raw symbols of full width) that some cached path shares with the prompt."""


class PrefixIndex:
    """Radix tree over symbols of `width` bytes (a multiple of 4), with a slot per block and level.

    Complexities: n blocks on a path of k nodes. It knows of slots only what a split must rewrite.
    """

    def __init__(self, width: int, tables: Sequence[SlotTable], leaving: Leaving | None = None) -> None:
        """leaving: called with a node and bounds of trailing blocks before they leave the tree."""
        assert width > 0 and width % 4 == 0
        self._leaving = leaving
        self.width = width
        self.tables = tables
        self.nodes: dict[int, Node] = {}
        self._next_id = 0
        self._free_ids: list[int] = []
        self.root = Node(-1, None, 0, b"", np.zeros(0, dtype=np.uint64), *_unused(0, len(tables)), True)
        self.blocks = 0

    # -- reading ------------------------------------------------------------------------------------------------

    def walk(self, symbols: bytes, n: int, tail: bytes = b"") -> Walk:
        """Follow a prompt of n symbols. `tail` (raw words after the last whole symbol) only sharpens `words`.

        O(k) compares; mutates nothing.
        """
        width, node, begin = self.width, self.root, 0
        nodes: list[Node] = []
        end = n * width
        while begin < end:
            child = node.children.get(symbols[begin : begin + width])
            if child is None:
                break
            stop = begin + child.n * width
            # The key says it all of a single block; a longer run is compared whole.
            if child.n > 1 and not (stop <= end and symbols.startswith(child.run, begin)):
                same = common_words(symbols, begin, child.run, min(stop, end) - begin)
                take = same * 4 // width
                if take < child.n:
                    nodes.append(child)
                    begin += take * width
                    left = child.run[take * width : child.n * width]
                    words = begin // 4 + shared_words(symbols[begin : begin + width] or tail, left)
                    return Walk(Path(nodes, take), begin // width, words)
            nodes.append(child)
            begin, node = stop, child
        rest = symbols[begin : begin + width] or tail
        words = begin // 4 + (self._closest_child_words(node, rest) if rest else 0)
        return Walk(Path(nodes, node.n), begin // width, words)

    def _closest_child_words(self, node: Node, rest: bytes) -> int:
        """Longest common prefix, in words, of `rest` with the first symbol of any child."""
        if node.order is None:
            return max((shared_words(rest, first) for first in node.children), default=0)
        order, at = node.order, node.order.bisect_left(rest)
        before = shared_words(rest, order[at - 1]) if at > 0 else 0
        return max(before, shared_words(rest, order[at])) if at < len(order) else before

    def gather(self, path: Path) -> NDArray[np.int32]:
        """Slots `int32[levels, blocks]` along a path (a copy)."""
        rows = _joined([node.slots for node in path.nodes], path.take, np.int32)
        return np.ascontiguousarray(rows.reshape(-1, len(self.tables)).T)

    def walk_nodes(self) -> Iterator[Node]:
        """Every node, in no particular order. Do not change the tree meanwhile."""
        return iter(self.nodes.values())

    # -- changing -----------------------------------------------------------------------------------------------

    def extend(
        self, path: Path, symbols: bytes, idents: Idents, partial: bool, charge: int | None = None
    ) -> tuple[Node, int]:
        """Add a run of new blocks under the end of `path`; they have no slots yet. charge: None: that of its end.

        Splits the last node where the path ends inside it; `path` is then corrected in place. A leaf that ends
        there grows instead of getting a child. Returns (node, position of the first new block in it).
        """
        parent = self.root
        if path:
            parent, take = path.end
            if take < parent.n:
                parent = self.split(parent, take)
                path.nodes[-1] = parent
            fits = not parent.children and not parent.partial and parent.n + len(idents) <= _APPEND_LIMIT
            if fits and charge in (None, parent.charge):
                return parent, self._append(parent, symbols, idents, partial)
        unused = _unused(len(idents), len(self.tables))
        node = self._new_node(parent, parent.depth + parent.n, symbols, idents, *unused, _is_plain(symbols))
        node.partial = partial
        node.charge = parent.charge if charge is None else charge
        self._adopt(parent, node)
        self.blocks += node.n
        return node, 0

    def split(self, node: Node, at: int) -> Node:
        """Cut a run in two; the first `at` blocks become a new node above, which is returned. O(n), arrays copied."""
        assert 0 < at < node.n
        width, parent = self.width, node.parent
        assert parent is not None
        arrays = (node.idents, node.slots, node.last_use, node.uses)
        copies = (each[:at].copy() for each in arrays)
        head = self._new_node(parent, node.depth, node.run[: at * width], *copies, node.plain)
        head.charge = node.charge
        head.marks, node.marks = _part(node.marks, 0, at, True), _part(node.marks, at, node.n, True)
        head.hints, node.hints = _part(node.hints, 0, at, True), _part(node.hints, at, node.n, True)
        first = head.run[:width]
        del parent.children[first]  # and not only its value: the key of a single block is its run
        parent.children[first] = head
        node.run = node.run[at * width : node.n * width]
        node.n -= at
        node.idents, node.slots = node.idents[at:].copy(), node.slots[at:].copy()
        node.last_use, node.uses = node.last_use[at:].copy(), node.uses[at:].copy()
        node.depth += at
        node.whole = None
        node.parent = head
        head.children = {node.run[:width]: node}
        for level, table in enumerate(self.tables):
            mine = head.slots[:, level]
            mine = mine[mine >= 0]
            table.owner[mine] = head.id
            rest = node.slots[:, level]
            table.pos[rest[rest >= 0]] -= at
            head.held[level] = len(mine)
            node.held[level] -= len(mine)
            head.kids[level] = int(node.held[level] > 0 or node.kids[level] > 0)
        return head

    def trim(self, node: Node) -> bool:
        """Cut off trailing blocks that have no slot anywhere; remove the node when none is left.

        Only where no child hangs below. Amortised O(1) per block. Returns True when the node is gone.
        """
        if node.children or node.parent is None:
            return False
        keep = _used(node.slots)
        if keep == node.n:
            return False
        if self._leaving is not None:
            self._leaving(node, keep, node.n)
        self.blocks -= node.n - keep
        node.n, node.partial, node.whole = keep, False, None
        if keep == 0:
            self._remove(node)
            return True
        node.idents, node.slots = node.idents[:keep], node.slots[:keep]
        node.last_use, node.uses = node.last_use[:keep], node.uses[:keep]
        node.marks, node.hints = _part(node.marks, 0, keep), _part(node.hints, 0, keep)
        if keep * 2 < len(node.run) // self.width:  # views until then, so that a block costs no copy of its run
            node.run = node.run[: keep * self.width]
            node.idents, node.slots = node.idents.copy(), node.slots.copy()
            node.last_use, node.uses = node.last_use.copy(), node.uses.copy()
            node.marks, node.hints = _part(node.marks, 0, keep, True), _part(node.hints, 0, keep, True)
        return False

    def attach_run(
        self,
        parent: Node,
        symbols: bytes,
        idents: Idents,
        slots: NDArray[np.int32],
        last_use: Floats,
        uses: Uses,
        plain: bool,
    ) -> Node:
        """Add a run with all its arrays, which the node keeps, as a child of `parent` (recovery: runs are maximal)."""
        node = self._new_node(parent, parent.depth + parent.n, symbols, idents, slots, last_use, uses, plain)
        self._adopt(parent, node)
        self.blocks += node.n
        return node

    # -- inside -------------------------------------------------------------------------------------------------

    def _append(self, node: Node, symbols: bytes, idents: Idents, partial: bool) -> int:
        at, n = node.n, len(idents)
        slots, last_use, uses = _unused(n, len(self.tables))
        node.run = node.run[: at * self.width] + symbols
        node.idents = np.concatenate((node.idents, idents))
        node.slots = np.concatenate((node.slots, slots))
        node.last_use = np.concatenate((node.last_use, last_use))
        node.uses = np.concatenate((node.uses, uses))
        if node.marks is not None:
            node.marks = np.concatenate((node.marks, np.zeros(n, dtype=node.marks.dtype)))
        if node.hints is not None:
            node.hints = np.concatenate((node.hints, no_hints(n)))
        node.n = at + n
        node.partial = partial
        node.plain = node.plain and _is_plain(symbols)
        node.whole = None
        self.blocks += n
        return at

    def _new_node(self, parent: Node, depth: int, run: bytes, *arrays: Any) -> Node:
        if self._free_ids:
            node_id = self._free_ids.pop()
        else:
            node_id = self._next_id
            self._next_id += 1
        node = Node(node_id, parent, depth, run, *arrays)
        self.nodes[node_id] = node
        return node

    def _adopt(self, parent: Node, node: Node) -> None:
        first = node.run[: self.width]
        assert first not in parent.children
        if parent.children is _NO_CHILDREN:
            parent.children = {}
        parent.children[first] = node
        if parent.order is not None:
            parent.order.add(first)
        elif len(parent.children) > _SCAN_LIMIT:
            parent.order = SortedList(parent.children)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None and not any(node.held) and not any(node.kids)
        first = node.run[: self.width]
        del parent.children[first]
        if parent.order is not None:
            parent.order.remove(first)
        del self.nodes[node.id]
        self._free_ids.append(node.id)
        node.parent = None


def _part(array: NDArray[np.void] | None, begin: int, end: int, copy: bool = False) -> NDArray[np.void] | None:
    """A view of these entries, or a copy; None where there is nothing."""
    if array is None:
        return None
    return array[begin:end].copy() if copy else array[begin:end]


def _is_plain(symbols: bytes) -> bool:
    """No word of these is INT32_MIN."""
    return int(np.frombuffer(symbols, dtype=np.int32).min()) != INT32_MIN


def _unused(n: int, levels: int) -> tuple[NDArray[np.int32], Floats, Uses]:
    """Slots, last use and uses of n blocks that have none."""
    slots, last_use = np.empty((n, levels), dtype=np.int32), np.empty(n)
    slots.fill(ABSENT)
    last_use.fill(-np.inf)
    return slots, last_use, np.zeros(n, dtype=np.uint32)


def _used(slots: NDArray[np.int32]) -> int:
    """Blocks up to the last that has a slot anywhere. Looks from the end in doubling steps: amortised O(1) a block,
    for the caller cuts off what lies behind."""
    end, step = len(slots), 1
    while end:
        begin = max(0, end - step)
        used = true_at(np.asarray((slots[begin:end] >= 0).any(axis=1)))
        if len(used):
            return begin + int(used[-1]) + 1
        end, step = begin, step * 2
    return 0


def _joined(arrays: list[Any], take: int, dtype: Any) -> NDArray[Any]:
    """A path's arrays side by side, of the last one `take` entries; flat, a copy. `bytearray.join` costs a fifth of
    `np.concatenate` where they are many and short."""
    if not arrays:
        return np.empty(0, dtype=dtype)
    arrays[-1] = arrays[-1][:take]
    return np.frombuffer(bytearray().join(arrays), dtype=dtype)
