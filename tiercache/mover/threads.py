"""The mover's own threads, and how others ask whether they run on one."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

__all__ = ["IDLE_WAIT_S", "is_worker_thread", "start_thread"]

IDLE_WAIT_S = 10.0
"""An idle thread looks around at least this often; no wait is without end."""

_here = threading.local()


def is_worker_thread() -> bool:
    """True on a thread of a mover, where a blocking call on the cache would wait for itself."""
    return getattr(_here, "worker", False)


def start_thread(name: str, body: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread `tiercache-<name>` that counts as a worker thread. OSError where none is to be had."""

    def run() -> None:
        _here.worker = True
        body()

    thread = threading.Thread(target=run, name=f"tiercache-{name}", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, f"no thread can be started: {error}") from error
    return thread
