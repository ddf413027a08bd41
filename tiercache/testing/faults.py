"""The k-th operation fails: one plan that counts operations by kind, and file operations that ask it.

```python
plan = FaultPlan("fdatasync", 2, OSError(errno.EIO, "planned"))
cache = TieredKVCache(tiers, seams=Seams(file_ops=FaultyFiles(plan)))
```

Run a scenario with nth = 1, 2, ... until `plan.fired` stays False: then every operation of that kind has failed once.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

from tiercache.tiers.fileio import OsFiles

__all__ = ["Effect", "FaultPlan", "FaultyFiles"]

Effect: TypeAlias = Literal["raise", "short", "wrong"]
"""What becomes of the operation: it raises; it ends one byte past where it goes wrong; one byte there is another."""


class FaultPlan:
    """Counts operations by kind; the `nth` one of `kind` fails. Safe from several threads.

    `nth` counts from 1; 0: none fails, so that a run only counts. `times`: how many in a row fail from that one on.
    `error` is what is raised then (a new instance is not made: give each plan its own).
    """

    def __init__(
        self,
        kind: str = "",
        nth: int = 0,
        error: BaseException | None = None,
        *,
        effect: Effect = "raise",
        times: int = 1,
    ) -> None:
        self.kind = kind
        self.nth = nth
        self.effect: Effect = effect
        self.counts: Counter[str] = Counter()
        """Operations so far, by kind."""
        self.fired = 0
        """How many have failed."""
        self.where = ""
        """The operation that failed first, as its caller named it."""
        self._error = error if error is not None else OSError(5, "planned")
        self._times = times
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"FaultPlan({self.kind!r}, {self.nth}, {self._error!r}, {self.effect}, fired {self.fired} {self.where})"

    def due(self, kind: str, where: str = "") -> bool:
        """Count one operation of this kind. True where it is to fail."""
        with self._lock:
            self.counts[kind] += 1
            if kind != self.kind or not self.nth <= self.counts[kind] < self.nth + self._times or not self.nth:
                return False
            self.fired += 1
            self.where = self.where or where or kind
            return True

    def meet(self, kind: str, where: str = "") -> None:
        """Count one operation of this kind; raises the error where it is to fail."""
        if self.due(kind, where):
            raise self._error

    def fail(self) -> None:
        """Raise the error, after `due` said so."""
        raise self._error


class FaultyFiles(OsFiles):
    """`FileOps` of the operating system, as far as the plan lets them pass. Kinds: the names of the methods.

    `preadv` and `pwritev` may also end short or move other bytes than asked for (`plan.effect`). `hit` makes them fail
    wherever they touch given bytes, as a bad place on a disk does, until `heal`. `close` never fails: a descriptor that
    could not be closed would be a leak of the test's making.
    """

    def __init__(self, plan: FaultPlan | None = None) -> None:
        self.plan = plan if plan is not None else FaultPlan()
        self._places: list[tuple[str, int, int, Effect]] = []

    def hit(self, kind: Literal["preadv", "pwritev"], begin: int, end: int, effect: Effect = "raise") -> None:
        """From now on every read, or every write, that touches bytes `[begin, end)` of a file fails so."""
        self._places.append((kind, begin, end, effect))

    def heal(self) -> None:
        """Forget every `hit`; what was written wrong stays so."""
        self._places.clear()

    def open(self, path: str, flags: int, mode: int) -> int:
        """See FileOps."""
        self.plan.meet("open", path)
        return super().open(path, flags, mode)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        at, effect = self._fault("preadv", buffers, offset)
        if effect == "raise":
            self.plan.fail()
        moved = super().preadv(fd, buffers, offset)
        if effect == "wrong":
            _flip(buffers, at - offset)
        return moved if effect != "short" else min(moved, (at - offset) + 1)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        at, effect = self._fault("pwritev", buffers, offset)
        if effect == "raise":
            self.plan.fail()
        moved = super().pwritev(fd, buffers, offset)
        if effect == "wrong":
            with open(f"/proc/self/fd/{fd}", "r+b", buffering=0) as file:  # noqa: PTH123 - without O_DIRECT
                first = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes([first[0] ^ 1]), at)
        return moved if effect != "short" else min(moved, (at - offset) + 1)

    def _fault(self, kind: str, buffers: Sequence[memoryview], offset: int) -> tuple[int, Effect | None]:
        """Where in the file a transfer goes wrong, and how; None: nowhere."""
        nbytes = sum(buffer.nbytes for buffer in buffers)
        if self.plan.due(kind, f"{nbytes} bytes at {offset}"):
            return offset, self.plan.effect
        for each, begin, end, effect in self._places:
            if each == kind and begin < offset + nbytes and offset < end:
                return max(begin, offset), effect
        return offset, None

    def fdatasync(self, fd: int) -> None:
        """See FileOps."""
        self.plan.meet("fdatasync")
        super().fdatasync(fd)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """See FileOps."""
        self.plan.meet("fallocate", f"{nbytes} bytes")
        super().fallocate(fd, nbytes)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """See FileOps."""
        self.plan.meet("ftruncate", f"{nbytes} bytes")
        super().ftruncate(fd, nbytes)

    def size(self, fd: int) -> tuple[int, int]:
        """See FileOps."""
        self.plan.meet("size")
        return super().size(fd)

    def free_nbytes(self, path: str) -> int:
        """See FileOps."""
        self.plan.meet("free_nbytes", path)
        return super().free_nbytes(path)

    def unlink(self, path: str) -> None:
        """See FileOps."""
        self.plan.meet("unlink", path)
        super().unlink(path)

    def sync_directory(self, path: str) -> None:
        """See FileOps."""
        self.plan.meet("sync_directory", path)
        super().sync_directory(path)


def _flip(buffers: Sequence[memoryview], at: int) -> None:
    """Invert one bit of byte `at` of these buffers, one after the other."""
    for buffer in buffers:
        if at < buffer.nbytes:
            buffer.cast("B")[at] ^= 1
            return
        at -= buffer.nbytes
