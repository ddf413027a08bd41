"""Faulty parts inside vLLM's processes, told what to do by small files while they run.

`controlled` is named by the extra config {"seams": "vllm_seams:controlled"}. The folder in TIERCACHE_SEAMS may hold
`all.json`, and `rank0.json`, `rank1.json` for one rank alone. Each maps the name of a tier to what becomes of its
operations:

{"nvme": {"read": "fail", "write": "hang", "delay_s": [0.05, 0.5], "after": 3}, "dram": {"read": "garble"}}

"fail": every block fails; "hang": blocks until the file says otherwise, or for two minutes; "garble": what is read has
its bits inverted; "raise": the operation raises OSError. `delay_s`: each operation first sleeps for a time between
these bounds, drawn from a seed and the rank. `after`: the first so many operations of a kind pass. {"files": {"full":
true}}: the file system has no room. "engine" stands for copies out of ("read") and into ("write") vLLM's own blocks.
"""

from __future__ import annotations

import errno
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tiercache.assembly import Seams
from tiercache.testing import WrappedTier
from tiercache.tiers.base import Rows, SlotTier
from tiercache.tiers.fileio import OsFiles
from tiercache.types import Bools, Slots

_HANG_S = 120.0
_POLL_S = 0.01
FOLDER = "TIERCACHE_SEAMS"
DELAYS: dict[str, Any] = {name: {"delay_s": [0.05, 0.5]} for name in ("dram", "nvme", "engine")}
"""Every operation is late, by another time on each rank."""


def tell(folder: Path, what: dict[str, Any], rank: int | None = None) -> None:
    """Called by a test: from now on the tiers of one rank (None: of all) do so."""
    folder.mkdir(parents=True, exist_ok=True)
    name = "all.json" if rank is None else f"rank{rank}.json"
    draft = folder / f"{name}.draft"
    draft.write_text(json.dumps(what))
    draft.rename(folder / name)


def calls(folder: Path, op: str, tier: str = "nvme", rank: int = 0) -> int:
    """How many operations of this kind this tier has begun."""
    try:
        return int((folder / f"calls-{rank}-{tier}-{op}").stat().st_size)
    except FileNotFoundError:
        return 0


def controlled() -> Seams:
    """The seams of one worker, whose rank is known by now."""
    folder, rank = Path(os.environ[FOLDER]), _rank()
    _control_engine_blocks(Control("engine", folder, rank))
    return Seams(wrap_tier=lambda tier: ControlledTier(tier, folder, rank), file_ops=ControlledFiles(folder, rank))


def _rank() -> int:
    from vllm.distributed import parallel_state

    try:
        return int(parallel_state.get_tensor_model_parallel_rank())
    except AssertionError:  # no group was made: this is not a worker
        return 0


def _orders(folder: Path, rank: int, about: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("all.json", f"rank{rank}.json"):
        try:
            found |= json.loads((folder / name).read_text()).get(about, {})
        except FileNotFoundError:
            continue
    return found


class Control:
    """Looks into the folder before every operation of one thing on one rank."""

    def __init__(self, name: str, folder: Path, rank: int) -> None:
        self._name, self._folder, self._rank = name, folder, rank
        self._random = random.Random(f"{name} {rank}")
        self._lock = threading.Lock()
        self._seen: Counter[str] = Counter()

    def meet(self, op: str) -> str | None:
        """Sleep or hang as ordered, and say what else is to become of this operation; raises where it is to raise."""
        with (self._folder / f"calls-{self._rank}-{self._name}-{op}").open("ab") as count:
            count.write(b".")
        orders = _orders(self._folder, self._rank, self._name)
        if "delay_s" in orders:
            with self._lock:
                delay_s = self._random.uniform(*orders["delay_s"])
            time.sleep(delay_s)
        with self._lock:
            self._seen[op] += op in orders
            passes = self._seen[op] <= orders.get("after", 0)
        order: str | None = None if passes else orders.get(op)
        until = time.monotonic() + _HANG_S
        while order == "hang" and time.monotonic() < until:
            time.sleep(_POLL_S)
            order = _orders(self._folder, self._rank, self._name).get(op)
        if order == "raise":
            raise OSError(errno.EIO, "planned")
        return order


def _control_engine_blocks(control: Control) -> None:
    """Copies out of and into the engine's blocks meet it first; once per process."""
    from tiercache.integrations.vllm_rows import HostPages

    read, write = HostPages.read, HostPages.write
    if getattr(read, "controlled", False):
        return

    def late_read(self: HostPages, block_ids: Slots) -> Rows:
        control.meet("read")
        return read(self, block_ids)

    def late_write(self: HostPages, block_ids: Slots, rows: Rows) -> None:
        control.meet("write")
        write(self, block_ids, rows)

    late_read.controlled = True  # type: ignore[attr-defined]
    HostPages.read, HostPages.write = late_read, late_write  # type: ignore[method-assign]


class ControlledTier(WrappedTier):
    """A tier under `Control`."""

    def __init__(self, inner: SlotTier, folder: Path, rank: int) -> None:
        super().__init__(inner)
        self._meet = Control(inner.name, folder, rank).meet

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`."""
        order = self._meet("read")
        if order == "fail":
            return np.zeros(len(slots), dtype=np.bool_)
        ok = self.inner.read(slots, rows)
        if order == "garble":
            rows[:, : self.block_nbytes] ^= 0xFF
        return ok

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`."""
        if self._meet("write") == "fail":
            return np.zeros(len(slots), dtype=np.bool_)
        return self.inner.write(slots, rows)

    def sync(self) -> bool:
        """See `SlotTier.sync`."""
        return self._meet("sync") != "fail" and self.inner.sync()


class ControlledFiles(OsFiles):
    """File operations on a file system that may be full."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank

    def _meet(self) -> None:
        if _orders(self._folder, self._rank, "files").get("full"):
            raise OSError(errno.ENOSPC, "no space left, as planned")

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        self._meet()
        return super().pwritev(fd, buffers, offset)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """See FileOps."""
        self._meet()
        super().fallocate(fd, nbytes)
