"""The demo: the example trace with real bytes in DRAM and on NVMe, killed midway."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tiercache.config import format_size
from tiercache.directory import filesystem_type
from tiercache.errors import TierCacheError
from tiercache.sim.options import EXAMPLE, ReplayOptions

__all__ = [
    "DISK_NBYTES",
    "MEMORY_NBYTES",
    "NoRoomError",
    "check_room",
    "demo_options",
    "demo_place",
    "free_memory_nbytes",
]

DRAM_NBYTES = 1 << 30
NVME_NBYTES = 5 << 30
MEMORY_NBYTES = DRAM_NBYTES + (512 << 20)
"""Memory that must be free: the DRAM tier, and what the processes themselves take."""
DISK_NBYTES = 6 << 30
"""Disk that must be free."""

_IN_MEMORY = ("tmpfs", "ramfs")


class NoRoomError(TierCacheError):
    """The machine has not what the demo needs. The message says what is there."""


def demo_options(place: Path | None = None, *, keep: bool = False, requests: int | None = None) -> ReplayOptions:
    """What the demo replays, with its NVMe tier under `place` (None: see `demo_place`)."""
    return ReplayOptions(
        trace=EXAMPLE,
        dram=DRAM_NBYTES,
        nvme_path=place or demo_place(),
        nvme=NVME_NBYTES,
        in_flight=4,
        requests=requests,
        kill_at=0.5,
        keep=keep,
    )


def demo_place() -> Path:
    """A directory for temporary files on a disk: the system's, or /var/tmp where that one is in memory."""
    places = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    return next((each for each in places if each.is_dir() and filesystem_type(each) not in _IN_MEMORY), places[0])


def check_room(
    place: Path, read: Callable[[str], str] | None = None, free_disk: Callable[[Path], int] | None = None
) -> None:
    """NoRoomError where memory or disk under `place` is short. `read` (a file's text, "" where there is none) and
    `free_disk` are replaced in tests."""
    memory = free_memory_nbytes(read or _read_text)
    if memory is not None and memory < MEMORY_NBYTES:
        raise NoRoomError(f"the demo needs {format_size(MEMORY_NBYTES)} of memory; {format_size(memory)} is free")
    disk = (free_disk or _free_disk_nbytes)(place)
    if disk < DISK_NBYTES:
        raise NoRoomError(
            f"the demo needs {format_size(DISK_NBYTES)} of disk; {format_size(disk)} is free in {place}: "
            "name another directory with --dir"
        )


def free_memory_nbytes(read: Callable[[str], str]) -> int | None:
    """Memory that could be had now, of the machine and of the cgroup (v2); None where nothing is known."""
    free = []
    match = re.search(r"^MemAvailable:\s+(\d+) kB", read("/proc/meminfo"), re.MULTILINE)
    if match:
        free.append(int(match[1]) * 1024)
    group = re.search(r"^0::(/.*)$", read("/proc/self/cgroup"), re.MULTILINE)
    own = PurePosixPath(group[1]) if group else PurePosixPath("/")
    for folder in (own, *own.parents):
        top = PurePosixPath("/sys/fs/cgroup", *folder.parts[1:])
        most, used = read(f"{top}/memory.max").strip(), read(f"{top}/memory.current").strip()
        if most.isdecimal() and used.isdecimal():
            cached = re.search(r"^inactive_file (\d+)$", read(f"{top}/memory.stat"), re.MULTILINE)
            free.append(max(0, int(most) - int(used) + (int(cached[1]) if cached else 0)))
    return min(free, default=None)


def _free_disk_nbytes(place: Path) -> int:
    existing = next(each for each in (place, *place.absolute().parents) if each.exists())
    free = os.statvfs(existing)
    return free.f_bavail * free.f_frsize


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
