"""The orchestrator's side: a long-lived child process that answers one JSON line with another."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Child"]

END_S = 10.0
"""How long a child may take to end by itself before it is killed."""


class Child:
    """One contestant's process. `ask` never raises for what the child does: the answer then has `failed`."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=dict(env),
            )
        self._unread = b""

    def ask(self, op: str, timeout_s: float = 120.0, **arguments: Any) -> dict[str, Any]:
        """One request, one answer. A child that is silent for `timeout_s` seconds is killed."""
        self.tell(op, **arguments)
        line = self._line(time.monotonic() + timeout_s)
        if not line:
            why = f"died during {op}" if line is not None else f"no answer to {op} within {timeout_s:g} s"
            self.kill(patience_s=0.0 if line is None else END_S)
            return {"failed": f"{why} ({self._status()})"}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def tell(self, op: str, **arguments: Any) -> None:
        """A request whose answer is not waited for."""
        request = json.dumps({"op": op, **arguments}) + "\n"
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it is dead; the answer that never comes says so
            self.process.stdin.write(request.encode())
            self.process.stdin.flush()

    def kill(self, patience_s: float = 0.0) -> None:
        """SIGKILL where it does not end by itself within `patience_s` seconds; wait for the end."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(END_S)
        self._close_pipes()

    def end(self) -> None:
        """Close its stdin, which ends it; kill it where that takes too long."""
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._close_pipes()

    def _line(self, until: float) -> bytes | None:
        """The next whole line of its stdout; empty at its end, None at `until`."""
        assert self.process.stdout is not None
        if self.process.stdout.closed:
            return b""
        out = self.process.stdout.fileno()
        while b"\n" not in self._unread:
            left = until - time.monotonic()
            if left <= 0 or not select.select([out], [], [], left)[0]:
                return None
            more = os.read(out, 1 << 16)
            if not more:
                return b""
            self._unread += more
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _close_pipes(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None and not pipe.closed:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _status(self) -> str:
        code = self.process.returncode
        return signal.Signals(-code).name if code is not None and code < 0 else f"status {code}"
