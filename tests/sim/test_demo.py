"""The demo: what it finds out of the machine before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiercache.sim import demo

MEMINFO = "MemTotal:       24684408 kB\nMemFree:         1000 kB\nMemAvailable:    4000 kB\n"


@pytest.mark.parametrize(
    ("files", "nbytes"),
    [
        ({}, None),
        ({"/proc/meminfo": MEMINFO}, 4_096_000),
        (
            {
                "/proc/meminfo": MEMINFO,
                "/proc/self/cgroup": "0::/a/b\n",
                "/sys/fs/cgroup/a/b/memory.max": "max\n",
                "/sys/fs/cgroup/a/memory.max": "3000000\n",
                "/sys/fs/cgroup/a/memory.current": "2500000\n",
                "/sys/fs/cgroup/a/memory.stat": "anon 1\ninactive_file 400000\n",
            },
            900_000,
        ),
        (
            {
                "/proc/self/cgroup": "0::/\n",
                "/sys/fs/cgroup/memory.max": "1000\n",
                "/sys/fs/cgroup/memory.current": "2000\n",
            },
            0,
        ),
    ],
)
def test_free_memory(files: dict[str, str], nbytes: int | None) -> None:
    assert demo.free_memory_nbytes(lambda path: files.get(path, "")) == nbytes


def test_this_machine_says_something() -> None:
    free = demo.free_memory_nbytes(demo._read_text)
    assert free is not None
    assert free > 0


def test_room_is_asked_for_where_the_directory_will_be(tmp_path: Path) -> None:
    assert demo._free_disk_nbytes(tmp_path / "not" / "yet") == demo._free_disk_nbytes(tmp_path)
    with pytest.raises(demo.NoRoomError, match=f"6GiB of disk; 1MiB is free in {tmp_path}"):
        demo.check_room(tmp_path, read=lambda path: "", free_disk=lambda place: 1 << 20)
    with pytest.raises(demo.NoRoomError, match=r"1\.5GiB of memory; 3\.9MiB is free"):
        demo.check_room(tmp_path, read=lambda path: {"/proc/meminfo": MEMINFO}.get(path, ""))
    demo.check_room(tmp_path, read=lambda path: "", free_disk=lambda place: demo.DISK_NBYTES)


def test_the_place_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "filesystem_type", lambda path: "tmpfs" if path != Path("/var/tmp") else "ext4")
    assert demo.demo_place() == Path("/var/tmp")
    monkeypatch.setattr(demo, "filesystem_type", lambda path: "tmpfs")
    assert demo.demo_place() != Path("/var/tmp")
