"""The two drivers: they decide alike, and what they report is what happened."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from sim_kit import decisions, random_trace

from tiercache.sim import drivers
from tiercache.sim.drivers import CacheDriver, DriverSettings, PlanDriver
from tiercache.sim.requests import Life, arrivals_s, replay_requests
from tiercache.sim.trace import Trace

NBYTES = 4096

SHAPES = [
    # seed, DRAM, NVMe, in flight, write after, longest prompt
    (0, 1, None, 1, None, 8),
    (1, 6, None, 4, None, 8),
    (2, 1, 1, 2, None, 8),
    (3, 8, 4, 4, None, 12),
    (4, 8, 30, 4, None, 12),
    (5, 12, 200, 9, None, 12),
    (6, 30, 300, 4, 0.0, 12),
    (7, 8, 40, 2, 3.0, 12),
    (8, 100, 400, 4, 1.0, 12),
    (9, 160, 1200, 1, None, 200),
    (10, 300, 1200, 7, None, 200),
]


@pytest.mark.parametrize(("seed", "dram", "nvme", "in_flight", "write_after_s", "longest"), SHAPES)
def test_with_and_without_data_the_decisions_are_the_same(
    tmp_path: Path, seed: int, dram: int, nvme: int | None, in_flight: int, write_after_s: float | None, longest: int
) -> None:
    trace = random_trace(seed, requests=60 if longest > 100 else 120, longest=longest)
    settings = DriverSettings(dram, nvme, NBYTES, "lru", "none", write_after_s)
    planned = decisions(PlanDriver(trace, settings), in_flight, check=True)
    assert decisions(CacheDriver(trace, settings, tmp_path), in_flight) == planned


def test_odd_block_sizes_are_verified_too(tmp_path: Path) -> None:
    trace, settings = random_trace(20), DriverSettings(8, 60, 70_001, "lru", "none", None)
    life = Life(2)
    with CacheDriver(trace, settings, tmp_path) as driver:
        for served in replay_requests(driver, 3):
            life.add(served)
        counts = driver.counts()
    assert life.verified_blocks > 0
    assert life.wrong_bytes == 0
    assert life.hit_tokens_by_tier[1] > 0
    assert counts[1].bytes_read % 70_001 == 0
    assert counts[1].bytes_read > 0
    assert counts[1].read_s > 0
    assert counts[0].write_s > 0


def test_a_wrong_block_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block is stored with one wrong byte: it is wrong each time it is loaded."""
    trace, right = random_trace(21), drivers.fill_rows
    victim = int(trace.ids[0])
    uses = sum(victim in trace.path(request) for request in range(trace.requests))

    def fill(idents: np.ndarray, out: np.ndarray) -> None:
        right(idents, out)
        out[idents == victim, 77] ^= 1

    monkeypatch.setattr(drivers, "fill_rows", fill)
    life = Life(1)
    with CacheDriver(trace, DriverSettings(trace.unique_blocks, None, NBYTES, "lru", "none", None), None) as driver:
        for served in replay_requests(driver, 1):
            life.add(served)
    assert uses > 2
    assert life.wrong_bytes == (uses - 1) * NBYTES


def test_torch_tensors_are_verified_too() -> None:
    """Where torch is imported, loaded blocks are tensors."""
    pytest.importorskip("torch")
    trace = random_trace(22)
    life = Life(1)
    with CacheDriver(trace, DriverSettings(500, None, NBYTES, "lru", "none", None), None) as driver:
        for served in replay_requests(driver, 2):
            life.add(served)
    assert life.verified_blocks > 0
    assert life.wrong_bytes == 0


def leaf_lru_hit_tokens(trace: Trace, capacity: int) -> int:
    """A second, simple implementation: per block, touched from the tail to the root; a request's path stays."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in range(trace.requests):
        path = trace.path(request).tolist()
        found = next((i for i, block in enumerate(path) if block not in held), len(path))
        hits += int(trace.tokens[path[:found]].sum())
        for block in path[found:]:
            if len(held) >= capacity:
                victim = next((each for each in held if each not in path), None)
                if victim is None:
                    break
                del held[victim]
            held[block] = None
        for block in reversed(path):
            if block in held:
                held.move_to_end(block)
    return hits


@pytest.mark.parametrize("capacity", [20, 50, 150])
def test_one_tier_is_leaf_lru(capacity: int) -> None:
    trace = random_trace(23, requests=300)
    driver = PlanDriver(trace, DriverSettings(capacity, None, NBYTES, "lru", "none", None))
    hits = sum(served.hit_tokens for served in replay_requests(driver, 1))
    assert hits == leaf_lru_hit_tokens(trace, capacity)


def test_requests_without_blocks_keep_their_place(tmp_path: Path) -> None:
    trace = random_trace(24, requests=10)
    empty = Trace("gaps", 16, np.arange(3.0), np.array([0, 0, 3, 3]), trace.ids[:3], trace.tokens, trace.parent)
    settings = DriverSettings(4, 20, NBYTES, "lru", "none", None)
    for driver in (PlanDriver(empty, settings), CacheDriver(empty, settings, tmp_path)):
        with driver:
            assert [served.request for served in replay_requests(driver, 2)] == [0, 1, 2]


def test_arrivals_keep_the_order_of_one_timestamp() -> None:
    trace = random_trace(25)
    times = arrivals_s(trace)
    assert (np.diff(times) > 0).all()
    assert np.abs(times - trace.times_s).max() < 1e-3
    assert (np.diff(trace.times_s) == 0).any()


@pytest.mark.parametrize(
    ("planned", "blocks", "tokens", "shares"),
    [
        ((3, 2), 5, 80, (48, 32)),
        ((3, 2), 5, 70, (38, 32)),  # a partial block is in DRAM
        ((3, 2), 4, 64, (48, 16)),  # one that was to come from NVMe did not arrive
        ((3, 2), 2, 32, (32, 0)),
        ((0, 2), 0, 0, (0, 0)),
        ((), 0, 0, ()),
    ],
)
def test_tokens_by_tier(planned: tuple[int, ...], blocks: int, tokens: int, shares: tuple[int, ...]) -> None:
    assert drivers._tokens_by_level(planned, blocks, tokens, 16) == shares
