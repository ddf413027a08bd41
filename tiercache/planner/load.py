"""A load under way, and its segments: blocks that one job brings."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import present
from tiercache.types import Idents, Slots

__all__ = ["Load", "Segment", "filled_slots"]


@dataclass(slots=True, eq=False)
class Segment:
    """Blocks of one load that come from one level in one job. Its source slots are pinned until the job is over."""

    source: int
    src: Slots
    dst: Slots
    """Slots of level 0, or rows of the caller."""
    idents: Idents
    row: int
    also: tuple[int, Slots] | None = None
    joins: bool = False
    """Its source, level 0, is yet to be filled by another load."""


@dataclass(slots=True, eq=False)
class Load:
    """A load under way or done. Holds `slots` of level 0 until `Planner.release_load`."""

    id: int
    blocks: int
    """How many leading blocks it will bring at most; only falls."""
    endpoint: int
    """Caller rows, 0: to level 0."""
    slots: Slots
    """int32[blocks] of level 0; empty for a load into caller rows."""
    epoch: bytes
    segments: deque[Segment] = field(default_factory=deque)
    waiting: set[int] = field(default_factory=set)
    """Jobs that must come back first, its own and joined ones."""
    joiners: list[Load] = field(default_factory=list)
    """Loads that hold a slot which a segment of this one, not submitted yet, is going to fill."""
    done: bool = False
    released: bool = False
    """Nobody wants it any more; it is let go as soon as it is done."""
    by_level: tuple[int, ...] = ()
    """Blocks taken from each level when it was planned; of the key tier last, where there is one."""
    symbols: bytes = b""
    """Of the prompt, where some of it comes from a key tier."""
    joins: bool = False
    """Has it, or had it, segments that wait for another load to fill their source?"""


def filled_slots(load: Load, dst: NDArray[np.int32], also: tuple[int, Slots] | None) -> NDArray[np.int32]:
    """Slots of level 0 that a copy to these ends fills."""
    if not load.endpoint:
        return dst
    if also is not None and also[0] == 0:
        return present(also[1])
    return np.empty(0, dtype=np.int32)
