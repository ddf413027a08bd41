"""First figures, each a ratio within one run: python bench/basics.py [--json]

- lookup of 131,072 int32 tokens (8,192 blocks of 16), whole hit, on a path of 1 / 64 / 512 nodes beside 2,000 other
  prompts, a fresh array each call; reference: np.array_equal of two such arrays
- DRAM store and load of 256 blocks of 256 KiB and 64 of 2 MiB, bytes checked after; reference: one memcpy of them

Interleaved pairs, medians. Absolute times on a shared machine say little; the ratios are the result.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable

import numpy as np

from tiercache import DRAM, KVLayout, TieredKVCache

PAIRS = 9


def paired(work: Callable[[], object], reference: Callable[[], object]) -> dict[str, float]:
    """Median seconds of both, and the median and spread of their ratio, over interleaved pairs."""
    times, base = [], []
    work()
    reference()
    for _ in range(PAIRS):
        base.append(seconds(reference))
        times.append(seconds(work))
    ratios = sorted(a / b for a, b in zip(times, base, strict=True))
    return {
        "median_s": statistics.median(times),
        "reference_s": statistics.median(base),
        "ratio": statistics.median(ratios),
        "ratio_min": ratios[0],
        "ratio_max": ratios[-1],
    }


def seconds(work: Callable[[], object]) -> float:
    """Of one call."""
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def fill(cache: TieredKVCache, tokens: np.ndarray) -> None:
    """Store what is missing of a prompt."""
    while (match := cache.lookup(tokens)).blocks < len(tokens) // 16:
        n = len(tokens) // 16 - match.blocks
        cache.store(tokens, np.zeros((n, 64), np.uint8), start=match.blocks).wait(30)


def lookup(nodes: int) -> dict[str, float]:
    """A whole hit on a path of that many nodes."""
    rng = np.random.default_rng(nodes)
    tokens = rng.integers(0, 100_000, 131_072).astype(np.int32)
    with TieredKVCache([DRAM(40_000 * 4096)], layout=KVLayout((64,), "uint8")) as cache:
        step = len(tokens) // nodes
        for i in range(1, nodes):
            fill(cache, np.concatenate([tokens[: i * step], rng.integers(0, 100_000, 16).astype(np.int32)]))
        fill(cache, tokens)
        for _ in range(2_000):
            fill(cache, rng.integers(0, 100_000, 64).astype(np.int32))
        other = tokens.copy()
        fresh = iter([tokens.copy() for _ in range(PAIRS + 1)])
        result = paired(lambda: cache.lookup(next(fresh)), lambda: np.array_equal(tokens, other))
        assert cache.lookup(tokens).blocks == 8_192
    return result


def dram(block_nbytes: int, n: int) -> dict[str, dict[str, float]]:
    """Store into and load out of DRAM, against one memcpy of the same bytes."""
    rng = np.random.default_rng(n)
    blocks = rng.integers(0, 255, (n, block_nbytes), dtype=np.uint8)
    out, target = np.zeros_like(blocks), np.zeros_like(blocks)
    prompts = iter([rng.integers(0, 100_000, n * 16).astype(np.int32) for _ in range(PAIRS + 8)])
    with TieredKVCache([DRAM(4 * n * block_nbytes)], layout=KVLayout((block_nbytes,), "uint8")) as cache:
        for _ in range(6):  # every slot is touched before the clock runs
            cache.store(last := next(prompts), blocks).wait(60)

        def store() -> None:
            nonlocal last
            last = next(prompts)
            ticket = cache.store(last, blocks)
            assert ticket.wait(60) and ticket.stored == n

        stored = paired(store, lambda: np.copyto(target, blocks))
        match = cache.lookup(last)
        loaded = paired(lambda: cache.load(match, out=out).result(60), lambda: np.copyto(target, blocks))
        assert match.blocks == n and np.array_equal(out, blocks) and np.array_equal(target, blocks)
    return {"store": stored, "load": loaded}


def main() -> None:
    """Run all and print a table, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    rows = {f"lookup, {nodes} nodes / array_equal": lookup(nodes) for nodes in (1, 64, 512)}
    for nbytes, n in ((256 << 10, 256), (2 << 20, 64)):
        for verb, row in dram(nbytes, n).items():
            rows[f"DRAM {verb}, {n} x {nbytes >> 10} KiB / memcpy"] = row
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    where = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}, {commit.stdout.strip()}"
    if args.json:
        print(json.dumps({"where": where, "rows": rows}))
        return
    print(f"{where}; python bench/basics.py; medians of {PAIRS} pairs")
    print("| what / reference | time ratio | min to max | median |")
    print("|---|---|---|---|")
    for name, row in rows.items():
        spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
        print(f"| {name} | {row['ratio']:.2f} | {spread} | {row['median_s'] * 1e3:.3f} ms |")


if __name__ == "__main__":
    main()
