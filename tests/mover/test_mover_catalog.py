"""The mover over real files and the real catalog: what a restart finds."""

import numpy as np
import pytest
from mover_kit import EPOCH, caller_rows, eventually, make_job, payload

from tiercache.catalog import Catalog, Manifest
from tiercache.directory import StoreDirectory
from tiercache.keys import root_ident
from tiercache.testing import FaultyTier, HangingTier
from tiercache.tiers.dram import DRAMTier
from tiercache.tiers.nvme import NVMeTier
from tiercache.types import CALLER, Claims, Forget

NBYTES = 5000
SYMBOL_NBYTES = 64
CAPACITY = 32
ROOT_IDENT = root_ident(b"\x11" * 16, EPOCH)


def chain(n, at, parent_slot=-1, parent_ident=ROOT_IDENT, seed=0):
    """Idents and claims of n blocks in a row, written to the slots `at`."""
    idents = np.random.default_rng(seed).integers(1, 2**63, n, dtype=np.uint64)
    parents = np.array([parent_slot, *at[:-1]], dtype=np.int32)
    above = np.array([parent_ident, *idents[:-1].tolist()], dtype=np.uint64)
    symbols = np.random.default_rng(seed).integers(0, 256, n * SYMBOL_NBYTES, dtype=np.uint8).tobytes()
    return idents, Claims(parents, above, symbols, np.full(n, 1e9 + seed), np.ones(n, dtype=np.uint32))


@pytest.fixture
def reopen(tmp_path, inbox, make_mover):
    """`reopen(wrap)` opens the directory with a new mover: (mover, dram, slow tier, catalog)."""
    opened = []

    def open_(wrap=lambda tier: tier):
        while opened:
            mover, directory = opened.pop()
            mover.close(5.0)
            directory.close()
        inbox.messages.clear()
        directory = StoreDirectory.open(tmp_path / "store")
        manifest = Manifest({}, NBYTES, ("11" * 16), EPOCH, 16, SYMBOL_NBYTES)
        catalog = Catalog.open(directory, manifest, CAPACITY, root_ident=ROOT_IDENT)
        slow = wrap(NVMeTier(directory.path, NBYTES, CAPACITY, extents=catalog.manifest.extents))
        dram = DRAMTier(CAPACITY, NBYTES)
        dram.slab[:, :NBYTES] = payload(CAPACITY, NBYTES)
        mover = make_mover(dram, slow, catalog=catalog, epoch=EPOCH)
        opened.append((mover, directory))
        return mover, dram, slow, catalog

    yield open_
    for mover, directory in opened:
        mover.close(5.0)
        directory.close()


def write(job_id, rows, at, parent=(-1, ROOT_IDENT), seed=0, **more):
    idents, claims = chain(len(at), list(at), *parent, seed=seed)
    return make_job(job_id, 0, rows, 1, at, idents, claims=claims, **more)


def test_what_was_synced_is_there_after_a_restart(reopen, inbox):
    mover, _, _, _ = reopen()
    job = write(1, range(6), [9, 8, 7, 0, 1, 2])
    mover.submit([job])
    assert inbox.result(1).ok.all()
    assert mover.sync(10.0)

    mover, dram, _, catalog = reopen()
    assert sorted(catalog.recovered.slots.tolist()) == [0, 1, 2, 7, 8, 9]
    out = np.zeros((6, NBYTES), dtype=np.uint8)
    mover.attach(1, caller_rows(out))
    mover.submit([make_job(2, 1, [9, 8, 7, 0, 1, 2], CALLER, range(6), job.idents, endpoint=1)])
    assert inbox.result(2).ok.all()
    assert (out == dram.slab[:6, :NBYTES]).all()


def test_a_commit_comes_without_sync(reopen, inbox):
    mover, _, _, catalog = reopen()
    mover.submit([write(1, range(3), [0, 1, 2])])
    assert eventually(lambda: catalog.claimed_slots == 3)
    mover.submit([Forget(np.array([2], dtype=np.int32))])
    assert eventually(lambda: catalog.claimed_slots == 2)
    assert eventually(lambda: not catalog.dirty)


def test_close_claims_what_was_written(reopen, inbox):
    mover, _, _, _ = reopen()
    mover.submit([write(1, range(3), [0, 1, 2])])
    inbox.result(1)
    assert mover.close(5.0) is True
    assert reopen()[3].recovered.slots.tolist() == [0, 1, 2]


def test_children_of_a_failed_write_are_lost_and_sync_ends(reopen, inbox):
    """The parent is written by another job, which fails while the child's has succeeded."""
    mover, _, slow, catalog = reopen(lambda tier: FaultyTier(tier))
    slow.fail_slots("write", [0])
    parent = write(1, [0], [0])
    child = write(2, [1, 2], [1, 2], parent=(0, int(parent.idents[0])), seed=1)
    mover.submit([write(3, [5], [5], seed=3)])
    assert inbox.result(3).ok.all()
    mover.submit([parent, child])
    assert inbox.result(2).ok.all()
    assert not inbox.result(1).ok.any()
    assert mover.sync(10.0) is True
    assert sorted(inbox.lost().slots.tolist()) == [1, 2]
    assert catalog.claimed_slots == 1


def test_children_wait_for_a_parent_that_is_being_written(reopen, inbox):
    mover, _, slow, catalog = reopen(lambda tier: HangingTier(tier))
    parent = write(1, [0], [0], deadline_s=60.0)
    child = write(2, [1], [1], parent=(0, int(parent.idents[0])), seed=1)
    slow.hang("write")
    mover.submit([parent])
    assert slow.wait_hung()
    slow.unblock("write")
    mover.submit([child])
    assert inbox.result(2).ok.all()
    assert mover.sync(0.3) is False, "acknowledged a child whose parent is not there"
    assert catalog.claimed_slots == 0
    slow.wake()
    assert inbox.result(1).ok.all()
    assert mover.sync(10.0) is True
    assert catalog.claimed_slots == 2


def test_children_of_a_hung_write_are_lost(reopen, inbox):
    mover, _, slow, catalog = reopen(lambda tier: HangingTier(tier))
    parent = write(1, [0], [0], deadline_s=0.1)
    child = write(2, [1], [1], parent=(0, int(parent.idents[0])), seed=1)
    slow.hang("write")
    mover.submit([parent])
    assert slow.wait_hung()
    slow.unblock("write")
    mover.submit([child])
    assert inbox.result(2).ok.all()
    inbox.overdue(1)
    assert inbox.lost().slots.tolist() == [1]
    assert mover.sync(10.0) is True
    assert catalog.claimed_slots == 0
    slow.wake()
    assert not inbox.result(1).ok.any()


def test_a_failed_data_sync_claims_nothing(reopen, inbox):
    mover, _, slow, catalog = reopen(FaultyTier)
    slow.fail_all("sync")
    mover.submit([write(1, range(3), [0, 1, 2])])
    assert inbox.result(1).ok.all()
    assert mover.sync(0.3) is False
    assert catalog.claimed_slots == 0
    slow.heal()
    assert mover.sync(10.0) is True
    assert catalog.claimed_slots == 3
