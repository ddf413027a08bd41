"""Hints: what a key tier said it has, and lacks, for as long as that may be believed.

A second radix tree over symbols, without a slot anywhere: a hint is no copy, pins nothing and keeps nothing alive. Per
block it holds what was said and until when. Bounded; what was noted longest ago goes first, whole runs at a time.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import first_false
from tiercache.index import Node, PrefixIndex
from tiercache.types import Bools

__all__ = ["ASKED", "MISSING", "THERE", "UNKNOWN", "Hints", "Known"]

UNKNOWN, MISSING, THERE, ASKED = range(4)
"""What is known of a block; in `Node.uses`, as `Node.last_use` is the time until which it holds."""


class Known(NamedTuple):
    """Of the blocks of a prompt from one on."""

    there: int
    """So many that a key tier should have,"""
    asked: int
    """so many after these for which it is being asked (or that should be there, below one for which it is),"""
    missing: bool
    """and the block after these is one that it lacks, or could not say or bring."""


class Hints:
    """At most `capacity` blocks, those above a hinted one included."""

    def __init__(self, width: int, capacity: int) -> None:
        self._width = width
        self.capacity = capacity
        self._index = PrefixIndex(width, ())
        self._noted: OrderedDict[Node, None] = OrderedDict()
        """Every leaf, and maybe others, those that were noted longest ago first."""

    def __len__(self) -> int:
        return self._index.blocks

    def clear(self) -> None:
        """Know nothing."""
        self._index = PrefixIndex(self._width, ())
        self._noted.clear()

    def known(self, symbols: bytes, begin: int, n: int, now: float) -> Known:
        """What is known of blocks `[begin, n)` of a prompt. Mutates nothing."""
        said = []
        for node, take in self._index.walk(symbols, n).path:
            first = max(0, begin - node.depth)
            if first < take:
                said.append(np.where(node.last_use[first:take] > now, node.uses[first:take], UNKNOWN))
        states = np.concatenate(said) if said else np.empty(0, dtype=np.uint32)
        there = first_false(states == THERE)
        asked = first_false((states[there:] == ASKED) | (states[there:] == THERE))
        at = there + asked
        return Known(there, asked, at < len(states) and int(states[at]) == MISSING)

    def there(self, symbols: bytes, positions: NDArray[np.int32], now: float) -> Bools:
        """Which blocks at these (ascending) positions of a prompt a key tier should have. Mutates nothing."""
        end = int(positions[-1]) + 1
        known = np.zeros(end, dtype=np.bool_)
        for node, take in self._index.walk(symbols, min(end, len(symbols) // self._width)).path:
            known[node.depth : node.depth + take] = (node.uses[:take] == THERE) & (node.last_use[:take] > now)
        return np.asarray(known[positions])

    def note(self, symbols: bytes, begin: int, end: int, state: int, until: float) -> None:
        """Blocks `[begin, end)` of a prompt are in this state until then."""
        if begin >= end:
            return
        walk = self._index.walk(symbols, end)
        path = walk.path
        if walk.blocks < end:
            more = end - walk.blocks
            run = symbols[walk.blocks * self._width : end * self._width]
            node, _ = self._index.extend(path, run, np.zeros(more, dtype=np.uint64), False)
            if not path or path.nodes[-1] is not node:
                path.nodes.append(node)
            path.take = node.n
        for node, take in path:
            first = max(0, begin - node.depth)
            node.uses[first:take] = state
            node.last_use[first:take] = until
        if path:
            self._noted[path.nodes[-1]] = None
            self._noted.move_to_end(path.nodes[-1])
        self._shrink()

    def _shrink(self) -> None:
        """Let go of the leaves that were noted longest ago."""
        while self._index.blocks > self.capacity:
            leaf, _ = self._noted.popitem(last=False)
            parent = leaf.parent
            if parent is None or leaf.children:
                continue
            self._index.trim(leaf)
            if parent.parent is not None and not parent.children and parent not in self._noted:
                self._noted[parent] = None
                self._noted.move_to_end(parent, last=False)
