"""Jobs at a key tier, in the mover alone: keys, answers, what a careless tier costs."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from mover_kit import EPOCH, WAIT_S, caller_rows, idents_of, make_job, payload, slots

from tiercache.keys import chain_keys
from tiercache.mover import KeyTierSpec, Mover, keyed
from tiercache.mover.copier import Copier
from tiercache.remote import seal
from tiercache.testing import FaultyKeyTier, HangingKeyTier, MemoryKeyTier, WrappedKeyTier
from tiercache.tiers.dram import DRAMTier
from tiercache.types import CALLER

NBYTES = 5000
WIDTH = 36
N = 8
SYMBOLS = bytes(range(N)) * WIDTH
IDENTS = idents_of(N)
KEYS = chain_keys(SYMBOLS, WIDTH, b"digest", EPOCH)
ROWS = payload(N, NBYTES)


@pytest.fixture
def memory():
    tier = MemoryKeyTier(100)
    assert tier.put(KEYS, seal(ROWS, NBYTES, IDENTS), 1.0).all()
    return tier


@pytest.fixture
def dram():
    return DRAMTier(32, NBYTES)


@pytest.fixture
def open_mover(inbox, dram):
    movers = []

    def make(tier, threads=4):
        movers.append(Mover([dram], inbox, epoch=EPOCH, keys=KeyTierSpec(tier, b"digest", WIDTH, threads, 1)))
        return movers[-1]

    yield make
    for mover in movers:
        mover.close(WAIT_S)


def find(job_id, positions=range(N), **more):
    n = len(positions)
    return make_job(job_id, 1, positions, CALLER, [], np.zeros(n, np.uint64), kind="find", symbols=SYMBOLS, **more)


def fetch(job_id, positions=range(N), at=10, **more):
    chosen = list(positions)
    more = {"kind": "load", "symbols": SYMBOLS, **more}
    return make_job(job_id, 1, chosen, 0, [at + i for i in chosen], IDENTS[chosen], **more)


def put(job_id, positions=range(N), at=10, **more):
    chosen = list(positions)
    more = {"kind": "write", "symbols": SYMBOLS, "deadline_s": 5.0, **more}
    return make_job(job_id, 0, [at + i for i in chosen], 1, chosen, IDENTS[chosen], **more)


def test_a_find_answers_block_by_block(open_mover, inbox, memory):
    memory.remove([KEYS[2], KEYS[7]], 1.0)
    mover = open_mover(memory)
    mover.submit([find(1), find(2, range(5, 8))])
    assert inbox.result(1).ok.tolist() == [True, True, False, True, True, True, True, False]
    assert inbox.result(2).ok.tolist() == [True, True, False]
    assert inbox.result(1).reason == ""
    assert mover.stats().levels[1].name == "remote"


def test_a_fetch_brings_bytes_to_slots_and_rows(open_mover, inbox, memory, dram):
    mover = open_mover(memory)
    out = np.zeros((N, NBYTES), dtype=np.uint8)
    mover.attach(1, caller_rows(out))
    also = np.where(np.arange(N) < 3, np.arange(N) + 20, -1).astype(np.int32)
    job = make_job(
        2,
        1,
        range(N),
        CALLER,
        range(N),
        IDENTS,
        endpoint=1,
        symbols=SYMBOLS,
        kind="load",
        also_level=0,
        also_slots=also,
    )
    mover.submit([fetch(1), job])
    assert inbox.result(1).ok.all() and inbox.result(2).ok.all()
    assert (dram.slab[10:18, :NBYTES] == ROWS).all() and (dram.slab[20:23, :NBYTES] == ROWS[:3]).all()
    assert (out == ROWS).all()
    assert mover.stats().levels[1].bytes_read == 2 * N * NBYTES


def test_what_is_missing_and_what_is_wrong(open_mover, inbox, memory, dram):
    mover = open_mover(memory)
    memory.remove(KEYS[4:5], 1.0)
    mover.submit([fetch(1)])
    assert inbox.result(1).ok.tolist() == [True] * 4 + [False] + [True] * 3
    assert inbox.result(1).reason == "missing"
    memory.spoil(KEYS[1], 3)
    dram.slab[:] = 0
    mover.submit([fetch(2)])
    assert inbox.result(2).ok.tolist() == [True, False, True, True, False, True, True, True]
    assert inbox.result(2).reason == "checksum"
    assert not dram.slab[11].any() and not dram.slab[14].any(), "nothing unverified leaves the staging rows"


def test_wrong_values_and_failed_calls_are_counted_as_those_of_a_disk_are(open_mover, inbox, memory):
    memory.spoil(KEYS[1], 3)
    faulty = FaultyKeyTier(memory)
    mover = open_mover(faulty)
    mover.submit([fetch(1)])
    assert inbox.result(1).reason == "checksum"
    for job, error in ((2, OSError("gone")), (3, TimeoutError("late"))):
        faulty.raises["find"] = error
        mover.submit([find(job)])
        assert not inbox.result(job).ok.any()
    mover.close(WAIT_S)
    level = mover.stats().levels[1]
    assert (level.checksum_failures, level.io_errors, level.removed) == (1, 2, 1)


def test_keys_of_one_prompt_are_made_once(open_mover, inbox, memory, monkeypatch):
    made = []
    monkeypatch.setattr(keyed, "chain_keys", lambda *args: made.append(1) or chain_keys(*args))
    mover = open_mover(memory, threads=2)
    mover.submit([find(1)])
    assert inbox.result(1).ok.all()
    mover.submit([fetch(2 + i, [i]) for i in range(N)])
    assert all(inbox.result(2 + i).ok.all() for i in range(N))
    assert len(made) == 1


@pytest.mark.parametrize("answer", [np.ones(3, dtype=np.bool_), None, "all of them"])
def test_an_answer_of_another_shape_is_a_failure(open_mover, inbox, memory, answer):
    class Careless(WrappedKeyTier):
        def find(self, keys, deadline_s):
            return answer

        get = None

        def __init__(self, inner):
            super().__init__(inner)
            self.get = lambda keys, rows, deadline_s: answer

    mover = open_mover(Careless(memory))
    mover.submit([find(1), fetch(2)])
    for job in (1, 2):
        assert not inbox.result(job).ok.any() and inbox.result(job).reason == "io"


def test_a_hung_call_keeps_nothing_open(open_mover, inbox, memory, dram):
    """At close: no level is left to it, and what it brings later is dropped."""
    hanging = HangingKeyTier(memory)
    mover = open_mover(hanging)
    hanging.hang("get", "find")
    mover.submit([fetch(1, deadline_s=60.0), find(2, deadline_s=60.0)])
    assert hanging.wait_hung(2)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(mover.close, 1.0).result(WAIT_S)
    assert mover.left_open == frozenset() and dram.slab is None
    assert inbox.of(1) == inbox.of(2) == ["JobOverdue"]
    hanging.wake()
    assert not inbox.result(1).ok.any() and not inbox.result(2).ok.any()


def test_a_job_at_a_key_tier_that_is_not_there(inbox, dram):
    mover = Mover([dram], inbox, epoch=EPOCH, keys=None)
    with pytest.raises(IndexError):
        mover.submit([make_job(1, 1, slots(0), 0, slots(0), IDENTS[:1], symbols=SYMBOLS[:WIDTH], kind="load")])
    mover.close(WAIT_S)


# --- writes ----------------------------------------------------------------------------------------------------------


def filled(dram, at=10):
    dram.slab[at : at + N, :NBYTES] = ROWS
    return dram


def test_a_write_is_what_a_reader_verifies(open_mover, inbox, dram):
    memory = MemoryKeyTier(100)
    filled(dram)
    mover = open_mover(memory)
    mover.submit([put(1, [1, 2, 5])])
    assert inbox.result(1).ok.all() and inbox.result(1).nbytes == 3 * NBYTES
    assert [memory.value(KEYS[i]) for i in (1, 2, 5)] == [seal(ROWS, NBYTES, IDENTS)[i].tobytes() for i in (1, 2, 5)]
    assert (inbox.result(1).pressure, mover.keyed.transport, mover.keyed.endpoint) == (0.03, "memory", "memory-keys")
    dram.slab[:] = 0
    mover.submit([fetch(2, [1, 2, 5])])
    assert inbox.result(2).ok.all() and (dram.slab[11, :NBYTES] == ROWS[1]).all()


def test_a_store_that_refuses_and_one_that_fails(open_mover, inbox, dram):
    filled(dram)
    mover = open_mover(MemoryKeyTier(3, refuses=True))
    mover.submit([put(1)])
    assert inbox.result(1).ok.tolist() == [True] * 3 + [False] * 5 and inbox.result(1).reason == "refused"
    errors = (2, OSError("gone"), "io"), (3, TimeoutError("late"), "deadline"), (4, KeyError(1), "io")
    for job, error, reason in errors:
        faulty = FaultyKeyTier(MemoryKeyTier(100))
        faulty.raises["put"] = error
        mover = open_mover(faulty)
        mover.submit([put(job)])
        assert not inbox.result(job).ok.any() and inbox.result(job).reason == reason


def test_a_hung_put_reads_no_slot_after_it_was_announced(open_mover, inbox, dram):
    memory = MemoryKeyTier(100)
    hanging = HangingKeyTier(memory)
    filled(dram)
    mover = open_mover(hanging)
    hanging.hang("put")
    mover.submit([put(1, deadline_s=0.1)])
    assert inbox.overdue(1)
    dram.slab[:] = 0xEE
    hanging.wake()
    assert not inbox.result(1).ok.any(), "nobody waits for it any more"
    assert memory.value(KEYS[0]) == seal(ROWS, NBYTES, IDENTS)[0].tobytes(), "what it had in staging was right"


def test_a_write_that_is_overdue_before_it_copies_reads_nothing(open_mover, inbox, dram, monkeypatch):
    """Its thread was late, before it looked at the slots."""
    memory = MemoryKeyTier(100)
    filled(dram)
    late, reads = threading.Event(), []
    copies = Copier._slots_into_staging
    monkeypatch.setattr(Copier, "_slots_into_staging", lambda *args: (late.wait(WAIT_S), copies(*args))[1])
    read = dram.read
    dram.read = lambda *args: (reads.append(1), read(*args))[1]
    mover = open_mover(memory)
    mover.submit([put(1, deadline_s=0.05)])
    assert inbox.overdue(1)
    late.set()
    assert not inbox.result(1).ok.any()
    assert not reads and not memory.calls["put"]


def test_a_wrong_value_is_removed_after_the_others_were_delivered(open_mover, inbox, memory, dram):
    mover = open_mover(memory)
    memory.spoil(KEYS[1], 3)
    mover.submit([fetch(1)])
    assert inbox.result(1).ok.sum() == N - 1
    assert KEYS[1] not in memory.held() and len(memory) == N - 1
    assert mover.stats().levels[1].removed == 1


def test_staging_is_registered_while_it_is_used(open_mover, inbox, memory, dram):
    class Registering(WrappedKeyTier):
        def __init__(self, inner):
            super().__init__(inner)
            self.known = {}
            self.seen = []

        def register(self, memory):
            self.known[memory.ctypes.data] = memory.nbytes

        def unregister(self, memory):
            del self.known[memory.ctypes.data]

        def inside(self, rows):
            begin, nbytes = rows.ctypes.data, (len(rows) - 1) * rows.strides[0] + rows.shape[1]
            self.seen.append(any(at <= begin and begin + nbytes <= at + size for at, size in self.known.items()))

        def get(self, keys, rows, deadline_s):
            self.inside(rows)
            return super().get(keys, rows, deadline_s)

        def put(self, keys, rows, deadline_s):
            self.inside(rows)
            return super().put(keys, rows, deadline_s)

    tier = Registering(memory)
    mover = open_mover(tier, threads=2)
    for i in range(6):
        mover.submit([fetch(2 * i, [0]), put(2 * i + 1)])
        assert inbox.result(2 * i + 1) and inbox.result(2 * i)
    assert tier.seen == [True] * 12 and 1 <= len(tier.known) <= 3, "once per thread"
    assert mover.close(WAIT_S)
    assert not tier.known


def test_a_tier_that_cannot_register_copies(open_mover, inbox, memory, dram):
    class Unable(WrappedKeyTier):
        def register(self, memory):
            raise OSError(12, "no memory may be pinned")

    mover = open_mover(Unable(memory))
    mover.submit([fetch(1)])
    assert inbox.result(1).ok.all()


class Told(WrappedKeyTier):
    """Notes the deadlines that it is given; every get takes `takes_s`."""

    takes_s = 0.0

    def __init__(self, inner):
        super().__init__(inner)
        self.told = []

    def find(self, keys, deadline_s):
        self.told.append(deadline_s)
        return super().find(keys, deadline_s)

    def get(self, keys, rows, deadline_s):
        self.told.append(deadline_s)
        time.sleep(self.takes_s)
        return super().get(keys, rows, deadline_s)


def test_a_tier_is_told_what_is_left(open_mover, inbox, memory):
    """Not the time that a job had before it waited for a thread."""
    tier = Told(memory)
    tier.takes_s = 0.3
    mover = open_mover(tier, threads=1)
    mover.submit([fetch(1, deadline_s=5.0), fetch(2, deadline_s=5.0), fetch(3, deadline_s=5.0)])
    assert all(inbox.result(job).ok.all() for job in (1, 2, 3))
    mover.submit([find(4, deadline_s=5.0)])
    assert inbox.result(4).ok.all()
    assert tier.told[0] > 4.7 > tier.told[2], "two threads, one of which had a job before the third"
    assert 4.7 < tier.told[3] <= 5.0


class Pressed(WrappedKeyTier):
    def __init__(self, inner):
        super().__init__(inner)
        self.asked = []

    def pressure(self, deadline_s):
        self.asked.append(deadline_s)
        time.sleep(deadline_s)
        raise TimeoutError("nobody answers")


def test_a_question_that_hangs_makes_no_write_late(open_mover, inbox, memory, dram):
    """How full the tier is: asked for a part of the time, and after trouble not again at once."""
    filled(dram)
    tier = Pressed(memory)
    mover = open_mover(tier)
    for job in range(1, 4):
        mover.submit([put(job, deadline_s=2.0)])
        assert inbox.result(job).ok.all() and "JobOverdue" not in inbox.of(job)
        mover.keyed._ask_at["pressure"] -= 1.5
    assert len(tier.asked) == 1 and tier.asked[0] <= 0.5


@pytest.mark.parametrize("verb", ["register", "unregister"])
def test_a_tier_that_fails_over_memory_costs_no_thread(open_mover, inbox, memory, verb):
    """Whatever it raises."""
    tier = WrappedKeyTier(memory)

    def raises(memory):
        raise ValueError("not my kind of memory")

    tier.register, tier.unregister = (lambda memory: None), (lambda memory: None)
    setattr(tier, verb, raises)
    mover = open_mover(tier, threads=2)
    mover.submit([fetch(1)])
    assert inbox.result(1).ok.all()
    assert mover.close(WAIT_S)
    assert mover.stats().unexpected_errors == 3
