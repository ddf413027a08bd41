"""Writes: plans copies to a slower level, ancestors first where that level is persistent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tiercache.index import Node
from tiercache.planner.room import Room
from tiercache.planner.state import PlannerState
from tiercache.slots import BAD, RESIDENT, WRITING
from tiercache.types import ROOT, Claims, Idents, Slots

__all__ = ["Planned", "Writes"]


@dataclass(frozen=True, slots=True)
class Planned:
    """How many blocks of a request to write were planned, and what stopped the rest."""

    blocks: int
    reason: str = ""
    """"" (none lacks a copy now), "credits", "room" (no slots there), "busy" (waits for a job above), "full" (there is
    no way: no level, or a hole above)."""


@dataclass(slots=True)
class _Stretch:
    """Blocks `[begin, end)` of a run that lack a readable copy in the destination, all with a copy in `source`."""

    node: Node
    begin: int
    end: int
    source: int
    rewrite: bool
    """They have (bad) slots there already, which are written again in place."""


class Writes:
    """Copies blocks down. A write pins its source and its destination until its result."""

    def __init__(self, state: PlannerState, room: Room) -> None:
        self.state = state
        self.room = room

    def plan(
        self, node: Node, begin: int, end: int, level: int, *, target: int | None = None, delay_s: float | None = None
    ) -> Planned:
        """Copy blocks `[begin, end)` of a run, which are readable in `level`, to `target` (by default the next slower
        level that is online).

        Where that level is persistent, ancestors that it lacks are written first. Takes slots, evicts for them and
        puts jobs into the outbox; cut short from the deep end by room and credits.
        """
        target = self.state.level_below(level) if target is None else target
        if target is None:
            return Planned(0, "full")
        end -= node.partial and end == node.n
        stretches, blocked = self._lacking(node, begin, end, level, target) if begin < end else ([], "")
        pieces, all_of_it = self._within_credits(stretches, target, delay_s)
        if not pieces:
            return Planned(0, blocked if all_of_it else "credits")
        protect = {each.id: take for each, take in self.state.residency.path_to(node, end)}
        fresh = sum(each.end - each.begin for each in pieces if not each.rewrite)
        got = self.room.free(target, fresh, protect, spare_above=True)
        planned = self._submit(pieces, got, target, delay_s)
        if planned < sum(each.end - each.begin for each in pieces):
            return Planned(planned, "room")
        return Planned(planned, blocked if all_of_it else "credits")

    def may_make_room(self, target: int) -> bool:
        """Is anything in flight or held whose end could free slots of `target`?"""
        credit = self.state.credits[target]
        return bool(credit.jobs or credit.lost_jobs or credit.held or any(each.delayed for each in self.state.credits))

    def _within_credits(
        self, stretches: list[_Stretch], target: int, delay_s: float | None
    ) -> tuple[list[_Stretch], bool]:
        """What of these stretches credits allow, in pieces of a job each, and whether that is all."""
        state, room = self.state, {}
        jobs, inbound, step = state.limits.jobs - state.credits[target].jobs, 1 << 30, 1 << 30
        if delay_s is None:
            inbound, step = state.inbound_room(target), state.limits.job_blocks
        pieces: list[_Stretch] = []
        for each in _pieces(stretches, step):
            source = each.source
            if source not in room:
                room[source] = state.outbound_room(source, writes=True) if delay_s is None else state.delay_room(source)
            n = min(each.end - each.begin, room[source], inbound)
            if n <= 0 or (delay_s is None and len(pieces) >= jobs):
                return pieces, False
            pieces.append(replace(each, end=each.begin + n))
            room[source] -= n
            inbound -= n
            if each.begin + n < each.end:
                return pieces, False
        return pieces, True

    # -- what is lacking ----------------------------------------------------------------------------------------

    def _lacking(self, node: Node, begin: int, end: int, level: int, target: int) -> tuple[list[_Stretch], str]:
        """Stretches to write, in path order, and what stopped the list short: "", "busy" or "full"."""
        if not self.state.specs[target].persistent:
            return self._cut(node, begin, end, level, target)
        spans: list[tuple[Node, int, int]] = [(node, 0, end)]
        above = node.parent
        table = self.state.residency.tables[target]
        while above is not None and above.parent is not None:
            slots = above.slots[:, target]
            if (slots >= 0).all() and (table.state[slots] != BAD).all():
                break
            spans.append((above, 0, above.n))
            above = above.parent
        stretches: list[_Stretch] = []
        for each, first, stop in reversed(spans):
            found, blocked = self._cut(each, first, stop, level, target)
            stretches += found
            if blocked:
                return stretches, blocked
        return stretches, ""

    def _cut(self, node: Node, begin: int, end: int, level: int, target: int) -> tuple[list[_Stretch], str]:
        """Stretches of one run that lack a copy in `target`, split where their source or kind changes."""
        residency = self.state.residency
        row = node.slots[begin:end, target]
        there = residency.tables[target].state[row]
        bad = (row >= 0) & (there == BAD)
        lacking = (row < 0) | bad
        source = np.full(end - begin, -1, dtype=np.int8)
        for upper in range(target):
            slots = node.slots[begin:end, upper]
            source[(slots >= 0) & (residency.tables[upper].state[slots] == RESIDENT)] = upper
        if level >= 0:
            slots = node.slots[begin:end, level]
            source[(slots >= 0) & (residency.tables[level].state[slots] == RESIDENT)] = level
        busy = bad & (residency.tables[target].pins[row] > 0)
        stuck = np.flatnonzero(lacking & ((source < 0) | busy))
        stop = int(stuck[0]) if len(stuck) else end - begin
        at = np.flatnonzero(lacking[:stop])
        found = []
        if len(at):
            change = (np.diff(at) != 1) | (np.diff(source[at]) != 0) | (np.diff(bad[at].astype(np.int8)) != 0)
            bounds = [0, *(np.flatnonzero(change) + 1).tolist(), len(at)]
            for a, b in itertools.pairwise(bounds):
                first = int(at[a])
                found.append(
                    _Stretch(node, begin + first, begin + int(at[b - 1]) + 1, int(source[first]), bool(bad[first]))
                )
        return found, self._why_stuck(node, begin + int(stuck[0]), target) if len(stuck) else ""

    def _why_stuck(self, node: Node, at: int, target: int) -> str:
        """Will a block that cannot be written now be readable, or its slot free, once a job or a hold ends?"""
        for level in range(target + 1):
            slot, table = int(node.slots[at, level]), self.state.residency.tables[level]
            if slot >= 0 and (table.state[slot] == WRITING or (level == target and table.pins[slot])):
                return "busy"
        return "full"

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _submit(self, pieces: list[_Stretch], fresh: int, target: int, delay_s: float | None) -> int:
        """Place and submit these, at most `fresh` blocks of them in new slots; returns how many blocks."""
        state, planned = self.state, 0
        table = state.residency.tables[target]
        for piece in pieces:
            n = piece.end - piece.begin if piece.rewrite else min(piece.end - piece.begin, fresh)
            if n == 0:
                break
            node, begin, end = piece.node, piece.begin, piece.begin + n
            if piece.rewrite:
                slots = node.slots[begin:end, target].astype(np.int32)
                state.residency.set_state(target, slots, WRITING)
                state.counters[target].healed += n
            else:
                slots = table.take(n)
                state.residency.place(node, begin, target, slots)
                fresh -= n
            state.submit(
                "write",
                (piece.source, node.slots[begin:end, piece.source].astype(np.int32)),
                (target, slots),
                node.idents[begin:end].copy(),
                claims=self._claims(node, begin, end, target) if state.specs[target].persistent else None,
                delay_s=delay_s,
            )
            planned += n
            if n < piece.end - piece.begin:
                break
        return planned

    def _claims(self, node: Node, begin: int, end: int, target: int) -> Claims:
        parents: Slots = np.empty(end - begin, dtype=np.int32)
        idents: Idents = np.empty(end - begin, dtype=np.uint64)
        parents[1:] = node.slots[begin : end - 1, target]
        idents[1:] = node.idents[begin : end - 1]
        if begin:
            parents[0], idents[0] = node.slots[begin - 1, target], node.idents[begin - 1]
        elif node.parent is not None and node.parent.parent is not None:
            above = node.parent
            parents[0], idents[0] = above.slots[above.n - 1, target], above.idents[above.n - 1]
        else:
            parents[0], idents[0] = ROOT, self.state.root_ident
        width = self.state.residency.width
        return Claims(
            parent_slots=parents,
            parent_idents=idents,
            symbols=node.run[begin * width : end * width],
            last_use=np.maximum(node.last_use[begin:end], 0.0),
            uses=node.uses[begin:end].copy(),
            hints=None if node.hints is None else node.hints[begin:end].copy(),
        )


def _pieces(stretches: list[_Stretch], step: int) -> Iterator[_Stretch]:
    """The same stretches, none longer than `step`."""
    for each in stretches:
        for at in range(each.begin, each.end, step):
            yield _Stretch(each.node, at, min(each.end, at + step), each.source, each.rewrite)
