"""Bounce buffers: registered memory of the tier's own, for rows that lie elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tiercache.remote.base import Values

__all__ = ["BOUNCE_NBYTES", "Bounces"]

BOUNCE_NBYTES = 16 << 20
"""Of one buffer, or of one value where that is more."""
_MOST = 4


class _Makes(Protocol):
    setups: int

    def bounce(self, nbytes: int) -> Values:
        """See `MooncakeClient.bounce`."""

    def unregister(self, memory: Values) -> None:
        """See `RegistersMemory`."""


class Bounces:
    """At most 4 buffers, made when they are needed. Safe to use from several threads, within `MooncakeClient.using`."""

    def __init__(self, client: _Makes) -> None:
        self._client = client
        self._free: list[tuple[int, Values]] = []
        """With the client's `setups` when each was made: memory may go with its client."""
        self._made = 0
        self._changed = threading.Condition()

    @contextmanager
    def like(self, rows: Values, deadline_s: float) -> Iterator[Values]:
        """Rows `[n, width]` as these are, side by side in a buffer; undefined at first. TimeoutError where no buffer
        was free until the deadline."""
        made = self._client.setups
        buffer = self._take(rows.size, deadline_s)
        try:
            yield buffer[: rows.size].reshape(rows.shape)
        finally:
            with self._changed:
                self._free.append((made, buffer))
                self._changed.notify()

    def _take(self, nbytes: int, deadline_s: float) -> Values:
        with self._changed:
            if not self._changed.wait_for(lambda: self._free or self._made < _MOST, deadline_s):
                raise TimeoutError(f"no bounce buffer was free for {deadline_s:g} s")
            if self._free:
                made, buffer = self._free.pop()
                if buffer.nbytes >= nbytes and made == self._client.setups:
                    return buffer
                self._client.unregister(buffer)
            else:
                self._made += 1
        try:
            return self._client.bounce(max(BOUNCE_NBYTES, nbytes))
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise
