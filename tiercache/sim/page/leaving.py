"""Where prompts leave the path that earlier prompts left in a cache without bounds, and what eviction adds to that."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercache.sim.page.cells import Watched
from tiercache.sim.page.sharing import Places, length_edges
from tiercache.sim.trace import Trace

__all__ = ["KINDS", "ExitPoint", "Leaving", "leave_cached_path"]

KINDS = ("whole", "onward", "fork", "new")
"""How a prompt ends what it has in common with all earlier ones. whole: all of it was there. onward: it goes on where
every earlier prompt ended. fork: earlier prompts went on, in a whole block of another content. new: not even its first
block was there."""
_TOP = 10


@dataclass(frozen=True, slots=True)
class ExitPoint:
    """A place at which prompts left a path that others had followed before."""

    tokens: int
    """How deep it lies: prompt tokens up to it."""
    first_request: int
    """The first request that came here, from 0."""
    passed: int
    """Requests that came this far."""
    left: int
    """Of them, those that went on with a block nobody had before, while others had gone on."""
    new_tokens: int
    """Prompt tokens of these after this place: to be prefilled, in a cache of any size."""
    ways: int
    """Different blocks that follow here."""
    ways_used_once: int
    """Of them, those that one request alone has."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Per kind (in the order of KINDS), and per class of depth."""

    requests: tuple[int, ...]
    """Requests of each kind; those without a block are of none."""
    found_tokens: tuple[int, ...]
    """Their tokens before they left."""
    new_tokens: tuple[int, ...]
    """Their tokens after it."""
    edges: tuple[int, ...]
    """Classes of depth in tokens: up to each edge, from 0."""
    requests_by_depth: tuple[tuple[int, ...], ...]
    """[kind][class]: requests by the depth at which they left."""
    evicted_tokens: int
    """Tokens that a cache without bounds would have found, and the replayed one had let go."""
    top: tuple[ExitPoint, ...]
    """The forks that cost most prefill."""


def leave_cached_path(trace: Trace, places: Places, own: Watched) -> Leaving:
    """Count all of it; `own` is the replay with the user's sizes."""
    lengths = np.diff(trace.starts)
    highest = np.maximum.accumulate(np.concatenate([[-1], trace.ids]))
    known_before = highest[trace.starts[:-1]]  # blocks are numbered as they appear: what is above is new
    fresh = np.concatenate([[0], np.cumsum(np.diff(highest) > 0)])
    hits = lengths - np.diff(fresh[trace.starts])
    before = np.concatenate([[0], np.cumsum(trace.tokens[trace.ids], dtype=np.int64)])
    begin, at, end = before[trace.starts[:-1]], before[trace.starts[:-1] + hits], before[trace.starts[1:]]
    found, new = at - begin, end - at
    exits = np.full(trace.requests, -1, np.int64)
    some = hits > 0
    exits[some] = trace.ids[(trace.starts[:-1] + hits - 1)[some]]
    kind = _kinds(trace, lengths, hits, exits, known_before)
    real = np.flatnonzero(kind >= 0)
    edges = length_edges(trace)
    by_depth = np.zeros((len(KINDS), len(edges)), np.int64)
    np.add.at(by_depth, (kind[real], np.searchsorted(edges, found[real])), 1)
    return Leaving(
        requests=tuple(by_depth.sum(axis=1).tolist()),
        found_tokens=_per_kind(kind, found),
        new_tokens=_per_kind(kind, new),
        edges=edges,
        requests_by_depth=tuple(map(tuple, by_depth.tolist())),
        evicted_tokens=int(np.maximum(found - own.hits.sum(axis=1), 0).sum()),
        top=_top_exits(trace, places, exits[kind == KINDS.index("fork")], new[kind == KINDS.index("fork")]),
    )


def _kinds(
    trace: Trace,
    lengths: NDArray[np.int64],
    hits: NDArray[np.int64],
    exits: NDArray[np.int64],
    known_before: NDArray[np.int64],
) -> NDArray[np.int64]:
    """int64[r]: index into KINDS, -1 for a request without a block."""
    never = np.iinfo(np.int64).max
    first_full_child = np.full(trace.unique_blocks + 1, never)
    full = np.flatnonzero((trace.tokens == trace.block_tokens) & (trace.parent >= 0))[::-1]
    first_full_child[trace.parent[full]] = full  # the last assignment, the smallest id, stays
    forked = first_full_child[exits] <= known_before
    kind = np.where(forked, KINDS.index("fork"), KINDS.index("onward"))
    kind[hits == 0] = KINDS.index("new")
    kind[hits == lengths] = KINDS.index("whole")
    kind[lengths == 0] = -1
    return kind


def _per_kind(kind: NDArray[np.int64], values: NDArray[np.int64]) -> tuple[int, ...]:
    return tuple(int(values[kind == each].sum()) for each in range(len(KINDS)))


def _top_exits(trace: Trace, places: Places, exits: NDArray[np.int64], new: NDArray[np.int64]) -> tuple[ExitPoint, ...]:
    blocks, which, left = np.unique(exits, return_inverse=True, return_counts=True)
    tokens = np.zeros(len(blocks), np.int64)
    np.add.at(tokens, which, new)
    children = np.flatnonzero(trace.parent >= 0)
    ways = np.bincount(trace.parent[children], minlength=trace.unique_blocks)
    alone = children[places.uses[children] == 1]
    ways_used_once = np.bincount(trace.parent[alone], minlength=trace.unique_blocks)
    return tuple(
        ExitPoint(
            tokens=int(places.begin[block] + trace.tokens[block]),
            first_request=int(places.first_request[block]),
            passed=int(places.uses[block]),
            left=int(left[i]),
            new_tokens=int(tokens[i]),
            ways=int(ways[block]),
            ways_used_once=int(ways_used_once[block]),
        )
        for i, block in ((i, int(blocks[i])) for i in np.argsort(-tokens, kind="stable")[:_TOP].tolist())
    )
