"""Host memory: how much of this machine, or of its cgroup, a cache may take."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from tiercache.config import format_size
from tiercache.errors import ConfigError

__all__ = ["RAM_FRACTION", "check_memory"]

RAM_FRACTION = 0.85
"""The most of physical memory, or of the cgroup's limit, that tiers in host memory may take together."""
_NO_LIMIT_NBYTES = 1 << 60
"""cgroup v1 writes "no limit" as a number near 2**63."""


def _read_text(path: str) -> str | None:
    """The file's text; None where it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def check_memory(ram_bytes: int, read: Callable[[str], str | None] = _read_text) -> int | None:
    """Refuse more host memory than RAM_FRACTION of the machine's, or of the cgroup's limit (v1 or v2).

    Returns the most that fits, in bytes; None where nothing is known of the machine. `read` gives the text of a file,
    None where there is none (for tests). ConfigError says what would fit.
    """
    limits = []
    match = re.search(r"^MemTotal:\s+(\d+) kB", read("/proc/meminfo") or "", re.MULTILINE)
    if match:
        limits.append((int(match[1]) * 1024, "physical memory"))
    limits += [(limit, "the cgroup's memory limit") for limit in _cgroup_limits(read)]
    if not limits:
        return None
    limit, what = min(limits)
    fits = int(limit * RAM_FRACTION)
    if ram_bytes > fits:
        remedy = f"at most {format_size(fits)} fits ({RAM_FRACTION:.0%} of {what}, {format_size(limit)})"
        raise ConfigError("tiers (host memory)", format_size(ram_bytes), f"{remedy}: make DRAM smaller")
    return fits


def _cgroup_limits(read: Callable[[str], str | None]) -> list[int]:
    """Memory limits of this process's cgroups and all above them that can be seen."""
    limits = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top, name = (
            ("/sys/fs/cgroup/memory", "memory.limit_in_bytes") if controllers else ("/sys/fs/cgroup", "memory.max")
        )
        own = PurePosixPath("/", *(part for part in PurePosixPath(path).parts if part not in ("/", "..")))
        for folder in (own, *own.parents):
            text = (read(f"{top}{folder if str(folder) != '/' else ''}/{name}") or "").strip()
            if text.isdecimal() and int(text) < _NO_LIMIT_NBYTES:
                limits.append(int(text))
    return limits
