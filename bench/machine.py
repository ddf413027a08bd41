"""What a figure was measured on, and at which commit."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tiercache.directory import filesystem_type

__all__ = ["ROOT", "commit", "facts", "free_nbytes", "memory_nbytes"]

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""
_PACKAGES = ("numpy", "lmdb", "xxhash", "sortedcontainers", "pytest-benchmark")


def facts(bench_dir: Path) -> dict[str, Any]:
    """The machine as far as it bears on a figure; no host name, no user."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_nbytes("MemTotal") / 2**30, 1),
        "virtual": "hypervisor" in _first(r"^flags\s*:(.*)$", "/proc/cpuinfo").split(),
        "kernel": platform.release(),
        "filesystem": filesystem_type(bench_dir),
        "huge_pages": _first(r"\[(\w+)\]", "/sys/kernel/mm/transparent_hugepage/enabled"),
        "switch_interval_s": sys.getswitchinterval(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "fio": _output("fio", "--version"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def commit() -> dict[str, Any]:
    """Of the checkout. `dirty`: something that git tracks differs from it; results and pictures do not count."""
    changed = _output("git", "status", "--porcelain", "--untracked-files=no")
    mine = ("bench/results/", "docs/benchmarks.md", "docs/pictures/")
    dirty = [line for line in changed.splitlines() if not line[3:].startswith(mine)]
    return {"id": _output("git", "rev-parse", "--short=12", "HEAD") or "unknown", "dirty": bool(dirty)}


def memory_nbytes(field: str) -> int:
    """A field of /proc/meminfo, such as MemAvailable; 0 where it is not there."""
    return int(_first(rf"^{field}:\s+(\d+) kB", "/proc/meminfo") or 0) * 1024


def free_nbytes(path: Path) -> int:
    """Bytes that may still be written on the file system of `path`."""
    found = os.statvfs(path)
    return found.f_bavail * found.f_frsize


def _cpu_model() -> str:
    return _first(r"^model name\s*:\s*(.*)$", "/proc/cpuinfo") or platform.machine()


def _first(pattern: str, path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _output(*command: str) -> str:
    """Standard output of a command run in the checkout, "" where it cannot be had."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return done.stdout.rstrip() if done.returncode == 0 else ""
