"""Statistics on a trace: small traces with known answers, and random ones against a count block by block."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest
from sim_kit import BLOCK_TOKENS, random_trace

from tiercache.sim.page.cells import Watched
from tiercache.sim.page.leaving import KINDS, Leaving, leave_cached_path
from tiercache.sim.page.sharing import GAP_EDGES_S, USE_EDGES, first_places, share_of_trace
from tiercache.sim.page.timeline import over_time
from tiercache.sim.trace import Trace, full_blocks

SEEDS = range(25)


def trace_of(paths: list[list[int]], times: list[float] | None = None, partial: tuple[int, ...] = ()) -> Trace:
    """Blocks of 10 tokens named by dense numbers; those of `partial` have 4."""
    ids = np.array([block for path in paths for block in path], np.int64)
    unique = int(ids.max(initial=-1)) + 1
    parent = np.full(unique, -1, np.int64)
    for path in paths:
        for above, block in pairwise(path):
            parent[block] = above
    tokens = np.full(unique, 10, np.int32)
    tokens[list(partial)] = 4
    starts = np.cumsum([0, *map(len, paths)]).astype(np.int64)
    return Trace("t", 10, np.array(times or [0.0] * len(paths)), starts, ids, tokens, parent)


def nothing_found(trace: Trace) -> Watched:
    return Watched(np.zeros((trace.requests, 1), np.int64), np.zeros(trace.requests, np.int64))


FOUR = trace_of([[0, 1, 2], [0, 1, 3], [0, 4], [0, 1, 2, 5]], [0.0, 5.0, 65.0, 700.0])
"""A root that all have, a second block that three have, then ways apart; the last goes on where the first ended."""


def test_places_by_hand() -> None:
    places = first_places(FOUR)
    assert places.uses.tolist() == [4, 3, 2, 1, 1, 1]
    assert places.begin.tolist() == [0, 10, 20, 20, 10, 30]
    assert places.first_request.tolist() == [0, 0, 0, 1, 2, 3]


def test_sharing_by_hand() -> None:
    sharing = share_of_trace(FOUR, first_places(FOUR))
    assert sharing.tokens_by_uses == (30, 20, 70, 0, 0, 0, 0)  # 1, 2 and 3-4 requests
    assert sharing.unique_tokens_by_uses == (30, 10, 20, 0, 0, 0, 0)
    assert sharing.prefix_edges == (0, 10, 20, 40)
    assert sharing.requests_by_prefix == (0, 1, 1, 2)  # 30, 20, 10 and 30 tokens
    assert sharing.prefix_quantiles == (10, 10, 20, 30, 30, 30)
    # block 0 after 5, 60 and 635 s, block 1 after 5 and 695 s, block 2 after 700 s
    assert sharing.tokens_by_gap == (0, 20, 0, 10, 30, 0, 0, 0)
    assert sharing.gap_quantiles_s == (5.0, 60.0, 695.0, 700.0, 700.0)
    top = [(each.begin, each.end, each.requests, each.saved_tokens, each.first_request) for each in sharing.top]
    assert top == [(0, 10, 4, 30, 0), (10, 20, 3, 20, 0), (20, 30, 2, 10, 0)]


def test_a_stretch_is_as_long_as_the_same_requests_have_it() -> None:
    trace = trace_of([[0, 1, 2, 3], [0, 1, 2, 4]])
    (only,) = share_of_trace(trace, first_places(trace)).top
    assert (only.begin, only.end, only.requests, only.saved_tokens) == (0, 30, 2, 30)


def test_leaving_by_hand() -> None:
    own = Watched(np.array([[0, 0], [10, 0], [0, 10], [0, 30]]), np.zeros(4, np.int64))
    leaving = leave_cached_path(FOUR, first_places(FOUR), own)
    assert dict(zip(KINDS, leaving.requests, strict=True)) == {"whole": 0, "onward": 1, "fork": 2, "new": 1}
    assert leaving.found_tokens == (0, 30, 30, 0)
    assert leaving.new_tokens == (0, 10, 20, 30)
    assert leaving.edges == (0, 10, 20, 40)
    assert leaving.requests_by_depth == ((0, 0, 0, 0), (0, 0, 0, 1), (0, 1, 1, 0), (1, 0, 0, 0))
    assert leaving.evicted_tokens == 10  # the second request could have had 20
    top = [(each.tokens, each.first_request, each.passed, each.left, each.new_tokens) for each in leaving.top]
    assert top == [(10, 0, 4, 1, 10), (20, 0, 3, 1, 10)]
    assert [(each.ways, each.ways_used_once) for each in leaving.top] == [(2, 1), (2, 1)]


def test_a_partial_block_is_the_end_of_a_prompt_not_a_way_on() -> None:
    """The second prompt goes on in what was the last, partial block of the first: no fork."""
    trace = trace_of([[0, 1], [0, 2, 3], [0, 4], [0, 1]], partial=(1, 3))
    leaving = leave_cached_path(trace, first_places(trace), nothing_found(trace))
    assert dict(zip(KINDS, leaving.requests, strict=True)) == {"whole": 1, "onward": 1, "fork": 1, "new": 1}


def test_requests_without_a_block_are_of_no_kind() -> None:
    trace = trace_of([[], [0], [], [0]], [0.0, 1.0, 2.0, 3.0])
    leaving = leave_cached_path(trace, first_places(trace), nothing_found(trace))
    assert leaving.requests == (1, 0, 0, 1)
    assert share_of_trace(trace, first_places(trace)).requests_by_prefix == (2, 2)


def test_nothing_comes_again() -> None:
    trace = trace_of([[0], [1]])
    sharing = share_of_trace(trace, first_places(trace))
    assert (sharing.top, sharing.gap_quantiles_s, sum(sharing.tokens_by_gap)) == ((), (), 0)


def test_bins_over_time() -> None:
    own = Watched(np.array([[0, 0], [10, 10], [10, 0], [20, 10]]), np.array([0, 3, 0, 5]))
    line = over_time(FOUR, own)
    assert (line.width, line.timed, line.bins) == (15.0, True, 47)
    assert (line.requests[0], line.requests[4], line.requests[-1]) == (2, 1, 1)
    assert (line.prompt_tokens[0], line.hit_tokens[0][0], line.hit_tokens[1][0]) == (60, 10, 10)
    assert (line.nvme_writes[0], line.nvme_writes[-1]) == (3, 5)
    untimed = over_time(trace_of([[0]] * 100), Watched(np.full((100, 1), 1), np.ones(100, np.int64)))
    assert (untimed.timed, untimed.width, untimed.bins, sum(untimed.requests)) == (False, 3.0, 34, 100)


def a_trace(seed: int) -> Trace:
    trace = random_trace(seed, requests=60, longest=7)
    return full_blocks(trace) if seed % 3 == 0 else trace


@pytest.mark.parametrize("seed", SEEDS)
def test_sharing_equals_a_count_block_by_block(seed: int) -> None:
    trace = a_trace(seed)
    paths = [tuple(trace.path(request).tolist()) for request in range(trace.requests)]
    uses = Counter(block for path in paths for block in path)
    size = trace.tokens.tolist()
    sharing = share_of_trace(trace, first_places(trace))
    by_uses, once, gaps = Counter[int](), Counter[int](), Counter[int]()
    last: dict[int, float] = {}
    for request, path in enumerate(paths):
        now = float(trace.times_s[request])
        for block in path:
            which = max(i for i, edge in enumerate(USE_EDGES) if uses[block] >= edge)
            by_uses[which] += size[block]
            if block in last:
                gaps[max(i for i, edge in enumerate(GAP_EDGES_S) if now - last[block] >= edge)] += size[block]
            else:
                once[which] += size[block]
            last[block] = now
    assert sharing.tokens_by_uses == tuple(by_uses[i] for i in range(len(USE_EDGES)))
    assert sharing.unique_tokens_by_uses == tuple(once[i] for i in range(len(USE_EDGES)))
    assert sharing.tokens_by_gap == tuple(gaps[i] for i in range(len(GAP_EDGES_S)))
    lengths = sorted(longest_shared(paths, request, size) for request in range(len(paths)))
    assert sharing.prefix_quantiles[-1] == lengths[-1]
    assert sharing.prefix_quantiles[2] == lengths[(len(lengths) - 1) // 2]
    counted = Counter(min(edge for edge in sharing.prefix_edges if edge >= length) for length in lengths)
    assert sharing.requests_by_prefix == tuple(counted[edge] for edge in sharing.prefix_edges)


def longest_shared(paths: list[tuple[int, ...]], request: int, size: list[int]) -> int:
    """Tokens of the longest prefix that another request has too."""
    best = 0
    for other, path in enumerate(paths):
        if other != request:
            common = 0
            for mine, theirs in zip(paths[request], path, strict=False):
                if mine != theirs:
                    break
                common += size[mine]
            best = max(best, common)
    return best


@pytest.mark.parametrize("seed", SEEDS)
def test_stretches_equal_a_walk_of_the_tree(seed: int) -> None:
    trace = a_trace(seed)
    users = defaultdict(set)
    for request in range(trace.requests):
        for block in trace.path(request).tolist():
            users[block].add(request)
    saved: dict[tuple[int, ...], int] = Counter()
    for block, requests in users.items():  # a set of requests stands for one stretch: their paths share it in a row
        saved[tuple(sorted(requests))] += int(trace.tokens[block]) * (len(requests) - 1)
    top = share_of_trace(trace, first_places(trace)).top
    assert [each.saved_tokens for each in top] == [n for n in sorted(saved.values(), reverse=True)[:10] if n]
    total = trace.total_prompt_tokens
    assert sum(saved.values()) == round(total * trace.infinite_hit_ratio())
    for each in top:
        path = trace.path(each.first_request)
        edges = np.concatenate([[0], np.cumsum(trace.tokens[path])]).tolist()
        blocks = path[edges.index(each.begin) : edges.index(each.end)].tolist()
        assert {len(users[block]) for block in blocks} == {each.requests}


@pytest.mark.parametrize("seed", SEEDS)
def test_leaving_equals_a_walk_of_the_tree(seed: int) -> None:
    trace = a_trace(seed)
    found = np.random.default_rng(seed).integers(0, 3 * BLOCK_TOKENS, (trace.requests, 2))
    leaving = leave_cached_path(trace, first_places(trace), Watched(found, np.zeros(trace.requests, np.int64)))
    expected = leave_by_walking(trace, found)
    assert (leaving.requests, leaving.found_tokens, leaving.new_tokens) == expected[:3]
    assert leaving.evicted_tokens == expected[3]
    assert tuple(map(sum, leaving.requests_by_depth)) == leaving.requests
    counted = [(each.tokens, each.left, each.new_tokens, each.ways, each.ways_used_once) for each in leaving.top]
    assert not Counter(counted) - Counter(expected[4])
    costs = sorted((each[2] for each in expected[4]), reverse=True)[:10]
    assert [each.new_tokens for each in leaving.top] == costs


Walked = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, list[tuple[int, int, int, int, int]]]


def leave_by_walking(trace: Trace, found: np.ndarray) -> Walked:
    """The same as `leave_cached_path`, with a set of blocks seen so far."""
    seen: set[int] = set()
    full_ways, ways = defaultdict(set), defaultdict(set)
    uses: Counter[int] = Counter()
    kinds, known, new = Counter[str](), Counter[str](), Counter[str]()
    left, cost, depth = Counter[int](), Counter[int](), {}
    evicted = 0
    size = trace.tokens.tolist()
    for request in range(trace.requests):
        path = trace.path(request).tolist()
        if not path:
            continue
        hits = 0
        while hits < len(path) and path[hits] in seen:
            hits += 1
        before, after = sum(size[block] for block in path[:hits]), sum(size[block] for block in path[hits:])
        at = path[hits - 1] if hits else -1
        kind = "whole" if hits == len(path) else "new" if not hits else "fork" if full_ways[at] else "onward"
        kinds[kind] += 1
        known[kind] += before
        new[kind] += after
        evicted += max(0, before - int(found[request].sum()))
        if kind == "fork":
            left[at] += 1
            cost[at] += after
            depth[at] = before
        for above, block in zip([-1, *path], path, strict=False):
            ways[above].add(block)
            if size[block] == trace.block_tokens:
                full_ways[above].add(block)
        seen.update(path)
        uses.update(path)
    forks = [(depth[b], left[b], cost[b], len(ways[b]), sum(uses[c] == 1 for c in ways[b])) for b in left]
    counts = tuple(tuple(which[kind] for kind in KINDS) for which in (kinds, known, new))
    return counts[0], counts[1], counts[2], evicted, forks


def test_leaving_adds_up_to_the_trace() -> None:
    trace = a_trace(1)
    leaving: Leaving = leave_cached_path(trace, first_places(trace), nothing_found(trace))
    assert sum(leaving.new_tokens) == int(trace.tokens.sum())
    assert sum(leaving.found_tokens) + sum(leaving.new_tokens) == trace.total_prompt_tokens
