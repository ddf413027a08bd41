"""What the shared suite does not ask of DRAM: the mapping itself, touching, close under a reader, fork."""

import gc
import mmap
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import tiercache.tiers.dram as dram_module
from tiercache.errors import CacheClosedError
from tiercache.tiers.dram import HUGE_PAGE_NBYTES, DRAMTier, map_rows


def mapping(address):
    """Fields of /proc/self/smaps of the mapping that holds an address; None where there is none."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            found = {} if begin <= address < end else None
        elif found is not None:
            name, _, value = line.partition(":")
            found[name] = value.strip()
            if name == "VmFlags":
                return found
    return None


def resident_nbytes(rows):
    fields = mapping(rows.ctypes.data)
    return int(fields["Rss"].split()[0]) * 1024


def slots(*numbers):
    return np.array(numbers, dtype=np.int32)


def test_the_slab_is_private_huge_and_not_inherited():
    tier = DRAMTier(16, 1 << 20)
    try:
        assert tier.slab.shape == (16, 1 << 20)
        assert tier.slab.ctypes.data % HUGE_PAGE_NBYTES == 0
        flags = mapping(tier.slab.ctypes.data)["VmFlags"].split()
        assert "dc" in flags, "MADV_DONTFORK"
        assert "sh" not in flags, "MAP_PRIVATE"
        if Path("/sys/kernel/mm/transparent_hugepage").exists():
            assert "hg" in flags, "MADV_HUGEPAGE"
    finally:
        tier.close()


def test_it_is_touched_in_the_background():
    tier = DRAMTier(16, 1 << 20)
    try:
        tier._toucher.join(10)
        if dram_module._libc.madvise(tier.slab.ctypes.data, mmap.PAGESIZE, dram_module._MADV_POPULATE_WRITE) != 0:
            pytest.skip("this kernel has no MADV_POPULATE_WRITE")
        assert resident_nbytes(tier.slab) >= 16 << 20
    finally:
        tier.close()


def test_touching_does_not_change_what_was_written(monkeypatch):
    """Written before, during and after."""
    monkeypatch.setattr(dram_module, "TOUCH_STEP_NBYTES", 64 << 10)
    for _ in range(5):
        tier = DRAMTier(64, 100_000)
        rows = np.random.default_rng(0).integers(1, 256, (64, 100_000), dtype=np.uint8)
        for slot in range(64):
            assert tier.write(slots(slot), rows[slot : slot + 1]).all()
        tier._toucher.join(10)
        assert (tier.slab[:, :100_000] == rows).all()
        tier.close()


def test_close_stops_touching(monkeypatch):
    steps = []
    go_on = threading.Event()

    class SlowKernel:
        @staticmethod
        def madvise(address, nbytes, advice):
            steps.append((address, nbytes, advice))
            go_on.wait(5)
            return 0

    monkeypatch.setattr(dram_module, "TOUCH_STEP_NBYTES", 64 << 10)
    monkeypatch.setattr(dram_module, "_libc", SlowKernel)
    tier = DRAMTier(64, 100_000)
    slab = tier.slab
    threading.Timer(0.05, go_on.set).start()
    tier.close()
    assert not tier._toucher.is_alive()
    assert 1 <= len(steps) <= 2
    for address, nbytes, _ in steps:
        assert 0 < nbytes <= 64 << 10
        assert slab.ctypes.data <= address
        assert address + nbytes <= slab.ctypes.data + slab.nbytes


def test_touching_covers_the_whole_slab_in_steps(monkeypatch):
    steps = []

    class Kernel:
        @staticmethod
        def madvise(address, nbytes, advice):
            steps.append((address, nbytes))
            return 0

    monkeypatch.setattr(dram_module, "TOUCH_STEP_NBYTES", 64 << 10)
    monkeypatch.setattr(dram_module, "_libc", Kernel)
    tier = DRAMTier(10, 4096 * 5)
    tier._toucher.join(10)
    begin = tier.slab.ctypes.data
    tier.close()
    assert steps[0][0] == begin
    assert [a + n for a, n in steps[:-1]] == [a for a, _ in steps[1:]]
    assert steps[-1][0] + steps[-1][1] == begin + 10 * 4096 * 5


def test_memory_stays_as_long_as_someone_reads_it():
    tier = DRAMTier(8, 1 << 20)
    rows = np.full((8, 1 << 20), 7, dtype=np.uint8)
    assert tier.write(slots(*range(8)), rows).all()
    view = tier.slots_view(2, 4)
    address = view.ctypes.data
    tier.close()
    assert tier.slab is None
    gc.collect()
    assert (view == 7).all()
    assert mapping(address) is not None
    del view
    gc.collect()
    fields = mapping(address)
    assert fields is None or "hg" not in fields["VmFlags"].split(), "the slab is still mapped"


def test_use_after_close_raises():
    tier = DRAMTier(2, 100)
    tier.close()
    rows = np.zeros((1, 100), dtype=np.uint8)
    for call in (
        lambda: tier.read(slots(0), rows),
        lambda: tier.write(slots(0), rows),
        lambda: tier.slots_view(0, 1),
    ):
        with pytest.raises(CacheClosedError):
            call()


def test_slots_view():
    tier = DRAMTier(4, 5000)
    rows = np.random.default_rng(0).integers(0, 256, (4, 5000), dtype=np.uint8)
    tier.write(slots(0, 1, 2, 3), rows)
    view = tier.slots_view(1, 3)
    assert view.shape == (2, 5000)
    assert view.strides == (8192, 1)
    assert np.shares_memory(view, tier.slab)
    assert (view == rows[1:3]).all()
    assert tier.slots_view(4, 4).shape == (0, 5000)
    for begin, end in [(-1, 1), (2, 5), (3, 2)]:
        with pytest.raises(IndexError):
            tier.slots_view(begin, end)
    tier.close()


@pytest.mark.parametrize("sizes", [(0, 100), (1, 0), (-1, 100)])
def test_sizes_below_one(sizes):
    with pytest.raises(ValueError):
        DRAMTier(*sizes)


def test_repr_says_the_state():
    tier = DRAMTier(2, 100)
    assert repr(tier) == "DRAMTier('dram', 2 x 100 bytes, open)"
    tier.close()
    assert repr(tier) == "DRAMTier('dram', 2 x 100 bytes, closed)"


@pytest.mark.parametrize(("n", "stride"), [(1, 4096), (3, 8192), (1, 4 << 20)])
def test_map_rows(n, stride):
    rows = map_rows(n, stride)
    assert rows.shape == (n, stride)
    assert rows.ctypes.data % mmap.PAGESIZE == 0
    assert not rows.any()
    rows[:] = 1
    assert rows.all()


def test_a_forked_child_never_unmaps_what_is_not_there():
    """MADV_DONTFORK leaves a hole; the child maps something there, and drops the tier."""
    tier = DRAMTier(8, 1 << 20)
    tier._toucher.join(10)
    address, nbytes = tier.slab.ctypes.data, tier.slab.nbytes
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _in_the_child(tier, address, nbytes)
        finally:
            os._exit(code)
    end = time.monotonic() + 20
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done or time.monotonic() > end:
            break
        time.sleep(0.01)
    if not done:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    tier.slab[:] = 1
    tier.close()
    assert done, "the child hangs"
    assert os.waitstatus_to_exitcode(status) == 0


def _in_the_child(tier, address, nbytes):
    if mapping(address) is not None:
        return 2
    libc = dram_module.ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = dram_module.ctypes.c_void_p
    libc.mmap.argtypes = [dram_module.ctypes.c_void_p, dram_module.ctypes.c_size_t] + [dram_module.ctypes.c_long] * 4
    map_fixed_noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_fixed_noreplace
    got = libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if got != address:
        return 3
    other = (dram_module.ctypes.c_char * nbytes).from_address(address)
    other[nbytes - 1] = b"x"
    tier.close()
    del tier
    gc.collect()
    if mapping(address) is None:
        return 4
    return 0 if other[nbytes - 1] == b"x" else 5
