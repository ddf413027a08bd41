"""A replay whose cache lives in another process, which is killed midway, without a flush; a new one goes on."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from tiercache.errors import ConfigError
from tiercache.sim.child import Task
from tiercache.sim.drivers import Served, TierCounts
from tiercache.sim.options import ReplayOptions
from tiercache.sim.ordered import RESULT_WAIT_S, ReplayError
from tiercache.sim.requests import Life

__all__ = ["replay_with_kill"]

_SILENCE_S = RESULT_WAIT_S + 60.0
"""Longest wait for a word of the child."""
_EXIT_S = 60.0
_STDERR_NBYTES = 4000


def replay_with_kill(
    options: ReplayOptions, requests: int, tiers: int, directory: Path, progress: Callable[[Life, str], None]
) -> tuple[Life, Life]:
    """Replay `requests` requests, with a SIGKILL once the share `options.kill_at` of them was acknowledged.

    Returns what was acknowledged by the first process and by the second one. Requests that were under way at the kill
    belong to the second. `progress` is called with the running life and a few words. ReplayError where a process ends
    in another way, ConfigError for fewer than 2 requests.
    """
    assert options.kill_at is not None
    if requests < 2:
        raise ConfigError("kill_at", options.kill_at, "at least 2 requests: one before the kill, one after it")
    kill_after = max(1, min(requests - 1, round(options.kill_at * requests)))
    before, after = Life(tiers), Life(tiers)
    task = Task(options, directory, 0, min(requests - 1, kill_after + 2 * options.in_flight))
    with _Child(task) as child:
        child.follow(before, lambda: progress(before, ""), until=kill_after)
        child.kill()
        child.follow(before, lambda: None)
        child.expect_killed()
    progress(before, "killed: opening the directory again")
    with _Child(Task(options, directory, before.requests)) as child:
        child.follow(after, lambda: progress(after, "after the kill"))
        child.expect_end()
    if before.requests + after.requests != requests:
        raise ReplayError(f"{before.requests} and {after.requests} of {requests} requests were acknowledged")
    return before, after


class _Child:
    """A process that replays, seen from its parent. Ended with the `with` block, whatever happens there."""

    def __init__(self, task: Task) -> None:
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  closed in __exit__
        self._in, out = os.pipe()
        self._pending = b""
        self._at_end = False
        self._ended = False
        self._error = ""
        command = [sys.executable, "-m", "tiercache.sim.child", str(out)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=self._stderr, stderr=self._stderr, pass_fds=(out,)
            )
        except BaseException:
            os.close(self._in)
            self._stderr.close()
            raise
        finally:
            os.close(out)
        assert self._process.stdin is not None
        try:
            with self._process.stdin as stdin:
                pickle.dump(task, stdin)
        except BrokenPipeError:
            pass  # it died at once: seen by whoever reads from it

    def follow(self, life: Life, progress: Callable[[], None], until: int | None = None) -> None:
        """Count what the process acknowledges, to its end or until that many requests are counted."""
        while until is None or life.requests < until:
            line = self._next_line()
            if line is None:
                break
            self._take(json.loads(line), life)
            progress()

    def _take(self, said: dict[str, Any], life: Life) -> None:
        if said["kind"] == "error":
            self._error = said["text"]
        elif said["kind"] == "opened":
            life.opened_s, life.recovered_blocks = said["seconds"], said["recovered"]
        else:
            life.counts = tuple(TierCounts(*each) for each in said["counts"])
            life.failed_blocks = said["failed_blocks"]
            self._ended = said["kind"] == "ended"
            if said["kind"] == "served":
                life.add(Served(*said["served"]))

    def _next_line(self) -> bytes | None:
        end = time.monotonic() + _SILENCE_S
        while b"\n" not in self._pending and not self._at_end:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                raise ReplayError(f"the process that holds the cache said nothing for {_SILENCE_S:g} s{self._heard()}")
            chunk = os.read(self._in, 65536)
            self._pending += chunk
            self._at_end = not chunk
        line, newline, self._pending = self._pending.partition(b"\n")
        return line if newline else None

    def kill(self) -> None:
        """SIGKILL, now."""
        if self._at_end or self._process.poll() is not None:
            return  # `expect_killed` says how it ended
        self._process.send_signal(signal.SIGKILL)

    def expect_killed(self) -> None:
        """ReplayError unless it was our SIGKILL that ended it."""
        status = self._process.wait(_EXIT_S)
        if status != -signal.SIGKILL or self._error:
            raise self._trouble(status)

    def expect_end(self) -> None:
        """ReplayError unless it came to its end."""
        status = self._process.wait(_EXIT_S)
        if status != 0 or not self._ended:
            raise self._trouble(status)

    def _trouble(self, status: int) -> ReplayError:
        how = f"was ended by signal {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if self._error:
            return ReplayError(f"{self._error} (in the process that holds the cache)")
        return ReplayError(f"the process that holds the cache {how}{self._heard()}")

    def _heard(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_NBYTES))
        text = self._stderr.read().decode(errors="replace").strip()
        return f"; it said: {text}" if text else "; it said nothing on stderr"

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_EXIT_S)
        os.close(self._in)
        self._stderr.close()
