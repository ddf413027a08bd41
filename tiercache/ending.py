"""Ending: waits for copies, writes what lives only in memory to NVMe, and stops everything below the public API."""

from __future__ import annotations

import time

from tiercache.assembly import Stack
from tiercache.directory import StoreDirectory
from tiercache.lifetime import close_keys, close_later
from tiercache.link import Link

__all__ = ["end_writes", "flush", "stop"]

_LONGEST_SYNC_S = 3600.0
_WRITES_S = 0.5
"""What close gives the writes to a key tier, and at most half of the time that is left."""


def flush(link: Link, timeout: float | None, to: str | None) -> bool:
    """See `TieredKVCache.flush`."""
    until = None if timeout is None else time.monotonic() + timeout
    with link.planning() as stack:
        if stack is None:
            return True
        began, under_way = link.clock(), stack.planner.under_way()
    if not link.wait(stack, until, lambda: stack.planner.is_over(under_way)):
        return False
    return to is None or _drain(link, stack, until, began)


def _drain(link: Link, stack: Stack, until: float | None, began: float) -> bool:
    """Write what lives only above NVMe, and commit it. True where nothing is left that was there at `began`."""
    planner = stack.planner
    with link.planning():
        failed_before = planner.failed_writes()
        planner.drain(link.clock())
        mark = planner.backlog()
    if not link.wait(stack, until, lambda: planner.is_backlog_over(mark)):
        return False
    with link.lock:
        under_way = planner.under_way()
    if not link.wait(stack, until, lambda: planner.is_over(under_way)):
        return False
    if not stack.mover.sync(_LONGEST_SYNC_S if until is None else max(0.0, until - time.monotonic())):
        return False
    with link.lock:
        return planner.lacking(began if planner.failed_writes() == failed_before else link.clock()) == 0


def end_writes(link: Link, left_s: float) -> None:
    """Let what waits to be written to a key tier go there, for a moment. Nobody is told whether it did."""
    until = time.monotonic() + min(_WRITES_S, left_s / 2)
    with link.changed:
        writes = link.stack.planner.remote_writes if link.stack is not None else None
        while writes is not None and not writes.is_idle and not link.closed:
            left = until - time.monotonic()
            if left <= 0:
                return
            link.changed.wait(left)


def stop(link: Link, directory: StoreDirectory | None, timeout: float) -> bool:
    """After `Link.shut`: end the mover within `timeout` seconds, and all that waits for it; close the directory, or
    leave that to threads that still use it. True where nothing was lost."""
    stack, complete = link.stack, True
    if stack is not None:
        complete = stack.mover.close(max(0.0, timeout))
        link.end_everything()
        if stack.own_keys is not None:
            close_keys(stack.mover, stack.own_keys)
    if directory is not None:
        if stack is not None and stack.mover.left_open:
            close_later(stack.mover, stack.tiers, directory)
        else:
            directory.close()
    return complete
