"""Mooncake Store's real processes for tests: masters, and owners that hold memory; each ends with this process.

Only inside a private network namespace (`make test-remote`): Mooncake's clients listen on every address.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import pytest
from debian_packages import program
from rig_island import WIRE, Island

__all__ = ["Client", "Etcd", "Master", "Owner", "Rig", "free_port", "mooncake_rig", "private_network"]

HOST = "127.0.0.1"
UP_S = 30.0
"""How long a process may take until it is up."""
LIFE_S = 900
"""An owner, whatever happens, ends after this."""
MIB = 1 << 20

_BORN_MORTAL = """
import ctypes, os, signal, sys
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() != int(sys.argv[1]):
    raise SystemExit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""
_SSD = {
    "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
    "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "8",
    "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(4 << 20),
}
"""Small files, soon."""
_OWNER = """
import signal, sys
signal.alarm(int(sys.argv[3]))
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
master, nbytes, _, host, ssd = sys.argv[1:]
code = store.setup(host, "P2PHANDSHAKE", int(nbytes), 32 << 20, "tcp", "", master, None, bool(ssd), ssd)
print("code", code, store.get_hostname(), flush=True)
sys.stdin.read()
store.close()
"""


def private_network() -> bool:
    """Whether this process sees no interface but loopback, and the wires to its own islands."""
    return all(name == "lo" or name.startswith(WIRE) for _, name in socket.if_nameindex())


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class _Process:
    """A child that dies with us, its output in a file."""

    def __init__(
        self, command: list[str], log: Path, *, talks: bool = False, on: Island | None = None, **environment: str
    ) -> None:
        """talks: through pipes. on: where it runs, and listens (None: here)."""
        self.log = log
        self.host = HOST if on is None else on.there
        command = command if on is None else on.on(command)
        with log.open("ab") as file:
            self.popen = subprocess.Popen(
                [sys.executable, "-c", _BORN_MORTAL, str(os.getpid()), shutil.which(command[0]) or "", *command[1:]],
                stdout=subprocess.PIPE if talks else file,
                stdin=subprocess.PIPE if talks else subprocess.DEVNULL,
                stderr=file,
                env={**os.environ, **environment},
            )

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def kill(self) -> None:
        """As a crash does it: SIGKILL, and gone when this returns."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGKILL)
        self._gone()

    def stop(self, within_s: float = 10.0) -> None:
        """As an operator does it: SIGTERM, then SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            self.popen.terminate()
        try:
            self.popen.wait(within_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._gone()

    def freeze(self) -> None:
        """Stop it in its tracks, connections open: each of its threads stands still when this returns."""
        self.popen.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.popen.pid}/task")
        while any(each.read_text().rpartition(")")[2].split()[0] != "T" for each in threads.glob("*/stat")):
            time.sleep(0.001)

    def thaw(self) -> None:
        self.popen.send_signal(signal.SIGCONT)

    def _wait_up(self, port: int) -> None:
        end = time.monotonic() + UP_S
        while time.monotonic() < end:
            if not self.alive:
                raise RuntimeError(f"it ended at once, {self.popen.returncode}: {self.log.read_text()[-500:]}")
            with contextlib.suppress(OSError), socket.create_connection((self.host, port), 0.2):
                return
            time.sleep(0.05)
        self.kill()
        raise RuntimeError(f"it was not up after {UP_S} s: {self.log.read_text()[-500:]}")

    def _gone(self) -> None:
        self.popen.wait(10.0)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


P = TypeVar("P", bound=_Process)


class Etcd(_Process):
    """An etcd at `address`."""

    def __init__(self, folder: Path) -> None:
        port, peers = free_port(), free_port()
        self.address = f"{HOST}:{port}"
        mine, its = f"http://{self.address}", f"http://{HOST}:{peers}"
        command = [
            str(program("etcd")),
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={mine}",
            f"--advertise-client-urls={mine}",
            f"--listen-peer-urls={its}",
            f"--initial-advertise-peer-urls={its}",
            f"--initial-cluster=default={its}",
        ]
        super().__init__(command, folder / f"etcd-{port}.log")
        self._wait_up(port)


class Master(_Process):
    """A `mooncake_master` at `address`; its metrics at `metrics_port`."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        port: int | None = None,
        metrics_port: int | None = None,
        etcd: Etcd | None = None,
        stands_by: bool = False,
        on: Island | None = None,
    ) -> None:
        import mooncake

        self.folder = folder
        self.on = on
        host = HOST if on is None else on.there
        self.flags = flags
        self.store_address = f"etcd://{etcd.address}" if etcd else ""
        """As Mooncake's clients want it where masters are elected."""
        if etcd:
            flags = (*flags, "--enable_ha=true", "--enable_oplog=true", f"--etcd_endpoints={etcd.address}")
        self.port = port or free_port()
        self.metrics_port = metrics_port or free_port()
        binary = str(Path(mooncake.__file__).parent / "mooncake_master")
        command = [
            binary,
            f"--rpc_address={host}",
            f"--rpc_port={self.port}",
            f"--metrics_host={host}",
            f"--metrics_port={self.metrics_port}",
            "--logtostderr",
            *flags,
        ]
        super().__init__(command, folder / f"master-{self.port}.log", on=on)
        if not stands_by:  # one that does listens once it is elected
            self._wait_up(self.port)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def again(self) -> Master:
        """A new master, with nothing in it, at the same address."""
        return Master(self.folder, *self.flags, port=self.port, metrics_port=self.metrics_port, on=self.on)

    def metrics(self, path: str = "/metrics") -> str:
        """What it says of itself."""
        with urllib.request.urlopen(f"http://{self.host}:{self.metrics_port}{path}", timeout=5) as answer:
            return str(answer.read().decode())


class Owner(_Process):
    """A process that gives `nbytes` of memory to the store and holds what others put there; with `ssd`, a folder, also
    there (the master has to be told `--enable_offload=true`)."""

    def __init__(
        self, folder: Path, master: Master, nbytes: int, *, on: Island | None = None, ssd: Path | None = None
    ) -> None:
        log = folder / f"owner-{master.port}-{time.monotonic_ns()}.log"
        address = master.store_address or master.address
        host = HOST if on is None else on.there
        command = [sys.executable, "-c", _OWNER, address, str(nbytes), str(LIFE_S), host, str(ssd or "")]
        super().__init__(command, log, talks=True, on=on, **(_SSD if ssd is not None else {}))
        assert self.popen.stdout is not None
        words: list[str] = []
        while not words or words[0] != "code":  # the library itself may print
            line = self.popen.stdout.readline().decode()
            if not line:
                raise RuntimeError(f"the owner ended: {self.log.read_text()[-500:]}")
            words = line.split()
        if words[1] != "0":
            raise RuntimeError(f"the owner's setup said {words[1]}: {self.log.read_text()[-500:]}")
        self.endpoint = words[2]
        """Its name at the master."""


class Client(_Process):
    """A `mooncake_client` at `address`: the store's client for processes of this machine, over shared memory."""

    def __init__(self, folder: Path, master: Master, nbytes: int, port: int | None = None) -> None:
        import mooncake

        self.port = port or free_port()
        self.address = f"{HOST}:{self.port}"
        self._made_of = (folder, master, nbytes)
        command = [
            str(Path(mooncake.__file__).parent / "mooncake_client"),
            f"--host={HOST}",
            f"--port={self.port}",
            f"--global_segment_size={nbytes // MIB} MB",
            f"--master_server_address={master.address}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            "--threads=2",
            "--logtostderr",
        ]
        super().__init__(command, folder / f"client-{self.port}.log")
        self._wait_up(self.port)

    def again(self) -> Client:
        """A new one at the same address."""
        return Client(*self._made_of, port=self.port)


class Rig:
    """Processes of one test or module, all gone at its end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[_Process] = []

    def master(self, *flags: str, on: Island | None = None) -> Master:
        """A new master. A port that another took meanwhile costs a second try."""
        for turn in range(3):
            try:
                return self.adopt(Master(self.folder, *flags, on=on))
            except RuntimeError:
                if turn == 2:
                    raise
        raise AssertionError

    def owner(
        self, master: Master, nbytes: int = 256 * MIB, *, on: Island | None = None, ssd: Path | None = None
    ) -> Owner:
        owner = Owner(self.folder, master, nbytes, on=on, ssd=ssd)
        self._started.append(owner)
        return owner

    def client(self, master: Master, nbytes: int = 64 * MIB) -> Client:
        return self.adopt(Client(self.folder, master, nbytes))

    def adopt(self, process: P) -> P:
        """Count a process that was started elsewhere (`Master.again`) among ours."""
        self._started.append(process)
        return process

    def close(self) -> None:
        for process in reversed(self._started):
            process.kill()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


@pytest.fixture(scope="module")
def mooncake_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """An empty rig for a module of tests."""
    if not private_network():
        pytest.fail("Mooncake's clients listen on every address: run this in a private network (make test-remote)")
    with Rig(tmp_path_factory.mktemp("mooncake")) as rig:
        yield rig
