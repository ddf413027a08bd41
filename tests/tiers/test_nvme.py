"""NVMe: what the shared suite of all tiers does not ask. That one runs in test_conformance.py."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercache.errors import ConfigError
from tiercache.tiers.base import Rows
from tiercache.tiers.fileio import OsFiles, aligned_rows
from tiercache.tiers.nvme import NVMeTier, extents_for
from tiercache.types import Slots


def slots(*numbers: int) -> Slots:
    return np.array(numbers, dtype=np.int32)


def noise(n: int, width: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).integers(0, 256, (n, width), dtype=np.uint8)


class Counting(OsFiles):
    """Remembers the calls, and fails where told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, int]] = []
        self.bad: set[int] = set()
        """Offsets of pages that cannot be moved."""
        self.sync_error: OSError | None = None
        self.free: int | None = None
        self.fallocate_error: int | None = None
        self.refuse_direct = False
        self.closed: list[int] = []
        self.synced: list[int] = []

    def open(self, path: str, flags: int, mode: int) -> int:
        if self.refuse_direct and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags, mode)

    def close(self, fd: int) -> None:
        self.closed.append(fd)
        super().close(fd)

    def _note(self, what: str, buffers: Sequence[memoryview], offset: int) -> None:
        nbytes = sum(buffer.nbytes for buffer in buffers)
        self.calls.append((what, offset, nbytes))
        if any(offset <= at < offset + nbytes for at in self.bad):
            raise OSError(errno.EIO, "Input/output error")

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._note("read", buffers, offset)
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._note("write", buffers, offset)
        return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        if self.sync_error is not None:
            raise self.sync_error
        self.synced.append(os.fstat(fd).st_ino)
        super().fdatasync(fd)

    def fallocate(self, fd: int, nbytes: int) -> None:
        if self.fallocate_error is not None:
            raise OSError(self.fallocate_error, os.strerror(self.fallocate_error))
        super().fallocate(fd, nbytes)

    def free_nbytes(self, path: str) -> int:
        return super().free_nbytes(path) if self.free is None else self.free


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slots_any_rows(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Several files, odd sizes, scattered slots, widths and strides: what was written is read, and nothing else."""
    nbytes = data.draw(st.sampled_from([1, 511, 4096, 5000, 8192]))
    extents = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    capacity = sum(extents)
    tier = NVMeTier(tmp_path_factory.mktemp("kv"), nbytes, capacity, extents=extents, chunk_nbytes=12288)
    model = np.zeros((capacity, nbytes), dtype=np.uint8)
    for step in range(data.draw(st.integers(1, 6))):
        chosen = np.array(data.draw(st.permutations(range(capacity))), dtype=np.int32)
        chosen = chosen[: data.draw(st.integers(0, capacity))]
        if data.draw(st.booleans()):
            chosen = np.sort(chosen)
        wide, aligned, spread = data.draw(st.booleans()), data.draw(st.booleans()), data.draw(st.integers(1, 2))
        width = tier.stride if wide else nbytes
        memory = aligned_rows(spread * capacity, tier.stride)[:, :width] if aligned else noise(spread * capacity, width)
        rows = memory[: spread * len(chosen) : spread] if len(chosen) else memory[:0]
        if data.draw(st.booleans()):
            rows[:] = noise(len(chosen), width, step)
            assert tier.write(chosen, rows).all()
            model[chosen] = rows[:, :nbytes]
        else:
            assert tier.read(chosen, rows).all()
            assert np.array_equal(rows[:, :nbytes], model[chosen])
    everything = np.zeros((capacity, nbytes), dtype=np.uint8)
    assert tier.read(np.arange(capacity, dtype=np.int32), everything).all()
    assert np.array_equal(everything, model)
    tier.close()


def test_payload_survives_a_reopen_and_is_preallocated(tmp_path: Path) -> None:
    tier = NVMeTier(tmp_path, 5000, 8)
    rows = noise(3, 5000)
    assert tier.write(slots(7, 0, 3), rows).all() and tier.sync()
    tier.close()
    tier.close()
    file = tmp_path / "slots-00.dat"
    assert file.stat().st_size == 8 * 8192 and file.stat().st_blocks * 512 >= 8 * 8192
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    again = NVMeTier(tmp_path, 5000, 8)
    read = np.zeros_like(rows)
    assert again.read(slots(7, 0, 3), read).all() and np.array_equal(read, rows)
    assert (again.name, again.verifies, again.slab, again.stride) == ("nvme", True, None, 8192)
    again.close()


def test_adjacent_slots_are_one_call(tmp_path: Path) -> None:
    ops = Counting()
    tier = NVMeTier(tmp_path, 8192, 64, ops=ops, chunk_nbytes=1 << 18)
    for memory, most in ((aligned_rows(64, 8192), 32), (noise(64, 8192), 32), (aligned_rows(128, 8192)[::2], 32)):
        ops.calls.clear()
        assert tier.write(np.arange(64, dtype=np.int32), memory).all()
        assert tier.read(np.arange(64, dtype=np.int32), memory).all()
        assert ops.calls == [(what, k * most * 8192, most * 8192) for what in ("write", "read") for k in (0, 1)]
    ops.calls.clear()
    tier.read(slots(1, 2, 3, 10, 5, 6), aligned_rows(6, 8192))
    assert [(offset // 8192, nbytes // 8192) for _, offset, nbytes in ops.calls] == [(1, 3), (10, 1), (5, 2)]
    tier.close()


def test_aligned_rows_need_no_bounce_buffer(tmp_path: Path) -> None:
    tier = NVMeTier(tmp_path, 5000, 4)
    rows = aligned_rows(4, 8192)
    assert tier.write(np.arange(4, dtype=np.int32), rows).all()
    assert tier.read(np.arange(4, dtype=np.int32), rows[::-1]).all()
    assert not hasattr(tier._bounce, "rows")
    assert tier.read(np.arange(4, dtype=np.int32), noise(4, 5000)).all()
    assert hasattr(tier._bounce, "rows")
    tier.close()


@pytest.mark.parametrize("aligned", [True, False])
def test_one_bad_block_fails_alone(tmp_path: Path, aligned: bool) -> None:
    ops = Counting()
    tier = NVMeTier(tmp_path, 8192, 8, ops=ops)
    rows = aligned_rows(8, 8192) if aligned else noise(8, 8192)
    rows[:] = noise(8, 8192)
    every = np.arange(8, dtype=np.int32)
    assert tier.write(every, rows).all()
    ops.bad = {3 * 8192, 5 * 8192 + 4096}
    read = np.zeros_like(rows)
    ok = tier.read(every, read)
    assert ok.tolist() == [True, True, True, False, True, False, True, True]
    assert np.array_equal(read[ok], rows[ok])
    assert tier.write(every, rows).tolist() == ok.tolist()
    assert tier.errors == {"read": 2, "write": 2} and "Input/output" in tier.last_error
    ops.bad.clear()
    assert tier.write(every, rows).all() and tier.read(every, read).all()
    tier.close()


def test_a_file_that_ends_early_fails_the_blocks_past_its_end(tmp_path: Path) -> None:
    tier = NVMeTier(tmp_path, 8192, 8)
    os.truncate(tmp_path / "slots-00.dat", 3 * 8192 + 100)
    assert tier.read(np.arange(8, dtype=np.int32), noise(8, 8192)).tolist() == [True] * 3 + [False] * 5
    assert tier.errors["short"] == 1
    tier.close()


def test_a_sync_error_is_false_and_counted(tmp_path: Path) -> None:
    ops = Counting()
    tier = NVMeTier(tmp_path, 4096, 2, ops=ops)
    ops.sync_error = OSError(errno.EIO, "Input/output error")
    assert tier.sync() is False
    assert tier.errors == {"sync": 1}
    ops.sync_error = None
    assert tier.sync() is True
    tier.close()
    assert tier.sync() is False


def test_a_sync_reaches_every_file(tmp_path: Path) -> None:
    ops = Counting()
    tier = NVMeTier(tmp_path, 4096, 6, extents=(2, 3, 1), ops=ops)
    assert tier.sync()
    assert ops.synced == [(tmp_path / f"slots-0{i}.dat").stat().st_ino for i in range(3)]
    tier.close()


@pytest.mark.parametrize("memory", ["page cache", "tmpfs"])
def test_without_direct_io(tmp_path: Path, memory: str) -> None:
    """Where O_DIRECT is refused, everything works all the same, and says so."""
    import tempfile

    place = "/dev/shm" if memory == "tmpfs" and Path("/dev/shm").is_dir() else str(tmp_path)
    ops = Counting()
    ops.refuse_direct = True
    with tempfile.TemporaryDirectory(dir=place) as path:
        for tier in (NVMeTier(path, 5000, 4, ops=ops), NVMeTier(path, 5000, 4)):
            rows, read = noise(4, 5000), np.zeros((4, 5000), dtype=np.uint8)
            assert tier.write(np.arange(4, dtype=np.int32), rows).all() and tier.sync()
            assert tier.read(np.arange(4, dtype=np.int32), read).all() and np.array_equal(rows, read)
            assert tier.direct == (not any("O_DIRECT" in remark for remark in tier.remarks))
            tier.close()
    assert not NVMeTier(tmp_path, 4096, 1, direct=False).remarks


def test_where_fallocate_is_refused_the_file_is_sparse_and_it_is_said_once(tmp_path: Path) -> None:
    ops = Counting()
    ops.fallocate_error = errno.EOPNOTSUPP
    tier = NVMeTier(tmp_path, 4096, 8, extents=(4, 4), ops=ops)
    assert sum("preallocate" in remark for remark in tier.remarks) == 1
    assert (tmp_path / "slots-01.dat").stat().st_size == 4 * 4096
    assert not [call for call in ops.calls if call[1:] != (0, 4096)], "nothing was written but the probe"
    assert tier.write(slots(7), noise(1, 4096)).all()
    tier.close()


def test_too_little_space_names_the_bytes(tmp_path: Path) -> None:
    ops = Counting()
    ops.free = 10 * 4096
    with pytest.raises(ConfigError) as caught:
        NVMeTier(tmp_path, 4096, 16, ops=ops)
    assert str(16 * 4096) in str(caught.value) and str(10 * 4096) in str(caught.value)
    assert (tmp_path / "slots-00.dat").stat().st_size == 0
    tier = NVMeTier(tmp_path, 4096, 8, ops=ops)
    tier.close()
    ops.free = 0
    NVMeTier(tmp_path, 4096, 8, ops=ops).close()
    ops.free = 1 << 40
    ops.fallocate_error = errno.ENOSPC
    with pytest.raises(ConfigError, match="No space"):
        NVMeTier(tmp_path, 4096, 64, ops=ops)
    assert (tmp_path / "slots-00.dat").stat().st_size == 8 * 4096


def test_another_capacity_appends_a_file_or_cuts_the_last(tmp_path: Path) -> None:
    tier = NVMeTier(tmp_path, 4096, 4)
    rows = noise(4, 4096)
    assert tier.write(np.arange(4, dtype=np.int32), rows).all()
    tier.close()
    larger = extents_for(10, (4,))
    tier = NVMeTier(tmp_path, 4096, 10, extents=larger)
    assert tier.extents == larger == (4, 6)
    more = noise(10, 4096, 1)
    more[:4] = rows
    assert tier.write(np.arange(4, 10, dtype=np.int32), more[4:]).all()
    read = np.zeros_like(more)
    assert tier.read(np.arange(10, dtype=np.int32), read).all() and np.array_equal(read, more)
    tier.close()
    tier = NVMeTier(tmp_path, 4096, 2, extents=extents_for(2, larger))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["slots-00.dat"]
    assert (tmp_path / "slots-00.dat").stat().st_size == 2 * 4096
    with pytest.raises(IndexError):
        tier.read(slots(2), noise(1, 4096))
    assert tier.read(slots(0, 1), read[:2]).all() and np.array_equal(read[:2], rows[:2])
    tier.close()


def test_another_block_size_takes_the_files_over(tmp_path: Path) -> None:
    NVMeTier(tmp_path, 4096, 12, extents=(4, 4, 4)).close()
    tier = NVMeTier(tmp_path, 8192, 3)
    assert {file.name: file.stat().st_size for file in tmp_path.iterdir()} == {"slots-00.dat": 3 * 8192}
    tier.close()


@pytest.mark.parametrize("how", ["keep", "read"])
def test_files_as_they_are(tmp_path: Path, how: str) -> None:
    tier = NVMeTier(tmp_path, 4096, 8, extents=(4, 4), files=how)  # type: ignore[arg-type]
    assert not tier.read(np.arange(8, dtype=np.int32), noise(8, 4096)).any()
    tier.close()
    assert list(tmp_path.iterdir()) == []
    NVMeTier(tmp_path, 4096, 3).close()
    tier = NVMeTier(tmp_path, 4096, 8, extents=(4, 4), files=how)  # type: ignore[arg-type]
    assert tier.read(np.arange(8, dtype=np.int32), noise(8, 4096)).tolist() == [True] * 3 + [False] * 5
    assert tier.write(slots(1), noise(1, 4096)).tolist() == [how == "keep"]
    tier.close()
    assert [file.stat().st_size for file in tmp_path.iterdir()] == [3 * 4096]


def test_misuse_raises(tmp_path: Path) -> None:
    for arguments in ((0, 4), (4096, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            NVMeTier(tmp_path, *arguments)
    with pytest.raises(ValueError, match="add up"):
        NVMeTier(tmp_path, 4096, 4, extents=(3,))
    with pytest.raises(ConfigError, match="path"):
        NVMeTier(tmp_path / "missing", 4096, 4)


def test_close_waits_for_running_transfers_before_descriptors_go(tmp_path: Path) -> None:
    """A read that is late must not meet a descriptor number that was given to another file."""
    entered, go = threading.Event(), threading.Event()

    class Slow(Counting):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                entered.set()
                assert go.wait(10)
            return super().preadv(fd, buffers, offset)

    ops = Slow()
    tier = NVMeTier(tmp_path, 4096, 4, ops=ops)
    fd = tier._fds[0]
    ops.closed.clear()
    results = []
    thread = threading.Thread(target=lambda: results.append(tier.read(slots(0, 2), noise(2, 4096))))
    thread.start()
    assert entered.wait(10)
    tier.close()
    assert ops.closed == []
    assert not tier.read(slots(1), noise(1, 4096)).any(), "closed for what comes now"
    go.set()
    thread.join(10)
    assert results[0].all() and ops.closed == [fd]


def test_threads_on_different_slots(tmp_path: Path) -> None:
    tier = NVMeTier(tmp_path, 5000, 64)
    rows = noise(64, 5000)
    failed = []

    def work(part: int) -> None:
        mine = np.arange(part, 64, 4, dtype=np.int32)
        for _ in range(5):
            read = np.zeros((len(mine), 5000), dtype=np.uint8)
            if not (tier.write(mine, rows[mine]).all() and tier.read(mine, read).all()):
                failed.append(part)
            if not np.array_equal(read, rows[mine]):
                failed.append(part)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failed == [] and not tier.errors
    tier.close()


def test_abandon_in_a_forked_child_leaves_the_parent_alone(tmp_path: Path) -> None:
    tier = NVMeTier(tmp_path, 4096, 4)
    assert tier.write(slots(0), noise(1, 4096)).all()
    child = os.fork()
    if child == 0:
        tier.abandon()
        os._exit(int(bool(tier.read(slots(0), noise(1, 4096)).any())))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tier.read(slots(0), noise(1, 4096)).all()
    tier.close()
