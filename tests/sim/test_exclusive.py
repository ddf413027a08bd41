"""Textbook exclusive caching: against a slow reference that looks at every resident, and known figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from sim_kit import random_trace

from tiercache.sim.exclusive import Exclusive, simulate_exclusive
from tiercache.sim.readers import read_trace
from tiercache.sim.trace import Trace

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


class Slow:
    """Two sets of blocks, and when each was last used and last demoted. Every eviction looks at all of them."""

    def __init__(self, trace: Trace, fast: int, slow: int) -> None:
        self.trace, self.parent, self.sizes = trace, trace.parent.tolist(), (fast, slow)
        self.fast: set[int] = set()
        self.slow: set[int] = set()
        self.used: dict[int, int] = {}
        self.demoted: dict[int, int] = {}
        self.writes = 0

    def depth(self, block: int) -> int:
        return 0 if self.parent[block] < 0 else 1 + self.depth(self.parent[block])

    def has_child(self, block: int, among: set[int]) -> bool:
        return any(self.parent[other] == block for other in among)

    def run(self) -> Exclusive:
        hit_tokens = fast_tokens = 0
        tokens = self.trace.tokens
        for now in range(self.trace.requests):
            path = self.trace.path(now).tolist()
            found = next((i for i, block in enumerate(path) if block not in self.fast | self.slow), len(path))
            hit_tokens += int(tokens[path[:found]].sum())
            fast_tokens += int(tokens[[block for block in path[:found] if block in self.fast]].sum())
            for block in path[: self.sizes[0]]:
                self.slow.discard(block)
                self.fast.add(block)
                self.used[block] = now
            while len(self.fast) > self.sizes[0]:
                self.demote()
        return Exclusive(hit_tokens, fast_tokens, self.writes)

    def demote(self) -> None:
        victim = min(self.fast, key=lambda block: (self.used[block], -self.depth(block)))
        assert not self.has_child(victim, self.fast), "the least recently used is a leaf"
        self.fast.remove(victim)
        self.slow.add(victim)
        self.writes += 1
        self.demoted[victim] = self.writes
        if len(self.slow) > self.sizes[1]:
            gone = min(self.slow, key=lambda block: self.demoted[block])
            assert not self.has_child(gone, self.fast | self.slow), "so nothing is cut off from its root"
            self.slow.remove(gone)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("fast", "slow"), [(1, 1), (4, 7), (13, 5), (20, 60)])
def test_it_does_what_the_slow_reference_does(seed: int, fast: int, slow: int) -> None:
    trace = random_trace(seed)
    assert simulate_exclusive(trace, fast, slow) == Slow(trace, fast, slow).run()


def test_what_is_found_leaves_the_slow_level_and_is_written_again() -> None:
    trace = random_trace(3)
    both = simulate_exclusive(trace, trace.unique_blocks, 1)
    assert both.writes == 0 and both.hit_tokens == both.fast_tokens
    assert both.hit_tokens / trace.total_prompt_tokens == pytest.approx(trace.infinite_hit_ratio())
    split = simulate_exclusive(trace, 20, trace.unique_blocks)
    assert split.writes > trace.unique_blocks - 20, "some twice: a block that was brought up is not below any more"


def test_no_level_may_be_empty() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        simulate_exclusive(random_trace(0), 0, 4)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/traces")
@pytest.mark.parametrize(
    ("name", "percents", "hits", "written"),
    [
        ("mooncake_conversation.jsonl.gz", (1, 10), 0.2940, 1.42 * 191_305),
        ("mooncake_conversation.jsonl.gz", (5, 50), 0.3709, 1.35 * 165_247),
        ("mooncake_synthetic.jsonl.gz", (2, 20), 0.4254, 1.66 * 67_054),
        ("claude_code_24h.npz", (1, 5), 0.9588, 4.55 * 471_670),
    ],
)
def test_known_figures(name: str, percents: tuple[int, int], hits: float, written: float) -> None:
    """Token hit ratios and writes of an independent implementation; the latter from how many times fewer another rule
    writes (keep what is brought up, never write partial tails), and from what a third implementation of that writes."""
    trace = read_trace(SHARED / name)
    fast, slow = (round(each / 100 * trace.unique_blocks) for each in percents)
    found = simulate_exclusive(trace, fast, slow)
    assert found.hit_tokens / trace.total_prompt_tokens == pytest.approx(hits, abs=0.0025)
    assert found.writes == pytest.approx(written, rel=0.01)
