"""An island: another machine, as far as the network can tell. Two network namespaces and a wire between them.

The wire can be cut (nftables drops what comes in: nothing is refused, nothing answers) and slowed (a token bucket).
Only inside a private network namespace whose root this process is (`make test-remote`).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from types import TracebackType

__all__ = ["WIRE", "Island"]

WIRE = "tcw"
"""What the names of wires begin with."""
_LIFE_S = 900
_numbers = count(1)


def _tell(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


class Island:
    """`here` and `there` are the addresses of the wire's two ends; `there(command)` starts a program on the island."""

    def __init__(self) -> None:
        number = next(_numbers) + os.getpid() % 200 * 16
        self._wire = f"{WIRE}{number}"
        net = f"10.{64 + number // 256 % 64}.{number % 256}"
        self.here, self.there = f"{net}.1", f"{net}.2"
        self._holder = subprocess.Popen(
            ["unshare", "-n", sys.executable, "-c", f"import time; print('up', flush=True); time.sleep({_LIFE_S})"],
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n", "no network namespace"
        pid = str(self._holder.pid)
        _tell("ip", "link", "add", self._wire, "type", "veth", "peer", "name", "wire", "netns", pid)
        _tell("ip", "addr", "add", f"{self.here}/24", "dev", self._wire)
        _tell("ip", "link", "set", self._wire, "up")
        for command in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "addr", "add", f"{self.there}/24", "dev", "wire"),
            ("ip", "link", "set", "wire", "up"),
        ):
            _tell(*self.on(command))

    def on(self, command: Sequence[str]) -> list[str]:
        """The command that runs this one on the island."""
        return ["nsenter", "-t", str(self._holder.pid), "-n", *command]

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing comes through the wire any more, in either direction."""
        table = f"cut_{self._wire}"
        _tell("nft", "add", "table", "inet", table)
        try:
            for hook, side in (("input", "iifname"), ("output", "oifname")):
                _tell("nft", f"add chain inet {table} {hook} {{ type filter hook {hook} priority 0; }}")
                _tell("nft", f"add rule inet {table} {hook} {side} {self._wire} drop")
            yield
        finally:
            _tell("nft", "delete", "table", "inet", table)

    @contextmanager
    def slow(self, rate: str) -> Iterator[None]:
        """What comes from the island comes at this rate at most, such as "10mbit"."""
        shape = ("tbf", "rate", rate, "burst", "64kb", "latency", "500ms")
        _tell(*self.on(("tc", "qdisc", "add", "dev", "wire", "root", *shape)))
        try:
            yield
        finally:
            _tell(*self.on(("tc", "qdisc", "del", "dev", "wire", "root")))

    def close(self) -> None:
        """What runs on the island must have ended; the wire goes with it."""
        self._holder.kill()
        self._holder.wait(10)
        if self._holder.stdout is not None:
            self._holder.stdout.close()
        for _ in range(20):  # the kernel takes the wire away a moment later
            if not os.path.exists(f"/sys/class/net/{self._wire}"):  # noqa: PTH110
                return
            time.sleep(0.05)
        subprocess.run(["ip", "link", "del", self._wire], capture_output=True, timeout=20)

    def __enter__(self) -> Island:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
