"""Writes: plans copies to a slower level, ancestors first where that level is persistent."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tiercache.index import Node
from tiercache.planner.room import Room
from tiercache.planner.state import PlannerState
from tiercache.slots import SlotState
from tiercache.types import ROOT, Claims, Idents, Slots

__all__ = ["Planned", "Writes"]


@dataclass(frozen=True, slots=True)
class Planned:
    """How many blocks of a request to write were planned, and what stopped the rest."""

    blocks: int
    reason: str = ""
    """"" (all), "credits", "busy" (try again when something came back), "full" (no victim may ever go for it)."""


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

    def plan(self, node: Node, begin: int, end: int, level: int, *, delay_s: float | None = None) -> Planned:
        """Copy blocks `[begin, end)` of a run, which are readable in `level`, to the next slower level.

        Where that level is persistent, ancestors that it lacks are written first. Takes slots, evicts for them and
        puts jobs into the outbox; cut short from the deep end by room and credits.
        """
        target = self.state.level_below(level)
        if node.partial and end == node.n:
            end -= 1
        if target is None or begin >= end:
            return Planned(0, "full")
        stretches, blocked = self._lacking(node, begin, end, level, target)
        wanted = sum(each.end - each.begin for each in stretches)
        if wanted == 0:
            slots = node.slots[target, begin:end]
            there = (slots >= 0) & (self.state.residency.tables[target].state[slots] == SlotState.RESIDENT)
            return Planned(0, "" if there.all() else "busy")
        allowed = self._allowed(level, target, wanted, delay_s)
        if allowed == 0:
            return Planned(0, "credits")
        fresh = self._count_fresh(stretches, allowed)
        protect = {each.id: take for each, take in self.state.residency.path_to(node, end)}
        got = self.room.free(target, fresh, protect)
        planned = self._submit(stretches, allowed, got, target, delay_s)
        if planned == wanted and not blocked:
            return Planned(planned)
        if planned == 0:
            return Planned(0, "busy" if self._may_change(target) else "full")
        return Planned(planned, "credits" if planned == allowed else "busy")

    def _allowed(self, level: int, target: int, wanted: int, delay_s: float | None) -> int:
        if delay_s is None:
            return min(wanted, self.state.job_room(level, target))
        bound = self.state.limits.delayed_blocks(self.state.specs[level].capacity)
        return max(0, min(wanted, bound - self.state.credits[level].delayed))

    def _may_change(self, target: int) -> bool:
        """Is anything in flight or held whose end could free slots of `target`?"""
        credit = self.state.credits[target]
        return bool(credit.jobs or credit.held or any(each.delayed for each in self.state.credits))

    @staticmethod
    def _count_fresh(stretches: list[_Stretch], allowed: int) -> int:
        """Of the first `allowed` blocks, those that need a new slot."""
        fresh = 0
        for each in stretches:
            n = min(each.end - each.begin, allowed)
            allowed -= n
            fresh += 0 if each.rewrite else n
        return fresh

    # -- what is lacking ----------------------------------------------------------------------------------------

    def _lacking(self, node: Node, begin: int, end: int, level: int, target: int) -> tuple[list[_Stretch], bool]:
        """Stretches to write, in path order, and whether something unreadable above stopped the list short."""
        if not self.state.specs[target].persistent:
            return self._cut(node, begin, end, level, target)
        spans: list[tuple[Node, int, int]] = [(node, 0, end)]
        above = node.parent
        table = self.state.residency.tables[target]
        while above is not None and above.parent is not None:
            slots = above.slots[target, : above.n]
            if (slots >= 0).all() and (table.state[slots] != SlotState.BAD).all():
                break
            spans.append((above, 0, above.n))
            above = above.parent
        stretches: list[_Stretch] = []
        for each, first, stop in reversed(spans):
            found, blocked = self._cut(each, first, stop, level, target)
            stretches += found
            if blocked:
                return stretches, True
        return stretches, False

    def _cut(self, node: Node, begin: int, end: int, level: int, target: int) -> tuple[list[_Stretch], bool]:
        """Stretches of one run that lack a copy in `target`, split where their source or kind changes."""
        residency = self.state.residency
        row = node.slots[target, begin:end]
        there = residency.tables[target].state[row]
        bad = (row >= 0) & (there == SlotState.BAD)
        lacking = (row < 0) | bad
        source = np.full(end - begin, -1, dtype=np.int8)
        for upper in range(target):
            slots = node.slots[upper, begin:end]
            source[(slots >= 0) & (residency.tables[upper].state[slots] == SlotState.RESIDENT)] = upper
        if level >= 0:
            slots = node.slots[level, begin:end]
            source[(slots >= 0) & (residency.tables[level].state[slots] == SlotState.RESIDENT)] = level
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
        return found, len(stuck) > 0

    # -- jobs ---------------------------------------------------------------------------------------------------

    def _submit(self, stretches: list[_Stretch], allowed: int, fresh: int, target: int, delay_s: float | None) -> int:
        """Place and submit up to `allowed` blocks, `fresh` of them in new slots; returns how many."""
        state, planned = self.state, 0
        table = state.residency.tables[target]
        step = 1 << 30 if delay_s is not None else state.limits.job_blocks
        for piece in _pieces(stretches, step):
            n = min(piece.end - piece.begin, allowed - planned)
            if not piece.rewrite:
                n = min(n, fresh)
            if n <= 0 or (delay_s is None and state.credits[target].jobs >= state.limits.jobs):
                break
            node, begin, end = piece.node, piece.begin, piece.begin + n
            if piece.rewrite:
                slots = node.slots[target, begin:end].astype(np.int32)
                table.state[slots] = SlotState.WRITING
                state.counters[target].healed += n
            else:
                slots = table.take(n)
                state.residency.place(node, begin, target, slots)
                fresh -= n
            state.submit(
                "write",
                (piece.source, node.slots[piece.source, begin:end].astype(np.int32)),
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
        parents[1:] = node.slots[target, begin : end - 1]
        idents[1:] = node.idents[begin : end - 1]
        if begin:
            parents[0], idents[0] = node.slots[target, begin - 1], node.idents[begin - 1]
        elif node.parent is not None and node.parent.parent is not None:
            above = node.parent
            parents[0], idents[0] = above.slots[target, above.n - 1], above.idents[above.n - 1]
        else:
            parents[0], idents[0] = ROOT, self.state.root_ident
        width = self.state.residency.width
        return Claims(
            parent_slots=parents,
            parent_idents=idents,
            symbols=node.run[begin * width : end * width],
            last_use=np.maximum(node.last_use[begin:end], 0.0),
            uses=node.uses[begin:end].copy(),
        )


def _pieces(stretches: list[_Stretch], step: int) -> Iterator[_Stretch]:
    """The same stretches, none longer than `step`."""
    for each in stretches:
        for at in range(each.begin, each.end, step):
            yield _Stretch(each.node, at, min(each.end, at + step), each.source, each.rewrite)
