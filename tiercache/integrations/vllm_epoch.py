"""The epoch of an engine, in a small file beside those of its ranks. Only the scheduler's half writes it."""

from __future__ import annotations

import logging
from pathlib import Path

from tiercache.directory import read_small, write_durably

__all__ = ["EpochFile"]

_log = logging.getLogger("tiercache.vllm")


class EpochFile:
    """`folder` None: nothing persists, there is no file."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "epoch"

    def read(self) -> bytes | None:
        """The epoch; None where there is none, or it cannot be read."""
        if self.path is None:
            return None
        try:
            return bytes.fromhex(read_small(self.path).decode("ascii").strip())
        except (OSError, ValueError):
            return None

    def write(self, epoch: bytes) -> None:
        """Durable on return; an error in the log where it cannot be written."""
        if self.path is None:
            return
        try:
            write_durably(self.path, epoch.hex().encode() + b"\n")
        except OSError as error:
            _log.error("%s cannot be written (%s): after a crash, blocks of before may be found", self.path, error)
