"""Opening a catalog: read what is there, decide whether it may be used, and keep what is reachable."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import lmdb
import numpy as np
from numpy.typing import NDArray

from tiercache.catalog_check import drop_marker, install, make_sound, reading, set_aside, unreadable
from tiercache.catalog_recover import Tree, trace
from tiercache.catalog_rows import (
    RECORD_SLOTS,
    ROW,
    Change,
    DamagedCatalogError,
    Manifest,
    RowStore,
    RowTable,
    check_record,
    is_damage,
    map_nbytes_for,
    read_hints,
    used_nbytes,
)
from tiercache.directory import StoreDirectory
from tiercache.errors import ConfigError
from tiercache.tiers.fileio import OS_FILES, FileOps
from tiercache.tiers.nvme import extents_for
from tiercache.types import Recovered, Slots

__all__ = [
    "Loaded",
    "Symbols",
    "adopt",
    "load",
    "make_empty",
    "make_fresh",
    "open_store",
    "peek_manifest",
    "recovered_of",
]

_LOG = logging.getLogger("tiercache.catalog")


@dataclass(slots=True, eq=False)
class Symbols:
    """All whole symbol records of a catalog, ascending."""

    ids: NDArray[np.uint64]
    totals: NDArray[np.int32]
    """Symbols per record."""
    starts: NDArray[np.int64]
    """Where each record's symbols begin in `raw`."""
    raw: NDArray[np.uint8]
    width: int

    def find(self, rows: RowTable) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
        """Index of the record of each row, and whether it holds the row's symbol."""
        if len(self.ids) == 0:
            return np.zeros(len(rows), dtype=np.int32), np.zeros(len(rows), dtype=np.bool_)
        records = np.ascontiguousarray(rows["symbol_record"])
        at = np.minimum(np.searchsorted(self.ids, records), len(self.ids) - 1).astype(np.int32)
        return at, (self.ids[at] == records) & (rows["symbol_offset"] < self.totals[at])

    def read(self, at: NDArray[np.int32], offsets: NDArray[np.uint16]) -> bytes:
        """The symbols at these offsets in these records, side by side."""
        if len(at) == 0:
            return b""
        begins = self.starts[at] + offsets.astype(np.int64) * self.width
        windows = np.lib.stride_tricks.sliding_window_view(self.raw, self.width)
        return bytes(windows[begins].tobytes())


@dataclass(slots=True, eq=False)
class Loaded:
    """What a catalog file says, and what of it is reachable."""

    manifest: Manifest
    next_symbol: int
    rows: RowTable
    """`[capacity]`; only the slots of `tree` are not zero."""
    tree: Tree
    symbols: Symbols
    records: NDArray[np.int32]
    """`[capacity]`: index of each slot's record within `symbols`; only meant for the slots of `tree`."""
    forgotten: int
    """Rows dropped since they were not reachable, had no symbol, or no room any more."""
    stale_records: set[int]
    """Records of `rows` that the file still has otherwise."""


def peek_manifest(directory: StoreDirectory) -> Manifest | None:
    """What `directory` was last used for; None where it holds no usable catalog.

    `epoch` is b"" where the catalog and the epoch file disagree: a start with either is cold, take a new one. Copies
    the catalog first where the last stop was unclean. FormatVersionError, ConfigError (no space for that copy).
    """
    make_sound(directory)
    path = directory.catalog_path
    if not path.exists():
        return None
    try:
        with _opened(directory) as store:
            manifest = store.read_manifest()[0]
    except (DamagedCatalogError, lmdb.Error, OSError) as e:
        if not is_damage(e):
            raise unreadable(directory, e) from e
        _put_aside(directory, e)
        return None
    if manifest.store_id != directory.store_id:
        return None
    return manifest if manifest.epoch == directory.read_epoch() else replace(manifest, epoch=b"")


def adopt(directory: StoreDirectory, wanted: Manifest, root_ident: int) -> tuple[Loaded | None, str]:
    """Read the catalog of `directory` if it is of the `wanted` kind; else None and why not. Changes no catalog file.

    FormatVersionError, ConfigError as `peek_manifest`.
    """
    make_sound(directory)
    path = directory.catalog_path
    if not path.exists():
        return None, directory.cold_reason or "new"
    try:
        with _opened(directory) as store:
            manifest, next_symbol = store.read_manifest()
            reason = _difference(directory, manifest, wanted)
            if reason:
                _LOG.warning("%s: its catalog is of another %s: forgotten, the start is cold", directory.path, reason)
                directory.cold_reason = reason
                return None, reason
            loaded = load(store, manifest, next_symbol, root_ident)
    except (DamagedCatalogError, lmdb.Error, OSError) as e:
        if not is_damage(e):
            raise unreadable(directory, e) from e
        _put_aside(directory, e)
        return None, directory.cold_reason
    return loaded, ""


@contextlib.contextmanager
def _opened(directory: StoreDirectory) -> Iterator[RowStore]:
    """The catalog, for reading."""
    with reading(directory):
        store = RowStore(directory.catalog_path, used_nbytes(directory.catalog_path), readonly=True)
        try:
            yield store
        finally:
            store.close()


def _put_aside(directory: StoreDirectory, why: Exception) -> None:
    try:
        set_aside(directory, str(why))
    except OSError as e:
        raise ConfigError("path", str(directory.path), f"its damaged catalog cannot be renamed ({e})") from e


def _difference(directory: StoreDirectory, found: Manifest, wanted: Manifest) -> str:
    """The first thing in which a catalog is not the wanted one, "" if it is."""
    if found.store_id != directory.store_id:
        return "store"
    if found.namespace != wanted.namespace:
        return "namespace"
    if dict(found.layout) != dict(wanted.layout) or found.block_nbytes != wanted.block_nbytes:
        return "layout"
    if found.block_tokens != wanted.block_tokens or found.symbol_nbytes != wanted.symbol_nbytes:
        return "block_tokens"
    if found.epoch != wanted.epoch or directory.read_epoch() != wanted.epoch:
        return "epoch"
    return ""


def load(store: RowStore, manifest: Manifest, next_symbol: int, root_ident: int) -> Loaded:
    """Read all records into arrays and keep what is reachable; one sequential pass, no payload."""
    rows = _load_rows(store, manifest.capacity)
    symbols = _load_symbols(store, manifest.symbol_nbytes)
    present = rows["symbol_record"] != 0
    slots = np.flatnonzero(present)
    records = np.zeros(len(rows), dtype=np.int32)
    records[slots], whole = symbols.find(rows[slots])
    claimed = present.copy()
    claimed[slots[~whole]] = False
    tree = trace(rows, claimed, root_ident)
    gone = present
    gone[tree.slots] = False
    dropped = np.flatnonzero(gone)
    rows[dropped] = np.zeros((), dtype=ROW)
    following = max(next_symbol, int(symbols.ids[-1]) + 1 if len(symbols.ids) else 1)
    stale = set(np.unique(dropped // RECORD_SLOTS).tolist())
    return Loaded(manifest, following, rows, tree, symbols, records, len(dropped), stale)


def _load_rows(store: RowStore, capacity: int) -> RowTable:
    records = -(-capacity // RECORD_SLOTS)
    table = np.zeros((records, RECORD_SLOTS), dtype=ROW)
    keys, values = [], []
    for key, value in store.records("rows"):
        if key < records and check_record("rows", key, value):
            keys.append(key)
            values.append(value)
    if keys:
        packed = np.frombuffer(b"".join(values), dtype=np.uint8).reshape(len(keys), -1)
        packed = np.ascontiguousarray(packed[:, : RECORD_SLOTS * ROW.itemsize])
        table[keys] = packed.view(ROW)
    rows: RowTable = table.reshape(-1)[:capacity]
    return rows


def _load_symbols(store: RowStore, width: int) -> Symbols:
    keys, values = [], []
    for key, value in store.records("symbols"):
        if check_record("symbols", key, value) and int.from_bytes(value[4:8], "little") == width:
            keys.append(key)
            values.append(value)
    lengths = np.fromiter(map(len, values), dtype=np.int64, count=len(values))
    starts = np.cumsum(lengths) - lengths + 8
    raw = np.frombuffer(b"".join(values), dtype=np.uint8)
    return Symbols(np.array(keys, dtype=np.uint64), ((lengths - 16) // width).astype(np.int32), starts, raw, width)


def recovered_of(loaded: Loaded) -> Recovered:
    """What the planner learns at the start."""
    slots = loaded.tree.slots
    rows = loaded.rows[slots]
    return Recovered(
        slots=slots,
        parents=loaded.tree.parents,
        idents=np.ascontiguousarray(rows["ident"]),
        symbols=loaded.symbols.read(loaded.records[slots], rows["symbol_offset"]),
        last_use=np.ascontiguousarray(rows["last_use"]),
        uses=np.ascontiguousarray(rows["uses"]),
        hints=read_hints(rows),
        forgotten=loaded.forgotten,
    )


def cold(reason: str) -> Recovered:
    """Nothing, and why."""
    none: Slots = np.empty(0, dtype=np.int32)
    return Recovered(
        slots=none,
        parents=np.empty(0, dtype=np.int64),
        idents=np.empty(0, dtype=np.uint64),
        symbols=b"",
        last_use=np.empty(0, dtype=np.float64),
        uses=np.empty(0, dtype=np.uint32),
        reason=reason,
    )


def make_fresh(directory: StoreDirectory, wanted: Manifest, capacity: int, ops: FileOps = OS_FILES) -> Manifest:
    """Replace the catalog, if there is one, by an empty one of the `wanted` kind; durable on return.

    ConfigError where the disk has no room for it.
    """
    manifest = replace(wanted, store_id=directory.store_id, capacity=capacity, extents=extents_for(capacity))
    try:
        directory.write_epoch(wanted.epoch)
    except OSError as e:
        raise _no_catalog(directory, e) from e
    make_empty(directory, manifest, ops)
    return manifest


def make_empty(directory: StoreDirectory, manifest: Manifest, ops: FileOps = OS_FILES) -> None:
    """Put an empty catalog with this manifest where the catalog belongs; durable on return. ConfigError: no room."""
    place = directory.path / f"catalog.new-{secrets.token_hex(4)}"
    nbytes = map_nbytes_for(manifest.capacity, manifest.symbol_nbytes)
    try:
        place.mkdir(mode=0o700)
        place.chmod(0o700)
        path = place / "data.mdb"
        store = RowStore(path, nbytes)
        try:
            store.apply(Change(manifest=manifest))
        finally:
            store.close()
        reserve(directory, path, nbytes, ops)
        install(directory, place)
    except (OSError, lmdb.Error) as e:
        raise _no_catalog(directory, e) from e


def _no_catalog(directory: StoreDirectory, why: Exception) -> ConfigError:
    free = directory.free_nbytes()
    return ConfigError("path", str(directory.path), f"no catalog can be made there ({why}); {free} bytes are free")


def open_store(directory: StoreDirectory, manifest: Manifest, durability: str, ops: FileOps = OS_FILES) -> RowStore:
    """Open the catalog for writing, its whole map reserved on disk. The marker of the orderly close goes first.

    ConfigError where that fails.
    """
    path = directory.catalog_path
    try:
        drop_marker(directory)
        nbytes = max(map_nbytes_for(manifest.capacity, manifest.symbol_nbytes), 2 * used_nbytes(path))
        reserve(directory, path, nbytes, ops)
        return RowStore(path, nbytes, metasync=durability == "power")
    except (lmdb.Error, OSError, DamagedCatalogError) as e:
        raise ConfigError("path", str(directory.path), f"the catalog there cannot be opened ({e})") from e


def reserve(directory: StoreDirectory, path: Path, nbytes: int, ops: FileOps) -> None:
    """Allocate a catalog file up to its map size, so that a full disk cannot stop a transaction later."""
    fd = ops.open(str(path), os.O_RDWR, 0o600)
    try:
        length, allocated = ops.size(fd)
        if length < nbytes or allocated < nbytes:
            ops.fallocate(fd, nbytes)
    except OSError as e:
        if e.errno in (errno.ENOSPC, errno.EDQUOT):
            free = directory.free_nbytes()
            raise ConfigError(
                "path",
                str(directory.path),
                f"the catalog needs {nbytes} bytes, {nbytes - allocated} more than it has; {free} are free",
            ) from e
        if e.errno != errno.EOPNOTSUPP:
            raise
        directory.remark("the file system cannot preallocate: a disk that fills up stops the catalog")
    finally:
        ops.close(fd)
