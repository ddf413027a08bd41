"""Explain: where a prompt lies in the cache, level by level, and where prompts leave the cached path."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from datetime import UTC, datetime

import numpy as np

from tiercache.index import Path
from tiercache.planner.state import PlannerState
from tiercache.slots import BAD, RESIDENT, WRITING
from tiercache.types import COLD

__all__ = ["Explanation", "Stretch", "explain_path"]

_LAST_DATE_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


@dataclass(frozen=True, slots=True)
class Stretch:
    """Neighbouring blocks of a prompt that lie in the same levels in the same state."""

    begin: int
    """First block."""
    end: int
    """One past the last block."""
    tiers: tuple[str, ...]
    """Levels with a readable copy, fastest first."""
    in_flight: tuple[str, ...]
    """Levels to which a copy is under way."""
    bad: tuple[str, ...]
    """Levels whose copy was found wrong."""
    last_use_s: float
    """Wall-clock seconds of the last use of its first block (-inf: released)."""
    uses: int
    branches: int
    """Other prompts' continuations right after its run (0 inside a run)."""
    exits: int
    """Lookups of longer prompts that left the cached path in or after this run."""
    priority: int = 0
    """Of its first block; see `TieredKVCache.store`."""
    expires_s: float = math.inf
    """Wall-clock seconds at which its first block ends."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What the cache knows of a prompt."""

    blocks_asked: int
    blocks_found: int
    """On a cached path, readable or not."""
    diverged_at: int | None
    """First token that no cached path continues with."""
    stretches: tuple[Stretch, ...]

    def __str__(self) -> str:
        lines = [f"{self.blocks_found} of {self.blocks_asked} blocks lie on a cached path"]
        for each in self.stretches:
            where = ", ".join(each.tiers) or "nowhere readable"
            more = f", on the way to {', '.join(each.in_flight)}" if each.in_flight else ""
            wrong = f", found wrong on {', '.join(each.bad)}" if each.bad else ""
            leave = f"; {each.exits} lookups left here, {each.branches} branches" if each.exits or each.branches else ""
            said = f"; {_said(each)}" if _said(each) else ""
            used = f"used {each.uses} times"
            lines.append(f"  blocks {each.begin}..{each.end - 1}: {where}{more}{wrong}; {used}{said}{leave}")
        if self.diverged_at is not None:
            lines.append(f"the prompt leaves the cached path at token {self.diverged_at}")
        return "\n".join(lines)


def explain_path(state: PlannerState, path: Path) -> tuple[Stretch, ...]:
    """The stretches of a path. Mutates nothing."""
    found: list[Stretch] = []
    residency = state.residency
    for i, (node, take) in enumerate(path):
        states = residency.states(node.slots[:take].T)
        unlike = (np.diff(states.astype(np.int16), axis=1) != 0).any(axis=0)
        if node.hints is not None:
            unlike |= node.hints[1:take] != node.hints[: take - 1]
        cuts = np.flatnonzero(unlike) + 1
        bounds = [0, *cuts.tolist(), take]
        for a, b in itertools.pairwise(bounds):
            column = states[:, a]
            last = b == node.n
            found.append(
                Stretch(
                    node.depth + a,
                    node.depth + b,
                    _named(state, column, RESIDENT),
                    _named(state, column, WRITING),
                    _named(state, column, BAD),
                    float(node.last_use[a]),
                    int(node.uses[a]),
                    max(0, len(node.children) - (i < len(path) - 1)) if last else 0,
                    node.exits if b == take else 0,
                    0 if node.hints is None else node.hints["priority"].item(a),
                    math.inf if node.hints is None else node.hints["expires"].item(a),
                )
            )
    return tuple(found)


def _said(stretch: Stretch) -> str:
    """What callers said of these blocks, in words."""
    words = []
    if stretch.priority:
        words.append("cold" if stretch.priority == COLD else f"priority {stretch.priority}")
    if stretch.expires_s < math.inf:
        ends = datetime.fromtimestamp(min(stretch.expires_s, _LAST_DATE_S), UTC)
        words.append(f"ends {ends:%Y-%m-%d %H:%M:%S} UTC")
    return ", ".join(words)


def _named(state: PlannerState, column: np.ndarray[tuple[int], np.dtype[np.uint8]], what: np.uint8) -> tuple[str, ...]:
    return tuple(state.specs[level].name for level in np.flatnonzero(column == what).tolist())
