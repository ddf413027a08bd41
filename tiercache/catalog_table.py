"""The slot table in memory: what is wanted on disk, and what of it a transaction has to write. No I/O, no locking."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tiercache.catalog_open import Loaded
from tiercache.catalog_recover import BUSY, CLAIMED, CLAIMING, EMPTY, LOST, OK, WRITTEN, judge
from tiercache.catalog_rows import RECORD_SLOTS, ROW, Change, Manifest, pack_rows, write_hints
from tiercache.catalog_symbols import SymbolBook
from tiercache.types import Bools, Claims, Floats, Hints, Idents, Slots, Uses

__all__ = ["Batch", "SlotTable", "Sparse", "Taken"]

NO_SLOTS: Slots = np.empty(0, dtype=np.int32)
_BATCHES_MIN = 1024
_NO_ROW = np.zeros((), dtype=ROW)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Slots that were written together, as long as one of them waits for its claim."""

    slots: Slots
    lives: NDArray[np.uint32]
    symbols: NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """A transaction under way."""

    change: Change
    slots: Slots
    """Slots it claims."""
    lives: NDArray[np.uint32]
    era: int


@dataclass(frozen=True, slots=True, eq=False)
class Sparse:
    """Slots whose symbols should move, and where these are."""

    slots: Slots
    lives: NDArray[np.uint32]
    records: list[int]
    offsets: list[int]


class SlotTable:
    """One row per slot, and a life counter: a snapshot knows by it that a slot is no longer what it was.

    Slots are int32 arrays without repetitions. Every call is vectorised; those that say so are O(capacity).
    """

    def __init__(self, manifest: Manifest, root_ident: int) -> None:
        records = -(-manifest.capacity // RECORD_SLOTS)
        self.manifest = manifest
        self.root = root_ident
        self.rows = np.zeros(records * RECORD_SLOTS, dtype=ROW)
        self.state = np.zeros(records * RECORD_SLOTS, dtype=np.uint8)
        self.life = np.zeros(records * RECORD_SLOTS, dtype=np.uint32)
        self.book = SymbolBook(records * RECORD_SLOTS, manifest.symbol_nbytes)
        self.batches: list[Batch] = []
        self.counters: Counter[str] = Counter()
        self.epoch_file_dirty = False
        """The epoch file does not say what the manifest says or will say."""
        self.manifest_dirty = False
        self._dirty = np.zeros(records, dtype=np.bool_)
        self._used = np.zeros(records, dtype=np.bool_)
        """Records whose use counts are newer than on disk."""
        self._batches_max = _BATCHES_MIN
        self._era = 0
        self._clear = False

    def adopt(self, loaded: Loaded) -> None:
        """Start from what was on disk."""
        slots = loaded.tree.slots
        self.rows[: len(loaded.rows)] = loaded.rows
        self.state[slots] = CLAIMED
        self.book.next_record = loaded.next_symbol
        self.book.adopt(slots, loaded.records[slots], loaded.symbols.ids, loaded.symbols.totals)
        self._dirty[list(loaded.stale_records)] = True

    @property
    def has_changes(self) -> bool:
        """True where a transaction has something to write; use counts alone do not count."""
        changed = self._clear or self.manifest_dirty or self.epoch_file_dirty
        return changed or bool(self._dirty.any() or self.book.deletes or self.book.puts)

    def end(self, slots: Slots, state: int) -> None:
        """Whatever these slots held is over; they are now in `state` (EMPTY or BUSY)."""
        had = slots[self.state[slots] >= CLAIMING]
        self._dirty[had // RECORD_SLOTS] = True
        self.book.drop(had)
        self.state[slots] = state
        self.life[slots] += np.uint32(1)

    def written(self, slots: Slots, idents: Idents, checksums: Idents, claims: Claims) -> None:
        """Take the rows of what was written; slots that are not BUSY any more are refused and counted."""
        symbols = np.frombuffer(claims.symbols, dtype=np.uint8).reshape(len(slots), self.manifest.symbol_nbytes)
        ours = np.flatnonzero(self.state[slots] == BUSY)
        self.counters["refused"] += len(slots) - len(ours)
        if len(ours) == 0:
            return
        slots = slots[ours]
        rows = np.zeros(len(slots), dtype=ROW)
        rows["parent_slot"] = claims.parent_slots[ours]
        rows["parent_ident"] = claims.parent_idents[ours]
        rows["ident"] = idents[ours]
        rows["checksum"] = checksums[ours]
        rows["last_use"] = claims.last_use[ours]
        rows["uses"] = claims.uses[ours]
        if claims.hints is not None:
            write_hints(rows, slice(None), claims.hints[ours])
        self.rows[slots] = rows
        self.state[slots] = WRITTEN
        self.life[slots] += np.uint32(1)
        self.batches.append(Batch(slots, self.life[slots], symbols[ours]))
        if len(self.batches) > self._batches_max:  # they are rewritten faster than commits succeed
            self._batches_max = 2 * len(self.waiting()) + _BATCHES_MIN

    def note_use(self, slots: Slots, last_use: Floats, uses: Uses, hints: Hints | None) -> None:
        """Remember use; slots that hold nothing are passed over."""
        known = self.state[slots] >= WRITTEN
        slots = slots[known]
        self.rows["last_use"][slots] = last_use[known]
        self.rows["uses"][slots] = uses[known]
        if hints is not None:
            write_hints(self.rows, slots, hints[known])
        self._used[slots // RECORD_SLOTS] = True

    def new_epoch(self, epoch: bytes) -> None:
        """Forget everything. O(capacity)."""
        self._era += 1
        self.state[:] = EMPTY
        self.life += np.uint32(1)
        self.rows[:] = _NO_ROW
        self.batches.clear()
        self.book.clear()
        self._dirty[:] = self._used[:] = False
        self.manifest = replace(self.manifest, epoch=epoch)
        self.root = self.manifest.root_ident
        self._clear = self.manifest_dirty = self.epoch_file_dirty = True

    def lose_claims(self) -> Slots:
        """The file is gone, and an empty one in its place: forget and return all that was claimed. O(capacity)."""
        lost = np.flatnonzero(self.state >= CLAIMING).astype(np.int32)
        self.state[lost] = EMPTY
        self.life[lost] += np.uint32(1)
        self.book.clear()
        self._dirty[:] = self._used[:] = False
        self.counters["lost_claims"] += len(lost)
        return lost

    def waiting(self) -> list[Batch]:
        """Batches of which something may still be claimed; those without are dropped."""
        self.batches = [batch for batch in self.batches if (self.life[batch.slots] == batch.lives).any()]
        return list(self.batches)

    def claimable(self, batches: list[Batch]) -> bool:
        """True where a slot of `batches` may be claimed once it is synced."""
        return bool(batches) and bool((self._judged(batches)[1] == OK).any())

    def claim(self, batches: list[Batch], synced: bool) -> Slots:
        """Claim what may be of `batches`, which were complete before the sync; forget and return what is lost."""
        slots, verdict, symbols = self._judged(batches)
        if synced:
            good = verdict == OK
            ours = slots[good]
            self._refer(ours, symbols[good])
            self.state[ours] = CLAIMING
        lost: Slots = slots[verdict == LOST]
        self.state[lost] = EMPTY
        self.life[lost] += np.uint32(1)
        self.counters["lost_claims"] += len(lost)
        done = {id(batch) for batch in batches if not (self.state[batch.slots] == WRITTEN).any()}
        self.batches = [batch for batch in self.batches if id(batch) not in done]
        return lost

    def _judged(self, batches: list[Batch]) -> tuple[Slots, NDArray[np.int8], NDArray[np.uint8]]:
        """Slots of `batches` that are still what was written, what may become of each, and their symbols."""
        pairs = [(batch, self.life[batch.slots] == batch.lives) for batch in batches]
        slots = np.concatenate([NO_SLOTS, *(batch.slots[ours] for batch, ours in pairs)])
        none = np.empty((0, self.manifest.symbol_nbytes), dtype=np.uint8)
        symbols = np.concatenate([none, *(batch.symbols[ours] for batch, ours in pairs)])
        return slots, judge(slots, self.rows, self.state, self.root), symbols

    def _refer(self, slots: Slots, symbols: NDArray[np.uint8]) -> None:
        """Give `slots` their symbols in new records."""
        records, offsets = self.book.add(slots, symbols)
        self.rows["symbol_record"][slots] = records
        self.rows["symbol_offset"][slots] = offsets
        self._dirty[slots // RECORD_SLOTS] = True

    def take(self, with_uses: bool = False) -> Taken | None:
        """The snapshot of what is wanted, as a transaction; None where the file has it all. O(capacity).

        `settle` must follow.
        """
        if with_uses:
            self._dirty |= self._used
        if not self.has_changes:
            return None
        change = Change(clear=self._clear, manifest=self.manifest if self.manifest_dirty else None)
        wanted = self.rows.reshape(-1, RECORD_SLOTS)
        claimed = (self.state >= CLAIMING).reshape(-1, RECORD_SLOTS)
        for index in np.flatnonzero(self._dirty).tolist():
            packed = np.where(claimed[index], wanted[index], _NO_ROW)
            change.rows[index] = pack_rows(index, packed) if claimed[index].any() else None
        slots = np.flatnonzero(self.state == CLAIMING).astype(np.int32)
        lives = self.life[slots]
        # All memory is there: from here on what is taken is no longer wanted.
        change.symbols, change.symbol_deletes = self.book.take()
        change.next_symbol = self.book.next_record
        self._used &= ~self._dirty
        self._dirty[:] = False
        self._clear = self.manifest_dirty = False
        return Taken(change, slots, lives, self._era)

    def settle(self, taken: Taken, ok: bool) -> None:
        """A transaction has ended: its slots are claimed on disk, or everything in it is wanted again."""
        if ok:
            self.state[taken.slots[self.life[taken.slots] == taken.lives]] = CLAIMED
            return
        self._clear |= taken.change.clear
        self.manifest_dirty |= taken.change.manifest is not None
        if taken.era == self._era:
            self._dirty[list(taken.change.rows)] = True
            self.book.give_back(taken.change.symbols, taken.change.symbol_deletes)

    def expected(self, slots: Slots) -> tuple[Idents, Idents]:
        """Ident and checksum per slot, 0 where nothing is known."""
        known = self.state[slots] >= WRITTEN
        rows, none = self.rows[slots], np.uint64(0)
        return np.where(known, rows["ident"], none), np.where(known, rows["checksum"], none)

    def sparse(self) -> Sparse:
        """A few claimed slots whose symbol records are nearly empty, where dead symbols are many. O(capacity) then."""
        slots = self.book.sparse_slots()
        slots = slots[self.state[slots] == CLAIMED]
        rows = self.rows[slots]
        return Sparse(slots, self.life[slots], rows["symbol_record"].tolist(), rows["symbol_offset"].tolist())

    def move_symbols(self, sparse: Sparse, symbols: NDArray[np.uint8], there: Bools) -> None:
        """Refer the slots of `sparse` that are still the same, and whose `symbols` are `there`, to new records."""
        slots = sparse.slots
        same = there & (self.life[slots] == sparse.lives) & (self.state[slots] == CLAIMED)
        self.book.drop(slots[same])
        self._refer(slots[same], symbols[same])
        self.counters["moved_symbols"] += int(np.count_nonzero(same))
