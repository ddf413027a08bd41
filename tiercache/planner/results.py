"""Results: takes over what the mover reports. Written slots become readable, failed ones lose their block."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tiercache.arrays import as_index
from tiercache.index import Node
from tiercache.planner.demotion import Demotion
from tiercache.planner.finds import Finds
from tiercache.planner.loads import Load, Loads
from tiercache.planner.remote_writes import RemoteWrites
from tiercache.planner.state import Flight, PlannerState
from tiercache.slots import BAD, RESIDENT, WRITING
from tiercache.types import CALLER, Bools, JobOverdue, JobResult, LostClaims, PlannerMessage, Slots

__all__ = ["Outcome", "Results"]


@dataclass(slots=True)
class Outcome:
    """What a message from the mover ended."""

    loads: list[Load] = field(default_factory=list)
    """Loads that are done."""
    job: int = 0
    """A job whose result came, or that is overdue (0: none)."""
    ok: Bools | None = None
    """Its blocks, as far as the planner took them."""
    late: bool = False
    """It is of a load or a question that a key tier did not serve in time."""


class Results:
    """See the module. Mutates slots, tree, jobs, counters, breakers."""

    def __init__(
        self,
        state: PlannerState,
        loads: Loads,
        demotion: Demotion,
        finds: Finds | None = None,
        remote_writes: RemoteWrites | None = None,
    ) -> None:
        self.state = state
        self.remote_writes = remote_writes
        self.loads = loads
        self.finds = finds
        self.demotion = demotion
        self.room = demotion.room

    def take(self, message: PlannerMessage) -> Outcome:
        """Take one message over; what waits for credits is submitted by the caller afterwards."""
        if isinstance(message, LostClaims):
            self._lost_claims(message.slots)
            return Outcome()
        if self.finds is not None and message.job in self.finds.under_way:
            self.finds.take(message)
            return Outcome(job=message.job, late=_is_late(message))
        if self.remote_writes is not None and message.job in self.remote_writes.under_way:
            self.remote_writes.take(message)
            return Outcome(job=message.job)
        flight = self.state.jobs[message.job]
        return self._overdue(flight) if isinstance(message, JobOverdue) else self._result(flight, message)

    def _result(self, flight: Flight, result: JobResult) -> Outcome:
        job, state = flight.job, self.state
        ok = result.ok & (not flight.overdue and not flight.stale)
        for level, slots, rows in self._destinations(flight):
            self._settle_slots(level, slots, ok[rows])
        if job.dst_level != CALLER:
            ok &= state.readable(job.dst_level, job.dst_slots)
        if not flight.overdue:
            self._judge(flight, result)
            if not flight.stale:
                self._count(flight, result)
        state.finish(flight)
        if self.finds is not None and not flight.overdue:
            self.finds.fetched(flight, result.ok, result.reason)
        if self.remote_writes is not None and job.symbols is not None and not flight.stale:
            self.remote_writes.came(job.idents[ok])
        if job.kind in ("load", "probe") and job.symbols is None and not flight.overdue:
            self._after_load(flight, result)
        elif job.kind == "store" and not flight.stale:
            self._after_store(job.dst_slots[ok])
        loads = self.loads.came_back(flight, ok)
        return Outcome(loads, job.id, ok, job.symbols is not None and _is_late(result))

    @staticmethod
    def _destinations(flight: Flight) -> list[tuple[int, Slots, Bools]]:
        """(level, slots, which blocks of the job they are) of every destination that is a level."""
        job = flight.job
        ends = [] if job.dst_level == CALLER else [(job.dst_level, job.dst_slots, np.ones(job.n, dtype=np.bool_))]
        if job.also_slots is not None:
            rows = job.also_slots >= 0
            ends.append((job.also_level, job.also_slots[rows], rows))
        return ends

    def _settle_slots(self, level: int, slots: Slots, ok: Bools) -> None:
        """Written slots become readable; the others lose their block."""
        table = self.state.residency.tables[level]
        waiting = table.state[as_index(slots)] == WRITING
        if ok.all() and waiting.all():
            self.state.residency.set_state(level, slots, RESIDENT)
            return
        self.state.residency.set_state(level, slots[waiting & ok], RESIDENT)
        self._fail(level, slots[waiting & ~ok])

    def _fail(self, level: int, slots: Slots) -> None:
        """Slots whose bytes did not arrive. They are pinned by their job still, so they end DETACHED."""
        if self.state.specs[level].persistent:
            self._leave(level, slots)
        else:
            self.room.lose_copies(level, slots)

    def _leave(self, level: int, slots: Slots) -> None:
        """Blocks leave a persistent level, and with them what hangs below them there."""
        table = self.state.residency.tables[level]
        for slot in slots.tolist():
            owner = int(table.owner[slot])
            if owner >= 0:
                self.room.leave_level(level, self.state.residency.index.nodes[owner], int(table.pos[slot]))

    def _after_load(self, flight: Flight, result: JobResult) -> None:
        """Sources that were found wrong are marked; where promotion is exclusive, the slow copies go."""
        job, state = flight.job, self.state
        table = state.residency.tables[job.src_level]
        wrong = result.bad
        if wrong is None:
            wrong = ~result.ok if result.reason in ("io", "checksum") else np.zeros(job.n, dtype=np.bool_)
        if wrong.any():
            bad = job.src_slots[wrong]
            bad = bad[table.state[bad] == RESIDENT]
            state.counters[job.src_level].bad += len(bad)
            self.room.spoil(job.src_level, bad)
        upper = job.dst_level if job.dst_level != CALLER else job.also_level
        if upper == CALLER or not state.gives_up(job.src_level, upper):
            return
        for node, begin, end in reversed(state.residency.runs_of(job.src_level, job.src_slots)):
            self._give_up_copy(job.src_level, upper, node, begin, end)

    def _give_up_copy(self, level: int, upper: int, node: Node, begin: int, end: int) -> None:
        """Exclusive promotion: drop the slow copies of a stretch from its deep end, while they are leaves there."""
        table, above = self.state.residency.tables[level], self.state.residency.tables[upper]
        while end > begin and node.held[level] and not node.kids[level]:
            at, slot, fast = end - 1, int(node.slots[end - 1, level]), int(node.slots[end - 1, upper])
            is_leaf = slot >= 0 and not (node.slots[end:, level] >= 0).any()
            if not is_leaf or table.pins[slot] or fast < 0 or above.state[fast] != RESIDENT:
                return
            self.room.drop(level, node, at, end)
            end = at

    def _after_store(self, slots: Slots) -> None:
        """Blocks that just became resident are written below, now or later."""
        state = self.state
        if self.remote_writes is not None:
            self.remote_writes.stored(slots)
        if state.is_last(0) or not state.specs[-1].persistent:
            return
        if state.any_cold:
            self.demotion.write_cold(0, slots)
        if state.write_after_s is not None:
            self.demotion.write_later(0, slots, state.write_after_s)

    def _overdue(self, flight: Flight) -> Outcome:
        """The waiting ends, the hold does not: the job's slots are lost until its thread returns."""
        job, state = flight.job, self.state
        level = max(job.src_level, job.dst_level)
        state.lose(flight)
        state.counters[level].overdue_jobs += 1
        state.breakers[level].timed_out(state.now)
        for each, slots, _ in self._destinations(flight):
            table = state.residency.tables[each]
            self._fail(each, slots[table.state[slots] == WRITING])
            table.lose(slots)
        ok = np.zeros(job.n, dtype=np.bool_)
        if self.finds is not None:
            self.finds.fetched(flight, ok, "deadline")
        return Outcome(self.loads.came_back(flight, ok), job.id, ok, job.symbols is not None)

    def _lost_claims(self, slots: Slots) -> None:
        """Claims that could not be made. A slot that got a new life meanwhile is left alone."""
        for level, spec in enumerate(self.state.specs):
            if spec.persistent:
                self.state.counters[level].lost_claims += len(slots)
                states = self.state.residency.tables[level].state[slots]
                self._leave(level, slots[(states == RESIDENT) | (states == BAD)])

    def _judge(self, flight: Flight, result: JobResult) -> None:
        """What a job that came back in time tells of its slower level; also of an old epoch, for it may be a probe."""
        job, state = flight.job, self.state
        good, breaker = int(result.ok.sum()), state.breakers[max(job.src_level, job.dst_level)]
        told = result.reason == "missing" or (job.symbols is not None and result.reason == "checksum")
        if good == job.n or (good and result.reason == "checksum") or told:
            breaker.succeeded()
        elif result.reason == "deadline":
            breaker.timed_out(state.now)
        elif result.reason == "io":
            breaker.failed(state.now)
        else:
            breaker.undecided()

    def _count(self, flight: Flight, result: JobResult) -> None:
        """Counters and rates of a job that came back in time."""
        job, state = flight.job, self.state
        good = int(result.ok.sum())
        if job.kind == "probe" or (job.kind == "load" and good == job.n):
            took_s = result.waited_s + result.seconds
            state.costs[job.src_level].learn(flight.ahead_nbytes + result.nbytes, took_s if result.nbytes else 0.0)
            state.measured_at[job.src_level] = state.now
        if job.kind == "probe":
            return
        if job.kind == "load":
            source = state.counters[job.src_level]
            source.load_nbytes += result.nbytes
            source.load_seconds += result.seconds
            source.failed_reads += job.n - good
            if job.dst_level != CALLER:
                state.counters[job.dst_level].promoted += good
            return
        target = state.counters[job.dst_level]
        target.written += good
        target.store_nbytes += result.nbytes
        target.store_seconds += result.seconds
        target.failed_writes += job.n - good
        if job.src_level != CALLER:
            state.counters[job.src_level].demoted += good


def _is_late(message: JobResult | JobOverdue) -> bool:
    return isinstance(message, JobOverdue) or message.reason == "deadline"
