"""The seam below the NVMe tier."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tiercache.tiers.fileio import OS_FILES, OsFiles, aligned_rows, direct_io_works, transfer

PAGE = 4096


def test_fallocate_allocates_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"kept")
    fd = OS_FILES.open(str(path), os.O_RDWR, 0o600)
    assert not os.get_inheritable(fd)
    OS_FILES.fallocate(fd, 1 << 20)
    length, allocated = OS_FILES.size(fd)
    assert length == 1 << 20 and allocated >= 1 << 20
    assert os.pread(fd, 5, 0) == b"kept\0"
    OS_FILES.close(fd)


def test_fallocate_raises_what_the_kernel_says(tmp_path: Path) -> None:
    fd = OS_FILES.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT, 0o600)
    with pytest.raises(OSError, match=r"space|large") as caught:
        OS_FILES.fallocate(fd, 1 << 50)
    assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    OS_FILES.close(fd)
    with pytest.raises(OSError, match="descriptor"):
        OS_FILES.fallocate(fd, 4096)


def test_free_nbytes(tmp_path: Path) -> None:
    assert OS_FILES.free_nbytes(str(tmp_path)) > 0


def test_aligned_rows() -> None:
    rows = aligned_rows(3, 2 * PAGE)
    assert rows.shape == (3, 2 * PAGE) and rows.dtype == np.uint8
    assert rows.ctypes.data % PAGE == 0 and not rows.any()
    rows[:] = 7


def test_the_probe_leaves_nothing(tmp_path: Path) -> None:
    assert direct_io_works(OS_FILES, str(tmp_path)) in (True, False)
    assert list(tmp_path.iterdir()) == []


class NoDirect(OsFiles):
    """A file system that refuses the flag."""

    def open(self, path: str, flags: int, mode: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags, mode)


class Liar(OsFiles):
    """A file system that takes the flag and then returns other bytes."""

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        n = super().preadv(fd, buffers, offset)
        buffers[0][10] ^= 1
        return n


@pytest.mark.parametrize("ops", [NoDirect(), Liar()])
def test_the_probe_believes_only_bytes(tmp_path: Path, ops: OsFiles) -> None:
    assert not direct_io_works(ops, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


class Short(OsFiles):
    """Moves at most `most` bytes per call."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls = 0

    def _clip(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        self.calls += 1
        clipped, left = [], self.most
        for buffer in buffers:
            if left > 0:
                clipped.append(buffer[:left])
                left -= len(clipped[-1])
        return clipped

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().preadv(fd, self._clip(buffers), offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        return super().pwritev(fd, self._clip(buffers), offset)


@pytest.mark.parametrize("most", [PAGE, PAGE + 1, 3 * PAGE - 5, 5 * PAGE, 1 << 20])
@pytest.mark.parametrize("strided", [False, True])
def test_short_transfers_are_continued(tmp_path: Path, most: int, strided: bool) -> None:
    ops = Short(most)
    fd = ops.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT, 0o600)
    source = np.random.default_rng(1).integers(0, 256, (8, 2 * PAGE), dtype=np.uint8)
    target = np.zeros_like(source)
    if strided:
        source, target = source[::2], target[::2]
    assert transfer(ops, True, fd, PAGE, source) == source.size
    assert transfer(ops, False, fd, PAGE, target) == source.size
    assert np.array_equal(source, target)
    assert ops.calls >= 2 * -(-source.size // most)
    assert transfer(ops, False, fd, 2 * PAGE, target) == source.size - PAGE, "the file ends"
    ops.close(fd)


@pytest.mark.parametrize("most", [0, 1, PAGE - 1])
def test_a_file_that_makes_no_progress_does_not_hang(tmp_path: Path, most: int) -> None:
    ops = Short(most)
    fd = ops.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT, 0o600)
    assert transfer(ops, True, fd, 0, aligned_rows(2, PAGE)) == 0
    assert ops.calls < 10
    ops.close(fd)
