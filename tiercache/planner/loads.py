"""Loads: bring a prompt's blocks to level 0, or into the caller's rows, in jobs that credits allow."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiercache.index import Path
from tiercache.planner.demotion import Demotion
from tiercache.planner.state import Flight, PlannerState
from tiercache.slots import SlotState
from tiercache.types import CALLER, Bools, CopyJob, Idents, Slots

__all__ = ["Load", "Loads"]


@dataclass(slots=True)
class _Segment:
    """Blocks of one load that come from one level in one job. Its source slots are pinned until the job is over."""

    source: int
    src: Slots
    dst: Slots
    """Slots of level 0, or rows of the caller."""
    idents: Idents
    row: int
    also: tuple[int, Slots] | None = None


@dataclass(slots=True, eq=False)
class Load:
    """A load under way or done. Holds `slots` of level 0 until `Planner.release_load`."""

    id: int
    blocks: int
    """How many leading blocks it will bring at most; only falls."""
    endpoint: int
    """Caller rows, 0: to level 0."""
    slots: Slots
    """int32[blocks] of level 0; empty for a load into caller rows."""
    epoch: bytes
    segments: deque[_Segment] = field(default_factory=deque)
    waiting: set[int] = field(default_factory=set)
    """Jobs that must come back first, its own and joined ones."""
    done: bool = False
    by_level: tuple[int, ...] = ()
    """Blocks taken from each level when it was planned."""


class Loads:
    """Plans loads, submits their segments as credits allow, finishes them."""

    def __init__(self, state: PlannerState, demotion: Demotion) -> None:
        self.state = state
        self.demotion = demotion
        self._ids = itertools.count(1)
        self.open: dict[int, Load] = {}
        """Not done, or done and still held, by id."""
        self._queue: deque[Load] = deque()
        self._waiters: dict[int, list[Load]] = {}
        self._writers: dict[int, int] = {}
        """Level-0 slot that a load is filling -> its job (known once submitted)."""

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self, path: Path, want: int, endpoint: int) -> Load:
        """Start bringing the readable blocks among the first `want` of `path`. Mutates: slots, pins, outbox.

        The load may be shorter than wanted, also empty; it may be done at once.
        """
        state, residency = self.state, self.state.residency
        gathered = residency.index.gather(path)[:, :want]
        best = residency.best_level(residency.states(gathered), state.online_levels())
        missing = np.flatnonzero(best < 0)
        n = int(missing[0]) if len(missing) else len(best)
        refused = len(self._queue) >= state.limits.queued_loads
        if refused:
            state.totals.loads_refused += 1
            n = 0
        if not endpoint and not state.online(0):
            n = 0
        with state.keep(gathered):
            if endpoint:
                load = self._to_caller(path, gathered, best, n, endpoint)
            else:
                load = self._to_level(path, gathered, best, n)
        state.totals.loads += 1
        state.totals.loads_cut += int(load.blocks < want)
        counts = np.bincount(best[: load.blocks], minlength=residency.levels)
        load.by_level = tuple(int(each) for each in counts)
        for level, count in enumerate(load.by_level):
            state.counters[level].hits += count
        self.open[load.id] = load
        if load.segments:
            self._queue.append(load)
            self.pump()
        self._settle(load)
        return load

    def _to_level(self, path: Path, gathered: NDArray[np.int32], best: NDArray[np.int8], n: int) -> Load:
        """Into level 0: blocks there already are held, the others get slots and segments."""
        state, residency = self.state, self.state.residency
        n = min(n, state.hold_room(0))
        need = np.flatnonzero(gathered[0, :n] < 0)
        if len(need):
            got = self.demotion.make_room(0, len(need))
            if got < len(need):
                n = int(need[got])
                need = need[:got]
        fresh = residency.tables[0].take(len(need))
        gathered[0, need] = fresh
        self._place(path, need, fresh)
        slots = gathered[0, :n].copy()
        load = Load(next(self._ids), n, 0, slots, state.epoch)
        if n == 0:
            return load
        state.hold(0, slots)
        idents = self._idents(path, n)
        for begin, end in _stretches(need, best):
            at = need[begin:end]
            self._add_segment(load, int(best[at[0]]), gathered[int(best[at[0]]), at], fresh[begin:end], idents, at)
        for slot in slots[residency.tables[0].state[slots] == SlotState.WRITING].tolist():
            job = self._writers.get(slot)
            if job is not None:
                self._wait_for(load, job)
        return load

    def _to_caller(
        self, path: Path, gathered: NDArray[np.int32], best: NDArray[np.int8], n: int, endpoint: int
    ) -> Load:
        """Into the caller's rows; blocks from a persistent level also into the level above it where it is easy."""
        state, residency = self.state, self.state.residency
        load = Load(next(self._ids), n, endpoint, np.empty(0, dtype=np.int32), state.epoch)
        if n == 0:
            return load
        idents = self._idents(path, n)
        rows = np.arange(n, dtype=np.int32)
        also_rows = np.full(n, -1, dtype=np.int32)
        last = residency.levels - 1
        upper = last - 1
        if last > 0 and state.specs[last].persistent and state.online(upper):
            wanted = np.flatnonzero((best[:n] == last) & (gathered[upper, :n] < 0))
            wanted = wanted[: state.job_room(CALLER, upper)]
            wanted = wanted[: self.demotion.room.free(upper, len(wanted))]
            if len(wanted):
                also_rows[wanted] = residency.tables[upper].take(len(wanted))
                self._place(path, wanted, also_rows[wanted], upper)
        for begin, end in _stretches(rows, best):
            at = rows[begin:end]
            source = int(best[at[0]])
            also = (upper, also_rows[at]) if source == last and (also_rows[at] >= 0).any() else None
            self._add_segment(load, source, gathered[source, at], at, idents, at, also)
        return load

    def _place(self, path: Path, positions: NDArray[np.int64], slots: Slots, level: int = 0) -> None:
        """Give the blocks at these path positions (ascending) their slots."""
        starts = np.cumsum([0] + [take for _, take in path])
        node_of = np.searchsorted(starts, positions, side="right") - 1
        for begin, end in _stretches(positions, node_of):
            node = path[int(node_of[begin])][0]
            at = int(positions[begin] - starts[node_of[begin]])
            self.state.residency.place(node, at, level, slots[begin:end])

    @staticmethod
    def _idents(path: Path, n: int) -> Idents:
        return np.concatenate([node.idents[:take] for node, take in path])[:n]

    def _add_segment(
        self,
        load: Load,
        source: int,
        src: NDArray[np.int32],
        dst: NDArray[np.int32],
        idents: Idents,
        at: NDArray[np.int64] | NDArray[np.int32],
        also: tuple[int, Slots] | None = None,
    ) -> None:
        """Queue blocks at path positions `at` in jobs of at most `job_blocks`; pins their sources."""
        step = self.state.limits.job_blocks
        self.state.residency.pin(source, src.astype(np.int32))
        if also is not None:
            self.state.residency.pin(also[0], also[1][also[1] >= 0])
        for i in range(0, len(src), step):
            part = slice(i, i + step)
            second = None if also is None else (also[0], also[1][part])
            load.segments.append(
                _Segment(
                    source,
                    src[part].astype(np.int32),
                    dst[part].astype(np.int32),
                    idents[at[part]],
                    int(at[i]),
                    second,
                )
            )

    # -- submitting ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Submit queued segments, oldest load first, while credits last."""
        while self._queue:
            load = self._queue[0]
            while load.segments:
                segment = load.segments[0]
                target = CALLER if load.endpoint else 0
                if self.state.job_room(segment.source, target) < len(segment.src):
                    return
                load.segments.popleft()
                self._submit(load, segment, target)
            self._queue.popleft()

    def _submit(self, load: Load, segment: _Segment, target: int) -> None:
        state = self.state
        job = state.submit(
            "load",
            (segment.source, segment.src),
            (target, segment.dst),
            segment.idents,
            endpoint=load.endpoint,
            also=segment.also,
            owner=load.id,
            rows_at=segment.row,
        )
        self._unpin_segment(segment)
        self._wait_for(load, job)
        filled = _filled(state.jobs[job].job)
        for slot in filled.tolist():
            self._writers[slot] = job
        for other in self.open.values() if len(filled) else ():
            if other is not load and not other.done and np.isin(other.slots, filled).any():
                self._wait_for(other, job)

    def _wait_for(self, load: Load, job: int) -> None:
        if job not in load.waiting:
            load.waiting.add(job)
            self._waiters.setdefault(job, []).append(load)

    def _unpin_segment(self, segment: _Segment) -> None:
        self.state.residency.unpin(segment.source, segment.src)
        if segment.also is not None:
            self.state.residency.unpin(segment.also[0], segment.also[1][segment.also[1] >= 0])

    # -- finishing ----------------------------------------------------------------------------------------------

    def came_back(self, flight: Flight, ok: Bools) -> list[Load]:
        """A load's job is over (or overdue: ok all False). Returns the loads that are done by it."""
        job = flight.job
        for slot in _filled(job).tolist():
            self._writers.pop(slot, None)
        load = self.open.get(flight.owner)
        if load is not None and load.endpoint and not ok.all():
            load.blocks = min(load.blocks, flight.rows_at + int(np.argmin(ok)))
        waiting = self._waiters.pop(job.id, [])
        for each in waiting:
            each.waiting.discard(job.id)
        return [each for each in waiting if self._settle(each)]

    def _settle(self, load: Load) -> bool:
        """Is nothing left to wait for? Then fix how many blocks arrived and let the rest go."""
        if load.done or load.segments or load.waiting:
            return False
        if not load.endpoint and load.blocks:
            table = self.state.residency.tables[0]
            state = table.state[load.slots]
            if load.epoch == self.state.epoch and (state == SlotState.WRITING).any():
                return False
            good = state == SlotState.RESIDENT
            self._cut(load, len(good) if good.all() else int(np.argmin(good)))
        load.done = True
        if load.blocks == 0 or load.endpoint:
            del self.open[load.id]
        return True

    def _cut(self, load: Load, n: int) -> None:
        """Keep the first n blocks only."""
        if n < load.blocks:
            self.state.let_go(0, load.slots[n:])
            load.slots = load.slots[:n]
            load.blocks = n

    def release(self, load: Load) -> None:
        """End a done load's hold. Calling it twice does nothing."""
        if load.done and self.open.pop(load.id, None) is not None:
            self.state.let_go(0, load.slots)

    def end_all(self) -> list[Load]:
        """New epoch: nothing that is queued is loaded any more. Returns loads that are done by it, empty."""
        self._queue.clear()
        ended = []
        for load in list(self.open.values()):
            if load.done:
                continue
            for segment in load.segments:
                self._unpin_segment(segment)
            load.segments.clear()
            if load.endpoint:
                load.blocks = 0
            else:
                self._cut(load, 0)
            if self._settle(load):
                ended.append(load)
        return ended


def _filled(job: CopyJob) -> Slots:
    """Slots of level 0 that a load's job fills."""
    if job.dst_level == 0:
        return job.dst_slots
    if job.also_level == 0 and job.also_slots is not None:
        return job.also_slots[job.also_slots >= 0]
    return np.empty(0, dtype=np.int32)


def _stretches(positions: NDArray[np.int64] | NDArray[np.int32], label: NDArray[np.generic]) -> list[tuple[int, int]]:
    """Bounds of the stretches of `positions` that follow each other and carry one label.

    `label` is per path position where it is longer than `positions`, else per entry.
    """
    if len(positions) == 0:
        return []
    mine = label if len(label) == len(positions) else label[positions]
    cuts = np.flatnonzero((np.diff(positions) != 1) | (mine[1:] != mine[:-1])) + 1
    bounds = [0, *cuts.tolist(), len(positions)]
    return list(itertools.pairwise(bounds))
