"""A bound on this process's memory: a memory cgroup of its own (v1 or v2), or RLIMIT_DATA."""

from __future__ import annotations

import os
import resource
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def own_groups(text: str, root: Path) -> list[tuple[Path, str]]:
    """Directories of a process's own memory cgroup (v1, then v2), each with the name of the file that limits it.

    text: of /proc/self/cgroup.
    """
    found = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            found.append((root / "memory" / path.lstrip("/"), "memory.limit_in_bytes"))
    unified = [line[3:].lstrip("/") for line in text.splitlines() if line.startswith("0::")]
    return found + [(root / path, "memory.max") for path in unified]


class MemoryCgroup:
    """A child of the process's own memory cgroup, entered by `enter`, left and removed by `leave`.

    OSError where none may be made, or where the own one has no memory controller.
    """

    def __init__(self, limit_nbytes: int, text: str | None = None, root: Path = CGROUPS) -> None:
        text = Path("/proc/self/cgroup").read_text("ascii") if text is None else text
        error: OSError = FileNotFoundError("no memory cgroup here")
        for parent, limit in own_groups(text, root):
            if not parent.is_dir():
                continue
            path = parent / f"tiercache-soak-{os.getpid()}"
            try:
                path.mkdir()
                try:
                    (path / limit).write_text(str(limit_nbytes), "ascii")
                except OSError:
                    path.rmdir()
                    raise
            except OSError as each:
                error = each
                continue
            self.path, self._parent = path, parent
            return
        raise error

    def enter(self) -> None:
        """Move this process there."""
        (self.path / "cgroup.procs").write_text(str(os.getpid()), "ascii")

    def peak_nbytes(self) -> int:
        """The most it ever used, page cache included."""
        for name in ("memory.max_usage_in_bytes", "memory.peak"):
            if (self.path / name).exists():
                return int((self.path / name).read_text("ascii"))
        return 0

    def leave(self) -> None:
        """Move this process back, and remove the group."""
        (self._parent / "cgroup.procs").write_text(str(os.getpid()), "ascii")
        self.path.rmdir()


def limit_data(nbytes: int) -> None:
    """Let private memory of this process (heap, slabs, staging, stacks of threads) not exceed this."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))


def rss_nbytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * resource.getpagesize()
