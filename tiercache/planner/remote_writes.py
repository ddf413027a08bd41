"""Remote writes: copies of blocks in memory to a key tier, for other caches to find. Nothing ever waits for one.

What may be written is decided when a store's blocks arrived, or when blocks are about to leave memory; it queues,
largest runs first, and is dropped where it cannot be sent soon. A block that left its slot meanwhile is dropped too:
what is sent is compared with what was queued. A job pins its source until its result, or until it is overdue: its
thread has the bytes in staging by then, so that a key tier that hangs holds no slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedDict

from tiercache.arrays import first_true, stretches_of, true_at
from tiercache.index import Node
from tiercache.planner.demotion import Demotion
from tiercache.planner.finds import Finds
from tiercache.planner.hints import THERE
from tiercache.planner.state import PlannerState, RemoteLimits
from tiercache.remote.guard import WriteRate, job_blocks
from tiercache.slots import RESIDENT
from tiercache.types import COLD, Bools, CopyJob, Idents, JobOverdue, JobResult, Slots

__all__ = ["RemoteWrites", "Run", "Sent"]

_LOOKED_AT = 64
"""Nodes of either kind that one look ahead goes through; bounds its cost."""


@dataclass(slots=True, eq=False)
class Run:
    """Blocks of one prompt that wait to be written, in order."""

    level: int
    slots: Slots
    positions: NDArray[np.int32]
    """In the prompt."""
    idents: Idents
    at: int = 0
    """How many of them are done with."""
    symbols: bytes | None = None
    """Of the prompt; made when the first of them is sent."""

    @property
    def left(self) -> int:
        """How many wait still."""
        return len(self.slots) - self.at


@dataclass(slots=True, eq=False)
class Sent:
    """A job under way."""

    job: CopyJob
    run: Run
    sent_at: float
    overdue: bool = False
    """It has its thread only: neither slots nor credits."""
    stale: bool = False
    """The epoch changed under it."""


class RemoteWrites:
    """See the module. Mutates its queue, pins, credits, hints, counters, the outbox and the remote level's breaker."""

    def __init__(self, state: PlannerState, finds: Finds, demotion: Demotion, limits: RemoteLimits) -> None:
        self.state = state
        self.finds = finds
        self.demotion = demotion
        self.limits = limits
        self.level = finds.level
        self.counters = finds.counters
        self.rate = WriteRate(max(1, limits.write_threads))
        self.enabled = True
        """Do stores go on? Else nothing is written either."""
        self.under_way: dict[int, Sent] = {}
        """By job; overdue ones too, until their threads return."""
        self.waiting_blocks = 0
        self._queue: SortedDict[tuple[int, int], Run] = SortedDict()
        """Whole runs, the largest first."""
        self._current: Run | None = None
        """The run that is being sent."""
        self._numbers = 0
        self._looked_at = 0
        size = 1 << max(10, (limits.hint_blocks - 1).bit_length())
        self._marks: Idents = np.zeros(size, dtype=np.uint64)
        """By the last bits of its ident: the block that was queued, or came from the key tier, last. It is not queued
        again."""
        self._mask = np.uint64(size - 1)
        if limits.write == "eviction":
            demotion.leaving = self._leaves

    @property
    def runs(self) -> list[Run]:
        """All that wait, in the order in which they go."""
        return [*([self._current] if self._current is not None else []), *self._queue.values()]

    @property
    def is_idle(self) -> bool:
        """Does nothing wait or go on, but for what is overdue?"""
        return not self.waiting_blocks and len(self.under_way) == self.lost

    @property
    def is_stuck(self) -> bool:
        """Does something wait, and nothing go on after which it could be sent?"""
        return bool(self.waiting_blocks) and len(self.under_way) == self.lost

    @property
    def lost(self) -> int:
        """Jobs under way that are overdue."""
        return sum(sent.overdue for sent in self.under_way.values())

    def why_not(self) -> str:
        """Why nothing may be queued now; "" where it may."""
        if not self.state.key_breaker.enabled or not self.enabled:
            return "off"
        return "" if self.state.online(self.level) and self.lost < self.limits.write_threads else "offline"

    # -- what is to be written ----------------------------------------------------------------------------------

    def stored(self, slots: Slots) -> None:
        """A store brought blocks into these slots of level 0. If they were written before, that may be gone."""
        if self.limits.write == "never":
            return
        runs = self.state.residency.runs_of(0, slots)
        for node, begin, end in runs:
            self._unmark(node.idents[begin:end])
        if self.limits.write != "prefill":
            return
        why_not = self.why_not()
        for node, begin, end in reversed(runs):  # the deepest brings those above it along
            if why_not:
                self._drop(why_not, end - begin)
                path = self.state.residency.path_to(node, end)
                self.finds.probe(path.nodes[0].run[: self.state.residency.width], 0)
            else:
                self._offer(0, node, end)

    def came(self, idents: Idents) -> None:
        """These blocks came from the key tier just now: it has them."""
        self._mark(idents)

    def _look_ahead(self) -> None:
        """Queue the blocks that leave memory next, where that is asked for. (Those that are copied down before are
        queued when that is decided: then they are in use, and in no order of eviction.)"""
        if self.limits.write != "eviction" or self.why_not():
            return
        state, victims, level = self.state, self.demotion.victims, self.state.memory_level
        table = state.residency.tables[level]
        ahead = max(2 * self.demotion.watermark(level), table.capacity // 16, 1)
        ahead = max(ahead, min(2 * self.demotion.largest_store(), table.capacity // 4))
        if table.free >= ahead or table.taken - self._looked_at < max(1, ahead // 4):
            return
        self._looked_at = table.taken
        victims.refile(level)
        for droppable in (True, False):
            covered = table.free
            for n in range(_LOOKED_AT):
                victim = victims.nth(level, droppable, n) if covered < ahead else None
                if victim is None:
                    break
                node, last = victim
                covered += last + 1 - victims.coldest_run(level, node, last, ahead - covered, droppable)
                self._offer(level, node, last + 1)

    def _leaves(self, level: int, node: Node, end: int) -> None:
        if level == self.state.memory_level and not self.why_not():
            self._offer(level, node, end)

    def _offer(self, level: int, node: Node, end: int) -> None:
        """Queue what of the path to block `end - 1` of a run is readable in a level of memory, and was not queued yet.

        Left out are partial blocks, those too far into their prompt, those with an end in time (nobody could take them
        back there), COLD ones where there is a disk for them, and what hangs below a block that is left out.
        """
        if node.depth + end < self.limits.min_blocks:
            return
        state = self.state.residency.tables[level].state
        parts: list[tuple[Slots, NDArray[np.int32], Idents]] = []
        each, take = node, end
        while each.parent is not None:
            allowed = self._allowed(each, take)
            if allowed < take:
                parts.clear()
            row, idents = each.slots[:allowed, level], each.idents[:allowed]
            marked = self._marked(idents)
            here = true_at((row >= 0) & (state[row] == RESIDENT) & ~marked)
            if len(here):
                parts.append((row[here].astype(np.int32), (each.depth + here).astype(np.int32), idents[here]))
            if marked.any():
                break  # those above were looked at when it was queued
            each = each.parent
            take = each.n
        if parts:
            slots, positions, idents = (np.concatenate(arrays) for arrays in zip(*reversed(parts), strict=True))
            self._enqueue(Run(level, slots, positions, idents))

    def _allowed(self, node: Node, take: int) -> int:
        """So many of the first `take` blocks of a run may be written."""
        take = max(0, min(take, node.n - node.partial, self.finds.most - node.depth))
        if node.hints is None or not take:
            return take
        hints = node.hints[:take]
        wrong = hints["expires"] < np.inf
        if self.state.specs[-1].persistent:
            wrong |= hints["priority"] == COLD
        return first_true(wrong)

    def _enqueue(self, run: Run) -> None:
        self._mark(run.idents)
        most = self.limits.queued_write_blocks
        if run.left > most:
            self._drop("full", run.left - most)
            self._unmark(run.idents[most:])
            run = Run(run.level, run.slots[:most], run.positions[:most], run.idents[:most])
        self._numbers += 1
        self._queue[-run.left, self._numbers] = run
        self.waiting_blocks += run.left
        self.counters.write_blocks_queued += run.left
        while self._queue and (len(self._queue) > self.limits.queued_writes or self.waiting_blocks > most):
            self._give_up(self._queue.popitem(-1)[1], "full")  # the smallest

    def _give_up(self, run: Run, why: str) -> None:
        """Nothing more of this run is sent."""
        if run is self._current:
            self._current = None
        self._drop(why, run.left)
        self._unmark(run.idents[run.at :])
        self.waiting_blocks -= run.left
        run.at = len(run.slots)

    def _drop(self, why: str, blocks: int) -> None:
        dropped = self.counters.writes_dropped
        if blocks:
            dropped[why] = dropped.get(why, 0) + blocks

    # -- marks --------------------------------------------------------------------------------------------------

    def _at(self, idents: Idents) -> NDArray[np.int64]:
        return (idents & self._mask).astype(np.int64)

    def _marked(self, idents: Idents) -> Bools:
        return np.asarray(self._marks[self._at(idents)] == idents)

    def _mark(self, idents: Idents) -> None:
        self._marks[self._at(idents)] = idents

    def _unmark(self, idents: Idents) -> None:
        at = self._at(idents)
        self._marks[at[self._marks[at] == idents]] = 0

    # -- sending ------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Queue what leaves memory next; send what waits while threads are left for it, behind all loads and finds;
        drop it where nothing may be written."""
        self._fail_offline()
        self._look_ahead()
        while self._may_send() and self._send_some():
            pass

    def _may_send(self) -> bool:
        state = self.state
        return (
            self.waiting_blocks > 0
            and not self.finds.waiting
            and not state.credits[self.level].queued
            and len(self.under_way) < self.limits.write_threads
            and len(self.under_way) - self.lost < self.rate.jobs
            and state.key_room() > 0
            and not self.why_not()
        )

    def _send_some(self) -> bool:
        """Send the next job, or find that nothing of it is there any more. False where it must wait."""
        if self._current is None:
            self._current = self._queue.popitem(0)[1]
        run, state = self._current, self.state
        nbytes = state.specs[0].block_nbytes
        most = min(state.limits.job_blocks, job_blocks(nbytes), max(1, int(self.rate.job_nbytes // nbytes)))
        room = min(state.share_room(run.level), most)
        if room <= 0:
            return False
        if run.symbols is None:
            alive = self._alive(run.level, run.slots, run.idents)
            if not alive.any():
                self._give_up(run, "gone")
                return True
            run.symbols = self._symbols(run.level, int(run.slots[alive][-1]))
        part = slice(run.at, run.at + room)
        slots, positions, idents = run.slots[part], run.positions[part], run.idents[part]
        alive = self._alive(run.level, slots, idents)
        alive &= positions < len(run.symbols) // state.residency.width
        known = alive & self.finds.hints.there(run.symbols, positions, state.now)
        self._drop("gone", len(slots) - int(alive.sum()))
        self._unmark(idents[~alive])
        self._drop("known", int(known.sum()))
        run.at += len(slots)
        self.waiting_blocks -= len(slots)
        if not run.left:
            self._current = None
        wanted = alive & ~known
        if wanted.any():
            self._submit(run, slots[wanted], positions[wanted], idents[wanted])
        return True

    def _alive(self, level: int, slots: Slots, idents: Idents) -> Bools:
        """Which of these slots hold, readable, the block that they held when it was queued."""
        residency = self.state.residency
        table = residency.tables[level]
        alive: Bools = table.state[slots] == RESIDENT
        now = [node.idents[begin:end] for node, begin, end in residency.runs_of(level, slots[alive])]
        if now:
            alive[alive] = np.concatenate(now) == idents[alive]
        return alive

    def _symbols(self, level: int, slot: int) -> bytes:
        """Symbols of the prompt up to the block in this slot."""
        residency = self.state.residency
        table = residency.tables[level]
        node = residency.index.nodes[int(table.owner[slot])]
        path = residency.path_to(node, int(table.pos[slot]) + 1)
        return b"".join(bytes(each.run[: take * residency.width]) for each, take in path)

    def _submit(self, run: Run, slots: Slots, positions: NDArray[np.int32], idents: Idents) -> None:
        state, nbytes = self.state, len(slots) * self.state.specs[0].block_nbytes
        job = CopyJob(
            id=next(state.ids),
            kind="write",
            epoch=state.epoch,
            src_level=run.level,
            src_slots=slots,
            dst_level=self.level,
            dst_slots=positions,
            idents=idents,
            deadline_s=self.limits.write_deadline_s,
            start_after_s=self.rate.wait_s(state.now),
            symbols=run.symbols,
        )
        self.rate.sent(nbytes, state.now)
        state.residency.pin(run.level, slots)
        state.credits[run.level].shared += job.n
        state.credits[self.level].others += 1
        self.under_way[job.id] = Sent(job, run, state.now + job.start_after_s)
        self.counters.writes += 1
        state.outbox.append(job)

    # -- what became of it --------------------------------------------------------------------------------------

    def take(self, message: JobResult | JobOverdue) -> None:
        """The mover says what became of one of these."""
        sent, state = self.under_way[message.job], self.state
        job, breaker = sent.job, state.key_breaker
        if isinstance(message, JobOverdue):
            self._release(sent)
            sent.overdue = True
            state.counters[self.level].overdue_jobs += 1
            self.counters.timeouts += 1
            self.counters.write_timeouts += 1
            breaker.failed(state.now)
            self.rate.badly(sent.sent_at, state.now)
            self._failed(sent, np.ones(job.n, dtype=np.bool_), "deadline")
            return
        del self.under_way[message.job]
        if sent.overdue:
            return
        self._release(sent)
        taken = int(message.ok.sum())
        self.counters.timeouts += message.reason == "deadline"
        self.counters.write_timeouts += message.reason == "deadline"
        if message.reason in ("io", "deadline"):
            breaker.failed(state.now)
            self.rate.badly(sent.sent_at, state.now)
        elif message.reason == "refused":
            breaker.succeeded()
            self.rate.badly(sent.sent_at, state.now)
        elif taken == job.n:
            breaker.succeeded()
            self.rate.well(message.nbytes, message.seconds, sent.sent_at, state.now)
        self.rate.told(message.pressure, sent.sent_at, state.now)
        self.counters.written += taken
        if not sent.stale:
            self._is_there(job, message.ok)
        self._failed(sent, ~message.ok, message.reason)

    def _release(self, sent: Sent) -> None:
        """Its source is not read any more."""
        job = sent.job
        self.state.residency.unpin(job.src_level, job.src_slots)
        self.state.credits[job.src_level].shared -= job.n
        self.state.credits[self.level].others -= 1

    def _is_there(self, job: CopyJob, ok: Bools) -> None:
        assert job.symbols is not None
        positions, until = job.positions[ok], self.state.now + self.finds.limits.hint_s
        for begin, end in stretches_of(positions, positions - np.arange(len(positions))):
            self.finds.hints.note(job.symbols, int(positions[begin]), int(positions[end - 1]) + 1, THERE, until)

    def _failed(self, sent: Sent, failed: Bools, reason: str) -> None:
        """Blocks that were not taken, and what waits behind them in their run: others could not reach that."""
        blocks = int(failed.sum())
        if not blocks:
            return
        if reason == "refused":
            self.counters.writes_refused += blocks
        else:
            self._drop("failed" if reason == "io" else reason, blocks)
            if not sent.stale:
                self._unmark(sent.job.idents[failed])
        self._give_up(sent.run, "behind")

    def _fail_offline(self) -> None:
        """What waits while nothing may be written is not written any more."""
        if self.waiting_blocks and (why_not := self.why_not()):
            for run in self.runs:
                self._give_up(run, why_not)
            self._queue.clear()

    def new_epoch(self) -> None:
        """Blocks are other ones now."""
        for run in self.runs:
            self._give_up(run, "stale")
        self._queue.clear()
        self._marks[:] = 0
        for sent in self.under_way.values():
            sent.stale = True
