"""Demotion: makes room, at once by dropping, ahead of need by copying the coldest blocks down."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from tiercache.index import Node
from tiercache.planner.room import Room
from tiercache.planner.state import PlannerState
from tiercache.planner.victims import Victims
from tiercache.planner.writes import Planned, Writes
from tiercache.slots import RESIDENT
from tiercache.types import COLD, Bools, Expedite, Slots

__all__ = ["Demotion"]

_REMEMBERED_STORES = 1000
_PATIENCE = 16
"""Victims that cannot be copied which `copy_down` passes over before it gives up; bounds its cost."""


class RecentMax:
    """The largest of the values noted during the last `window` steps. O(1), amortised."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._falling: deque[tuple[int, int]] = deque()

    def note(self, step: int, value: int) -> None:
        """A value at a step; steps never fall."""
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((step, value))

    def largest(self, step: int) -> int:
        """The largest value noted after `step - window`, 0 where there is none."""
        while self._falling and self._falling[0][0] <= step - self._window:
            self._falling.popleft()
        return self._falling[0][1] if self._falling else 0


class Demotion:
    """Watermarks, `tend`, and the backlog of blocks that wait to be written."""

    def __init__(self, state: PlannerState, victims: Victims, room: Room, writes: Writes) -> None:
        self.state = state
        self.victims = victims
        self.room = room
        self.writes = writes
        self.leaving: Callable[[int, Node, int], None] | None = None
        """Is told (level, run, end) of blocks that were chosen to be copied down, before they are."""
        self._stores = 0
        self._sizes = RecentMax(_REMEMBERED_STORES)
        self._shortfalls = [RecentMax(_REMEMBERED_STORES) for _ in state.specs]
        self._spare = [(0, 0) for _ in state.specs]
        """Per level: slots ever taken when room was counted last, and by how many it exceeded the target."""

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
        self.copy_down(level, want - got, drop=True)
        got = self.room.free(level, want)
        self._note_shortfall(level, want - got)
        return got

    def _note_shortfall(self, level: int, lacking: int) -> None:
        """A store, load or write lacked that many slots: part of the target for the next stores."""
        self._spare[level] = (0, 0)
        if lacking:
            self._shortfalls[level].note(self._stores, lacking)

    # -- ahead of need ------------------------------------------------------------------------------------------

    def note_store(self, blocks: int) -> None:
        """Remember the size of a store, for the watermark."""
        self._stores += 1
        self._sizes.note(self._stores, blocks)

    def largest_store(self) -> int:
        """Blocks of the largest recent store."""
        return self._sizes.largest(self._stores)

    def watermark(self, level: int) -> int:
        """Slots that should be free, or be free on demand, before the next store: 1 % of them or the largest recent
        store, the smaller, and what recent requests lacked; at most half."""
        capacity = self.state.specs[level].capacity
        base = max(1, min(capacity // 100, self.largest_store()))
        return min(base + self._shortfalls[level].largest(self._stores), max(1, capacity // 2))

    def tend(self) -> None:
        """Copy the coldest blocks down where too few slots could be freed on demand."""
        last = len(self.state.specs) - 1
        if self.state.write_limit is not None:
            self.state.write_limit.note(self.state.residency.tables[0].taken, self.state.counters[last])
        for level in range(last):
            taken = self.state.residency.tables[level].taken
            counted_at, spare = self._spare[level]
            if taken - counted_at < spare or self.state.level_below(level) is None:
                continue
            target = self.watermark(level)
            ready = self._ready(level, 2 * target)
            self._spare[level] = (taken, ready - target)
            if ready < target:
                self.copy_down(level, target - ready)
        self._write_backlog()

    def _ready(self, level: int, target: int) -> int:
        """Slots that are free, or whose block is colder than all that must be copied, or is being copied."""
        self.victims.refile(level)
        credit = self.state.credits[level]
        ready = self.state.residency.tables[level].free + credit.outbound_writes + credit.hastened
        limit = self.victims.key_of(level, False, 0)
        n = 0
        while ready < target:
            victim = self.victims.nth(level, True, n)
            key = self.victims.key_of(level, True, n)
            if victim is None or key is None or (limit is not None and key > limit):
                break
            node, last = victim
            ready += last + 1 - self.victims.coldest_run(level, node, last, target - ready, True)
            n += 1
        return ready

    def copy_down(self, level: int, want: int, *, drop: bool = False) -> tuple[int, int]:
        """Start copies of the coldest `want` blocks that have none below; with `drop`, what cannot be copied is
        dropped in place. Returns how many blocks are on their way by it (ancestors too), and how many were dropped."""
        started = dropped = skip = 0
        while started + dropped < want and skip <= _PATIENCE:
            self.victims.refile(level)
            victim = self.victims.nth(level, False, skip)
            if victim is None:
                break
            node, last = victim
            left = want - started - dropped
            begin = self.victims.coldest_run(level, node, last, left, False)
            planned = self._copy(level, node, begin, last + 1, drop)
            started += planned.blocks
            if planned.reason == "credits":
                break
            if planned.blocks:
                continue
            gone = 0
            if drop and planned.reason == "full":
                gone = self.room.drop_in_place(level, node, last, left)
            dropped += gone
            skip += not gone
        if started + dropped < want:
            started += self._expedite(level, want - started - dropped)
        return started, dropped

    def _copy(self, level: int, node: Node, begin: int, end: int, drop: bool) -> Planned:
        """`Writes.plan`; where the level below has no room, room is made there first. Reasons: without "room"."""
        if self.leaving is not None:
            self.leaving(level, node, end)
        planned, target = self.writes.plan(node, begin, end, level), self.state.level_below(level)
        if planned.reason != "room" or target is None:
            return planned
        lacking, started = end - begin - planned.blocks, 0
        if not self.state.is_last(target):
            self._note_shortfall(target, lacking)
            started, dropped = self.copy_down(target, lacking, drop=drop)
            if dropped and node.parent is not None and end <= node.n:
                more = self.writes.plan(node, begin, end, level)
                planned = Planned(planned.blocks + more.blocks, more.reason)
        if planned.reason == "room":
            hope = started or self.writes.may_make_room(target)
            return Planned(planned.blocks, "busy" if hope else "full")
        return planned

    def _expedite(self, level: int, want: int) -> int:
        """Let delayed writes out of `level` start now, oldest first, until they cover `want` blocks; how many do."""
        chosen, covered = [], 0
        for job_id, flight in self.state.delayed[level].items():
            if covered >= want:
                break
            chosen.append(job_id)
            covered += flight.job.n
        for job_id in chosen:
            self.state.hasten(self.state.jobs[job_id])
        if chosen:
            self.state.outbox.append(Expedite(tuple(chosen)))
        return covered

    def expedite_all(self) -> None:
        """Let every delayed write start now."""
        for level in range(len(self.state.specs)):
            self._expedite(level, 1 << 30)

    # -- written at an age, at flush, at close ------------------------------------------------------------------

    def write_later(self, level: int, slots: Slots, delay_s: float) -> None:
        """Write blocks that just became resident, and are worth it, to the last level after a delay; at once where too
        much is delayed already, and without a delay where it is 0."""
        last = len(self.state.specs) - 1
        slots = self._worth_writing(level, slots)
        if delay_s > 0 and self.state.online(last):
            _, slots = self._write(level, slots, last, delay_s)
        self.state.unwritten.add(level, slots)
        self._write_backlog()

    def write_cold(self, level: int, slots: Slots) -> None:
        """Write those of these blocks that belong into the slow tiers only to the last level, now."""
        runs = self.state.residency.runs_of(level, slots)
        cold = []
        for node, begin, end in runs:
            if node.hints is not None:
                mine = node.hints["priority"][begin:end] == COLD
                cold.append(node.slots[begin:end, level][mine].astype(np.int32))
        if cold:
            self.state.unwritten.add(level, np.concatenate(cold))
            self._write_backlog()

    def _worth_writing(self, level: int, slots: Slots) -> Slots:
        if self.state.write_limit is None:
            return slots
        runs = self.state.residency.runs_of(level, slots)
        worth = [node.slots[a:b, level] for node, a, b in runs if self.state.is_worth_writing(node, b - 1)]
        return np.concatenate(worth).astype(np.int32) if worth else slots[:0]

    def _write(self, level: int, slots: Slots, last: int, delay_s: float | None = None) -> tuple[bool, Slots]:
        """Write the blocks of these slots to the last level. Returns whether credits last, and the slots that must
        wait for something."""
        waiting: list[Slots] = []
        credits_last = True
        for node, begin, end in self.state.residency.runs_of(level, slots[self.state.readable(level, slots)]):
            end = min(end, node.n)  # room that was made for the runs before may have cut this one
            if begin >= end or node.charge:
                continue
            if credits_last:
                planned = self.writes.plan(node, begin, end, level, target=last, delay_s=delay_s)
                credits_last = planned.reason != "credits"
                if planned.reason in ("", "full") or (planned.reason == "room" and not self.writes.may_make_room(last)):
                    continue
            row = node.slots[begin:end, level]
            waiting.append(row[row >= 0].astype(np.int32))
        return credits_last, np.concatenate(waiting) if waiting else slots[:0]

    def queue_all(self) -> int:
        """Queue every block without a readable copy in the last level, behind what is queued already: the one that the
        last level would keep longest first, so that whatever stops this, the most reusable part is there. (A block's
        ancestors are written before it.) Returns how many blocks lack a copy. O(everything)."""
        state = self.state
        last = len(state.specs) - 1
        found: list[tuple[float, int, int, Slots]] = []
        for node in state.residency.index.walk_nodes():
            lacking = self._lacking_in(node, last)
            for level in reversed(range(last)):
                mine = node.slots[: len(lacking), level]
                take = lacking & (mine >= 0)
                lacking &= ~take
                for begin, end in self.victims.alike(last, node, np.flatnonzero(take)):
                    key = self.victims.key(last, node, begin)
                    found.append((key, -(node.depth + begin), level, mine[begin:end].astype(np.int32)))
        found.sort(key=lambda each: each[:2], reverse=True)
        for _, _, level, slots in found:
            state.unwritten.add(level, slots)
        return sum(len(slots) for *_, slots in found)

    def count_lacking(self, used_before: float) -> int:
        """Full blocks that are in a faster level and without a readable copy in the last, where that is persistent."""
        last, count = len(self.state.specs) - 1, 0
        for node in self.state.residency.index.walk_nodes():
            lacking = self._lacking_in(node, last)
            lacking &= (node.slots[: len(lacking), :last] >= 0).any(axis=1)
            count += int((lacking & (node.last_use[: len(lacking)] <= used_before)).sum())
        return count

    def _lacking_in(self, node: Node, last: int) -> Bools:
        """Per full block of a run: has it no readable copy in the persistent level `last`?"""
        end = node.n - int(node.partial)
        if node.charge or not self.state.specs[last].persistent:
            return np.zeros(end, dtype=np.bool_)
        row = node.slots[:end, last]
        return np.asarray((row < 0) | (self.state.residency.tables[last].state[row] != RESIDENT))

    def _write_backlog(self) -> None:
        """Write queued blocks while credits last; where the last level is offline they wait."""
        state = self.state
        last = len(state.specs) - 1
        if len(state.unwritten) and state.online(last):
            state.unwritten.run(lambda level, slots: self._write(level, slots, last))
