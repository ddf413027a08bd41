"""Recovery: rebuilds the tree from what the persistent level held. Runs are maximal again; O(blocks), arrays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from tiercache.planner.state import PlannerState
from tiercache.types import ROOT, Recovered

__all__ = ["restore"]


def restore(state: PlannerState, recovered: Recovered) -> None:
    """Put recovered blocks into an empty planner. Their order of eviction is their last use, then leaf first."""
    residency = state.residency
    level = len(state.specs) - 1
    assert state.specs[level].persistent and residency.index.blocks == 0
    state.totals.recovered_forgotten = recovered.forgotten
    n = len(recovered.slots)
    if n == 0:
        return
    order, starts = _runs(recovered.parents)
    symbols = np.frombuffer(recovered.symbols, dtype=np.uint8).reshape(n, residency.width)[order].tobytes()
    slots, idents = recovered.slots[order].astype(np.int32), recovered.idents[order]
    last_use, uses = recovered.last_use[order], recovered.uses[order]
    hints = None if recovered.hints is None else recovered.hints[order]
    parents = recovered.parents[order[starts]]
    run_of = np.empty(n, dtype=np.int64)
    bounds = [*starts.tolist(), n]
    run_of[order] = np.repeat(np.arange(len(starts)), np.diff(bounds))
    parent_runs = np.where(parents == ROOT, -1, run_of[parents]).tolist()
    residency.tables[level].take_these(slots)
    with _collector_paused():
        residency.attach_runs(level, parent_runs, bounds, symbols, slots, (idents, last_use, uses), hints)
    state.totals.recovered = n


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Building a tree makes no garbage, and each collection would walk all that stands of it: a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _runs(parents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Order blocks run by run, and where each run starts in that order.

    A run goes on from a block to its child while that is the only one. Parents come before their children in the
    input; runs come in the order of their first block, so a parent's run comes before its children's.
    """
    n = len(parents)
    children = np.bincount(parents[parents >= 0], minlength=n)
    first = (parents == ROOT) | (children[np.maximum(parents, 0)] != 1)
    head = np.where(first, np.arange(n), parents)
    depth = np.where(first, 0, 1)
    while True:
        further = head[head]
        if (further == head).all():
            break
        depth = depth + depth[head]
        head = further
    order = np.lexsort((depth, head))
    starts = np.flatnonzero(depth[order] == 0)
    return order, starts
