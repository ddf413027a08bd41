"""Leaf-first LRU, the reference policy.

A request touches its whole path at one instant and ties go deepest first, so least-recently-used order is leaf-first
order for free (measured equal to a per-block LRU touched from tail to root).
"""

from __future__ import annotations

from tiercache.index import Node
from tiercache.policy.base import Stretches

__all__ = ["LRU"]


class LRU:
    """No bonus for any block."""

    name = "lru"

    def open(self, capacity: int, below: int) -> None:
        """See Policy."""

    def begin(self, now: float, new: int, taken: int, goes_on: bool) -> None:
        """See Policy."""

    def place(self, stretches: Stretches) -> None:
        """See Policy."""

    def again(self, stretches: Stretches) -> None:
        """See Policy."""

    def mark(self, stretches: Stretches) -> None:
        """See Policy."""

    def move(self, stretches: Stretches) -> None:
        """See Policy."""

    def worth(self, node: Node, at: int) -> float:
        """See Policy."""
        return 1.0

    def leave(self, node: Node, begin: int, end: int) -> None:
        """See Policy."""

    def clear(self) -> None:
        """See Policy."""
