"""SlotTable: the slots of one level, as arrays.

Equation that `check()` verifies: free + held + lost == capacity, where held is every state but FREE and LOST.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from tiercache.arrays import as_index, ascending
from tiercache.types import Slots

__all__ = ["BAD", "DETACHED", "FREE", "LOST", "NO_OWNER", "RESIDENT", "WRITING", "SlotState", "SlotTable"]

NO_OWNER = -1


class SlotState(IntEnum):
    """What is in a slot."""

    FREE = 0
    WRITING = 1
    """Belongs to a block whose bytes are on the way; not readable."""
    RESIDENT = 2
    """Belongs to a block; readable."""
    BAD = 3
    """Belongs to a block whose bytes here were found wrong; not readable, kept so that the tree stays closed,
    rewritten in place when the block is supplied again."""
    DETACHED = 4
    """Belongs to no block any more, but a job or a Loaded still uses it; free when the last pin goes."""
    LOST = 5  # from DETACHED on: no block owns it, and it is free when its last pin goes
    """Its job is overdue: nobody knows when the thread will touch it. Free when the job's result comes."""


FREE = np.uint8(SlotState.FREE)
WRITING = np.uint8(SlotState.WRITING)
RESIDENT = np.uint8(SlotState.RESIDENT)
BAD = np.uint8(SlotState.BAD)
DETACHED = np.uint8(SlotState.DETACHED)
LOST = np.uint8(SlotState.LOST)
"""The states as the tables hold them: a member of an IntEnum costs a microsecond each time it is named."""


class SlotTable:
    """State, pins and owner of every slot of one level; a stack of the free ones."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.state: NDArray[np.uint8] = np.zeros(capacity, dtype=np.uint8)
        self.pins: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self.owner: NDArray[np.int32] = np.full(capacity, NO_OWNER, dtype=np.int32)
        """Node id, or NO_OWNER."""
        self.pos: NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        """Position in the owner's run."""
        self._stack: Slots = np.arange(capacity - 1, -1, -1, dtype=np.int32)
        self.free = capacity
        self.lost = 0
        self.taken = 0
        """Slots ever taken."""

    def take(self, n: int) -> Slots:
        """Take n free slots (ascending), which become WRITING. The caller has checked `free >= n`."""
        assert 0 <= n <= self.free, (n, self.free)
        begin = self.free - n
        slots = ascending(self._stack[begin : self.free])
        self.free = begin
        self.taken += n
        self.state[as_index(slots)] = WRITING
        return slots

    def take_these(self, slots: Slots) -> None:
        """Take exactly these free slots (recovery); they become RESIDENT. O(capacity)."""
        assert (self.state[slots] == FREE).all()
        self.state[slots] = RESIDENT
        rest = np.flatnonzero(self.state == FREE).astype(np.int32)[::-1]
        self.free = len(rest)
        self._stack[: self.free] = rest

    def give(self, slots: Slots) -> None:
        """Make these slots FREE. They must have no pins."""
        n = len(slots)
        if n == 0:
            return
        where = as_index(slots)
        assert not self.pins[where].any()
        self.state[where] = FREE
        self.owner[where] = NO_OWNER
        self._stack[self.free : self.free + n] = ascending(slots)[::-1]
        self.free += n

    def let_go(self, slots: Slots) -> None:
        """Slots that no node owns any more: free at once, or DETACHED while something still pins them."""
        where = as_index(slots)
        self.owner[where] = NO_OWNER
        busy = self.pins[where] > 0
        if not busy.any():
            self.give(slots)
            return
        held = slots[busy]
        self.state[held] = np.where(self.state[held] == LOST, LOST, DETACHED)
        self.give(slots[~busy])

    def lose(self, slots: Slots) -> None:
        """Slots whose job is overdue. They must be pinned by that job and owned by no node."""
        assert (self.pins[slots] > 0).all()
        self.owner[slots] = NO_OWNER
        self.lost += int((self.state[slots] != LOST).sum())
        self.state[slots] = LOST

    def pin(self, slots: Slots) -> None:
        """One more user of each of these (distinct) slots."""
        self.pins[as_index(slots)] += 1

    def unpin(self, slots: Slots) -> None:
        """One user fewer; DETACHED and LOST slots without users become FREE."""
        if len(slots) == 0:
            return
        where = as_index(slots)
        left = self.pins[where] - 1
        assert left.min() >= 0, "unpinned more often than pinned"
        self.pins[where] = left
        states = self.state[where]
        if int(states.max()) < DETACHED:
            return
        gone = slots[(left == 0) & (states >= DETACHED)]
        if len(gone):
            self.lost -= int((self.state[gone] == LOST).sum())
            self.give(gone)

    def clear(self) -> Slots:
        """Let go of every owned slot (new epoch). Returns the slots that were owned."""
        owned = np.flatnonzero(self.owner != NO_OWNER).astype(np.int32)
        self.let_go(owned)
        return owned
