"""The mover: takes the planner's messages, runs jobs on pools of threads, and answers through `deliver`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from tiercache.config_remote import REMOTE_NAME
from tiercache.errors import CacheClosedError, WorkerThreadError
from tiercache.mover.clock import Clock
from tiercache.mover.committer import Committer
from tiercache.mover.copier import Copier
from tiercache.mover.job import OutsideRows, RunningJob
from tiercache.mover.keyed import KeyedJobs, KeyTierSpec
from tiercache.mover.ledger import BlockLedger, MemoryLedger, chosen_claims, fail_orphans
from tiercache.mover.pool import PoolQueue
from tiercache.mover.staging import KeyedStaging, Staging
from tiercache.mover.stats import Counters, MoverStats
from tiercache.mover.threads import is_worker_thread, start_thread
from tiercache.remote import frame_nbytes
from tiercache.remote.guard import job_blocks
from tiercache.tiers.base import SlotTier
from tiercache.types import (
    CALLER,
    CopyJob,
    Expedite,
    Forget,
    JobOverdue,
    LostClaims,
    MoverMessage,
    NewEpoch,
    NoteUse,
    PlannerMessage,
    Slots,
)

__all__ = ["Mover"]

_log = logging.getLogger("tiercache.mover")

LAST_COMMIT_S = 1.0
"""Of the time that `close` has, what is kept for the last commit: this much, but at most half of it."""
_MOMENT_S = 0.1
"""What threads that have nothing left to do need to end, also where no time is left."""

_NO_LEVEL = CALLER - 1


class Mover:
    """Runs CopyJobs over `tiers` (0 fastest) and calls `deliver(message)` with what became of them.

    `deliver` is called from worker threads, several at once, and from the one that closes, with no mover lock held;
    per job JobOverdue (if any) comes before JobResult, and LostClaims never before the JobResult that wrote the slots.
    What `deliver` raises is logged and counted.

    `keys`: a key tier, which is never closed here; jobs name it as the level after the last.
    At most one tier may verify (a disk). `catalog` remembers what it holds; without one a table in memory does.
    `epoch`: jobs to that tier under another epoch are not recorded ("cancelled"); None: any, until a NewEpoch comes.
    Threads are daemons, started here: `memory_threads` per memory level, `io_threads` for the level that verifies,
    one clock, and one committer where a tier verifies.

    Raises ValueError for tiers of different block sizes, two tiers that verify, or a catalog without one; OSError
    where a thread cannot be started (none is left then).
    """

    def __init__(
        self,
        tiers: Sequence[SlotTier],
        deliver: Callable[[PlannerMessage], None],
        *,
        catalog: BlockLedger | None = None,
        epoch: bytes | None = None,
        memory_threads: int = 2,
        io_threads: int = 8,
        commit_every_s: float = 0.2,
        keys: KeyTierSpec | None = None,
    ) -> None:
        persistent = [level for level, tier in enumerate(tiers) if tier.verifies]
        if not tiers or len({(tier.block_nbytes, tier.stride) for tier in tiers}) != 1:
            raise ValueError(f"all of {list(tiers)} must hold blocks of one size")
        if len(persistent) > 1 or (catalog is not None and not persistent):
            raise ValueError(f"{len(persistent)} tiers verify; at most one may, and a catalog belongs to one")
        if min(memory_threads, io_threads) < 1:
            raise ValueError(f"memory_threads {memory_threads} and io_threads {io_threads} must be at least 1")
        self._tiers = tuple(tiers)
        self._deliver_outside = deliver
        names = [tier.name for tier in tiers] + [REMOTE_NAME] * (keys is not None)
        self._counters = Counters(names)
        self._ledger = catalog
        if persistent and catalog is None:
            self._ledger = MemoryLedger(tiers[persistent[0]].capacity)
        self._persistent_level = persistent[0] if persistent else _NO_LEVEL
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._epoch = epoch
        self.left_open: frozenset[int] = frozenset()
        """After `close`: levels that a thread still uses. Where one has files, their directory must stay locked."""
        self._endpoints: dict[int, OutsideRows] = {}
        self._live: dict[int, RunningJob] = {}
        self._closing = False
        self._closed = False
        self._abandoned = False
        self._keys = keys
        self.keyed = KeyedJobs(keys, tiers[0].block_nbytes) if keys is not None else None
        self._copier = Copier(tiers, self._ledger, self._counters, self._announce, self.keyed)
        self._threads_of = [io_threads if tier.verifies else memory_threads for tier in tiers]
        if keys is not None:
            self._threads_of.append(keys.threads + keys.write_threads)
        self._queues = [PoolQueue() for _ in names]
        self._committer: Committer | None = None
        self._threads: list[threading.Thread] = []
        with ExitStack() as undo:  # where a thread cannot be started, those before it end
            if self._ledger is not None:
                sync_tier = tiers[self._persistent_level].sync
                capacity = tiers[self._persistent_level].capacity
                self._committer = Committer(
                    self._ledger, capacity, sync_tier, self._deliver_lost, commit_every_s, self._counters
                )
                undo.callback(self._committer.stop, LAST_COMMIT_S)
            self._clock = Clock(on_error=partial(self._counters.add, unexpected_errors=1))
            undo.callback(self._clock.stop)
            for level, name in enumerate(names):
                undo.callback(self._queues[level].stop)
                for i in range(self._threads_of[level]):
                    self._threads.append(start_thread(f"{name}-{i}", partial(self._work, level)))
            undo.pop_all()

    # -- from the planner -------------------------------------------------------------------------------------------

    def attach(self, endpoint: int, rows: OutsideRows) -> None:
        """Name caller rows for jobs submitted later. They are held until `detach`, and by each job until it ends."""
        with self._lock:
            self._endpoints[endpoint] = rows

    def detach(self, endpoint: int) -> None:
        """Forget caller rows; jobs submitted before keep them. Unknown numbers are ignored."""
        with self._lock:
            self._endpoints.pop(endpoint, None)

    def submit(self, messages: Sequence[MoverMessage]) -> None:
        """Take messages in order. Never waits for a copy, never refuses; the planner's credits bound the queues.

        While `close` runs, jobs are still answered, with reason "closed". Raises CacheClosedError after it.
        """
        if self._abandoned:
            raise CacheClosedError("this mover belongs to the parent process")
        with self._lock:
            if self._closed:
                raise CacheClosedError("the mover is closed")
            for message in messages:
                self._take(message)

    def _take(self, message: MoverMessage) -> None:
        if isinstance(message, CopyJob):
            self._take_job(message)
        elif isinstance(message, Expedite):
            for job in message.jobs:
                running = self._live.get(job)
                if running is not None:
                    self._start(running)
        elif self._ledger is not None and self._committer is not None:
            if isinstance(message, Forget):
                self._ledger.forget(message.slots)
                self._committer.over(message.slots)
            elif isinstance(message, NoteUse):
                self._ledger.note_use(message.slots, message.last_use, message.uses, message.hints)
            else:
                self._epoch = message.epoch
                self._ledger.new_epoch(message.epoch)
                self._committer.over()
            self._committer.record()
        elif isinstance(message, NewEpoch):
            self._epoch = message.epoch

    def _take_job(self, job: CopyJob) -> None:
        level = max(job.src_level, job.dst_level, 0)
        # One job never takes the whole pool of a tier that may hang: another one can still be served.
        threads = self._threads_of[level]
        max_threads = max(1, threads - 1) if job.symbols is None and self._tiers[level].verifies else threads
        rows = self._endpoints.get(job.endpoint)
        running = RunningJob(job, level, rows, self._copier.part_blocks(job, threads), max_threads)
        self._live[job.id] = running
        if job.dst_level == self._persistent_level and self._ledger is not None and self._committer is not None:
            self._ledger.starting(job.dst_slots)
            self._committer.over(job.dst_slots)
            self._committer.record()
        now = time.monotonic()
        if self._closing:
            self._clock.call_at(now, running, partial(self._expire, "closed"))
        elif running.delayed:
            self._clock.call_at(now + job.start_after_s, running, self._start)
        else:
            self._enqueue(running)

    def call_off(self, jobs: Sequence[int], patience_s: float) -> int:
        """The rows that these jobs (stores) read are about to change. Wait for their copies, all together at most
        `patience_s`; none of a job that is not over by then counts as arrived. Returns how many were called off.

        A thread may still read afterwards, what it read is thrown away. Jobs that are over are ignored.
        """
        with self._idle:
            mine = [self._live[job] for job in jobs if job in self._live]
            if mine:
                self._idle.wait_for(lambda: all(self._live.get(each.job.id) is not each for each in mine), patience_s)
                mine = [each for each in mine if self._live.get(each.job.id) is each]
        for running in mine:
            if running.call_off():
                self._queues[running.level].remove(running)
                self._finish(running)
        return len(mine)

    def _start(self, running: RunningJob) -> None:
        """End a job's delay."""
        if running.release():
            self._enqueue(running)

    def _enqueue(self, running: RunningJob) -> None:
        if running.job.deadline_s is not None:
            self._clock.call_at(time.monotonic() + running.job.deadline_s, running, partial(self._expire, "deadline"))
        self._queues[running.level].push(running)

    # -- the threads of the pools -----------------------------------------------------------------------------------

    def _work(self, level: int) -> None:
        queue = self._queues[level]
        staging = self._staging(level)
        self._about_staging(staging.prepare)
        while (part := queue.next_part()) is not None:
            running, begin, end = part
            try:
                self._copier.run(running, begin, end, staging)
            except Exception as error:  # noqa: BLE001  outermost frame of a worker thread
                self._broke(running, error)
            if running.end_part():
                self._finish(running)
            del part, running  # an idle thread holds nobody's rows
        self._about_staging(staging.close)

    def _about_staging(self, step: Callable[[], None]) -> None:
        """A tier that is told of memory may raise what it likes: the thread goes on, or the pool would have none."""
        try:
            step()
        except Exception:  # noqa: BLE001  outermost frame of a worker thread
            _log.exception("a key tier failed unexpectedly over its staging")
            self._counters.add(unexpected_errors=1)

    def _staging(self, level: int) -> Staging:
        if self._keys is None or level < len(self._tiers):
            return Staging()
        nbytes = self._tiers[0].block_nbytes
        return KeyedStaging(self._keys.tier, job_blocks(nbytes), frame_nbytes(nbytes))

    def _broke(self, running: RunningJob, error: Exception) -> None:
        _log.error("job %d failed unexpectedly", running.job.id, exc_info=error)
        running.break_off(error)
        self._counters.add(unexpected_errors=1)

    def _finish(self, running: RunningJob) -> None:
        """Settle and deliver a job whose threads have all returned."""
        try:
            self._settle(running)
        except Exception as error:  # noqa: BLE001  outermost frame of a worker thread
            self._broke(running, error)
        self._deliver_result(running)

    def _settle(self, running: RunningJob) -> None:
        """Record in the ledger what a job wrote to the persistent tier, and what it did not."""
        job = running.job
        if job.dst_level != self._persistent_level or self._ledger is None or self._committer is None:
            return
        if running.cancelled or running.broken:
            running.fail_all()
        elif job.claims is None:
            raise LookupError(f"job {job.id} writes to {self._tiers[job.dst_level].name!r} without claims")
        elif not running.ok.all():
            fail_orphans(running.ok, job.dst_slots, job.claims.parent_slots)
        with self._lock:  # against a NewEpoch in between
            if self._epoch is not None and job.epoch != self._epoch:
                running.fail_all()
                running.fail("cancelled")
            ok = running.ok
            failed = job.dst_slots[~ok]
            if len(failed):  # children that wait for them are lost
                self._ledger.forget(failed)
                self._committer.over(failed)
                self._committer.record()
            if job.claims is not None and ok.any():
                slots, idents = job.dst_slots[ok], job.idents[ok]
                self._committer.hold(job.id, slots)
                self._ledger.written(slots, idents, running.checksums[ok], chosen_claims(job.claims, ok))
                self._committer.record(slots[self._ledger.expected(slots)[0] == idents])

    def _give_up(self, running: RunningJob) -> None:
        """A write hangs: what waits for its blocks in the ledger need not wait any longer."""
        job = running.job
        if job.dst_level == self._persistent_level and self._ledger is not None and self._committer is not None:
            with self._lock:
                self._ledger.forget(job.dst_slots)
                self._committer.over(job.dst_slots)
                self._committer.record()

    # -- to the planner ---------------------------------------------------------------------------------------------

    def _deliver(self, message: PlannerMessage) -> None:
        try:
            self._deliver_outside(message)
        except Exception:  # noqa: BLE001  outermost frame of a worker thread: what the callback raised is not ours
            _log.exception("delivering %s failed", type(message).__name__)
            self._counters.add(delivery_errors=1)

    def _deliver_lost(self, slots: Slots) -> None:
        self._deliver(LostClaims(slots))

    def _deliver_result(self, running: RunningJob) -> None:
        result = running.result(self._tiers[0].block_nbytes)
        arrived = int(result.ok.sum())
        self._counters.add_level(running.level, blocks_ok=arrived, blocks_failed=running.job.n - arrived)
        if running.overdue:
            self._counters.add_level(running.level, lost=-1)
        self._deliver(result)
        if self._committer is not None:
            self._committer.unhold(running.job.id)
        with self._idle:
            if self._live.get(running.job.id) is running:
                del self._live[running.job.id]
            self._idle.notify_all()

    def _announce(self, running: RunningJob) -> None:
        """Deliver JobOverdue: from here on nothing touches the job's destination or the caller's rows."""
        self._counters.add_level(running.level, overdue=1, lost=1)
        self._give_up(running)
        self._deliver(JobOverdue(running.job.id))
        with self._idle:
            self._idle.notify_all()
        if running.announced():
            self._finish(running)

    def _expire(self, reason: str, running: RunningJob, only_waiting: bool = False) -> None:
        """Stop waiting for a job."""
        ending = running.expire(reason, only_waiting)
        if ending == "none":
            return
        self._queues[running.level].remove(running)
        if ending == "result":
            self._finish(running)
        else:
            self._announce(running)

    # -- waiting, counting, ending ----------------------------------------------------------------------------------

    def sync(self, timeout_s: float) -> bool:
        """Commit now. True when all that was written before the call is claimed, False at the timeout.

        Jobs still running are not waited for. Raises WorkerThreadError on a mover's thread.
        """
        if is_worker_thread():
            raise WorkerThreadError("sync() would wait for the thread that called it")
        if self._abandoned:
            raise CacheClosedError("this mover belongs to the parent process")
        return self._committer is None or self._committer.sync(timeout_s)

    def stats(self) -> MoverStats:
        """A snapshot of all counters and queue lengths."""
        delayed = [0] * len(self._queues)
        with self._lock:
            for running in self._live.values():
                delayed[running.level] += running.delayed
        return self._counters.snapshot([len(queue) for queue in self._queues], delayed)

    def close(self, deadline_s: float) -> bool:
        """End everything: no more jobs, queued ones fail with "closed", running ones are waited for
        (those that are overdue are not).

        Shortly before the deadline the jobs still running are announced as overdue and stay lost: the tiers they touch
        stay open and their memory mapped (`left_open`). Then comes the last commit (LAST_COMMIT_S), and the ledger and
        the other tiers are closed. True when nothing was lost and everything is committed. A second call
        does nothing. Raises WorkerThreadError on a mover's thread.
        """
        if self._abandoned:
            return True
        if is_worker_thread():
            raise WorkerThreadError("close() would wait for the thread that called it")
        end = time.monotonic() + deadline_s
        with self._lock:
            if self._closing:
                return not self._live
            self._closing = True
            waiting = list(self._live.values())
        for running in waiting:
            self._expire("closed", running, only_waiting=True)
        patience = deadline_s - min(LAST_COMMIT_S, deadline_s / 2)
        with self._idle:
            self._idle.wait_for(lambda: all(running.overdue for running in self._live.values()), patience)
            self._closed = True
            late = list(self._live.values())
        for running in late:
            self._expire("closed", running)
        with self._lock:
            lost = [running for running in self._live.values() if _levels_of(running)]
        return self._close_rest(end, lost)

    def _close_rest(self, end: float, lost: list[RunningJob]) -> bool:
        self._clock.stop()
        for queue in self._queues:
            queue.stop()
        if not self._live:  # none of the threads is in a tier
            for thread in (*self._threads, self._clock.thread):
                thread.join(max(_MOMENT_S, end - time.monotonic()))
        committed = True
        kept = {level for running in lost for level in _levels_of(running)}
        if self._committer is not None and self._ledger is not None:
            committed = self._committer.stop(max(_MOMENT_S, end - time.monotonic()))
            hangs = self._committer.thread.is_alive()
            closed = self._ledger.close(clean=committed and not lost, wait_s=max(0.0, end - time.monotonic()))
            if hangs or not closed:  # in a sync
                kept.add(self._persistent_level)
        self.left_open = frozenset(kept)
        for level, tier in enumerate(self._tiers):
            if level not in kept:
                tier.close()
        return committed and not lost

    def written_to(self) -> frozenset[int]:
        """Caller rows (their numbers) into which a thread is copying now: they are not the caller's before it ends."""
        with self._lock:
            lives = [running for running in self._live.values() if running.job.dst_level == CALLER]
        return frozenset(running.job.endpoint for running in lives if running.copying)

    def hung_levels(self) -> frozenset[int]:
        """Of the levels left open by `close`, those that a thread still uses."""
        with self._lock:
            used = {level for running in self._live.values() for level in _levels_of(running)}
        if self._committer is not None and self._committer.thread.is_alive():
            used.add(self._persistent_level)
        return self.left_open & used

    def abandon(self) -> None:
        """For a forked child, whose copy of this mover has no threads: touch nothing, take no lock, refuse use."""
        self._abandoned = True


def _levels_of(running: RunningJob) -> set[int]:
    """The levels that a job's threads may still touch. One that hangs in a key tier touches its staging only."""
    job = running.job
    if job.symbols is not None:
        memory = {job.src_level} if job.kind == "write" else {job.dst_level, job.also_level} - {CALLER}
        return memory if running.copying else set()
    return {job.src_level, job.dst_level, job.also_level} - {CALLER}
