"""The ledger's side: order against results, batching, failures, lost claims, sync and close."""

import threading
import time

import numpy as np
import pytest
from mover_kit import EPOCH, claims_of, eventually, idents_of, make_job, payload, slots, write_job

from tiercache.checksum import checksums
from tiercache.errors import WorkerThreadError
from tiercache.mover import MemoryLedger
from tiercache.testing import FaultyTier, HangingTier
from tiercache.tiers.dram import DRAMTier
from tiercache.types import Forget, LostClaims, NewEpoch, NoteUse

NBYTES = 5000


class Recorder(MemoryLedger):
    """A ledger that writes down what it is told, and whose commits do as they are told."""

    def __init__(self, capacity=16):
        super().__init__(capacity)
        self.calls = []
        self.failures = 0
        self.raises = 0
        self.lost = []
        self.in_commit = None
        self.commits = []

    def starting(self, numbers):
        self.calls.append(("starting", numbers.tolist()))
        MemoryLedger.forget(self, numbers)

    def written(self, numbers, idents, sums, claims):
        self.calls.append(("written", numbers.tolist(), idents.tolist(), sums.tolist(), claims))
        super().written(numbers, idents, sums, claims)

    def forget(self, numbers):
        self.calls.append(("forget", numbers.tolist()))
        super().forget(numbers)

    def note_use(self, numbers, last_use, uses, hints=None):
        self.calls.append(("note_use", numbers.tolist()))

    def new_epoch(self, epoch):
        self.calls.append(("new_epoch", epoch))

    def commit(self, sync):
        self.commits.append((time.monotonic(), len(self.calls)))
        if self.in_commit is not None:
            self.in_commit()
        if self.raises > 0:
            self.raises -= 1
            raise OSError("the disk is gone")
        if self.failures > 0:
            self.failures -= 1
            self.healthy = False
            return slots()
        self.healthy = sync()
        if not self.healthy:
            return slots()
        self.calls.append(("committed",))
        lost, self.lost = self.lost, []
        return np.array(lost, dtype=np.int32)

    def close(self, clean, wait_s):
        self.calls.append(("closed", clean))
        return True

    def names(self):
        return [call[0] for call in self.calls]


@pytest.fixture
def ledger():
    return Recorder()


@pytest.fixture
def slow():
    return FaultyTier(DRAMTier(16, NBYTES, name="disk"), verifies=True)


@pytest.fixture
def start(make_mover, ledger, slow):
    def start(**options):
        dram = DRAMTier(16, NBYTES)
        dram.slab[:] = payload(16, dram.stride)
        mover = make_mover(dram, slow, catalog=ledger, **options)
        mover.dram = dram
        return mover

    return start


def test_starting_at_submit_written_before_the_result(start, inbox, ledger):
    mover = start(commit_every_s=60.0)
    seen = []
    inbox.hook = lambda message: seen.append(ledger.names())
    mover.submit([write_job(1, [0, 1], [4, 5], start_after_s=0.1)])
    assert ledger.names() == ["starting"]
    inbox.result(1)
    assert eventually(lambda: seen == [["starting", "written"]])


def test_what_is_recorded(start, inbox, ledger, slow):
    """Only what arrived: slots, idents, checksums of the payload, and the claims that belong to it."""
    mover = start(commit_every_s=60.0)
    slow.fail_slots("write", [5])
    mover.submit([write_job(1, [0, 1, 2], [4, 5, 6], parents=[-1, -1, 4])])
    inbox.result(1)
    _, numbers, idents, sums, claims = next(call for call in ledger.calls if call[0] == "written")
    right = checksums(mover.dram.slab[:3], NBYTES, idents_of(3))
    assert numbers == [4, 6]
    assert idents == idents_of(3)[[0, 2]].tolist()
    assert sums == right[[0, 2]].tolist()
    assert claims.parent_slots.tolist() == [-1, 4]
    whole = claims_of(3).symbols
    width = len(whole) // 3
    assert claims.symbols == whole[:width] + whole[2 * width :]


def test_nothing_is_recorded_of_a_job_that_failed(start, inbox, ledger, slow):
    mover = start()
    slow.fail_all("write")
    mover.submit([write_job(1, [0], [4])])
    inbox.result(1)
    assert "written" not in ledger.names()


def test_nothing_is_recorded_of_a_job_that_broke(start, inbox, ledger, slow):
    """The second of three writes raises; the first one had arrived."""
    mover = start()
    slow.raise_at("write", 2, RuntimeError("a bug in a tier"))
    mover.submit([write_job(1, [0, 2, 4], [4, 5, 6])])
    assert not inbox.result(1).ok.any()
    assert slow.calls["write"] == 2
    assert "written" not in ledger.names()
    assert ("forget", [4, 5, 6]) in ledger.calls


def test_nothing_is_recorded_under_another_epoch(start, inbox, ledger):
    mover = start(epoch=EPOCH)
    mover.submit([NewEpoch(b"two"), write_job(1, [0], [4])])
    assert inbox.result(1).reason == "cancelled"
    assert ledger.names()[:2] == ["new_epoch", "starting"]
    assert "written" not in ledger.names()


def test_other_messages_reach_the_ledger_in_order(start, ledger):
    mover = start(commit_every_s=60.0)
    mover.submit(
        [
            Forget(slots(1)),
            NoteUse(slots(2), np.zeros(1), np.zeros(1, np.uint32)),
            NewEpoch(b"two"),
            Forget(slots(3)),
        ]
    )
    assert ledger.names() == ["forget", "note_use", "new_epoch", "forget"]


def test_commits_are_batched(start, inbox, ledger):
    mover = start(commit_every_s=0.1)
    for i in range(60):
        mover.submit([write_job(i, [i % 16], [i % 16])])
        inbox.result(i)
    assert mover.sync(5.0)
    assert len(ledger.commits) <= 6
    assert mover.stats().commits == len(ledger.commits)


def test_no_commit_without_something_to_commit(start, inbox, ledger):
    mover = start(commit_every_s=0.01)
    assert mover.sync(1.0)
    time.sleep(0.1)
    assert ledger.commits == []
    mover.submit([write_job(1, [0], [0])])
    inbox.result(1)
    assert eventually(lambda: "committed" in ledger.names())
    time.sleep(0.1)
    assert len(ledger.commits) <= 2


def test_sync_commits_at_once(start, inbox, ledger):
    mover = start(commit_every_s=60.0)
    mover.submit([write_job(1, [0], [0])])
    inbox.result(1)
    assert ledger.commits == []
    began = time.monotonic()
    assert mover.sync(10.0) is True
    assert time.monotonic() - began < 5
    assert ledger.names()[-1] == "committed"


def test_sync_covers_what_was_written_while_a_commit_ran(start, inbox, ledger):
    """A commit that began before the write does not count for it."""
    mover = start(commit_every_s=0.0)
    in_commit, go_on = threading.Event(), threading.Event()

    def block():
        in_commit.set()
        assert go_on.wait(10)

    ledger.in_commit = block
    mover.submit([write_job(1, [0], [0])])
    assert in_commit.wait(5)
    mover.submit([write_job(2, [1], [1])])
    inbox.result(2)
    written = len(ledger.calls)
    threading.Timer(0.05, go_on.set).start()
    assert mover.sync(10.0)
    assert ledger.commits[-1][1] >= written


def test_a_commit_that_hangs_disturbs_nobody(start, inbox, ledger):
    mover = start(commit_every_s=0.0)
    in_commit, go_on = threading.Event(), threading.Event()

    def block():
        in_commit.set()
        assert go_on.wait(10)

    ledger.in_commit = block
    mover.submit([write_job(1, [0], [0])])
    assert in_commit.wait(5)
    assert inbox.result(1).ok.all()
    mover.submit([write_job(2, [1], [1]), make_job(3, 1, [0], 0, [9]), Forget(slots(7))])
    assert inbox.result(2).ok.all()
    assert inbox.result(3).ok.all()
    assert mover.sync(0.05) is False
    go_on.set()
    assert mover.sync(5.0) is True


@pytest.mark.parametrize("how", ["refused", "raised", "no sync"])
def test_failed_commits_are_retried_with_back_off(start, inbox, ledger, slow, how, caplog):
    mover = start(commit_every_s=0.01)
    if how == "refused":
        ledger.failures = 3
    elif how == "raised":
        ledger.raises = 3
    else:
        for nth in (1, 2, 3):
            slow.fail_at("sync", nth)
    mover.submit([write_job(1, [0], [0])])
    assert inbox.result(1).ok.all()
    assert eventually(lambda: "committed" in ledger.names())
    times = [at for at, _ in ledger.commits]
    gaps = np.diff(times[-4:])
    assert (gaps >= [0.045, 0.095, 0.19]).all()
    assert mover.sync(5.0)
    assert mover.stats().commit_failures == 3
    assert ("the disk is gone" in caplog.text) == (how == "raised")


def test_sync_says_when_nothing_could_be_committed(start, inbox, ledger):
    mover = start(commit_every_s=0.01)
    ledger.failures = 10**6
    mover.submit([write_job(1, [0], [0])])
    inbox.result(1)
    assert mover.sync(0.2) is False
    ledger.failures = 0
    assert mover.sync(10.0) is True


def test_lost_claims_are_reported_before_sync_returns(start, inbox, ledger):
    mover = start(commit_every_s=60.0)
    mover.submit([write_job(1, [0, 1], [4, 5])])
    inbox.result(1)
    ledger.lost = [5]
    assert mover.sync(5.0)
    assert [m.slots.tolist() for m in inbox.messages if isinstance(m, LostClaims)] == [[5]]
    assert mover.stats().lost_claims == 1


def test_lost_claims_never_come_before_the_result(start, inbox, ledger):
    """The commit is quicker than the delivery of the result."""
    mover = start(commit_every_s=0.0)
    delivering, go_on = threading.Event(), threading.Event()
    order = []

    def hook(message):
        if not isinstance(message, LostClaims) and message.job == 1:
            delivering.set()
            assert go_on.wait(10)
        order.append("lost" if isinstance(message, LostClaims) else message.job)

    inbox.hook = hook
    ledger.lost = [4]
    in_commit = threading.Event()
    ledger.in_commit = lambda: in_commit.wait(0.1)
    mover.submit([write_job(1, [0], [4])])
    assert delivering.wait(5)
    in_commit.set()
    assert eventually(lambda: "committed" in ledger.names())
    time.sleep(0.05)
    assert order == []
    go_on.set()
    assert eventually(lambda: order == [1, "lost"])


def test_failed_slots_are_forgotten_before_the_result(start, inbox, ledger, slow):
    """So that children which wait for them in the catalog are lost, not waiting for ever."""
    mover = start(commit_every_s=60.0)
    slow.fail_slots("write", [5])
    seen = []
    inbox.hook = lambda message: seen.append(list(ledger.calls))
    mover.submit([write_job(1, [0, 1], [4, 5])])
    inbox.result(1)
    assert eventually(lambda: len(seen) == 1)
    assert ("forget", [5]) in seen[0]
    assert [call[1] for call in seen[0] if call[0] == "written"] == [[4]]


def test_slots_of_a_hung_write_are_forgotten_at_once(make_mover, inbox, ledger):
    slow = HangingTier(DRAMTier(16, NBYTES), verifies=True)
    mover = make_mover(DRAMTier(16, NBYTES), slow, catalog=ledger)
    slow.hang("write")
    mover.submit([write_job(1, [0, 1], [4, 5], deadline_s=0.05)])
    inbox.overdue(1)
    assert ledger.calls.index(("forget", [4, 5])) > 0
    slow.wake()
    inbox.result(1)


def test_slots_of_a_write_that_never_began_are_forgotten(start, inbox, ledger):
    mover = start(commit_every_s=60.0)
    mover.submit([write_job(1, [0], [4], start_after_s=60.0)])
    assert mover.close(5.0)
    assert inbox.result(1).reason == "closed"
    assert ledger.names() == ["starting", "forget", "committed", "closed"]


class Waiting(Recorder):
    """Claims nothing until told."""

    def __init__(self):
        super().__init__()
        self.claims = set()

    def claimed(self, numbers):
        return np.isin(numbers, list(self.claims))


@pytest.mark.parametrize("ending", ["claimed", "forgotten", "lost", "overwritten", "epoch"])
def test_sync_waits_for_claims_that_wait_for_a_parent(make_mover, inbox, slow, ending):
    ledger = Waiting()
    mover = make_mover(DRAMTier(16, NBYTES), slow, catalog=ledger)
    mover.submit([write_job(1, [0, 1], [4, 5])])
    inbox.result(1)
    ledger.claims.add(4)
    assert mover.sync(0.2) is False, "slot 5 is not claimed"
    if ending == "claimed":
        ledger.claims.add(5)
        mover.submit([Forget(slots(9))])  # anything that leads to a commit
    elif ending == "lost":
        ledger.lost = [5]
        mover.submit([Forget(slots(9))])
    elif ending == "forgotten":
        mover.submit([Forget(slots(5))])
    elif ending == "epoch":
        mover.submit([NewEpoch(b"two")])
    else:
        mover.submit([write_job(2, [0], [5], start_after_s=60.0)])
    assert mover.sync(5.0) is True


# -- close -------------------------------------------------------------------------------------------------------------


def test_close_commits_once_more_and_closes_clean(start, inbox, ledger):
    mover = start(commit_every_s=60.0)
    mover.submit([write_job(1, [0], [0])])
    inbox.result(1)
    assert mover.close(5.0) is True
    assert ledger.names()[-2:] == ["committed", "closed"]
    assert ledger.calls[-1] == ("closed", True)
    mover.close(5.0)
    assert ledger.names().count("closed") == 1


def test_close_waits_for_a_running_write_and_commits_it(make_mover, inbox, ledger):
    slow = HangingTier(DRAMTier(16, NBYTES), verifies=True)
    mover = make_mover(DRAMTier(16, NBYTES), slow, catalog=ledger, commit_every_s=60.0)
    slow.hang("write")
    mover.submit([write_job(1, [0], [0])])
    assert slow.wait_hung()
    threading.Timer(0.1, slow.wake).start()
    assert mover.close(10.0) is True
    assert inbox.result(1).ok.all()
    assert ledger.names() == ["starting", "written", "committed", "closed"]


def test_close_is_not_clean_where_the_commit_failed(start, inbox, ledger):
    mover = start(commit_every_s=60.0)
    mover.submit([write_job(1, [0], [0])])
    inbox.result(1)
    ledger.failures = 10**6
    assert mover.close(1.0) is False
    assert ledger.calls[-1] == ("closed", False)


def test_close_is_not_clean_with_a_lost_job(make_mover, inbox, ledger):
    slow = HangingTier(DRAMTier(16, NBYTES), verifies=True)
    mover = make_mover(DRAMTier(16, NBYTES), slow, catalog=ledger)
    slow.hang("write")
    mover.submit([write_job(1, [0], [0])])
    assert slow.wait_hung()
    assert mover.close(0.05) is False
    assert ledger.calls[-1] == ("closed", False)
    slow.wake()
    assert inbox.result(1).reason == "closed"
    assert "written" not in ledger.names()


def test_close_leaves_the_files_open_where_a_sync_hangs(make_mover, inbox, ledger):
    slow = HangingTier(DRAMTier(16, NBYTES), verifies=True)
    mover = make_mover(DRAMTier(16, NBYTES), slow, catalog=ledger)
    slow.hang("sync")
    mover.submit([write_job(1, [0], [0])])
    assert slow.wait_hung()
    inbox.result(1)
    late = threading.Timer(4.0, slow.wake)  # ends a close that does not end by itself
    late.start()
    assert mover.close(0.05) is False
    late.cancel()
    assert ledger.calls[-1] == ("closed", False)
    assert slow.inner.slab is not None
    assert mover.left_open == {1}
    slow.wake()


def test_sync_from_a_worker_thread_raises(start, inbox):
    mover = start()
    raised = []

    def hook(message):
        try:
            mover.sync(1.0)
        except WorkerThreadError:
            raised.append(True)

    inbox.hook = hook
    mover.submit([write_job(1, [0], [0])])
    inbox.result(1)
    assert eventually(lambda: raised == [True])


def test_memory_ledger():
    ledger = MemoryLedger(4)
    numbers = slots(2, 0)
    ledger.written(numbers, idents_of(2), idents_of(2, seed=9), claims_of(2))
    idents, sums = ledger.expected(slots(0, 1, 2))
    assert ledger.claimed(slots(0, 1, 2)).tolist() == [True, False, True]
    assert idents.tolist() == [idents_of(2)[1], 0, idents_of(2)[0]]
    assert sums.tolist() == [idents_of(2, seed=9)[1], 0, idents_of(2, seed=9)[0]]
    ledger.starting(slots(0))
    assert ledger.claimed(slots(0, 2)).tolist() == [False, True]
    assert ledger.expected(slots(0, 2))[0].tolist() == [0, idents_of(2)[0]]
    ledger.new_epoch(b"two")
    assert not ledger.claimed(slots(0, 1, 2, 3)).any()
    for works in (False, True):
        assert ledger.commit(lambda works=works: works).tolist() == []
        assert ledger.healthy is works
