"""Power cuts: whatever unsynced writes are kept, lost or torn, what was acknowledged is there and nothing is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tiercache.testing.crash import Zygote
from tiercache.testing.power import PowerCut, tear_lmdb, tear_unsynced

_LIMIT_S = 600.0


def histories(
    zygote: Zygote, place: Path, tally: Counter[str], seeds: range, durability: str = "power"
) -> list[dict[str, Any]]:
    """What became of each history; two processes share them."""
    argument = {"place": str(place), "durability": durability}
    halves = [[seed for seed in seeds if seed // 2 % 2 == half] for half in (0, 1)]  # each has even and odd ones
    children = [zygote.start("crash_power:histories", {**argument, "seeds": half}, _LIMIT_S) for half in halves]
    status = [child.wait(_LIMIT_S) for child in children]
    found = [facts for child in children for facts in child.reports]
    assert status == [0, 0], "\n".join([str(len(found)), *(child.error for child in children), zygote.log()])
    if durability == "power":
        for facts in found:
            tally.update(facts["counters"])
    return sorted(found, key=lambda facts: facts["seed"])


def total(found: list[dict[str, Any]]) -> Counter[str]:
    return sum((Counter(facts["counters"]) for facts in found), Counter())


def wrong(found: list[dict[str, Any]]) -> dict[int, list[str]]:
    """Per seed; see crash_power on how to run that history again."""
    return {facts["seed"]: facts["problems"] for facts in found if facts["problems"]}


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_power_cuts(zygote: Zygote, place: Path, power_tally: Counter[str], first: int) -> None:
    found = histories(zygote, place, power_tally, range(first, first + 100))
    assert wrong(found) == {}
    counted = total(found)
    assert counted["histories"] == len(found) == 100
    least = {"sessions": 130, "commits": 300, "torn_commits": 15, "opened": 110, "warm": 50, "with_promises": 40}
    least |= {"acked": 500, "served": 1000, "sectors_lost": 500, "sectors_kept": 500, "names_lost": 5}
    assert {what: counted[what] for what in least if counted[what] < least[what]} == {}


@pytest.mark.campaign
@pytest.mark.timeout(int(_LIMIT_S) + 60)
@pytest.mark.parametrize("first", range(1000, 11000, 500))
def test_ten_thousand_power_cuts(zygote: Zygote, place: Path, power_tally: Counter[str], first: int) -> None:
    found = histories(zygote, place, power_tally, range(first, first + 500))
    assert wrong(found) == {}
    assert len(found) == 500


def test_without_data_sync_the_same_histories_lose_what_was_acknowledged(
    zygote: Zygote, place: Path, power_tally: Counter[str]
) -> None:
    """So they can fail; and even then no byte is wrong."""
    found = wrong(histories(zygote, place, power_tally, range(40), durability="process"))
    assert sum(any("acknowledged" in each for each in problems) for problems in found.values()) >= 3
    assert not [each for problems in found.values() for each in problems if "wrong bytes" in each or "check:" in each]


def test_a_history_in_order_can_be_run_again(place: Path) -> None:
    """Same seed, same events: what the campaign finds can be looked at."""
    script = "import json, sys, pathlib, crash_power as c; c.copy_inside(); c.watch_everything(); "
    script += "print(json.dumps([c.history(pathlib.Path(sys.argv[1]), 3010)[name] for name in ('traces', 'counters')]))"
    runs = []
    for number in range(2):
        (place / str(number)).mkdir()
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        command = [sys.executable, "-c", script, str(place / str(number))]
        done = subprocess.run(command, capture_output=True, timeout=60, env={**os.environ, "PYTHONPATH": path})
        assert done.returncode == 0, done.stderr.decode()
        runs.append(json.loads(done.stdout))
    assert runs[0] == runs[1] and len(runs[0][0][0]) > 20


# --- the tools ---------------------------------------------------------------------------------------------------


class Coin:
    """Random numbers as told: every chance is `chance`, every choice the last or the first of the offers."""

    def __init__(self, chance: float, last: bool) -> None:
        self._chance = chance
        self._last = last

    def random(self) -> float:
        return self._chance

    def choice(self, offers: list[float]) -> float:
        return offers[-1 if self._last else 0]


KEEP: Any = Coin(0.99, last=False)
LOSE: Any = Coin(0.0, last=True)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[PowerCut]:
    root = tmp_path / "root"
    (root / "below").mkdir(parents=True)
    (root / "slots-00.dat").write_bytes(b"a" * 4096)
    (root / "name").write_bytes(b"old")
    power = PowerCut(root)
    yield power
    power.end()


def write(files: PowerCut, name: str, data: bytes, offset: int = 0) -> int:
    fd = files.open(str(files.root / name), os.O_RDWR | os.O_CREAT, 0o600)
    assert files.pwritev(fd, [memoryview(data)], offset) == len(data)
    return fd


def left(files: PowerCut, rng: Any, name: str = "slots-00.dat") -> bytes | None:
    target = files.root.with_name("cut")
    files.cut(target, rng)
    path = target / name
    data = path.read_bytes() if path.exists() else None
    shutil.rmtree(target)
    return data


def test_an_unsynced_write_is_kept_or_lost_and_a_synced_one_kept(files: PowerCut) -> None:
    fd = write(files, "slots-00.dat", b"b" * 1024, 512)
    now = b"a" * 512 + b"b" * 1024 + b"a" * 2560
    assert left(files, KEEP) == now and left(files, LOSE) == b"a" * 4096
    files.fdatasync(fd)
    assert left(files, KEEP) == left(files, LOSE) == now
    files.pwritev(fd, [memoryview(b"c" * 100)], 600)
    assert left(files, LOSE) == now
    files.close(fd)


def test_a_write_is_torn_between_sectors_only(files: PowerCut) -> None:
    fd = write(files, "slots-00.dat", b"b" * 2048)
    seen = {left(files, random.Random(seed)) for seed in range(60)}
    assert len(seen) > 4
    for data in seen:
        assert data is not None
        assert all(len(set(data[at : at + 512])) == 1 for at in range(0, 4096, 512)) and data[2048:] == b"a" * 2048
    files.close(fd)


def test_lengths_are_kept_or_lost(files: PowerCut) -> None:
    fd = files.open(str(files.root / "slots-00.dat"), os.O_RDWR, 0o600)
    files.ftruncate(fd, 1000)
    assert left(files, KEEP) == b"a" * 1000 and left(files, LOSE) == b"a" * 4096
    files.fdatasync(fd)
    files.fallocate(fd, 8192)
    assert left(files, KEEP) == b"a" * 1000 + bytes(7192) and left(files, LOSE) == b"a" * 1000
    files.close(fd)


def test_what_is_written_with_os_calls_is_lost_until_it_is_synced(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    files = PowerCut(tmp_path / "root", tracked=("slots-", "epoch"))
    fd = os.open(tmp_path / "root" / "epoch.tmp", os.O_CREAT | os.O_WRONLY, 0o600)
    assert files.write(fd, b"one") == 3 and files.write(fd, b"two") == 3
    files.sync_directory(str(files.root))
    assert left(files, LOSE, "epoch.tmp") == b"" and left(files, KEEP, "epoch.tmp") == b"onetwo"
    files.fsync(fd)
    assert left(files, LOSE, "epoch.tmp") == b"onetwo"
    assert files.counters == {"cuts": 3, "names_lost": 0, "lengths_lost": 1}
    os.close(fd)
    files.end()


def test_names_are_kept_or_lost(files: PowerCut) -> None:
    root = files.root
    files.close(write(files, "slots-01.dat", b"new"))
    (root / "name.tmp").write_bytes(b"new")
    (root / "name.tmp").replace(root / "name")
    files.unlink(str(root / "slots-00.dat"))
    assert left(files, KEEP, "name") == b"new" and left(files, LOSE, "name") == b"old"
    assert left(files, KEEP) is None and left(files, LOSE) == b"a" * 4096
    assert left(files, LOSE, "slots-01.dat") is None
    files.sync_directory(str(root))
    assert left(files, LOSE, "name") == b"new" and left(files, LOSE) is None
    assert left(files, LOSE, "slots-01.dat") == b""  # the name was synced, the content was not


def test_watching_sees_both_ends_and_may_cut(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    seen: list[tuple[str, int]] = []

    def watch(operation: str) -> None:
        power.cut(tmp_path / f"cut{len(seen)}", KEEP)
        seen.append((operation, len(list((tmp_path / f"cut{len(seen)}").iterdir()))))

    power = PowerCut(tmp_path / "root", watch=watch)
    os.close(power.open(str(tmp_path / "root" / "slots-00.dat"), os.O_RDWR | os.O_CREAT, 0o600))
    power.end()
    assert seen == [("open", 0), ("open", 1)]


def test_a_file_that_was_never_synced_keeps_any_pages(tmp_path: Path) -> None:
    content = b"a" * 4096 + b"b" * 4096 + b"c" * 100
    seen = {tear_unsynced(content, random.Random(seed)) for seed in range(200)}
    assert {b"", content, content[: len(content) // 2]} <= seen and len(seen) > 6
    for data in seen:
        assert all(
            data[at : at + 4096] in (content[at : at + 4096][: len(data) - at], bytes(len(data[at : at + 4096])))
            for at in range(0, len(data), 4096)
        )


def test_a_torn_lmdb_file_holds_the_transaction_or_not(tmp_path: Path) -> None:
    path, torn, rng = tmp_path / "data.mdb", tmp_path / "torn.mdb", random.Random(7)
    before, old, which = b"", {}, []
    for step in range(60):
        with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20) as env:
            with env.begin(write=True) as txn:
                for key in rng.sample(range(300), 20):
                    txn.put(b"%d" % key, b"%d" % step * rng.randrange(1, 60))
            with env.begin() as txn:
                new = dict(txn.cursor())
        after = path.read_bytes()
        if before:
            torn.write_bytes(tear_lmdb(before, after, rng))
            with lmdb.open(str(torn), subdir=False, lock=False, map_size=1 << 20) as env, env.begin() as txn:
                which.append([old, new].index(dict(txn.cursor())))
        before, old = after, new
    assert 10 < sum(which) < 50
