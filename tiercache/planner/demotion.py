"""Demotion: makes room, at once by dropping, ahead of need by copying the coldest blocks down."""

from __future__ import annotations

from collections import deque

import numpy as np

from tiercache.index import Node
from tiercache.planner.room import Room
from tiercache.planner.state import PlannerState
from tiercache.planner.victims import Victims
from tiercache.planner.writes import Writes
from tiercache.slots import SlotState
from tiercache.types import Bools, Expedite, Slots

__all__ = ["Demotion"]

_REMEMBERED_STORES = 1000


class Demotion:
    """Watermarks, `tend`, and the backlog of blocks that wait to be written."""

    def __init__(self, state: PlannerState, victims: Victims, room: Room, writes: Writes) -> None:
        self.state = state
        self.victims = victims
        self.room = room
        self.writes = writes
        self._recent: deque[int] = deque(maxlen=_REMEMBERED_STORES)
        self._largest = 0
        self.shortfall = [0] * len(state.specs)
        """Blocks that the last cut store or load lacked, per level; part of the next target."""

    # -- at once ------------------------------------------------------------------------------------------------

    def make_room(self, level: int, want: int) -> int:
        """Free up to `want` slots of `level` without waiting; returns min(want, free slots).

        Drops what may be dropped. Where that is not enough, starts copies down (room for the next time), and what
        cannot be copied at all is dropped in place, leaf first. What must stay is pinned by the caller
        (`PlannerState.keep`).
        """
        got = self.room.free(level, want)
        if got == want or self.state.is_last(level):
            return got
        if self.state.level_below(level) is None or self.copy_down(level, want - got) == "full":
            self._drop_in_place(level, want)
        got = self.room.free(level, want)
        self.shortfall[level] = max(self.shortfall[level], want - got)
        return got

    def _drop_in_place(self, level: int, want: int) -> None:
        table, skip = self.state.residency.tables[level], 0
        while table.free < want:
            self.victims.refile()
            victim = self.victims.nth(level, False, skip)
            if victim is None:
                return
            node, last = victim
            if not self.room.drop_in_place(level, node, last, want - table.free):
                skip += 1
            self.room.free(level, want)

    # -- ahead of need ------------------------------------------------------------------------------------------

    def note_store(self, blocks: int) -> None:
        """Remember the size of a store, for the watermark."""
        oldest = self._recent[0] if len(self._recent) == _REMEMBERED_STORES else 0
        self._recent.append(blocks)
        if blocks >= self._largest:
            self._largest = blocks
        elif oldest == self._largest:
            self._largest = max(self._recent)

    def watermark(self, level: int) -> int:
        """Slots that should be free, or be free on demand, before the next store."""
        capacity = self.state.specs[level].capacity
        base = max(1, min(capacity // 100, self._largest))
        return min(base + self.shortfall[level], max(1, capacity // 2))

    def tend(self) -> None:
        """Copy the coldest blocks down where too few slots could be freed on demand."""
        for level in range(len(self.state.specs) - 1):
            if self.state.level_below(level) is None:
                continue
            target = self.watermark(level)
            ready = self._ready(level, target)
            if ready < target:
                self.copy_down(level, target - ready)
            else:
                self.shortfall[level] = 0
        self._write_backlog()

    def _ready(self, level: int, target: int) -> int:
        """Slots that are free, or whose block is colder than all that must be copied, or is being copied."""
        self.victims.refile()
        ready = self.state.residency.tables[level].free + self.state.credits[level].outbound_writes
        limit = self.victims.key_of(level, False, 0)
        n = 0
        while ready < target:
            key = self.victims.key_of(level, True, n)
            if key is None or (limit is not None and key > limit):
                break
            victim = self.victims.nth(level, True, n)
            assert victim is not None
            node, last = victim
            ready += last + 1 - self.victims.coldest_run(level, node, last, target - ready, True)
            n += 1
        return ready

    def copy_down(self, level: int, want: int) -> str:
        """Start copies of the coldest `want` blocks that have none below. Returns what stopped it, "" for nothing."""
        skip, stuck = 0, ""
        while want > 0:
            self.victims.refile()
            victim = self.victims.nth(level, False, skip)
            if victim is None:
                if not self._expedite(level, want) and not stuck:
                    return "busy"
                return stuck
            node, last = victim
            begin = self.victims.coldest_run(level, node, last, want, False)
            planned = self.writes.plan(node, begin, last + 1, level)
            want -= planned.blocks
            if planned.reason == "credits":
                return "credits"
            if planned.blocks == 0:
                stuck = planned.reason
                skip += 1
                if skip > 16:
                    return stuck
        return stuck

    def _expedite(self, level: int, want: int) -> bool:
        """Let delayed writes out of `level` start now, oldest first, until they cover `want` blocks."""
        chosen = []
        for job_id, flight in self.state.jobs.items():
            if want <= 0:
                break
            if flight.delayed and not flight.expedited and flight.job.src_level == level:
                flight.expedited = True
                chosen.append(job_id)
                want -= flight.job.n
        if chosen:
            self.state.outbox.append(Expedite(tuple(chosen)))
        return bool(chosen)

    def expedite_all(self) -> None:
        """Let every delayed write start now."""
        for level in range(len(self.state.specs)):
            self._expedite(level, 1 << 30)

    # -- written at an age, at flush, at close ------------------------------------------------------------------

    def write_later(self, level: int, slots: Slots, delay_s: float) -> None:
        """Write blocks that just became resident after a delay; at once where too much is delayed already."""
        for node, begin, end in self.state.residency.runs_of(level, slots):
            planned = self.writes.plan(node, begin, end, level, delay_s=delay_s)
            if planned.blocks < end - begin:
                self.queue_write(level, node.slots[level, begin:end].astype(np.int32))
        self._write_backlog()

    def queue_write(self, level: int, slots: Slots) -> None:
        """Blocks to be written as soon as credits allow. Bounded: at most one entry per block and level matters."""
        if len(slots):
            self.state.unwritten.append((level, slots))

    def queue_all(self) -> int:
        """Queue every block without a readable copy in the last level, most recently used first."""
        state = self.state
        last = len(state.specs) - 1
        state.unwritten.clear()
        found: list[tuple[float, int, Slots]] = []
        for node in state.residency.index.walk_nodes():
            lacking = self._lacking_in(node, last)
            for level in range(last):
                mine = node.slots[level, : len(lacking)]
                take = lacking & (mine >= 0)
                if take.any():
                    recent = float(node.last_use[: len(lacking)][take].max())
                    found.append((recent, level, mine[take].astype(np.int32)))
                    lacking &= ~take
        found.sort(key=lambda each: each[0], reverse=True)
        state.unwritten.extend((level, slots) for _, level, slots in found)
        return sum(len(slots) for _, _, slots in found)

    def count_lacking(self, used_before: float) -> int:
        """Full blocks without a readable copy in the last level, where that is persistent."""
        last, count = len(self.state.specs) - 1, 0
        for node in self.state.residency.index.walk_nodes():
            lacking = self._lacking_in(node, last)
            count += int((lacking & (node.last_use[: len(lacking)] <= used_before)).sum())
        return count

    def _lacking_in(self, node: Node, last: int) -> Bools:
        """Per full block of a run: has it no readable copy in the persistent level `last`?"""
        end = node.n - int(node.partial)
        if not self.state.specs[last].persistent:
            return np.zeros(end, dtype=np.bool_)
        row = node.slots[last, :end]
        return np.asarray((row < 0) | (self.state.residency.tables[last].state[row] != SlotState.RESIDENT))

    def _write_backlog(self) -> None:
        """Write queued blocks while credits last."""
        state = self.state
        for _ in range(len(state.unwritten)):
            level, slots = state.unwritten.popleft()
            below = state.level_below(level)
            if below is None:
                continue
            slots = slots[state.readable(level, slots)]
            retry = []
            for node, begin, end in state.residency.runs_of(level, slots):
                planned = self.writes.plan(node, begin, end, level)
                if planned.reason in ("credits", "busy"):
                    retry.append(node.slots[level, begin:end].astype(np.int32))
            if retry:
                state.unwritten.appendleft((level, np.concatenate(retry)))
                return
