"""The one interface of all slot tiers.

A slot tier is ours alone: `capacity` slots, each with room for one block. It knows nothing of prompts, pins or
policies; the planner decides which slot holds what.

Rows: payload goes in and out as a uint8 array `[n, width]`, one row per slot, rows contiguous along axis 1 (any
stride on axis 0). `width` is `block_nbytes`, or `stride` where the caller owns the padding too (slab and staging
rows do), which lets a file tier move whole aligned rows without a bounce buffer.
"""

from __future__ import annotations

import itertools
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tiercache.types import Bools, Slots

__all__ = ["ALIGNMENT", "Rows", "SlotTier", "contiguous_runs", "slot_stride"]

ALIGNMENT = 4096
"""Bytes; every slot starts at a multiple of it, so that O_DIRECT, verbs and DMA can use slots as they are."""

Rows = NDArray[np.uint8]


@runtime_checkable
class SlotTier(Protocol):
    """Room for `capacity` blocks. Safe to call from several threads on different slots."""

    name: str
    capacity: int
    block_nbytes: int
    stride: int
    slab: Rows | None
    """Host memory tiers: uint8 `[capacity, stride]`, the slots themselves (zero copy). Others: None."""
    verifies: bool
    """True where what is read may be wrong (a disk): the mover checks every block before use."""

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """Copy n slots into `rows[n, width]`. Returns per block whether it arrived; I/O trouble never raises."""

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """Copy `rows[n, width]` into n slots. Returns per block whether it was written; I/O trouble never raises.

        `rows` is only read, and may be reused when this returns.
        """

    def sync(self) -> bool:
        """Make all returned writes durable. True when they are (memory tiers: at once)."""

    def close(self) -> None:
        """Give memory and descriptors back. May be called twice."""


def slot_stride(block_nbytes: int) -> int:
    """Bytes from one slot to the next: `block_nbytes` rounded up to ALIGNMENT."""
    return -(-block_nbytes // ALIGNMENT) * ALIGNMENT


def contiguous_runs(slots: Slots) -> list[tuple[int, int]]:
    """Bounds `[begin, end)` of the stretches of `slots` in which each number is one more than the one before it."""
    n = len(slots)
    if n < 2:
        return [(0, n)] * n
    cuts = (slots[1:] - slots[:-1] != 1).nonzero()[0]
    if len(cuts) == 0:
        return [(0, n)]
    return list(itertools.pairwise([0, *(cuts + 1).tolist(), n]))
