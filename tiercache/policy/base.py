"""The one interface of all eviction policies.

A policy gives each block a key; the planner evicts the leaf with the smallest key first, ties deepest first. It holds
no clock and does no I/O; `now` is an argument everywhere.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

__all__ = ["Policy"]


@runtime_checkable
class Policy(Protocol):
    """Order of eviction."""

    name: str

    def key(self, last_use: float, uses: int, depth: int) -> float:
        """Key of a block: smaller goes first. Pure between two touches of the block.

        last_use: seconds, of the latest request whose path held the block (-inf: released). uses: how many such
        requests. depth: blocks before it on its path.
        """
