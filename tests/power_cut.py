"""Files that forget: what was not synced may be gone, whole or in part, after a power cut."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tiercache.tiers.fileio import OsFiles

SECTOR = 512


class PowerCutFiles(OsFiles):
    """Remembers, per file name, what each sector held before the writes since the last sync."""

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.before: dict[tuple[str, int], bytes] = {}

    def open(self, path: str, flags: int, mode: int) -> int:
        fd = super().open(path, flags, mode)
        self.names[fd] = Path(path).name
        return fd

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        name, nbytes = self.names[fd], sum(buffer.nbytes for buffer in buffers)
        with Path(f"/proc/self/fd/{fd}").open("rb") as file:
            old = os.pread(file.fileno(), nbytes, offset).ljust(nbytes, b"\0")
        for begin in range(0, nbytes, SECTOR):
            self.before.setdefault((name, offset + begin), old[begin : begin + SECTOR])
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        for key in [key for key in self.before if key[0] == self.names[fd]]:
            del self.before[key]

    def cut(self, directory: Path, rng: np.random.Generator) -> None:
        """Let a copy of the directory be what a power cut would leave: each unsynced sector by chance old or new."""
        share = rng.choice([0.0, 0.3, 1.0])
        for (name, offset), old in self.before.items():
            if (directory / name).exists() and rng.random() < share:
                with (directory / name).open("r+b") as file:
                    file.seek(offset)
                    file.write(old)
