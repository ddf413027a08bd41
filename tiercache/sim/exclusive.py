"""Textbook exclusive caching over two levels, to compare with: nothing is in both, and all that is evicted is demoted.

A request finds the longest prefix of its path of which every block is in one of the levels. What it found in the slow
level leaves it; the whole path is put into the fast one, as far as it holds it. What the fast level evicts for that,
partial last blocks too, is written to the slow level, which drops what it was given longest ago. A path is touched from
its tail to its root, so both levels evict leaves before their parents. (Wong and Wilkes, "My Cache or Yours? Making
Storage More Exclusive", USENIX 2002: DEMOTE, with LRU in both.)
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tiercache.sim.trace import Trace

__all__ = ["Exclusive", "simulate_exclusive"]


@dataclass(frozen=True, slots=True)
class Exclusive:
    """What came of it."""

    hit_tokens: int
    fast_tokens: int
    """Of `hit_tokens`, those of blocks that were in the fast level."""
    writes: int
    """Blocks written to the slow level."""


def simulate_exclusive(trace: Trace, fast: int, slow: int) -> Exclusive:
    """Run the whole trace, block by block, over levels of so many blocks.

    A fraction of a microsecond per block. ValueError where a level has no room for a block.
    """
    if fast < 1 or slow < 1:
        raise ValueError(f"levels of {fast} and {slow} blocks: each needs at least 1")
    above: OrderedDict[int, None] = OrderedDict()
    below: OrderedDict[int, None] = OrderedDict()
    tokens, starts, ids = trace.tokens.tolist(), trace.starts.tolist(), trace.ids
    hit_tokens = fast_tokens = writes = 0
    for request in range(trace.requests):
        path = ids[starts[request] : starts[request + 1]].tolist()
        for block in path:
            if block in above:
                fast_tokens += tokens[block]
            elif block not in below:
                break
            hit_tokens += tokens[block]
        for block in reversed(path[:fast]):
            below.pop(block, None)
            above[block] = None
            above.move_to_end(block)
        while len(above) > fast:
            victim, _ = above.popitem(last=False)
            below[victim] = None
            writes += 1
            if len(below) > slow:
                below.popitem(last=False)
    return Exclusive(hit_tokens, fast_tokens, writes)
