"""Plain values: what passes between planner and mover, and what callers get back.

Units: every `*_nbytes` is bytes, every `*_s` seconds, every `slots` an int32 array of slot numbers.
Arrays inside these values are never written to after construction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CALLER",
    "COLD",
    "HINT",
    "PROBE_S",
    "ROOT",
    "Bools",
    "Claims",
    "CopyJob",
    "Expedite",
    "Floats",
    "Forget",
    "Hints",
    "Idents",
    "JobOverdue",
    "JobResult",
    "LevelSpec",
    "LostClaims",
    "MoverMessage",
    "NewEpoch",
    "NoteUse",
    "PlannerMessage",
    "Recovered",
    "Slots",
    "Uses",
    "no_hints",
]

Slots: TypeAlias = NDArray[np.int32]
Idents: TypeAlias = NDArray[np.uint64]
Bools: TypeAlias = NDArray[np.bool_]
Floats: TypeAlias = NDArray[np.float64]
Uses: TypeAlias = NDArray[np.uint32]
Hints: TypeAlias = NDArray[np.void]
"""`[n]` of dtype HINT."""

HINT = np.dtype([("priority", np.int8), ("expires", np.float64)])
"""What callers said of a block: its priority (0: none), and when it ends (wall-clock seconds, inf: never)."""
COLD = -100
"""The lowest priority: a block that belongs into the slow tiers only."""


def no_hints(n: int) -> Hints:
    """Hints of n blocks of which nothing was said."""
    hints = np.zeros(n, dtype=HINT)
    hints["expires"] = np.inf
    return hints


PROBE_S = 0.05
"""What a probe has not begun to read by then, it leaves out."""
CALLER = -1
"""The level number that stands for the caller's own rows: source of a store, destination of a load into `out`."""
ROOT = -1
"""The parent slot of a block that starts a prompt."""


@dataclass(frozen=True, slots=True)
class LevelSpec:
    """What the planner must know of one slot tier."""

    name: str
    capacity: int
    block_nbytes: int
    persistent: bool = False
    """True for NVMe: prefix-closed by itself, jobs to it carry claims."""
    pool_threads: int = 2
    """Threads that run its jobs; at most `pool_threads - 1` of them may be lost before it goes offline."""
    read_latency_s: float = 0.0
    """With the next: what a load from it is expected to take until one was measured."""
    read_nbytes_per_s: float = 0.0
    """0: nothing is known, and a load is expected to take no time."""


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """What a persistent tier must remember of each block that a job writes to it (n blocks)."""

    parent_slots: Slots
    """Slot of the parent block in the same tier, ROOT for the first block of a prompt."""
    parent_idents: Idents
    symbols: bytes
    """n symbols, side by side."""
    last_use: Floats
    """Wall-clock seconds."""
    uses: Uses
    hints: Hints | None = None
    """None: nothing was said of any of them."""


JobKind: TypeAlias = Literal["store", "load", "write", "probe", "find"]


@dataclass(frozen=True, slots=True, eq=False)
class CopyJob:
    """Copy n blocks between levels. `src_slots` and `dst_slots` are caller rows where the level is CALLER."""

    id: int
    kind: JobKind
    """"store": caller to level 0. "load": to level 0 or to the caller, dispatched first. "write": a demotion, or a copy
    to a key tier. "probe": blocks are read as by a load, within PROBE_S, and go nowhere (its destination is CALLER
    without rows). "find": asks a key tier; copies nothing, and is answered by `JobResult.ok`."""
    epoch: bytes
    src_level: int
    src_slots: Slots
    dst_level: int
    dst_slots: Slots
    idents: Idents
    endpoint: int = 0
    """Which registered caller rows CALLER means (0: none)."""
    also_level: int = CALLER
    also_slots: Slots | None = None
    """Second destination of a load into the caller's rows: slots in `also_level`, -1 where a block has none."""
    deadline_s: float | None = None
    """Seconds from the moment the job may start; None: no deadline."""
    start_after_s: float = 0.0
    """Delay in the mover's own clock before the job may start; `Expedite` ends it."""
    claims: Claims | None = None
    """Present exactly when the destination is persistent."""
    symbols: bytes | None = None
    """Of a job at a key tier (None: at slot tiers): the prompt's symbols from its first block to the job's last, at
    least. The level at that end is one past the last slot level, and its slots are positions in the prompt."""

    @property
    def n(self) -> int:
        """Number of blocks."""
        return len(self.idents)

    @property
    def positions(self) -> Slots:
        """Of a job at a key tier: which blocks of the prompt it is about."""
        return self.dst_slots if self.kind == "write" else self.src_slots


@dataclass(frozen=True, slots=True, eq=False)
class Forget:
    """These slots of the persistent tier hold nothing any more."""

    slots: Slots


@dataclass(frozen=True, slots=True, eq=False)
class NoteUse:
    """Blocks of the persistent tier were used; written to the catalog with a later commit."""

    slots: Slots
    last_use: Floats
    uses: Uses
    hints: Hints | None = None
    """None: as they were."""


@dataclass(frozen=True, slots=True)
class Expedite:
    """Start these delayed jobs now."""

    jobs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewEpoch:
    """Forget every claim; what is written from now on belongs to this epoch."""

    epoch: bytes


MoverMessage: TypeAlias = CopyJob | Forget | NoteUse | Expedite | NewEpoch
"""Planner to mover, one FIFO."""


@dataclass(frozen=True, slots=True, eq=False)
class JobResult:
    """A job's thread has returned: its memory is no longer touched."""

    job: int
    ok: Bools
    """Per block: arrived, and verified where it came from a tier that can lie."""
    nbytes: int
    seconds: float
    rank: int = 0
    reason: str = ""
    """Why blocks failed: "" | "io" | "checksum" | "deadline" | "cancelled" | "closed" | "memory" | "target" (the
    source of a load is well, its destination is not) | "missing" (a key tier does not have them) | "refused" (it does
    not take them)."""
    bad: Bools | None = None
    """Per block of a load: what its source holds could not be read, or is wrong. None: all that are not `ok`, where the
    reason is "io" or "checksum"."""
    waited_s: float = 0.0
    """Before `seconds`: from the job's submission (or the end of its delay) until a thread began it."""
    pressure: float | None = None
    """Of a write to a key tier: how full that said it is, where it was asked."""


@dataclass(frozen=True, slots=True)
class JobOverdue:
    """A job passed its deadline while running. Its slots are lost until its `JobResult` follows."""

    job: int
    rank: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class LostClaims:
    """Slots of the persistent tier whose claim could not be made since the parent's was not."""

    slots: Slots


PlannerMessage: TypeAlias = JobResult | JobOverdue | LostClaims
"""Mover to planner, one FIFO."""


@dataclass(frozen=True, slots=True, eq=False)
class Recovered:
    """What a persistent tier held when it was opened: n blocks, every one reachable from a root.

    `parents[i]` is the index (not the slot) of block i's parent within these arrays, ROOT for a first block;
    parents come before their children.
    """

    slots: Slots
    parents: NDArray[np.int64]
    idents: Idents
    symbols: bytes
    last_use: Floats
    uses: Uses
    hints: Hints | None = None
    forgotten: int = 0
    """Rows that were in the catalog but not reachable."""
    reason: str = field(default="")
    """Why the start was cold ("" when it was not): "new", "namespace", "epoch", "layout", "corrupt", ..."""
