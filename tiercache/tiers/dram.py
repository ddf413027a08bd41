"""DRAM: one anonymous slab, touched in the background."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
import weakref

import numpy as np

from tiercache.errors import CacheClosedError
from tiercache.rows import copy_rows
from tiercache.tiers.base import Rows, contiguous_runs, slot_stride
from tiercache.types import Bools, Slots

__all__ = ["DRAMTier", "check_transfer", "copy_in", "copy_out", "map_rows"]

HUGE_PAGE_NBYTES = 2 << 20
TOUCH_STEP_NBYTES = 32 << 20
_MADV_POPULATE_WRITE = 23

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

_mapped: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_inherited: list[mmap.mmap] = []


def _keep_after_fork() -> None:
    """In a forked child: never run the destructors of the parent's slabs.

    MADV_DONTFORK leaves holes where they were; something else may be mapped there by the time of an munmap.
    """
    _inherited.extend(_mapped)


os.register_at_fork(after_in_child=_keep_after_fork)


def map_rows(n: int, stride: int) -> Rows:
    """Zeroed uint8 `[n, stride]` of private anonymous memory, page aligned, 2 MiB aligned and huge where large.

    The memory is unmapped when the last view of it is gone, never earlier. It is not there in a forked child.

    Raises OSError where the address space or the commit limit does not hold it.
    """
    nbytes = n * stride
    huge = nbytes >= HUGE_PAGE_NBYTES
    memory = mmap.mmap(
        -1, max(nbytes, 1) + (HUGE_PAGE_NBYTES if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    _mapped.add(memory)
    everything = np.frombuffer(memory, dtype=np.uint8)
    begin = -everything.ctypes.data % HUGE_PAGE_NBYTES if huge else 0
    memory.madvise(mmap.MADV_DONTFORK)
    if huge:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel built without huge pages
                raise
    return everything[begin : begin + nbytes].reshape(n, stride)


def check_transfer(slots: Slots, rows: Rows, capacity: int, block_nbytes: int, stride: int) -> None:
    """Refuse misuse of `SlotTier.read` and `write` before a byte moves.

    Raises ValueError for rows of a wrong shape, dtype or axis 1, IndexError for slots outside the tier.
    """
    if rows.ndim != 2 or rows.dtype != np.uint8 or rows.shape[1] not in (block_nbytes, stride):
        raise ValueError(
            f"rows are {rows.dtype} {rows.shape}; uint8 [n, {block_nbytes}] or [n, {stride}] is what this tier moves"
        )
    if len(rows) != len(slots):
        raise ValueError(f"{len(rows)} rows for {len(slots)} slots")
    if rows.size and rows.strides[1] != 1:
        raise ValueError("rows must be contiguous along axis 1")
    if len(slots) and not (int(slots.min()) >= 0 and int(slots.max()) < capacity):
        raise IndexError(f"slots {int(slots.min())}..{int(slots.max())} outside 0..{capacity - 1}")


def copy_out(slab: Rows, slots: Slots, rows: Rows) -> None:
    """Copy slots of a host slab into rows, one copy per contiguous run of slots."""
    width = rows.shape[1]
    for begin, end in contiguous_runs(slots):
        slot = int(slots[begin])
        copy_rows(rows[begin:end], slab[slot : slot + end - begin, :width])


def copy_in(slab: Rows, slots: Slots, rows: Rows) -> None:
    """Copy rows into slots of a host slab, one copy per contiguous run of slots."""
    width = rows.shape[1]
    for begin, end in contiguous_runs(slots):
        slot = int(slots[begin])
        copy_rows(slab[slot : slot + end - begin, :width], rows[begin:end])


def _touch(slab: Rows, stop: threading.Event) -> None:
    """Have the kernel back the slab with pages, a bounded step at a time, without changing what it holds."""
    page = mmap.PAGESIZE
    address = slab.ctypes.data
    nbytes = slab.nbytes // page * page
    for begin in range(0, nbytes, TOUCH_STEP_NBYTES):
        if stop.is_set():
            return
        if _libc.madvise(address + begin, min(TOUCH_STEP_NBYTES, nbytes - begin), _MADV_POPULATE_WRITE) != 0:
            return  # an older kernel, or no memory just now: pages come at first use


class DRAMTier:
    """`capacity` blocks in one private slab of host memory.

    The slab is `MAP_PRIVATE | MAP_ANONYMOUS` with huge pages asked for; a daemon thread touches it in bounded steps
    while the tier is already in use. Reads and writes on different slots may run at the same time.
    """

    verifies = False

    def __init__(self, capacity: int, block_nbytes: int, name: str = "dram") -> None:
        """Map the slab. Raises ValueError for sizes below 1, OSError where the memory cannot be mapped."""
        if capacity < 1 or block_nbytes < 1:
            raise ValueError(f"capacity {capacity} and block_nbytes {block_nbytes} must be at least 1")
        self.name = name
        self.capacity = capacity
        self.block_nbytes = block_nbytes
        self.stride = slot_stride(block_nbytes)
        self._owner_pid = os.getpid()
        slab = map_rows(capacity, self.stride)
        self.slab: Rows | None = slab
        self._stop = threading.Event()
        self._toucher = threading.Thread(
            target=_touch, args=(slab, self._stop), name=f"tiercache-touch-{name}", daemon=True
        )
        with contextlib.suppress(RuntimeError):  # no thread to be had: pages come at first use
            self._toucher.start()

    def __repr__(self) -> str:
        state = "closed" if self.slab is None else "open"
        return f"DRAMTier({self.name!r}, {self.capacity} x {self.block_nbytes} bytes, {state})"

    def _memory(self) -> Rows:
        slab = self.slab
        if slab is None:
            raise CacheClosedError(f"tier {self.name!r} is closed")
        return slab

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`. Raises ValueError, IndexError for misuse, CacheClosedError after close."""
        slab = self._memory()
        check_transfer(slots, rows, self.capacity, self.block_nbytes, self.stride)
        copy_out(slab, slots, rows)
        return np.ones(len(slots), dtype=np.bool_)

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`. Raises ValueError, IndexError for misuse, CacheClosedError after close."""
        slab = self._memory()
        check_transfer(slots, rows, self.capacity, self.block_nbytes, self.stride)
        copy_in(slab, slots, rows)
        return np.ones(len(slots), dtype=np.bool_)

    def slots_view(self, begin: int, end: int) -> Rows:
        """The payload of slots `begin` to `end` as a view `[end - begin, block_nbytes]`, `stride` bytes per row.

        Valid as long as something holds it; what it shows changes when a slot is written again.
        Raises IndexError for slots outside the tier, CacheClosedError after close.
        """
        if not 0 <= begin <= end <= self.capacity:
            raise IndexError(f"slots {begin}..{end} outside 0..{self.capacity}")
        return self._memory()[begin:end, : self.block_nbytes]

    def sync(self) -> bool:
        """True: memory has nothing to make durable."""
        return True

    def close(self) -> None:
        """Stop touching and let go of the slab, which is unmapped once no view of it is left."""
        self._stop.set()
        self.slab = None
        if os.getpid() == self._owner_pid and self._toucher.ident is not None:
            self._toucher.join(timeout=5.0)
