"""Every public call, timed against its own deadline, on a cache that may have a tier which hangs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from cache_kit import LAYOUT, bits, blocks_of, prompt

from tiercache import TieredKVCache
from tiercache.errors import NotDurableError
from tiercache.loaded import Loaded, LoadFuture, release_result

HOT = [prompt(1, 2), prompt(1, 3)]
COLD = [prompt(100 + i, 200 + i) for i in range(12)]
SHORT_S = 0.1
"""What calls that may wait are given."""
CHEAP = 8
"""How often a round makes each call that may not wait at all."""


class Meter:
    """By how much each call outlasted its deadline (0: not at all), in seconds, per verb."""

    def __init__(self) -> None:
        self.excess: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def timed(self, verb: str, deadline_s: float = 0.0) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.excess[verb].append(max(0.0, time.monotonic() - began - deadline_s))

    def worst(self) -> tuple[float, str]:
        return max((max(each), verb) for verb, each in self.excess.items())

    def p99(self) -> tuple[float, str]:
        """The largest 99th percentile: of all calls together, and of each verb called often enough to have one."""
        every = [excess for each in self.excess.values() for excess in each]
        often = {verb: each for verb, each in self.excess.items() if len(each) >= 100}
        return max((float(np.percentile(each, 99)), verb) for verb, each in {**often, "all": every}.items())

    @property
    def calls(self) -> int:
        return sum(len(each) for each in self.excess.values())


def every_call(cache: TieredKVCache, meter: Meter, round_: int, load_s: float) -> None:
    """One round of every verb but `close`. `load_s`: the deadline of a load's jobs; SHORT_S: they have none, and the
    caller waits no longer than that."""
    hot, cold = HOT[round_ % len(HOT)], COLD[round_ % len(COLD)]  # an even one is in DRAM too, where that is below HBM
    for _ in range(CHEAP):
        for tokens in (hot, cold):
            with meter.timed("lookup"):
                match = cache.lookup(tokens)
        with meter.timed("touch"):
            cache.touch(match)
        with meter.timed("pin"):
            pin = cache.pin(match)
        with meter.timed("unpin"):
            cache.unpin(pin)
        with meter.timed("explain"):
            cache.explain(cold)
        with meter.timed("stats"):
            cache.stats()
        with meter.timed("check"):
            assert cache.check() == []
    with meter.timed("alookup"):
        asyncio.run(cache.alookup(hot))
    with meter.timed("lookup(deadline_s)", SHORT_S):
        cache.lookup(cold, deadline_s=SHORT_S)
    other = COLD[(round_ + 5) % len(COLD)]
    _loads(cache, meter, (hot, cold, other), load_s)
    fresh = prompt(1000 + round_, 2000 + round_)
    with meter.timed("store"):
        ticket = cache.store(fresh, blocks_of(fresh))
    with meter.timed("Ticket.wait", SHORT_S):
        ticket.wait(SHORT_S)
    for to in (None, "nvme"):
        with meter.timed(f"flush({to})", SHORT_S):
            cache.flush(SHORT_S, to=to)
    with meter.timed("release"):
        cache.release(fresh)
    with meter.timed("invalidate", SHORT_S), contextlib.suppress(NotDurableError):
        cache.invalidate(fresh, timeout=SHORT_S)


def _result(future: LoadFuture, patience_s: float) -> Loaded | None:
    """What a load brought; None where it did not end in that time, then it is released when it does."""
    try:
        return future.result(patience_s)
    except concurrent.futures.TimeoutError:
        future.add_done_callback(release_result)
        return None


def _loads(cache: TieredKVCache, meter: Meter, prompts: Sequence[Any], load_s: float) -> None:
    """Each of the prompts; the last one into the caller's rows."""
    out = np.empty((2, *LAYOUT.block_shape), dtype=np.float32)
    for tokens, into in zip(prompts, (None, None, out), strict=True):
        with meter.timed("load"):
            future = cache.load(cache.lookup(tokens), into)
        with meter.timed("result", load_s):
            loaded = _result(future, load_s + 30.0 if load_s > SHORT_S else load_s)
        if loaded is not None:
            assert bits(loaded.blocks) == bits(blocks_of(tokens)[: loaded.block_count])
            loaded.release()
    with meter.timed("prefetch"):
        cache.prefetch(cache.lookup(prompts[1]))
