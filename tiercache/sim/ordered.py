"""Ordered delivery: results of the mover take effect at steps of the replay, never when they happen to arrive.

A job belongs to the step at which it was issued. A job that continues a load (the planner splits long ones, and issues
the rest as credits allow) belongs to that load's step. A write that must wait until its block has an age belongs to the
first step at which trace time has come so far, or to the step at which the planner needs its slots (`Expedite`).
Results of the jobs up to some step are delivered lowest job first, each awaited where it has not arrived; what the
deliveries issue themselves is delivered too, as far as it belongs to those steps.

So what the planner sees depends on the trace alone, and a replay that moves bytes decides as one that does not.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tiercache.errors import TierCacheError
from tiercache.types import CALLER, CopyJob, Expedite, JobOverdue, JobResult, MoverMessage, PlannerMessage

__all__ = ["NEVER_S", "RESULT_WAIT_S", "Busy", "OrderedDelivery", "ReplayError"]

NEVER_S = 10.0 * 365 * 86400
"""`write_after_s` for planner and mover, whose clocks are not the trace's: `OrderedDelivery` ends the delay."""
RESULT_WAIT_S = 300.0
"""Longest wait for one result."""


class ReplayError(TierCacheError):
    """A replay cannot go on. The message says what it waited for."""


@dataclass(slots=True)
class Busy:
    """Wall time during which at least one copy ran."""

    seconds: float = 0.0
    _spans: list[tuple[float, float]] = field(default_factory=list)

    def add(self, begin: float, end: float) -> None:
        """Count the span from `begin` to `end`; ends must never go back."""
        while self._spans and self._spans[-1][1] >= begin:
            first, last = self._spans.pop()
            self.seconds -= last - first
            begin = min(begin, first)
        self._spans.append((begin, end))
        self.seconds += end - begin
        del self._spans[:-64]  # a copy that began before the last 64 pauses is not worth the memory


@dataclass(slots=True)
class _Issued:
    job: CopyJob
    step: int
    """Where it counts; for a delayed job not yet known."""
    messages: list[PlannerMessage] = field(default_factory=list)
    finished: bool = False
    """Its JobResult has arrived."""


class OrderedDelivery:
    """A Delivery whose owner, one thread, says when results take effect.

    write_after_s: age in trace seconds at which delayed writes may start; None: there are none.
    """

    def __init__(self, write_after_s: float | None = None, wait_s: float = RESULT_WAIT_S) -> None:
        self._write_after_s = write_after_s
        self._wait_s = wait_s
        self._apply: Callable[[PlannerMessage], None] = _not_bound
        self._load_of: Callable[[int], int] = _no_planner
        self._send: Callable[[Sequence[MoverMessage]], None] = _no_mover
        self._changed = threading.Condition()
        self._issued: dict[int, _Issued] = {}
        """By job, all that was not delivered and is not delayed."""
        self._delayed: dict[int, _Issued] = {}
        self._due: list[tuple[float, int]] = []
        """(trace time, job) of delayed jobs, a heap; some are not delayed any more."""
        self._loose: list[PlannerMessage] = []
        """Messages of no job (LostClaims)."""
        self._direct = False
        self._step = 0
        self._now = 0.0
        self._loads = 0
        self._load_steps: dict[int, int] = {}
        self.failed_blocks = 0
        """Blocks of results that say they did not arrive."""
        self.busy_reading: dict[int, Busy] = {}
        """By level, the time in which copies out of it ran."""
        self.busy_writing: dict[int, Busy] = {}

    # -- Delivery -----------------------------------------------------------------------------------------------

    def bind(self, apply: Callable[[PlannerMessage], None]) -> None:
        """See Delivery."""
        self._apply = apply

    def submitted(self, messages: Sequence[MoverMessage]) -> None:
        """See Delivery. Gives each job its step."""
        with self._changed:
            for message in messages:
                if isinstance(message, CopyJob):
                    self._take_job(message)
                elif isinstance(message, Expedite):
                    for job in message.jobs:
                        self._end_delay(job)

    def arrived(self, message: PlannerMessage) -> None:
        """See Delivery. Keeps the message until its turn."""
        with self._changed:
            if not self._direct:
                self._keep(message)
                self._changed.notify_all()
                return
        self._apply(message)

    # -- the owner ----------------------------------------------------------------------------------------------

    def connect(self, load_of: Callable[[int], int], send: Callable[[Sequence[MoverMessage]], None]) -> None:
        """Once planner and mover exist, before the first request: `load_of` says which load (its number, counted by
        the planner from 1) a job belongs to; `send` hands messages to the mover."""
        self._load_of = load_of
        self._send = send

    def begin(self, step: int, now: float) -> None:
        """A step begins at trace time `now`: jobs issued from now on belong to it, delays that end by then are over."""
        self._step, self._now = step, now
        ended = []
        with self._changed:
            while self._due and self._due[0][0] <= now:
                _, job = heapq.heappop(self._due)
                if self._end_delay(job):
                    ended.append(job)
        if ended:
            self._send([Expedite(tuple(ended))])

    def expect_load(self) -> None:
        """The planner is about to plan its next load, at this step."""
        self._loads += 1
        self._load_steps[self._loads] = self._step

    def deliver(self, through: int) -> None:
        """Deliver the results of all jobs of steps up to `through`, lowest job first; waits for those that lack.

        ReplayError where one does not come.
        """
        self._deliver_loose()
        while (job := self._lowest(through)) is not None:
            self._deliver(job)
        for load in [load for load, step in self._load_steps.items() if step < through]:
            del self._load_steps[load]

    def deliver_next(self) -> bool:
        """Deliver the result of the lowest job of any step; False where no job is under way."""
        job = self._lowest(None)
        if job is None:
            return False
        self._deliver(job)
        return True

    def let_go(self) -> None:
        """From now on messages take effect as they come, on the thread that brings them."""
        while True:
            with self._changed:
                messages = [message for each in self._issued.values() for message in each.messages]
                messages += [message for each in self._delayed.values() for message in each.messages] + self._loose
                for each in (*self._issued.values(), *self._delayed.values()):
                    each.messages = []
                self._loose = []
                if not messages:
                    self._direct = True
                    return
            for message in messages:
                self._apply(message)

    # -- inside -------------------------------------------------------------------------------------------------

    def _take_job(self, job: CopyJob) -> None:
        if job.start_after_s > 0 and self._write_after_s is not None:
            self._delayed[job.id] = _Issued(job, self._step)
            heapq.heappush(self._due, (self._now + self._write_after_s, job.id))
            return
        step = self._step
        if job.kind == "load":
            step = self._load_steps.get(self._load_of(job.id), step)
        self._issued[job.id] = _Issued(job, step)

    def _end_delay(self, job: int) -> bool:
        issued = self._delayed.pop(job, None)
        if issued is None:
            return False
        issued.step = self._step
        self._issued[job] = issued
        return True

    def _keep(self, message: PlannerMessage) -> None:
        if not isinstance(message, (JobResult, JobOverdue)):
            self._loose.append(message)
            return
        issued = self._issued.get(message.job) or self._delayed[message.job]
        issued.messages.append(message)
        if isinstance(message, JobResult):
            issued.finished = True
            self.failed_blocks += issued.job.n - int(message.ok.sum())
            if message.seconds > 0:
                self._count_busy(issued.job, message.seconds)

    def _count_busy(self, job: CopyJob, seconds: float) -> None:
        end = time.monotonic()
        if job.src_level != CALLER:
            self.busy_reading.setdefault(job.src_level, Busy()).add(end - seconds, end)
        if job.dst_level != CALLER:
            self.busy_writing.setdefault(job.dst_level, Busy()).add(end - seconds, end)

    def _lowest(self, through: int | None) -> int | None:
        with self._changed:
            jobs = (job for job, each in self._issued.items() if through is None or each.step <= through)
            return min(jobs, default=None)

    def _deliver(self, job: int) -> None:
        with self._changed:
            issued = self._issued[job]
            if not self._changed.wait_for(lambda: issued.finished, self._wait_s):
                raise ReplayError(
                    f"no result after {self._wait_s:g} s of job {job} ({issued.job.kind}, {issued.job.n} blocks, "
                    f"level {issued.job.src_level} to {issued.job.dst_level})"
                )
            del self._issued[job]
        for message in issued.messages:
            self._apply(message)

    def _deliver_loose(self) -> None:
        with self._changed:
            messages, self._loose = self._loose, []
        for message in messages:
            self._apply(message)


def _not_bound(message: PlannerMessage) -> None:
    raise RuntimeError("no planner yet")


def _no_planner(job: int) -> int:
    raise RuntimeError("not connected to a planner yet")


def _no_mover(messages: Sequence[MoverMessage]) -> None:
    raise RuntimeError("not connected to a mover yet")
