"""Hit ratios of every policy on whole traces: the planner for what the cache offers, simulation for the others.

python -m bench.hit_ratios [--traces DIR] [--quick]

Writes bench/results/hit-ratios/*.json and docs/policy.md. Deterministic but for the seconds. Two processes, about ten
minutes. Traces that are not in DIR are left out, and said to be.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.hit_ratios_page import PAGE, markdown
from bench.machine import ROOT, commit, facts
from tiercache.cli_output import progress_bar
from tiercache.sim.baselines import simulate
from tiercache.sim.exclusive import simulate_exclusive
from tiercache.sim.options import Hints, ReplayOptions, Share
from tiercache.sim.readers import read_trace
from tiercache.sim.replay import run_replay
from tiercache.sim.trace import full_blocks

__all__ = ["RESULTS", "TRACES", "Cell", "measure", "newest"]

RESULTS = Path(__file__).parent / "results" / "hit-ratios"
TRACES = {
    "conversation": "mooncake_conversation.jsonl.gz",
    "synthetic": "mooncake_synthetic.jsonl.gz",
    "claude_code": "claude_code_24h.npz",
}
PERCENTS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
SLOW = {
    "conversation": ((1.0, 10.0), (0.5, 5.0), (2.0, 20.0), (5.0, 50.0)),
    "synthetic": ((2.0, 20.0), (1.0, 10.0), (5.0, 50.0)),
    "claude_code": ((1.0, 5.0),),
}
"""DRAM and NVMe of the replays with a slow tier; targets are set for the first of each trace."""
LIMITS = (7.0, 6.0, 5.5, 5.0)
FEW_LIMITS = (6.0,)
"""At the other sizes, and on claude_code, where nearly everything comes back and none bites."""
PLANNED = ("lru", "reuse")
TEXTBOOK = "exclusive"
"""Both levels LRU, all that is evicted demoted, nothing in both: simulated block by block."""
SIMULATED = ("arc", "s3fifo", "lru2", "min")


@dataclass(frozen=True)
class Cell:
    """One replay."""

    trace: str
    percent: float
    """Capacity of the one tier, of the trace's unique blocks."""
    policy: str
    full: bool = False
    """Full blocks only, as engines hand them over; else partial last blocks are replayed as such."""
    hints: Hints = "none"
    below: float | None = None
    """Capacity of a slow tier, written when DRAM evicts; None: there is none."""
    exclusive: bool | None = None
    max_writes_per_hit: float | None = None


@dataclass(frozen=True)
class Found:
    """What came of it."""

    hit_ratio: float
    infinite: float
    """Of a cache without bounds."""
    blocks: int
    """Block accesses of the trace."""
    fast: float
    """Of `hit_ratio`, what the first tier gave."""
    writes: int
    """Blocks written to the slow tier."""
    seconds: float
    """Processor seconds of one core, reading the trace not included."""


def cells(traces: list[str], quick: bool) -> Iterator[Cell]:
    """All that is measured, longest first."""
    percents = (1.0, 10.0) if quick else PERCENTS
    for trace in sorted(traces, key=lambda name: name != "claude_code"):
        for percent in percents:
            for policy in (*PLANNED, *SIMULATED):
                yield Cell(trace, percent, policy)
            if trace != "claude_code":  # that one has no partial blocks
                for policy in PLANNED:
                    yield Cell(trace, percent, policy, full=True)
        yield Cell(trace, 5.0, "lru", hints="perfect")
        yield Cell(trace, 5.0, "reuse", hints="perfect")
        if not quick:
            yield from slow_tier_cells(trace)


def slow_tier_cells(trace: str) -> Iterator[Cell]:
    """DRAM over NVMe: the textbook; every block leaves NVMe when it is brought up; none does; with limits of writes."""
    for fast, slow in SLOW[trace]:
        limits = LIMITS if (fast, slow) == SLOW[trace][0] and trace != "claude_code" else FEW_LIMITS
        yield Cell(trace, fast, TEXTBOOK, below=slow)
        for policy in PLANNED:
            yield Cell(trace, fast, policy, below=slow, exclusive=True)
            yield Cell(trace, fast, policy, below=slow)
        for limit in limits:
            yield Cell(trace, fast, "reuse", below=slow, max_writes_per_hit=limit)


def measure(cell: Cell, folder: Path) -> Found:
    """Replay one cell. Raises TraceError, OSError."""
    path = folder / TRACES[cell.trace]
    trace = read_trace(path)
    if cell.full:
        trace = full_blocks(trace)
    began = time.process_time()
    fast, writes = 0.0, 0
    if cell.policy in PLANNED:
        options = ReplayOptions(
            str(path),
            Share(cell.percent / 100),
            policy=cell.policy,
            hints=cell.hints,
            nvme=None if cell.below is None else Share(cell.below / 100),
            exclusive=cell.exclusive,
            max_writes_per_hit=cell.max_writes_per_hit,
            in_flight=1,
            no_data=True,
            full_blocks=cell.full,
        )
        report = run_replay(options)
        ratio, fast = report.token_hit_ratio, report.tiers[0].hit_tokens / report.prompt_tokens
        writes = sum(tier.blocks_written for tier in report.tiers[1:])
    elif cell.below is not None:
        slots = (max(1, round(percent / 100 * trace.unique_blocks)) for percent in (cell.percent, cell.below))
        book, tokens = simulate_exclusive(trace, *slots), trace.total_prompt_tokens
        ratio, fast, writes = book.hit_tokens / tokens, book.fast_tokens / tokens, book.writes
    else:
        capacity = max(1, round(cell.percent / 100 * trace.unique_blocks))
        ratio = simulate(trace, cell.policy, capacity) / trace.total_prompt_tokens
    seconds = time.process_time() - began
    return Found(ratio, trace.infinite_hit_ratio(), len(trace.ids), fast, writes, seconds)


def newest() -> Path:
    """The latest results. FileNotFoundError where there are none."""
    found = sorted(RESULTS.glob("*.json"))
    if not found:
        raise FileNotFoundError(f"no results in {RESULTS}: run make hit-ratios")
    return found[-1]


def _measure_all(todo: list[Cell], folder: Path) -> list[tuple[Cell, Found]]:
    found: dict[Cell, Found] = {}
    with progress_bar("hit ratios") as update, ProcessPoolExecutor(2) as pool:
        waiting = {pool.submit(measure, cell, folder): cell for cell in todo}
        for future in as_completed(waiting):
            cell = waiting[future]
            found[cell] = future.result()
            note = f"{cell.trace} {cell.percent:g} % {cell.policy}: {found[cell].hit_ratio:.4f}"
            update(len(found), len(todo), note)
    return [(cell, found[cell]) for cell in todo]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("bench.hit_ratios", description=__doc__)
    parser.add_argument(
        "--traces",
        type=Path,
        default=ROOT.parent / "shared" / "traces",
        help=f"folder with {', '.join(TRACES.values())} (default: ../shared/traces)",
    )
    parser.add_argument("--quick", action="store_true", help="two capacities, and nothing is written")
    return parser.parse_args()


def main() -> int:
    """Measure, write, print. 2 where no trace is there."""
    arguments = _arguments()
    there = [name for name, file in TRACES.items() if (arguments.traces / file).exists()]
    if not there:
        print(f"no trace in {arguments.traces}: give their folder with --traces", file=sys.stderr)
        return 2
    machine, at, began = facts(ROOT), commit(), time.monotonic()
    rows = _measure_all(list(cells(there, arguments.quick)), arguments.traces)
    now = datetime.now(UTC)
    results: dict[str, Any] = {
        "date": f"{now:%Y-%m-%d %H:%M} UTC",
        "seconds": round(time.monotonic() - began),
        "command": "python -m bench.hit_ratios",
        "commit": at,
        "machine": machine,
        "missing": [name for name in TRACES if name not in there],
        "cells": [{**asdict(cell), **asdict(found)} for cell, found in rows],
    }
    if arguments.quick:
        print(markdown(results, "(not kept)"))
        return 0
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{now:%Y%m%dT%H%M%SZ}-{at['id']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(markdown(results, path.name), encoding="utf-8")
    print(f"wrote {path.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
