"""File operations below the NVMe tier: the seam where tests put faulty files, and what does not depend on slots."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiercache.directory import sync_directory
from tiercache.tiers.base import ALIGNMENT, Rows
from tiercache.tiers.dram import map_rows

__all__ = ["OS_FILES", "FileOps", "OsFiles", "aligned_rows", "direct_io_works", "transfer"]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_STALLS = 3
"""How often in a row a short transfer may end without a further whole page before it counts as failed."""


class FileOps(Protocol):
    """What the NVMe tier asks of the operating system. Every method may raise OSError."""

    def open(self, path: str, flags: int, mode: int) -> int:
        """A descriptor, close-on-exec, as `os.open`."""

    def close(self, fd: int) -> None:
        """As `os.close`."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `os.preadv`: bytes read, 0 at the end of the file."""

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """As `os.pwritev`: bytes written."""

    def fdatasync(self, fd: int) -> None:
        """As `os.fdatasync`."""

    def fallocate(self, fd: int, nbytes: int) -> None:
        """fallocate(2) from offset 0: allocate, extend the file, write nothing. EOPNOTSUPP where it cannot."""

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """As `os.ftruncate`."""

    def size(self, fd: int) -> tuple[int, int]:
        """Length of the file, and bytes allocated for it."""

    def free_nbytes(self, path: str) -> int:
        """Bytes that may still be allocated on the file system of `path`."""

    def unlink(self, path: str) -> None:
        """As `os.unlink`."""

    def sync_directory(self, path: str) -> None:
        """Make creations and removals in the directory durable."""


class OsFiles:
    """`FileOps` of the operating system."""

    def open(self, path: str, flags: int, mode: int) -> int:
        """See FileOps."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """See FileOps."""
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """See FileOps."""
        os.fdatasync(fd)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """See FileOps. Not `os.posix_fallocate`: glibc writes zeros where the file system refuses."""
        number = errno.EINTR
        while number == errno.EINTR:
            number = ctypes.get_errno() if _libc.fallocate(fd, 0, 0, nbytes) else 0
        if number == errno.ENOSYS:
            number = errno.EOPNOTSUPP
        if number:
            raise OSError(number, os.strerror(number))

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """See FileOps."""
        os.ftruncate(fd, nbytes)

    def size(self, fd: int) -> tuple[int, int]:
        """See FileOps."""
        facts = os.fstat(fd)
        return facts.st_size, facts.st_blocks * 512

    def free_nbytes(self, path: str) -> int:
        """See FileOps."""
        facts = os.statvfs(path)
        return facts.f_bavail * facts.f_frsize

    def unlink(self, path: str) -> None:
        """See FileOps."""
        Path(path).unlink()

    def sync_directory(self, path: str) -> None:
        """See FileOps."""
        sync_directory(Path(path))


OS_FILES = OsFiles()


def aligned_rows(n: int, stride: int) -> Rows:
    """Zeroed uint8 `[n, stride]` of anonymous memory that starts at a page: for staging and bounce buffers.

    It is not there in a forked child, and unmapped when the last view of it is gone. OSError where memory is short.
    """
    return map_rows(n, stride)


def direct_io_works(ops: FileOps, directory: str) -> bool:
    """Try O_DIRECT on a scratch file in `directory`: an aligned page written must be read back the same."""
    path = os.path.join(directory, f".probe-{os.getpid()}")  # noqa: PTH118 - the seam takes text
    fd = -1
    try:
        fd = ops.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        pages = aligned_rows(2, ALIGNMENT)
        pages[0] = np.arange(ALIGNMENT, dtype=np.uint16).astype(np.uint8)
        if ops.pwritev(fd, [pages[0].data], 0) != ALIGNMENT or ops.preadv(fd, [pages[1].data], 0) != ALIGNMENT:
            return False
        return bool(np.array_equal(pages[0], pages[1]))
    except OSError:
        return False
    finally:
        if fd >= 0:
            with contextlib.suppress(OSError):
                ops.close(fd)
            with contextlib.suppress(OSError):
                ops.unlink(path)


def transfer(ops: FileOps, write: bool, fd: int, offset: int, rows: NDArray[np.uint8]) -> int:
    """Move `rows` (uint8 `[k, width]`, contiguous along axis 1) from or to `k * width` adjacent bytes of a file.

    Short transfers are continued, always at a multiple of ALIGNMENT, since O_DIRECT takes nothing else. Returns the
    bytes moved: less than all at the end of the file, or where the file makes no progress. Raises OSError.
    """
    width: int = rows.shape[1]
    total: int = rows.shape[0] * width
    move = ops.pwritev if write else ops.preadv
    done = stalls = 0
    while True:
        moved = move(fd, _buffers(rows, done), offset + done)
        if moved <= 0:
            return done
        if done + moved >= total:
            return total
        whole = (done + moved) // ALIGNMENT * ALIGNMENT
        stalls = stalls + 1 if whole <= done else 0
        if stalls >= _STALLS:
            return done
        done = whole


def _buffers(rows: NDArray[np.uint8], done: int) -> list[memoryview]:
    """The memory of `rows` past its first `done` bytes, in as few pieces as possible."""
    if rows.flags.c_contiguous:
        return [rows.reshape(-1)[done:].data]
    first, within = divmod(done, rows.shape[1])
    pieces = [row.data for row in rows[first:]]
    if within:
        pieces[0] = pieces[0][within:]
    return pieces
