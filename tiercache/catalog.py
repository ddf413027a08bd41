"""The catalog: which block is in which slot of the NVMe tier, in memory and, a moment later, on disk.

The tables say what is wanted. A commit syncs the payload, then writes one snapshot of what is wanted in one
transaction. A slot is claimed only with bytes that were synced, and only under a claimed parent.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import lmdb
import numpy as np

from tiercache.catalog_check import set_aside, write_marker
from tiercache.catalog_open import (
    Loaded,
    adopt,
    cold,
    make_empty,
    make_fresh,
    open_store,
    peek_manifest,
    recovered_of,
    reserve,
)
from tiercache.catalog_recover import BUSY, CLAIMED, CLAIMING, EMPTY, WRITTEN
from tiercache.catalog_rows import Change, DamagedCatalogError, Manifest, RowStore, used_nbytes
from tiercache.catalog_shrink import shrink
from tiercache.catalog_table import NO_SLOTS, SlotTable, Taken
from tiercache.directory import StoreDirectory
from tiercache.errors import CacheClosedError, ConfigError
from tiercache.tiers.fileio import OS_FILES, FileOps
from tiercache.tiers.nvme import extents_for
from tiercache.types import Bools, Claims, Floats, Hints, Idents, Recovered, Slots, Uses

__all__ = ["Catalog", "Durability", "Manifest", "peek_manifest"]

Durability = Literal["power", "process"]
_LOG = logging.getLogger("tiercache.catalog")
_UNUSABLE = (DamagedCatalogError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError)
"""What says that trying again is of no use."""
_COMMIT_WAIT_S = 60.0
"""How long a second caller of `commit` waits for the first."""
_abandoned: list[RowStore] = []
"""Stores inherited by a forked child: their destructors must not run there."""


class Catalog:
    """Made by `open`. Thread-safe; no call but `commit` and `close` does I/O, and none holds the lock meanwhile.

    Slots are int32 arrays without repetitions, of any length.
    """

    def __init__(
        self, directory: StoreDirectory, store: RowStore, table: SlotTable, durability: Durability, ops: FileOps
    ) -> None:
        self.directory = directory
        self.durability = durability
        self.recovered: Recovered = cold("new")
        """What was on disk at the start; parents before children."""
        self.healthy = True
        """False after a commit that failed, until one succeeds."""
        self.counters: Counter[str] = table.counters
        """Commits, failures by kind (`failed_...`), lost claims, refused writes."""
        self.last_error = ""
        self._ops = ops
        self._store: RowStore | None = store
        self._table = table
        self._lock = threading.Lock()
        self._committing = threading.Lock()
        self._closed = False
        self._damage = ""
        """Why the file cannot be used any more."""

    @classmethod
    def open(
        cls,
        directory: StoreDirectory,
        manifest: Manifest,
        capacity: int,
        *,
        durability: Durability = "power",
        root_ident: int,
        ops: FileOps = OS_FILES,
    ) -> Catalog:
        """Open the catalog of `directory`, or begin one: see `recovered` for what was kept and why not more.

        `manifest` says what the caller's blocks are; `capacity` is in slots. What was made for another namespace,
        layout, block size, store or epoch is forgotten. A smaller capacity than before forgets and moves blocks (here,
        with payload I/O through `ops`); a larger one shows in `manifest.extents`. Open the payload files afterwards,
        with those extents. ConfigError: no space. FormatVersionError: nothing was changed.
        """
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: at least 1")
        if directory.closed:
            raise CacheClosedError(f"{directory.path}: the directory is closed")
        loaded, reason = adopt(directory, manifest, root_ident)
        if loaded is None:
            fresh = make_fresh(directory, manifest, capacity, ops)
            table = SlotTable(fresh, root_ident)
            catalog = cls(directory, open_store(directory, fresh, durability, ops), table, durability, ops)
            catalog.recovered = cold(reason)
            return catalog
        grown = capacity > loaded.manifest.capacity
        if grown:
            extents = extents_for(capacity, loaded.manifest.extents)
            loaded.manifest = replace(loaded.manifest, capacity=capacity, extents=extents)
        store = open_store(directory, loaded.manifest, durability, ops)
        try:
            loaded = _fit(directory, store, loaded, capacity, root_ident, ops)
            table = SlotTable(loaded.manifest, root_ident)
            table.adopt(loaded)
            table.manifest_dirty = grown
            catalog = cls(directory, store, table, durability, ops)
            catalog.recovered = recovered_of(loaded)
        except BaseException:
            store.close()
            raise
        if loaded.forgotten:
            _LOG.warning("%s: %d blocks had no parent or no room: forgotten", directory.path, loaded.forgotten)
        return catalog

    @property
    def manifest(self) -> Manifest:
        """What the catalog says, or will say with the next commit, of the bytes."""
        return self._table.manifest

    @property
    def dirty(self) -> bool:
        """True where a commit may have something to write (use counts alone do not count)."""
        with self._lock:
            return self._table.has_changes or bool(self._table.batches)

    @property
    def pending_slots(self) -> int:
        """Slots that are written and not claimed on disk yet."""
        with self._lock:
            state = self._table.state
            return int(np.count_nonzero((state == WRITTEN) | (state == CLAIMING)))

    @property
    def claimed_slots(self) -> int:
        """Slots that are claimed on disk."""
        with self._lock:
            return int(np.count_nonzero(self._table.state == CLAIMED))

    def claimed(self, slots: Slots) -> Bools:
        """Which of `slots` are claimed on disk."""
        with self._lock:
            marks: Bools = self._table.state[slots] == CLAIMED
            return marks

    def starting(self, slots: Slots) -> None:
        """A job is about to write these: what they held is over, with the next commit also on disk."""
        with self._lock:
            self._table.end(slots, BUSY)

    def written(self, slots: Slots, idents: Idents, checksums: Idents, claims: Claims) -> None:
        """The bytes of n slots are in the file (not synced yet): readable now, claimed by a later commit.

        Slots that were forgotten since their `starting` are passed over, and counted as `refused`.
        """
        with self._lock:
            self._table.written(slots, idents, checksums, claims)

    def forget(self, slots: Slots) -> None:
        """These hold nothing any more (a failed write included); with the next commit also on disk."""
        with self._lock:
            self._table.end(slots, EMPTY)

    def note_use(self, slots: Slots, last_use: Floats, uses: Uses, hints: Hints | None = None) -> None:
        """Remember when and how often these were used, and what was said of them (None: as before). Goes out with a
        later commit of the same record, or at close."""
        with self._lock:
            self._table.note_use(slots, last_use, uses, hints)

    def expected(self, slots: Slots) -> tuple[Idents, Idents]:
        """Ident and checksum that the bytes in each slot must have; both 0 where nothing is known of it."""
        with self._lock:
            return self._table.expected(slots)

    def new_epoch(self, epoch: bytes) -> None:
        """Forget every claim. The next commit replaces the epoch file, then writes manifest and tables.

        What is written from now on must belong to the new epoch; slots need a new `starting`.
        """
        with self._lock:
            self._table.new_epoch(epoch)

    def commit(self, sync: Callable[[], bool]) -> Slots:
        """Sync the payload if there is something to claim, then write all that is wanted, in one synced transaction.

        Returns the slots whose claims are lost: their parent holds nothing, or something else. They are forgotten.
        After a failure (`healthy` is False) everything is kept for the next call; the caller waits in between. Where
        the file is gone, too short or damaged it is set aside, an empty one takes its place, and all claims are lost.
        """
        self._check_open()
        if not self._committing.acquire(timeout=_COMMIT_WAIT_S):
            self._failed("busy", "another commit does not end")
            return NO_SLOTS
        try:
            self._check_open()
            return self._commit(sync)
        finally:
            self._committing.release()

    def close(self, clean: bool = True, wait_s: float = 10.0) -> bool:
        """Close the file. With `clean`: write what is still wanted (no new claims) and the marker of an orderly close.

        Without it, or after failures, the next start copies and checks the catalog. May be called twice. Returns False
        where a commit still runs after `wait_s`: it claims nothing more, but the file is not closed, and the directory
        must stay ours.
        """
        if not self._committing.acquire(timeout=0.0 if self._closed else wait_s):
            with self._lock:
                self._closed = True
            self._failed("busy", "a commit does not end: not closed")
            return False
        try:
            if self._store is None:
                self._closed = True
                return True
            clean = clean and not self._closed
            self._closed = True
            clean = clean and self._write_rest()
            clean = clean and not self._table.epoch_file_dirty and self._store is not None
            self._close_store()
            if clean:
                with contextlib.suppress(OSError, DamagedCatalogError):
                    write_marker(self.directory)
            return True
        finally:
            self._committing.release()

    def abandon(self) -> None:
        """For a forked child: LMDB is never touched again, not even to close it. Takes no lock."""
        self._closed = True
        self._committing = threading.Lock()  # a thread of the parent may have held the other one
        if self._store is not None:
            _abandoned.append(self._store)
            self._store = None

    def _check_open(self) -> None:
        if self._closed:
            raise CacheClosedError("the catalog is closed")

    def _commit(self, sync: Callable[[], bool]) -> Slots:
        self._move_sparse_symbols()
        with self._lock:
            seen = self._table.waiting()
            claimable = self._table.claimable(seen)
        synced = not claimable or self.durability == "process" or sync()
        if not synced:
            self._failed("sync", "the payload could not be synced")
        with self._lock:
            if self._closed:  # by a close that did not wait for this any longer
                return NO_SLOTS
            lost = self._table.claim(seen, synced)
            taken = self._table.take()
        written = taken is None or self._write(taken)
        self.healthy = synced and written and not self._table.epoch_file_dirty
        return np.concatenate((lost, self._begin_anew())) if self._damage else lost

    def _begin_anew(self) -> Slots:
        """Replace a file that cannot be used by an empty one. Returns the slots that were claimed in the old one."""
        directory = self.directory
        try:
            if directory.catalog_path.parent.exists():
                set_aside(directory, self._damage)
            make_empty(directory, self._table.manifest, self._ops)
        except (OSError, ConfigError) as e:
            self._failed("anew", f"{self._damage}; no new file: {e}")
            return NO_SLOTS
        self.counters["begun_anew"] += 1
        self._damage = ""
        with self._lock:
            return self._table.lose_claims()

    def _write_rest(self) -> bool:
        """The last transaction, with use counts and without new claims."""
        try:
            with self._lock:
                taken = self._table.take(with_uses=True)
        except MemoryError:
            self._failed("transaction", "no memory")
            return False
        return taken is None or self._write(taken)

    def _write(self, taken: Taken) -> bool:
        """Run a transaction; on failure everything in it is wanted again."""
        if self._table.epoch_file_dirty:
            self._write_epoch_file()
        error = self._apply(taken.change)
        with self._lock:
            self._table.settle(taken, error is None)
        if error is not None:
            self._failed("transaction", error)
            return False
        self.counters["commits"] += 1
        return True

    def _write_epoch_file(self) -> None:
        """Replace the epoch file. Before the manifest: in between the two differ, and a start is cold."""
        epoch = self._table.manifest.epoch
        try:
            self.directory.write_epoch(epoch)
        except (OSError, MemoryError) as e:
            self._failed("epoch", f"the epoch file: {e}")
            return
        with self._lock:
            self._table.epoch_file_dirty = self._table.manifest.epoch != epoch

    def _apply(self, change: Change) -> str | None:
        """Write one transaction, with a larger map where it does not fit; what went wrong, or None."""
        try:
            if self._store is None:
                used_nbytes(self.directory.catalog_path)
                self._store = open_store(self.directory, self._table.manifest, self.durability, self._ops)
            try:
                self._store.apply(change)
            except lmdb.MapFullError:
                self.counters["map_grown"] += 1
                reserve(self.directory, self._store.path, self._store.grow(), self._ops)
                self._store.apply(change)
        except (*_UNUSABLE, FileNotFoundError) as e:
            self._close_store()
            self._damage = f"{type(e).__name__}: {e}"
            return self._damage
        except (lmdb.Error, OSError, ConfigError, MemoryError) as e:
            self._close_store()
            return f"{type(e).__name__}: {e}"
        return None

    def _close_store(self) -> None:
        """After an error the next transaction opens the file anew, and starts from what it has."""
        store, self._store = self._store, None
        with contextlib.suppress(lmdb.Error, OSError):
            if store is not None:
                store.close()

    def _move_sparse_symbols(self) -> None:
        """Rewrite the symbols of a few nearly empty records, so that dead symbols cannot fill the file."""
        with self._lock:
            sparse = self._table.sparse()
        if len(sparse.slots) == 0 or self._store is None:
            return
        try:
            found = self._store.symbols(set(sparse.records))
        except (lmdb.Error, DamagedCatalogError) as e:
            self._failed("transaction", f"reading symbols: {e}")
            return
        width = self.manifest.symbol_nbytes
        symbols = np.zeros((len(sparse.slots), width), dtype=np.uint8)
        there = np.array([record in found for record in sparse.records], dtype=np.bool_)
        for i in np.flatnonzero(there).tolist():
            value, offset = found[sparse.records[i]], 8 + sparse.offsets[i] * width
            symbols[i] = np.frombuffer(value, dtype=np.uint8, count=width, offset=offset)
        with self._lock:
            self._table.move_symbols(sparse, symbols, there)

    def _failed(self, what: str, text: str) -> None:
        self.healthy = False
        self.counters[f"failed_{what}"] += 1
        self.last_error = text
        _LOG.warning("%s: commit: %s", self.directory.path, text)


def _fit(
    directory: StoreDirectory, store: RowStore, loaded: Loaded, capacity: int, root_ident: int, ops: FileOps
) -> Loaded:
    """What is left of a catalog where there are fewer slots now. ConfigError where that cannot be brought about."""
    before = loaded.manifest.capacity
    if capacity >= before:
        return loaded
    try:
        return shrink(directory, store, loaded, capacity, root_ident, ops)
    except (lmdb.Error, OSError) as e:
        raise ConfigError("size", capacity, f"shrinking from {before} slots failed ({e})") from e
