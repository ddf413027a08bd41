"""The resident blocks of a simulated cache as a tree whose leaves may go: what every comparison policy shares."""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush

from tiercache.sim.trace import Trace

__all__ = ["ABSENT", "Heap", "Leaves"]

ABSENT = 0


Heap = list[tuple[int, int]]
"""(key, block). An entry counts only while that is the block's key, and the block a resident leaf of this queue; others
are dropped when they surface."""


class Leaves:
    """Per block: the queue it is resident in (0: absent), its key there, and how many resident children it has.

    The residents are a tree at all times: a block is inserted after its parent, and goes when no child is left. So the
    residents of a path are a prefix of it, and whatever is resident and not on the path of the request can be made to
    go, leaf by leaf. A request can therefore always insert the first `capacity` blocks of its path.

    Of a pinned path only its end can be a leaf, and only until the next insertion. It is filed when the request is
    over; where a use changes the key, as it must for `victim`, no older entry of it counts, so it is not chosen before.
    """

    def __init__(self, trace: Trace, capacity: int, queues: int = 1) -> None:
        unique = trace.unique_blocks
        self.capacity = capacity
        self.size = 0
        """Resident blocks."""
        self.parent: list[int] = trace.parent.tolist()
        self.children = [0] * unique
        self.key = [0] * unique
        self.where = bytearray(unique)
        """0 for an absent block, else the number of its queue, from 1."""
        self.orders: list[Heap] = [[] for _ in range(queues + 1)]
        """The order of eviction of each queue, smallest key first. Number 0 is unused: `where` is the index."""

    def hits(self, path: list[int]) -> int:
        """How many blocks of the path are resident: its longest resident prefix."""
        where = self.where
        if path and where[path[-1]]:
            return len(path)
        return bisect_left(path, True, key=lambda block: not where[block])

    def victim(self, queue: int) -> int:
        """The queue's leaf with the smallest key, -1 where it has none.

        The entry is taken out of the order, so whoever asks evicts the block.
        """
        heap, key, where, children = self.orders[queue], self.key, self.where, self.children
        while heap:
            at, block = heappop(heap)
            if key[block] == at and where[block] == queue and not children[block]:
                return block
        return -1

    def insert(self, block: int, queue: int) -> None:
        """Make an absent block resident. It is filed when it becomes, or stays, the last of its branch: see `file`."""
        self.where[block] = queue
        self.size += 1
        above = self.parent[block]
        if above >= 0:
            self.children[above] += 1

    def remove(self, block: int) -> None:
        """Make a resident leaf absent. Its parent is filed where it has become a leaf."""
        self.where[block] = ABSENT
        self.size -= 1
        above = self.parent[block]
        if above >= 0:
            self.children[above] -= 1
            self.file(above)

    def file(self, block: int) -> None:
        """Put a resident block into the order of its queue, if it is a leaf."""
        if not self.children[block]:
            heappush(self.orders[self.where[block]], (self.key[block], block))
