"""Which job comes next, delays, and what the planner's other messages do."""

import threading
import time

import numpy as np
import pytest
from mover_kit import EPOCH, caller_rows, eventually, idents_of, make_job, payload, write_job

from tiercache.mover import is_worker_thread
from tiercache.mover.clock import Clock
from tiercache.mover.job import RunningJob
from tiercache.mover.pool import OTHERS_EVERY, PoolQueue
from tiercache.testing import FaultyTier, HangingTier
from tiercache.tiers.dram import DRAMTier
from tiercache.types import CALLER, Expedite, Forget, NewEpoch, NoteUse

NBYTES = 100


def running(job_id, kind, n=1, part_blocks=1, max_threads=4):
    source, destination = {"load": (1, 0), "write": (0, 1), "store": (CALLER, 0)}[kind]
    job = make_job(job_id, source, range(n), destination, range(n), kind=kind)
    return RunningJob(job, 1, None, part_blocks, max_threads)


def drain(queue, parts=1000):
    order = []
    queue.stop()
    while len(order) < parts and (part := queue.next_part()) is not None:
        order.append(part[0].job.id)
        part[0].end_part()
    return order


def test_loads_first_but_every_eighth_is_the_oldest_other():
    queue = PoolQueue()
    for i in range(3):
        queue.push(running(100 + i, "write" if i % 2 else "store"))
    for i in range(20):
        queue.push(running(i, "load"))
    loads = list(range(20))
    assert OTHERS_EVERY == 8
    assert drain(queue) == [*loads[:7], 100, *loads[7:14], 101, *loads[14:], 102]


def test_others_run_when_there_is_no_load():
    queue = PoolQueue()
    for i in range(20):
        queue.push(running(i, "write"))
    assert drain(queue) == list(range(20))


def test_a_load_overtakes_the_parts_of_a_long_write():
    queue = PoolQueue()
    queue.push(running(1, "write", n=6))
    assert queue.next_part()[1:] == (0, 1)
    queue.push(running(2, "load", n=2))
    assert drain(queue) == [2, 2, 1, 1, 1, 1, 1]


def test_one_job_leaves_a_thread_for_another():
    queue = PoolQueue()
    queue.push(running(1, "load", n=9, max_threads=2))
    queue.push(running(2, "load", n=1, max_threads=2))
    order = [queue.next_part()[0].job.id for _ in range(3)]
    assert order == [1, 1, 2]
    assert len(queue) == 1


def waiting_threads(queue, n):
    """Threads that wait for one part each, and what they found."""
    found = []
    threads = [threading.Thread(target=lambda: found.append(queue.next_part()), daemon=True) for _ in range(n)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(queue._ready._waiters) == n)
    return threads, found


def test_a_push_wakes_as_many_threads_as_there_are_parts():
    queue = PoolQueue()
    threads, found = waiting_threads(queue, 3)
    queue.push(running(1, "load", n=3))
    assert eventually(lambda: len(found) == 3, 3.0), "an idle thread looks around by itself only after IDLE_WAIT_S"
    assert sorted(part[1:] for part in found) == [(0, 1), (1, 2), (2, 3)]
    for thread in threads:
        thread.join(5)


def test_a_job_at_its_limit_wakes_nobody_and_another_job_does():
    queue = PoolQueue()
    threads, found = waiting_threads(queue, 3)
    queue.push(running(1, "load", n=3, max_threads=1))
    assert eventually(lambda: len(found) == 1)
    time.sleep(0.05)
    assert len(queue._ready._waiters) == 2
    queue.push(running(2, "write", n=3, max_threads=2))
    assert eventually(lambda: len(found) == 3, 3.0)
    for thread in threads:
        thread.join(5)
    assert sorted(part[0].job.id for part in found) == [1, 2, 2]


def test_the_thread_that_ends_a_part_takes_the_next_one_of_a_job_at_its_limit():
    queue = PoolQueue()
    job = running(1, "load", n=2, max_threads=1)
    queue.push(job)
    assert queue.next_part()[1:] == (0, 1)
    threads, found = waiting_threads(queue, 1)
    job.end_part()
    assert queue.next_part()[1:] == (1, 2)
    queue.push(running(2, "load"))
    threads[0].join(5)
    assert found[0][0].job.id == 2


def test_no_wake_up_is_lost():
    """Bursts of jobs with all kinds of limits, and in each burst a thread that hangs in the first part of a job: all
    other parts are begun long before an idle thread would look by itself."""
    queue, done, go_on = PoolQueue(), threading.Semaphore(0), threading.Semaphore(0)
    rng = np.random.default_rng(5)

    def serve():
        while (part := queue.next_part()) is not None:
            if part[0].job.id % 10 == 0 and part[1] == 0:
                assert go_on.acquire(timeout=10.0)
            part[0].end_part()
            done.release()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for burst in range(300):
        jobs = [running(10 * burst, "load", n=int(rng.integers(1, 6)), max_threads=int(rng.integers(2, 5)))]
        for i in range(1, int(rng.integers(1, 5))):
            kind = "load" if rng.integers(2) else "write"
            jobs.append(running(10 * burst + i, kind, n=int(rng.integers(1, 6)), max_threads=int(rng.integers(1, 5))))
        for job in jobs:
            queue.push(job)
        for _ in range(sum(each.job.n for each in jobs) - 1):
            assert done.acquire(timeout=5.0), f"burst {burst}: a part waits and nobody was woken for it"
        go_on.release()
        assert done.acquire(timeout=5.0)
    queue.stop()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def gate(make_mover, **options):
    """A mover whose one I/O thread hangs in job 0 until `slow.wake()`."""
    dram = DRAMTier(64, NBYTES)
    slow = HangingTier(DRAMTier(64, NBYTES), verifies=True)
    mover = make_mover(dram, slow, io_threads=1, **options)
    slow.hang("read")
    mover.submit([make_job(0, 1, [0], 0, [0])])
    assert slow.wait_hung()
    return mover, slow


def test_order_of_results(make_mover, inbox):
    mover, slow = gate(make_mover)
    mover.submit([write_job(10 + i, [i], [i]) for i in range(2)])
    mover.submit([make_job(20 + i, 1, [20 + i], 0, [20 + i]) for i in range(8)])
    assert mover.stats().levels[1].queued == 10
    slow.wake()
    inbox.result(11)
    assert inbox.order() == [0, 20, 21, 22, 23, 24, 25, 10, 26, 27, 11]
    assert mover.stats().levels[1].queued == 0


def test_jobs_run_in_the_pool_of_the_slower_end(make_mover, inbox):
    """The pool of level 1 is blocked; level 0 goes on."""
    mover, _ = gate(make_mover)
    mover.attach(1, caller_rows(payload(2, NBYTES)))
    mover.submit([write_job(1, [5], [5]), make_job(2, CALLER, [0, 1], 0, [3, 4], endpoint=1)])
    assert inbox.result(2).ok.all()
    assert inbox.order() == [2]


# -- delays ------------------------------------------------------------------------------------------------------------


def two_levels(make_mover, **options):
    dram, slow = DRAMTier(16, NBYTES), FaultyTier(DRAMTier(16, NBYTES), verifies=True)
    dram.slab[:] = payload(16, dram.stride)
    return make_mover(dram, slow, **options), dram, slow


def test_a_delayed_job_waits(make_mover, inbox):
    mover, _, slow = two_levels(make_mover)
    began = time.monotonic()
    mover.submit([write_job(1, [0], [0], start_after_s=0.15), write_job(2, [1], [1])])
    inbox.result(2)
    assert mover.stats().levels[1].delayed == 1
    assert slow.calls["write"] == 1
    assert inbox.result(1).ok.all()
    assert time.monotonic() - began >= 0.15
    assert mover.stats().levels[1].delayed == 0


def test_delayed_jobs_start_at_their_times(make_mover, inbox):
    mover, _, _ = two_levels(make_mover)
    for i, delay in enumerate([0.2, 0.05, 0.1]):
        mover.submit([write_job(i, [i], [i], start_after_s=delay)])
    inbox.result(0)
    assert inbox.order() == [1, 2, 0]


def test_expedite(make_mover, inbox):
    mover, _, _ = two_levels(make_mover)
    mover.submit([write_job(i, [i], [i], start_after_s=60.0) for i in range(3)])
    mover.submit([Expedite((1, 2, 99))])
    assert inbox.result(1).ok.all()
    assert inbox.result(2).ok.all()
    assert inbox.of(0) == []
    mover.submit([Expedite((1, 0)), Expedite((0,))])
    assert inbox.result(0).ok.all()
    assert sorted(inbox.order()) == [0, 1, 2]


def test_expedite_of_a_job_that_waits_for_a_thread(make_mover, inbox):
    """It is not queued twice."""
    mover, slow = gate(make_mover)
    mover.submit([write_job(1, [5], [5], start_after_s=60.0), write_job(2, [6], [6])])
    mover.submit([Expedite((2, 1)), Expedite((1, 2))])
    assert mover.stats().levels[1].queued == 2
    slow.wake()
    inbox.result(1)
    inbox.result(2)
    assert mover.stats().levels[1].queued == 0
    assert sorted(inbox.order()) == [0, 1, 2]


def test_a_deadline_counts_from_the_start(make_mover, inbox):
    mover, _, _ = two_levels(make_mover)
    mover.submit([write_job(1, [0], [0], start_after_s=0.2, deadline_s=0.1)])
    result = inbox.result(1)
    assert (result.ok.all(), result.reason) == (True, "")


def test_delays_and_deadlines_of_many_jobs_do_not_pile_up(make_mover, inbox):
    mover, _, _ = two_levels(make_mover)
    for i in range(1000):
        mover.submit([write_job(i, [0], [0], deadline_s=60.0)])
        inbox.result(i)
    assert len(mover._clock._heap) <= 256


def test_a_clock_outlives_what_it_calls():
    """Without it no deadline would ever be kept again."""
    errors, called = [], threading.Event()
    clock = Clock(on_error=lambda: errors.append("error"))

    def fail(job):
        raise RuntimeError("what was called is at fault")

    assert eventually(lambda: clock._wakes_at > time.monotonic())  # it sleeps
    clock.call_at(time.monotonic(), running(1, "load"), fail)
    clock.call_at(time.monotonic() + 0.01, running(2, "load"), lambda job: called.set())
    assert called.wait(2.0)
    assert errors == ["error"]
    clock.stop()
    clock.thread.join(2.0)
    assert not clock.thread.is_alive()


# -- messages ----------------------------------------------------------------------------------------------------------


def test_messages_are_taken_in_order(make_mover, inbox):
    """Forget, then a new job for the slot; and the other way round."""
    mover, _, _ = two_levels(make_mover)
    mover.submit([write_job(1, [0, 1], [0, 1])])
    inbox.result(1)
    mover.submit([Forget(np.array([0], np.int32)), make_job(2, 1, [0, 1], 0, [4, 5])])
    assert inbox.result(2).ok.tolist() == [False, True]
    mover.submit([Forget(np.array([0], np.int32)), write_job(3, [0], [0])])
    inbox.result(3)
    mover.submit([make_job(4, 1, [0], 0, [4])])
    assert inbox.result(4).ok.all()


def test_a_new_epoch_forgets_everything(make_mover, inbox):
    mover, _, _ = two_levels(make_mover, epoch=EPOCH)
    mover.submit([write_job(1, [0], [0])])
    assert inbox.result(1).ok.all()
    mover.submit([NewEpoch(b"two"), make_job(2, 1, [0], 0, [4])])
    assert not inbox.result(2).ok.any()
    mover.submit([write_job(3, [0], [0], epoch=b"two"), write_job(4, [1], [1])])
    assert inbox.result(3).ok.all()
    assert (inbox.result(4).ok.any(), inbox.result(4).reason) == (False, "cancelled")


def test_a_new_epoch_while_a_write_runs(make_mover, inbox):
    dram = DRAMTier(4, NBYTES)
    slow = HangingTier(DRAMTier(4, NBYTES), verifies=True)
    mover = make_mover(dram, slow, epoch=EPOCH)
    slow.hang("write")
    mover.submit([write_job(1, [0, 1], [0, 1])])
    assert slow.wait_hung()
    mover.submit([NewEpoch(b"two")])
    slow.wake()
    result = inbox.result(1)
    assert (result.ok.any(), result.reason, result.nbytes) == (False, "cancelled", 0)
    mover.submit([make_job(2, 1, [0, 1], 0, [2, 3])])
    assert not inbox.result(2).ok.any(), "the old epoch's blocks can be read"


def test_messages_for_a_ledger_without_a_disk(make_mover, inbox):
    mover = make_mover(DRAMTier(4, NBYTES))
    none = np.empty(0, np.int32)
    mover.submit([NewEpoch(b"two"), Forget(none), NoteUse(none, np.empty(0), np.empty(0, np.uint32))])
    mover.submit([make_job(1, 0, [0], CALLER, [0], endpoint=1), make_job(2, 0, [], 0, [])])
    inbox.result(2)
    assert mover.sync(1.0)


# -- the callback ------------------------------------------------------------------------------------------------------


def test_delivered_on_a_worker_thread_without_a_lock(make_mover, inbox):
    """The callback may submit, attach, detach and ask for statistics."""
    mover, _, _ = two_levels(make_mover)
    seen = []

    def hook(message):
        seen.append((is_worker_thread(), threading.current_thread().name.startswith("tiercache-")))
        mover.attach(3, caller_rows(payload(1, NBYTES)))
        mover.detach(3)
        mover.stats()
        if message.job < 5:
            mover.submit([write_job(message.job + 1, [0], [0]), Expedite((1,))])

    inbox.hook = hook
    mover.submit([write_job(1, [0], [0])])
    inbox.result(5)
    assert eventually(lambda: len(seen) == 5)
    assert set(seen) == {(True, True)}
    assert not is_worker_thread()


def test_a_callback_that_raises(make_mover, inbox, caplog):
    mover, _, _ = two_levels(make_mover, io_threads=1, memory_threads=1)

    def hook(message):
        raise RuntimeError("a bug in the planner")

    inbox.hook = hook
    for i in range(3):
        mover.submit([write_job(i, [i], [i]), make_job(10 + i, 1, [9], 0, [9])])
        inbox.result(i)
        inbox.result(10 + i)
    assert eventually(lambda: mover.stats().delivery_errors == 6)
    assert "a bug in the planner" in caplog.text


@pytest.mark.parametrize("level", [0, 1])
def test_results_are_per_block_and_counted(make_mover, inbox, level):
    mover, _, slow = two_levels(make_mover)
    slow.fail_slots("write", [2])
    mover.submit([write_job(1, [0, 1, 2], [0, 1, 2], idents_of(3))])
    result = inbox.result(1)
    assert (result.nbytes, result.reason) == (2 * NBYTES, "io")
    assert result.seconds > 0
    stats = mover.stats().levels[level]
    expected = {0: (0, 0, 0, 2 * NBYTES, 0), 1: (2, 1, 1, 0, 2 * NBYTES)}[level]
    got = (stats.blocks_ok, stats.blocks_failed, stats.io_errors, stats.bytes_read, stats.bytes_written)
    assert got == expected
