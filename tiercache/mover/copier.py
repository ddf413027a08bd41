"""The copy of one part of a job, from whatever holds the bytes to wherever they go."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from tiercache.checksum import checksums
from tiercache.mover.job import OutsideRows, RunningJob
from tiercache.mover.keyed import KeyedJobs
from tiercache.mover.ledger import BlockLedger
from tiercache.mover.staging import Staging
from tiercache.mover.stats import Counters
from tiercache.tiers.base import Rows, SlotTier, contiguous_runs
from tiercache.types import CALLER, PROBE_S, Bools, CopyJob, Slots

__all__ = ["Copier"]

IO_PART_MIN_NBYTES = 256 << 10
IO_PART_MAX_NBYTES = 2 << 20
"""Bounds a thread's staging; more per part saves little."""
MEMORY_PART_MIN_NBYTES = 4 << 20
"""Less is copied sooner than a second thread wakes up."""
MEMORY_PART_MAX_NBYTES = 16 << 20
"""Bounds how long a last copy may hold up a JobOverdue."""


class Copier:
    """Runs parts of jobs. `announce(running)` delivers a JobOverdue that became due while a last copy ran."""

    def __init__(
        self,
        tiers: Sequence[SlotTier],
        ledger: BlockLedger | None,
        counters: Counters,
        announce: Callable[[RunningJob], None],
        keyed: KeyedJobs | None = None,
    ) -> None:
        self._tiers = tiers
        self._keyed = keyed
        self._ledger = ledger
        self._counters = counters
        self._announce = announce
        self._block_nbytes = tiers[0].block_nbytes
        self._stride = tiers[0].stride

    def part_blocks(self, job: CopyJob, threads: int) -> int:
        """How many blocks of a job one of `threads` threads copies at a time: an even share, within bounds; at a key
        tier all, for each call there has its round trip."""
        if job.symbols is not None:
            return max(1, job.n)
        least, most = MEMORY_PART_MIN_NBYTES, MEMORY_PART_MAX_NBYTES
        if self._is_staged(job.src_level) or self._is_verifying(job.dst_level):
            least, most = IO_PART_MIN_NBYTES, IO_PART_MAX_NBYTES
        return max(1, min(max(-(-job.n // threads), least // self._stride), most // self._stride))

    def run(self, running: RunningJob, begin: int, end: int, staging: Staging) -> None:
        """Copy blocks `begin` to `end` of a job; sets `running.ok`, and `running.checksums` for a persistent tier.

        Raises what a misbehaving tier raises, MemoryError or OSError (ENOMEM) where memory is short, LookupError where
        the caller's rows are not attached.
        """
        job = running.job
        running.prepare()
        started_at = time.monotonic()
        if job.symbols is not None:
            self._at_keys(running, staging)
        elif job.src_level == CALLER:
            self._from_caller(running, begin, end, staging)
        elif job.kind == "probe":
            if started_at - (running.started_at or started_at) < PROBE_S:
                self._from_staged(running, begin, end, staging)
        elif self._is_staged(job.src_level):
            self._from_staged(running, begin, end, staging)
        else:
            self._from_slab(running, begin, end)
        self._count(running, begin, end, time.monotonic() - started_at)

    def _is_verifying(self, level: int) -> bool:
        return level != CALLER and self._tiers[level].verifies

    def _is_staged(self, level: int) -> bool:
        return level != CALLER and (self._tiers[level].verifies or self._tiers[level].slab is None)

    # -- where the bytes come from ----------------------------------------------------------------------------------

    def _from_slab(self, running: RunningJob, begin: int, end: int) -> None:
        slab = self._tiers[running.job.src_level].slab
        if slab is None:
            raise LookupError(f"level {running.job.src_level} has no memory any more")
        slots = running.job.src_slots
        for first, last in contiguous_runs(slots[begin:end]):
            slot = int(slots[begin + first])
            self._into(running, begin + first, begin + last, slab[slot : slot + last - first], None)

    def _from_caller(self, running: RunningJob, begin: int, end: int, staging: Staging) -> None:
        job = running.job
        for first, last in contiguous_runs(job.src_slots[begin:end]):
            a, b = begin + first, begin + last
            if not self._is_verifying(job.dst_level):
                self._last_copy(running, a, b, None, None)
                continue
            rows = staging.rows(b - a, self._stride)
            if self._take_into_staging(running, a, b, rows):
                self._into(running, a, b, rows, None)

    def _take_into_staging(self, running: RunningJob, a: int, b: int, rows: Rows) -> bool:
        """The caller's rows must be free at JobOverdue, so a write that may hang never reads them."""
        outside = running.enter_copy()
        if outside is False:
            return False
        try:
            rows[:, : self._block_nbytes] = self._take(running.job, outside, a, b)
        finally:
            if running.leave_copy():
                self._announce(running)
        return True

    def _from_staged(self, running: RunningJob, begin: int, end: int, staging: Staging) -> None:
        """A read that may hang or lie lands in staging, and is verified there."""
        job = running.job
        tier = self._tiers[job.src_level]
        slots = job.src_slots[begin:end]
        rows = staging.rows(end - begin, self._stride)
        good = tier.read(slots, rows)
        self._count_io_errors(running, job.src_level, good)
        running.bad[begin:end] = ~good
        if tier.verifies and not running.cancelled:
            good = self._verified(running, begin, end, rows, good)
        if job.kind == "probe":
            running.ok[begin:end] = good
        elif good.any():
            self._into(running, begin, end, rows, good)

    def _at_keys(self, running: RunningJob, staging: Staging) -> None:
        """A whole job at the key tier. What it brings lands in staging, and is verified there; what it takes is sealed
        in staging, so that a put that hangs reads nothing else."""
        if self._keyed is None:
            raise LookupError(f"job {running.job.id}: there is no key tier")
        job = running.job
        if job.kind == "find":
            running.ok[:] = self._keyed.find(running)
        else:
            rows = staging.rows(job.n, self._keyed.value_nbytes)
            if job.kind == "write":
                if self._slots_into_staging(running, rows) and not running.cancelled:
                    running.ok[:] = self._keyed.write(running, rows)
            else:
                good = self._keyed.read(running, rows)
                if good.any():
                    self._into(running, 0, job.n, rows[:, : self._block_nbytes], good)
                wrong, removed = int(running.bad.sum()), self._keyed.remove_wrong(running)
                self._counters.add_level(running.level, checksum_failures=wrong, removed=removed)
        if running.reason in ("io", "deadline"):
            self._counters.add_level(running.level, io_errors=1)  # a call, whatever it was about
        self._keyed.look_at_tier(running)

    def _slots_into_staging(self, running: RunningJob, rows: Rows) -> bool:
        """Copy a job's source, which is memory, into staging; at its JobOverdue nothing reads the slots any more."""
        if running.enter_copy() is False:
            return False
        try:
            arrived = self._tiers[running.job.src_level].read(running.job.src_slots, rows[:, : self._block_nbytes])
        finally:
            if running.leave_copy():
                self._announce(running)
        if not arrived.all():
            running.fail("cancelled")  # no fault of the key tier
        return bool(arrived.all())

    def _verified(self, running: RunningJob, begin: int, end: int, rows: Rows, arrived: Bools) -> Bools:
        """Which blocks are the ones asked for, payload and identity."""
        job = running.job
        if self._ledger is None:
            raise LookupError(f"level {job.src_level} verifies without a ledger")
        idents = job.idents[begin:end]
        expected, sums = self._ledger.expected(job.src_slots[begin:end])
        right = (expected == idents) & (checksums(rows, self._block_nbytes, idents) == sums)
        wrong = arrived & ~right & (expected != 0)
        if wrong.any():
            running.bad[begin:end] |= wrong
            running.fail("checksum")
            self._counters.add_level(job.src_level, checksum_failures=int(wrong.sum()))
        elif (arrived & ~right).any():  # forgotten while it was read (a new epoch, an invalidation): no fault
            running.fail("cancelled")
        good: Bools = arrived & right
        return good

    # -- where they go ----------------------------------------------------------------------------------------------

    def _into(self, running: RunningJob, a: int, b: int, rows: Rows, good: Bools | None) -> None:
        """Copy rows to blocks `a` to `b` of the destination; only the `good` ones count (None: all)."""
        job = running.job
        if not self._is_verifying(job.dst_level):
            self._last_copy(running, a, b, rows, good)
            return
        if running.cancelled:
            return
        running.checksums[a:b] = checksums(rows, self._block_nbytes, job.idents[a:b])
        ok = self._tiers[job.dst_level].write(job.dst_slots[a:b], rows)
        self._count_io_errors(running, job.dst_level, ok)
        running.ok[a:b] = ok if good is None else ok & good

    def _last_copy(self, running: RunningJob, a: int, b: int, rows: Rows | None, good: Bools | None) -> None:
        """The only place that touches a memory destination or `out`. `rows` None: take them from the caller."""
        outside = running.enter_copy()
        if outside is False:
            return
        try:
            if rows is None:
                rows = self._take(running.job, outside, a, b)
            running.ok[a:b] = self._put(
                running, outside, a, b, rows, np.ones(b - a, np.bool_) if good is None else good
            )
        finally:
            if running.leave_copy():
                self._announce(running)

    def _put(self, running: RunningJob, outside: OutsideRows | None, a: int, b: int, rows: Rows, good: Bools) -> Bools:
        job = running.job
        if job.dst_level != CALLER:
            ok = self._write(running, job.dst_level, job.dst_slots[a:b], rows, good)
        else:
            self._put_outside(job, outside, a, b, rows, good)
            ok = good
        if job.also_slots is not None:
            also = job.also_slots[a:b]
            wanted: Bools = good & (also >= 0)
            ok = ok & (self._write(running, job.also_level, also, rows, wanted) | ~wanted)
        return ok

    def _write(self, running: RunningJob, level: int, slots: Slots, rows: Rows, chosen: Bools) -> Bools:
        """Write the chosen rows to a memory level. Which of them arrived."""
        if chosen.all():
            ok = self._tiers[level].write(slots, rows)
            self._count_io_errors(running, level, ok)
            return ok
        arrived = np.zeros(len(slots), dtype=np.bool_)
        for first, last in _stretches(chosen):
            ok = self._tiers[level].write(slots[first:last], rows[first:last])
            self._count_io_errors(running, level, ok)
            arrived[first:last] = ok
        return arrived

    def _take(self, job: CopyJob, outside: OutsideRows | None, a: int, b: int) -> Rows:
        """Rows of blocks `a` to `b`, which are contiguous at the caller."""
        if outside is None:
            raise LookupError(f"job {job.id}: endpoint {job.endpoint} is not attached")
        row = int(job.src_slots[a])
        return outside.take(row, row + b - a)

    def _put_outside(
        self, job: CopyJob, outside: OutsideRows | None, a: int, b: int, rows: Rows, chosen: Bools
    ) -> None:
        if outside is None:
            raise LookupError(f"job {job.id}: endpoint {job.endpoint} is not attached")
        for first, last in _stretches(chosen):
            for begin, end in contiguous_runs(job.dst_slots[a + first : a + last]):
                i, j = first + begin, first + end
                outside.put(int(job.dst_slots[a + i]), rows[i:j, : self._block_nbytes])

    # -- counting ---------------------------------------------------------------------------------------------------

    def _count_io_errors(self, running: RunningJob, level: int, ok: Bools) -> None:
        failed = len(ok) - int(ok.sum())
        if failed:
            running.fail("target" if running.job.kind == "load" and level != running.job.src_level else "io")
            self._counters.add_level(level, io_errors=failed)

    def _count(self, running: RunningJob, begin: int, end: int, seconds: float) -> None:
        job = running.job
        if job.kind == "find":  # an answer has no bytes
            return
        nbytes = int(running.ok[begin:end].sum()) * self._block_nbytes
        if job.src_level != CALLER:
            self._counters.add_level(job.src_level, bytes_read=nbytes, read_s=seconds)
        if job.dst_level != CALLER:
            self._counters.add_level(job.dst_level, bytes_written=nbytes, write_s=seconds)
        if job.also_slots is not None:
            also = int((running.ok[begin:end] & (job.also_slots[begin:end] >= 0)).sum())
            self._counters.add_level(job.also_level, bytes_written=also * self._block_nbytes)
        self._counters.add_level(running.level, busy_s=seconds)


def _stretches(chosen: Bools) -> list[tuple[int, int]]:
    """Bounds of the stretches of True."""
    if chosen.all():
        return [(0, len(chosen))]
    picked = np.flatnonzero(chosen)
    return [(int(picked[begin]), int(picked[end - 1]) + 1) for begin, end in contiguous_runs(picked.astype(np.int32))]
