"""Guard: the figures by which a key tier is used with care, and how fast it is written to. Pure: no threads, no clock.

The planner asks and tells it (`planner.finds`, `planner.remote_writes`), so that all ranks of an engine agree; the
deadlines of single jobs are the mover's.
"""

from __future__ import annotations

import math

__all__ = [
    "FIRST_BACKOFF_S",
    "JITTER",
    "JOB_BLOCKS",
    "JOB_NBYTES",
    "LONGEST_BACKOFF_S",
    "THRESHOLD",
    "WINDOW_S",
    "WriteRate",
    "job_blocks",
]

JOB_BLOCKS = 64
JOB_NBYTES = 16 << 20
"""What one job moves from or to a key tier at most, unless that is less than a block."""
THRESHOLD = 3
"""Failures in a row after which nothing is asked any more."""
FIRST_BACKOFF_S = 0.05
LONGEST_BACKOFF_S = 5.0
WINDOW_S = 30.0
"""In which so many loads and questions may time out, whatever succeeds in between."""
JITTER = 0.25
"""By up to such a share a back-off is shorter than it would be."""

FULL = 0.95
"""Pressure from which on a store is written to more slowly."""
SLOWEST_NBYTES_PER_S = float(1 << 20)
LONGEST_WAIT_S = 1.0
"""Between two jobs, whatever the pace: a queue never stands still."""
SMALLEST_JOB_NBYTES = float(256 << 10)
_GROWTH = 1.25
"""Of the size of jobs, with each that went well."""
_SLOW = 3.0
_SLACK_S = 0.005
"""A job is slow that took so many times as long as the best of its size of late, and this much more."""
_FORGETTING = 1.02
"""By so much the best of late gets worse with each job."""
_FADE = 0.2
_STEP = 1 / 32
"""Of the rate measured, what the pace gains by a job that went well."""


def job_blocks(block_nbytes: int) -> int:
    """Blocks of one job at a key tier, at most."""
    return max(1, min(JOB_BLOCKS, JOB_NBYTES // block_nbytes))


class WriteRate:
    """How many write jobs may be under way, how large they may be, and how many bytes a second they may send.

    All fall by half when jobs take long, time out or fail, when the store refuses blocks or says that it is full; all
    grow by a little with each job that goes well. A job's deadline is short, so the first ones are small. Of several
    jobs that tell of the same trouble only the first counts.
    Mutated by every method but `wait_s`.
    """

    def __init__(self, most_jobs: int) -> None:
        self.most_jobs = most_jobs
        self.pace = math.inf
        """Bytes a second; inf: as fast as jobs return."""
        self.measured = 0.0
        """Bytes a second of one job, of late; 0: nothing is known."""
        self.pressure: float | None = None
        """What the store said last."""
        self.job_nbytes = JOB_NBYTES / 4
        """Bytes of the next job, at most, unless that is less than a block."""
        self.falls = 0
        self._jobs = float(most_jobs)
        self._next_at = -math.inf
        self._fell_at = -math.inf
        self._best: dict[int, float] = {}

    @property
    def jobs(self) -> int:
        """Write jobs that may be under way."""
        return max(1, int(self._jobs))

    def wait_s(self, now: float) -> float:
        """Seconds that the next job should wait before it starts."""
        return min(LONGEST_WAIT_S, max(0.0, self._next_at - now))

    def sent(self, nbytes: int, now: float) -> None:
        """A job of so many bytes was submitted; it starts after `wait_s`."""
        self._next_at = now + self.wait_s(now) + (nbytes / self.pace if self.pace < math.inf else 0.0)

    def well(self, nbytes: int, seconds: float, sent_at: float, now: float) -> None:
        """A job was taken whole, in so many seconds of a thread."""
        size = nbytes.bit_length()
        best = self._best.get(size, math.inf) * _FORGETTING
        self._best[size] = min(best, seconds)
        if seconds > 0:
            rate = nbytes / seconds
            self.measured = rate if not self.measured else self.measured + _FADE * (rate - self.measured)
        if seconds > _SLOW * best + _SLACK_S:
            self.badly(sent_at, now)
            return
        self._jobs = min(float(self.most_jobs), self._jobs + 1 / (4 * self._jobs))
        self.job_nbytes = min(float(JOB_NBYTES), self.job_nbytes * _GROWTH)
        if self.pace < math.inf:
            self.pace += max(SLOWEST_NBYTES_PER_S, self.measured) * _STEP
            if self.pace > 2 * self.most_jobs * self.measured:
                self.pace = math.inf

    def badly(self, sent_at: float, now: float) -> None:
        """A job that was submitted at `sent_at` was slow, failed, timed out, or was refused in part."""
        if sent_at < self._fell_at:
            return
        self._fell_at = now
        self.falls += 1
        fastest = self._jobs * (self.measured or float(JOB_NBYTES))
        self._jobs = max(1.0, self._jobs / 2)
        self.job_nbytes = max(SMALLEST_JOB_NBYTES, self.job_nbytes / 2)
        self.pace = max(SLOWEST_NBYTES_PER_S, min(self.pace, fastest) / 2)

    def told(self, pressure: float | None, sent_at: float, now: float) -> None:
        """The store said how full it is (None: it did not). What is no share is not believed."""
        if pressure is None or not 0 <= pressure <= 1:
            return
        self.pressure = pressure
        if pressure >= FULL:
            self.badly(sent_at, now)
