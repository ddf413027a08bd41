"""Policies that evict the leaf with the smallest key, and set the keys of a path when it is used: LRU, LRU-2, MIN.

In all of them a parent's key is larger than its child's, so that the smallest key of all is always a leaf's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from numpy.typing import NDArray

from tiercache.sim.leaves import Leaves
from tiercache.sim.trace import Trace

__all__ = ["LRU", "LRU2", "Keyed", "Min", "next_uses"]


class Keyed(Leaves, ABC):
    """A cache of `capacity` blocks with one order of eviction."""

    bypasses = False
    """Whether a new block whose key is the smallest of all stays out, and the rest of its path with it."""

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        lengths = np.diff(trace.starts)
        self.stride = int(lengths.max(initial=0)) + 1
        """More than the depth of any block: keys are times in this unit, less the depth."""

    @abstractmethod
    def keys(self, path: list[int], request: int, start: int) -> list[int]:
        """The keys of a path's blocks from now on. `start`: where the path begins in the trace's ids."""

    def request(self, path: list[int], request: int, start: int) -> int:
        """Use a path; return how many blocks of it were resident."""
        hit, keys, key = self.hits(path), self.keys(path, request, start), self.key
        for block, new in zip(path[:hit], keys, strict=False):
            key[block] = new
        end = path[hit - 1] if hit else -1
        for block, new in zip(path[hit : self.capacity], keys[hit:], strict=False):
            if self.size >= self.capacity and not self._make_room(new):
                break
            key[block] = new
            self.insert(block, 1)
            end = block
        if end >= 0:
            self.file(end)
        return hit

    def _make_room(self, new: int) -> bool:
        victim = self.victim(1)
        if self.bypasses and (victim < 0 or self.key[victim] >= new):
            if victim >= 0:
                self.file(victim)
            return False
        self.remove(victim)
        return True


class LRU(Keyed):
    """Least recently used, a path from its tail to its root, so that children are older than their parents."""

    def keys(self, path: list[int], request: int, start: int) -> list[int]:
        """The time of this use."""
        newest = (request + 1) * self.stride
        return list(range(newest, newest - len(path), -1))


class LRU2(Keyed):
    """LRU-K for K = 2 (O'Neil, O'Neil and Weikum, SIGMOD 1993): whose use before the last is longest ago goes.

    Blocks used once so far go first, in LRU order. A request is one use of each of its blocks. The uses of evicted
    blocks are remembered for the whole trace (the paper's retained information, without its end), and no use counts as
    correlated with the one before.
    """

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.last = [0] * trace.unique_blocks
        """The number of the last request that used the block, from 1; 0: none yet."""
        self.used_twice = (trace.requests + 2) * self.stride
        """Added to the keys of blocks used twice or more, which are then above all others."""

    def keys(self, path: list[int], request: int, start: int) -> list[int]:
        """The time of the use before this one, or of this one where it is the first."""
        last, stride, used_twice, now = self.last, self.stride, self.used_twice, request + 1
        keys = []
        for depth, block in enumerate(path):
            before = last[block]
            last[block] = now
            keys.append((used_twice + before * stride if before else now * stride) - depth)
        return keys


class Min(Keyed):
    """The offline optimum (Belady, IBM Systems Journal 1966), with bypass, for paths.

    The block that is used next at the latest time goes, of those used next by one request the deepest; a new block that
    would itself be the one is not inserted, nor the rest of its path. A parent is never used later than its child, so
    the choice is always a leaf, and no policy of any kind finds more blocks.
    """

    bypasses = True

    def __init__(self, trace: Trace, capacity: int) -> None:
        super().__init__(trace, capacity)
        self.next_uses = next_uses(trace)

    def keys(self, path: list[int], request: int, start: int) -> list[int]:
        """The time until the next use, negative."""
        coming = self.next_uses[start : start + len(path)] * self.stride
        coming += np.arange(len(path))
        np.negative(coming, out=coming)
        keys: list[int] = coming.tolist()
        return keys


def next_uses(trace: Trace) -> NDArray[np.int64]:
    """int64[n], one for each of `trace.ids`: the next request that uses the block again; as many as requests: none."""
    uses = len(trace.ids)
    request = np.repeat(np.arange(trace.requests), np.diff(trace.starts))
    by_block = np.argsort(trace.ids, kind="stable")  # the uses of a block together, in order of time
    following = np.full(uses, trace.requests, np.int64)
    same = np.flatnonzero(trace.ids[by_block[1:]] == trace.ids[by_block[:-1]])
    following[by_block[same]] = request[by_block[same + 1]]
    return following
