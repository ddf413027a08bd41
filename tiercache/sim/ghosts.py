"""Policies with two queues and a memory of what was evicted: ARC and S3-FIFO, for paths."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heappop, heappush

from tiercache.sim.leaves import Leaves
from tiercache.sim.trace import Trace

__all__ = ["ARC", "S3FIFO"]

Ghosts = OrderedDict[int, None]
"""Blocks that were evicted, the oldest first."""


class ARC(Leaves):
    """Adaptive replacement (Megiddo and Modha, FAST 2003): one LRU list of blocks seen once, one of those seen again.

    The names are the paper's: lists T1 and T2, ghosts B1 and B2, target p for the size of T1 (a real number). Where the
    list that should give a block has no leaf to give, the other one does.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity, queues=2)
        self.t1 = 0
        """Blocks in T1; the other resident ones are in T2."""
        self.b1: Ghosts = OrderedDict()
        self.b2: Ghosts = OrderedDict()
        self.p = 0.0
        self.clock = 0

    def request(self, path: list[int], request: int, start: int) -> int:
        """Use a path; return how many blocks of it were resident."""
        where, key, hit = self.where, self.key, self.hits(path)
        self.clock = stamp = self.clock + len(path)
        for block in path[:hit]:
            key[block] = stamp
            stamp -= 1
            if where[block] == 1:
                where[block] = 2
                self.t1 -= 1
        end = path[hit - 1] if hit else -1
        for block in path[hit : self.capacity]:
            queue = self._admit(block)
            key[block] = stamp
            stamp -= 1
            self.insert(block, queue)
            self.t1 += queue == 1
            end = block
        if end >= 0:
            self.file(end)
        return hit

    def _admit(self, block: int) -> int:
        """Learn from a miss, make room for it, and return the list that it enters."""
        b1, b2, c = self.b1, self.b2, self.capacity
        in_b2 = block in b2
        if block in b1:
            self.p = min(self.p + max(len(b2) / len(b1), 1.0), c)
            del b1[block]
        elif in_b2:
            self.p = max(self.p - max(len(b1) / len(b2), 1.0), 0.0)
            del b2[block]
        else:
            if self.size >= c:
                self._make_room()
            return 1
        self._replace(in_b2)  # there are ghosts, so the cache is full
        return 2

    def _make_room(self) -> None:
        """For a block that is in no list: the paper's case IV."""
        b1, b2, c = self.b1, self.b2, self.capacity
        if self.t1 + len(b1) < c:
            if self.size + len(b1) + len(b2) >= 2 * c and b2:
                b2.popitem(last=False)
        elif b1:
            b1.popitem(last=False)
        else:
            self._replace(remember=False)
            return
        self._replace()

    def _replace(self, in_b2: bool = False, remember: bool = True) -> None:
        t1, p = self.t1, self.p
        queue = 1 if (t1 and (t1 > p or (t1 == p and in_b2))) or t1 == self.size else 2
        victim = self.victim(queue)
        if victim < 0:
            queue = 3 - queue
            victim = self.victim(queue)
        self.remove(victim)
        self.t1 -= queue == 1
        if remember:
            (self.b1 if queue == 1 else self.b2)[victim] = None


class S3FIFO(Leaves):
    """S3-FIFO (Yang, Zhang, Qiu, Yue and Rashmi, SOSP 2023): a small queue, a main one, ghosts of the small one.

    Its parameters: the small queue a tenth of the capacity, ghosts for nine tenths, both at least one block; two uses
    after the first move a block from small to main, where each use (up to 3) lets it go round once more. While nothing
    has been evicted yet, what finds the small queue full enters the main one, as in the authors' own simulator.

    Moving on and going round do not ask for a leaf; a block whose turn it is to be evicted and which is none is passed
    over. Where a queue has nothing to give, the other one does.
    """

    small, main = 1, 2
    uses_to_stay = (0, 2, 1)
    """By queue: so many uses since it entered, and a block whose turn has come stays in the cache."""
    most_uses = 3

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity, queues=2)
        self.small_capacity = max(1, capacity // 10)
        self.ghost_capacity = max(1, capacity * 9 // 10)
        self.in_main = 0
        self.ghosts: Ghosts = OrderedDict()
        self.uses = bytearray(trace.unique_blocks)
        self.clock = 0
        self.evicted = False

    def request(self, path: list[int], request: int, start: int) -> int:
        """Use a path; return how many blocks of it were resident."""
        where, key, uses, hit = self.where, self.key, self.uses, self.hits(path)
        for block in path[:hit]:
            if uses[block] < self.most_uses:
                uses[block] += 1
                if uses[block] == self.uses_to_stay[where[block]]:
                    heappush(self.orders[where[block]], (key[block], block))
        end = path[hit - 1] if hit else -1
        entered = path[hit : self.capacity]
        for block in entered:
            queue = self._admit(block, end)
            uses[block] = 0
            self.insert(block, queue)
            self.in_main += queue == self.main
            end = block
        for block in reversed(entered):  # pinned until now, so that nothing has asked for their places
            self.clock += 1
            key[block] = self.clock
        if end >= 0:
            self.file(end)
        return hit

    def _admit(self, block: int, end: int) -> int:
        """Make room for a miss, and return the queue that it enters."""
        was_ghost = block in self.ghosts
        if was_ghost:
            del self.ghosts[block]
        if self.size >= self.capacity:
            self._evict(end)
        if was_ghost or (not self.evicted and self.size - self.in_main >= self.small_capacity):
            return self.main
        return self.small

    def _evict(self, end: int) -> None:
        self.evicted = True
        in_small = self.size - self.in_main
        queue = self.main if self.in_main > self.capacity - self.small_capacity or not in_small else self.small
        while not self._evict_from(queue, end):
            queue = self.main if queue == self.small else self.small

    def _evict_from(self, queue: int, end: int) -> bool:
        """Give each block its turn until one is evicted. False: all that are left are passed over."""
        heap, key, where, uses, children = self.orders[queue], self.key, self.where, self.uses, self.children
        stay = self.uses_to_stay[queue]
        while heap:
            at, block = heappop(heap)
            if key[block] != at or where[block] != queue:
                continue
            if uses[block] >= stay:
                self._to_main(block)
            elif not children[block] and block != end:
                self.remove(block)
                if queue == self.main:
                    self.in_main -= 1
                else:
                    self.ghosts[block] = None
                    if len(self.ghosts) > self.ghost_capacity:
                        self.ghosts.popitem(last=False)
                return True
        return False

    def _to_main(self, block: int) -> None:
        """To the end of the main queue: from the small one with no uses, from the main one with one fewer."""
        if self.where[block] == self.main:
            self.uses[block] -= 1
        else:
            self.uses[block] = 0
            self.where[block] = self.main
            self.in_main += 1
        self.clock += 1
        self.key[block] = self.clock
        if self.uses[block] or not self.children[block]:
            heappush(self.orders[self.main], (self.clock, block))
