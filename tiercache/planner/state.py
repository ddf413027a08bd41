"""What the parts of the planner share: residency, jobs in flight, credits, breakers, counters, the outbox."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import as_index, present
from tiercache.config import EXCLUSIVE_BELOW
from tiercache.index import Node
from tiercache.planner.backlog import Backlog
from tiercache.planner.breaker import Breaker, KeyTierBreaker
from tiercache.planner.cost import WRITES_AHEAD_NBYTES, LevelCost
from tiercache.planner.counters import LevelCounters, PlannerCounters
from tiercache.planner.limits import Credits, Limits, RemoteLimits
from tiercache.planner.write_limit import WriteLimit
from tiercache.policy import Policy
from tiercache.residency import Residency
from tiercache.slots import RESIDENT
from tiercache.types import (
    CALLER,
    COLD,
    Bools,
    Claims,
    CopyJob,
    Forget,
    Idents,
    JobKind,
    LevelSpec,
    MoverMessage,
    Slots,
)

__all__ = ["Credits", "Flight", "Limits", "PlannerState", "RemoteLimits"]


@dataclass(slots=True, eq=False)
class Flight:
    """A job that was submitted and whose result has not come."""

    job: CopyJob
    delayed: bool = False
    """Holds no credits but `delayed`."""
    expedited: bool = False
    owner: int = 0
    """The load or store it belongs to, 0: none."""
    rows_at: int = 0
    """First row of that load or store."""
    ahead_nbytes: int = 0
    """Of a load: what its level had to copy first when it was submitted."""
    overdue: bool = False
    """Holds no credits any more, only its slots."""
    stale: bool = False
    """The epoch changed under it."""


@dataclass(slots=True, eq=False)
class PlannerState:
    """See the module. Mutated by every part of the planner, always under the caller's one lock."""

    residency: Residency
    policy: Policy
    epoch: bytes
    root_ident: int
    limits: Limits = field(default_factory=Limits)
    exclusive: bool | None = None
    """Does a promoted block leave the slower level (while it is a leaf there)? None: by size, see `gives_up`."""
    write_after_s: float | None = None
    max_writes_per_hit: float | None = None
    remote: RemoteLimits | None = None
    """There is a key tier. Its number is one past the last level's, and lists per level have an entry for it."""
    now: float = 0.0
    any_cold: bool = False
    """Was any block ever said to belong into the slow tiers only?"""
    jobs: dict[int, Flight] = field(default_factory=dict)
    outbox: list[MoverMessage] = field(default_factory=list)
    pinned: list[tuple[int, Slots]] = field(default_factory=list)
    """Explicit pins, by level."""
    totals: PlannerCounters = field(default_factory=PlannerCounters)
    unwritten: Backlog = field(init=False)
    """Blocks that wait for credits to be written to the last level."""
    filler: NDArray[np.int64] = field(init=False)
    """Per slot of level 0 the job that fills it, 0: none."""
    breakers: list[Breaker] = field(init=False)
    key_breaker: KeyTierBreaker = field(init=False)
    """The last of `breakers`, where there is a key tier; else one that is off."""
    holds: list[NDArray[np.int32]] = field(init=False)
    """Per level and slot: how many loads, Loaded and explicit pins hold it."""
    credits: list[Credits] = field(init=False)
    counters: list[LevelCounters] = field(init=False)
    costs: list[LevelCost] = field(init=False)
    """What loads from each level take."""
    measured_at: list[float] = field(init=False)
    """When a load or a probe last told so, or a probe was sent."""
    write_limit: WriteLimit | None = field(init=False)
    """What may be written to a persistent level without being asked for; None: everything."""
    delayed: list[dict[int, Flight]] = field(init=False)
    """Per level, the delayed writes out of it that were not told to start, oldest first."""
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        n = self.residency.levels + (self.remote is not None)
        self.unwritten = Backlog(self.residency.specs)
        self.filler = np.zeros(self.residency.specs[0].capacity, dtype=np.int64)
        self.breakers = [Breaker() for _ in range(n)]
        limits = self.remote or RemoteLimits(enabled=False)
        self.key_breaker = KeyTierBreaker(limits.seed, limits.enabled)
        self.credits = [Credits() for _ in range(n)]
        self.holds = [np.zeros(spec.capacity, dtype=np.int32) for spec in self.residency.specs]
        self.counters = [LevelCounters() for _ in range(n)]
        self.costs = [LevelCost(spec.read_latency_s, spec.read_nbytes_per_s) for spec in self.specs]
        self.costs += [LevelCost()] * (self.remote is not None)
        self.measured_at = [float("-inf")] * n
        limit = self.max_writes_per_hit
        self.write_limit = None if limit is None else WriteLimit(limit, self.residency.specs[-1].capacity)
        self.delayed = [{} for _ in range(n)]
        if self.remote is not None:
            self.breakers[-1] = self.key_breaker

    @property
    def specs(self) -> Sequence[LevelSpec]:
        """The levels, fastest first."""
        return self.residency.specs

    # -- levels -------------------------------------------------------------------------------------------------

    def online(self, level: int) -> bool:
        """May jobs use this level now?"""
        return self.has_threads(level) and self.breakers[level].allows(self.now)

    def is_given_up(self, level: int) -> bool:
        """Is it offline, and nothing under way that could soon tell otherwise?"""
        return not (self.online(level) or (self.has_threads(level) and self.breakers[level].probing))

    def has_threads(self, level: int) -> bool:
        """Are so few of its threads lost that it may go on?"""
        return self.credits[level].lost_jobs < max(1, self._threads_of(level) - 1)

    def _threads_of(self, level: int) -> int:
        if level < len(self.specs):
            return self.specs[level].pool_threads
        return self.remote.pool_threads if self.remote is not None else 0

    def most_jobs(self, level: int) -> int:
        """Jobs that may be in flight at a level. At a key tier no job waits for a thread, for its deadline begins when
        it is submitted: half of the threads are for loads, half for finds, and lost ones are nobody's."""
        if level < len(self.specs):
            return self.limits.jobs
        return max(1, min(self._threads_of(level) // 2, self._threads_of(level) - self.credits[level].lost_jobs))

    def takes_another(self, level: int, jobs: int) -> bool:
        """May one more job go to a level that has so many of its kind in flight?"""
        return jobs < self.most_jobs(level) and (level < len(self.specs) or self.key_room() > 0)

    def key_room(self) -> int:
        """How many more jobs of any kind may go to the key tier: where the last ones failed only so many that no more
        time-outs are waited for than it takes to give it up."""
        breaker, credit = self.key_breaker, self.credits[-1]
        if not breaker.failures:
            return 1 << 30
        return breaker.threshold - breaker.failures - credit.jobs - credit.others

    def share_room(self, level: int) -> int:
        """How many more blocks of a level may be on their way to a key tier: half of what loads, or other writes, may
        copy out of it. They hold up neither."""
        most = max(1, self.limits.in_flight_blocks(self.specs[level].capacity) // 2)
        return max(0, most - self.credits[level].shared)

    def online_levels(self) -> list[bool]:
        """`online` of every level."""
        return [self.online(level) for level in range(len(self.specs))]

    def level_below(self, level: int) -> int | None:
        """The next slower level that is online, None where there is none."""
        return next((lower for lower in range(level + 1, len(self.specs)) if self.online(lower)), None)

    def is_last(self, level: int) -> bool:
        """No slower level is configured."""
        return level == len(self.specs) - 1

    def gives_up(self, level: int, upper: int) -> bool:
        """Does a block that was promoted from `level` to `upper` leave `level`? By default where that is small."""
        if self.exclusive is not None:
            return self.exclusive
        return self.specs[level].capacity < EXCLUSIVE_BELOW * self.specs[upper].capacity

    def is_worth_writing(self, node: Node, at: int) -> bool:
        """Are as many hits to be expected of a copy of this block below as `max_writes_per_hit` asks for, or did a
        caller say that it matters?"""
        if self.write_limit is None:
            return True
        priority = 0 if node.hints is None else node.hints["priority"].item(at)
        return priority > 0 or priority == COLD or self.policy.worth(node, at) >= self.write_limit.share

    @property
    def memory_level(self) -> int:
        """The slowest level that is memory."""
        last = len(self.specs) - 1
        return last - int(self.specs[last].persistent and last > 0)

    # -- jobs ---------------------------------------------------------------------------------------------------

    def job_room(self, src_level: int, dst_level: int) -> int:
        """How many blocks a new job from one level to another may have by the credits left."""
        slower = max(src_level, dst_level)
        if self.credits[slower].jobs >= self.limits.jobs:
            return 0
        return min(self.outbound_room(src_level), self.inbound_room(dst_level))

    def outbound_room(self, level: int, *, writes: bool = False) -> int:
        """How many more blocks may be copied out of a level by loads, or by writes. Loads do not wait for writes, which
        a slow tier may hold up."""
        if level == CALLER or level == len(self.specs):
            return 1 << 30
        credit = self.credits[level]
        spent = credit.outbound_writes if writes else credit.outbound - credit.outbound_writes
        return max(0, self.limits.in_flight_blocks(self.specs[level].capacity) - spent)

    def inbound_room(self, level: int) -> int:
        """How many more blocks may be copied into a level."""
        if level == CALLER:
            return 1 << 30
        return max(0, self.limits.in_flight_blocks(self.specs[level].capacity) - self.credits[level].inbound)

    def ahead_nbytes(self, level: int) -> int:
        """Bytes that a level has to copy before what is submitted now: other loads, and a few of the writes to it."""
        credit, nbytes = self.credits[level], self.residency.specs[0].block_nbytes
        reads = (credit.outbound - credit.outbound_writes) * nbytes
        return reads + min(credit.inbound * nbytes, WRITES_AHEAD_NBYTES) if credit.inbound else reads

    def delay_room(self, level: int) -> int:
        """How many more blocks of a level delayed writes may hold."""
        return max(0, self.limits.delayed_blocks(self.specs[level].capacity) - self.credits[level].delayed)

    def submit(
        self,
        kind: JobKind,
        src: tuple[int, Slots],
        dst: tuple[int, Slots],
        idents: Idents,
        *,
        endpoint: int = 0,
        also: tuple[int, Slots] | None = None,
        claims: Claims | None = None,
        delay_s: float | None = None,
        owner: int = 0,
        rows_at: int = 0,
        pinned: bool = False,
        symbols: bytes | None = None,
    ) -> int:
        """Put a job into the outbox; pins its slots at every end and takes credits (none where it is delayed).

        pinned: its source and second destination are pinned already, and the job takes these pins over.
        """
        slower = max(src[0], dst[0])
        if symbols is not None and self.remote is not None:
            deadline = self.remote.read_deadline_s
        elif self.specs[slower].persistent:
            deadline = self.limits.write_deadline_s if kind == "write" else self.limits.read_deadline_s
        else:
            deadline = self.limits.copy_deadline_s
        job = CopyJob(
            id=next(self.ids),
            kind=kind,
            epoch=self.epoch,
            src_level=src[0],
            src_slots=src[1],
            dst_level=dst[0],
            dst_slots=dst[1],
            idents=idents,
            endpoint=endpoint,
            also_level=also[0] if also else CALLER,
            also_slots=also[1] if also else None,
            deadline_s=deadline,
            start_after_s=delay_s or 0.0,
            claims=claims,
            symbols=symbols,
        )
        flight = Flight(job, delayed=delay_s is not None, owner=owner, rows_at=rows_at)
        if kind in ("load", "probe"):
            flight.ahead_nbytes = self.ahead_nbytes(src[0])
        self.jobs[job.id] = flight
        if flight.delayed:
            self.delayed[job.src_level][job.id] = flight
        self._spend(flight, 1)
        for level, slots in [(job.dst_level, job.dst_slots)] if pinned else self.ends(job):
            if level != CALLER:
                self.residency.pin(level, slots)
        self.filler[as_index(self.filled(job))] = job.id
        self.breakers[slower].started()
        self.outbox.append(job)
        return job.id

    def finish(self, flight: Flight) -> None:
        """The job's result came: unpin its slots, give its credits back."""
        del self.jobs[flight.job.id]
        if flight.overdue:
            self.credits[max(flight.job.src_level, flight.job.dst_level)].lost_jobs -= 1
        else:
            self._spend(flight, -1)
        self.filler[as_index(self.filled(flight.job))] = 0
        for level, slots in self.ends(flight.job):
            self.residency.unpin(level, slots)

    def lose(self, flight: Flight) -> None:
        """The job is overdue: nothing waits for its credits any more; its slots stay pinned until its result."""
        self._spend(flight, -1)
        flight.overdue = True
        self.credits[max(flight.job.src_level, flight.job.dst_level)].lost_jobs += 1

    def hasten(self, flight: Flight) -> None:
        """A delayed job is told not to wait."""
        flight.expedited = True
        del self.delayed[flight.job.src_level][flight.job.id]
        self.credits[flight.job.src_level].hastened += flight.job.n

    @staticmethod
    def filled(job: CopyJob) -> Slots:
        """Slots of level 0 that a job writes."""
        if job.dst_level == 0:
            return job.dst_slots
        if job.also_level == 0 and job.also_slots is not None:
            return present(job.also_slots)
        return np.empty(0, dtype=np.int32)

    @staticmethod
    def ends(job: CopyJob) -> list[tuple[int, Slots]]:
        """(level, slots) at every end of a job that is a level."""
        ends = [(job.dst_level, job.dst_slots)]
        if job.symbols is None:
            ends.append((job.src_level, job.src_slots))
        if job.also_slots is not None:
            ends.append((job.also_level, present(job.also_slots)))
        return [(level, slots) for level, slots in ends if level != CALLER]

    def _spend(self, flight: Flight, sign: int) -> None:
        job = flight.job
        if flight.delayed:
            if sign < 0:
                self.delayed[job.src_level].pop(job.id, None)
            self.credits[job.src_level].delayed += sign * job.n
            self.credits[job.src_level].hastened += sign * job.n * flight.expedited
            return
        self.credits[max(job.src_level, job.dst_level)].jobs += sign
        if job.src_level != CALLER:
            self.credits[job.src_level].outbound += sign * job.n
            if job.kind == "write":
                self.credits[job.src_level].outbound_writes += sign * job.n
        if job.dst_level != CALLER:
            self.credits[job.dst_level].inbound += sign * job.n
        if job.also_slots is not None:
            self.credits[job.also_level].inbound += sign * int((job.also_slots >= 0).sum())

    @contextmanager
    def keep(self, gathered: NDArray[np.int32]) -> Iterator[None]:
        """Pin all these slots (`int32[levels, n]`, as gathered along a path) while room is made for that path."""
        kept = [(level, present(row)) for level, row in enumerate(gathered)]
        for level, slots in kept:
            self.residency.pin(level, slots)
        try:
            yield
        finally:
            for level, slots in kept:
                self.residency.unpin(level, slots)

    # -- holds --------------------------------------------------------------------------------------------------

    def may_hold(self, level: int, slots: NDArray[np.int32]) -> int:
        """How many of these, from the first, loads and pins may hold (-1: one that is yet to get a slot). What is held
        already costs nothing: any number of requests may share one prefix."""
        room = max(0, self.limits.held_blocks(self.specs[level].capacity) - self.credits[level].held)
        if len(slots) <= room:
            return len(slots)
        more = (slots < 0) | (self.holds[level][slots] == 0)
        return int(np.searchsorted(np.cumsum(more), room, side="right"))

    def hold(self, level: int, slots: Slots) -> None:
        """Pin for a load, a Loaded or an explicit pin."""
        self.residency.pin(level, slots)
        holds, where = self.holds[level], as_index(slots)
        holds[where] += 1
        self.credits[level].held += int((holds[where] == 1).sum())

    def let_go(self, level: int, slots: Slots) -> None:
        """End a hold."""
        self.residency.unpin(level, slots)
        holds, where = self.holds[level], as_index(slots)
        holds[where] -= 1
        self.credits[level].held -= int((holds[where] == 0).sum())

    # -- slots that lose their block ----------------------------------------------------------------------------

    def forget(self, level: int, slots: Slots) -> None:
        """Tell a persistent tier that these slots hold nothing any more."""
        if len(slots) and self.specs[level].persistent:
            self.outbox.append(Forget(slots))

    def readable(self, level: int, slots: Slots) -> Bools:
        """Per slot: RESIDENT?"""
        return np.asarray(self.residency.tables[level].state[as_index(slots)] == RESIDENT)
