"""The shipped testing tiers and the stepped mover do what they say."""

import threading
import time

import numpy as np
import pytest
from mover_kit import EPOCH, caller_rows, idents_of, make_job, payload, slots, write_job

from tiercache.testing import DelayingTier, FaultyTier, HangingTier, SteppedMover
from tiercache.tiers.dram import DRAMTier
from tiercache.types import CALLER, Expedite, Forget, LostClaims, NewEpoch

NBYTES = 100


@pytest.fixture
def inner():
    tier = DRAMTier(8, NBYTES)
    tier.slab[:] = payload(8, tier.stride)
    return tier


def read(tier, *numbers):
    rows = np.full((len(numbers), NBYTES), 0xEE, dtype=np.uint8)
    return tier.read(slots(*numbers), rows), rows


def test_faulty_slots(inner):
    tier = FaultyTier(inner)
    before = inner.slab.copy()
    tier.fail_slots("read", [1])
    ok, rows = read(tier, 0, 1, 2)
    assert ok.tolist() == [True, False, True]
    assert (rows[[0, 2]] == inner.slab[[0, 2], :NBYTES]).all()
    assert (rows[1] == 0xEE).all()
    tier.fail_slots("write", slots(2))
    assert tier.write(slots(2, 3), payload(2, NBYTES, 9)).tolist() == [False, True]
    assert (inner.slab[2] == before[2]).all()
    assert (inner.slab[3, :NBYTES] == payload(2, NBYTES, 9)[1]).all()
    tier.heal()
    assert read(tier, 0, 1, 2)[0].all()


def test_faulty_nth(inner):
    tier = FaultyTier(inner)
    read(tier, 0)
    tier.fail_at("read", 2)
    assert [read(tier, 0)[0][0] for _ in range(3)] == [True, False, True]
    tier.raise_at("read", 1, OSError("told to"))
    with pytest.raises(OSError, match="told to"):
        read(tier, 0)
    assert read(tier, 0)[0].all()
    assert tier.calls == {"read": 6, "write": 0, "sync": 0}


def test_faulty_always_and_sync(inner):
    tier = FaultyTier(inner)
    tier.fail_all("read")
    assert not read(tier, 0, 1)[0].any()
    assert tier.write(slots(0), payload(1, NBYTES)).all()
    tier.fail_at("sync", 2)
    assert [tier.sync() for _ in range(3)] == [True, False, True]


def test_faulty_bits(inner):
    tier = FaultyTier(inner)
    tier.flip_bit(1, 7, 2)
    ok, rows = read(tier, 0, 1)
    assert ok.all()
    different = rows ^ inner.slab[:2, :NBYTES]
    assert different[1, 7] == 4
    assert np.count_nonzero(different) == 1


def test_wrappers_hide_memory_and_may_pass_for_a_disk(inner):
    for tier in (FaultyTier(inner), HangingTier(inner), DelayingTier(inner, 0.0)):
        assert tier.slab is None
        assert tier.verifies is False
    assert FaultyTier(inner, verifies=True).verifies is True
    assert FaultyTier(FaultyTier(inner, verifies=True)).verifies is True


def test_delaying(inner):
    seen = []
    tier = DelayingTier(inner, lambda op, numbers: seen.append((op, numbers.tolist())) or 0.03)
    began = time.monotonic()
    read(tier, 4, 5)
    tier.write(slots(0), payload(1, NBYTES))
    assert time.monotonic() - began >= 0.06
    assert seen == [("read", [4, 5]), ("write", [0])]


def test_hanging(inner):
    tier = HangingTier(inner)
    tier.hang("read")
    assert tier.write(slots(0), payload(1, NBYTES)).all()
    done = []
    threads = [threading.Thread(target=lambda: done.append(read(tier, 3)[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert tier.wait_hung(2)
    assert done == []
    tier.unblock("read")
    assert read(tier, 3)[0].all()
    assert tier.hung == 2
    tier.wake()
    for thread in threads:
        thread.join(5)
    assert len(done) == 2
    assert tier.hung == 0
    assert tier.wait_hung(1, 0.01) is False


def test_hanging_ends_by_itself(inner):
    tier = HangingTier(inner, max_s=0.05)
    tier.hang("read")
    assert read(tier, 3)[0].all()


# -- the stepped mover -------------------------------------------------------------------------------------------------


@pytest.fixture
def stepped(inbox):
    dram, slow = DRAMTier(8, NBYTES), FaultyTier(DRAMTier(8, NBYTES), verifies=True)
    mover = SteppedMover([dram, slow], inbox, epoch=EPOCH)
    mover.dram, mover.slow = dram, slow
    return mover


def stored(mover, rows, at, job_id=100):
    mover.attach(job_id, caller_rows(rows))
    mover.submit([make_job(job_id, CALLER, range(len(rows)), 0, at, endpoint=job_id)])
    mover.run(job_id)


def test_stepped_runs_when_told(stepped, inbox):
    given = payload(3, NBYTES)
    stepped.attach(1, caller_rows(given))
    stepped.submit([make_job(1, CALLER, range(3), 0, [4, 5, 6], endpoint=1)])
    assert list(stepped.pending) == [1]
    assert inbox.messages == []
    assert not stepped.dram.slab.any()
    result = stepped.run(1)
    assert inbox.messages == [result]
    assert (result.ok.all(), result.nbytes, result.reason) == (True, 300, "")
    assert (stepped.dram.slab[4:7, :NBYTES] == given).all()
    assert stepped.pending == {}
    assert stepped.stats().levels[0].blocks_ok == 3


def test_stepped_round_trip_in_any_order(stepped, inbox):
    given = payload(3, NBYTES)
    stored(stepped, given, [0, 1, 2])
    stepped.submit([write_job(2, [0, 1, 2], [5, 6, 7]), make_job(3, 0, [0], CALLER, [0], idents_of(1), endpoint=3)])
    out = np.zeros((3, NBYTES), dtype=np.uint8)
    stepped.attach(3, caller_rows(out))
    stepped.run(3)
    assert (out[0] == given[0]).all()
    assert inbox.of(2) == []
    stepped.run(2)
    stepped.submit([make_job(4, 1, [5, 6, 7], CALLER, range(3), endpoint=3, also_level=0, also_slots=slots(-1, 3, -1))])
    assert stepped.run_all() == 1
    assert (out == given).all()
    assert (stepped.dram.slab[3, :NBYTES] == given[1]).all()


def test_stepped_failures(stepped, inbox):
    stored(stepped, payload(4, NBYTES), range(4))
    stepped.submit([write_job(2, range(4), range(4), parents=[-1, 0, 1, -1])])
    result = stepped.run(2, fail=[1])
    assert (result.ok.tolist(), result.reason) == ([True, False, False, True], "io")
    stepped.submit([make_job(3, 1, range(4), 0, range(4, 8))])
    result = stepped.run(3)
    assert (result.ok.tolist(), result.reason) == ([True, False, False, True], "checksum")


def test_stepped_overdue(stepped, inbox):
    stored(stepped, payload(2, NBYTES), [0, 1])
    stepped.submit([make_job(2, 0, [0, 1], CALLER, [0, 1], endpoint=5), make_job(3, 0, [], 0, [])])
    stepped.overdue(2)
    assert inbox.of(2) == ["JobOverdue"]
    assert stepped.run_all() == 1
    with pytest.raises(AssertionError):
        stepped.overdue(2)
    result = stepped.run(2)
    assert (result.ok.any(), result.reason) == (False, "deadline")
    assert stepped.lost == set()


def test_stepped_epoch_forget_expedite_lost_claims(stepped, inbox):
    stored(stepped, payload(2, NBYTES), [0, 1])
    stepped.submit([write_job(2, [0, 1], [0, 1], start_after_s=9.0), Expedite((2,))])
    assert stepped.expedited == {2}
    stepped.run(2)
    stepped.submit([Forget(slots(0)), make_job(3, 1, [0, 1], 0, [4, 5])])
    assert stepped.run(3).ok.tolist() == [False, True]
    stepped.submit([write_job(4, [0], [0]), NewEpoch(b"two")])
    assert stepped.run(4).reason == "cancelled"
    stepped.lose_claims(slots(1))
    assert isinstance(inbox.messages[-1], LostClaims)


def test_stepped_refuses_to_read_another_block_from_memory(stepped):
    stored(stepped, payload(2, NBYTES), [0, 1])
    stepped.submit([make_job(2, 0, [1, 0], CALLER, [0, 1], endpoint=100)])
    with pytest.raises(AssertionError, match="hold other blocks"):
        stepped.run(2)


def test_stepped_reads_an_earlier_life(stepped):
    given = payload(2, NBYTES)
    stepped.slow.inner.slab[3:5, :NBYTES] = given
    stepped.remember(1, slots(3, 4), idents_of(2))
    stepped.submit([make_job(2, 1, [3, 4], 0, [0, 1])])
    assert stepped.run(2).ok.all()
    assert (stepped.dram.slab[:2, :NBYTES] == given).all()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((CALLER, [0], 0, [3]), (CALLER, [1], 0, [3])),
        ((0, [3], CALLER, [0]), (CALLER, [1], 0, [3])),
        ((CALLER, [1], 0, [3]), (0, [3], CALLER, [0])),
    ],
    ids=["two writers", "writer after reader", "reader after writer"],
)
def test_stepped_sees_races(stepped, first, second):
    stepped.submit([make_job(1, *first)])
    with pytest.raises(AssertionError, match="race"):
        stepped.submit([make_job(2, *second)])


def test_stepped_close(stepped, inbox):
    stepped.submit([make_job(1, CALLER, [0], 0, [0]), make_job(2, CALLER, [0], 0, [1])])
    stepped.overdue(1)
    assert stepped.close(1.0) is False
    assert inbox.result(2).reason == "closed"
    assert inbox.of(1) == ["JobOverdue"]
    assert stepped.dram.slab is None
    with pytest.raises(AssertionError):
        stepped.submit([make_job(3, CALLER, [0], 0, [0])])
