"""fio as the reference for NVMe: O_DIRECT, both engines, timed by fio itself."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from bench.pairs import Seconds

__all__ = ["BUFFERS", "ENGINES", "MISSING", "prepare", "run"]

ENGINES = ("psync", "io_uring")
BUFFERS = "huge pages where the kernel grants them, as the cache's"
"""Of glibc's malloc, which fio takes them from. With small pages a read of 2 MiB has too many segments for one request:
fio had 1.1 GB/s then where it has 2.8 with huge ones."""
_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
MISSING = "" if shutil.which("fio") else "fio is missing: install it (apt-get install fio, dnf install fio)"


def prepare(path: Path, nbytes: int) -> None:
    """Write a file whole, so that no later write has to convert an unwritten extent."""
    _fio("psync", "write", path, nbytes, 1 << 20, 1, ["--end_fsync=1"])


def run(engine: str, kind: str, path: Path, nbytes: int, block_nbytes: int, depth: int, syncs: int = 0) -> Seconds:
    """Read `nbytes` in random order, or write them in order and durably; how long that took.

    psync: `depth` jobs, each with its part of the file. io_uring: one job, `depth` requests deep. syncs: fdatasyncs on
    the way; a write ends with an fsync in any case, and its time counts.
    """
    options = ["--norandommap", "--readonly"] if kind == "randread" else ["--end_fsync=1"]
    if syncs and kind == "write":
        options.append(f"--fdatasync={max(1, nbytes // block_nbytes // syncs)}")
    return _fio(engine, kind, path, nbytes, block_nbytes, depth, options)


def _fio(engine: str, kind: str, path: Path, nbytes: int, block_nbytes: int, depth: int, options: list[str]) -> Seconds:
    jobs = depth if engine == "psync" else 1
    part = nbytes // jobs // block_nbytes * block_nbytes
    command = ["fio", "--name=reference", f"--filename={path}", f"--ioengine={engine}", f"--rw={kind}"]
    command += [f"--bs={block_nbytes}", "--direct=1", "--thread", "--group_reporting", "--fallocate=none"]
    command += [f"--numjobs={jobs}", f"--iodepth={depth // jobs}", f"--io_size={part}", "--output-format=json"]
    if kind == "randread":
        command.append(f"--size={nbytes}")
    else:
        command += [f"--size={part}", f"--offset_increment={part}"]
    env = {**os.environ, **_ENVIRONMENT}
    done = subprocess.run([*command, *options], env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}\n{done.stderr}"
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["write" if kind == "write" else "read"]
    assert found["io_bytes"] == part * jobs, found
    return Seconds(found["runtime"] / 1e3 * nbytes / found["io_bytes"])
