"""What docs/policy.md says is what was measured, and is still so."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.hit_ratios import SLOW, TRACES, Cell, cells, measure, newest, slow_tier_cells
from bench.hit_ratios_page import (
    FEWER_WRITES,
    MOST_LOST,
    PAGE,
    TARGETS,
    WORST_LOSS,
    Target,
    fewest_writes,
    markdown,
    value_of,
)
from tiercache.sim import example
from tiercache.sim.options import ReplayOptions, Share
from tiercache.sim.replay import run_replay

SHARED = Path(__file__).resolve().parents[2] / "shared" / "traces"


def test_the_page_is_that_of_the_newest_results() -> None:
    path = newest()
    results = json.loads(path.read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == markdown(results, path.name), "run make hit-ratios"
    assert results["commit"]["dirty"] is False and results["missing"] == []
    assert "NOT REACHED" not in PAGE.read_text(encoding="utf-8")


def test_nowhere_it_is_worse_than_lru_and_no_policy_beats_the_optimum() -> None:
    results = json.loads(newest().read_text(encoding="utf-8"))
    compared = 0
    for cell in cells(list(TRACES), quick=False):
        found = value_of(results, **{field.name: getattr(cell, field.name) for field in dataclasses.fields(Cell)})
        assert found is not None, cell
        if cell.full or cell.hints != "none" or cell.below is not None:
            continue
        best = value_of(results, cell.trace, cell.percent, "min")
        least = value_of(results, cell.trace, cell.percent, "lru")
        assert best is not None and least is not None
        assert found["hit_ratio"] <= best["hit_ratio"] + 0.005 and found["hit_ratio"] <= found["infinite"] + 1e-9
        if cell.policy == "reuse":
            compared += 1
            assert found["hit_ratio"] >= least["hit_ratio"] - WORST_LOSS, cell
    assert compared == 21


@pytest.mark.parametrize(("trace", "fast", "times"), FEWER_WRITES)
def test_a_slow_tier_is_written_so_many_times_less_at_half_a_point_of_hits(
    trace: str, fast: float, times: float
) -> None:
    results = json.loads(newest().read_text(encoding="utf-8"))
    found = fewest_writes(results, trace, fast, own=False)
    assert found is not None
    fewer, best = found
    textbook = value_of(results, trace, fast, "exclusive", below=best["below"])
    assert textbook is not None and best["policy"] == "reuse" and not best["exclusive"]
    assert fewer == textbook["writes"] / best["writes"] >= times
    assert best["hit_ratio"] >= textbook["hit_ratio"] - MOST_LOST


@pytest.mark.parametrize(("trace", "fast", "slow"), [(trace, *size) for trace in SLOW for size in SLOW[trace]])
def test_at_neighbouring_sizes_one_limit_writes_less_and_loses_little(trace: str, fast: float, slow: float) -> None:
    results = json.loads(newest().read_text(encoding="utf-8"))
    textbook = value_of(results, trace, fast, "exclusive", below=slow)
    free = value_of(results, trace, fast, "reuse", below=slow)
    limited = value_of(results, trace, fast, "reuse", below=slow, max_writes_per_hit=6.0)
    lru = value_of(results, trace, fast, "lru", below=slow)
    assert textbook is not None and free is not None and limited is not None and lru is not None
    assert free["hit_ratio"] >= lru["hit_ratio"] - MOST_LOST and free["writes"] <= textbook["writes"]
    assert limited["writes"] <= 1.01 * free["writes"]


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/traces")
@pytest.mark.parametrize("trace", ["conversation", "synthetic"])
def test_the_slow_tier_on_the_whole_traces(trace: str) -> None:
    """Those of the target's size; claude_code takes minutes."""
    results, fast = json.loads(newest().read_text(encoding="utf-8")), SLOW[trace][0][0]
    for cell in slow_tier_cells(trace):
        if cell.percent == fast and (cell.policy == "exclusive" or cell.max_writes_per_hit is not None):
            recorded = value_of(results, **{each.name: getattr(cell, each.name) for each in dataclasses.fields(Cell)})
            found = measure(cell, SHARED)
            assert recorded is not None and found.writes == recorded["writes"]
            assert found.hit_ratio == pytest.approx(recorded["hit_ratio"], abs=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/traces")
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_the_targets_on_the_whole_traces(target: Target) -> None:
    found = measure(Cell(target.trace, target.percent, "reuse", hints=target.hints), SHARED)  # type: ignore[arg-type]
    assert found.hit_ratio >= target.least
    recorded = value_of(json.loads(newest().read_text()), target.trace, target.percent, "reuse", hints=target.hints)
    assert recorded is not None and found.hit_ratio == pytest.approx(recorded["hit_ratio"], abs=1e-9)


@pytest.mark.parametrize(("percent", "least"), [(1, 0.002), (2, 0.008), (5, 0.03)])
def test_on_the_shipped_trace_it_finds_more_than_lru(percent: int, least: float) -> None:
    """The trace ships with the package, so this is measured everywhere."""
    ratios = {}
    for policy in ("lru", "reuse"):
        options = ReplayOptions(str(example.path()), Share(percent / 100), policy=policy, in_flight=1, no_data=True)
        ratios[policy] = run_replay(options).token_hit_ratio
    assert ratios["reuse"] >= ratios["lru"] + least, ratios
