"""Quota: how much of a level blocks from a remote tier may take, with what was computed under them.

Such a run carries a charge (`Node.charge`), and so does all that is stored under it. The charge of a path falls by one
at each further use, and at none left its blocks are ordinary: they count no more, and are written to slower levels
like others. Until then they are never copied down (they can be fetched again), and where the quota is full the coldest
of them go first, leaf first. Nothing ordinary ever leaves for what is beyond the quota.
"""

from __future__ import annotations

from tiercache.index import Node, Path
from tiercache.planner.demotion import Demotion
from tiercache.planner.room import Room
from tiercache.planner.state import PlannerState
from tiercache.planner.victims import Victims

__all__ = ["CHARGE", "Quota"]

CHARGE = 2
"""Uses after the one that brought them until blocks are ordinary."""
_PASSED_OVER = 64
"""Charged leaves that may not go, which `admit` passes over before it gives up; bounds its cost."""


class Quota:
    """See the module. `share` of each level's slots, rounded down, but at least one."""

    def __init__(self, state: PlannerState, victims: Victims, demotion: Demotion, share: float) -> None:
        self.state = state
        self.victims = victims
        self.demotion = demotion
        self.room: Room = demotion.room
        self.share = share
        self.evicted = 0
        """Slots that charged blocks gave to other charged blocks."""
        self.refused = 0
        """Slots that were not to be had within the quota."""
        self.ordinary = 0
        """Blocks whose charge ended."""

    def limit(self, level: int) -> int:
        """Slots of a level that may be charged."""
        return max(1, int(self.state.specs[level].capacity * self.share))

    def charged(self, level: int) -> int:
        """Slots of a level that are."""
        return self.state.residency.charged[level]

    def first_charged(self, path: Path) -> int:
        """Position of the first charged block of a path; its length where there is none."""
        first = path.blocks
        for node in reversed(path.nodes):
            if not node.charge:
                break
            first = node.depth
        return first

    def is_charged(self, path: Path) -> bool:
        """Is what is stored under the end of this path charged?"""
        return bool(path) and path.nodes[-1].charge > 0

    def admit(self, level: int, want: int) -> int:
        """How many of `want` more slots of a level may be charged, once the coldest charged blocks have gone for them.
        Takes none. What must stay is pinned by the caller (`PlannerState.keep`)."""
        limit, skip = self.limit(level), 0
        while (lacking := self.charged(level) + want - limit) > 0 and skip < _PASSED_OVER:
            self.victims.refile(level)
            victim = self.victims.nth_charged(level, skip)
            if victim is None:
                break
            gone = self.room.drop_tail(level, *victim, lacking)
            self.evicted += gone
            skip += not gone
        allowed = max(0, min(want, limit - self.charged(level)))
        self.refused += want - allowed
        return allowed

    def touched(self, path: Path) -> None:
        """A request used this path, which was there before it. Splits the last run where only a part of it was used."""
        if not self.is_charged(path):
            return
        node, take = path.end
        nodes = path.nodes[:-1] + [self.state.residency.split(node, take) if take < node.n else node]
        for each in reversed(nodes):
            if not each.charge:
                break
            self.state.residency.set_charge(each, each.charge - 1)
            if not each.charge:
                self._becomes_ordinary(each)

    def _becomes_ordinary(self, node: Node) -> None:
        """Its blocks are written to the last level from now on, as those of a store are."""
        state = self.state
        self.ordinary += node.n
        if state.write_after_s is None or not state.specs[-1].persistent:
            return
        row = node.slots[:, 0]
        row = row[row >= 0]
        self.demotion.write_later(0, row[state.readable(0, row)], state.write_after_s)
