"""`check_directory`: says what is wrong, changes nothing unless asked to."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from catalog_rig import BLOCK, Rig

from tiercache.catalog_rows import RowStore
from tiercache.errors import ConfigError, DirectoryInUseError, FormatVersionError
from tiercache.scrub import DirectoryReport, check_directory
from tiercache.tiers.base import slot_stride

STRIDE = slot_stride(BLOCK)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    rig = Rig(tmp_path / "kv", 100)
    rig.write(range(70))
    rig.write(range(90, 95), parent=3, tag=2)
    rig.commit()
    rig.close()
    return rig.path


def contents(path: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}


def spoil(path: Path, slot: int, offset: int = 100) -> None:
    with (path / "slots-00.dat").open("r+b") as file:
        file.seek(slot * STRIDE + offset)
        byte = file.read(1)[0]
        file.seek(slot * STRIDE + offset)
        file.write(bytes([byte ^ 16]))


def test_a_whole_directory_is_clean(path: Path) -> None:
    calls: list[tuple[int, int, str]] = []
    before = contents(path)
    report = check_directory(path, scrub=True, progress=lambda *call: calls.append(call))
    assert report.clean and report.problems == ()
    assert (report.rows, report.reachable, report.payload_checked, report.payload_bad) == (75, 75, 75, 0)
    assert report.bytes >= 100 * STRIDE
    assert calls[-1][:2] == (75, 75)
    assert contents(path) == before
    assert "clean" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["clean"] is True
    assert check_directory(path).payload_checked == 0


def test_a_check_that_is_killed_leaves_its_copy_of_token_ids_where_the_next_start_removes_it(
    path: Path, tmp_path: Path
) -> None:
    script = f"""
import os, signal, tiercache.scrub as scrub
scrub.RowStore = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
scrub.check_directory({str(path)!r})
"""
    elsewhere = tmp_path / "scratch"
    elsewhere.mkdir()
    ended = subprocess.run([sys.executable, "-c", script], env={**os.environ, "TMPDIR": str(elsewhere)}, timeout=60)
    assert ended.returncode == -signal.SIGKILL and list(elsewhere.iterdir()) == []
    assert len(list(path.glob("catalog.new-*/data.mdb"))) == 1
    Rig(path, 100).close()
    assert list(path.glob("catalog.new-*")) == []


def test_bad_payload_is_found_and_fixed(path: Path) -> None:
    spoil(path, 60)
    spoil(path, 92)
    before = contents(path)
    assert check_directory(path).clean, "only a scrub reads payload"
    report = check_directory(path, scrub=True)
    assert not report.clean and report.payload_bad == 2 and report.fixed == 0
    assert "2 payloads" in str(report)
    assert contents(path) == before
    fixed = check_directory(path, fix=True, scrub=True)
    assert (fixed.payload_bad, fixed.fixed) == (2, 10 + 3) and not fixed.clean
    again = check_directory(path, scrub=True)
    assert again.clean and again.rows == again.reachable == 62
    rig = Rig(path, 100)
    assert set(rig.recovered()) == {*range(60), 90, 91}
    rig.close()


def test_the_padding_does_not_matter(path: Path) -> None:
    spoil(path, 60, BLOCK)
    assert check_directory(path, scrub=True).clean


def test_a_bad_record_and_what_it_cuts_off(path: Path) -> None:
    store = RowStore(path / "catalog" / "data.mdb", 1 << 24)
    with store._env.begin(write=True) as txn:
        key = (0).to_bytes(8, "big")
        value = bytearray(txn.get(key, db=store._rows))
        value[50] ^= 1
        txn.put(key, bytes(value), db=store._rows)
    store.close()
    before = contents(path)
    report = check_directory(path)
    assert (report.bad_records, report.rows, report.reachable, report.unreachable) == (1, 11, 0, 11)
    assert len(report.problems) == 2
    assert contents(path) == before
    assert check_directory(path, fix=True).fixed == 11
    assert check_directory(path).clean


def test_an_unclean_stop_is_no_damage(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1])
    rig.commit()
    copied = rig.crash_copy(tmp_path / "copy")
    with pytest.raises(DirectoryInUseError):
        check_directory(rig.path, wait_s=0)
    rig.close()
    before = contents(copied)
    assert check_directory(copied, scrub=True).clean
    assert contents(copied) == before


def test_an_unreadable_catalog(path: Path) -> None:
    (path / "catalog" / "data.mdb").write_bytes(b"nonsense" * 4000)
    report = check_directory(path, scrub=True)
    assert report.cold_reason == "corrupt" and not report.clean
    assert (path / "catalog").exists()
    check_directory(path, fix=True)
    assert not (path / "catalog").exists() and list(path.glob("catalog.bad-*"))
    assert check_directory(path) == DirectoryReport(str(path), cold_reason="new", bytes=check_directory(path).bytes)


@pytest.mark.parametrize("reason", ["epoch", "store"])
def test_a_directory_that_would_start_cold(path: Path, reason: str) -> None:
    if reason == "epoch":
        (path / "epoch").write_text("00")
    else:
        (path / "STORE").write_text(json.dumps({"format": 2, "store_id": "ab" * 16}))
    before = contents(path)
    for fix in (False, True):
        report = check_directory(path, fix=fix)
        assert report.cold_reason == reason and not report.clean
        assert contents(path) == before


def test_missing_payload(path: Path) -> None:
    (path / "slots-00.dat").unlink()
    report = check_directory(path, scrub=True)
    assert report.payload_bad == report.payload_checked == 75


def test_a_damaged_store_file_is_left_alone(path: Path) -> None:
    (path / "STORE").write_text("{")
    assert check_directory(path).cold_reason == "store"
    assert (path / "STORE").read_text() == "{"


def test_no_store_there(tmp_path: Path) -> None:
    for place in (tmp_path / "missing", tmp_path):
        with pytest.raises(ConfigError):
            check_directory(place)
    assert list(tmp_path.iterdir()) == []


def test_another_format(path: Path) -> None:
    (path / "STORE").write_text(json.dumps({"format": 99, "store_id": "ab" * 16}))
    with pytest.raises(FormatVersionError, match="use the version that wrote it"):
        check_directory(path, fix=True)
    shutil.rmtree(path)
