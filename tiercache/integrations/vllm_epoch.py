"""The epoch of an engine, in a small file beside those of its ranks. Only the scheduler's half writes it.

Engines that share a remote tier have one tag as their epoch. A reset leaves it for a nonce that nobody else has: what
others put under the tag is of the weights before. The file remembers which tags were left, whatever epoch follows, so
that none of them brings anything of it back after a restart; another tag does.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from tiercache.directory import read_small, write_durably

__all__ = ["EpochFile"]

_log = logging.getLogger("tiercache.vllm")
_LEFT = "left:"
_REMEMBERED = 64
"""Tags that were left, those that were left last; bounds the file."""


class EpochFile:
    """`folder` None: nothing persists, there is no file."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "epoch"
        self._was_reset = False

    def read(self) -> bytes | None:
        """The epoch; None where there is none, or it cannot be read."""
        return self._read()[0]

    def left(self) -> tuple[bytes, ...]:
        """The tags that resets left, the last one last."""
        return self._read()[1]

    def is_damaged(self) -> bool:
        """Is there a file that cannot be read? Then nobody knows which tags were left."""
        return self.path is not None and self.path.exists() and self.read() is None

    def _read(self) -> tuple[bytes | None, tuple[bytes, ...]]:
        if self.path is None:
            return None, ()
        try:
            epoch, *more = read_small(self.path).decode("ascii").split()
            left = [bytes.fromhex(each.removeprefix(_LEFT)) for each in more if each.startswith(_LEFT)]
            return bytes.fromhex(epoch), tuple(left)
        except (OSError, ValueError):
            return None, ()

    def leave(self, tag: bytes | None) -> bytes:
        """A reset: the epoch from now on, which nobody else has. The one before, and the tag, are left for ever."""
        epoch = os.urandom(16)
        before = None if self._was_reset else self.read()  # else a nonce, to which nobody can come back
        self.write(epoch, before, tag)
        self._was_reset = True
        return epoch

    def write(self, epoch: bytes, *leaves: bytes | None) -> None:
        """Durable on return; an error in the log where it cannot be written. leaves: tags that are left by it, beside
        those that were left before."""
        if self.path is None:
            return
        left = dict.fromkeys(each for each in reversed((*self.left(), *leaves)) if each)
        lines = [epoch.hex(), *(f"{_LEFT}{each.hex()}" for each in reversed([*left][:_REMEMBERED]))]
        try:
            write_durably(self.path, "".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            _log.error("%s cannot be written (%s): after a crash, blocks of before may be found", self.path, error)
