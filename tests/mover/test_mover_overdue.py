"""A deadline ends the waiting, never the hold."""

import gc
import threading
import time
import weakref

import numpy as np
import pytest
from mover_kit import caller_rows, claims_of, eventually, idents_of, make_job, payload, slots, write_job

from tiercache.errors import CacheClosedError, WorkerThreadError
from tiercache.mover.copier import MEMORY_PART_MIN_NBYTES
from tiercache.mover.job import RunningJob
from tiercache.testing import FaultyTier, HangingTier, WrappedTier
from tiercache.tiers.dram import DRAMTier
from tiercache.types import CALLER, JobOverdue, JobResult

NBYTES = 5000
SOON_S = 0.05


@pytest.fixture
def dram():
    return DRAMTier(32, NBYTES)


@pytest.fixture
def slow():
    return HangingTier(DRAMTier(32, NBYTES, name="disk"), verifies=True)


@pytest.fixture
def given(make_mover, inbox, dram, slow):
    """Blocks 0 to 7 lie in slots 0 to 7 of the disk; DRAM is zero."""
    rows = payload(8, NBYTES)
    dram.slab[:8, :NBYTES] = rows
    return rows


def filled(make_mover, inbox, dram, slow, given, **options):
    mover = make_mover(dram, slow, **options)
    mover.submit([write_job(1000, range(8), range(8))])
    assert inbox.result(1000).ok.all()
    dram.slab[:] = 0
    return mover


def load(job_id, n=4, **more):
    more.setdefault("deadline_s", SOON_S)
    return make_job(job_id, 1, range(n), 0, range(10, 10 + n), **more)


def test_a_read_that_hangs(make_mover, inbox, dram, slow, given):
    mover = filled(make_mover, inbox, dram, slow, given)
    slow.hang("read")
    mover.submit([load(1)])
    inbox.overdue(1)
    assert inbox.of(1) == ["JobOverdue"]
    assert (mover.stats().levels[1].overdue, mover.stats().levels[1].lost) == (1, 1)
    dram.slab[:] = 0x77  # somebody else's by now
    slow.wake()
    result = inbox.result(1)
    assert (result.ok.any(), result.nbytes, result.reason) == (False, 0, "deadline")
    assert inbox.of(1) == ["JobOverdue", "JobResult"]
    assert (dram.slab == 0x77).all(), "memory was touched after JobOverdue"
    assert (mover.stats().levels[1].overdue, mover.stats().levels[1].lost) == (1, 0)
    mover.submit([load(2)])
    assert inbox.result(2).ok.all()
    assert (dram.slab[10:14, :NBYTES] == given[:4]).all()


def test_out_is_free_after_overdue(make_mover, inbox, dram, slow, given):
    """Neither `out` nor the second destination is touched, and the rows are let go while the thread still hangs."""
    mover = filled(make_mover, inbox, dram, slow, given)
    out = np.zeros((4, NBYTES), dtype=np.uint8)
    rows = caller_rows(out)
    held = weakref.ref(rows)
    mover.attach(1, rows)
    slow.hang("read")
    also = slots(20, 21, 22, 23)
    mover.submit(
        [make_job(1, 1, range(4), CALLER, range(4), endpoint=1, deadline_s=SOON_S, also_level=0, also_slots=also)]
    )
    inbox.overdue(1)
    mover.detach(1)
    del rows
    gc.collect()
    assert eventually(lambda: held() is None), "the caller's rows are held after JobOverdue"
    out[:] = 0x77
    slow.wake()
    assert not inbox.result(1).ok.any()
    assert (out == 0x77).all()
    assert not dram.slab.any()


def test_a_write_that_hangs_holds_its_source_and_is_never_readable(make_mover, inbox, dram, slow, given):
    mover = filled(make_mover, inbox, dram, slow, given)
    slow.hang("write")
    mover.submit([write_job(1, range(4), range(20, 24), idents_of(4, seed=3), deadline_s=SOON_S)])
    inbox.overdue(1)
    slow.wake()
    assert (inbox.result(1).ok.any(), inbox.result(1).reason) == (False, "deadline")
    mover.submit([make_job(2, 1, range(20, 24), 0, range(4), idents_of(4, seed=3))])
    assert not inbox.result(2).ok.any()


def test_a_hanging_write_never_reads_the_callers_rows(make_mover, inbox, slow):
    """Where NVMe is level 0: the rows were copied to staging before."""
    mover = make_mover(slow)
    rows = payload(2, NBYTES)
    first = rows.copy()
    mover.attach(1, caller_rows(rows))
    slow.hang("write")
    mover.submit([make_job(1, CALLER, [0, 1], 0, [0, 1], endpoint=1, deadline_s=SOON_S, claims=claims_of(2))])
    inbox.overdue(1)
    rows[:] = 0
    slow.wake()
    inbox.result(1)
    assert (slow.inner.slab[:2, :NBYTES] == first).all()


def test_a_queued_job_just_fails(make_mover, inbox, dram, slow, given):
    mover = filled(make_mover, inbox, dram, slow, given, io_threads=1)
    slow.hang("read")
    mover.submit([load(1, deadline_s=None)])
    assert slow.wait_hung()
    mover.submit([load(2), load(3, deadline_s=None)])
    result = inbox.result(2)
    assert (result.ok.any(), result.reason) == (False, "deadline")
    assert inbox.of(2) == ["JobResult"]
    assert mover.stats().levels[1].queued == 1
    slow.wake()
    assert inbox.result(1).ok.all()
    assert inbox.result(3).ok.all()
    assert inbox.of(2) == ["JobResult"]


def test_an_exhausted_pool_never_blocks_its_jobs(make_mover, inbox, dram, slow, given):
    """All threads hang; every job still ends in time, and memory levels go on."""
    mover = filled(make_mover, inbox, dram, slow, given, io_threads=2)
    slow.hang("read")
    mover.submit([load(1, n=1), load(2, n=1)])
    inbox.overdue(1)
    inbox.overdue(2)
    began = time.monotonic()
    mover.submit([load(10 + i, n=1) for i in range(10)])
    assert [inbox.result(10 + i).reason for i in range(10)] == ["deadline"] * 10
    assert time.monotonic() - began < 5
    assert mover.stats().levels[1].lost == 2
    mover.attach(1, caller_rows(given))
    mover.submit([make_job(30, CALLER, range(8), 0, range(24, 32), endpoint=1)])
    assert inbox.result(30).ok.all()
    slow.wake()
    inbox.result(1)
    inbox.result(2)
    assert (dram.slab[24:, :NBYTES] == given).all()
    assert not dram.slab[:24].any()
    mover.submit([load(40)])
    assert inbox.result(40).ok.all()


def test_one_hanging_job_does_not_take_the_whole_pool(make_mover, inbox):
    """It has enough parts for all threads; one is left for others."""
    nbytes, n = 1 << 20, 8
    dram, slow = DRAMTier(n, nbytes), HangingTier(DRAMTier(n, nbytes), verifies=True)
    mover = make_mover(dram, slow, io_threads=3)
    mover.submit([write_job(9, range(n), range(n))])
    inbox.result(9)
    slow.hang("read")
    mover.submit([make_job(1, 1, range(6), 0, range(6), idents_of(n)[:6], deadline_s=60.0)])
    assert slow.wait_hung(2)
    assert not slow.wait_hung(3, 0.1)
    slow.unblock("read")
    mover.submit([make_job(2, 1, [6, 7], 0, [6, 7], idents_of(n)[6:])])
    assert inbox.result(2).ok.all()
    assert (slow.hung, inbox.of(1)) == (2, [])
    slow.wake()
    assert inbox.result(1).ok.all()


def test_parts_that_wait_are_skipped(make_mover, inbox, slow):
    """A job of many parts, one of which hangs: the rest is not begun after the deadline."""
    nbytes, n = 1 << 20, 6
    inner = FaultyTier(DRAMTier(n, nbytes))
    slow = HangingTier(inner, verifies=True)
    dram = DRAMTier(n, nbytes)
    mover = make_mover(dram, slow, io_threads=1)
    slow.hang("write")
    mover.submit([write_job(1, range(n), range(n), deadline_s=SOON_S)])
    inbox.overdue(1)
    slow.wake()
    assert not inbox.result(1).ok.any()
    assert inner.calls["write"] == 1


class SlowRows:
    """Caller rows whose `put` can be held up: a last copy that takes long."""

    def __init__(self, out):
        self.out = out
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.puts = 0

    def take(self, begin, end):
        return self.out[begin:end]

    def put(self, begin, rows):
        self.puts += 1
        self.inside.set()
        assert self.go_on.wait(10)
        self.out[begin : begin + len(rows)] = rows


def test_a_job_that_has_ended_does_not_expire():
    """Its deadline may pass at the very moment: one result is enough."""
    running = RunningJob(write_job(1, [0], [0]), 1, None, 1, 1)
    assert running.begin_part() == (0, 1) and running.end_part()
    assert running.expire("deadline") == "none"
    assert not running.cancelled and not running.overdue


def test_overdue_waits_for_the_last_copy(make_mover, inbox, dram, slow, given):
    """The deadline passes inside a last copy: announced when it ends, by the thread that ran it."""
    mover = filled(make_mover, inbox, dram, slow, given)
    rows = SlowRows(np.zeros((4, NBYTES), dtype=np.uint8))
    mover.attach(1, rows)
    mover.submit([make_job(1, 1, range(4), CALLER, range(4), endpoint=1, deadline_s=SOON_S)])
    assert rows.inside.wait(5)
    time.sleep(3 * SOON_S)
    assert inbox.of(1) == [], "announced while a last copy runs"
    rows.go_on.set()
    result = inbox.result(1)
    assert inbox.of(1) == ["JobOverdue", "JobResult"]
    assert (result.ok.any(), result.reason) == (False, "deadline")


class SecondReadLate(WrappedTier):
    """The second read waits until `late` is set."""

    def __init__(self, inner):
        super().__init__(inner, verifies=True)
        self.late = threading.Event()
        self.second_done = threading.Event()
        self.reads = 0
        self.lock = threading.Lock()

    def read(self, slots, rows):
        with self.lock:
            self.reads += 1
            second = self.reads == 2
        if second:
            assert self.late.wait(10)
        ok = super().read(slots, rows)
        if second:
            self.second_done.set()
        return ok


def test_no_last_copy_begins_while_overdue_is_due(make_mover, inbox):
    """Two threads in one job: one is in a last copy at the deadline, the other comes to its own after it."""
    nbytes = 1 << 20
    dram, disk = DRAMTier(2, nbytes), SecondReadLate(DRAMTier(2, nbytes))
    dram.slab[:] = 5
    mover = make_mover(dram, disk)
    mover.submit([write_job(9, [0, 1], [0, 1])])
    inbox.result(9)
    rows = SlowRows(np.zeros((2, nbytes), dtype=np.uint8))
    mover.attach(1, rows)
    mover.submit([make_job(1, 1, [0, 1], CALLER, [0, 1], endpoint=1, deadline_s=0.1)])
    assert rows.inside.wait(5)
    time.sleep(0.2)
    disk.late.set()
    assert disk.second_done.wait(5)
    time.sleep(0.05)
    assert inbox.of(1) == []
    rows.go_on.set()
    assert not inbox.result(1).ok.any()
    assert inbox.of(1) == ["JobOverdue", "JobResult"]
    assert rows.puts == 1, "a last copy began after the deadline"
    assert sorted(rows.out.max(axis=1)) == [0, 5]


class HalfSlowRows:
    """Caller rows of which the second half can be held up, once a thread copies it."""

    def __init__(self, rows):
        self.rows = rows
        self.inside, self.go_on = threading.Event(), threading.Event()

    def take(self, begin, end):
        if begin >= len(self.rows) // 2:
            self.inside.set()
            assert self.go_on.wait(10)
        return self.rows[begin:end]


@pytest.mark.parametrize("deadline_s", [0.1, 60.0])
def test_one_half_of_a_split_copy_hangs(make_mover, inbox, deadline_s):
    """The other half is copied meanwhile, but nothing is told, and nothing counts, before both threads are out."""
    n, nbytes = 4, MEMORY_PART_MIN_NBYTES // 2
    given = payload(n, nbytes)
    tier = DRAMTier(n + 1, nbytes)
    mover = make_mover(tier)
    rows = HalfSlowRows(given)
    mover.attach(1, rows)
    mover.submit([make_job(1, CALLER, range(n), 0, range(n), endpoint=1, deadline_s=deadline_s)])
    assert rows.inside.wait(5)
    assert eventually(lambda: (tier.slab[: n // 2] == given[: n // 2]).all())
    time.sleep(0.2)
    assert inbox.of(1) == [] and not tier.slab[n // 2 :].any()
    mover.attach(2, caller_rows(given))
    mover.submit([make_job(2, CALLER, [0], 0, [n], endpoint=2)])
    assert inbox.result(2).ok.all(), "the other thread serves other jobs"
    rows.go_on.set()
    late = deadline_s < 1.0
    assert inbox.result(1).ok.tolist() == [not late] * n
    assert inbox.of(1) == (["JobOverdue", "JobResult"] if late else ["JobResult"])
    if not late:
        assert (tier.slab[:n] == given).all()


def test_the_result_never_overtakes_overdue(make_mover, inbox, dram, slow, given):
    """The thread returns while JobOverdue is being delivered."""
    mover = filled(make_mover, inbox, dram, slow, given)
    delivering, go_on = threading.Event(), threading.Event()
    order = []

    def hook(message):
        if isinstance(message, JobOverdue):
            delivering.set()
            assert go_on.wait(10)
            order.append("overdue delivered")
        elif isinstance(message, JobResult):
            order.append("result")

    inbox.hook = hook
    slow.hang("read")
    mover.submit([load(1)])
    assert delivering.wait(5)
    slow.wake()
    assert eventually(lambda: slow.hung == 0)
    time.sleep(0.05)
    go_on.set()
    inbox.result(1)
    assert eventually(lambda: len(order) == 2)
    assert order == ["overdue delivered", "result"]


def test_many_deadlines_at_the_edge(make_mover, inbox, dram, slow, given):
    """Jobs that end about when their deadline comes: one result each, overdue never after it, no wrong byte."""
    mover = filled(make_mover, inbox, dram, slow, given, io_threads=4)
    read = slow.inner.read
    rng = np.random.default_rng(0)

    def uneven(numbers, into):
        time.sleep(float(rng.uniform(0.0, 0.006)))
        return read(numbers, into)

    slow.inner.read = uneven
    n = 200
    for i in range(n):
        mover.submit([make_job(i, 1, [i % 8], 0, [i % 32], idents_of(8)[[i % 8]], deadline_s=0.003)])
        if i % 8 == 7:
            inbox.result(i)
    for i in range(n):
        result = inbox.result(i)
        assert inbox.of(i) in (["JobResult"], ["JobOverdue", "JobResult"])
        assert result.ok.all() == (result.reason == "")
        assert result.reason in ("", "deadline")
        if inbox.of(i) == ["JobOverdue", "JobResult"]:
            assert not result.ok.any()
    assert mover.stats().levels[1].lost == 0


# -- close -------------------------------------------------------------------------------------------------------------


def test_close_waits_for_running_jobs_and_fails_queued_ones(make_mover, inbox, dram, slow, given):
    mover = filled(make_mover, inbox, dram, slow, given, io_threads=1)
    slow.hang("read")
    mover.submit([load(1, deadline_s=None)])
    assert slow.wait_hung()
    mover.submit([load(2, deadline_s=None), write_job(3, [0], [9], start_after_s=60.0)])
    closing = threading.Thread(target=lambda: closed.append(mover.close(10.0)))
    closed = []
    slab = dram.slab
    closing.start()
    assert (inbox.result(2).reason, inbox.result(3).reason) == ("closed", "closed")
    mover.submit([load(4, deadline_s=None)])
    assert inbox.result(4).reason == "closed"
    assert inbox.of(1) == []
    slow.wake()
    closing.join(10)
    assert closed == [True]
    assert mover.left_open == set()
    assert inbox.result(1).ok.all()
    assert (slab[10:14, :NBYTES] == given[:4]).all()
    assert dram.slab is None, "the tiers are closed too"
    with pytest.raises(CacheClosedError):
        mover.submit([load(5)])
    assert mover.close(1.0) is True


def test_close_with_a_hung_job(make_mover, inbox, dram, slow, given):
    mover = filled(make_mover, inbox, dram, slow, given)
    slow.hang("read")
    mover.submit([load(1, deadline_s=None)])
    assert slow.wait_hung()
    late = threading.Timer(4.0, slow.wake)  # ends a close that does not end by itself
    late.start()
    assert mover.close(0.1) is False
    late.cancel()
    assert inbox.of(1) == ["JobOverdue"]
    slab = dram.slab
    assert slab is not None, "memory of a lost job stays"
    assert mover.left_open == {0, 1}
    slow.wake()
    result = inbox.result(1)
    assert (result.ok.any(), result.reason) == (False, "closed")
    assert not slab.any()


def test_close_leaves_no_thread(make_mover, inbox, dram, slow, given):
    before = set(threading.enumerate())
    mover = filled(make_mover, inbox, dram, slow, given)
    assert len(set(threading.enumerate()) - before) >= 12
    mover.submit([load(i) for i in range(5)])
    assert mover.close(5.0) is True
    assert eventually(lambda: not set(threading.enumerate()) - before)


def test_close_from_a_worker_thread_raises(make_mover, inbox, dram, slow, given):
    mover = filled(make_mover, inbox, dram, slow, given)
    raised = []

    def hook(message):
        for call in (mover.sync, mover.close):
            try:
                call(0.1)
            except WorkerThreadError:
                raised.append(call.__name__)

    inbox.hook = hook
    mover.submit([load(1)])
    inbox.result(1)
    assert eventually(lambda: raised == ["sync", "close"])


def test_abandon(make_mover, inbox, dram, slow, given):
    """As in a forked child, where every lock may be held for ever."""
    mover = filled(make_mover, inbox, dram, slow, given)
    with mover._lock:
        mover.abandon()
        with pytest.raises(CacheClosedError):
            mover.submit([load(1)])
        with pytest.raises(CacheClosedError):
            mover.sync(1.0)
        assert mover.close(1.0) is True
    assert dram.slab is not None
    mover._abandoned = False  # for the fixture's close
