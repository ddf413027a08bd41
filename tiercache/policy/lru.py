"""Leaf-first LRU, the reference policy.

A request touches its whole path at one instant and ties go deepest first, so least-recently-used order is leaf-first
order for free (measured equal to a per-block LRU touched from tail to root).
"""

from __future__ import annotations

__all__ = ["LRU"]


class LRU:
    """Key = time of the last use."""

    name = "lru"

    def key(self, last_use: float, uses: int, depth: int) -> float:
        """The block's last use, in seconds."""
        return last_use
