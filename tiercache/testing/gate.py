"""Gate: operations of a tier that a test blocks, and lets go on."""

from __future__ import annotations

import threading

__all__ = ["Gate"]


class Gate:
    """Operations block from `hang(op, ...)` until `wake()`; a blocked one wakes by itself after `max_s`, so that a
    test ends."""

    def __init__(self, max_s: float) -> None:
        self._max_s = max_s
        self._changed = threading.Condition()
        self._ops: set[str] = set()
        self._most: int | None = None
        self._life = 0
        self._hung = 0

    @property
    def hung(self) -> int:
        """Operations blocked now."""
        with self._changed:
            return self._hung

    def hang(self, *ops: str, most: int | None = None) -> None:
        """Block these operations from now on; at most `most` of them at a time (None: all), the others pass."""
        with self._changed:
            self._ops.update(ops)
            self._most = most

    def unblock(self, *ops: str) -> None:
        """Later operations of these kinds pass; those blocked now stay so until `wake`."""
        with self._changed:
            self._ops.difference_update(ops)

    def wake(self) -> None:
        """Let blocked operations go on, and block no more."""
        with self._changed:
            self._ops.clear()
            self._life += 1
            self._changed.notify_all()

    def wait_hung(self, n: int = 1, timeout_s: float = 5.0) -> bool:
        """Wait until n operations are blocked. False at the timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._hung >= n, timeout_s)

    def pass_through(self, op: str) -> None:
        """Called by the tier before each operation: returns at once, or when it is woken."""
        with self._changed:
            if op not in self._ops or (self._most is not None and self._hung >= self._most):
                return
            life = self._life
            self._hung += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._life != life, self._max_s)
            self._hung -= 1
