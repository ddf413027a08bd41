"""A lock for threads that share the GIL: who finds it taken looks again a few times before waiting in line."""

from __future__ import annotations

import threading
import time
from types import TracebackType

__all__ = ["PatientLock"]

_PAUSES_S = (50e-6, 50e-6, 50e-6, 50e-6)


class PatientLock:
    """As `threading.Lock`, for short sections of Python; also for a `threading.Condition`.

    Where a thread loses the GIL inside such a section, every other one runs into the lock. Waiting in line, each is
    handed the lock at a release while another has the GIL, which therefore runs into the lock in turn: two switches of
    threads for every section, long after the cause is over (a convoy). A thread that sleeps for a moment instead leaves
    the owner to go on, and then finds the lock free. After four such moments it waits in line, so that it is never
    passed over for long.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As `threading.Lock.acquire`."""
        take = self._lock.acquire
        if take(False):
            return True
        if not blocking:
            return False
        if timeout < 0:
            for pause_s in _PAUSES_S:
                time.sleep(pause_s)
                if take(False):
                    return True
        return take(True, timeout)

    def release(self) -> None:
        """As `threading.Lock.release`."""
        self._lock.release()

    def locked(self) -> bool:
        """Does some thread have it?"""
        return self._lock.locked()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()
