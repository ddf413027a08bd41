"""The queue of one level's pool of threads."""

from __future__ import annotations

import threading
from collections import deque

from tiercache.mover.job import RunningJob
from tiercache.mover.threads import IDLE_WAIT_S

__all__ = ["OTHERS_EVERY", "PoolQueue"]

OTHERS_EVERY = 8
"""One of this many dispatches is the oldest job that is not a load, so that demotions never starve."""


class PoolQueue:
    """Jobs waiting for a thread, handed out a part at a time: loads first, but every eighth part to the others.

    Never refuses; the planner's credits bound it. A push wakes one thread, and each thread that takes a part wakes the
    next one while there is more to take: the one who pushes, under the planner's lock, does not pay for all of them.
    """

    def __init__(self) -> None:
        self._ready = threading.Condition()
        self._loads: deque[RunningJob] = deque()
        self._others: deque[RunningJob] = deque()
        self._dispatches = 0
        self._stopping = False

    def push(self, running: RunningJob) -> None:
        """Append a job."""
        with self._ready:
            self._queue_of(running).append(running)
            self._ready.notify()

    def remove(self, running: RunningJob) -> None:
        """Take a job out that ended without a thread."""
        with self._ready:
            queue = self._queue_of(running)
            if running in queue:
                queue.remove(running)

    def next_part(self) -> tuple[RunningJob, int, int] | None:
        """Wait for a part: (job, begin, end). None when the pool stops.

        A thread that is done with a part calls this again, for its job may now take one more thread than before.
        """
        with self._ready:
            while True:
                part = self._pick()
                if part is not None:
                    if len(self._loads) + len(self._others) > 1 or part[0].takes_thread():
                        self._ready.notify()
                    return part
                if self._stopping:
                    return None
                self._ready.wait(IDLE_WAIT_S)

    def stop(self) -> None:
        """Let threads end when they find nothing to do."""
        with self._ready:
            self._stopping = True
            self._ready.notify_all()

    def __len__(self) -> int:
        with self._ready:
            return len(self._loads) + len(self._others)

    def _queue_of(self, running: RunningJob) -> deque[RunningJob]:
        return self._loads if running.job.kind in ("load", "find") else self._others

    def _pick(self) -> tuple[RunningJob, int, int] | None:
        turn_of_others = (self._dispatches + 1) % OTHERS_EVERY == 0
        for queue in (self._others, self._loads) if turn_of_others else (self._loads, self._others):
            for running in tuple(queue):
                part = running.begin_part()
                if running.is_used_up():
                    queue.remove(running)
                if part is not None:
                    self._dispatches += 1
                    return running, *part
        return None
