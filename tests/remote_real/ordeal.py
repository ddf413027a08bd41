"""Ordeal: a cache at work on a remote tier while something happens to that tier, and what the callers saw of it.

A peer has put prompts into the store. Threads ask for them, load them, compare every byte, and store prompts of their
own; the cache's memory is too small to keep them, so that they come from the store again and again. A sampler notes
what the breaker does. What is found out is told by phase: before, during the fault, after it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import numpy as np

from tiercache import DRAM, KVLayout, Remote, TieredKVCache
from tiercache.remote import frame_nbytes
from tiercache.testing import MemoryKeyTier, put_blocks

BLOCK_TOKENS = 16
LAYOUT = KVLayout((8, 64, 64), "float32")  # 128 KiB
BLOCKS = 8
PROMPTS = 24
LOOKUP_S = 0.3
"""How long a lookup may wait for the store's answer."""
PATIENCE_S = 0.05
"""What a call may take longer than its deadlines allow, at the 99th percentile."""
CALLERS = 2
PHASES = ("before", "fault", "after", "between")
_STUCK_S = 30.0
"""A call that takes this long ends the test."""


def tokens_of(number: int, blocks: int = BLOCKS) -> np.ndarray:
    """A prompt: its number, then positions."""
    ids = np.arange(blocks * BLOCK_TOKENS, dtype=np.int32)
    ids[0] = number
    return ids


def payload_of(number: int, blocks: int = BLOCKS) -> np.ndarray:
    """Its blocks `[blocks, *block_shape]`: other ones for every prompt and position."""
    rows = np.empty((blocks, *LAYOUT.block_shape), dtype=np.float32)
    ramp = np.arange(rows[0].size, dtype=np.float32).reshape(LAYOUT.block_shape)
    for i in range(blocks):
        rows[i] = ramp + (number * 131 + i)
    return rows


def put_prompts(tier: Any, numbers: range, *, namespace: str, epoch: str) -> list[bytes]:
    """As a peer would have: the prompts of these numbers. Returns their keys."""
    keys: list[bytes] = []
    for number in numbers:
        keys += put_blocks(
            tier,
            tokens_of(number),
            payload_of(number),
            namespace=namespace,
            epoch=epoch,
            block_tokens=BLOCK_TOKENS,
        )
    return keys


def put_strangers(tier: Any, *, namespace: str, epoch: str) -> None:
    """What others leave in a store that is shared: prompts of other weights and of another model, and under the names
    of prompts 1 to 6 first blocks of another layout, then frames of another version."""
    numbers = range(1, PROMPTS + 1)
    put_prompts(tier, numbers, namespace=namespace, epoch=epoch + "'")
    put_prompts(tier, numbers, namespace=namespace + "'", epoch=epoch)
    names = {"namespace": namespace, "epoch": epoch, "block_tokens": BLOCK_TOKENS}
    for number in range(1, 4):
        put_blocks(tier, tokens_of(number), payload_of(number)[:, ::2].copy(), **names)
    width = frame_nbytes(LAYOUT.block_nbytes)
    for number in range(4, 7):
        frames = MemoryKeyTier(BLOCKS)
        keys = put_blocks(frames, tokens_of(number), payload_of(number), **names)
        rows = np.empty((BLOCKS, width), dtype=np.uint8)
        assert frames.get(keys, rows, 1.0).all()
        rows[:, LAYOUT.block_nbytes] ^= 0x7F  # the first byte of what says which version wrote it
        assert tier.put(keys, rows, 5.0).all()


@dataclass
class Seen:
    """What the callers saw during one phase."""

    calls: Counter[str] = field(default_factory=Counter)
    late_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """By verb: how much longer than its deadlines allow each call took (negative: sooner)."""
    remote_blocks: int = 0
    """Loaded, and of the store by the word of the lookup."""
    missed: int = 0
    """Lookups of prompts that the store should have, which found none of it."""
    wrong: int = 0
    raised: list[str] = field(default_factory=list)


class Elsewhere:
    """Another process that sleeps and looks how long it slept: what the machine is late, and the cache is not."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SLEEPER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def late_s(self) -> float:
        """The 99th percentile of how much too long a sleep was. Ends it."""
        out, _ = self._process.communicate("", timeout=_STUCK_S)
        return float(np.percentile([float(line) for line in out.split()], 99))


_SLEEPER = """
import sys, threading, time
threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
ended, over = threading.Event(), []
while not ended.is_set() and len(over) < 60_000:
    began = time.monotonic()
    time.sleep(0.005)
    over.append(time.monotonic() - began - 0.005)
print(*over)
"""


class Ordeal:
    """One cache, CALLERS threads that use it, one that watches. `phase(name)` says what is going on."""

    def __init__(self, remote: Remote, *, namespace: str = "ordeal", epoch: str = "weights", **options: Any) -> None:
        dram_blocks = CALLERS * BLOCKS * 8
        self.remote = remote
        self.cache = TieredKVCache(
            [DRAM(dram_blocks * LAYOUT.stride), remote],
            layout=LAYOUT,
            namespace=namespace,
            epoch=epoch,
            block_tokens=BLOCK_TOKENS,
            **options,
        )
        self.seen = {name: Seen() for name in PHASES}
        self.story: list[tuple[float, str]] = []
        """Seconds since the start, and the breaker's state from then on."""
        self.machine_late_s: float | None = None
        """After `calm`: see `Elsewhere`."""
        self._phase = "before"
        self._began = time.monotonic()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._own = count(1_000_000)
        self._threads = [threading.Thread(target=self._call, args=(i,), daemon=True) for i in range(CALLERS)]
        self._threads.append(threading.Thread(target=self._watch, daemon=True))

    # -- what a test does -------------------------------------------------------------------------------------------

    def __enter__(self) -> Ordeal:
        self._elsewhere = Elsewhere()
        self._greet()
        for thread in self._threads:
            thread.start()
        return self

    def _greet(self) -> None:
        """One question, so that what follows does not tell of how long it takes to connect."""
        end = time.monotonic() + 5
        while time.monotonic() < end and not self.stats()["blocks_found"]:
            self.cache.lookup(tokens_of(1), deadline_s=0.2)

    def calm(self) -> None:
        """No more calls, but for those under way."""
        self._stop.set()
        for thread in self._threads:
            thread.join(_STUCK_S)
        if self.machine_late_s is None:
            self.machine_late_s = self._elsewhere.late_s()

    def __exit__(self, *_: object) -> None:
        self.calm()
        stuck = [thread for thread in self._threads if thread.is_alive()]
        self.cache.close(timeout=5)
        assert not stuck, f"{len(stuck)} callers never came back"

    @contextmanager
    def phase(self, name: str) -> Iterator[Seen]:
        """Calls that begin within count for this phase."""
        self._phase = name
        try:
            yield self.seen[name]
        finally:
            self._phase = "between"

    def wait_for(self, what: Callable[[], bool], within_s: float) -> float:
        """Seconds until this was so. AssertionError where it was not within that time."""
        began = time.monotonic()
        while not what():
            assert time.monotonic() - began < within_s, f"not within {within_s:g} s: {self.stats()}"
            time.sleep(0.01)
        return time.monotonic() - began

    def flows(self, more_blocks: int = 3 * BLOCKS, within_s: float = 30.0) -> float:
        """Seconds until so many more blocks have come from the store."""
        before = self.came()
        return self.wait_for(lambda: self.came() >= before + more_blocks, within_s)

    def rest(self, seconds: float) -> None:
        """Let the callers go on for so long."""
        self._stop.wait(seconds)

    def came(self) -> int:
        """Blocks that came from the store so far."""
        return sum(seen.remote_blocks for seen in self.seen.values())

    def stats(self) -> dict[str, Any]:
        """Of the remote tier."""
        remote = self.cache.stats().remote
        assert remote is not None
        return remote

    def states(self) -> list[str]:
        """What the breaker was, one after the other."""
        return [state for _, state in self.story]

    # -- the threads ------------------------------------------------------------------------------------------------

    def _call(self, caller: int) -> None:
        random = Random(caller)
        while not self._stop.is_set():
            seen = self.seen[self._phase]
            try:
                self._ask(seen, random.randrange(1, PROMPTS + 1))
                if random.random() < 0.25:
                    self._store(seen, next(self._own))
            except Exception as error:  # noqa: BLE001  whatever comes out of the cache is what a test wants to know
                with self._lock:
                    seen.raised.append(repr(error))
                time.sleep(0.05)
            time.sleep(0.002)

    def _ask(self, seen: Seen, number: int) -> None:
        tokens = tokens_of(number)
        match = self._timed(seen, "lookup", LOOKUP_S, lambda: self.cache.lookup(tokens, deadline_s=LOOKUP_S))
        if match.blocks == 0:
            with self._lock:
                seen.missed += 1
            return
        future = self._timed(seen, "load", 0.0, lambda: self.cache.load(match))
        loaded = self._timed(seen, "result", self.remote.read_deadline_s, lambda: future.result(_STUCK_S))
        with loaded:
            n = loaded.block_count
            right = bool((loaded.blocks == payload_of(number, n)).all()) if n else True
        with self._lock:
            seen.wrong += not right
            seen.remote_blocks += max(0, n - (match.blocks - match.by_tier.get("remote", 0)))

    def _store(self, seen: Seen, number: int) -> None:
        tokens, blocks = tokens_of(number), payload_of(number)
        ticket = self._timed(seen, "store", 0.0, lambda: self.cache.store(tokens, blocks))
        ticket.wait(_STUCK_S)

    def _timed(self, seen: Seen, verb: str, deadline_s: float, call: Callable[[], Any]) -> Any:
        began = time.monotonic()
        result = call()
        late = time.monotonic() - began - deadline_s
        with self._lock:
            seen.calls[verb] += 1
            seen.late_s[verb].append(late)
        return result

    def _watch(self) -> None:
        while not self._stop.is_set():
            state = self.stats()["breaker"] if self.cache.stack is not None else "closed"
            if not self.story or self.story[-1][1] != state:
                self.story.append((time.monotonic() - self._began, state))
            time.sleep(0.005)
