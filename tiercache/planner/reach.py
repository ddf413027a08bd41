"""Reach: how far a prompt is held, and where; with a key tier, and without."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import count_levels, first_false, first_true
from tiercache.index import Path, Walk
from tiercache.planner.finds import Finds
from tiercache.planner.loads import Loads
from tiercache.planner.offer import Offers
from tiercache.planner.state import PlannerState
from tiercache.slots import WRITING

__all__ = ["reach", "reach_further"]


def reach(
    state: PlannerState, offers: Offers, path: Path, block_s: float
) -> tuple[int, int, tuple[int, ...], float, int]:
    """Leading readable blocks of a path that are offered, blocks in flight after those, the levels they come from,
    the seconds of their load, and readable blocks that are not offered."""
    residency, n = state.residency, path.blocks
    if n == 0:
        return 0, 0, (0,) * residency.levels, 0.0, 0
    online = state.online_levels()
    states = best = None
    pending, is_whole = 0, online[0] and all(map(residency.is_whole, path.nodes))
    if is_whole and not block_s:
        return n, 0, (n,) + (0,) * (residency.levels - 1), offers.level_s(0, n), 0
    if not is_whole:
        states = residency.states(residency.index.gather(path))
        best = residency.best_level(states, online)
        n = first_true(best < 0)
        pending = first_false(np.asarray((states[:, n:] == WRITING).any(axis=0)))
    if block_s and n:
        offered, load_s = offers.choose(n, states, best, block_s)
        if offered < n:
            offers.measure_again(best if best is None else best[offered:n])
            pending = 0
        offers.measure_new()
        return offered, pending, _by_level(residency.levels, offered, best), load_s, n - offered
    assert states is not None and best is not None
    by_level = count_levels(best[:n], residency.levels)
    return n, pending, by_level, offers.load_s(by_level, states, best), 0


def _by_level(levels: int, blocks: int, best: NDArray[np.int8] | None) -> tuple[int, ...]:
    return (blocks,) + (0,) * (levels - 1) if best is None else count_levels(best[:blocks], levels)


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
