"""Tiers around any tier that fail, delay or hang on demand."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal, TypeAlias

import numpy as np

from tiercache.testing.gate import Gate
from tiercache.tiers.base import Rows, SlotTier
from tiercache.types import Bools, Slots

__all__ = ["DelayingTier", "FaultyTier", "FlakyTier", "HangingTier", "Op", "WrappedTier"]

Op: TypeAlias = Literal["read", "write", "sync"]


class WrappedTier:
    """Passes everything to `inner`, except that its memory is not shown: a mover must use `read` and `write`.

    `verifies` makes a memory tier pass for a disk; None: as `inner`. `shows_memory`: show it all the same, as level 0
    of a cache must; then only writes pass through here.
    """

    def __init__(self, inner: SlotTier, *, verifies: bool | None = None, shows_memory: bool = False) -> None:
        self.inner = inner
        self.name = inner.name
        self.capacity = inner.capacity
        self.block_nbytes = inner.block_nbytes
        self.stride = inner.stride
        self.slab: Rows | None = inner.slab if shows_memory else None
        self.verifies = inner.verifies if verifies is None else verifies

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`."""
        return self.inner.read(slots, rows)

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`."""
        return self.inner.write(slots, rows)

    def sync(self) -> bool:
        """See `SlotTier.sync`."""
        return self.inner.sync()

    def close(self) -> None:
        """See `SlotTier.close`."""
        self.slab = None
        self.inner.close()


class FaultyTier(WrappedTier):
    """Fails as told: the k-th operation, given slots, everything; flips bits in what is read; raises.

    A failed block of a write is not written; a failed block of a read leaves its row as it was. Without any fault
    set it is `inner`. `calls[op]` counts operations so far.
    """

    def __init__(self, inner: SlotTier, *, verifies: bool | None = None, shows_memory: bool = False) -> None:
        super().__init__(inner, verifies=verifies, shows_memory=shows_memory)
        self._lock = threading.Lock()
        self.calls: dict[Op, int] = {"read": 0, "write": 0, "sync": 0}
        self._all: set[Op] = set()
        self._at: set[tuple[Op, int]] = set()
        self._slots: dict[Op, set[int]] = {"read": set(), "write": set(), "sync": set()}
        self._raise_at: dict[tuple[Op, int], Exception] = {}
        self._flips: dict[int, list[tuple[int, int]]] = {}

    def fail_all(self, op: Op) -> None:
        """Every later operation of this kind fails."""
        with self._lock:
            self._all.add(op)

    def fail_at(self, op: Op, nth: int) -> None:
        """The nth operation of this kind from now on (1: the next) fails, with all of its blocks."""
        with self._lock:
            self._at.add((op, self.calls[op] + nth))

    def raise_at(self, op: Op, nth: int, error: Exception) -> None:
        """The nth operation of this kind from now on raises, which no well-behaved tier does."""
        with self._lock:
            self._raise_at[op, self.calls[op] + nth] = error

    def fail_slots(self, op: Op, slots: Sequence[int] | Slots) -> None:
        """These slots fail in every later operation of this kind."""
        with self._lock:
            self._slots[op].update(int(slot) for slot in slots)

    def flip_bit(self, slot: int, byte: int, bit: int = 0) -> None:
        """Every later read of this slot returns this bit inverted; what is stored stays right."""
        with self._lock:
            self._flips.setdefault(slot, []).append((byte, 1 << bit))

    def heal(self) -> None:
        """Forget every fault."""
        with self._lock:
            self._all.clear()
            self._at.clear()
            self._raise_at.clear()
            self._flips.clear()
            for slots in self._slots.values():
                slots.clear()

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`."""
        fails = self._faults("read", slots)
        ok = self._some(self.inner.read, slots, rows, fails)
        with self._lock:
            flips = [(i, self._flips[int(slot)]) for i, slot in enumerate(slots) if int(slot) in self._flips]
        for i, places in flips:
            for byte, mask in places:
                rows[i, byte] ^= mask
        return ok

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`."""
        fails = self._faults("write", slots)
        return self._some(self.inner.write, slots, rows, fails)

    def sync(self) -> bool:
        """See `SlotTier.sync`."""
        if self._faults("sync", np.zeros(1, dtype=np.int32))[0]:
            return False
        return self.inner.sync()

    def _faults(self, op: Op, slots: Slots) -> Bools:
        """Which blocks of this operation fail; counts it."""
        with self._lock:
            self.calls[op] += 1
            error = self._raise_at.pop((op, self.calls[op]), None)
            if error is not None:
                raise error
            if op in self._all or (op, self.calls[op]) in self._at:
                return np.ones(len(slots), dtype=np.bool_)
            return np.isin(slots, list(self._slots[op]))

    @staticmethod
    def _some(move: Callable[[Slots, Rows], Bools], slots: Slots, rows: Rows, fails: Bools) -> Bools:
        if not fails.any():
            return move(slots, rows)
        ok = ~fails
        for i in np.flatnonzero(ok):
            ok[i] = move(slots[i : i + 1], rows[i : i + 1])[0]
        return ok


class DelayingTier(WrappedTier):
    """Sleeps before each read and write: `seconds`, or what `seconds(op, slots)` says."""

    def __init__(
        self,
        inner: SlotTier,
        seconds: float | Callable[[Op, Slots], float],
        *,
        verifies: bool | None = None,
        shows_memory: bool = False,
    ) -> None:
        super().__init__(inner, verifies=verifies, shows_memory=shows_memory)
        self._seconds = seconds

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`."""
        self._sleep("read", slots)
        return self.inner.read(slots, rows)

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`."""
        self._sleep("write", slots)
        return self.inner.write(slots, rows)

    def _sleep(self, op: Op, slots: Slots) -> None:
        time.sleep(self._seconds(op, slots) if callable(self._seconds) else self._seconds)


class FlakyTier(WrappedTier):
    """Fails now and then, by chance: for long runs.

    `errors`: the chance that an operation fails, with one of its blocks (a sync: as a whole). `flips`: that one block
    of a read has one bit inverted. `delays`: that an operation sleeps for `delay_s` first. 0 to 1 each; `seed` makes
    the chances the same each time, the order of the threads does not. `injected` counts what was done.
    """

    def __init__(
        self,
        inner: SlotTier,
        *,
        errors: float = 0.0,
        flips: float = 0.0,
        delays: float = 0.0,
        delay_s: float = 0.05,
        seed: int = 0,
        verifies: bool | None = None,
        shows_memory: bool = False,
    ) -> None:
        super().__init__(inner, verifies=verifies, shows_memory=shows_memory)
        self.errors = errors
        self.flips = flips
        self.delays = delays
        self.delay_s = delay_s
        self.injected: Counter[str] = Counter()
        self._random = Random(seed)
        self._lock = threading.Lock()

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`."""
        failed = self._chance("read", len(slots))
        ok = self.inner.read(slots, rows)
        if failed is not None:
            ok[failed] = False
        with self._lock:
            if len(slots) and self._random.random() < self.flips:
                row, byte = self._random.randrange(len(slots)), self._random.randrange(self.block_nbytes)
                rows[row, byte] ^= 1 << self._random.randrange(8)
                self.injected["flip"] += 1
        return ok

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`. What is said to have failed may have been written."""
        failed = self._chance("write", len(slots))
        ok = self.inner.write(slots, rows)
        if failed is not None:
            ok[failed] = False
        return ok

    def sync(self) -> bool:
        """See `SlotTier.sync`."""
        return self._chance("sync", 1) is None and self.inner.sync()

    def heal(self) -> None:
        """No more faults."""
        with self._lock:
            self.errors = self.flips = self.delays = 0.0

    def _chance(self, op: Op, n: int) -> int | None:
        """Sleep by chance; the block of this operation that fails, None: none does."""
        with self._lock:
            sleeps = self._random.random() < self.delays
            failed = self._random.randrange(n) if n and self._random.random() < self.errors else None
            self.injected["delay"] += sleeps
            self.injected[f"{op} error"] += failed is not None
        if sleeps:
            time.sleep(self.delay_s)
        return failed


class HangingTier(WrappedTier, Gate):
    """Operations block from `hang(op, ...)` until `wake()`, then go on as if nothing had been (see `Gate`).

    Reads hang before they touch `rows`, writes before they read them.
    """

    def __init__(
        self, inner: SlotTier, *, verifies: bool | None = None, shows_memory: bool = False, max_s: float = 30.0
    ) -> None:
        WrappedTier.__init__(self, inner, verifies=verifies, shows_memory=shows_memory)
        Gate.__init__(self, max_s)

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`."""
        self.pass_through("read")
        return self.inner.read(slots, rows)

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`."""
        self.pass_through("write")
        return self.inner.write(slots, rows)

    def sync(self) -> bool:
        """See `SlotTier.sync`."""
        self.pass_through("sync")
        return self.inner.sync()
