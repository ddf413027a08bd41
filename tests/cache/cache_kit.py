"""What the tests of the cache share: tiny caches, payloads derived from prompts, waiting, counting."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tiercache import DRAM, HBM, KVLayout, NVMe, TieredKVCache
from tiercache.testing.model import CacheModel, payload_of
from tiercache.types import CopyJob

BLOCK_TOKENS = 4
LAYOUT = KVLayout((2, 32), "float32")
"""256 bytes a block; every slot takes 4 KiB."""
SLOT = 4096
WAIT_S = 10.0


def dram(slots: int) -> DRAM:
    return DRAM(slots * SLOT)


def nvme(path: Path, slots: int, **more: Any) -> NVMe:
    return NVMe(path / "kv", slots * SLOT, **{"write_after_s": None, "threads": 4, **more})


def open_cache(
    path: Path | None, dram_slots: int = 32, nvme_slots: int = 64, hbm_slots: int = 0, **more: Any
) -> TieredKVCache:
    """A cache over HBM (on the CPU, where it has slots), DRAM and, with a path, NVMe; `nvme={...}`: fields of that."""
    tier_fields = more.pop("nvme", {})
    tiers: list[Any] = [HBM(hbm_slots * SLOT, "cpu")] if hbm_slots else []
    tiers.append(dram(dram_slots))
    if path is not None:
        tiers.append(nvme(path, nvme_slots, **tier_fields))
    settings = {"layout": LAYOUT, "namespace": "test", "block_tokens": BLOCK_TOKENS, **more}
    return TieredKVCache(tiers, **settings)


def prompt(*parts: int, tail: int = 0) -> np.ndarray:
    """One block per part, all its tokens that number; then `tail` tokens of 9."""
    return np.array([part for part in parts for _ in range(BLOCK_TOKENS)] + [9] * tail, dtype=np.int32)


def blocks_of(tokens: Any, start: int = 0, extra: str = "", version: int = 0, layout: KVLayout = LAYOUT) -> Any:
    return payload_of(tokens, layout, BLOCK_TOKENS, start, extra, version)


def store(cache: TieredKVCache, tokens: Any, start: int = 0, version: int = 0) -> Any:
    """Store a prompt's derived blocks; the ticket, once they are copied."""
    ticket = cache.store(tokens, blocks_of(tokens, start, version=version), start)
    assert ticket.wait(WAIT_S)
    return ticket


def bits(blocks: Any) -> bytes:
    """All bytes of blocks, whatever holds them."""
    if len(blocks) == 0:
        return b""
    rows = KVLayout.of(blocks).rows(blocks)
    return b"".join(row.tobytes() for row in rows.take(0, rows.n))


def read(cache: TieredKVCache, tokens: Any, version: int = 0) -> int:
    """Load what is held of a prompt, compare every byte with what it must be; the number of blocks."""
    match = cache.lookup(tokens)
    with cache.load(match).result(WAIT_S) as loaded:
        assert loaded.block_count <= match.blocks
        assert bits(loaded.blocks) == bits(blocks_of(tokens, version=version)[: loaded.block_count])
        return loaded.block_count


def is_clean(cache: TieredKVCache) -> bool:
    """`check()` finds nothing, and once the copies under way have ended, nothing is pinned or lost."""
    assert cache.check() == []
    quiet = eventually(lambda: not any(tier.pinned or tier.lost or tier.jobs for tier in cache.stats().tiers))
    assert quiet, cache.stats().tiers
    assert cache.check() == []
    assert all(tier.free + tier.held == tier.capacity for tier in cache.stats().tiers)
    link = cache._link
    assert eventually(lambda: not (link._loads or link._tickets)), "somebody is still waited for"
    assert eventually(lambda: not cache.stack.mover._endpoints), "a caller's rows are kept"
    return True


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.002)
    return True


def model() -> CacheModel:
    return CacheModel(BLOCK_TOKENS)


class HeldDelivery:
    """Keeps the mover's messages back while `holding`; the test lets them take effect, on its own thread."""

    def __init__(self, holding: bool = True) -> None:
        self.holding = holding
        self.sent: list[Any] = []
        """All that went to the mover."""
        self._changed = threading.Condition()
        self._waiting: list[Any] = []
        self._apply: Callable[[Any], None] | None = None

    def bind(self, apply: Callable[[Any], None]) -> None:
        self._apply = apply

    def submitted(self, messages: Any) -> None:
        self.sent.extend(messages)

    def arrived(self, message: Any) -> None:
        with self._changed:
            if self.holding:
                self._waiting.append(message)
                self._changed.notify_all()
                return
        self._apply(message)

    def wait(self, n: int = 1) -> list[Any]:
        """The messages held back, once there are n."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._waiting) >= n, WAIT_S), self._waiting
            return list(self._waiting)

    def deliver(self, n: int = 1, change: Callable[[Any], Any] = lambda message: message) -> None:
        """Let the n oldest take effect, as `change` returns them."""
        self.wait(n)
        for _ in range(n):
            with self._changed:
                message = self._waiting.pop(0)
            self._apply(change(message))

    def let_go(self) -> None:
        """Deliver what is held, and hold nothing more."""
        with self._changed:
            self.holding = False
            held, self._waiting = self._waiting, []
        for message in held:
            self._apply(message)

    def jobs(self, kind: str) -> list[CopyJob]:
        """Copy jobs sent so far, of one kind."""
        return [each for each in self.sent if isinstance(each, CopyJob) and each.kind == kind]


def failed(message: Any) -> Any:
    """The same JobResult, with no block arrived, since none could be read."""
    return replace(message, ok=np.zeros_like(message.ok), nbytes=0, reason="io", bad=None)


def crash_image(path: Path, to: Path) -> Path:
    """What a kill at this moment would leave of the directory `path / "kv"`, at `to / "kv"`; returns `to`."""
    shutil.copytree(path / "kv", to / "kv")
    return to


class Clock:
    """A cache's clock; the test can move it on."""

    def __init__(self, standing: bool = False) -> None:
        self.ahead = 0.0
        self.standing = standing

    def __call__(self) -> float:
        return self.ahead + (0.0 if self.standing else time.monotonic())
