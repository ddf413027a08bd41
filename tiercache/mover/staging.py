"""Staging: one thread's own rows, between a slow tier and memory that others use."""

from __future__ import annotations

import mmap

from tiercache.remote import KeyTier
from tiercache.remote.guard import JOB_NBYTES
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

    def prepare(self) -> None:
        """The thread begins, and has no job yet."""

    def close(self) -> None:
        """The thread ends."""


class KeyedStaging(Staging):
    """The same for a key tier, told to it where it can make use of that. Mapped once, for `most` blocks of `stride`
    bytes, before the first job: to have the pages made can take longer than a write may."""

    def __init__(self, tier: KeyTier, most: int, stride: int) -> None:
        super().__init__()
        self._most = most
        self._stride = stride
        self._register = getattr(tier, "register", None)
        self._unregister = getattr(tier, "unregister", None)
        self._registered: Rows | None = None

    def prepare(self) -> None:
        """Map what jobs will need, and touch what the first ones do. Where that cannot be had, the jobs will say so."""
        try:
            rows = self.rows(self._most, self._stride)
        except (OSError, MemoryError):
            return
        rows.reshape(-1)[: JOB_NBYTES // 4 : mmap.PAGESIZE] = 0

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
