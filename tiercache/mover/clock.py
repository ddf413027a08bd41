"""Delays and deadlines: one thread that calls back at a time."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

from tiercache.mover.job import RunningJob
from tiercache.mover.threads import IDLE_WAIT_S, start_thread

__all__ = ["Clock"]

_log = logging.getLogger("tiercache.mover")

Callback = Callable[[RunningJob], None]


class Clock:
    """Calls `callback(job)` at a monotonic time, on its own thread. Jobs that have ended are skipped."""

    def __init__(self, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._changed = threading.Condition()
        self._order = itertools.count()
        self._heap: list[tuple[float, int, RunningJob, Callback]] = []
        self._sweep_at = 128
        self._wakes_at = 0.0
        self._stopping = False
        self.thread = start_thread("clock", self._run)

    def call_at(self, when: float, running: RunningJob, callback: Callback) -> None:
        """Have `callback(running)` called at `when` (time.monotonic())."""
        with self._changed:
            if len(self._heap) >= self._sweep_at:
                self._heap = [entry for entry in self._heap if not entry[2].ended]
                heapq.heapify(self._heap)
                self._sweep_at = max(128, 2 * len(self._heap))
            heapq.heappush(self._heap, (when, next(self._order), running, callback))
            if when < self._wakes_at:
                self._changed.notify()

    def stop(self) -> None:
        """End the thread; what it was to call is forgotten."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def _next(self) -> tuple[RunningJob, Callback] | None:
        with self._changed:
            while not self._stopping:
                wait_s = IDLE_WAIT_S
                if self._heap:
                    wait_s = self._heap[0][0] - time.monotonic()
                    if wait_s <= 0:
                        _, _, running, callback = heapq.heappop(self._heap)
                        return running, callback
                wait_s = min(wait_s, IDLE_WAIT_S)
                self._wakes_at = time.monotonic() + wait_s
                self._changed.wait(wait_s)
            self._heap.clear()
            return None

    def _run(self) -> None:
        while (due := self._next()) is not None:
            running, callback = due
            try:
                if not running.ended:
                    callback(running)
            except Exception:  # noqa: BLE001  outermost frame of a worker thread
                _log.exception("the mover's clock failed on job %d", running.job.id)
                self._on_error()
            del running, callback, due
