"""A soak: full tiers, many threads, faults now and then, bounded memory; nothing may grow and no byte be wrong.

    python tests/faults/soak.py --seconds 600

Eight threads look up, load, store, touch, release and invalidate over DRAM and NVMe that are full, while NVMe fails,
flips bits and dawdles at a low rate. Every byte of every load is compared. Each second is sampled; at the end what must
not grow is judged by the medians of the second and of the last tenth of the samples. Exit status 0: all well.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from soak_memory import MemoryCgroup, limit_data, rss_nbytes
from soak_world import VERBS, World, open_cache, parts_of, seeds_of, tokens_of, wrong_pages

from tiercache.cli_output import progress_bar
from tiercache.testing import FlakyTier

DRAM_BLOCKS, NVME_BLOCKS = 512, 2048
PROMPTS = 1200
"""About 5,000 blocks of 64 KiB: twice what fits."""
MIB = 1 << 20
GROWTH = {
    # name: (at most this many times the early median, plus this)
    "pinned": (1.5, 64.0),
    "lost": (1.0, 0.0),
    "threads": (1.0, 0.0),
    "fds": (1.0, 0.0),
    "rss_mib": (1.05, 8.0),
    **{f"{verb} p50_ms": (2.0, 2.0) for verb in VERBS},
    **{f"{verb} p99_ms": (3.0, 50.0) for verb in VERBS},
}
"""Latency is given room, for others may use the machine at one end of the run and not at the other."""


def sample(world: World, at: float) -> dict[str, float]:
    """One second's figures."""
    tiers = world.cache.stats().tiers
    figures: dict[str, float] = {
        "at_s": round(at, 1),
        "pinned": sum(tier.pinned for tier in tiers),
        "lost": sum(tier.lost for tier in tiers),
        "jobs": sum(tier.jobs for tier in tiers),
        "full": min(tier.held / tier.capacity for tier in tiers),
        "threads": threading.active_count(),
        "fds": len(list(Path("/proc/self/fd").iterdir())),
        "rss_mib": rss_nbytes() / MIB,
    }
    for verb, took in world.drain().items():
        figures[f"{verb} n"] = len(took)
        figures[f"{verb} p50_ms"] = float(np.percentile(took, 50)) * 1e3
        figures[f"{verb} p99_ms"] = float(np.percentile(took, 99)) * 1e3
    return figures


def growth(samples: list[dict[str, float]]) -> tuple[dict[str, tuple[float, float]], list[str]]:
    """Medians of the second and of the last tenth, and which of them grew too much."""
    tenth = max(1, len(samples) // 10)
    medians, grown = {}, []
    for name, (factor, more) in GROWTH.items():
        early = [each[name] for each in samples[tenth : 2 * tenth] if name in each]
        late = [each[name] for each in samples[-tenth:] if name in each]
        if not early or not late:
            continue
        medians[name] = median(early), median(late)
        if medians[name][1] > factor * medians[name][0] + more:
            grown.append(f"{name}: {medians[name][0]:.1f} -> {medians[name][1]:.1f}")
    return medians, grown


def fill(world: World) -> None:
    """Work until every slot of every tier was taken once."""
    end = time.monotonic() + 120
    while any(tier.held < 0.99 * tier.capacity for tier in world.cache.stats().tiers) and time.monotonic() < end:
        time.sleep(0.2)
    world.drain()


def at_rest(world: World) -> list[str]:
    """What is wrong once all work has ended and everything is written."""
    cache, problems = world.cache, []
    end = time.monotonic() + 60
    cache.check(fix=True)  # what was found unreadable: blocks behind it could not be written
    while not cache.flush(30.0, to="nvme") and time.monotonic() < end:
        time.sleep(0.1)
    if time.monotonic() >= end:
        problems.append("at rest: a flush does not succeed")
    tiers = cache.stats().tiers
    while any(tier.pinned or tier.jobs or tier.lost for tier in tiers) and time.monotonic() < end:
        time.sleep(0.05)
        tiers = cache.stats().tiers
    problems += [f"{t.name}: {t.pinned} pinned, {t.jobs} jobs, {t.lost} lost" for t in tiers if t.pinned or t.jobs]
    problems += [f"{t.name}: slots do not add up" for t in tiers if t.free + t.held != t.capacity]
    mover = cache.stats().mover
    problems += [f"{name}: {mover[name]}" for name in ("unexpected_errors", "delivery_errors") if mover[name]]
    return problems + cache.check()


def reopen(path: Path) -> tuple[int, list[str]]:
    """Open it again without faults and compare all that is there; how many blocks that is."""
    problems, found = [], 0
    with open_cache(path, DRAM_BLOCKS, NVME_BLOCKS) as cache:
        problems += cache.check()
        for number in range(PROMPTS):
            match = cache.lookup(tokens_of(number))
            out = np.empty((len(parts_of(number)), *cache.layout.block_shape), dtype=np.float32)
            with cache.load(match, out).result(30.0) as loaded:
                found += loaded.block_count
                wrong = wrong_pages(loaded.blocks, seeds_of(number)[: loaded.block_count]) if loaded.block_count else 0
            if wrong:
                problems.append(f"prompt {number}: {wrong} wrong pages after reopening")
    return found, problems


def run(path: Path, seconds: float, threads: int, seed: int) -> dict[str, Any]:
    """The whole soak in a directory."""
    files = len(list(Path("/proc/self/fd").iterdir()))
    flaky: list[FlakyTier] = []
    world = World(open_cache(path, DRAM_BLOCKS, NVME_BLOCKS, flaky), PROMPTS, seed)
    world.start(threads)
    samples: list[dict[str, float]] = []
    try:
        fill(world)
        began = time.monotonic()
        with progress_bar("soak") as update:
            while (at := time.monotonic() - began) < seconds and not world.errors and not world.wrong:
                time.sleep(max(0.0, len(samples) + 1 - at))
                samples.append(sample(world, time.monotonic() - began))
                last = samples[-1]
                note = f"{last['rss_mib']:.0f} MiB, {last['full']:.0%} full, {world.verified} blocks compared"
                update(len(samples), round(seconds), note)
    finally:
        ended = world.stop()
    flaky[0].heal()
    problems = list(world.errors) + ([] if ended else ["a thread of the soak does not end"])
    problems += at_rest(world)
    stats = world.cache.stats()
    if not world.cache.close(60.0):
        problems.append("close: not everything is on NVMe")
    found, more = reopen(path)
    medians, grown = growth(samples)
    problems += more + [f"grew: {each}" for each in grown]
    problems += [f"{world.wrong} wrong pages"] if world.wrong else []
    left = [each.name for each in threading.enumerate() if each.name.startswith("tiercache-")]
    problems += [f"threads left: {left}"] if left else []
    more_files = len(list(Path("/proc/self/fd").iterdir())) - files
    problems += [f"{more_files} files left open"] if more_files > 0 else []
    return {
        "seconds": len(samples),
        "threads": threads,
        "calls": {verb: int(sum(each.get(f"{verb} n", 0) for each in samples)) for verb in VERBS},
        "blocks_compared": world.verified,
        "wrong_pages": world.wrong,
        "full_median": median(each["full"] for each in samples) if samples else 0.0,
        "injected": dict(flaky[0].injected),
        "bad_found": sum(tier.bad for tier in stats.tiers),
        "breaker_trips": sum(tier.trips for tier in stats.tiers),
        "commit_failures": stats.mover["commit_failures"],
        "invalidations_not_durable": world.not_durable,
        "blocks_after_reopen": found,
        "medians": {name: [round(value, 3) for value in pair] for name, pair in medians.items()},
        "rss_peak_mib": round(max((each["rss_mib"] for each in samples), default=0.0), 1),
        "problems": problems,
    }


def summary(report: dict[str, Any]) -> str:
    """For people."""
    lines = [
        f"soak: {report['seconds']} s, {report['threads']} threads, memory bounded by {report['bound']}",
        f"calls: {report['calls']}",
        f"{report['blocks_compared']} blocks compared, {report['wrong_pages']} wrong pages; "
        f"tiers {report['full_median']:.1%} full (median)",
        f"injected: {report['injected']}; breaker trips {report['breaker_trips']}",
        f"{'':<16}{'2nd tenth':>12}{'last tenth':>12}",
        *(f"{name:<16}{early:>12.3f}{late:>12.3f}" for name, (early, late) in report["medians"].items()),
        f"RSS at most {report['rss_peak_mib']} MiB; after reopening {report['blocks_after_reopen']} blocks are right",
        *(f"PROBLEM: {each}" for each in report["problems"]),
        "all well" if not report["problems"] else f"{len(report['problems'])} problems",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="how long, once the tiers are full")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--memory", type=int, default=512, metavar="MIB", help="bound on this process's memory")
    parser.add_argument("--cgroup", action="store_true", help="bound it by a child of our own memory cgroup")
    parser.add_argument("--dir", type=Path, help="where the NVMe tier goes (default: a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    args = parser.parse_args(arguments)
    group = MemoryCgroup(args.memory * MIB) if args.cgroup else None
    if group is not None:
        group.enter()
    else:
        limit_data(args.memory * MIB)
    path = Path(tempfile.mkdtemp(prefix="tiercache-soak-", dir=args.dir))
    try:
        report = run(path, args.seconds, args.threads, args.seed)
        report["bound"] = f"{args.memory} MiB, {'a memory cgroup' if group is not None else 'RLIMIT_DATA'}"
        if group is not None:
            report["cgroup_peak_mib"] = round(group.peak_nbytes() / MIB, 1)
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if group is not None:
            group.leave()
    print(json.dumps(report) if args.json else summary(report), flush=True)
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
