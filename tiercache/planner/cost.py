"""Cost: seconds that a load takes from a level, learnt from loads; and how much of a load is worth its time.

Pure figures: no state of the planner, no clock. A level is `latency_s + nbytes * s_per_byte`, where the bytes are those
of the job and all that were ahead of it, and the seconds are from its submission to its end. So the rate is that of the
level with as many threads and jobs at work as there are, and not that of one job, which shares the level with others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

__all__ = ["WRITES_AHEAD_NBYTES", "LevelCost", "best_offer"]

WRITES_AHEAD_NBYTES = 8 << 20
"""Of writes to a level, what is taken to go before a load: the parts that its threads have in hand. Loads overtake the
rest."""

_GAIN = 0.1
"""Share of the (logarithmic) error that one job corrects, once some were seen."""
_FEW = 4
"""Jobs until an outlier is held to be one."""
_MOST = math.log(2)
"""As far off as one job may say that the estimate is: an outlier of any size moves it by 7 %."""
_LATENCY_SHARE = 0.1
"""Of the first job's time, where nothing was expected."""


class LevelCost:
    """What reading from one level costs. Mutated by `learn` only."""

    def __init__(self, latency_s: float = 0.0, nbytes_per_s: float = 0.0) -> None:
        """What is expected until a job says otherwise; nbytes_per_s 0: nothing, and everything takes no time."""
        self.latency_s = latency_s
        self.s_per_byte = 1 / nbytes_per_s if nbytes_per_s else 0.0
        self.jobs = 0
        """How many were learnt from."""

    def __repr__(self) -> str:
        rate = f"{1e-9 / self.s_per_byte:.3g} GB/s" if self.s_per_byte else "nothing known"
        return f"LevelCost({self.latency_s * 1e3:.3g} ms, {rate}, {self.jobs} jobs)"

    def seconds(self, nbytes: int) -> float:
        """Until so many bytes have come, those ahead included."""
        return self.latency_s + nbytes * self.s_per_byte

    def learn(self, nbytes: int, seconds: float) -> None:
        """A job was back `seconds` after it was submitted; `nbytes`: its own, and those ahead of it then.

        Latency and rate are corrected each by its share in the estimate: small jobs tell of the one, large jobs of the
        other. Ignored where there were no bytes, or no time passed.
        """
        if nbytes <= 0 or not 0 < seconds < math.inf:
            return
        if not self.s_per_byte:
            self.latency_s, self.s_per_byte = seconds * _LATENCY_SHARE, seconds * (1 - _LATENCY_SHARE) / nbytes
        expected = self.seconds(nbytes)
        error = math.log(seconds / expected)
        if self.jobs >= _FEW:
            error = max(-_MOST, min(_MOST, error))
        first = self.latency_s / expected
        second = 1 - first
        step = max(_GAIN, 1 / (self.jobs + 1)) * error / (first * first + second * second)
        self.latency_s *= math.exp(step * first)
        self.s_per_byte *= math.exp(step * second)
        self.jobs += 1


def best_offer(stretches: Iterable[tuple[int, int, float, float]], block_s: float) -> tuple[int, float]:
    """How many leading blocks to load so that the prefill saved, less the time of the load, is greatest; and that time.

    stretches: of the blocks in order, each `(level, blocks, first_s, each_s)`: the seconds that the level's first block
    costs beforehand (latency, what is queued), and that each block adds. Levels work side by side: the load takes as
    long as the slowest of them. block_s: seconds of prefill that a block saves, above 0. 0 blocks where nothing is
    gained. O(stretches).
    """
    until: dict[int, float] = {}
    before, slowest = 0, 0.0
    best, best_gain, best_s = 0, 0.0, 0.0
    for level, blocks, first_s, each_s in stretches:
        begun = until.get(level, first_s)
        ends = {blocks}
        if each_s > block_s:  # each block gains as long as the level stays in another one's shadow
            shaded = int(min(max(slowest - begun, 0.0) / each_s, blocks))
            ends |= {max(1, shaded), min(blocks, shaded + 1)}
        for take in sorted(ends):
            seconds = max(slowest, begun + take * each_s)
            gain = (before + take) * block_s - seconds
            if gain > best_gain:
                best, best_gain, best_s = before + take, gain, seconds
        until[level] = begun + blocks * each_s
        slowest = max(slowest, until[level])
        before += blocks
    return best, best_s
