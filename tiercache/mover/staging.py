"""Staging: one thread's own rows, between a slow tier and memory that others use."""

from __future__ import annotations

from tiercache.remote import KeyTier
from tiercache.tiers.base import Rows
from tiercache.tiers.dram import map_rows

__all__ = ["KeyedStaging", "Staging"]


class Staging:
    """One thread's aligned rows, mapped at first use: what a slow read fills and a last copy empties."""

    def __init__(self) -> None:
        self._rows: Rows | None = None

    def rows(self, n: int, stride: int) -> Rows:
        """Uint8 `[n, stride]`, page aligned; undefined contents, valid until the next call."""
        if self._rows is None or len(self._rows) < n:
            self._rows = self._map(n, stride)
        return self._rows[:n]

    def _map(self, n: int, stride: int) -> Rows:
        return map_rows(n, stride)

    def close(self) -> None:
        """The thread ends."""


class KeyedStaging(Staging):
    """The same for a key tier, told to it where it can make use of that. Mapped once, for `most` blocks."""

    def __init__(self, tier: KeyTier, most: int) -> None:
        super().__init__()
        self._most = most
        self._register = getattr(tier, "register", None)
        self._unregister = getattr(tier, "unregister", None)
        self._registered: Rows | None = None

    def _map(self, n: int, stride: int) -> Rows:
        self.close()
        rows = self._rows = map_rows(max(n, self._most), stride)
        if self._register is not None:
            try:
                self._register(rows.reshape(-1))
            except OSError:  # it copies, then
                return rows
            self._registered = rows
        return rows

    def close(self) -> None:
        """The thread ends, or takes other memory."""
        rows, self._registered = self._registered, None
        if rows is not None and self._unregister is not None:
            try:
                self._unregister(rows.reshape(-1))
            except OSError:  # its connection is gone, and what it knew of the memory with it
                return
