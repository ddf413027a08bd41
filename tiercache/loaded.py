"""Loaded: the blocks of a finished load, held until they are released; and the future that brings it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import numpy as np

from tiercache.errors import WorkerThreadError
from tiercache.layout import KVLayout
from tiercache.mover.threads import is_worker_thread
from tiercache.tiers.base import Rows, contiguous_runs
from tiercache.types import Slots

__all__ = ["LoadFuture", "Loaded", "Memory", "release_result"]


class Memory:
    """Level 0 as its blocks look to a caller: zero-copy views of stretches of slots."""

    def __init__(self, layout: KVLayout, tier: Any) -> None:
        self.layout = layout
        self._slab: Rows | None = None
        self._tensor: Any = None
        """Where the slots are no host memory. Either stays mapped as long as this object lives, the tier or not."""
        if tier.slab is not None:
            self._slab = tier.slab.view()
            self._slab.flags.writeable = False
        else:
            self._tensor = tier.slots_view(0, tier.capacity)

    def view(self, begin: int, end: int) -> Any:
        """Slots `[begin, end)` as `[n, *block_shape]`, the slot stride on axis 0. Never to be written."""
        if self._slab is not None:
            return self.layout.view(self._slab[begin:end])
        torch = sys.modules["torch"]
        rows = self._tensor[begin:end]
        return rows.view(getattr(torch, self.layout.dtype)).view(end - begin, *self.layout.block_shape)


class Loaded:
    """The leading blocks of a prompt, verified where they came from a disk, pinned until released.

    Use it as a context manager or call `release()`; garbage collection releases it too, with a ResourceWarning.
    The contents of `blocks` and `parts` are undefined after release.
    """

    def __init__(
        self,
        tokens: int,
        blocks: int,
        *,
        memory: Memory | None = None,
        slots: Slots | None = None,
        out: Any = None,
        release: Callable[[], None] | None = None,
        abandon: Callable[[], None] | None = None,
    ) -> None:
        self.tokens = tokens
        """Tokens that the loaded blocks cover."""
        self.block_count = blocks
        self._memory = memory
        self._slots = slots if slots is not None else np.empty(0, dtype=np.int32)
        self._out = out
        self._release = release
        self._abandon = abandon
        self._blocks: Any = None

    def __repr__(self) -> str:
        state = "released" if self._release is None and self._out is None else "held"
        return f"Loaded({self.block_count} blocks, {self.tokens} tokens, {state})"

    @property
    def parts(self) -> list[Any]:
        """Zero-copy views `[m, *block_shape]` per stretch of neighbouring slots, in prompt order. Read only."""
        if self._out is not None:
            return [self._out[: self.block_count]] if self.block_count else []
        if self._memory is None:
            return []
        memory = self._memory
        return [memory.view(int(self._slots[a]), int(self._slots[b - 1]) + 1) for a, b in contiguous_runs(self._slots)]

    @property
    def blocks(self) -> Any:
        """All blocks, `[n, *block_shape]`: a view where their slots lie side by side, else a copy, made at first
        access in the caller's thread. For a load into `out`, its first n rows. None where nothing was loaded and
        no layout is known."""
        if self._blocks is None:
            parts = self.parts
            if len(parts) == 1:
                self._blocks = parts[0]
            elif parts:
                torch = sys.modules.get("torch")
                is_tensor = torch is not None and isinstance(parts[0], torch.Tensor)
                self._blocks = torch.cat(parts) if is_tensor and torch is not None else np.concatenate(parts)
            elif self._out is not None:
                self._blocks = self._out[:0]
            elif self._memory is not None:
                self._blocks = self._memory.view(0, 0)
        return self._blocks

    def release(self) -> None:
        """Give the blocks back to the cache. A second call does nothing."""
        release, self._release = self._release, None
        self._abandon = None
        self._blocks = None
        if release is not None:
            release()

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()

    def __del__(self) -> None:
        abandon = getattr(self, "_abandon", None)
        if abandon is not None:
            abandon()
            warnings.warn(f"{self!r} was never released", ResourceWarning, stacklevel=2)


class LoadFuture(Future[Loaded]):
    """A load under way. Cancelling it releases what arrives; the copies already under way still end."""

    def result(self, timeout: float | None = None) -> Loaded:
        """The Loaded, after at most `timeout` seconds (TimeoutError). Each job below has a deadline of its own.

        WorkerThreadError on one of the cache's own threads, unless it is done; CancelledError where cancelled.
        """
        self._refuse_worker("result")
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """None, after at most `timeout` seconds: trouble makes a load shorter. Raises as `result`."""
        self._refuse_worker("exception")
        return super().exception(timeout)

    def _refuse_worker(self, what: str) -> None:
        if not self.done() and is_worker_thread():
            raise WorkerThreadError(f"{what}() would wait for the thread that called it: use add_done_callback")


def release_result(future: Future[Loaded]) -> None:
    """A done-callback that releases the Loaded at once."""
    if not future.cancelled():
        future.result().release()
