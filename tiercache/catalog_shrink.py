"""A smaller NVMe tier: forget what no longer fits, and move what stays into the slots that remain."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np

from tiercache.catalog_open import Loaded
from tiercache.catalog_recover import oldest, trace
from tiercache.catalog_rows import RECORD_SLOTS, ROW, Change, RowStore, RowTable, pack_rows
from tiercache.directory import StoreDirectory
from tiercache.tiers.fileio import FileOps, aligned_rows
from tiercache.tiers.nvme import NVMeTier, extents_for
from tiercache.types import ROOT, Bools, Slots

__all__ = ["shrink"]

_LOG = logging.getLogger("tiercache.catalog")
_MOVE_NBYTES = 8 << 20


def shrink(
    directory: StoreDirectory, store: RowStore, loaded: Loaded, capacity: int, root_ident: int, ops: FileOps
) -> Loaded:
    """Bring the catalog, and the payload where it must move, to `capacity` slots; durable on return.

    In this order, each step durable before the next: forget the least recently used leaves that are too many; copy
    survivors from beyond the new end into free slots; one transaction that says where they are now and how many slots
    there are. The files keep their length until the tier is opened. A block that cannot be copied is forgotten with all
    that hangs on it. `loaded` is used up. lmdb.Error, OSError, ConfigError.
    """
    rows, tree, old = loaded.rows, loaded.tree, loaded.manifest
    going = oldest(tree, rows["last_use"][tree.slots], max(0, len(tree.slots) - capacity))
    lost, staying = tree.slots[going], tree.slots[~going]
    rows[lost] = np.zeros((), dtype=ROW)
    stale = loaded.stale_records | set(np.unique(lost // RECORD_SLOTS).tolist())
    if stale:
        store.apply(Change(rows={i: _record(rows, i) for i in stale}, next_symbol=loaded.next_symbol))
    target = np.full(old.capacity, -1, dtype=np.int32)
    low = staying[staying < capacity]
    high = np.sort(staying[staying >= capacity])
    target[low] = low
    free = np.setdiff1d(np.arange(capacity, dtype=np.int32), low)[: len(high)]
    note = "%s: %d slots instead of %d: %d blocks are forgotten, %d move"
    _LOG.info(note, directory.path, capacity, old.capacity, len(lost), len(high))
    moved = _move(directory, loaded, high, free, ops)
    target[high[moved]] = free[moved]
    table = _remapped(rows, target, capacity)
    tree = trace(table, table["symbol_record"] != 0, root_ident)
    reached = np.zeros(capacity, dtype=np.bool_)
    reached[tree.slots] = True
    table[~reached] = np.zeros((), dtype=ROW)
    manifest = replace(old, capacity=capacity, extents=extents_for(capacity, old.extents))
    before = -(-old.capacity // RECORD_SLOTS)
    change = Change(rows={i: _record(table, i) for i in range(before)}, manifest=manifest)
    change.next_symbol = loaded.next_symbol
    store.apply(change)
    forgotten = loaded.forgotten + len(loaded.tree.slots) - len(tree.slots)
    records = loaded.symbols.find(table)[0]
    return Loaded(manifest, loaded.next_symbol, table, tree, loaded.symbols, records, forgotten, set())


def _record(rows: RowTable, index: int) -> bytes | None:
    """The packed record, None where nothing is claimed in it."""
    part = rows[index * RECORD_SLOTS : (index + 1) * RECORD_SLOTS]
    return pack_rows(index, part) if part["symbol_record"].any() else None


def _remapped(rows: RowTable, target: Slots, capacity: int) -> RowTable:
    """The rows of all slots with a target, there, and with their parents' targets."""
    table = np.zeros(capacity, dtype=ROW)
    staying = np.flatnonzero(target >= 0)
    moved = rows[staying]
    parents = moved["parent_slot"]
    inner = parents != ROOT
    parents[inner] = target[parents[inner]]
    # A parent that could not be moved: its child points outside, and must not be taken for a first block.
    moved["parent_slot"] = np.where(inner & (parents == ROOT), capacity, parents)
    table[target[staying]] = moved
    return table


def _move(directory: StoreDirectory, loaded: Loaded, source: Slots, target: Slots, ops: FileOps) -> Bools:
    """Copy payload between slots and sync it; which blocks arrived."""
    ok = np.zeros(len(source), dtype=np.bool_)
    if len(source) == 0:
        return ok
    old = loaded.manifest
    tier = NVMeTier(directory.path, old.block_nbytes, old.capacity, extents=old.extents, ops=ops, files="keep")
    try:
        step = max(1, min(_MOVE_NBYTES // tier.stride, len(source)))
        staging = aligned_rows(step, tier.stride)
        for begin in range(0, len(source), step):
            part = slice(begin, min(begin + step, len(source)))
            buffer = staging[: part.stop - part.start]
            ok[part] = tier.read(source[part], buffer)
            ok[part] &= tier.write(target[part], buffer)
        return ok if tier.sync() else np.zeros(len(source), dtype=np.bool_)
    finally:
        tier.close()
