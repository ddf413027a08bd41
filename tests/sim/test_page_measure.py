"""What is measured for a page, and that it is what the replay itself finds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from page_kit import facts_of, options_for, trace_file

from tiercache.errors import ConfigError
from tiercache.sim.drivers import DriverSettings
from tiercache.sim.options import Share
from tiercache.sim.ordered import ReplayError
from tiercache.sim.page import cells, facts
from tiercache.sim.page.cells import Cell, measure, processes, run_cell, watch
from tiercache.sim.page.choose import LONG_TRACE, SHARES, choose
from tiercache.sim.replay import run_replay
from tiercache.sim.requests import driver_settings, load_trace


def no_process_is_left() -> bool:
    """Ended ones may be listed for a moment, until the pool's own thread has taken note."""
    return wait_until(lambda: not multiprocessing.active_children())


SETTINGS = DriverSettings(100, 500, 4096, "reuse", "none", None)


@pytest.mark.parametrize("hints", ["none", "perfect"])
@pytest.mark.parametrize("nvme", [None, Share(0.3)])
def test_the_watched_replay_is_the_replay(tmp_path: Path, nvme: Share | None, hints: str) -> None:
    options = replace(options_for(tmp_path), nvme=nvme, hints=hints)
    report, trace = run_replay(options), load_trace(options)
    seen = watch(trace, driver_settings(options, trace), options.in_flight)
    assert seen.hits.sum(axis=0).tolist() == [tier.hit_tokens for tier in report.tiers]
    assert report.hit_tokens > 0 and len(seen.nvme_writes) == trace.requests
    assert int(seen.nvme_writes.sum()) == (report.tiers[1].blocks_written if nvme else 0)
    assert (seen.nvme_writes >= 0).all()


def test_facts_are_those_of_the_replay(tmp_path: Path) -> None:
    found = facts_of(options_for(tmp_path))
    report = found.report
    assert found.own.hit_tokens == report.hit_tokens == sum(map(sum, found.timeline.hit_tokens))
    assert found.own.nvme_writes == report.tiers[1].blocks_written == sum(found.timeline.nvme_writes)
    assert found.prompt_tokens == sum(found.timeline.prompt_tokens) == sum(found.sharing.tokens_by_uses)
    assert found.ratio(found.infinite_tokens) == pytest.approx(report.infinite_hit_ratio)
    own = found.sized(found.settings.dram_slots, found.settings.nvme_slots)
    assert own is not None and own.found == found.own
    leaving = found.leaving
    assert sum(leaving.found_tokens) == found.infinite_tokens
    assert leaving.evicted_tokens == found.infinite_tokens - report.hit_tokens


def test_the_sweep_is_within_its_bounds(tmp_path: Path) -> None:
    """Nothing beats MIN by blocks, which are nearly all full here, nor a cache without bounds."""
    found = facts_of(options_for(tmp_path, full_blocks=True))
    assert set(found.sweep) == {"reuse", "lru", "arc", "s3fifo", "lru2", "min"}
    for policy, hits in found.sweep.items():
        assert len(hits) == len(found.capacities)
        assert all(each <= best for each, best in zip(hits, found.sweep["min"], strict=True)), policy
        assert max(hits) <= found.infinite_tokens


@pytest.mark.parametrize("policy", ["reuse", "lru"])
def test_with_room_for_all_every_policy_finds_what_comes_again(tmp_path: Path, policy: str) -> None:
    """The page draws 100 % without measuring it."""
    options = options_for(tmp_path)
    trace = load_trace(options)
    found = run_cell(Cell(policy, trace.unique_blocks, alone=True), trace, options)
    assert found.hit_tokens == round(trace.infinite_hit_ratio() * trace.total_prompt_tokens)


def test_processes_find_the_same_and_end(tmp_path: Path) -> None:
    options = options_for(tmp_path)
    trace = load_trace(options)
    some = [Cell("reuse", 20, 60, watched=True), Cell("lru", 30), Cell("min", 20, simulated=True)]
    told: list[tuple[int, int]] = []
    apart = measure(some, trace, options, lambda done, total, note: told.append((done, total)), 2)
    together = measure(some, trace, options, lambda done, total, note: None, 0)
    assert apart == together
    watched = apart[some[0]].watched
    assert watched is not None and (watched.hits == together[some[0]].watched.hits).all()  # type: ignore[union-attr]
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert no_process_is_left()


def test_a_worker_that_fails_ends_all(tmp_path: Path) -> None:
    """Its error comes through, and no process stays."""
    options = options_for(tmp_path)
    trace = load_trace(options)
    wrong = [Cell("no such policy", 20), *(Cell("lru", slots) for slots in range(20, 60))]
    with pytest.raises(ConfigError, match="no such policy"):
        measure(wrong, trace, options, lambda done, total, note: None, 2)
    assert no_process_is_left()
    gone = replace(options, trace=str(tmp_path / "gone"))
    with pytest.raises(ReplayError, match="ended by itself"):
        measure(wrong[1:], trace, gone, lambda done, total, note: None, 1)
    assert no_process_is_left()


KILLED = """
from pathlib import Path
from tiercache.sim.options import ReplayOptions, Share
from tiercache.sim.page.cells import Cell, measure
from tiercache.sim.requests import load_trace
if __name__ == "__main__":
    options = ReplayOptions("example", Share(0.01), no_data=True)
    trace = load_trace(options)
    cells = [Cell("lru", slots) for slots in range(300, 400)]
    measure(cells, trace, options, lambda done, total, note: print(done, flush=True), 2)
"""


def test_workers_do_not_outlive_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert parent.stdout is not None and parent.stdout.readline() == "0\n"
        assert wait_until(lambda: len(alive(parent.pid)) >= 3)  # it, and two workers
        parent.kill()
        parent.wait(10)
        assert wait_until(lambda: not alive(parent.pid))
    finally:
        if alive(parent.pid):
            os.killpg(parent.pid, signal.SIGKILL)
        parent.communicate()


def wait_until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 20
    while not true() and time.monotonic() < end:
        time.sleep(0.05)
    return true()


def alive(group: int) -> list[int]:
    """Processes of a group that run, but for the one that only cleans up after multiprocessing."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = path.joinpath("stat").read_text().rpartition(")")[2].split()[:3]
            command = path.joinpath("cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_group) == group and state != "Z" and "resource_tracker" not in command:
            found.append(int(path.name))
    return found


def test_processes_only_where_they_pay() -> None:
    assert processes(1000, 70) == 0
    assert 1 <= processes(1_000_000, 70) <= 16
    assert processes(3_000_000, 1) == 1


def test_sizes_around_the_user_s() -> None:
    choice = choose(SETTINGS, 10_000, 50_000)
    assert sorted({cell.dram_slots for cell in choice.grid}) == [50, 100, 200, 400]
    assert {cell.nvme_slots for cell in choice.grid} == {None, 250, 500, 1000, 2000}
    assert choice.own in choice.grid and sum(cell.watched for cell in choice.cells) == 1
    assert len(choice.sweep) == 6 * len(SHARES)
    assert len(choice.cells) == len(set(choice.cells)) == 20 + 42
    assert {cell.policy for cell in choice.sweep if cell.simulated} == {"arc", "s3fifo", "lru2", "min"}
    assert all(cell.alone or cell.simulated for cell in choice.sweep)


def test_fewer_sizes_for_a_long_trace() -> None:
    long, short = (choose(SETTINGS, 10_000, LONG_TRACE + more) for more in (1, 0))
    assert len(long.grid) == 12 < len(short.grid)
    assert len(long.sweep) == len(short.sweep)


def test_of_sizes_with_room_for_all_one_is_enough() -> None:
    choice = choose(replace(SETTINGS, dram_slots=100, nvme_slots=900), 1000, 1000)
    assert sorted({cell.nvme_slots or 0 for cell in choice.grid}) == [0, 450, 900, 1800]
    ample = choose(replace(SETTINGS, dram_slots=100_000, nvme_slots=None), 1000, 1000)
    assert sorted({cell.dram_slots for cell in ample.grid}) == [10, 50, 200, 100_000]
    assert {cell.nvme_slots for cell in ample.grid} == {None, 1000}


def test_one_block_is_enough(tmp_path: Path) -> None:
    """The smallest trace has one capacity, and no figure fails."""
    path = trace_file(tmp_path / "one.jsonl", [(0, [0])])
    found = facts_of(replace(options_for(tmp_path), trace=str(path)))
    assert (found.capacities, found.infinite_tokens, found.span_s) == ((1,), 0, 0.0)
    assert found.per_day is None


def test_gather_uses_processes_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(facts, "measure", lambda *args: asked.append(args[-1]) or cells.measure(*args[:-1], 0))
    monkeypatch.setattr(cells, "_WORTH_A_PROCESS", 1)
    facts_of(options_for(tmp_path), workers=None)
    assert asked[0] >= 1
