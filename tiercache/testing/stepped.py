"""A mover that runs a job only when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tiercache.mover import MoverStats
from tiercache.mover.job import OutsideRows
from tiercache.mover.stats import Counters
from tiercache.tiers.base import Rows, SlotTier
from tiercache.types import (
    CALLER,
    Bools,
    CopyJob,
    Expedite,
    Forget,
    Idents,
    JobOverdue,
    JobResult,
    LostClaims,
    MoverMessage,
    NewEpoch,
    PlannerMessage,
    Slots,
)

__all__ = ["SteppedMover"]


class SteppedMover:
    """The surface of `Mover` without threads or time, over real memory tiers.

    `submit` only queues; `run(job)` copies and delivers, in the calling thread; `overdue(job)` announces. It is also
    a referee: AssertionError where a job reads a memory slot that holds another block than it says, or where two
    queued jobs write one slot, or one writes what another reads. From a tier that verifies a wrong block fails with
    "checksum", as it would.
    """

    def __init__(
        self, tiers: Sequence[SlotTier], deliver: Callable[[PlannerMessage], None], *, epoch: bytes | None = None
    ) -> None:
        self._tiers = tuple(tiers)
        self._deliver = deliver
        self._epoch = epoch
        self._endpoints: dict[int, OutsideRows] = {}
        self._idents: list[Idents] = [np.zeros(tier.capacity, dtype=np.uint64) for tier in tiers]
        self._counters = Counters([tier.name for tier in tiers])
        self.pending: dict[int, CopyJob] = {}
        """Jobs submitted and not run, in order; overdue ones included."""
        self.lost: set[int] = set()
        """Jobs of `pending` announced as overdue."""
        self.expedited: set[int] = set()
        """Jobs that an Expedite named."""
        self.messages: list[MoverMessage] = []
        """Everything submitted."""
        self.closed = False

    def attach(self, endpoint: int, rows: OutsideRows) -> None:
        """See `Mover.attach`."""
        self._endpoints[endpoint] = rows

    def detach(self, endpoint: int) -> None:
        """See `Mover.detach`."""
        self._endpoints.pop(endpoint, None)

    def submit(self, messages: Sequence[MoverMessage]) -> None:
        """Queue jobs, and take the other messages at once."""
        assert not self.closed, "submit after close"
        for message in messages:
            self.messages.append(message)
            if isinstance(message, CopyJob):
                assert message.symbols is None, "a stepped mover has no key tier"
                self._check_races(message)
                self.pending[message.id] = message
                if message.dst_level != CALLER:
                    self._idents[message.dst_level][message.dst_slots] = 0
                if message.also_slots is not None:
                    self._idents[message.also_level][message.also_slots[message.also_slots >= 0]] = 0
            elif isinstance(message, Expedite):
                self.expedited.update(message.jobs)
            elif isinstance(message, Forget):
                self._idents[self._persistent_level()][message.slots] = 0
            elif isinstance(message, NewEpoch):
                self._epoch = message.epoch
                for level, tier in enumerate(self._tiers):
                    if tier.verifies:
                        self._idents[level][:] = 0

    def remember(self, level: int, slots: Slots, idents: Idents) -> None:
        """Say what slots hold from an earlier life, so that jobs may read them."""
        self._idents[level][slots] = idents

    # -- steps ------------------------------------------------------------------------------------------------------

    def run(self, job_id: int, fail: Iterable[int] = (), reason: str = "io") -> JobResult:
        """Run one queued job and deliver its result; the blocks numbered in `fail` fail with `reason`.

        A job announced as overdue copies nothing: its result is all False, with reason "deadline".
        """
        job = self.pending.pop(job_id)
        ok: Bools = np.ones(job.n, dtype=np.bool_)
        if job_id in self.lost:
            self.lost.discard(job_id)
            return self._end(job, ~ok, "deadline")
        failed = list(fail)
        ok[failed] = False
        persistent = job.dst_level != CALLER and self._tiers[job.dst_level].verifies
        if persistent and self._epoch is not None and job.epoch != self._epoch:
            return self._end(job, np.zeros(job.n, dtype=np.bool_), "cancelled")
        if job.claims is not None:
            for k in range(job.n):  # a job names parents before their children
                ok[k] &= job.claims.parent_slots[k] not in job.dst_slots[:k][~ok[:k]]
        if not self._check_source(job, ok):
            reason = "checksum"
        for i in np.flatnonzero(ok):
            ok[i] = self._copy(job, int(i))
        return self._end(job, ok, "" if ok.all() else reason)

    def run_all(self) -> int:
        """Run queued jobs in order until none is left, those submitted meanwhile included. How many ran."""
        ran = 0
        while waiting := [job_id for job_id in self.pending if job_id not in self.lost]:
            self.run(waiting[0])
            ran += 1
        return ran

    def overdue(self, job_id: int) -> None:
        """Announce a queued job as overdue; `run` then stands for the return of its thread."""
        assert job_id in self.pending, f"job {job_id} is not pending"
        assert job_id not in self.lost, f"job {job_id} is overdue already"
        self.lost.add(job_id)
        self._deliver(JobOverdue(job_id))

    def lose_claims(self, slots: Slots) -> None:
        """Report slots of the persistent tier whose claim could not be made."""
        self._deliver(LostClaims(slots))

    # -- the rest of the surface ------------------------------------------------------------------------------------

    def sync(self, timeout_s: float) -> bool:
        """True: what was run is claimed at once."""
        return True

    def stats(self) -> MoverStats:
        """Counts of blocks and bytes; `queued` is what waits for `run`."""
        queued = [0] * len(self._tiers)
        for job in self.pending.values():
            queued[max(job.src_level, job.dst_level, 0)] += 1
        return self._counters.snapshot(queued, [0] * len(self._tiers))

    def close(self, deadline_s: float) -> bool:
        """Fail what is queued with reason "closed", and close the tiers. True when nothing was overdue."""
        if self.closed:
            return not self.lost
        for job in [job for job_id, job in self.pending.items() if job_id not in self.lost]:
            del self.pending[job.id]
            self._end(job, np.zeros(job.n, dtype=np.bool_), "closed")
        self.closed = True
        for tier in self._tiers:
            tier.close()
        return not self.lost

    def abandon(self) -> None:
        """Refuse further use."""
        self.closed = True

    # -- inside -----------------------------------------------------------------------------------------------------

    def _persistent_level(self) -> int:
        return next(level for level, tier in enumerate(self._tiers) if tier.verifies)

    def _end(self, job: CopyJob, ok: Bools, reason: str) -> JobResult:
        arrived = int(ok.sum())
        nbytes = arrived * self._tiers[0].block_nbytes
        if job.dst_level != CALLER:
            self._idents[job.dst_level][job.dst_slots[ok]] = job.idents[ok]
            self._counters.add_level(job.dst_level, bytes_written=nbytes)
        if job.also_slots is not None:
            also = ok & (job.also_slots >= 0)
            self._idents[job.also_level][job.also_slots[also]] = job.idents[also]
        if job.src_level != CALLER:
            self._counters.add_level(job.src_level, bytes_read=nbytes)
        self._counters.add_level(max(job.src_level, job.dst_level, 0), blocks_ok=arrived, blocks_failed=job.n - arrived)
        result = JobResult(job.id, ok, nbytes, 0.0, reason=reason)
        self._deliver(result)
        return result

    def _check_source(self, job: CopyJob, ok: Bools) -> bool:
        """Clear `ok` of wrong blocks of a tier that verifies. False when there were any."""
        if job.src_level == CALLER:
            return True
        right = self._idents[job.src_level][job.src_slots] == job.idents
        wrong = ok & ~right
        if not self._tiers[job.src_level].verifies:
            assert not wrong.any(), f"job {job.id} reads slots {job.src_slots[wrong]} that hold other blocks"
        ok &= right
        return not wrong.any()

    def _check_races(self, job: CopyJob) -> None:
        assert job.id not in self.pending, f"job {job.id} was submitted before"
        written, read = _touched(job)
        for other in self.pending.values():
            other_written, other_read = _touched(other)
            both = (written & other_written) | (written & other_read) | (read & other_written)
            assert not both, f"jobs {other.id} and {job.id} race on (level, slot) {sorted(both)}"

    def _copy(self, job: CopyJob, i: int) -> bool:
        one = slice(i, i + 1)
        rows: Rows = np.zeros((1, self._tiers[0].block_nbytes), dtype=np.uint8)
        if job.src_level == CALLER:
            row = int(job.src_slots[i])
            rows[:] = self._endpoints[job.endpoint].take(row, row + 1)
        elif not self._tiers[job.src_level].read(job.src_slots[one], rows)[0]:
            return False
        if job.dst_level == CALLER:
            self._endpoints[job.endpoint].put(int(job.dst_slots[i]), rows)
        elif not self._tiers[job.dst_level].write(job.dst_slots[one], rows)[0]:
            return False
        if job.also_slots is None or job.also_slots[i] < 0:
            return True
        return bool(self._tiers[job.also_level].write(job.also_slots[one], rows)[0])


def _touched(job: CopyJob) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """(level, slot) pairs that a job writes, and that it reads."""
    written = {(job.dst_level, int(slot)) for slot in job.dst_slots if job.dst_level != CALLER}
    if job.also_slots is not None:
        written |= {(job.also_level, int(slot)) for slot in job.also_slots if slot >= 0}
    return written, {(job.src_level, int(slot)) for slot in job.src_slots if job.src_level != CALLER}
