"""Which symbol records exist, and how many slots still refer to each. Memory only; no locking of its own."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercache.catalog_rows import pack_symbols, symbols_per_record
from tiercache.types import Slots

__all__ = ["SymbolBook"]

_SLACK = 4096
"""Dead symbols that are not worth a rewrite."""


class SymbolBook:
    """Symbols are written once, with the slots claimed together, and go when no live slot refers to their record.

    A record has a handle (an index here, used again) and an id (its key in the catalog, never used again).
    """

    def __init__(self, capacity: int, width: int, next_record: int = 1) -> None:
        self.width = width
        self.next_record = next_record
        self.puts: dict[int, bytes] = {}
        """Records that the next transaction must write."""
        self.deletes: set[int] = set()
        """Records that the next transaction must delete."""
        self._handle = np.full(capacity, -1, dtype=np.int32)
        self._ids = np.zeros(capacity, dtype=np.uint64)
        self._live = np.zeros(capacity, dtype=np.int32)
        self._total = np.zeros(capacity, dtype=np.int32)
        self._free: list[int] = []
        self._used = 0

    def adopt(
        self, slots: Slots, records: NDArray[np.int32], ids: NDArray[np.uint64], totals: NDArray[np.int32]
    ) -> None:
        """Start from what a catalog holds: records `ids` of `totals` symbols; `slots[i]` refers to `ids[records[i]]`.

        Records that nothing refers to are deleted with the next transaction.
        """
        live = np.bincount(records, minlength=len(ids)).astype(np.int32)
        kept = np.flatnonzero(live)
        handles = np.cumsum(live > 0, dtype=np.int32) - 1
        self._used = len(kept)
        self._handle[slots] = handles[records]
        self._ids[: self._used] = ids[kept]
        self._live[: self._used] = live[kept]
        self._total[: self._used] = totals[kept]
        self.deletes.update(ids[live == 0].tolist())

    def add(self, slots: Slots, symbols: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
        """Take the `symbols` (`[n, width]`) of `slots`, which had none: record id and offset of each."""
        n, most = len(slots), symbols_per_record(self.width)
        records = np.empty(n, dtype=np.uint64)
        for begin in range(0, n, most):
            end = min(n, begin + most)
            handle = self._free.pop() if self._free else self._used
            self._used += handle == self._used
            record, self.next_record = self.next_record, self.next_record + 1
            self.puts[record] = pack_symbols(record, symbols[begin:end].tobytes(), self.width)
            self._ids[handle] = records[begin:end] = record
            self._live[handle] = self._total[handle] = end - begin
            self._handle[slots[begin:end]] = handle
        return records, (np.arange(n) % most).astype(np.uint16)

    def drop(self, slots: Slots) -> None:
        """These slots (each once) need their symbols no more; slots without any are passed over."""
        handles = self._handle[slots]
        self._handle[slots] = -1
        handles = handles[handles >= 0]
        np.subtract.at(self._live, handles, 1)
        handles = np.unique(handles)
        for handle in handles[self._live[handles] == 0].tolist():
            record = int(self._ids[handle])
            self.puts.pop(record, None)
            self.deletes.add(record)
            self._total[handle] = 0
            self._free.append(handle)

    def clear(self) -> None:
        """Forget everything; the ids go on."""
        self.puts, self.deletes = {}, set()
        self._handle[:] = -1
        self._live[:] = 0
        self._total[:] = 0
        self._free, self._used = [], 0

    def take(self) -> tuple[dict[int, bytes], set[int]]:
        """What a transaction must write and delete; taken out."""
        taken = self.puts, self.deletes
        self.puts, self.deletes = {}, set()
        return taken

    def give_back(self, puts: dict[int, bytes], deletes: set[int]) -> None:
        """A transaction with these failed: they are wanted still, except what died meanwhile."""
        self.deletes |= deletes
        for record, value in puts.items():
            if record not in self.deletes:
                self.puts[record] = value

    def sparse_slots(self, limit: int = 64) -> Slots:
        """Slots whose symbols should move to new records, since more symbols on disk are dead than alive.

        Those of the `limit` emptiest records; none where the dead ones do not matter.
        """
        live, total = self._live[: self._used], self._total[: self._used]
        alive = int(live.sum())
        if int(total.sum()) - alive <= alive + _SLACK:
            return np.empty(0, dtype=np.int32)
        used = np.flatnonzero(live)
        emptiest = used[np.argsort(live[used] / total[used], kind="stable")[:limit]]
        chosen = np.zeros(len(self._live) + 1, dtype=np.bool_)
        chosen[emptiest] = True
        return np.flatnonzero(chosen[self._handle]).astype(np.int32)
