"""What outlives a call: caches that a fork must not share, and directories that a hung thread still uses."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from tiercache.directory import StoreDirectory
from tiercache.mover import Mover
from tiercache.tiers.base import SlotTier

__all__ = ["Forkable", "close_later", "forget_forks", "watch_forks"]

_log = logging.getLogger("tiercache")
_LONGEST_HANG_S = 3600.0
"""How long a closed cache waits for a hung thread before it leaves the directory's lock to the end of the process."""
_LOOK_S = 0.1


class Forkable(Protocol):
    """What is told in a forked child that it is dead there."""

    def abandon(self) -> None:
        """Close lock and data descriptors, touch neither memory nor catalog."""


_live: weakref.WeakSet[Forkable] = weakref.WeakSet()
_inherited: list[Forkable] = []
"""In a forked child: the parent's, never destroyed there."""


def watch_forks(cache: Forkable) -> None:
    """Abandon this one in every child forked from now on."""
    _live.add(cache)


def forget_forks(cache: Forkable) -> None:
    """It is closed: a child has nothing to abandon."""
    _live.discard(cache)


def _after_fork_in_child() -> None:
    for cache in list(_live):
        _inherited.append(cache)
        cache.abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)


def close_later(mover: Mover, tiers: Sequence[SlotTier], directory: StoreDirectory) -> None:
    """A thread hung in a tier when the mover was closed: close that tier and the directory once it has returned."""
    thread = threading.Thread(target=_close, args=(mover, tiers, directory), name="tiercache-last", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        _log.warning("%s: no thread can wait for the hung one: locked until this process ends", directory.path)


def _close(mover: Mover, tiers: Sequence[SlotTier], directory: StoreDirectory) -> None:
    until = time.monotonic() + _LONGEST_HANG_S
    while mover.hung_levels() and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if not mover.hung_levels():
        for level in mover.left_open:
            tiers[level].close()
        directory.close()
