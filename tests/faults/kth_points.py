"""Where the k-th fault is planted, beside the seams: allocations, threads, LMDB, and the directory's own file calls."""

from __future__ import annotations

import errno
import fcntl
import importlib
import os
import pathlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import lmdb

from tiercache import catalog_rows, directory
from tiercache.planner.room import Room
from tiercache.testing.faults import FaultPlan

MAPPERS = ("tiers.dram", "tiers.fileio", "tiers.device", "mover.staging")
"""Modules that map memory: the slab, staging, bounce buffers."""
ARRAY_MODULES = (
    "mover.job",
    "mover.copier",
    "mover.committer",
    "mover.ledger",
    "checksum",
    "layout",
    "catalog_table",
)
ARRAY_MAKERS = ("zeros", "empty", "ones", "concatenate", "frombuffer", "isin", "flatnonzero", "arange")
OS_CALLS = ("open", "fsync", "ftruncate", "pwrite", "write", "fchmod", "fstat", "pread", "read")
PATH_CALLS = ("mkdir", "chmod", "rename", "replace", "unlink", "rmdir", "read_bytes", "read_text", "open")


class Proxy:
    """A module as seen by one other module: some of its functions count and may fail."""

    def __init__(self, module: Any, names: tuple[str, ...], plan: FaultPlan, kind: str, where: str) -> None:
        self._module = module
        for name in names:
            setattr(self, name, counted(getattr(module, name), plan, kind, f"{where}: {module.__name__}.{name}"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def counted(call: Callable[..., Any], plan: FaultPlan, kind: str, where: str) -> Callable[..., Any]:
    def passing(*args: Any, **kwargs: Any) -> Any:
        plan.meet(kind, where)
        return call(*args, **kwargs)

    return passing


@contextmanager
def planted(plan: FaultPlan, root: pathlib.Path) -> Iterator[None]:
    """Plant all points that are no seams; file calls of the directory and the catalog only below `root`."""
    with ExitStack() as stack:

        def patch(target: Any, name: str, new: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, new))

        for name in MAPPERS:
            module = importlib.import_module(f"tiercache.{name}")
            patch(module, "map_rows", counted(module.map_rows, plan, "memory", name))
        for name in ARRAY_MODULES:
            module = importlib.import_module(f"tiercache.{name}")
            makers = tuple(
                maker for maker in ARRAY_MAKERS if f"np.{maker}(" in pathlib.Path(module.__file__).read_text()
            )
            patch(module, "np", Proxy(module.np, makers, plan, "array", name))
        patch(Room, "free", _no_slots(plan, Room.free))
        patch(threading.Thread, "start", _start(plan, threading.Thread.start))
        patch(lmdb, "open", counted(lmdb.open, plan, "catalog-open", "lmdb.open"))
        patch(catalog_rows.RowStore, "apply", counted(catalog_rows.RowStore.apply, plan, "commit", "apply"))
        patch(catalog_rows, "_put_sorted", counted(catalog_rows._put_sorted, plan, "commit-inside", "_put_sorted"))
        patch(directory, "os", Proxy(os, OS_CALLS, plan, "directory", "directory"))
        patch(catalog_rows, "os", Proxy(os, ("open", "pread", "fstat"), plan, "directory", "catalog_rows"))
        patch(fcntl, "flock", counted(fcntl.flock, plan, "flock", "flock"))
        for name in PATH_CALLS:
            patch(pathlib.Path, name, _path_call(plan, name, getattr(pathlib.Path, name), root))
        yield


def _no_slots(plan: FaultPlan, free: Callable[..., int]) -> Callable[..., int]:
    """The k-th time that slots are wanted, there are none."""

    def passing(self: Room, level: int, want: int, *args: Any, **kwargs: Any) -> int:
        if want and plan.due("slots", f"{want} of level {level}"):
            return 0
        return free(self, level, want, *args, **kwargs)

    return passing


def _start(plan: FaultPlan, start: Callable[[Any], None]) -> Callable[[Any], None]:
    def passing(self: threading.Thread) -> None:
        if self.name.startswith("tiercache-"):
            plan.meet("thread", self.name)
        start(self)

    return passing


def _path_call(plan: FaultPlan, name: str, call: Callable[..., Any], root: pathlib.Path) -> Callable[..., Any]:
    def passing(self: pathlib.Path, *args: Any, **kwargs: Any) -> Any:
        if self.is_relative_to(root) and self != root:
            plan.meet("path", f"{name} {self.relative_to(root)}")
        return call(self, *args, **kwargs)

    return passing


def io(number: int) -> Callable[[], OSError]:
    return lambda: OSError(number, f"planned: {os.strerror(number)}")


KINDS: dict[str, tuple[str, Callable[[], BaseException], str]] = {
    # name: (kind, error, effect)
    "memory-MemoryError": ("memory", lambda: MemoryError("planned"), "raise"),
    "memory-ENOMEM": ("memory", io(errno.ENOMEM), "raise"),
    "array-MemoryError": ("array", lambda: MemoryError("planned"), "raise"),
    "slots-none": ("slots", io(errno.EIO), "raise"),
    "thread-RuntimeError": ("thread", lambda: RuntimeError("planned: can't start new thread"), "raise"),
    "read-EIO": ("preadv", io(errno.EIO), "raise"),
    "read-short": ("preadv", io(errno.EIO), "short"),
    "read-wrong": ("preadv", io(errno.EIO), "wrong"),
    "write-EIO": ("pwritev", io(errno.EIO), "raise"),
    "write-ENOSPC": ("pwritev", io(errno.ENOSPC), "raise"),
    "write-short": ("pwritev", io(errno.EIO), "short"),
    "write-wrong": ("pwritev", io(errno.EIO), "wrong"),
    "sync-EIO": ("fdatasync", io(errno.EIO), "raise"),
    "sync-ENOSPC": ("fdatasync", io(errno.ENOSPC), "raise"),
    "commit-Error": ("commit", lambda: lmdb.Error("planned"), "raise"),
    "commit-MapFull": ("commit", lambda: lmdb.MapFullError("planned"), "raise"),
    "commit-EIO": ("commit", io(errno.EIO), "raise"),
    "commit-MemoryError": ("commit", lambda: MemoryError("planned"), "raise"),
    "commit-inside-DiskError": ("commit-inside", lambda: lmdb.DiskError("planned"), "raise"),
    "commit-inside-MemoryError": ("commit-inside", lambda: lmdb.MemoryError("planned"), "raise"),
    "catalog-open-Error": ("catalog-open", lambda: lmdb.Error("planned: Cannot allocate memory"), "raise"),
    "catalog-open-MemoryError": ("catalog-open", lambda: MemoryError("planned"), "raise"),
    "open-EMFILE": ("open", io(errno.EMFILE), "raise"),
    "fallocate-ENOSPC": ("fallocate", io(errno.ENOSPC), "raise"),
    "fallocate-EIO": ("fallocate", io(errno.EIO), "raise"),
    "fallocate-EOPNOTSUPP": ("fallocate", io(errno.EOPNOTSUPP), "raise"),
    "size-EIO": ("size", io(errno.EIO), "raise"),
    "free_nbytes-EIO": ("free_nbytes", io(errno.EIO), "raise"),
    "unlink-EIO": ("unlink", io(errno.EIO), "raise"),
    "sync_directory-EIO": ("sync_directory", io(errno.EIO), "raise"),
    "flock-ENOLCK": ("flock", io(errno.ENOLCK), "raise"),
    "directory-EIO": ("directory", io(errno.EIO), "raise"),
    "directory-EMFILE": ("directory", io(errno.EMFILE), "raise"),
    "directory-ENOSPC": ("directory", io(errno.ENOSPC), "raise"),
    "path-EIO": ("path", io(errno.EIO), "raise"),
    "path-ENOSPC": ("path", io(errno.ENOSPC), "raise"),
}
"""Every kind of operation, and the ways in which it fails."""
