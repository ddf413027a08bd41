"""Write limit: holds `max_writes_per_hit` to what was measured, by asking for more of a block before it is written."""

from __future__ import annotations

import math

from tiercache.planner.counters import LevelCounters

__all__ = ["WriteLimit"]

_STEPS = 64
"""The share is looked at again when a level's capacity by this has passed through the first level; as many writes need
no hit."""
_FADE = 2.0
"""Capacities after which writes and hits count a third."""
_REACTION = 0.25
"""Capacities in which the share that is asked for becomes 2.7 times as large, or as small."""


class WriteLimit:
    """How likely a block must be asked for again to be written to a persistent level.

    At least 1 / limit: of blocks like it, so many writes bring a hit. That is a price, the same for all kinds of
    blocks, and if what the policy expects is true, all of them together stay below the limit. Where hits do not come as
    expected (they come while the block is in memory still, say, or the load has changed) the measured ratio rises over
    the limit, and `share` with it, until it does not. Most of the first filling counts as paid.
    """

    def __init__(self, limit: float, capacity: int) -> None:
        """limit: writes per hit. capacity: slots of the level."""
        self.limit = limit
        self.share = 1 / limit
        """What is written must be asked for again with this probability, by all that is known."""
        self._capacity = capacity
        self._writes, self._hits = 0.0, capacity / limit
        """Of late."""
        self._counted = (0, 0, 0)

    def note(self, taken: int, counters: LevelCounters) -> None:
        """So many slots of the first level were given out ever; the level's counters now. O(1), mostly nothing."""
        before, written, hits = self._counted
        passed = (taken - before) / self._capacity
        if passed * _STEPS < 1:
            return
        self._counted = (taken, counters.written, counters.hits)
        faded, change = math.exp(-passed / _FADE), math.exp(min(passed, 1.0) / _REACTION)
        self._writes = self._writes * faded + counters.written - written
        self._hits = self._hits * faded + counters.hits - hits
        if self._writes > self.limit * self._hits + self._capacity / _STEPS:
            self.share = min(1.0, self.share * change)
        else:
            self.share = max(1 / self.limit, self.share / change)
