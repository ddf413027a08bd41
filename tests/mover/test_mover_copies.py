"""Bytes: every pair of ends, verification, and what is refused."""

import gc
import weakref

import numpy as np
import pytest
from mover_kit import caller_rows, claims_of, eventually, idents_of, make_job, payload, slots, write_job

from tiercache.mover import MemoryLedger
from tiercache.mover.copier import IO_PART_MAX_NBYTES, MEMORY_PART_MAX_NBYTES
from tiercache.testing import FaultyTier, WrappedTier
from tiercache.tiers.dram import DRAMTier
from tiercache.tiers.hbm import HBMTier
from tiercache.tiers.nvme import NVMeTier
from tiercache.types import CALLER

NBYTES = 5000


def disk(capacity=16, nbytes=NBYTES):
    """A tier that verifies, over memory that a test can reach."""
    inner = DRAMTier(capacity, nbytes, name="disk")
    return FaultyTier(inner, verifies=True)


def on_disk(mover, inbox, rows, at, idents=None, job_id=900):
    """Put rows through DRAM into slots `at` of level 1."""
    mover.attach(job_id, caller_rows(rows))
    n = len(rows)
    mover.submit([make_job(job_id, CALLER, range(n), 0, range(n), endpoint=job_id)])
    assert inbox.result(job_id).ok.all()
    mover.submit([write_job(job_id + 1, range(n), at, idents)])
    assert inbox.result(job_id + 1).ok.all()
    mover.detach(job_id)


@pytest.mark.parametrize("nbytes", [1, 4096, 5000])
@pytest.mark.parametrize("how", ["contiguous", "strided", "backwards"])
def test_caller_to_dram_to_caller(make_mover, inbox, nbytes, how):
    given = {
        "contiguous": lambda: payload(6, nbytes),
        "strided": lambda: payload(12, 2 * nbytes)[::2, ::2],
        "backwards": lambda: payload(6, nbytes)[::-1],
    }[how]()
    mover = make_mover(DRAMTier(8, nbytes))
    mover.attach(1, caller_rows(given))
    mover.submit([make_job(1, CALLER, range(6), 0, [7, 0, 1, 2, 5, 4], endpoint=1)])
    result = inbox.result(1)
    assert (result.ok.all(), result.nbytes, result.reason) == (True, 6 * nbytes, "")

    out = np.zeros((9, nbytes), dtype=np.uint8)
    taken = out[::-1] if how == "backwards" else out
    mover.attach(2, caller_rows(taken))
    mover.submit([make_job(2, 0, [7, 0, 1, 2, 5, 4], CALLER, [8, 0, 1, 2, 3, 4], endpoint=2)])
    assert inbox.result(2).ok.all()
    assert (taken[[8, 0, 1, 2, 3, 4]] == given).all()
    assert (taken[[5, 6, 7]] == 0).all()


def test_some_of_the_callers_rows(make_mover, inbox):
    given = payload(6, NBYTES)
    tier = DRAMTier(4, NBYTES)
    mover = make_mover(tier)
    mover.attach(1, caller_rows(given))
    mover.submit([make_job(1, CALLER, [1, 2, 5], 0, [3, 0, 1], endpoint=1)])
    assert inbox.result(1).ok.all()
    assert (tier.slab[[3, 0, 1], :NBYTES] == given[[1, 2, 5]]).all()
    assert (tier.slab[2] == 0).all()


def test_between_memory_levels_many_parts(make_mover, inbox):
    """Enough bytes for several parts on several threads."""
    n, nbytes = 24, 1 << 20
    hbm, dram = HBMTier(n, nbytes, device="cpu"), DRAMTier(n, nbytes)
    given = payload(n, nbytes)
    hbm.slab[:] = given
    mover = make_mover(hbm, dram)
    order = np.random.default_rng(1).permutation(n)
    mover.submit([make_job(1, 0, range(n), 1, order)])
    assert inbox.result(1).ok.all()
    assert (dram.slab[order] == given).all()
    stats = mover.stats().levels
    assert (stats[0].bytes_read, stats[1].bytes_written) == (n * nbytes, n * nbytes)
    assert (stats[1].blocks_ok, stats[0].blocks_ok) == (n, 0)


@pytest.mark.parametrize(("n", "nbytes", "parts"), [
    (1, 4096, 1),
    (3, 1 << 20, 1),  # less than the smallest part
    (8, 1 << 20, 2),
    (9, 1 << 20, 2),
    (40, 1 << 20, 3),  # two halves would be above the largest part
    (3, 17 << 20, 3),  # never less than a block
])  # fmt: skip
def test_threads_share_a_copy_between_memories_evenly(make_mover, inbox, n, nbytes, parts):
    calls = []

    class Seen(WrappedTier):
        def write(self, slots, rows):
            calls.append(len(slots))
            return super().write(slots, rows)

    given = np.full((n, nbytes), 7, dtype=np.uint8)
    mover = make_mover(Seen(DRAMTier(n, nbytes)), memory_threads=2)
    mover.attach(1, caller_rows(given))
    mover.submit([make_job(1, CALLER, range(n), 0, range(n), endpoint=1)])
    assert inbox.result(1).ok.all()
    assert len(calls) == parts and sum(calls) == n
    assert max(calls) * nbytes <= max(nbytes, MEMORY_PART_MAX_NBYTES)


@pytest.mark.parametrize(("n", "nbytes", "threads", "parts"), [
    (64, 4096, 4, 1),  # less than the smallest part
    (16, 64 << 10, 4, 4),
    (12, 256 << 10, 4, 4),
    (40, 256 << 10, 4, 5),  # a quarter would be above the largest part
    (3, 3 << 20, 2, 3),  # never less than a block
])  # fmt: skip
def test_threads_share_a_read_evenly(make_mover, inbox, n, nbytes, threads, parts):
    calls = []

    class Seen(WrappedTier):
        def read(self, slots, rows):
            calls.append(len(slots))
            return super().read(slots, rows)

    given = np.full((n, nbytes), 7, dtype=np.uint8)
    dram = DRAMTier(n, nbytes)
    mover = make_mover(dram, Seen(DRAMTier(n, nbytes), verifies=True), io_threads=threads)
    dram.slab[:, :nbytes] = given
    mover.submit([write_job(1, range(n), range(n))])
    assert inbox.result(1).ok.all()
    dram.slab[:] = 0
    mover.submit([make_job(2, 1, range(n), 0, range(n))])
    assert inbox.result(2).ok.all() and (dram.slab[:, :nbytes] == given).all()
    assert len(calls) == parts and sum(calls) == n
    assert max(calls) * nbytes <= max(nbytes, IO_PART_MAX_NBYTES)


@pytest.mark.parametrize("hidden", ["source", "destination", "both"])
def test_levels_that_show_no_memory(make_mover, inbox, hidden):
    """As device tensors do: through staging, without verification."""
    first, second = DRAMTier(4, NBYTES), DRAMTier(4, NBYTES)
    given = payload(4, NBYTES)
    first.slab[:, :NBYTES] = given
    tiers = [
        WrappedTier(first) if hidden != "destination" else first,
        WrappedTier(second) if hidden != "source" else second,
    ]
    mover = make_mover(*tiers)
    out = np.zeros((4, NBYTES), dtype=np.uint8)
    mover.attach(5, caller_rows(out))
    mover.submit([make_job(1, 0, [0, 1, 2, 3], 1, [2, 3, 1, 0])])
    assert inbox.result(1).ok.all()
    assert (second.slab[[2, 3, 1, 0], :NBYTES] == given).all()
    mover.submit([make_job(2, 1, [2, 3, 1, 0], CALLER, [0, 1, 2, 3], endpoint=5)])
    assert inbox.result(2).ok.all()
    assert (out == given).all()


@pytest.mark.parametrize("real", [False, True], ids=["memory", "files"])
@pytest.mark.parametrize("nbytes", [100, 4096, 300_000])
def test_through_a_tier_that_verifies(make_mover, inbox, tmp_path, real, nbytes):
    dram = DRAMTier(16, nbytes)
    slow = NVMeTier(tmp_path, nbytes, 16) if real else disk(16, nbytes)
    mover = make_mover(dram, slow)
    given = payload(9, nbytes)
    at = slots(15, 0, 1, 2, 3, 9, 8, 5, 6)
    on_disk(mover, inbox, given, at)
    dram.slab[:] = 0
    mover.submit([make_job(2, 1, at, 0, range(7, 16))])
    assert inbox.result(2).ok.all()
    assert (dram.slab[7:, :nbytes] == given).all()
    assert (dram.slab[:7] == 0).all()


def test_a_load_into_out_also_fills_dram(make_mover, inbox):
    dram = DRAMTier(8, NBYTES)
    mover = make_mover(dram, disk())
    given = payload(4, NBYTES)
    on_disk(mover, inbox, given, [3, 2, 1, 0])
    dram.slab[:] = 0
    out = np.zeros((4, NBYTES), dtype=np.uint8)
    mover.attach(1, caller_rows(out))
    also = slots(7, -1, 5, -1)
    mover.submit([make_job(1, 1, [3, 2, 1, 0], CALLER, range(4), endpoint=1, also_level=0, also_slots=also)])
    assert inbox.result(1).ok.all()
    assert (out == given).all()
    assert (dram.slab[[7, 5], :NBYTES] == given[[0, 2]]).all()
    assert (dram.slab[[0, 1, 2, 3, 4, 6]] == 0).all()


def test_caller_straight_to_a_tier_that_verifies(make_mover, inbox):
    """Where NVMe is the only level."""
    mover = make_mover(disk())
    given = payload(3, NBYTES)
    mover.attach(1, caller_rows(given))
    mover.submit([make_job(1, CALLER, range(3), 0, [4, 5, 1], endpoint=1, claims=claims_of(3))])
    assert inbox.result(1).ok.all()
    out = np.zeros_like(given)
    mover.attach(2, caller_rows(out))
    mover.submit([make_job(2, 0, [4, 5, 1], CALLER, range(3), endpoint=2)])
    assert inbox.result(2).ok.all()
    assert (out == given).all()


# -- a wrong block is a failed block -----------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0, 4095, 4096, NBYTES - 1])
def test_a_flipped_bit_is_found(make_mover, inbox, byte):
    dram, slow = DRAMTier(8, NBYTES), disk()
    mover = make_mover(dram, slow)
    given = payload(4, NBYTES)
    on_disk(mover, inbox, given, [0, 1, 2, 3])
    slow.flip_bit(1, byte, 3)
    dram.slab[:] = 7
    mover.submit([make_job(1, 1, [0, 1, 2, 3], 0, [4, 5, 6, 7])])
    result = inbox.result(1)
    assert result.ok.tolist() == [True, False, True, True]
    assert (result.reason, result.nbytes) == ("checksum", 3 * NBYTES)
    assert (dram.slab[[4, 6, 7], :NBYTES] == given[[0, 2, 3]]).all()
    assert (dram.slab[5] == 7).all(), "an unverified block reached memory"
    assert mover.stats().levels[1].checksum_failures == 1


def test_padding_is_not_payload(make_mover, inbox):
    slow = disk()
    mover = make_mover(DRAMTier(8, NBYTES), slow)
    on_disk(mover, inbox, payload(1, NBYTES), [0])
    slow.flip_bit(0, NBYTES, 3)
    mover.submit([make_job(1, 1, [0], 0, [4], idents_of(1))])
    assert inbox.result(1).ok.all()


def test_swapped_slots_are_found(make_mover, inbox):
    dram, slow = DRAMTier(8, NBYTES), disk()
    mover = make_mover(dram, slow)
    on_disk(mover, inbox, payload(3, NBYTES), [0, 1, 2])
    slow.inner.slab[[0, 1]] = slow.inner.slab[[1, 0]]
    mover.submit([make_job(1, 1, [0, 1, 2], 0, [4, 5, 6])])
    result = inbox.result(1)
    assert (result.ok.tolist(), result.reason) == ([False, False, True], "checksum")


def test_equal_bytes_of_another_block_are_found(make_mover, inbox):
    """The ident is part of what is verified."""
    mover = make_mover(DRAMTier(8, NBYTES), disk())
    on_disk(mover, inbox, payload(2, NBYTES), [0, 1])
    mover.submit([make_job(1, 1, [0, 1], 0, [4, 5], idents_of(2, seed=1))])
    result = inbox.result(1)
    assert (result.ok.any(), result.reason) == (False, "checksum")


def test_an_earlier_life_of_a_slot_is_found(make_mover, inbox):
    """The newer write was acknowledged and never reached the disk."""
    slow = disk()
    mover = make_mover(DRAMTier(8, NBYTES), slow)
    on_disk(mover, inbox, payload(2, NBYTES), [0, 1])
    earlier = slow.inner.slab.copy()
    on_disk(mover, inbox, payload(2, NBYTES, seed=1), [0, 1], idents_of(2, seed=5), job_id=800)
    slow.inner.slab[0] = earlier[0]
    mover.submit([make_job(1, 1, [0, 1], 0, [4, 5], idents_of(2, seed=5))])
    assert inbox.result(1).ok.tolist() == [False, True]


def test_an_old_ident_of_a_rewritten_slot_is_refused(make_mover, inbox):
    mover = make_mover(DRAMTier(8, NBYTES), disk())
    on_disk(mover, inbox, payload(1, NBYTES), [0])
    on_disk(mover, inbox, payload(1, NBYTES, seed=1), [0], idents_of(1, seed=5), job_id=800)
    mover.submit([make_job(1, 1, [0], 0, [4], idents_of(1))])
    assert not inbox.result(1).ok.any()


def test_a_slot_that_holds_nothing_is_refused(make_mover, inbox):
    mover = make_mover(DRAMTier(8, NBYTES), disk())
    mover.submit([make_job(1, 1, [3], 0, [4], np.zeros(1, np.uint64))])
    assert inbox.result(1).reason == "cancelled"


def test_a_wrong_block_does_not_reach_out_or_dram(make_mover, inbox):
    dram, slow = DRAMTier(8, NBYTES), disk()
    mover = make_mover(dram, slow)
    given = payload(3, NBYTES)
    on_disk(mover, inbox, given, [0, 1, 2])
    slow.flip_bit(1, 17)
    dram.slab[:] = 0
    out = np.zeros_like(given)
    mover.attach(1, caller_rows(out))
    mover.submit([make_job(1, 1, [0, 1, 2], CALLER, [0, 1, 2], endpoint=1, also_level=0, also_slots=slots(5, 6, 7))])
    assert inbox.result(1).ok.tolist() == [True, False, True]
    assert (out[[0, 2]] == given[[0, 2]]).all()
    assert not out[1].any()
    assert not dram.slab[6].any()


# -- trouble with the disk ---------------------------------------------------------------------------------------------


def test_failed_reads_fail_alone(make_mover, inbox):
    dram, slow = DRAMTier(8, NBYTES), disk()
    mover = make_mover(dram, slow)
    given = payload(4, NBYTES)
    on_disk(mover, inbox, given, [0, 1, 2, 3])
    slow.fail_slots("read", [2])
    mover.submit([make_job(1, 1, [0, 1, 2, 3], 0, [4, 5, 6, 7])])
    result = inbox.result(1)
    assert (result.ok.tolist(), result.reason) == ([True, True, False, True], "io")
    assert (dram.slab[[4, 5, 7], :NBYTES] == given[[0, 1, 3]]).all()
    stats = mover.stats().levels[1]
    assert (stats.io_errors, stats.checksum_failures) == (1, 0)


def test_a_destination_that_fails_says_nothing_against_the_source(make_mover, inbox):
    fast, slow = FaultyTier(DRAMTier(8, NBYTES)), disk()
    mover = make_mover(fast, slow)
    on_disk(mover, inbox, payload(2, NBYTES), [0, 1])
    fast.fail_all("write")
    mover.submit([make_job(1, 1, [0, 1], 0, [4, 5])])
    result = inbox.result(1)
    assert not result.ok.any() and not result.bad.any()
    assert result.reason == "target"


def test_a_failed_write_takes_its_descendants_along(make_mover, inbox):
    """Of the chain 0-1-2-3 and the root 4, block 1 cannot be written."""
    dram, slow = DRAMTier(8, NBYTES), disk()
    mover = make_mover(dram, slow)
    dram.slab[:] = payload(8, dram.stride)
    slow.fail_slots("write", [11])
    mover.submit([write_job(1, range(5), [10, 11, 12, 13, 14], parents=[-1, 10, 11, 12, -1])])
    result = inbox.result(1)
    assert (result.ok.tolist(), result.reason) == ([True, False, False, False, True], "io")
    mover.submit([make_job(2, 1, [10, 11, 12, 13, 14], 0, [0, 1, 2, 3, 4])])
    assert inbox.result(2).ok.tolist() == [True, False, False, False, True]


def test_overwriting_forgets_before_it_writes(make_mover, inbox):
    """A write that fails leaves nothing behind that could be read."""
    dram, slow = DRAMTier(8, NBYTES), disk()
    mover = make_mover(dram, slow)
    on_disk(mover, inbox, payload(1, NBYTES), [0])
    slow.fail_all("write")
    mover.submit([write_job(1, [1], [0], idents_of(1, seed=3))])
    assert not inbox.result(1).ok.any()
    slow.heal()
    mover.submit([make_job(2, 1, [0], 0, [4], idents_of(1))])
    assert not inbox.result(2).ok.any()


def test_a_tier_that_raises_costs_its_job_only(make_mover, inbox, caplog):
    dram, slow = DRAMTier(8, NBYTES), disk()
    mover = make_mover(dram, slow)
    on_disk(mover, inbox, payload(2, NBYTES), [0, 1])
    slow.raise_at("read", 1, RuntimeError("a bug in a tier"))
    mover.submit([make_job(1, 1, [0, 1], 0, [4, 5])])
    result = inbox.result(1)
    assert (result.ok.any(), result.nbytes, result.reason) == (False, 0, "io")
    mover.submit([make_job(2, 1, [0, 1], 0, [4, 5])])
    assert inbox.result(2).ok.all()
    assert mover.stats().unexpected_errors == 1
    assert "a bug in a tier" in caplog.text


def test_a_write_to_a_disk_without_claims_is_misuse(make_mover, inbox, caplog):
    mover = make_mover(DRAMTier(8, NBYTES), disk())
    mover.submit([make_job(1, 0, [0], 1, [0])])
    assert not inbox.result(1).ok.any()
    assert "without claims" in caplog.text


def test_rows_that_are_not_attached(make_mover, inbox, caplog):
    mover = make_mover(DRAMTier(8, NBYTES))
    mover.submit([make_job(1, CALLER, [0], 0, [0], endpoint=77), make_job(2, 0, [0], CALLER, [0], endpoint=77)])
    assert not inbox.result(1).ok.any()
    assert not inbox.result(2).ok.any()
    assert "endpoint 77 is not attached" in caplog.text


def test_a_ledger_that_raises_costs_its_job_only(inbox, make_mover, caplog):
    class Broken(MemoryLedger):
        def written(self, *args):
            raise RuntimeError("a bug in a ledger")

    mover = make_mover(DRAMTier(8, NBYTES), disk(), catalog=Broken(16))
    mover.submit([write_job(1, [0], [0]), make_job(2, CALLER, [], 0, [])])
    assert not inbox.result(1).ok.any()
    assert inbox.result(2).ok.shape == (0,)
    assert "a bug in a ledger" in caplog.text


# -- holds -------------------------------------------------------------------------------------------------------------


def test_callers_rows_are_let_go(make_mover, inbox):
    mover = make_mover(DRAMTier(8, NBYTES))
    rows = caller_rows(payload(3, NBYTES))
    held = weakref.ref(rows)
    mover.attach(1, rows)
    mover.submit([make_job(1, CALLER, range(3), 0, range(3), endpoint=1, deadline_s=60.0)])
    inbox.result(1)
    mover.detach(1)
    del rows
    gc.collect()
    assert eventually(lambda: held() is None), "an ended job still holds the caller's rows"


def test_detach_does_not_disturb_submitted_jobs(make_mover, inbox):
    tier = DRAMTier(8, NBYTES)
    mover = make_mover(tier)
    given = payload(3, NBYTES)
    mover.attach(1, caller_rows(given))
    mover.submit([make_job(1, CALLER, range(3), 0, range(3), endpoint=1)])
    mover.detach(1)
    assert inbox.result(1).ok.all()
    assert (tier.slab[:3, :NBYTES] == given).all()


@pytest.mark.parametrize("wrong", ["sizes", "two disks", "no disk", "no threads", "no tiers"])
def test_misuse_of_the_constructor(inbox, wrong):
    from tiercache.mover import Mover

    tiers, options = {
        "sizes": ([DRAMTier(2, 100), DRAMTier(2, 101)], {}),
        "two disks": ([disk(), disk()], {}),
        "no disk": ([DRAMTier(2, 100)], {"catalog": MemoryLedger(2)}),
        "no threads": ([DRAMTier(2, 100)], {"memory_threads": 0}),
        "no tiers": ([], {}),
    }[wrong]
    with pytest.raises(ValueError):
        Mover(tiers, inbox, **options)
