"""The store directory: its lock, its modes, its small files."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tiercache.directory
from tiercache.directory import StoreDirectory, filesystem_type, write_durably
from tiercache.errors import CacheClosedError, ConfigError, DirectoryInUseError, FormatVersionError

HOLD = """
import sys, time
from tiercache.directory import StoreDirectory
directory = StoreDirectory.open(sys.argv[1])
print("held", flush=True)
time.sleep(60)
"""


def holder(path: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stdout.readline() == "held\n"
    return child


def stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGKILL)
    child.wait(10)
    assert child.stdout is not None
    child.stdout.close()


def test_two_opens_in_one_process_conflict(tmp_path: Path) -> None:
    first = StoreDirectory.open(tmp_path / "kv")
    with pytest.raises(DirectoryInUseError, match="this process") as caught:
        StoreDirectory.open(tmp_path / "kv", wait_s=0.0)
    assert str(tmp_path / "kv") in str(caught.value)
    first.close()
    first.close()
    assert first.closed
    StoreDirectory.open(tmp_path / "kv", wait_s=0.0).close()


def test_the_same_directory_by_another_name_conflicts(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "kv"):
        (tmp_path / "link").symlink_to(tmp_path / "kv")
        with pytest.raises(DirectoryInUseError):
            StoreDirectory.open(tmp_path / "link", wait_s=0.0)


def test_another_process_conflicts_until_it_is_killed(tmp_path: Path) -> None:
    child = holder(tmp_path / "kv")
    with pytest.raises(DirectoryInUseError, match=f"process {child.pid}"):
        StoreDirectory.open(tmp_path / "kv", wait_s=0.1)
    killer = threading.Timer(0.3, child.kill)
    killer.start()
    begun = time.monotonic()
    StoreDirectory.open(tmp_path / "kv", wait_s=10.0).close()
    assert 0.1 < time.monotonic() - begun < 5.0
    killer.join()
    stop(child)


def test_a_failed_open_leaves_the_owners_files_alone(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "kv") as directory:
        before = {file.name: file.read_bytes() for file in directory.path.iterdir()}
        assert before["lock"] == f"{os.getpid()}\n".encode()
        with pytest.raises(DirectoryInUseError):
            StoreDirectory.open(tmp_path / "kv", wait_s=0.0)
        assert before == {file.name: file.read_bytes() for file in directory.path.iterdir()}


def test_a_forked_child_that_abandons_does_not_unlock(tmp_path: Path) -> None:
    directory = StoreDirectory.open(tmp_path / "kv")
    child = os.fork()
    if child == 0:
        directory.abandon()
        directory.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tiercache.directory._owned.clear()  # ask the kernel, not this process's own list
    with pytest.raises(DirectoryInUseError):
        StoreDirectory.open(tmp_path / "kv", wait_s=0.0)
    directory.close()


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    old = os.umask(umask)
    try:
        with StoreDirectory.open(tmp_path / "kv") as directory:
            directory.write_epoch(b"\x01")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    for name in ("lock", "STORE", "epoch"):
        assert stat.S_IMODE((tmp_path / "kv" / name).stat().st_mode) == 0o600


def test_a_directory_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o755)
    StoreDirectory.open(tmp_path / "kv").close()
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o755


def test_the_store_id_stays(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "kv") as directory:
        first = directory.store_id
        assert len(bytes.fromhex(first)) == 16
    with StoreDirectory.open(tmp_path / "kv") as directory:
        assert directory.store_id == first
    (tmp_path / "kv" / "STORE").write_bytes(b"\xff{")
    with StoreDirectory.open(tmp_path / "kv") as directory:
        assert directory.store_id not in ("", first)
    with StoreDirectory.open(tmp_path / "other") as directory:
        assert directory.store_id != first


def test_an_unknown_format_says_what_to_do_and_frees_the_lock(tmp_path: Path) -> None:
    StoreDirectory.open(tmp_path / "kv").close()
    (tmp_path / "kv" / "STORE").write_text(json.dumps({"format": 7, "store_id": "x"}))
    for _ in range(2):
        with pytest.raises(FormatVersionError, match="use the version that wrote it"):
            StoreDirectory.open(tmp_path / "kv", wait_s=0.0)
    assert "7" in (tmp_path / "kv" / "STORE").read_text()


def test_epoch(tmp_path: Path) -> None:
    directory = StoreDirectory.open(tmp_path / "kv")
    assert directory.read_epoch() is None
    for epoch in (b"", b"tag", bytes(range(256))):
        directory.write_epoch(epoch)
        assert directory.read_epoch() == epoch
    (directory.path / "epoch").write_text("xyz")
    assert directory.read_epoch() is None
    directory.close()
    with pytest.raises(CacheClosedError):
        directory.write_epoch(b"late")


def test_a_failed_replacement_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_durably(tmp_path / "file", b"old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_durably(tmp_path / "file", b"new")
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_replacement_syncs_the_content_then_renames_then_syncs_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, replace, steps = os.fsync, Path.replace, []

    def watched_fsync(fd: int) -> None:
        steps.append(f"sync {Path(f'/proc/self/fd/{fd}').readlink().name}")
        fsync(fd)

    def watched_replace(path: Path, target: Path) -> Path:
        steps.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    write_durably(tmp_path / "file", b"new")
    assert steps == ["sync file.tmp", "rename", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("place", ["file/kv", "file"])
def test_a_path_that_cannot_be_a_directory(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="path"):
        StoreDirectory.open(tmp_path / place)


def test_without_create_nothing_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        StoreDirectory.open(tmp_path / "kv", create=False)
    assert list(tmp_path.iterdir()) == []
    StoreDirectory.open(tmp_path / "kv").close()
    StoreDirectory.open(tmp_path / "kv", create=False).close()


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:25 / /mnt rw shared:5 - xfs /dev/b rw
31 30 0:26 / /mnt/far\\040away rw - nfs4 server:/x rw
32 30 0:27 / /mnt/over rw - overlay overlay rw
33 30 0:28 / /mnt/over rw - tmpfs tmpfs rw
"""


def test_filesystem_type() -> None:
    kinds = {
        "/srv/kv": "ext4",
        "/mnt": "xfs",
        "/mnt/kv": "xfs",
        "/mnt/far away/kv": "nfs4",
        "/mnt/farther": "xfs",
        "/mnt/over/kv": "tmpfs",
    }
    assert {path: filesystem_type(Path(path), MOUNTS) for path in kinds} == kinds
    assert filesystem_type(Path("/x"), "rubbish\n") == "unknown"


@pytest.mark.parametrize(("kind", "word"), [("nfs4", "network"), ("overlay", "container"), ("tmpfs", "memory")])
def test_file_systems_with_a_catch_are_remarked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, word: str
) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 254:0 / / rw - {kind} none rw\n")
    monkeypatch.setattr("tiercache.directory._MOUNTS", mounts)
    with StoreDirectory.open(tmp_path / "kv") as directory:
        assert directory.fs_type == kind and word in directory.remarks[0]
        assert len(caplog.records) == 1
        directory.remark("no O_DIRECT")
        directory.remark("no O_DIRECT")
        assert len(caplog.records) == 2 and directory.remarks[1:] == ["no O_DIRECT"]


def test_facts(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "kv") as directory:
        assert directory.fs_type != "unknown"
        assert directory.free_nbytes() > 0
        assert "open" in repr(directory)
