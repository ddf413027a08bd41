"""The k-th operation of every kind fails, for every k of a fixed scenario: nothing is left, wrong or lost.

By default some k of each kind (about 30 runs of the scenario); marked slow every k of every kind and error, over DRAM
and NVMe, and of the kinds that HBM adds to (about 1,200 runs).
"""

from __future__ import annotations

import gc
import shutil
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kth_points import KINDS
from kth_scenario import Scenario

from tiercache.testing.faults import FaultPlan

MANY = 30
"""Kinds with more operations than this have two of them fail by default, the others one."""
PARTS = {"array-MemoryError": 6, "directory-EIO": 2, "directory-EMFILE": 2, "directory-ENOSPC": 2}
"""Kinds with so many operations that one test would take minutes: in how many tests they are done."""
WITH_HBM = ("memory-MemoryError", "slots-none", "thread-RuntimeError", "read-wrong", "read-EIO", "write-EIO")
FIRST_OF_KIND = list({kind: name for name, (kind, _, _) in reversed(KINDS.items())}.values())


def run(tmp_path: Path, name: str, nth: int, hbm: bool = False) -> FaultPlan:
    """The scenario with the nth operation of this kind failing."""
    kind, error, effect = KINDS[name]
    place = tmp_path / "run"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    plan = FaultPlan(kind, nth, error(), effect=effect)
    scenario = Scenario(place, plan, hbm)
    try:
        scenario.run()
    except BaseException:
        scenario.abandon()
        raise
    return plan


@pytest.fixture(scope="module", autouse=True)
def frozen() -> Iterator[None]:
    """Each run collects garbage eight times, which should walk what the run made and not all of the test session."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counter[str]:
    """How often each kind of operation happens in the scenario; also that it passes without any fault."""
    plan = FaultPlan()
    Scenario(tmp_path_factory.mktemp("counts"), plan, False).run()
    return plan.counts


@pytest.mark.parametrize("name", FIRST_OF_KIND)
def test_some_k(tmp_path: Path, counts: Counter[str], name: str) -> None:
    """Chosen by the name, so that they are the same each time; the last fifth varies with the threads' order."""
    kind = KINDS[name][0]
    likely = max(1, counts[kind] * 4 // 5)
    for i in range(1 + (likely > MANY)):
        nth = 1 + zlib.crc32(f"{name} {i}".encode()) % likely
        assert run(tmp_path, name, nth).fired, f"the {nth}. {kind} did not happen"


def test_some_k_with_hbm(tmp_path: Path) -> None:
    assert run(tmp_path, "memory-MemoryError", 5, hbm=True).fired


def every(tmp_path: Path, name: str, hbm: bool, first: int = 1, step: int = 1) -> int:
    """Run for k = first, first + step, ... until there is no k-th operation; how many runs had a fault."""
    nth = first
    while run(tmp_path, name, nth, hbm).fired:
        nth += step
    return (nth - first) // step


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name, part", [(name, part) for name in KINDS for part in range(PARTS.get(name, 1))])
def test_every_k(tmp_path: Path, counts: Counter[str], name: str, part: int) -> None:
    parts = PARTS.get(name, 1)
    runs = every(tmp_path, name, False, 1 + part, parts)
    print(f"{name}: {runs} runs")
    assert runs >= counts[KINDS[name][0]] // parts * 3 // 5


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", WITH_HBM)
def test_every_k_with_hbm(tmp_path: Path, name: str) -> None:
    assert every(tmp_path, name, True) > 5
