"""Loads: bring a prompt's blocks to level 0, or into the caller's rows, in jobs that credits allow."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import as_index, count_levels, counting, first_false, first_true, present, stretches_of, true_at
from tiercache.index import Path
from tiercache.planner.demotion import Demotion
from tiercache.planner.fetches import Fetches, source_slots
from tiercache.planner.load import Load, Segment, filled_slots
from tiercache.planner.quota import Quota
from tiercache.planner.state import Flight, PlannerState
from tiercache.slots import RESIDENT, WRITING
from tiercache.types import CALLER, Bools, Idents, Slots

__all__ = ["Load", "Loads"]


class Loads:
    """Plans loads, submits their segments as credits allow, finishes them."""

    def __init__(self, state: PlannerState, demotion: Demotion, quota: Quota | None = None) -> None:
        self.state = state
        self.demotion = demotion
        self.fetches = Fetches(state, demotion, quota)
        self._ids = itertools.count(1)
        self.open: dict[int, Load] = {}
        """Not done, or done and still held, by id."""
        self._queue: deque[Load] = deque()
        self._may_join = False
        """May the load that is planned now take from level 0 what is yet to come there?"""
        self._waiters: dict[int, list[Load]] = {}
        self._filling: NDArray[np.int64] = np.zeros(state.specs[0].capacity, dtype=np.int64)
        """Per slot of level 0 the load that is going to fill it by a job not submitted yet, 0: none."""

    # -- planning -----------------------------------------------------------------------------------------------

    def plan(self, path: Path, want: int, endpoint: int, symbols: bytes = b"", more: int = 0, start: int = 0) -> Load:
        """Start bringing the readable blocks among `[start, want)` of `path`. Mutates: slots, pins, outbox.

        start: above 0 only into the caller's rows, of which those before it are not touched. Nothing behind a hole
        is brought, also where the hole is before it.

        symbols: of the prompt, where there is a key tier. more: blocks of it after the path to fetch from there; those
        that get slots are added to the path. The load may be shorter than wanted, also empty; it may be done at once.
        """
        state, residency = self.state, self.state.residency
        gathered = residency.index.gather(path)[:, :want]
        best = self.sources(path, gathered, bool(endpoint))
        n = first_true(best < 0)
        if symbols and not more and not (best == residency.levels).any():
            symbols = b""
        if more and n == path.blocks:
            n += more
            gathered = np.concatenate((gathered, np.full((residency.levels, more), -1, dtype=np.int32)), axis=1)
            best = np.concatenate((best, np.full(more, residency.levels, dtype=np.int8)))
        refused = not self.has_room()
        if refused:
            state.totals.loads_refused += 1
            n = 0
        if not endpoint and not state.online(0):
            n = 0
        if n <= start:
            start = n = 0
        if endpoint:
            load = self._to_caller(path, gathered, best, (start, n), endpoint, symbols)
        else:
            load = self._to_level(path, gathered, best, n, symbols)
        state.totals.loads += 1
        state.totals.loads_cut += int(load.blocks < want)
        load.by_level = count_levels(best[start : load.blocks], len(state.counters))
        for level, count in enumerate(load.by_level):
            state.counters[level].hits += count
        self.open[load.id] = load
        if load.segments:
            self._queue.append(load)
            self.pump()
        self._settle(load)
        return load

    def has_room(self) -> bool:
        """Is another load queued, or are there too many?"""
        return len(self._queue) < self.state.limits.queued_loads

    def sources(self, path: Path, gathered: NDArray[np.int32], rows: bool) -> NDArray[np.int8]:
        """The level that each block comes from, -1: from none. What is being fetched from the key tier comes from
        there: a load into slots joins it, one into the caller's `rows` reads it once more. What another load is
        bringing to level 0 from a slower level comes to the caller's rows from level 0, once it has come."""
        residency, online = self.state.residency, self.state.online_levels()
        self._may_join = False
        if online[0] and all(map(residency.is_whole, path.nodes)):
            return np.zeros(gathered.shape[1], dtype=np.int8)
        states = residency.states(gathered)
        best = residency.best_level(states, online)
        self._may_join = rows and online[0]
        if self._may_join and any(not each.done for each in self.open.values() if not each.endpoint):
            coming = true_at((best > 0) & (states[0] == WRITING))
            best[coming[self._comes(gathered[0, coming])]] = 0
        if self.state.remote is not None and (not rows or self.state.online(residency.levels)):
            lacking = true_at(best < 0)
            best[lacking[self.is_fetched(gathered[0, lacking])]] = residency.levels
        return best

    def _comes(self, slots: NDArray[np.int32]) -> Bools:
        """Per slot of level 0 that is being filled: does a load to level 0 fill it?"""
        jobs, loads = self.state.filler[slots], self._filling[slots]
        by_job = [job for job in np.unique(jobs).tolist() if job and self.state.jobs[job].job.dst_level == 0]
        by_load = [load for load in np.unique(loads).tolist() if load and not self.open[load].endpoint]
        return np.asarray(np.isin(jobs, by_job) | np.isin(loads, by_load))

    def is_fetched(self, slots: NDArray[np.int32]) -> Bools:
        """Per slot of level 0 (-1: none): is a load bringing a block there, which may have no other copy?"""
        fetched = slots >= 0
        mine = slots[fetched]
        loading, fillers = self._filling[mine] > 0, self.state.filler[mine]
        for job in set(fillers.tolist()):
            if job and self.state.jobs[job].job.kind == "load":
                loading |= fillers == job
        fetched[fetched] = loading & (self.state.residency.tables[0].state[mine] == WRITING)
        return fetched

    def _to_level(
        self, path: Path, gathered: NDArray[np.int32], best: NDArray[np.int8], n: int, symbols: bytes
    ) -> Load:
        """Into level 0: blocks there already are held, the others get slots and segments."""
        state, residency = self.state, self.state.residency
        n = state.may_hold(0, gathered[0, :n])
        need = true_at(gathered[0, :n] < 0)
        if len(need):
            with state.keep(gathered):
                got = self.fetches.make_room(path, need)
            if got < len(need):
                n = int(need[got])
                need = need[:got]
        fresh = residency.tables[0].take(len(need))
        if len(need):
            if n > path.blocks:
                self.fetches.grow(path, symbols, self.fetches.idents(path, symbols, n - path.blocks))
            gathered[0, need] = fresh
            residency.place_on(path, need, fresh)
        slots = gathered[0, :n].copy()
        load = Load(next(self._ids), n, 0, slots, state.epoch, symbols=symbols)
        if n == 0:
            return load
        state.hold(0, slots)
        idents = path.idents()[:n]
        writing = residency.tables[0].state[as_index(slots)] == WRITING
        if writing.any():
            self._join(load, slots[writing])
        for begin, end in stretches_of(need, best):
            first = int(need[begin])
            source, at = int(best[first]), slice(first, first + end - begin)
            self._add_segment(load, source, source_slots(gathered, source, at), fresh[begin:end], idents[at], first)
        return load

    def _join(self, load: Load, slots: Slots) -> None:
        """Wait for whatever fills these slots: jobs of loads and stores, or loads that have yet to submit one."""
        for job in np.unique(self.state.filler[slots]).tolist():
            if job:
                self._wait_for(load, job)
        for other in np.unique(self._filling[slots]).tolist():
            if other:
                self.open[other].joiners.append(load)

    def _to_caller(
        self,
        path: Path,
        gathered: NDArray[np.int32],
        best: NDArray[np.int8],
        part: tuple[int, int],
        endpoint: int,
        symbols: bytes,
    ) -> Load:
        """Blocks `part` of the path into the caller's rows; blocks from a persistent level also into the level above it
        where it is easy, those from the key tier also into the slowest level in memory as far as the quota allows."""
        state, residency = self.state, self.state.residency
        start, n = part
        load = Load(next(self._ids), n, endpoint, np.empty(0, dtype=np.int32), state.epoch, symbols=symbols)
        if n == 0:
            return load
        known, idents = path.blocks, path.idents()[:n]
        if n > known:
            idents = np.concatenate((idents, self.fetches.idents(path, symbols, n - known)))
        rows = counting(start, n)
        also_rows = np.full(n, -1, dtype=np.int32)
        last = residency.levels - 1
        upper = last - 1
        if last > 0 and state.specs[last].persistent and state.online(upper):
            here = min(n, known)
            wanted = true_at((best[:here] == last) & (gathered[upper, :here] < 0) & ~self.fetches.cold(path, here))
            wanted = wanted[wanted >= start]
            wanted = wanted[: state.job_room(CALLER, upper)]
            if len(wanted):
                with state.keep(gathered):
                    wanted = wanted[: self.demotion.room.free(upper, len(wanted))]
            if len(wanted):
                also_rows[wanted] = residency.tables[upper].take(len(wanted))
                residency.place_on(path, wanted, also_rows[wanted], upper)
        if n > known >= start:
            upper = state.memory_level
            with state.keep(gathered):
                slots = self.fetches.take(upper, n - known)
            if len(slots):
                also_rows[known : known + len(slots)] = slots
                self.fetches.grow(path, symbols, idents[known : known + len(slots)])
                residency.place_on(path, np.arange(known, known + len(slots)), slots, upper)
        for begin, end in stretches_of(rows, best[start:n]):
            first, at = start + begin, slice(start + begin, start + end)
            source = int(best[first])
            also = (upper, also_rows[at]) if source >= last and (also_rows[at] >= 0).any() else None
            slots = source_slots(gathered, source, at)
            self._add_segment(load, source, slots, rows[begin:end], idents[at], first, also)
        return load

    def _add_segment(
        self,
        load: Load,
        source: int,
        src: NDArray[np.int32],
        dst: NDArray[np.int32],
        idents: Idents,
        row: int,
        also: tuple[int, Slots] | None = None,
    ) -> None:
        """Queue blocks from path position `row` on in jobs of at most `load_job_blocks`; pins their sources."""
        specs, step = self.state.specs, self.fetches.job_blocks()
        if source < len(specs):
            levels = [source] + [0] * (not load.endpoint) + ([also[0]] if also is not None else [])
            step = self.state.limits.load_job_blocks([specs[level] for level in levels])
            self.state.residency.pin(source, src.astype(np.int32))
        if also is not None:
            self.state.residency.pin(also[0], present(also[1]))
        self._filling[as_index(filled_slots(load, dst, also))] = load.id
        for i in range(0, len(src), step):
            part = slice(i, i + step)
            self.state.credits[source].queued += len(src[part])
            second = None if also is None else (also[0], also[1][part])
            slots = src[part].astype(np.int32)
            joins = self._may_join and source == 0 and not self.state.readable(0, slots).all()
            load.joins |= joins
            load.segments.append(
                Segment(source, slots, dst[part].astype(np.int32), idents[part], row + i, second, joins)
            )

    # -- submitting ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Submit queued segments, oldest load first, while credits last. A load that waits holds up only those that
        need the credits which it lacks."""
        lacking: set[tuple[str, int]] = set()
        for load in tuple(self._queue):
            while load.segments:
                short = self._lacks(load, load.segments[0], lacking)
                if short:
                    lacking |= short
                    break
                self._submit(load, load.segments.popleft())
        self._queue = deque(load for load in self._queue if load.segments)

    def _lacks(self, load: Load, segment: Segment, lacking: set[tuple[str, int]]) -> set[tuple[str, int]]:
        """Ends for which there are no credits, or for which an older load waits."""
        if ("out", segment.source) in lacking:
            return {("out", segment.source)}
        if self._awaits(segment):
            return {("fill", load.id)}
        state, ends = self.state, {("out", segment.source): len(segment.src)}
        if not load.endpoint:
            ends["in", 0] = len(segment.dst)
        elif segment.also is not None:
            ends["in", segment.also[0]] = int((segment.also[1] >= 0).sum())
        short = lacking & ends.keys()
        for (way, level), blocks in ends.items():
            room = state.outbound_room(level) if way == "out" else state.inbound_room(level)
            if room < blocks:
                short.add((way, level))
        jobs, source = state.credits[segment.source].jobs, segment.source
        if not (state.takes_another(source, jobs) and state.online(source)):
            short.add(("out", segment.source))
        return short

    def _awaits(self, segment: Segment) -> bool:
        """Is what this segment takes from level 0 yet to come there, or did it not come?"""
        if segment.joins:
            segment.joins = not self.state.readable(0, segment.src).all()
        return segment.joins

    def fail_unfilled(self) -> list[Load]:
        """Give up what was to be taken from level 0 and did not come there. Returns loads that are done by it."""
        changed, state = [], self.state.residency.tables[0].state
        for load in self._queue:
            for segment in [each for each in load.segments if each.joins] if load.joins else ():
                if not np.isin(state[segment.src], (WRITING, RESIDENT)).all():
                    self._drop_segment(load, segment)
                    changed.append(load)
        if not changed:
            return []
        self._queue = deque(load for load in self._queue if load.segments)
        return [load for load in changed if not load.done and self._settle(load)]

    def _submit(self, load: Load, segment: Segment) -> None:
        self.state.credits[segment.source].queued -= len(segment.src)
        job = self.state.submit(
            "load",
            (segment.source, segment.src),
            (CALLER if load.endpoint else 0, segment.dst),
            segment.idents,
            endpoint=load.endpoint,
            also=segment.also,
            owner=load.id,
            rows_at=segment.row,
            pinned=True,
            symbols=load.symbols if segment.source == len(self.state.specs) else None,
        )
        self._wait_for(load, job)
        filled = filled_slots(load, segment.dst, segment.also)
        self._filling[as_index(filled)] = 0
        for other in load.joiners:
            if not other.done and np.isin(other.slots, filled).any():
                self._wait_for(other, job)

    def fail_offline(self, late: bool = False) -> list[Load]:
        """Queued segments are not loaded any more from levels that went offline; nor from a key tier that failed and
        takes no more for now, or that was `late` with a job: they would wait, after what they have waited already, for
        others that may be late too. Returns loads that are done by it."""
        given_up = {level for level in range(len(self.state.breakers)) if self.state.is_given_up(level)}
        if late or self.state.key_room() <= 0:
            given_up.add(len(self.state.specs))
        return self._give_up(given_up, self._queue) if given_up else []

    def give_up_new(self, load: Load) -> None:
        """A load that was just planned does not wait for a key tier that failed and takes no more for now. Blocks that
        were to come from there leave the tree: what was noted of its path is noted before."""
        if load.segments and self.state.key_room() <= 0:
            self._give_up({len(self.state.specs)}, (load,))

    def _give_up(self, levels: set[int], loads: Iterable[Load]) -> list[Load]:
        changed: list[Load] = []
        for load in loads:
            lost = [each for each in load.segments if each.source in levels]
            for segment in lost:
                self._drop_segment(load, segment)
            if lost:
                changed.append(load)
        self._queue = deque(load for load in self._queue if load.segments)
        return [each for load in changed for each in (load, *load.joiners) if self._settle(each)]

    def _drop_segment(self, load: Load, segment: Segment) -> None:
        room = self.demotion.room
        load.segments.remove(segment)
        if load.endpoint:
            load.blocks = min(load.blocks, segment.row)
        else:
            room.lose_copies(0, segment.dst)
        if segment.also is not None:
            room.lose_copies(segment.also[0], present(segment.also[1]))
        self._filling[as_index(filled_slots(load, segment.dst, segment.also))] = 0
        self._unpin_segment(segment)

    def _wait_for(self, load: Load, job: int) -> None:
        if job not in load.waiting:
            load.waiting.add(job)
            self._waiters.setdefault(job, []).append(load)

    def _unpin_segment(self, segment: Segment) -> None:
        """A segment is not submitted any more."""
        self.state.credits[segment.source].queued -= len(segment.src)
        if segment.source < len(self.state.specs):
            self.state.residency.unpin(segment.source, segment.src)
        if segment.also is not None:
            self.state.residency.unpin(segment.also[0], present(segment.also[1]))

    # -- finishing ----------------------------------------------------------------------------------------------

    def came_back(self, flight: Flight, ok: Bools) -> list[Load]:
        """A load's job is over (or overdue: ok all False). Returns the loads that are done by it."""
        job = flight.job
        load = self.open.get(flight.owner)
        if load is not None and load.endpoint and not ok.all():
            load.blocks = min(load.blocks, flight.rows_at + first_false(ok))
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
            state = table.state[as_index(load.slots)]
            if load.epoch == self.state.epoch and (state == WRITING).any():
                return False
            good = state == RESIDENT
            self._cut(load, first_false(good))
        load.done = True
        if load.released and not load.endpoint:
            self._cut(load, 0)
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
        """End a load's hold: now, or when it is done, then it comes back empty. Calling it twice does nothing."""
        load.released = True
        if load.done and self.open.pop(load.id, None) is not None:
            self.state.let_go(0, load.slots)

    def end_all(self) -> list[Load]:
        """New epoch: nothing that is queued is loaded any more. Returns loads that are done by it, empty."""
        self._queue.clear()
        self._filling[:] = 0
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
