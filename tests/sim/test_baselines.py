"""The policies to compare with: against slow references, exhaustive search, another simulator, and known ratios."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sim_kit import random_trace

from tiercache.sim import example
from tiercache.sim.baselines import BASELINES, POLICIES, simulate, simulate_flat
from tiercache.sim.keyed import next_uses
from tiercache.sim.readers import read_trace
from tiercache.sim.trace import Trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"
ONLINE = [name for name in BASELINES if name != "min"]


def in_blocks(trace: Trace) -> Trace:
    """The same paths, each block of one token, so that tokens found are blocks found."""
    ones = np.ones(trace.unique_blocks, np.int32)
    return Trace(trace.name, 1, trace.times_s, trace.starts, trace.ids, ones, trace.parent)


def walks(seed: int, requests: int = 200, depth: int = 6) -> Trace:
    """Random walks from the root of a small tree: much is found again, and every block is the end of some path."""
    random = np.random.default_rng(seed)
    numbers: dict[tuple[int, ...], int] = {}
    paths = []
    for _ in range(requests):
        steps = tuple((random.random(int(random.integers(1, depth + 1))) < 0.3).astype(int).tolist())
        paths.append([numbers.setdefault(steps[: i + 1], len(numbers)) for i in range(len(steps))])
    parent = np.array([numbers.get(steps[:-1], -1) for steps in numbers], np.int64)
    starts = np.cumsum([0, *map(len, paths)]).astype(np.int64)
    ids = np.array([block for path in paths for block in path], np.int64)
    return Trace(f"walks-{seed}", 1, np.zeros(requests), starts, ids, np.ones(len(parent), np.int32), parent)


def paths_of(trace: Trace) -> list[list[int]]:
    return [trace.path(request).tolist() for request in range(trace.requests)]


# --- slow references: every resident looked at for each eviction ------------------------------------------------------


class Slow:
    """Queues are lists, the first to go first; evictable: not of the request's path, and no resident's parent."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        self.parent, self.capacity = trace.parent.tolist(), capacity
        self.queues: list[list[int]] = [[], []]
        self.now = 0

    def resident(self) -> list[int]:
        return self.queues[0] + self.queues[1]

    def run(self, paths: list[list[int]]) -> int:
        found = 0
        for path in paths:
            self.now += 1
            self.path = path
            resident = set(self.resident())
            hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
            self.use(path[:hit])
            pinned, entered = set(path[:hit]), []
            for block in path[hit:]:
                evictable = self.evictable(pinned)
                if len(self.resident()) == self.capacity and not evictable:
                    break
                self.admit(block, pinned)
                pinned.add(block)
                entered.append(block)
            self.settle(entered, path)
            found += hit
        return found

    def evictable(self, pinned: set[int]) -> list[int]:
        parents = {self.parent[block] for block in self.resident()}
        return [block for block in self.resident() if block not in pinned and block not in parents]

    def first(self, queue: int, pinned: set[int]) -> int | None:
        evictable = set(self.evictable(pinned))
        return next((block for block in self.queues[queue] if block in evictable), None)

    def move_to_end(self, block: int, queue: int) -> None:
        for each in self.queues:
            if block in each:
                each.remove(block)
        self.queues[queue].append(block)


class SlowLRU(Slow):
    def use(self, path: list[int]) -> None:
        for block in reversed(path):
            self.move_to_end(block, 0)

    def admit(self, block: int, pinned: set[int]) -> None:
        if len(self.resident()) == self.capacity:
            self.queues[0].remove(self.first(0, pinned))
        self.queues[0].append(block)

    def settle(self, entered: list[int], path: list[int]) -> None:
        self.use([block for block in path if block in self.queues[0]])


class SlowLRU2(SlowLRU):
    """The queue is in no order; who goes is computed from all uses so far."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.history: dict[int, list[int]] = {}

    def use(self, path: list[int]) -> None:
        for block in self.path:
            self.history.setdefault(block, [0]).append(self.now)

    def depth(self, block: int) -> int:
        return 0 if block < 0 else 1 + self.depth(self.parent[block])

    def first(self, queue: int, pinned: set[int]) -> int:
        return min(self.evictable(pinned), key=lambda b: (self.history[b][-2], self.history[b][-1], -self.depth(b)))

    def settle(self, entered: list[int], path: list[int]) -> None:
        pass


class SlowARC(Slow):
    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.ghosts: list[list[int]] = [[], []]
        self.p = 0.0

    def use(self, path: list[int]) -> None:
        for block in reversed(path):
            self.move_to_end(block, 1)

    def replace(self, pinned: set[int], in_b2: bool) -> None:
        t1, t2 = map(len, self.queues)
        queue = int(not (t1 and (t1 > self.p or (in_b2 and t1 == self.p))) and t2 > 0)
        victim = self.first(queue, pinned)
        if victim is None:
            queue = 1 - queue
            victim = self.first(queue, pinned)
        self.queues[queue].remove(victim)
        self.ghosts[queue].append(victim)

    def admit(self, block: int, pinned: set[int]) -> None:
        (t1, b1), (b2, c) = map(len, (self.queues[0], self.ghosts[0])), (len(self.ghosts[1]), self.capacity)
        for queue, sign, ratio in ((0, 1, b2 / max(b1, 1)), (1, -1, b1 / max(b2, 1))):
            if block in self.ghosts[queue]:
                self.p = min(max(self.p + sign * max(ratio, 1), 0), c)
                self.ghosts[queue].remove(block)
                self.replace(pinned, queue == 1)
                self.queues[1].append(block)
                return
        if len(self.resident()) == c:
            if t1 + b1 == c and b1 == 0:
                self.queues[0].remove(self.first(0, pinned))
            else:
                if t1 + b1 == c:
                    self.ghosts[0].pop(0)
                elif c + b1 + b2 == 2 * c:
                    self.ghosts[1].pop(0)
                self.replace(pinned, False)
        self.queues[0].append(block)

    def settle(self, entered: list[int], path: list[int]) -> None:
        for block in reversed([block for block in path if block in self.resident()]):
            self.move_to_end(block, int(block in self.queues[1]))


class SlowS3FIFO(Slow):
    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.small_size = max(1, capacity // 10)
        self.uses: dict[int, int] = {}
        self.ghosts: list[int] = []
        self.full_once = False

    def use(self, path: list[int]) -> None:
        for block in path:
            self.uses[block] = min(self.uses[block] + 1, 3)

    def turn(self, queue: int, pinned: set[int]) -> bool:
        """From the head on, until one is evicted: hot ones move on, those that cannot go are left where they are."""
        at = 0
        while at < len(self.queues[queue]):
            block = self.queues[queue][at]
            if self.uses[block] >= (2, 1)[queue]:
                self.uses[block] = self.uses[block] - 1 if queue else 0
                self.move_to_end(block, 1)
            elif block in self.evictable(pinned):
                self.queues[queue].remove(block)
                if queue == 0:
                    self.ghosts = [*self.ghosts, block][-max(1, self.capacity * 9 // 10) :]
                return True
            else:
                at += 1
        return False

    def admit(self, block: int, pinned: set[int]) -> None:
        known = block in self.ghosts
        if known:
            self.ghosts.remove(block)
        small, main = self.queues
        if len(self.resident()) == self.capacity:
            self.full_once = True
            queue = int(len(main) > self.capacity - self.small_size or not small)
            while not self.turn(queue, pinned):
                queue = 1 - queue
        self.uses[block] = 0
        self.queues[known or (not self.full_once and len(small) >= self.small_size)].append(block)

    def settle(self, entered: list[int], path: list[int]) -> None:
        for block in reversed(entered):
            self.move_to_end(block, int(block in self.queues[1]))


SLOW = {"lru": SlowLRU, "arc": SlowARC, "s3fifo": SlowS3FIFO, "lru2": SlowLRU2}


@pytest.mark.parametrize("policy", ONLINE)
def test_equal_to_a_slow_reference(policy: str) -> None:
    for seed in range(30):
        trace = walks(seed) if seed % 2 else in_blocks(random_trace(seed, requests=120, longest=40))
        for capacity in (1, 2, 3, 7, 20, 45, 10_000):
            found = simulate(trace, policy, capacity)
            assert found == SLOW[policy](trace, capacity).run(paths_of(trace)), (seed, capacity)


def lru_by_touch(trace: Trace, capacity: int) -> int:
    """Tokens found by LRU as one order of all blocks, touched from the tail to the root: no tree, no leaves."""
    order: dict[int, None] = {}
    found = 0
    for path in paths_of(trace):
        hit = next((i for i, block in enumerate(path) if block not in order), len(path))
        found += int(trace.tokens[path[:hit]].sum())
        for block in path[:capacity]:
            order.pop(block, None)
        while len(order) + min(len(path), capacity) > capacity:
            del order[next(iter(order))]
        order.update(dict.fromkeys(reversed(path[:capacity])))
    return found


@pytest.mark.parametrize("percent", [1, 5, 20])
def test_lru_on_the_example(percent: int) -> None:
    trace = read_trace(example.path()).slice(1500)
    capacity = trace.unique_blocks * percent // 100
    assert simulate(trace, "lru", capacity) == lru_by_touch(trace, capacity) > 0


# --- the optimum -----------------------------------------------------------------------------------------------------


def closed_subsets(blocks: frozenset[int], parent: list[int], most: int) -> Iterator[frozenset[int]]:
    for size in range(min(most, len(blocks)) + 1):
        for chosen in combinations(sorted(blocks), size):
            if all(parent[block] < 0 or parent[block] in chosen for block in chosen):
                yield frozenset(chosen)


def best_possible(trace: Trace, capacity: int) -> int:
    """The most blocks that any choices find: after a request, any tree of what was resident and its path may stay."""
    paths, parent = paths_of(trace), trace.parent.tolist()

    @lru_cache(None)
    def best(request: int, resident: frozenset[int]) -> int:
        if request == len(paths):
            return 0
        path = paths[request]
        hit = next((i for i, block in enumerate(path) if block not in resident), len(path))
        kept = closed_subsets(resident | frozenset(path), parent, capacity)
        return hit + max(best(request + 1, after) for after in kept)

    return best(0, frozenset())


def test_min_is_what_exhaustive_search_finds() -> None:
    tried = differing = 0
    for seed in range(4000):
        random = np.random.default_rng(seed)
        trace = in_blocks(random_trace(seed, requests=int(random.integers(4, 11)), longest=3))
        if trace.unique_blocks > 9:
            continue
        capacity = int(random.integers(1, 5))
        best = best_possible(trace, capacity)
        assert simulate(trace, "min", capacity) == best, (seed, capacity)
        tried += 1
        differing += simulate(trace, "lru", capacity) < best
        if tried == 400:
            break
    assert (tried, differing > 50) == (400, True)


def test_no_policy_finds_more_than_min_and_none_more_than_was_there() -> None:
    for seed in range(30):
        trace = walks(seed) if seed % 2 else in_blocks(random_trace(seed, requests=200))
        again = len(trace.ids) - trace.unique_blocks
        for capacity in (1, 5, 20, 60, 200):
            found = {policy: simulate(trace, policy, capacity) for policy in BASELINES}
            assert max(found.values()) == found["min"] <= again
        assert {simulate(trace, policy, trace.unique_blocks) for policy in BASELINES} == {again}


def test_next_uses() -> None:
    trace = in_blocks(random_trace(3, requests=30))
    paths, coming = paths_of(trace), next_uses(trace).tolist()
    expected = [
        next((later for later in range(request + 1, len(paths)) if block in paths[later]), len(paths))
        for request, path in enumerate(paths)
        for block in path
    ]
    assert coming == expected


# --- what a caller sees ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", BASELINES)
def test_residents_are_a_tree_within_the_capacity(policy: str) -> None:
    trace = walks(11, requests=1000)
    parent = trace.parent.tolist()
    for capacity in (1, 4, 30):
        cache = POLICIES[policy](trace, capacity)
        for request, path in enumerate(paths_of(trace)):
            cache.request(path, request, int(trace.starts[request]))
            resident = {block for block, queue in enumerate(cache.where) if queue}
            assert len(resident) == cache.size <= capacity
            assert all(parent[block] < 0 or parent[block] in resident for block in resident)
            assert policy == "min" or resident.issuperset(path[:capacity])


def test_tokens_count_and_progress_is_told() -> None:
    trace = random_trace(5, requests=600)
    told: list[tuple[int, int]] = []
    found = simulate(trace, "lru", trace.unique_blocks, lambda done, of: told.append((done, of)))
    assert found == round(trace.infinite_hit_ratio() * trace.total_prompt_tokens)
    assert told == [(0, 600), (256, 600), (512, 600), (600, 600)]


def test_requests_without_blocks() -> None:
    nothing = np.array([], np.int64)
    empty = Trace("empty", 4, np.zeros(2), np.zeros(3, np.int64), nothing, nothing.astype(np.int32), nothing.copy())
    assert [simulate(empty, policy, 3) for policy in BASELINES] == [0] * len(BASELINES)
    assert [simulate_flat([], policy, 3) for policy in BASELINES] == [0] * len(BASELINES)


@pytest.mark.parametrize("run", [partial(simulate, random_trace(1)), partial(simulate_flat, [1, 2])])
def test_misuse(run: Any) -> None:
    assert BASELINES == ("lru", "arc", "s3fifo", "lru2", "min")
    with pytest.raises(ValueError, match="no policy 'mru': choose from lru, arc, s3fifo, lru2, min"):
        run("mru", 4)
    for capacity in (0, -3):
        with pytest.raises(ValueError, match=f"capacity {capacity}: at least 1 block .*lru, arc, s3fifo, lru2, min"):
            run("lru", capacity)


# --- another simulator -----------------------------------------------------------------------------------------------

FLAT = 20_000


def zipf(seed: int) -> list[int]:
    return (np.random.default_rng(seed).zipf(1.2, FLAT) % 2000 - 7).tolist()


def loop(seed: int) -> list[int]:
    """Round and round, one in three uses somewhere else."""
    random = np.random.default_rng(seed)
    return np.where(random.random(FLAT) < 0.3, random.integers(0, 900, FLAT), np.arange(FLAT) % 500).tolist()


def phases(seed: int) -> list[int]:
    """A hot set that moves, with scans between."""
    random = np.random.default_rng(seed)
    hot = random.zipf(1.5, FLAT) % 300 + np.arange(FLAT) // 5000 * 200
    return np.where(np.arange(FLAT) % 1000 < 300, 10_000 + np.arange(FLAT), hot).tolist()


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
@pytest.mark.parametrize("sequence", [zipf, loop, phases])
def test_flat_sequences_as_another_simulator_counts_them(policy: str, sequence: Any) -> None:
    other = pytest.importorskip("libcachesim")
    for seed in range(3):
        ids = sequence(seed)
        for capacity in (20, 57, 200, 601):
            cache = {"lru": other.LRU, "arc": other.ARC, "s3fifo": other.S3FIFO}[policy](capacity, hashpower=12)
            hits = 0
            for each in ids:
                request = other.Request()
                request.obj_id, request.obj_size = each + 100, 1
                hits += cache.get(request)
            assert simulate_flat(ids, policy, capacity) == hits, (seed, capacity)


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo"])
def test_flat_lists_of_few_objects(policy: str) -> None:
    """Smaller caches than the other simulator takes for S3-FIFO."""
    assert simulate_flat([1, 1, 1, 2, 2, 1], policy, 1) == 3
    assert simulate_flat([5, -6, 5, -6], policy, 2) == 2
    assert simulate_flat([1, 2, 3] * 3, policy, 3) == 6


# --- known ratios of whole traces -------------------------------------------------------------------------------------

CONVERSATION = ("mooncake_conversation.jsonl.gz", (1, 2, 5, 10))
SYNTHETIC = ("mooncake_synthetic.jsonl.gz", (5, 10, 20))
KNOWN: list[tuple[tuple[str, tuple[int, ...]], str, list[float]]] = [
    (CONVERSATION, "lru", [0.0535, 0.0808, 0.1996, 0.2844]),
    (CONVERSATION, "arc", [0.0666, 0.0921, 0.2143, 0.2899]),
    (CONVERSATION, "s3fifo", [0.0692, 0.1089, 0.1899, 0.2298]),
    (CONVERSATION, "min", [0.2513, 0.3204, 0.3736, 0.3736]),
    (SYNTHETIC, "lru", [0.1596, 0.2673, 0.4004]),
    (SYNTHETIC, "arc", [0.1634, 0.2683, 0.4114]),
    (SYNTHETIC, "min", [0.4030, 0.5156, 0.6191]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("where", "policy", "ratios"), KNOWN, ids=[f"{w[0][9:13]}-{p}" for w, p, _ in KNOWN])
def test_hit_ratios_of_whole_traces(where: tuple[str, tuple[int, ...]], policy: str, ratios: list[float]) -> None:
    name, percents = where
    if not (SHARED / name).exists():
        pytest.skip(f"the whole trace {name} is not on this machine; the shipped example is tested above")
    trace = read_trace(SHARED / name)
    found = [simulate(trace, policy, round(trace.unique_blocks * each / 100)) for each in percents]
    assert [each / trace.total_prompt_tokens for each in found] == pytest.approx(ratios, abs=0.003)
