"""Delivery: when the mover's messages reach the planner. At once by default; in a chosen order for replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from tiercache.types import MoverMessage, PlannerMessage

__all__ = ["AtOnce", "Delivery"]


class Delivery(Protocol):
    """Stands between the mover's worker threads and the planner."""

    def bind(self, apply: Callable[[PlannerMessage], None]) -> None:
        """`apply` hands one message to the planner; it takes the planner's lock. Called once, before all else."""

    def submitted(self, messages: Sequence[MoverMessage]) -> None:
        """These go to the mover now. Called under the planner's lock: remember, nothing more."""

    def arrived(self, message: PlannerMessage) -> None:
        """The mover says something. Called on a worker thread, with no lock held."""


class AtOnce:
    """Applies each message on the thread that brings it."""

    def __init__(self) -> None:
        self._apply: Callable[[PlannerMessage], None] | None = None

    def bind(self, apply: Callable[[PlannerMessage], None]) -> None:
        """See Delivery."""
        self._apply = apply

    def submitted(self, messages: Sequence[MoverMessage]) -> None:
        """Nothing to remember."""

    def arrived(self, message: PlannerMessage) -> None:
        """See Delivery."""
        assert self._apply is not None
        self._apply(message)
