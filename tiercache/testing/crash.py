"""Crashes: named points at which a process kills itself, and children forked from one warm parent without threads.

A `Zygote` is a fresh interpreter that imports what the children need and then only forks; it opens no cache. A child
runs a function `script(report, argument)`, may set a `Trap` for itself, and dies there of SIGKILL, as a machine's
out-of-memory killer would do it. What it reported until then is what it had acknowledged.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

__all__ = ["POINTS", "Child", "CrashPoint", "Report", "Trap", "Zygote", "die", "serve"]

Report = Callable[[Any], None]
"""Sends one JSON value to whoever started the child; on return it has left the process."""
When = Literal["before", "after", "torn"]

_SECTOR = 512
_ANSWER_S = 30.0
"""How long the zygote may take for one answer."""


@dataclass(frozen=True, slots=True)
class CrashPoint:
    """A place in the program: just before or just after a call; or in the middle of a write ("torn")."""

    target: str
    """"module:function" or "module:Class.method"."""
    when: When


def _point(target: str, when: When) -> CrashPoint:
    return CrashPoint(f"tiercache.{target}", when)


POINTS: Final[dict[str, CrashPoint]] = {
    # bytes
    "submit": _point("mover.mover:Mover.submit", "after"),
    "dram-write-before": _point("tiers.dram:DRAMTier.write", "before"),
    "dram-write-after": _point("tiers.dram:DRAMTier.write", "after"),
    "nvme-read-before": _point("tiers.nvme:NVMeTier.read", "before"),
    "nvme-read-after": _point("tiers.nvme:NVMeTier.read", "after"),
    "nvme-write-before": _point("tiers.nvme:NVMeTier.write", "before"),
    "nvme-write-torn": _point("tiers.fileio:OsFiles.pwritev", "torn"),
    "nvme-write-after": _point("tiers.nvme:NVMeTier.write", "after"),
    "delay-over": _point("mover.mover:Mover._start", "before"),
    # what the catalog is told
    "starting": _point("catalog:Catalog.starting", "after"),
    "written-before": _point("catalog:Catalog.written", "before"),
    "written-after": _point("catalog:Catalog.written", "after"),
    "forget-before": _point("catalog:Catalog.forget", "before"),
    "forget-after": _point("catalog:Catalog.forget", "after"),
    # a commit
    "commit-begin": _point("catalog:Catalog._commit", "before"),
    "sync-before": _point("tiers.nvme:NVMeTier.sync", "before"),
    "sync-after": _point("tiers.nvme:NVMeTier.sync", "after"),
    "transaction-before": _point("catalog_rows:RowStore.apply", "before"),
    "transaction-inside": _point("catalog_rows:_put_sorted", "after"),
    "transaction-after": _point("catalog_rows:RowStore.apply", "after"),
    "settled": _point("catalog_table:SlotTable.settle", "after"),
    "commit-end": _point("catalog:Catalog._commit", "after"),
    # verbs
    "drain": _point("planner.core:Planner.drain", "after"),
    "mover-sync-before": _point("mover.mover:Mover.sync", "before"),
    "mover-sync-after": _point("mover.mover:Mover.sync", "after"),
    "invalidated": _point("planner.core:Planner.invalidate", "after"),
    "new-epoch-planned": _point("planner.core:Planner.new_epoch", "after"),
    "new-epoch-told": _point("catalog:Catalog.new_epoch", "after"),
    "epoch-file-before": _point("directory:StoreDirectory.write_epoch", "before"),
    "epoch-file-after": _point("directory:StoreDirectory.write_epoch", "after"),
    # the end
    "mover-close-before": _point("mover.mover:Mover.close", "before"),
    "last-commit-before": _point("mover.committer:Committer.stop", "before"),
    "catalog-close-before": _point("catalog:Catalog.close", "before"),
    "catalog-close-after": _point("catalog:Catalog.close", "after"),
    "marker-before": _point("catalog:write_marker", "before"),
    "marker-after": _point("catalog:write_marker", "after"),
    "unlock-before": _point("directory:StoreDirectory.close", "before"),
    # the start
    "locked": _point("directory:_take_lock", "after"),
    "swept": _point("catalog_check:_sweep", "after"),
    "store-id-before": _point("directory:_store_id", "before"),
    "store-id-after": _point("directory:_store_id", "after"),
    "file-replaced": _point("directory:write_durably", "after"),
    "copy-before": _point("catalog_check:checked_copy", "before"),
    "copy-running": CrashPoint("subprocess:Popen.communicate", "before"),
    "copy-written": _point("catalog_rows:RowStore.sync", "before"),
    "copy-after": _point("catalog_check:checked_copy", "after"),
    "set-aside-before": _point("catalog_check:set_aside", "before"),
    "set-aside-after": _point("catalog_check:set_aside", "after"),
    "marker-dropped": _point("catalog_check:drop_marker", "after"),
    "install-before": _point("catalog_check:install", "before"),
    "install-after": _point("catalog_check:install", "after"),
    "start-marker-after": _point("catalog_check:write_marker", "after"),
    "open-marker-dropped": _point("catalog_open:drop_marker", "after"),
    "fresh-install-before": _point("catalog_open:install", "before"),
    "fresh-install-after": _point("catalog_open:install", "after"),
    "reserved": _point("catalog_open:reserve", "after"),
    "probe": _point("tiers.fileio:OsFiles.preadv", "after"),
    "fallocate-before": _point("tiers.fileio:OsFiles.fallocate", "before"),
    "fallocate-after": _point("tiers.fileio:OsFiles.fallocate", "after"),
    "files-open": _point("tiers.nvme:NVMeTier._open_files", "after"),
    # another size
    "moved": _point("catalog_shrink:_move", "after"),
    "shrunk": _point("catalog:shrink", "after"),
    "truncate-before": _point("tiers.fileio:OsFiles.ftruncate", "before"),
    "truncate-after": _point("tiers.fileio:OsFiles.ftruncate", "after"),
    "unlink-after": _point("tiers.fileio:OsFiles.unlink", "after"),
    # a repair
    "payload-read": _point("scrub:_read_payload", "after"),
}
"""All points, by name. A point is passed as often as its call is made, by whatever thread."""


class Trap:
    """Watches one point in this process, and kills the process there once it is armed. For a child of a Zygote.

    It patches what it watches, for good: make it before the cache is opened, which may keep bound methods. KeyError
    for a name that is not in POINTS.
    """

    def __init__(self, name: str) -> None:
        point = POINTS[name]
        self.passed = 0
        """How often the point was passed since the trap was armed."""
        self._nth: int | None = None
        _watch(point.target, point.when, self._passes)

    def arm(self, nth: int = 1) -> None:
        """Die when the point is passed for the `nth` time from now on."""
        self.passed, self._nth = 0, nth

    def _passes(self) -> bool:
        if self._nth is None:
            return False
        self.passed += 1
        return self.passed == self._nth


def _watch(target: str, when: When, passes: Callable[[], bool]) -> None:
    """Ask `passes()` whenever this process passes a place, and kill it there where that is true."""
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *above, last = path.split(".")
    for part in above:
        owner = getattr(owner, part)
    inner = getattr(owner, last)

    @functools.wraps(inner)
    def passing(*args: Any, **kwargs: Any) -> Any:
        if when != "after" and passes():
            if when == "torn":
                _tear(*args)
            die()
        result = inner(*args, **kwargs)
        if when == "after" and passes():
            die()
        return result

    setattr(owner, last, passing)


def die() -> NoReturn:
    """SIGKILL to this process: nothing is flushed, closed or unlocked in an orderly way."""
    os.kill(os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


def _tear(_ops: object, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write only the first part of what `OsFiles.pwritev` was to write."""
    whole = b"".join(buffers)
    part = max(_SECTOR, len(whole) // 2 // _SECTOR * _SECTOR)
    with Path(f"/proc/self/fd/{fd}").open("r+b", buffering=0) as file:  # without O_DIRECT
        os.pwrite(file.fileno(), whole[:part], offset)


# -- children -----------------------------------------------------------------------------------------------------


class Child:
    """A forked process that runs a script. Made by `Zygote.start`; `wait` ends it."""

    def __init__(self, zygote: Zygote, pid: int, pipe: int) -> None:
        self.pid = pid
        self.reports: list[Any] = []
        """What it reported so far; filled by `read` and `wait`."""
        self.error = ""
        """The traceback of what it raised."""
        self.status: int | None = None
        """How it ended: an exit status, or minus the number of a signal; None while it was not waited for."""
        self._zygote = zygote
        self._pipe = pipe
        self._rest = b""

    def read(self, until: float) -> bool:
        """Take in reports until there is one more, or the child is gone. False where it is, or time is up."""
        while time.monotonic() < until and self._pipe >= 0:
            ready, _, _ = select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                return False
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                os.close(self._pipe)
                self._pipe = -1
                return False
            *lines, self._rest = (self._rest + piece).split(b"\n")
            for line in lines:
                value = json.loads(line)
                if isinstance(value, dict) and "traceback" in value:
                    self.error = value["traceback"]
                else:
                    self.reports.append(value)
            if lines:
                return True
        return False

    def kill(self) -> None:
        """SIGKILL, unless it was waited for."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)  # not reaped yet, so the number is still its own

    def wait(self, timeout_s: float = 60.0) -> int:
        """Take in all reports until the child has ended; its `status`. TimeoutError where it had to be killed."""
        until = time.monotonic() + timeout_s
        while self._pipe >= 0 and time.monotonic() < until:
            self.read(until)
        late = self._pipe >= 0
        if late:
            self.kill()
            os.close(self._pipe)
            self._pipe = -1
        if self.status is None:
            self.status = int(self._zygote.ask({"wait": self.pid})["status"])
        if late:
            raise TimeoutError(f"child {self.pid} did not end within {timeout_s:g} s; reported: {self.reports[-3:]}")
        return self.status


class Zygote:
    """A process of one thread with `modules` imported (`paths` come first in its sys.path), from which children fork.

    Not for use from several threads. Use it as a context manager.
    """

    def __init__(self, modules: Sequence[str] = (), paths: Sequence[str] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  lives as long as this
        one = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        path = os.pathsep.join([*paths, *(entry for entry in sys.path if entry)])
        code = f"from tiercache.testing.crash import serve; serve({theirs.fileno()}, {list(modules)!r})"
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, **one, "PYTHONPATH": path},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self.pid = self._process.pid
        try:
            self.ask({})
        except BaseException:
            self.close()
            raise

    def start(self, script: str, argument: Any = None, limit_s: float = 60.0) -> Child:
        """Fork a child that runs `script` ("module:function") with a JSON value; it is killed after `limit_s`."""
        ours, theirs = os.pipe()
        try:
            answer = self.ask({"start": script, "argument": argument, "limit_s": limit_s}, [theirs])
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return Child(self, int(answer["pid"]), ours)

    def ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> dict[str, Any]:
        """One request and its answer. RuntimeError where the process is gone, TimeoutError where it does not answer."""
        self._socket.settimeout(_ANSWER_S)
        answer = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], list(fds))
            answer = self._socket.recv(1 << 16)
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5.0)
            raise RuntimeError(f"the process that forks is gone:\n{self.log()}")
        values: dict[str, Any] = json.loads(answer)
        return values

    def log(self) -> str:
        """What it and its children wrote to stdout and stderr."""
        self._log.seek(0)
        return self._log.read().decode("utf-8", "replace")

    def close(self) -> None:
        """End it; children still running are killed with it. May be called twice."""
        self._socket.close()
        try:
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10.0)
        self._log.close()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# -- in the zygote ------------------------------------------------------------------------------------------------


def serve(fd: int, modules: Sequence[str]) -> None:
    """The zygote's loop: ends when the other side closes the socket `fd`."""
    with socket.socket(fileno=fd) as door:
        for name in ("tiercache", "tiercache.cache", *modules):
            importlib.import_module(name)
        threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        if threads != 1:
            raise RuntimeError(f"{threads} threads after the imports: a fork would lose all but one")
        gc.collect()
        gc.freeze()
        running: set[int] = set()
        try:
            for request, fds in _requests(door):
                door.send(json.dumps(_serve_one(door, request, fds, running)).encode())
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def _requests(door: socket.socket) -> Iterator[tuple[dict[str, Any], list[int]]]:
    while True:
        data, fds, _, _ = socket.recv_fds(door, 1 << 16, 4)
        if not data:
            return
        yield json.loads(data), fds


def _serve_one(door: socket.socket, request: dict[str, Any], fds: list[int], running: set[int]) -> dict[str, Any]:
    if "start" in request:
        pid = os.fork()
        if pid == 0:
            running.clear()
            door.close()
            _run(request, fds[0])
        for fd in fds:
            os.close(fd)
        running.add(pid)
        return {"pid": pid}
    if "wait" in request:
        running.discard(request["wait"])
        return {"status": os.waitstatus_to_exitcode(os.waitpid(request["wait"], 0)[1])}
    return {}


def _run(request: dict[str, Any], pipe: int) -> NoReturn:
    """A child's whole life."""
    signal.setitimer(signal.ITIMER_REAL, request["limit_s"])  # SIGALRM ends it, whatever it hangs in
    status = 1

    def report(value: Any) -> None:
        line = memoryview(json.dumps(value).encode() + b"\n")
        while line:
            line = line[os.write(pipe, line) :]

    try:
        module, _, name = request["start"].partition(":")
        getattr(importlib.import_module(module), name)(report, request["argument"])
        status = 0
    except BaseException:  # noqa: BLE001  outermost frame of the child
        report({"traceback": traceback.format_exc()})
    finally:
        os._exit(status)
