"""Fetches: slots and places in the tree for blocks that a load brings from a key tier, within the quota."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import counting
from tiercache.index import Path
from tiercache.keys import chain_idents
from tiercache.planner.demotion import Demotion
from tiercache.planner.quota import CHARGE, Quota
from tiercache.planner.state import PlannerState
from tiercache.remote.guard import JOB_NBYTES
from tiercache.types import COLD, Bools, Idents, Slots

__all__ = ["JOB_NBYTES", "Fetches", "source_slots"]


class Fetches:
    """Without a quota there is no key tier, and all of it is as ever."""

    def __init__(self, state: PlannerState, demotion: Demotion, quota: Quota | None) -> None:
        self.state = state
        self.demotion = demotion
        self.quota = quota

    def make_room(self, path: Path, need: NDArray[np.int64]) -> int:
        """Free slots of level 0 for blocks at these positions of a prompt, the charged ones within the quota. For how
        many of them, from the first, there are some. What must stay is pinned by the caller."""
        if self.quota is None:
            return self.demotion.make_room(0, len(need))
        ordinary = int((need < self.quota.first_charged(path)).sum())
        return self.demotion.make_room(0, ordinary + self.quota.admit(0, len(need) - ordinary))

    def take(self, level: int, want: int) -> Slots:
        """Up to so many slots within the quota, where they are easy to free."""
        if self.quota is None or not self.state.online(level):
            return np.empty(0, dtype=np.int32)
        got = self.demotion.room.free(level, self.quota.admit(level, want))
        return self.state.residency.tables[level].take(got)

    def idents(self, path: Path, symbols: bytes, n: int) -> Idents:
        """Idents of the n blocks of a prompt that follow its path."""
        width, begin = self.state.residency.width, path.blocks
        parent = path.nodes[-1].idents.item(path.take - 1) if path else self.state.root_ident
        return chain_idents(symbols[begin * width : (begin + n) * width], width, parent)

    def grow(self, path: Path, symbols: bytes, idents: Idents) -> None:
        """Add the blocks of a prompt that follow its path to the tree, charged, and to the path; they have no slots."""
        width, begin = self.state.residency.width, path.blocks
        run = symbols[begin * width : (begin + len(idents)) * width]
        node, _ = self.state.residency.extend(path, run, idents, False, CHARGE)
        if not path or path.nodes[-1] is not node:
            path.nodes.append(node)
        path.take = node.n

    def cold(self, path: Path, n: int) -> Bools:
        """Per block: does it belong into the slow tiers only?"""
        hints = path.shorten(n).hints() if self.state.any_cold else None
        return np.zeros(n, dtype=np.bool_) if hints is None else np.asarray(hints["priority"] == COLD)

    def job_blocks(self) -> int:
        """Blocks of one job at the key tier: as many as credits for one job cover, and no more than JOB_NBYTES."""
        return max(1, min(self.state.limits.job_blocks, JOB_NBYTES // self.state.specs[0].block_nbytes))


def source_slots(gathered: NDArray[np.int32], source: int, at: slice) -> NDArray[np.int32]:
    """The slots (`gathered[levels, n]`) that blocks are read from; at the key tier, their positions in the prompt."""
    return gathered[source, at] if source < len(gathered) else counting(at.start, at.stop)
