"""A key tier that processes share: values are files of a folder, put there by renaming. It can be told to misbehave.

`shared` is named by the extra config {"remote": "file_key_tier:shared"}; the folder is in TIERCACHE_STORE, and options
of `Remote` as JSON in TIERCACHE_STORE_OPTIONS. Under TIERCACHE_SEAMS (see `vllm_seams`) each operation meets what is
said of "remote": {"find": "hang", "get": "garble" (or "fail": none is there), "put": "raise", "delay_s": [0.05, 0.5]}.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.config import Remote
from tiercache.remote.base import Values
from tiercache.types import Bools

STORE, OPTIONS = "TIERCACHE_STORE", "TIERCACHE_STORE_OPTIONS"


def shared() -> Remote:
    """The remote tier of this process."""
    tier: Any = FileKeyTier(Path(os.environ[STORE]))
    if "TIERCACHE_SEAMS" in os.environ:
        tier = ControlledKeyTier(tier, Path(os.environ["TIERCACHE_SEAMS"]))
    return Remote(tier, **json.loads(os.environ.get(OPTIONS, "{}")))


class FileKeyTier:
    """See the module. Has room for all that the disk holds."""

    name = "file-keys"
    _drafts = itertools.count()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._closed = False
        folder.mkdir(parents=True, exist_ok=True)

    def _file(self, key: bytes) -> Path:
        if self._closed:
            raise OSError("closed")
        return self.folder / key.hex()

    def held(self) -> list[Path]:
        """The files of all values."""
        return [each for each in self.folder.iterdir() if not each.suffix]

    def find(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.find`."""
        return np.array([self._file(key).exists() for key in keys], dtype=np.bool_)

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.get`."""
        ok = np.zeros(len(keys), dtype=np.bool_)
        for i, key in enumerate(keys):
            try:
                value = self._file(key).read_bytes()
            except FileNotFoundError:
                continue
            if len(value) == rows.shape[1]:
                rows[i] = np.frombuffer(value, dtype=np.uint8)
                ok[i] = True
        return ok

    def put(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.put`."""
        for i, key in enumerate(keys):
            draft = self.folder / f"{os.getpid()}-{next(self._drafts)}.draft"
            draft.write_bytes(rows[i].tobytes())
            draft.rename(self._file(key))
        return np.ones(len(keys), dtype=np.bool_)

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.remove`."""
        for key in keys:
            self._file(key).unlink(missing_ok=True)
        return np.ones(len(keys), dtype=np.bool_)

    def close(self) -> None:
        """See `KeyTier.close`. The files stay."""
        self._closed = True


class ControlledKeyTier:
    """A key tier that does as it is told, on each rank."""

    def __init__(self, inner: FileKeyTier, folder: Path) -> None:
        self.inner, self.name, self._folder = inner, inner.name, folder
        self._control: Any = None

    def _meet(self, op: str) -> str | None:
        from vllm_seams import Control, _rank

        if self._control is None:
            self._control = Control("remote", self._folder, _rank())
        order: str | None = self._control.meet(op)
        return order

    def find(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.find`."""
        self._meet("find")
        return self.inner.find(keys, deadline_s)

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.get`."""
        order = self._meet("get")
        if order == "fail":
            return np.zeros(len(keys), dtype=np.bool_)
        ok = self.inner.get(keys, rows, deadline_s)
        if order == "garble":
            rows[:, 0] ^= 0xFF
        return ok

    def put(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.put`."""
        if self._meet("put") == "fail":
            return np.zeros(len(keys), dtype=np.bool_)
        return self.inner.put(keys, rows, deadline_s)

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.remove`."""
        self._meet("remove")
        return self.inner.remove(keys, deadline_s)

    def close(self) -> None:
        """See `KeyTier.close`."""
        self.inner.close()
