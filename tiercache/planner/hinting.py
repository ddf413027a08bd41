"""Hinting: what callers say of blocks, and what follows: priorities, ends in time, blocks for the slow tiers only."""

from __future__ import annotations

import numpy as np

from tiercache.arrays import first_true
from tiercache.index import Path
from tiercache.planner.demotion import Demotion
from tiercache.planner.state import PlannerState
from tiercache.types import COLD, no_hints

__all__ = ["Hinting"]


class Hinting:
    """See the module. Mutates hints; drops what has ended."""

    def __init__(self, state: PlannerState, demotion: Demotion) -> None:
        self.state = state
        self.demotion = demotion

    def stored(self, path: Path, known: int, priority: int, expires: float) -> None:
        """A store said this of a path, of which the first `known` blocks were there before: those keep the higher
        priority, and the later end. That it uses the path is noted afterwards, and files its runs anew."""
        residency = self.state.residency
        self.state.any_cold |= priority == COLD
        for node, take in path:
            old = min(take, max(0, known - node.depth))
            if node.hints is None:
                if (priority == 0 and expires == np.inf) or (priority <= 0 and old == take):
                    continue
                node.hints = no_hints(node.n)
            hints = node.hints
            hints["priority"][:old] = np.maximum(hints["priority"][:old], priority)
            hints["expires"][:old] = np.maximum(hints["expires"][:old], expires)
            hints["priority"][old:take] = priority
            hints["expires"][old:take] = expires
            residency.expiry.note(node)

    def prioritize(self, path: Path, priority: int) -> int:
        """Give all blocks of this path this priority. Returns how many have another now."""
        state, changed = self.state, 0
        state.any_cold |= priority == COLD
        for node, take in path:
            if node.hints is None:
                if priority == 0:
                    continue
                node.hints = no_hints(node.n)
            row = node.hints["priority"][:take]
            changed += int((row != priority).sum())
            row[:] = priority
            state.residency.stale[node] = None
        if priority == COLD and changed:
            gathered = state.residency.index.gather(path)
            for level in range(len(state.specs) - 1):
                self.demotion.write_cold(level, gathered[level, gathered[level] >= 0].astype(np.int32))
        return changed

    def alive(self, path: Path) -> int:
        """Leading blocks of a path that have not ended by now."""
        for node, take in path:
            if node.hints is not None:
                over = node.hints["expires"][:take] <= self.state.now
                if over.any():
                    return node.depth + first_true(over)
        return path.blocks

    def expire(self) -> None:
        """Drop all that has ended by now, and what continues it. Cost proportional to what is dropped."""
        state, residency = self.state, self.state.residency
        for number in list(residency.expiry.due(state.now)):
            node = residency.index.nodes.get(number)
            if node is None or node.hints is None:
                continue
            over = node.hints["expires"] <= state.now
            if over.any():
                state.totals.expired += self.demotion.room.take_away(node, first_true(over))
            if residency.index.nodes.get(number) is node:
                residency.expiry.note(node)
