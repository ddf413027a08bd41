"""The one interface of all eviction policies.

The planner evicts the leaf with the smallest key first, ties deepest first. The key of a block is its last use in
seconds plus a bonus, which the policy gives at each use: nothing for LRU, seconds (mostly negative) for a policy that
expects some blocks to be used again sooner than others; one for memory, one for a persistent level, which is larger. So
a key stands still between two uses of its block.

A policy holds no clock and does no I/O. The planner calls it under its lock, for each request in this order: `begin`;
`place` with what is new, `again` with what was there (`move`, where the request used it before); then `mark`. While
a method is called, `last_use` and `uses` of the blocks it is given are still those before the request.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np

from tiercache.index import Node

__all__ = ["MARK", "Policy", "Stretches"]

MARK = np.dtype([("bonus", np.float32), ("below", np.float32), ("kind", np.uint8)])
"""What a policy keeps per block, in `Node.marks`: seconds, in memory and on a persistent level, and a class of its own
(None: no block has a bonus)."""

Stretches: TypeAlias = Iterable[tuple[Node, int, int]]
"""Nodes with bounds of blocks in their run, along a path from its root."""


@runtime_checkable
class Policy(Protocol):
    """Order of eviction."""

    name: str

    def open(self, capacity: int, below: int) -> None:
        """The first level has so many slots, the persistent one `below` (0: there is none). Called once, before all
        else."""

    def begin(self, now: float, new: int, taken: int, goes_on: bool) -> None:
        """A request uses a path at `now` (seconds) and brings `new` blocks. taken: slots of the first level ever given
        out, the measure of how much passes through it. goes_on: it began before, and stores now what it lacked then."""

    def place(self, stretches: Stretches) -> None:
        """These blocks are new in the tree. May set their `uses`, from what it remembers of them."""

    def again(self, stretches: Stretches) -> None:
        """The request uses these blocks, which were there."""

    def mark(self, stretches: Stretches) -> None:
        """Give these blocks, which the request uses, their marks."""

    def move(self, stretches: Stretches) -> None:
        """The request goes on: these blocks, which it used before, get `last_use` of now and keep their marks."""

    def worth(self, node: Node, at: int) -> float:
        """The share of such blocks as this one that are used again while the persistent level would hold them, by all
        that is known; 1.0 for a policy that does not know. How many hits there are to expect of a write there."""

    def leave(self, node: Node, begin: int, end: int) -> None:
        """Blocks `[begin, end)` of a run leave the tree; its arrays are still whole."""

    def clear(self) -> None:
        """The tree is empty again (a new epoch). What was learnt stays."""
