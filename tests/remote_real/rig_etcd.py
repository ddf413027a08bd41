"""A real etcd on loopback, for masters that take over from each other."""

from __future__ import annotations

import contextlib
import subprocess
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from debian_packages import program
from rig_mooncake import HOST, _Process, free_port

__all__ = ["Etcd"]

_UP_S = 20.0


class Etcd(_Process):
    """One member; `address` for clients."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.address = f"{HOST}:{port}"
        clients, peers = f"http://{self.address}", f"http://{HOST}:{free_port()}"
        command = [str(program("etcd")), "--data-dir", str(folder / "etcd"), "--name", "one"]
        command += ["--listen-client-urls", clients, "--advertise-client-urls", clients]
        command += ["--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers]
        command += ["--initial-cluster", f"one={peers}"]
        super().__init__(command, folder / "etcd.log")
        end = time.monotonic() + _UP_S
        while time.monotonic() < end and self.alive:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{clients}/health", timeout=1):
                return
            time.sleep(0.1)
        self.kill()
        raise RuntimeError(f"etcd was not up after {_UP_S:g} s: {self.log.read_text()[-500:]}")

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.kill()
