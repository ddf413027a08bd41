"""The process that holds the cache in a replay with a kill: `python -m tiercache.sim.child FD`.

It reads a pickled `Task` from stdin and writes one JSON object a line to file descriptor FD, each in one write: what
was written before a SIGKILL is there whole. A request is acknowledged by its line, once it was verified and released.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tiercache.errors import TierCacheError
from tiercache.sim.drivers import CacheDriver
from tiercache.sim.options import ReplayOptions
from tiercache.sim.requests import driver_settings, load_trace, replay_requests

__all__ = ["Task", "main"]

_KILL_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Task:
    """What the process has to do."""

    options: ReplayOptions
    directory: Path
    first: int
    """The first request; those before it were acknowledged by another process."""
    pause_after: int | None = None
    """Acknowledge this many requests at most, then wait to be killed."""


def main() -> int:
    """Replay; the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
    out = int(sys.argv[1])
    os.set_inheritable(out, False)
    task = pickle.load(sys.stdin.buffer)
    try:
        _replay(task, out)
    except BrokenPipeError:
        return 1  # the parent has gone
    except (TierCacheError, OSError) as error:
        _say(out, {"kind": "error", "text": f"{type(error).__name__}: {error}"[:2000]})
        return 2
    return 0


def _replay(task: Task, out: int) -> None:
    options = task.options
    trace = load_trace(options)
    with CacheDriver(trace, driver_settings(options, trace), task.directory) as driver:
        _say(out, {"kind": "opened", "seconds": driver.opened_s, "recovered": driver.recovered_blocks})
        for number, served in enumerate(replay_requests(driver, options.in_flight, task.first)):
            if number == task.pause_after:
                _wait_for_the_kill()
            _say(out, {"kind": "served", "served": astuple(served), **_counts(driver)})
        if task.pause_after is not None:
            _wait_for_the_kill()
        _say(out, {"kind": "ended", **_counts(driver)})
        driver.close(keep=options.keep)


def _counts(driver: CacheDriver) -> dict[str, Any]:
    counts = [astuple(each) for each in driver.counts()]
    return {"counts": counts, "failed_blocks": driver.delivery.failed_blocks}


def _wait_for_the_kill() -> None:
    parent, end = os.getppid(), time.monotonic() + _KILL_WAIT_S
    while time.monotonic() < end and os.getppid() == parent:
        time.sleep(0.01)
    raise TierCacheError(f"was not killed within {_KILL_WAIT_S:g} s")


def _say(out: int, value: Mapping[str, Any]) -> None:
    """Write one line at once; shorter than PIPE_BUF, so it is never torn."""
    os.write(out, json.dumps(value).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
