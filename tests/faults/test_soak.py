"""The soak in short, and that its judgement can fail."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soak
from soak_memory import MemoryCgroup, own_groups
from soak_world import payload, seeds_of, wrong_pages

from tiercache.testing import FlakyTier
from tiercache.tiers.dram import DRAMTier

HEALTHY = {"pinned": 20.0, "lost": 0.0, "threads": 18.0, "fds": 10.0, "rss_mib": 90.0, "lookup p50_ms": 0.1}


def grown(name: str, per_second: float, seconds: int = 60) -> list[str]:
    """What is said to grow where one figure rises by that much each second."""
    noise = np.random.default_rng(1).normal(0, 0.3, seconds)
    samples: list[dict[str, Any]] = []
    for at in range(seconds):
        figures = dict(HEALTHY)
        figures["rss_mib"] += abs(noise[at])
        figures[name] += per_second * at
        samples.append(figures)
    return [each.partition(":")[0] for each in soak.growth(samples)[1]]


@pytest.mark.parametrize(
    "name, per_second",
    [("threads", 0.05), ("fds", 0.05), ("lost", 0.05), ("rss_mib", 0.4), ("pinned", 3.0), ("lookup p50_ms", 0.1)],
)
def test_growth_is_seen(name: str, per_second: float) -> None:
    assert grown(name, per_second) == [name]
    assert grown(name, 0.0) == []


def test_one_wrong_byte_is_seen() -> None:
    seeds = seeds_of(7)
    blocks = payload(seeds)
    assert wrong_pages(blocks, seeds) == 0
    blocks.reshape(-1).view(np.uint8)[3 * 65536 + 5000] ^= 1
    assert wrong_pages(blocks, seeds) == 1
    assert wrong_pages(payload(seeds_of(8)), seeds) == 8 * 16, "another prompt's"


def test_a_flaky_tier_does_what_it_counts() -> None:
    tier = FlakyTier(DRAMTier(8, 4096), errors=0.5, flips=0.5, seed=3, verifies=True)
    rows, slots = np.zeros((8, 4096), np.uint8), np.arange(8, dtype=np.int32)
    failed = sum(8 - int(tier.write(slots, rows).sum()) for _ in range(100))
    assert failed == tier.injected["write error"] > 20
    flipped = 0
    for _ in range(100):
        back = np.zeros_like(rows)
        tier.read(slots, back)
        flipped += int(np.unpackbits(back).sum())
    assert flipped == tier.injected["flip"] > 20
    assert sum(not tier.sync() for _ in range(100)) == tier.injected["sync error"] > 20
    tier.close()


def test_a_cgroup_below_our_own(tmp_path: Path) -> None:
    """Against directories that look like the kernel's, of either version."""
    text = "4:memory:/a/b\n1:cpu:/\n0::/c\n"
    assert [str(path) for path, _ in own_groups(text, Path("/r"))] == ["/r/memory/a/b", "/r/c"]
    with pytest.raises(OSError, match="no memory cgroup"):
        MemoryCgroup(1 << 20, text, tmp_path)
    for place, limit in (("memory/a/b", "memory.limit_in_bytes"), ("c", "memory.max")):
        root = tmp_path / limit
        (root / place).mkdir(parents=True)
        group = MemoryCgroup(1 << 20, text, root)
        assert group.path.parent == root / place
        assert (group.path / limit).read_text() == str(1 << 20)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_soak_for_45_seconds(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("soak.py"))
    command = [sys.executable, script, "--seconds", "45", "--json", "--dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["problems"] == []
    assert report["wrong_pages"] == 0
    assert report["blocks_compared"] > 1000
    assert report["full_median"] > 0.98
    assert sum(report["injected"].values()) > 0
    assert list(tmp_path.iterdir()) == []
