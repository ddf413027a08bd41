"""One job on its way: which parts are done, and the protocol that ends waiting but never a hold."""

from __future__ import annotations

import errno
import threading
import time
from typing import Literal, Protocol, TypeAlias

import numpy as np

from tiercache.mover.ledger import Checksums
from tiercache.tiers.base import Rows
from tiercache.types import Bools, CopyJob, JobResult

__all__ = ["Ending", "OutsideRows", "RunningJob"]

Ending: TypeAlias = Literal["none", "result", "overdue"]
"""What has to be delivered now: nothing, the JobResult, or the JobOverdue."""


class OutsideRows(Protocol):
    """The caller's rows, as `layout.CallerRows` gives them: row i is block i, `nbytes` bytes in C order."""

    def take(self, begin: int, end: int, /) -> Rows:
        """Rows `begin` to `end` as uint8 `[end - begin, nbytes]`; a view where possible."""

    def put(self, begin: int, rows: Rows, /) -> None:
        """Overwrite rows from `begin` on with `rows[n, nbytes]`."""


class RunningJob:
    """A CopyJob in the mover: parts handed to threads, and who may still touch its memory.

    `lock` guards everything below it. A *last copy* is a copy that touches the destination's memory or the caller's
    rows. `cancelled` is announced (JobOverdue) only while no last copy runs, and no last copy begins after it.
    """

    def __init__(self, job: CopyJob, level: int, rows: OutsideRows | None, part_blocks: int, max_threads: int) -> None:
        self.job = job
        self.level = level
        """The pool it runs in: the slower of its two ends."""
        self.rows = rows
        self.part_blocks = part_blocks
        self.max_threads = max_threads
        self.ok: Bools = np.broadcast_to(np.False_, job.n)
        """Written per part by the thread that runs it; read when all have returned. No memory before `prepare`."""
        self.checksums: Checksums = np.broadcast_to(np.uint64(0), job.n)
        """Filled where the destination verifies; likewise."""
        self.bad: Bools = self.ok
        """Blocks whose source could not be read, or is wrong; likewise."""
        self.lock = threading.Lock()
        self.delayed = job.start_after_s > 0
        self.ready_at = time.monotonic()
        self.started_at: float | None = None
        self.pressure: float | None = None
        """What a key tier said when it was written to."""
        self.ended = False
        self.cancelled = False
        self.broken = False
        self.reason = ""
        self.overdue = False
        self._prepared = False
        self._begun = 0  # blocks handed to threads
        self._untouched = True  # no part handed out yet: an empty job has one empty part
        self._active = 0
        self._copies = 0
        self._announcing = False
        self._held_result = False

    def prepare(self) -> None:
        """Get the memory that parts write to, once. On a pool thread, for a MemoryError fails the job there; in
        `submit` it would be one that nobody answers."""
        with self.lock:
            if not self._prepared:
                ok = np.zeros(self.job.n, dtype=np.bool_)
                self.checksums = np.zeros(self.job.n, dtype=np.uint64)
                self.bad = np.zeros(self.job.n, dtype=np.bool_)
                self.ok, self._prepared = ok, True

    def fail_all(self) -> None:
        """No block has arrived. Needs no memory."""
        self.ok = np.broadcast_to(np.False_, self.job.n)

    @property
    def copying(self) -> bool:
        """A last copy runs now."""
        with self.lock:
            return self._copies > 0

    def release(self) -> bool:
        """The delay is over. True exactly once for a delayed job that has not ended."""
        with self.lock:
            was, self.delayed = self.delayed, False
            self.ready_at = time.monotonic()
            return was and not self.ended

    # -- parts ------------------------------------------------------------------------------------------------------

    def has_parts(self) -> bool:
        """True while a part is left for some thread to begin. The caller holds `lock`."""
        return not (self.ended or self.cancelled or self.broken) and (self._untouched or self._begun < self.job.n)

    def begin_part(self) -> tuple[int, int] | None:
        """Take the next part `[begin, end)` of the blocks; None when there is none, or no more threads are allowed."""
        with self.lock:
            if not self.has_parts() or self._active >= self.max_threads:
                return None
            if self.started_at is None:
                self.started_at = time.monotonic()
            begin = self._begun
            self._begun = min(self.job.n, begin + self.part_blocks)
            self._untouched = False
            self._active += 1
            return begin, self._begun

    def takes_thread(self) -> bool:
        """True while another thread may begin a part."""
        with self.lock:
            return self.has_parts() and self._active < self.max_threads

    def is_used_up(self) -> bool:
        """True when no thread will begin a part of this job any more."""
        with self.lock:
            return not self.has_parts()

    def end_part(self) -> bool:
        """A thread has returned from its part. True when the job has ended and this thread settles and delivers it."""
        with self.lock:
            self._active -= 1
            if self.ended or self._active or self.has_parts():
                return False
            self.ended = True
            if self._announcing:
                self._held_result = True
                return False
            return True

    def fail(self, reason: str) -> None:
        """Note why blocks failed; the first reason stays."""
        with self.lock:
            self.reason = self.reason or reason

    def break_off(self, error: BaseException) -> None:
        """A part raised: no further part begins, and nothing of this job counts as arrived. Where memory was short,
        that is the reason, for it says nothing of the blocks."""
        short = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        with self.lock:
            self.broken = True
            self.reason = "memory" if short else self.reason or "io"

    def call_off(self) -> bool:
        """Nothing of this job counts as arrived, whatever its threads still do. True when none is in it, and the
        caller settles and delivers it."""
        with self.lock:
            if self.ended or self.cancelled:
                return False
            self.broken = True
            self.reason = self.reason or "cancelled"
            self.ended = self._active == 0
            return self.ended

    # -- the end of waiting -----------------------------------------------------------------------------------------

    def enter_copy(self) -> OutsideRows | Literal[False] | None:
        """Ask to begin a last copy. False when the job was cancelled; else the caller's rows, or None without any."""
        with self.lock:
            if self.cancelled or self.broken:
                return False
            self._copies += 1
            return self.rows

    def leave_copy(self) -> bool:
        """End a last copy. True when this thread has to announce JobOverdue, and call `announced` after it."""
        with self.lock:
            self._copies -= 1
            return self._announce_if_quiet()

    def expire(self, reason: str, only_waiting: bool = False) -> Ending:
        """Stop waiting for this job, because of its deadline or of a close.

        Returns "result" when no thread is in it (it has ended; deliver its result), "overdue" when threads are but
        none in a last copy (announce, then call `announced`), "none" when it had ended, expired before, or a last
        copy runs, whose thread announces. With `only_waiting`, a job that a thread has begun is left alone.
        """
        with self.lock:
            if self.ended or self.cancelled or (only_waiting and self.started_at is not None):
                return "none"
            self.cancelled = True
            self.reason = reason
            if self._active == 0:
                self.ended = True
                return "result"
            return "overdue" if self._announce_if_quiet() else "none"

    def _announce_if_quiet(self) -> bool:
        if not self.cancelled or self.overdue or self._copies:
            return False
        self.overdue = True
        self._announcing = True
        self.rows = None
        return True

    def announced(self) -> bool:
        """JobOverdue was delivered. True when the job has ended meanwhile and this thread delivers its result."""
        with self.lock:
            self._announcing = False
            return self._held_result

    def result(self, block_nbytes: int) -> JobResult:
        """The JobResult of an ended job, and the end of this job's hold on the caller's rows."""
        with self.lock:
            self.rows = None
            if self.cancelled or self.broken:
                self.fail_all()
            seconds = 0.0 if self.started_at is None else time.monotonic() - self.started_at
            waited_s = 0.0 if self.started_at is None else max(0.0, self.started_at - self.ready_at)
            arrived = int(self.ok.sum())
            reason = "" if arrived == self.job.n and not self.cancelled and not self.broken else self.reason
            nbytes = arrived * block_nbytes
            return JobResult(
                self.job.id,
                self.ok,
                nbytes,
                seconds,
                reason=reason,
                bad=self.bad,
                waited_s=waited_s,
                pressure=self.pressure,
            )
