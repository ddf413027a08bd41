"""What a load is expected to take, how much of it is offered for that, and when a level is measured."""

import math
import random
import statistics
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planner_kit import NBYTES, Bench, dram

from tiercache.planner.cost import LevelCost, best_offer
from tiercache.planner.offer import REMEASURE_S
from tiercache.types import JobResult, LevelSpec

MIB = 1 << 20
EXPECTED = {"read_latency_s": 1.0, "read_nbytes_per_s": NBYTES / 0.25}
SLOW = LevelSpec("nvme", 32, NBYTES, persistent=True, pool_threads=8, **EXPECTED)
"""A second until the first byte, a quarter of one for each block."""


# --- one level -------------------------------------------------------------------------------------------------------


def test_what_is_known_of_nothing_takes_no_time():
    assert LevelCost().seconds(1 << 30) == 0.0
    assert LevelCost(0.5, 2e9).seconds(4 * 10**9) == pytest.approx(2.5)


def test_the_first_job_is_believed_and_an_outlier_is_not():
    cost = LevelCost(1e-3, 1e9)
    cost.learn(16 * MIB, 0.1)
    assert cost.seconds(16 * MIB) == pytest.approx(0.1, rel=0.1)
    for _ in range(20):
        cost.learn(16 * MIB, 0.1)
    before = cost.seconds(16 * MIB)
    assert before == pytest.approx(0.1, rel=0.02)
    cost.learn(16 * MIB, 100.0)
    assert cost.seconds(16 * MIB) < 1.08 * before


@pytest.mark.parametrize("change", [10.0, 0.1])
def test_a_level_that_changed_is_known_after_some_tens_of_jobs(change):
    cost = LevelCost()
    for _ in range(50):
        cost.learn(16 * MIB, 0.01)
    for _ in range(40):
        cost.learn(16 * MIB, 0.01 * change)
    assert cost.seconds(16 * MIB) == pytest.approx(0.01 * change, rel=0.25)


@pytest.mark.parametrize("wrong", [(0, 1.0), (-1, 1.0), (MIB, 0.0), (MIB, -1.0), (MIB, math.inf), (MIB, math.nan)])
def test_a_job_that_tells_nothing_is_ignored(wrong):
    cost = LevelCost(1e-3, 1e9)
    cost.learn(*wrong)
    assert (cost.jobs, cost.latency_s, cost.s_per_byte) == (0, 1e-3, 1e-9)


def device(latency_s, nbytes_per_s, jobs=160, seed=1):
    """A disk that takes jobs in order, each after a latency of its own. Yields (bytes with those ahead, seconds)."""
    chance, now, free = random.Random(seed), 0.0, 0.0
    queue: deque[tuple[float, int]] = deque()
    for _ in range(jobs):
        now += chance.expovariate(nbytes_per_s / (40 * MIB))
        for _ in range(chance.choice([1, 1, 1, 4])):
            nbytes = chance.choice([MIB // 4, 2 * MIB, 16 * MIB, 64 * MIB])
            while queue and queue[0][0] <= now:
                queue.popleft()
            free = max(free, now) + nbytes / nbytes_per_s
            queue.append((free + latency_s, nbytes))
            yield sum(n for _, n in queue), (free + latency_s - now) * chance.lognormvariate(0, 0.1)


@pytest.mark.parametrize("expected", [(0.0, 0.0), (1e-3, 1e9)])
@pytest.mark.parametrize(
    ("latency_s", "nbytes_per_s"), [(1e-4, 5e9), (1e-3, 2e9), (5e-3, 2e8), (2e-5, 2e10), (1e-3, 1e8)]
)
def test_a_device_is_learnt_with_its_queue(latency_s, nbytes_per_s, expected):
    cost, ratios = LevelCost(*expected), []
    for nbytes, seconds in device(latency_s, nbytes_per_s):
        ratios.append(cost.seconds(nbytes) / seconds)
        cost.learn(nbytes, seconds)
    assert statistics.median(ratios[40:]) == pytest.approx(1.0, abs=0.2)
    assert cost.seconds(256 * MIB) == pytest.approx(latency_s + 256 * MIB / nbytes_per_s, rel=0.3)
    for nbytes in (2 * MIB, 16 * MIB, 64 * MIB):
        estimate, real = cost.seconds(nbytes), latency_s + nbytes / nbytes_per_s
        assert estimate == pytest.approx(real, rel=0.3), nbytes


# --- how much is offered ---------------------------------------------------------------------------------------------

LEVELS = st.lists(st.tuples(st.floats(0, 10), st.one_of(st.just(0.0), st.floats(1e-6, 1))), min_size=1, max_size=3)


@given(
    LEVELS,
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.booleans()), min_size=1, max_size=6),
    st.one_of(st.floats(1e-6, 1), st.sampled_from([0.25, 0.5])),
)
def test_the_offer_is_the_best_of_all(levels, layout, block_s):
    stretches = []
    for level, blocks, joined in layout:
        first_s, each_s = levels[level % len(levels)]
        stretches.append((level % len(levels), blocks, first_s, 0.0 if joined else each_s))

    def seconds(k):
        until = {}
        for level, blocks, first_s, each_s in stretches:
            if k <= 0:
                break
            until[level] = until.get(level, first_s) + min(k, blocks) * each_s
            k -= blocks
        return max(until.values(), default=0.0)

    total = sum(blocks for _, blocks, _, _ in stretches)
    k, estimate = best_offer(stretches, block_s)
    assert 0 <= k <= total and estimate == pytest.approx(seconds(k), rel=1e-9, abs=1e-9)
    best = max(each * block_s - seconds(each) for each in range(total + 1))
    assert k * block_s - seconds(k) == pytest.approx(best, rel=1e-9, abs=1e-9)
    assert k == 0 or seconds(k) < k * block_s, "a load that takes as long as the recompute is not offered"


def test_a_slow_level_is_offered_as_far_as_it_stays_in_the_shadow_of_another():
    fast, slow = (0, 10, 5.0, 0.0), (1, 10, 1.0, 2.0)
    assert best_offer([fast, slow], 1.0) == (12, 5.0)
    assert best_offer([fast, slow], 2.5) == (20, 21.0), "each block gains"
    assert best_offer([slow, fast], 0.1) == (0, 0.0)


# --- in the planner --------------------------------------------------------------------------------------------------


def on_disk(spec=SLOW, capacity=32, **options):
    """A planner that found abcdefgh on a disk at its start."""
    return Bench.holding({"abcdefgh"[: i + 1]: float(i) for i in range(8)}, dram(capacity), spec, **options)


def test_without_a_speed_everything_is_offered():
    bench = on_disk()
    found = bench.lookup("abcdefgh")
    assert (found.blocks, found.withheld, found.load_s) == (8, 0, 1.0 + 8 * 0.25)
    assert bench.jobs() == [] and bench.planner.totals().blocks_withheld == 0
    bench.finish()


def test_only_what_pays_is_offered_and_the_rest_is_counted():
    bench = on_disk()
    found = bench.lookup("abcdefgh", block_s=0.375)
    assert (found.blocks, found.withheld, found.by_level, found.load_s) == (0, 8, (0, 0), 0.0), "8 x .375 s = 3 s"
    found = bench.lookup("abcdefgh", block_s=0.5)  # the probe that the first one caused is ahead: 3.5 s
    assert (found.blocks, found.withheld, found.by_level, found.pending) == (8, 0, (0, 8), 0)
    totals = bench.planner.totals()
    assert (totals.found_blocks, totals.blocks_withheld) == (16, 8)
    bench.finish()


def test_what_is_fast_is_offered_and_what_is_slow_behind_it_is_not():
    bench = on_disk()
    bench.load("abcd")
    bench.deliver_all()
    bench.state.costs[1] = LevelCost(1.0, NBYTES / 0.25)
    found = bench.lookup("abcdefgh", block_s=0.2)
    assert (found.blocks, found.withheld, found.by_level, found.load_s) == (4, 4, (4, 0), 0.0)
    bench.finish()


def test_queued_loads_are_ahead_and_blocks_under_way_are_not_read_twice():
    bench = on_disk()
    before = bench.lookup("abcdefgh").load_s
    bench.load("abcdefgh")
    assert bench.lookup("abcdefgh").load_s == pytest.approx(before), "a second load joins it"
    assert bench.lookup("abcdefgh", block_s=before / 8 + 0.01).blocks == 8
    bench.finish()


def test_a_level_is_measured_once_it_holds_blocks_and_anew_when_blocks_are_withheld():
    bench = on_disk()
    assert bench.jobs() == []
    bench.lookup("abcdefgh", block_s=0.01)
    probe = bench.job("probe")
    assert (probe.src_level, probe.n) == (1, 2), "a sixteenth of the slots"
    bench.lookup("abcdefgh", block_s=0.01)
    assert bench.job("probe") is probe, "not twice"
    bench.deliver(probe.id, seconds=2e-3)
    assert bench.state.costs[1].jobs == 1 and bench.planner.level_counters()[1].load_nbytes == 0
    assert bench.lookup("abcdefgh", block_s=0.01).blocks == 8, "the disk is faster than was thought"
    for _ in range(20):
        bench.state.costs[1].learn(NBYTES, 10.0)
    assert bench.lookup("abcdefgh", block_s=0.01).blocks == 0
    bench.now += REMEASURE_S
    assert bench.jobs() == []
    bench.lookup("abcdefgh", block_s=0.01)
    assert bench.job("probe").n == 2 and bench.planner.totals().probes == 2
    bench.finish()


def test_a_start_that_found_blocks_measures_at_once_where_that_was_asked_for():
    bench = on_disk(measures=True)
    bench.take()
    assert bench.job("probe").src_level == 1
    bench.deliver_all()
    bench.stored("xyz")
    assert bench.job("probe").src_level == 0, "now that memory holds blocks"
    bench.finish()


def test_a_probe_that_finds_a_block_wrong_marks_it():
    bench = on_disk(measures=True)
    bench.take()
    probe = bench.job("probe")
    bench.deliver(probe.id, ok=[False, True], reason="checksum")
    assert bench.planner.level_counters()[1].bad == 1 and bench.planner.level_counters()[1].failed_writes == 0
    bench.finish()


def test_a_new_epoch_while_a_probe_is_under_way():
    bench = on_disk(measures=True)
    bench.take()
    bench.new_epoch(b"other")
    bench.deliver_all()
    assert bench.state.costs[1].jobs == 0
    bench.finish()


def test_the_breaker_keeps_probes_from_a_level_that_is_offline():
    bench = on_disk()
    bench.state.breakers[1].retry_at = bench.now + 100
    assert bench.lookup("abcdefgh", block_s=0.01).blocks == 0 and bench.jobs() == []


def test_a_job_is_learnt_with_its_wait_and_with_what_was_ahead():
    bench = on_disk(LevelSpec("nvme", 32, NBYTES, persistent=True, pool_threads=8))
    for prompt in ("ab", "abcdef"):
        bench.load(prompt)
    first, second = bench.jobs("load")
    ahead = [bench.state.jobs[job.id].ahead_nbytes for job in (first, second)]
    assert (first.n, second.n, ahead) == (2, 4, [0, 2 * NBYTES])
    bench.planner.commit(JobResult(first.id, np.ones(2, np.bool_), 2 * NBYTES, 0.5, waited_s=1.5), bench.now)
    assert bench.state.costs[1].seconds(2 * NBYTES) == pytest.approx(2.0)
    bench.planner.commit(JobResult(second.id, np.ones(4, np.bool_), 4 * NBYTES, 4.0, waited_s=2.0), bench.now)
    assert bench.state.costs[1].seconds(6 * NBYTES) == pytest.approx(6.0, rel=0.1), "those ahead included"


def test_a_load_that_failed_in_part_tells_nothing_of_the_level():
    bench = on_disk()
    bench.load("ab")
    bench.deliver(bench.job("load").id, ok=[True, False], reason="io", seconds=100.0)
    assert bench.state.costs[1].jobs == 0
    bench.finish()


def test_a_load_is_a_measurement_too():
    bench = Bench(dram(8))
    bench.stored("ab")
    bench.now += 5.0
    bench.release_load(bench.load("ab"))
    bench.load("ab", out=True)
    bench.deliver(bench.job("load").id)
    assert bench.state.measured_at[0] == bench.now
