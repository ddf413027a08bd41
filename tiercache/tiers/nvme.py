"""NVMe: slots in preallocated files, read and written with O_DIRECT where that works."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from tiercache.errors import ConfigError
from tiercache.tiers.base import ALIGNMENT, Rows, contiguous_runs, slot_stride
from tiercache.tiers.dram import check_transfer
from tiercache.tiers.fileio import OS_FILES, FileOps, aligned_rows, direct_io_works, transfer
from tiercache.types import Bools, Slots

__all__ = ["NVMeTier", "extents_for", "slots_file"]

_LOG = logging.getLogger("tiercache.tiers.nvme")
_IOV_MAX = 1024
_FILES_MAX = 1000


def slots_file(number: int) -> str:
    """Name of the payload file with this number, from 0."""
    return f"slots-{number:02d}.dat"


def extents_for(capacity: int, old: Sequence[int] = ()) -> tuple[int, ...]:
    """Slots per payload file for `capacity` slots, given what the files hold now.

    Growth appends a file, shrinking cuts from the end; slot numbers that remain keep their place.
    """
    kept: list[int] = []
    left = capacity
    for slots in old:
        if left > 0:
            kept.append(min(slots, left))
            left -= kept[-1]
    if left > 0:
        kept.append(left)
    return tuple(kept)


class NVMeTier:
    """`SlotTier` over the files slots-NN.dat of a directory. Safe from several threads on different slots.

    `extents`: slots per file, as the catalog's manifest has them; None: one file. Files are created, extended,
    shortened and (past the last extent) removed to fit, by fallocate(2), never by writing. ConfigError where the file
    system has too little space for what is not allocated yet, or where the files cannot be opened; then nothing was
    allocated. `files="keep"` takes the files as they are, missing or short (their blocks fail), `files="read"` opens
    them only for reading.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        block_nbytes: int,
        capacity: int,
        *,
        extents: Sequence[int] | None = None,
        ops: FileOps = OS_FILES,
        direct: bool = True,
        files: Literal["own", "keep", "read"] = "own",
        chunk_nbytes: int = 1 << 20,
    ) -> None:
        if capacity < 1 or block_nbytes < 1:
            raise ValueError(f"capacity = {capacity}, block_nbytes = {block_nbytes}: both must be at least 1")
        self.name = "nvme"
        self.capacity = capacity
        self.block_nbytes = block_nbytes
        self.stride = slot_stride(block_nbytes)
        self.slab: Rows | None = None
        self.verifies = True
        self.path = Path(path)
        self.extents: tuple[int, ...] = extents_for(capacity) if extents is None else tuple(extents)
        """Slots per file."""
        if sum(self.extents) != capacity:
            raise ValueError(f"extents {self.extents} do not add up to {capacity} slots")
        self.remarks: list[str] = []
        """What a user should know, each logged once: no O_DIRECT, no fallocate."""
        self.errors: Counter[str] = Counter()
        """Failed operations: "read", "write", "sync"; and "short": transfers that ended early."""
        self.last_error = ""
        self._ops = ops
        self._files = files
        self._chunk = max(1, min(chunk_nbytes // self.stride, _IOV_MAX))
        self._bounce = threading.local()
        self._lock = threading.Lock()
        self._busy = 0
        self._closed = False
        self._fds: list[int] = []
        self.direct = direct and files != "read" and direct_io_works(ops, str(self.path))
        """True where payload bypasses the page cache."""
        if direct and not self.direct and files != "read":
            self._remark("O_DIRECT does not work here: reads and writes go through the page cache")
        self._open_files()

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See SlotTier. Whole aligned rows (`stride` wide, at multiples of 4 KiB) are read in place."""
        return self._move(False, slots, rows)

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See SlotTier. Durable after a `sync` that began after this returned."""
        return self._move(True, slots, rows)

    def sync(self) -> bool:
        """Flush the payload files to the device. False where that fails: nothing can be said of earlier writes."""
        if not self._enter():
            return False
        try:
            for fd in self._fds:
                if fd >= 0:
                    self._ops.fdatasync(fd)
            return True
        except OSError as e:
            self._failed("sync", e)
            return False
        finally:
            self._leave()

    def close(self) -> None:
        """Close the files as soon as the last running transfer has returned. May be called twice."""
        with self._lock:
            self._closed = True
            last = self._busy == 0
        if last:
            self._close_files()

    def abandon(self) -> None:
        """For a forked child: close the descriptors, take no lock."""
        self._closed = True
        self._close_files()

    def __repr__(self) -> str:
        how = "O_DIRECT" if self.direct else "buffered"
        return f"NVMeTier({str(self.path)!r}, {self.capacity} x {self.block_nbytes}, {how})"

    def _move(self, write: bool, slots: Slots, rows: Rows) -> Bools:
        check_transfer(slots, rows, self.capacity, self.block_nbytes, self.stride)
        ok = np.zeros(len(slots), dtype=np.bool_)
        if len(slots) == 0 or not self._enter():
            return ok
        try:
            in_place = rows.shape[1] == self.stride and (not self.direct or _aligned(rows))
            for begin, end, fd, offset in self._chunks(slots):
                ok[begin:end] = self._move_chunk(write, fd, offset, rows[begin:end], in_place)
        finally:
            self._leave()
        return ok

    def _chunks(self, slots: Slots) -> Iterator[tuple[int, int, int, int]]:
        """Pieces `[begin, end)` of `slots` that are adjacent in one file, at most a chunk long: with fd and offset."""
        bounds = self._bounds
        for run_begin, run_end in contiguous_runs(slots):
            begin = run_begin
            while begin < run_end:
                slot = int(slots[begin])
                file = bisect_right(bounds, slot) - 1
                end = min(run_end, begin + self._chunk, begin + bounds[file + 1] - slot)
                yield begin, end, self._fds[file], (slot - bounds[file]) * self.stride
                begin = end

    def _move_chunk(self, write: bool, fd: int, offset: int, rows: Rows, in_place: bool) -> Bools:
        """Move adjacent slots; after an error each of them by itself, so that one bad block fails alone."""
        k = len(rows)
        buffer = rows if in_place else self._bounce_rows()[:k]
        if write and not in_place:
            buffer[:, : rows.shape[1]] = rows
        ok = np.zeros(k, dtype=np.bool_)
        try:
            moved = transfer(self._ops, write, fd, offset, buffer)
            ok[: moved // self.stride] = True
            if moved < k * self.stride:
                self._count("short", f"{'write' if write else 'read'} ended {k * self.stride - moved} bytes early")
        except OSError as e:
            if k == 1:
                self._failed("write" if write else "read", e)
            else:
                for i in range(k):
                    part = rows[i : i + 1]
                    ok[i] = self._move_chunk(write, fd, offset + i * self.stride, part, in_place)[0]
                return ok
        if not write and not in_place:
            rows[ok] = buffer[ok, : rows.shape[1]]
        return ok

    def _bounce_rows(self) -> Rows:
        """This thread's own aligned buffer, a chunk long."""
        rows: Rows | None = getattr(self._bounce, "rows", None)
        if rows is None:
            rows = self._bounce.rows = aligned_rows(self._chunk, self.stride)
        return rows

    def _enter(self) -> bool:
        """Keep the descriptors open until `_leave`: a late transfer must never meet a reused number."""
        with self._lock:
            if self._closed:
                return False
            self._busy += 1
            return True

    def _leave(self) -> None:
        with self._lock:
            self._busy -= 1
            last = self._closed and self._busy == 0
        if last:
            self._close_files()

    def _open_files(self) -> None:
        self._bounds = [0, *itertools.accumulate(self.extents)]
        flags = {"own": os.O_RDWR | os.O_CREAT, "keep": os.O_RDWR, "read": os.O_RDONLY}[self._files]
        flags |= os.O_DIRECT if self.direct else 0
        try:
            for number in range(len(self.extents)):
                self._fds.append(self._open_file(number, flags))
            if self._files == "own":
                self._allocate()
        except OSError as e:
            self._close_files()
            raise ConfigError("path", str(self.path), f"the payload files cannot be opened ({e.strerror})") from e
        except ConfigError:
            self._close_files()
            raise

    def _open_file(self, number: int, flags: int) -> int:
        path = self.path / slots_file(number)
        if self._files != "own" and not path.exists():
            return -1
        fd = self._ops.open(str(path), flags, 0o600)
        if self._files == "own":
            os.fchmod(fd, 0o600)
        return fd

    def _allocate(self) -> None:
        """Bring each file to its size. Shortens first, so that what is given back counts as free."""
        wanted = [slots * self.stride for slots in self.extents]
        missing = 0
        for fd, nbytes in zip(self._fds, wanted, strict=True):
            length, allocated = self._ops.size(fd)
            if length > nbytes:
                self._ops.ftruncate(fd, nbytes)
                allocated = self._ops.size(fd)[1]
            missing += max(0, nbytes - allocated)
        self._remove_files_past_end()
        free = self._ops.free_nbytes(str(self.path))
        if missing > free:
            raise ConfigError(
                "size",
                sum(wanted),
                f"{missing} bytes are needed in {self.path} beyond what is allocated there, {free} are free; "
                f"at most {max(0, sum(wanted) - missing + free)} would fit",
            )
        for fd, nbytes in zip(self._fds, wanted, strict=True):
            self._fallocate(fd, nbytes, free)
        self._ops.sync_directory(str(self.path))

    def _fallocate(self, fd: int, nbytes: int, free: int) -> None:
        length = self._ops.size(fd)[0]
        try:
            self._ops.fallocate(fd, nbytes)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                self._ops.ftruncate(fd, length)
                raise ConfigError(
                    "size", nbytes, f"the file system cannot allocate that ({e.strerror}; {free} bytes free)"
                ) from e
            if e.errno != errno.EOPNOTSUPP:
                raise
            self._remark("the file system cannot preallocate: a disk that fills up fails later writes")
            if length < nbytes:
                self._ops.ftruncate(fd, nbytes)

    def _remove_files_past_end(self) -> None:
        for number in range(len(self.extents), _FILES_MAX):
            path = self.path / slots_file(number)
            if not path.exists():
                return
            self._ops.unlink(str(path))

    def _close_files(self) -> None:
        fds, self._fds = self._fds, []
        for fd in fds:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._ops.close(fd)

    def _failed(self, what: str, error: OSError) -> None:
        self._count(what, f"{what}: {error.strerror or error}")

    def _count(self, what: str, text: str) -> None:
        with self._lock:
            self.errors[what] += 1
            self.last_error = text

    def _remark(self, text: str) -> None:
        if text not in self.remarks:
            self.remarks.append(text)
            _LOG.warning("%s: %s", self.path, text)


def _aligned(rows: Rows) -> bool:
    """True where every row starts at a multiple of ALIGNMENT in memory."""
    return rows.ctypes.data % ALIGNMENT == 0 and (len(rows) < 2 or rows.strides[0] % ALIGNMENT == 0)
