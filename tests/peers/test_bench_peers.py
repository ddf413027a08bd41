"""`make bench-peers`: the orchestrator with fake peers, and the page that is made of its results."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PEERS = ROOT / "bench" / "peers"
NAMES = ("child", "contestants", "measure", "restarts", "report", "run", "workload")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The benchmark's modules, imported as its scripts import each other, and gone again after the test."""
    monkeypatch.syspath_prepend(str(PEERS))
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    for name in NAMES:
        sys.modules.pop(name, None)


def fake(bench: Any, name: str, mode: str, groups: tuple[str, ...] = ("lookup", "memory", "disk", "restart")) -> Any:
    """A fake peer, run by this interpreter; its driver finds the protocol beside the real drivers."""

    class Fake(bench.contestants.Contestant):  # type: ignore[misc, name-defined]
        def environment(self) -> dict[str, str]:
            return {**super().environment(), "PYTHONPATH": str(PEERS)}

    return Fake(name, Path(__file__).with_name("fake_peer.py"), groups, arguments=(mode,))


@pytest.fixture
def race(bench: Any, tmp_path: Path) -> Any:
    """A race of tiercache and two fakes, not run yet."""
    own = bench.contestants.ALL[0]
    assert own.name == bench.contestants.OWN
    return bench.measure.Race(
        plan=bench.measure.QUICK,
        contestants=[own, fake(bench, "good", "honest"), fake(bench, "bad", "wrong")],
        folder=tmp_path,
        scratch=tmp_path,
        say=lambda text: None,
        log=tmp_path / "log",
    )


def by_case(race: Any) -> dict[tuple[str, str, str], dict[str, Any]]:
    found = {(record["group"], record["case"], record["contestant"]): record for record in race.records}
    assert len(found) == len(race.records)
    return found


def test_disks_are_raced_and_wrong_bytes_end_a_contestant(race: Any) -> None:
    race.disk()
    found = by_case(race)
    for case in ("store, 64 KiB", "store, durable, 64 KiB", "read warm, 64 KiB", "read cold, 64 KiB"):
        own, good = found["disk", case, "tiercache"], found["disk", case, "good"]
        assert (own["status"], good["status"]) == ("ok", "ok"), own
        assert own["rounds"] == good["rounds"] == race.plan.rounds
        assert 0 < good["over_own"]["min"] <= good["over_own"]["median"] <= good["over_own"]["max"]
        assert own["over_own"] == {"median": 1.0, "min": 1.0, "max": 1.0}
        assert own["of_memcpy"]["median"] > 0
    bad = found["disk", "read warm, 64 KiB", "bad"]
    assert bad["status"] == "failed"
    assert "'wrong': 1" in bad["why"]
    assert not [path for path in race.scratch.iterdir() if path.name != "log"]  # nothing left on the disk


def test_lookups_and_memory_where_a_peer_dies_or_does_not_know_how(bench: Any, race: Any) -> None:
    race.contestants = [
        race.contestants[0],
        fake(bench, "good", "honest"),
        fake(bench, "mortal", "dies", ("lookup",)),
        fake(bench, "picky", "raises", ("lookup",)),
        fake(bench, "stillborn", "stillborn", ("lookup",)),
    ]
    race.lookups()
    race.memory()
    found = by_case(race)
    for case in ("hit, path of 1", "hit, path of 8", "miss"):
        assert found["lookup", case, "tiercache"]["status"] == found["lookup", case, "good"]["status"] == "ok"
        assert found["lookup", case, "good"]["s"]["min"] >= 0.001
    assert "died during lookup (status 3)" in found["lookup", "hit, path of 1", "mortal"]["why"]
    assert "died during hello (status 1)" in found["lookup", "start", "stillborn"]["why"]
    assert found["lookup", "hit, path of 1", "picky"]["status"] == "ok"
    assert "only one node" in found["lookup", "hit, path of 8", "picky"]["why"]
    assert found["memory", "load, 64 KiB", "tiercache"]["status"] == "ok"
    assert "keeps nothing in memory" in found["memory", "store, 64 KiB", "good"]["why"]


def test_a_silent_child_is_killed(bench: Any, tmp_path: Path) -> None:
    one = fake(bench, "silent", "hangs")
    child = bench.child.Child(one.command(tmp_path), one.environment(), tmp_path / "log")
    assert child.ask("hello") == {"versions": {"fake": "1.0"}}
    child.ask("lookup_setup", blocks=4, nodes=1, other=0)
    assert child.ask("lookup", timeout_s=0.2, hit=True) == {"failed": "no answer to lookup within 0.2 s (SIGKILL)"}
    assert child.process.poll() == -9
    assert "died" in child.ask("hello")["failed"]


def test_restarts_count_what_is_served(bench: Any, race: Any) -> None:
    own, race.contestants = race.contestants[0], race.contestants[1:2]
    bench.restarts.restarts(race)
    check_restarts(race, "good", wrong=race.plan.damaged)
    directory = race.scratch / "own"
    directory.mkdir()
    flipped = bench.restarts._flipped(race, own, str(directory))
    assert (flipped["damaged"], flipped["wrong"], flipped["missed"]) == (race.plan.damaged, 0, race.plan.damaged)


@pytest.mark.slow
def test_restarts_of_tiercache_serve_nothing_wrong(bench: Any, race: Any) -> None:
    race.contestants = race.contestants[:1]
    bench.restarts.restarts(race)
    check_restarts(race, "tiercache", wrong=0)


def check_restarts(race: Any, name: str, wrong: int) -> None:
    """All is found after a clean stop, what was acknowledged after a kill, and so much wrong is served of damage."""
    found, plan = by_case(race), race.plan
    n = plan.restart[0]
    clean = found["restart", "clean stop", name]
    assert (clean["stored"], clean["hits"], clean["right"]) == (n * plan.prompts,) * 3
    killed = found["restart", "kill -9", name]
    assert killed["right"] >= killed["acknowledged"] == n
    assert killed["right"] + killed["wrong"] + killed["missed"] == killed["stored"] == n * (1 + len(plan.kills))
    for case in ("bit flipped", "torn"):
        record = found["restart", case, name]
        assert (record["damaged"], record["wrong"], record["right"]) == (plan.damaged, wrong, n - plan.damaged)


def test_a_peer_that_cannot_be_installed_is_told_and_no_failure(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench.contestants, "_run", lambda command: "pip ended with 1: no such wheel")
    monkeypatch.setattr(bench.contestants, "ALL", bench.contestants.ALL[:2])
    arguments = ["--quick", "--no-write", "--only", "memory", "--folder", str(tmp_path), "--scratch", str(tmp_path)]
    assert bench.run.main(arguments) == 0
    told = capsys.readouterr()
    assert "- lmcache: not installed (pip ended with 1: no such wheel)" in told.out
    assert "store, 64 KiB" in told.out
    assert "building the environment of lmcache" in told.err


def test_an_environment_is_built_once_and_again_when_its_list_changes(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> str:
        commands.append(command)
        (tmp_path / "cache" / "nixl").mkdir(parents=True, exist_ok=True)
        return ""

    monkeypatch.setattr(bench.contestants, "_run", run)
    monkeypatch.setattr(bench.contestants, "HERE", tmp_path)
    (tmp_path / "requirements").mkdir()
    listed = tmp_path / "requirements" / "nixl.txt"
    listed.write_text("one==1\n")
    folder = tmp_path / "cache"
    for _ in range(2):
        assert bench.contestants.prepare("nixl", folder, print).status == "ready"
        assert len(commands) == 2
    assert "--no-deps" in commands[1]
    listed.write_text("one==2\n")
    assert bench.contestants.prepare("nixl", folder, print).status == "ready"
    assert len(commands) == 4
    monkeypatch.setattr(bench.contestants, "LARGEST_NBYTES", 0)
    (folder / "nixl" / "payload").write_bytes(bytes(8192))
    listed.write_text("one==3\n")
    assert "not the CPU builds" in bench.contestants.prepare("nixl", folder, print).why


def test_ratios_are_taken_within_a_round(bench: Any) -> None:
    own = [{"s": 1.0}, {"s": 2.0}, {"s": 4.0}]
    peer = [{"s": 2.0}, {"s": 2.0}, {"s": 2.0}]
    record = bench.measure.summary("lookup", "hit", "peer", peer, own)
    assert record["over_own"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert record["s"] == {"median": 2.0, "min": 2.0, "max": 2.0}
    assert "of_memcpy" not in record


def test_the_page_says_where_a_peer_is_ahead(bench: Any) -> None:
    def record(name: str, case: str, low: float, median: float, high: float) -> dict[str, Any]:
        over = {"median": median, "min": low, "max": high}
        return {"group": "disk", "case": case, "contestant": name, "status": "ok", "over_own": over}

    peers: dict[str, Any] = {"a": {"ahead": {"disk": {"read": "its\n reason."}}}, "b": {}}
    records = [
        record("a", "read cold, 256 KiB", 0.4, 0.5, 0.6),
        record("b", "read cold, 256 KiB", 0.9, 0.99, 1.1),
        record("a", "read cold, 2048 KiB", 0.5, 0.9, 1.2),
        record("b", "store", 0.1, 0.2, 0.3),
        record("tiercache", "store", 0.1, 0.2, 0.3),
    ]
    assert bench.report._ahead(records, peers).splitlines() == [
        "- Disk, read cold: **a** takes, of our time, 256 KiB: 0.50 (0.40 to 0.60); "
        "2048 KiB: 0.90 (0.50 to 1.20), within the spread. its reason.",
        "- Disk, store: **b** takes, of our time, 0.20 (0.10 to 0.30). Why is not known.",
    ]
    assert bench.report._ahead(records[1:2], peers) == "In none of these cases."


def test_the_page_is_what_the_newest_results_say(bench: Any) -> None:
    newest = bench.report.newest()
    assert (ROOT / "docs" / "peers.md").read_text(encoding="utf-8") == bench.report.page(newest)
    results = json.loads(newest.read_text(encoding="utf-8"))
    assert set(results["contestants"]) <= {one.name for one in bench.contestants.ALL}
    assert all(record["rounds"] >= 5 for record in results["records"] if "rounds" in record)
