"""Stores that are called off: the rows they read change, and nothing of what they read may count."""

import threading

import numpy as np
import pytest
from mover_kit import caller_rows, eventually, make_job, payload

from tiercache.testing import HangingTier
from tiercache.tiers.dram import DRAMTier
from tiercache.types import CALLER

NBYTES = 5000


@pytest.fixture
def dram():
    return HangingTier(DRAMTier(32, NBYTES), shows_memory=True)


def store(job_id, rows=range(4), slots=range(4), **more):
    return make_job(job_id, CALLER, rows, 0, slots, kind="store", endpoint=1, **more)


def test_a_store_that_ends_in_time_counts(make_mover, inbox, dram):
    mover = make_mover(dram)
    rows = payload(4, NBYTES)
    mover.attach(1, caller_rows(rows))
    dram.hang("write")
    mover.submit([store(1)])
    assert dram.wait_hung()
    threading.Timer(0.05, dram.wake).start()
    assert mover.call_off([1], 10.0) == 0
    assert inbox.result(1).ok.all()
    assert np.array_equal(dram.slab[:4, :NBYTES], rows)


def test_a_store_that_runs_on_is_thrown_away(make_mover, inbox, dram):
    mover = make_mover(dram)
    mover.attach(1, caller_rows(payload(4, NBYTES)))
    dram.hang("write")
    mover.submit([store(1)])
    assert dram.wait_hung()
    assert mover.call_off([1], 0.01) == 1
    assert inbox.of(1) == []
    dram.wake()
    result = inbox.result(1)
    assert not result.ok.any() and result.reason == "cancelled"
    assert inbox.of(1) == ["JobResult"]


def test_a_queued_store_never_reads(make_mover, inbox, dram):
    mover = make_mover(dram, memory_threads=1)
    mover.attach(1, caller_rows(payload(8, NBYTES)))
    dram.hang("write")
    mover.submit([store(1), store(2, range(4, 8), range(4, 8))])
    assert dram.wait_hung()
    assert mover.call_off([2], 0.01) == 1
    result = inbox.result(2)
    assert not result.ok.any() and result.reason == "cancelled"
    dram.wake()
    assert inbox.result(1).ok.all()
    assert eventually(lambda: mover.stats().levels[0].blocks_ok == 4)
    assert not dram.slab[4:8].any()


def test_jobs_that_are_over_or_unknown_are_ignored(make_mover, inbox, dram):
    mover = make_mover(dram)
    mover.attach(1, caller_rows(payload(4, NBYTES)))
    mover.submit([store(1)])
    assert inbox.result(1).ok.all()
    assert mover.call_off([1, 77], 0.0) == 0
