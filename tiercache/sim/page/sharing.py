"""What prompts share, counted on the trace alone: it says what any cache could find, whatever its size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiercache.sim.trace import Trace

__all__ = ["GAP_EDGES_S", "USE_EDGES", "Places", "Sharing", "Stretch", "first_places", "length_edges", "share_of_trace"]

USE_EDGES = (1, 2, 3, 5, 9, 17, 65)
"""Classes of blocks by how many requests use them: 1, 2, 3-4, 5-8, 9-16, 17-64, 65 and more."""
GAP_EDGES_S = (0.0, 1.0, 10.0, 60.0, 600.0, 3600.0, 6 * 3600.0, 86400.0)
"""Classes of times between two uses: from each edge up to the next, the last without an end."""
_TOP = 10


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the blocks of a trace lie in its prefix tree."""

    uses: NDArray[np.int64]
    """int64[u]: requests that use the block."""
    begin: NDArray[np.int64]
    """int64[u]: prompt tokens before it."""
    first_request: NDArray[np.int64]
    """int64[u]: the first request that uses it."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Blocks in a row that the same requests use: a run between two forks of the prefix tree."""

    first_request: int
    """Number of the first request that has it, from 0."""
    begin: int
    """Its first token's place in the prompt."""
    end: int
    """The place after its last token: all before it is shared by these requests too."""
    requests: int
    saved_tokens: int
    """What a cache without bounds saves by it: tokens times (requests - 1). Of all stretches it adds up to all hits."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """How often blocks are used, and what prompts have in common."""

    tokens_by_uses: tuple[int, ...]
    """Prompt tokens by how many requests have them, per class of USE_EDGES; their sum is all prompt tokens."""
    unique_tokens_by_uses: tuple[int, ...]
    """The same, every block counted once: what a cache would have to hold."""
    prefix_edges: tuple[int, ...]
    """Classes of lengths in tokens: up to each edge, from 0; see `length_edges`."""
    requests_by_prefix: tuple[int, ...]
    """Requests by the longest beginning that they share with any other request, per class."""
    prefix_quantiles: tuple[int, ...]
    """Of these lengths: the 10th, 25th, 50th, 75th and 90th percentile, and the longest."""
    tokens_by_gap: tuple[int, ...]
    """Prompt tokens that come again, by the time since their block was used last, per class of GAP_EDGES_S."""
    gap_quantiles_s: tuple[float, ...]
    """Of these times, weighted by tokens: the 25th, 50th, 75th and 90th percentile, and the longest."""
    top: tuple[Stretch, ...]
    """The stretches that save most."""


def first_places(trace: Trace) -> Places:
    """Uses, depth and first request of every block, O(block accesses)."""
    uses = np.bincount(trace.ids, minlength=trace.unique_blocks).astype(np.int64)
    highest = np.maximum.accumulate(trace.ids)
    fresh = np.flatnonzero(highest > np.concatenate([[-1], highest[:-1]]))  # ids are dense in order of appearance
    before = np.concatenate([[0], np.cumsum(trace.tokens[trace.ids], dtype=np.int64)])
    request = np.searchsorted(trace.starts, fresh, side="right") - 1
    return Places(uses, before[fresh] - before[trace.starts[request]], request.astype(np.int64))


def length_edges(trace: Trace) -> tuple[int, ...]:
    """Upper bounds of classes of lengths: 0, one block, two, four, ... up to the longest prompt."""
    before = np.concatenate([[0], np.cumsum(trace.tokens[trace.ids], dtype=np.int64)])
    longest = int(np.diff(before[trace.starts]).max(initial=0))
    edges = [0, trace.block_tokens]
    while edges[-1] < longest:
        edges.append(2 * edges[-1])
    return tuple(edges)


def share_of_trace(trace: Trace, places: Places) -> Sharing:
    """Count all of it."""
    uses, tokens = places.uses, trace.tokens.astype(np.int64)
    which = np.searchsorted(USE_EDGES, uses, side="right") - 1
    prefixes = _shared_prefixes(trace, uses)
    edges = length_edges(trace)
    gaps, gap_tokens = _gaps(trace)
    return Sharing(
        tokens_by_uses=_sums(which, uses * tokens, len(USE_EDGES)),
        unique_tokens_by_uses=_sums(which, tokens, len(USE_EDGES)),
        prefix_edges=edges,
        requests_by_prefix=_sums(np.searchsorted(edges, prefixes), np.ones(len(prefixes), np.int64), len(edges)),
        prefix_quantiles=tuple(np.quantile(prefixes, (0.1, 0.25, 0.5, 0.75, 0.9, 1.0), method="lower").tolist()),
        tokens_by_gap=_sums(np.searchsorted(GAP_EDGES_S, gaps, side="right") - 1, gap_tokens, len(GAP_EDGES_S)),
        gap_quantiles_s=_weighted_quantiles(gaps, gap_tokens, (0.25, 0.5, 0.75, 0.9, 1.0)),
        top=_top_stretches(trace, places),
    )


def _sums(which: NDArray[np.intp], weights: NDArray[np.int64], classes: int) -> tuple[int, ...]:
    """Sum of `weights` per class, exact."""
    sums = np.zeros(classes, np.int64)
    np.add.at(sums, which, weights)
    return tuple(sums.tolist())


def _shared_prefixes(trace: Trace, uses: NDArray[np.int64]) -> NDArray[np.int64]:
    """Tokens of each request's longest prefix that another request has too. Uses never grow along a path."""
    shared = np.where(uses > 1, trace.tokens, 0)[trace.ids]
    before = np.concatenate([[0], np.cumsum(shared, dtype=np.int64)])
    return np.diff(before[trace.starts])


def _gaps(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Per use of a block that is not its first: seconds since the use before, and its tokens."""
    order = np.argsort(trace.ids, kind="stable")
    ids = trace.ids[order]
    times = np.repeat(trace.times_s, np.diff(trace.starts))[order]
    again = np.flatnonzero(ids[1:] == ids[:-1]) + 1
    return times[again] - times[again - 1], trace.tokens[ids[again]].astype(np.int64)


def _weighted_quantiles(
    values: NDArray[np.float64], weights: NDArray[np.int64], shares: tuple[float, ...]
) -> tuple[float, ...]:
    """The smallest value below or at which each share of the weight lies; nothing where there are no values."""
    if not len(values):
        return ()
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    at = np.searchsorted(below, np.array(shares) * below[-1])
    return tuple(values[order][np.minimum(at, len(values) - 1)].tolist())


def _top_stretches(trace: Trace, places: Places) -> tuple[Stretch, ...]:
    uses, parent = places.uses, trace.parent
    head = np.arange(trace.unique_blocks)
    goes_on = (parent >= 0) & (uses == uses[parent])  # as many as its parent: they are the same requests
    head[goes_on] = parent[goes_on]
    while (further := head[head] != head).any():  # log2 of the longest run, rounds
        head[further] = head[head[further]]
    length = np.zeros(trace.unique_blocks, np.int64)
    np.add.at(length, head, trace.tokens)
    saved = length * (uses - 1)
    top = np.argsort(-saved, kind="stable")[:_TOP]
    return tuple(
        Stretch(
            first_request=int(places.first_request[block]),
            begin=int(places.begin[block]),
            end=int(places.begin[block] + length[block]),
            requests=int(uses[block]),
            saved_tokens=int(saved[block]),
        )
        for block in top
        if saved[block] > 0
    )
