"""Reach: how far a prompt is held where there is a key tier too."""

from __future__ import annotations

import numpy as np

from tiercache.arrays import count_levels, first_false, first_true
from tiercache.index import Walk
from tiercache.planner.finds import Finds
from tiercache.planner.loads import Loads
from tiercache.planner.state import PlannerState
from tiercache.slots import WRITING

__all__ = ["reach_further"]


def reach_further(
    state: PlannerState, loads: Loads, finds: Finds, walk: Walk, symbols: bytes, n: int
) -> tuple[int, int, tuple[int, ...], int]:
    """Of a prompt of n symbols: leading blocks that a load can bring, blocks pending after those, and where the first
    come from, per level and from the key tier.

    Of the key tier are the blocks being fetched now, which a load joins, and behind the path those hinted at. Asks for
    what is not known.
    """
    residency = state.residency
    gathered = residency.index.gather(walk.path)
    best = loads.sources(walk.path, gathered, False)
    blocks = first_true(best < 0)
    *by_level, remote = count_levels(best[:blocks], residency.levels + 1)
    pending = 0
    if blocks < walk.blocks:
        pending = first_false(np.asarray((residency.states(gathered[:, blocks:]) == WRITING).any(axis=0)))
    if blocks + pending == walk.blocks:  # else there is a hole in the path itself
        there, asked = finds.look(symbols, walk.blocks, n)
        if pending:
            pending += there
        else:
            blocks, remote = blocks + there, remote + there
        pending += asked
    return blocks, pending, tuple(by_level), remote
