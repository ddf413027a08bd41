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
from tiercache.remote.base import KeyTier
from tiercache.tiers.base import SlotTier

__all__ = ["Forkable", "close_keys", "close_later", "forget_forks", "watch_forks"]

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


def close_keys(mover: Mover, tier: KeyTier) -> None:
    """After the mover was closed: close the key tier that it used, or where threads hang in it, once they returned."""
    hung = _hung_in_keys(mover)
    if hung == 0:
        tier.close()
        return
    _log.warning("%s: %d calls have not returned: closed once they have", tier.name, hung)
    thread = threading.Thread(target=_close_keys, args=(mover, tier), name="tiercache-last-keys", daemon=True)
    try:
        thread.start()
    except RuntimeError:
        _log.warning("%s: no thread can wait for them: open until this process ends", tier.name)


def _hung_in_keys(mover: Mover) -> int:
    """Jobs at the key tier, the level past the last, that ended for everybody but the thread that is in them."""
    return mover.stats().levels[-1].lost


def _close_keys(mover: Mover, tier: KeyTier) -> None:
    until = time.monotonic() + _LONGEST_HANG_S
    while _hung_in_keys(mover) and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if not _hung_in_keys(mover):
        tier.close()


def _close(mover: Mover, tiers: Sequence[SlotTier], directory: StoreDirectory) -> None:
    until = time.monotonic() + _LONGEST_HANG_S
    while mover.hung_levels() and time.monotonic() < until:
        time.sleep(_LOOK_S)
    if not mover.hung_levels():
        for level in mover.left_open:
            tiers[level].close()
        directory.close()
