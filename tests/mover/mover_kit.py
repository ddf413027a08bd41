"""What the mover's tests share: an inbox for messages, jobs in one line, payloads."""

import threading
import time
from collections.abc import Callable

import numpy as np

from tiercache.layout import KVLayout
from tiercache.types import CALLER, Claims, CopyJob, JobOverdue, JobResult, LostClaims

EPOCH = b"epoch-one"
WAIT_S = 10.0


class Inbox:
    """A `deliver` that keeps what comes, and lets a test wait for it."""

    def __init__(self):
        self.changed = threading.Condition()
        self.messages = []
        self.hook = None

    def __call__(self, message):
        with self.changed:
            self.messages.append(message)
            self.changed.notify_all()
        if self.hook is not None:
            self.hook(message)

    def wait(self, wanted: Callable, timeout_s: float = WAIT_S):
        """The first message for which `wanted(message)`."""
        with self.changed:
            self.changed.wait_for(lambda: any(wanted(m) for m in self.messages), timeout_s)
            found = [m for m in self.messages if wanted(m)]
        assert found, f"not delivered in {timeout_s} s; there are {self.messages}"
        return found[0]

    def result(self, job_id, timeout_s=WAIT_S) -> JobResult:
        return self.wait(lambda m: isinstance(m, JobResult) and m.job == job_id, timeout_s)

    def overdue(self, job_id, timeout_s=WAIT_S) -> JobOverdue:
        return self.wait(lambda m: isinstance(m, JobOverdue) and m.job == job_id, timeout_s)

    def lost(self, timeout_s=WAIT_S) -> LostClaims:
        return self.wait(lambda m: isinstance(m, LostClaims), timeout_s)

    def of(self, job_id):
        """The kinds of the messages of one job, in order."""
        with self.changed:
            return [type(m).__name__ for m in self.messages if getattr(m, "job", None) == job_id]

    def order(self):
        """Jobs in the order of their results."""
        with self.changed:
            return [m.job for m in self.messages if isinstance(m, JobResult)]


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def payload(n, nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, nbytes), dtype=np.uint8)


def caller_rows(array):
    """Real caller rows over a uint8 array `[n, nbytes]` of any strides."""
    return KVLayout((array.shape[1],), "uint8").rows(array, writable=array.flags.writeable)


def slots(*numbers):
    return np.array(numbers, dtype=np.int32)


def idents_of(n, seed=0):
    return np.arange(1, n + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed)


def claims_of(n, parents=None):
    """Claims of a chain whose first block is a root; `parents` are slots."""
    parent_slots = np.full(n, -1, dtype=np.int32) if parents is None else np.array(parents, dtype=np.int32)
    return Claims(parent_slots, np.zeros(n, np.uint64), bytes(range(n)) * 36, np.zeros(n), np.zeros(n, dtype=np.uint32))


def make_job(job_id, src, src_slots, dst, dst_slots, idents=None, **more):
    """A CopyJob; the kind follows from the levels."""
    if src == CALLER:
        kind = "store"
    elif dst == CALLER or dst < src:
        kind = "load"
    else:
        kind = "write"
    more.setdefault("kind", kind)
    more.setdefault("epoch", EPOCH)
    if idents is None:
        idents = idents_of(len(src_slots))
    return CopyJob(
        id=job_id,
        src_level=src,
        src_slots=np.asarray(src_slots, dtype=np.int32),
        dst_level=dst,
        dst_slots=np.asarray(dst_slots, dtype=np.int32),
        idents=idents,
        **more,
    )


def write_job(job_id, src_slots, dst_slots, idents=None, parents=None, **more):
    """A demotion from level 0 to level 1."""
    return make_job(job_id, 0, src_slots, 1, dst_slots, idents, claims=claims_of(len(src_slots), parents), **more)
