"""The work of the soak: prompts, their bytes, and threads that ask, load, store, touch, release and invalidate."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from tiercache import DRAM, KVLayout, NVMe, TieredKVCache
from tiercache.assembly import Seams
from tiercache.errors import NotDurableError
from tiercache.testing import FlakyTier

LAYOUT = KVLayout((4, 4096), "float32")
"""64 KiB a block: 16 pages."""
WORDS = LAYOUT.block_nbytes // 8
BLOCK_TOKENS = 16
DEPTH = 8
"""Blocks of a prompt."""
WAIT_S = 30.0
STEP = np.arange(WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
VERBS = ("lookup", "load", "load out", "store", "touch", "release", "invalidate")


def open_cache(path: Path, dram_blocks: int, nvme_blocks: int, flaky: list[FlakyTier] | None = None) -> TieredKVCache:
    """DRAM over NVMe; with `flaky`, NVMe fails now and then, and the list gets the tier."""

    def wrap(tier: Any) -> Any:
        if not tier.verifies or flaky is None:
            return tier
        flaky.append(FlakyTier(tier, errors=0.003, flips=0.003, delays=0.001, delay_s=0.05, seed=1))
        return flaky[-1]

    tiers = [
        DRAM(dram_blocks * LAYOUT.block_nbytes),
        NVMe(path / "kv", nvme_blocks * LAYOUT.block_nbytes, threads=4, write_after_s=0.5),
    ]
    seams = Seams(wrap_tier=wrap)
    return TieredKVCache(tiers, layout=LAYOUT, namespace="soak", block_tokens=BLOCK_TOKENS, seams=seams)


def parts_of(number: int) -> list[int]:
    """Prompt `number`: some share their first two blocks, half of those two more."""
    return [number % 13, number % 13 + 100, 1000 + number % 97, 2000 + number % 97] + [number * 8 + i for i in range(4)]


def tokens_of(number: int) -> np.ndarray:
    return np.repeat(np.array(parts_of(number), dtype=np.int32), BLOCK_TOKENS)


def seeds_of(number: int) -> np.ndarray:
    """One number per block that stands for it and all before it."""
    seeds, seed = [], 1
    for part in parts_of(number):
        seed = (seed * 6364136223846793005 + part * 2 + 1) % 2**64
        seeds.append(seed)
    return np.array(seeds, dtype=np.uint64)


def payload(seeds: np.ndarray) -> Any:
    """`[n, *block_shape]`: every word of a block depends on its seed and its place."""
    words = seeds[:, None] + STEP[None, :]
    return words.view(np.float32).reshape(len(seeds), *LAYOUT.block_shape)


def wrong_pages(blocks: Any, seeds: np.ndarray) -> int:
    """How many pages of 4 KiB differ from what they must be; compares every byte."""
    got = np.ascontiguousarray(blocks).reshape(len(seeds), -1).view(np.uint64)
    differs = (got != seeds[:, None] + STEP[None, :]).reshape(len(seeds), -1, 512).any(axis=2)
    return int(differs.sum())


class World:
    """Threads at work on one cache until `stop`."""

    def __init__(self, cache: TieredKVCache, prompts: int, seed: int) -> None:
        self.cache = cache
        self.prompts = prompts
        self.wrong = 0
        self.verified = 0
        """Blocks of which every byte was compared."""
        self.not_durable = 0
        self.errors: list[str] = []
        self._seed = seed
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._took: dict[str, list[float]] = defaultdict(list)
        self._threads: list[threading.Thread] = []

    def start(self, threads: int) -> None:
        self._threads = [threading.Thread(target=self._work, args=(i,), name=f"soak-{i}") for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> bool:
        """End the threads; False where one does not."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * WAIT_S)
        return not any(thread.is_alive() for thread in self._threads)

    def drain(self) -> dict[str, list[float]]:
        """Seconds that each call since the last drain took, per verb."""
        with self._lock:
            took, self._took = self._took, defaultdict(list)
        return took

    def _work(self, number: int) -> None:
        chosen = Random(self._seed * 1000 + number)
        try:
            while not self._stop.is_set():
                self._one(chosen)
        except Exception as error:  # noqa: BLE001  outermost frame of a thread: told at the end
            self.errors.append(f"{type(error).__name__}: {error}")

    def _timed(self, verb: str, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = call()
        took = time.monotonic() - began
        with self._lock:
            self._took[verb].append(took)
        return result

    def _one(self, chosen: Random) -> None:
        """One request: mostly of the prompts that are asked for often."""
        often = chosen.random() < 0.6
        number = int(chosen.paretovariate(0.7)) % self.prompts if often else chosen.randrange(self.prompts)
        tokens, dice = tokens_of(number), chosen.random()
        match = self._timed("lookup", lambda: self.cache.lookup(tokens))
        if dice < 0.45 and match.blocks:
            self._load(match, seeds_of(number), into_out=dice < 0.15)
        elif dice < 0.90:
            self._store(tokens, number, match.blocks)
        elif dice < 0.94:
            self._timed("touch", lambda: self.cache.touch(match))
        elif dice < 0.985:
            self._timed("release", lambda: self.cache.release(tokens))
        elif dice < 0.99:
            with contextlib.suppress(NotDurableError):
                self._timed("invalidate", lambda: self.cache.invalidate(tokens, timeout=WAIT_S))
                return
            self.not_durable += 1

    def _load(self, match: Any, seeds: np.ndarray, into_out: bool) -> None:
        out = np.empty((match.blocks, *LAYOUT.block_shape), dtype=np.float32) if into_out else None
        verb = "load out" if into_out else "load"
        with self._timed(verb, lambda: self.cache.load(match, out).result(WAIT_S)) as loaded:
            n = loaded.block_count
            wrong = wrong_pages(loaded.blocks, seeds[:n]) if n else 0
        with self._lock:
            self.wrong += wrong
            self.verified += n

    def _store(self, tokens: np.ndarray, number: int, have: int) -> None:
        if have == DEPTH:
            return
        blocks = payload(seeds_of(number)[have:])

        def store() -> None:
            if not self.cache.store(tokens, blocks, have).wait(WAIT_S):
                raise TimeoutError("a ticket does not end")

        self._timed("store", store)
