"""The epoch of an engine, in a small file beside those of its ranks. Only the scheduler's half writes it.

Engines that share a remote tier have one tag as their epoch. A reset leaves it for a nonce that nobody else has: what
others put under the tag is of the weights before. The file remembers which tag was left, so that the same tag brings
nothing of it back after a restart; another tag does.
"""

from __future__ import annotations

import logging
from pathlib import Path

from tiercache.directory import read_small, write_durably

__all__ = ["EpochFile"]

_log = logging.getLogger("tiercache.vllm")
_LEFT = "left:"


class EpochFile:
    """`folder` None: nothing persists, there is no file."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "epoch"

    def read(self) -> bytes | None:
        """The epoch; None where there is none, or it cannot be read."""
        return self._read()[0]

    def left(self) -> bytes | None:
        """The tag that a reset left for this epoch; None where none was."""
        return self._read()[1]

    def _read(self) -> tuple[bytes | None, bytes | None]:
        if self.path is None:
            return None, None
        try:
            epoch, *more = read_small(self.path).decode("ascii").split()
            left = next((bytes.fromhex(each.removeprefix(_LEFT)) for each in more if each.startswith(_LEFT)), None)
            return bytes.fromhex(epoch), left
        except (OSError, ValueError):
            return None, None

    def write(self, epoch: bytes, left: bytes | None = None) -> None:
        """Durable on return; an error in the log where it cannot be written."""
        if self.path is None:
            return
        text = epoch.hex() + "\n" + (f"{_LEFT}{left.hex()}\n" if left is not None else "")
        try:
            write_durably(self.path, text.encode())
        except OSError as error:
            _log.error("%s cannot be written (%s): after a crash, blocks of before may be found", self.path, error)
