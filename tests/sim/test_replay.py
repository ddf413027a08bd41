"""Whole replays: the shipped trace with and without data, what is left behind, and the kill."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tiercache.errors import ConfigError, TierCacheError
from tiercache.scrub import check_directory
from tiercache.sim import child, drivers, killed
from tiercache.sim.options import EXAMPLE, ReplayOptions, Share
from tiercache.sim.replay import run_replay
from tiercache.sim.report import ReplayReport
from tiercache.sim.requests import Life
from tiercache.sim.trace import TraceError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def options(path: Path | None = None, **values: Any) -> ReplayOptions:
    usual: dict[str, Any] = {"trace": EXAMPLE, "dram": Share(0.05), "nvme": Share(0.3), "block_nbytes": 4096}
    return ReplayOptions(**{**usual, "nvme_path": path, "requests": 300, **values})


def without_seconds(report: ReplayReport) -> dict[str, Any]:
    """What must not depend on whether there is data."""
    tiers = tuple(dataclasses.replace(tier, read_s=0.0, write_s=0.0) for tier in report.tiers)
    return {**dataclasses.replace(report, tiers=tiers, data=True, verified_blocks=0, seconds=0.0).to_dict()}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"write_after_s": 5.0, "full_blocks": True, "in_flight": 2},
        {"nvme": None, "in_flight": 1, "policy": "lru"},
        {"hints": "perfect"},
        {"max_writes_per_hit": 4.0, "exclusive": True, "write_after_s": 2.0},
    ],
    ids=["plain", "write_after", "dram_only", "hints", "few_writes"],
)
def test_the_shipped_trace_with_and_without_data(tmp_path: Path, values: dict[str, Any]) -> None:
    with_data = run_replay(options(tmp_path, **values))
    without = run_replay(options(None, no_data=True, **values))
    assert without_seconds(with_data) == without_seconds(without)
    assert with_data.wrong_bytes == with_data.failed_blocks == 0
    assert with_data.verified_blocks > 0
    assert with_data.failure == ""
    assert with_data.tiers[0].hit_tokens > 0
    assert with_data.hit_tokens == sum(tier.hit_tokens for tier in with_data.tiers)


def test_what_a_slow_tier_is_told() -> None:
    """A limit of writes, and whether what is brought up leaves it, reach the planner."""
    values = {"no_data": True, "in_flight": 1, "dram": Share(0.02), "nvme": Share(0.2), "requests": 1200}
    always = run_replay(options(None, **values, exclusive=False)).tiers[1]
    few = run_replay(options(None, **values, exclusive=False, max_writes_per_hit=1.5)).tiers[1]
    leaving = run_replay(options(None, **values, exclusive=True)).tiers[1]
    assert 0 < few.blocks_written < 0.8 * always.blocks_written
    assert leaving.blocks_written > always.blocks_written


@pytest.mark.slow
def test_the_whole_shipped_trace_with_and_without_data(tmp_path: Path) -> None:
    with_data = run_replay(options(tmp_path, requests=None))
    assert without_seconds(with_data) == without_seconds(run_replay(options(None, no_data=True, requests=None)))
    assert with_data.requests == 3000
    assert with_data.wrong_bytes == 0


def test_the_reference_on_the_shipped_trace() -> None:
    """Leaf-first LRU on 600 requests at 5 % of their blocks: what the reference implementation finds."""
    report = run_replay(options(nvme=None, no_data=True, in_flight=1, requests=600, policy="lru"))
    assert (report.requests, report.prompt_tokens) == (600, REFERENCE[0])
    assert report.hit_tokens == REFERENCE[1]
    assert report.tiers[0].bytes_written == report.tiers[0].blocks_written * 4096
    assert report.tiers[0].read_s == report.tiers[0].write_s == 0


REFERENCE = (8_293_542, 306_688)
"""Prompt tokens, and hit tokens of a per-block LRU touched from the tail to the root."""


@pytest.mark.slow
@pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/traces")
@pytest.mark.parametrize(("percent", "ratio"), [(1, 0.0535), (5, 0.1996), (10, 0.2844)])
def test_the_reference_on_the_whole_conversation_trace(percent: int, ratio: float) -> None:
    trace = str(SHARED / "mooncake_conversation.jsonl.gz")
    values = {"dram": Share(percent / 100), "nvme": None, "in_flight": 1, "requests": None, "policy": "lru"}
    assert round(run_replay(options(trace=trace, no_data=True, **values)).token_hit_ratio, 4) == ratio


def test_progress_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    run_replay(options(tmp_path, requests=50), lambda *args: told.append(args))
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1][:2] == (50, 50)
    assert told[-1][2].startswith("hit ratio 0.")


# -- what is left behind --------------------------------------------------------------------------------------------


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    place = tmp_path / "made" / "for" / "it"
    run_replay(options(place, requests=30))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    run_replay(options(tmp_path / "mine", requests=30))
    assert [each.name for each in (tmp_path / "mine").iterdir()] == ["file"]


def test_nothing_is_left_behind_by_a_replay_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(idents: Any, out: Any) -> None:
        raise TierCacheError("no payload today")

    monkeypatch.setattr(drivers, "fill_rows", fill)
    with pytest.raises(TierCacheError, match="no payload today"):
        run_replay(options(tmp_path / "place", requests=30))
    assert list(tmp_path.iterdir()) == []


def test_keep_leaves_a_whole_store(tmp_path: Path) -> None:
    report = run_replay(options(tmp_path, requests=60, keep=True, nvme=Share(2.0)))
    found = check_directory(tmp_path, scrub=True)
    assert found.clean
    assert found.payload_checked == found.reachable > report.tiers[1].blocks_written  # DRAM's are there too
    with pytest.raises(ConfigError, match="an empty directory"):
        run_replay(options(tmp_path, requests=60, keep=True))


def test_what_cannot_be_replayed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="policy"):
        run_replay(options(no_data=True, policy="clock"))
    with pytest.raises(ConfigError, match="at least one block"):
        run_replay(options(no_data=True, dram=100))
    (tmp_path / "t.jsonl").write_text(
        json.dumps({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]})
    )
    with pytest.raises(ConfigError, match="at least 2 requests"):
        run_replay(options(tmp_path / "place", kill_at=0.5, requests=1))
    with pytest.raises(TraceError, match="nothing to replay"):
        run_replay(options(trace=str(tmp_path / "t.jsonl"), no_data=True, full_blocks=True))


# -- the kill -------------------------------------------------------------------------------------------------------


def test_killed_midway_it_goes_on_warm(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    report = run_replay(options(tmp_path, kill_at=0.5), lambda *args: told.append(args))
    before, after = report.before_kill, report.after_kill
    assert before is not None
    assert after is not None
    assert 150 <= before.requests <= 158
    assert before.requests + after.requests == report.requests == 300
    assert before.prompt_tokens + after.prompt_tokens == report.prompt_tokens == whole_prompt_tokens()
    assert before.hit_tokens + after.hit_tokens == report.hit_tokens
    assert report.wrong_bytes == 0
    assert report.verified_blocks > 0
    assert report.reopen_s is not None
    assert 0 < report.reopen_s < 60
    assert report.recovered_blocks is not None
    assert report.recovered_blocks > 100
    assert report.warm_tokens > 0
    assert report.failure == ""
    assert report.tiers[1].bytes_read > 0
    assert list(tmp_path.iterdir()) == []
    assert any(note.startswith("killed") for _, _, note in told)
    assert told[-1][:2] == (300, 300)


def whole_prompt_tokens() -> int:
    return run_replay(options(no_data=True)).prompt_tokens


def test_a_short_trace_is_killed_too(tmp_path: Path) -> None:
    """The process never outruns its kill."""
    report = run_replay(options(tmp_path, requests=3, kill_at=0.9, dram=1 << 20, nvme=8 << 20))
    assert report.before_kill is not None
    assert 1 <= report.before_kill.requests <= 2
    assert report.requests == 3


def fake_interpreter(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(stat.S_IRWXU)
    return str(path)


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("cat >/dev/null; echo boom >&2; exit 3", "ended with status 3; it said: boom"),
        ("cat >/dev/null; exit 0", "ended with status 0; it said nothing on stderr"),
        ("kill -TERM $$", "was ended by signal SIGTERM"),
    ],
)
def test_a_process_that_dies_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, says: str) -> None:
    monkeypatch.setattr(sys, "executable", fake_interpreter(tmp_path / "python", script))
    with pytest.raises(killed.ReplayError, match=says):
        run_replay(options(tmp_path / "place", kill_at=0.5))
    assert not (tmp_path / "place").exists()


def test_an_error_of_the_library_in_the_other_process_is_told(tmp_path: Path) -> None:
    """A DRAM tier larger than the machine: only the process that opens the cache finds out."""
    with pytest.raises(killed.ReplayError, match=r"ConfigError: tiers .host memory.*make DRAM smaller"):
        run_replay(options(tmp_path, kill_at=0.5, dram=1 << 50))


def test_a_process_that_stays_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_interpreter(tmp_path / "python", "cat >/dev/null; exec sleep 60"))
    monkeypatch.setattr(killed, "_SILENCE_S", 0.2)
    with pytest.raises(killed.ReplayError, match="said nothing for"):
        run_replay(options(tmp_path / "place", kill_at=0.5))


def test_the_child_ends_when_its_parent_has_gone(tmp_path: Path) -> None:
    """Its pipe is closed: it stops instead of replaying for nobody."""
    task = child.Task(options(tmp_path), tmp_path / "store", 0)
    with killed._Child(task) as process:
        process.follow(Life(2), lambda: None, until=1)
        os.close(process._in)
        process._in = os.open(os.devnull, os.O_RDONLY)
        assert process._process.wait(30) == 1
