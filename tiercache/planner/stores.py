"""Stores: which blocks of a prompt are new, and where they go."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import counting, true_at
from tiercache.index import ABSENT, Path, Walk
from tiercache.keys import chain_idents
from tiercache.planner.demotion import Demotion
from tiercache.planner.quota import Quota
from tiercache.planner.state import PlannerState
from tiercache.slots import RESIDENT, WRITING
from tiercache.types import CALLER, Idents, Slots

__all__ = ["StorePlan", "Stores"]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What was decided of a store."""

    accepted: int
    """Blocks newly taken; their bytes are on the way."""
    present: int
    """Blocks that were there already (or on the way)."""
    reason: str = ""
    """Why not all were taken: "" | parent_missing | no_room | quota | queue_full | offline | stale_epoch |
    stores_off."""
    job: int = 0
    """The copy job, 0: none."""
    end: int = 0
    """Blocks of the prompt that are present or on the way from its start."""


class Stores:
    """Plans stores into level 0."""

    def __init__(self, state: PlannerState, demotion: Demotion, quota: Quota | None = None) -> None:
        self.state = state
        self.demotion = demotion
        self.quota = quota

    def plan(self, walk: Walk, symbols: bytes, n: int, start: int, endpoint: int, partial: bool) -> StorePlan:
        """Take blocks `[start, n)` of a prompt as far as room and credits allow, in order.

        Blocks whose only copy was found bad count as missing and are healed. Mutates slots, tree, pins, outbox.
        """
        state, residency = self.state, self.state.residency
        if not state.online(0):
            return StorePlan(0, 0, "offline", end=min(start, walk.blocks))
        gathered = residency.index.gather(walk.path)
        states = residency.states(gathered)
        usable = np.zeros(walk.blocks, dtype=np.bool_)
        for level, online in enumerate(state.online_levels()):
            if online:
                usable |= (states[level] == RESIDENT) | (states[level] == WRITING)
        holes = true_at(~usable)
        intact = int(holes[0]) if len(holes) else walk.blocks
        if start > intact:
            return StorePlan(0, 0, "parent_missing", end=intact)
        if len(holes):
            holes = holes[holes >= start]
        new = max(0, n - walk.blocks)
        wanted = len(holes) + new
        self.demotion.note_store(n - start)
        if wanted == 0:
            return StorePlan(0, n - start, end=n)
        allowed = min(wanted, state.job_room(CALLER, 0))
        with state.keep(gathered):
            within = self._within_quota(walk.path, holes, allowed)
            got = self.demotion.make_room(0, within)
        if got < within:  # the prompt's own blocks may leave level 0 where they are below too
            gathered[0, (states[1:] == RESIDENT).any(axis=0)] = ABSENT
            with state.keep(gathered):
                got = self.demotion.room.free(0, within)
        reason = "quota" if got == within < allowed else self._reason(wanted, allowed, got)
        end = self._end(walk.blocks, holes, got, wanted, n)
        if got == 0:
            return StorePlan(0, end - start, reason, end=end)
        slots = residency.tables[0].take(got)
        positions, idents = self._place(walk, symbols, holes[:got], slots, partial and got == wanted)
        rows = positions - start
        job = state.submit("store", (CALLER, rows), (0, slots), idents, endpoint=endpoint, owner=0, rows_at=start)
        return StorePlan(got, end - start - got, reason, job, end)

    def _within_quota(self, path: Path, holes: NDArray[np.int64], wanted: int) -> int:
        """How many of the first `wanted` blocks of a store, holes before new ones, the quota allows. May evict."""
        if self.quota is None or not self.quota.is_charged(path):
            return wanted
        ordinary = min(wanted, int((holes < self.quota.first_charged(path)).sum()))
        return ordinary + self.quota.admit(0, wanted - ordinary)

    def _reason(self, wanted: int, allowed: int, got: int) -> str:
        """Why a store is cut: there are no slots, or there are no credits."""
        if got == wanted:
            return ""
        all_slots = 0 < got == self.state.residency.tables[0].free
        return "no_room" if got < allowed or all_slots else "queue_full"

    @staticmethod
    def _end(known: int, holes: NDArray[np.int64], got: int, wanted: int, n: int) -> int:
        """Blocks from the start of the prompt that are there once `got` of the missing ones are taken."""
        if got == wanted:
            return n
        return int(holes[got]) if got < len(holes) else known + got - len(holes)

    def _place(
        self, walk: Walk, symbols: bytes, holes: NDArray[np.int64], slots: Slots, partial: bool
    ) -> tuple[NDArray[np.int32], Idents]:
        """Give holes and new blocks their slots; returns their prompt positions and idents."""
        residency, path = self.state.residency, walk.path.copy()
        idents: list[Idents] = []
        starts = path.starts() if len(holes) else holes
        for i, hole in enumerate(holes.tolist()):
            which = int(np.searchsorted(starts, hole, side="right")) - 1
            node, at = path.nodes[which], int(hole - starts[which])
            self.demotion.room.let_go(0, residency.unplace(node, at, at + 1, 0), False)  # a bad copy, if any
            residency.place(node, at, 0, slots[i : i + 1])
            idents.append(node.idents[at : at + 1])
        new = len(slots) - len(holes)
        if new:
            width = residency.width
            parent = self._last_ident(path)
            run = symbols[walk.blocks * width : (walk.blocks + new) * width]
            fresh = chain_idents(run, width, parent)
            node, at = residency.extend(path, run, fresh, partial)
            residency.place(node, at, 0, slots[len(holes) :])
            idents.append(fresh)
        positions = np.concatenate((holes.astype(np.int32), counting(walk.blocks, walk.blocks + new)))
        return positions, np.concatenate(idents)

    def _last_ident(self, path: Path) -> int:
        if not path:
            return self.state.root_ident
        node, take = path.end
        return int(node.idents[take - 1])
