"""Taking a lock in a crowd of threads that share the GIL."""

from __future__ import annotations

import threading
import time

__all__ = ["acquire_patiently"]

_PAUSES_S = (50e-6, 50e-6, 50e-6, 50e-6)


def acquire_patiently(lock: threading.Lock) -> None:
    """Take a lock for a short section of nothing but Python: look again a few times before waiting in line.

    Where a thread loses the GIL inside such a section, every other one runs into the lock. Waiting in line, each is
    handed the lock at a release while another has the GIL, which therefore runs into the lock in turn: two switches of
    threads for every section, long after the cause is over (a convoy). A thread that sleeps for a moment instead leaves
    the owner to go on, and then finds the lock free. After four such moments it waits in line, so that it is never
    passed over for long. Sections that give the GIL away themselves, or are followed by a wait, gain nothing by it.
    """
    if lock.acquire(False):
        return
    for pause_s in _PAUSES_S:
        time.sleep(pause_s)
        if lock.acquire(False):
            return
    lock.acquire()
