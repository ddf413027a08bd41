"""Policies to compare with, simulated per block: what other orders of eviction would find on the same trace.

They are not for the cache itself. A request hits the longest resident prefix of its path. The blocks of its path are
pinned while missing ones are inserted from the root to the leaf; each insertion into a full cache evicts one resident
block that has no resident child and is not pinned, the first such in the policy's own order.

- `lru`: least recently used; a path is touched from its tail to its root, so leaves are older than their parents.
- `arc`: adaptive replacement. Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
- `s3fifo`: Yang, Zhang, Qiu, Yue and Rashmi, "FIFO Queues are All You Need for Cache Eviction", SOSP 2023.
- `lru2`: LRU-K for K = 2. O'Neil, O'Neil and Weikum, "The LRU-K Page Replacement Algorithm For Database Disk
  Buffering", SIGMOD 1993.
- `min`: the offline optimum, with bypass. Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer",
  IBM Systems Journal 5(2), 1966. It looks into the future; no policy finds more blocks. Where blocks differ in tokens
  (partial last blocks) it is the optimum in blocks, not quite in tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tiercache.sim.ghosts import ARC, S3FIFO
from tiercache.sim.keyed import LRU, LRU2, Min
from tiercache.sim.trace import Trace, renumber

__all__ = ["BASELINES", "simulate", "simulate_flat"]

POLICIES: dict[str, type[LRU | LRU2 | Min | ARC | S3FIFO]] = {
    "lru": LRU,
    "arc": ARC,
    "s3fifo": S3FIFO,
    "lru2": LRU2,
    "min": Min,
}

BASELINES: tuple[str, ...] = tuple(POLICIES)
"""The names of the policies, in a fixed order."""

PROGRESS_EVERY = 256


def simulate(trace: Trace, policy: str, capacity: int, progress: Callable[[int, int], None] | None = None) -> int:
    """Prompt tokens that a cache of `capacity` blocks under `policy` finds in the whole trace, its cold start included.

    Divided by `trace.total_prompt_tokens` it is the token hit ratio. Any block, full or partial, takes one place.
    A fraction of a microsecond per block found and up to a few per block inserted; memory in proportion to the trace,
    which is not changed. `progress(done, requests)` is called now and then, and at the end.

    ValueError: `policy` is none of `BASELINES`, or `capacity` is less than 1.
    """
    if policy not in POLICIES:
        raise ValueError(f"no policy {policy!r}: choose from {', '.join(BASELINES)}")
    if capacity < 1:
        raise ValueError(f"capacity {capacity}: at least 1 block is needed (policies: {', '.join(BASELINES)})")
    cache = POLICIES[policy](trace, capacity)
    starts, requests = trace.starts.tolist(), trace.requests
    hits = np.zeros(requests, np.int64)
    for request in range(requests):
        start = starts[request]
        hits[request] = cache.request(trace.ids[start : starts[request + 1]].tolist(), request, start)
        if progress and request % PROGRESS_EVERY == 0:
            progress(request, requests)
    if progress:
        progress(requests, requests)
    tokens_before = np.concatenate([[0], np.cumsum(trace.tokens[trace.ids], dtype=np.int64)])
    begin = trace.starts[:-1]
    return int((tokens_before[begin + hits] - tokens_before[begin]).sum())


def simulate_flat(ids: Sequence[int], policy: str, capacity: int) -> int:
    """How many of a sequence of objects are found by a cache of `capacity` objects, all of one size, without prefixes.

    Each object is a path of one block, so this is the code of `simulate`; it lets the policies be checked against other
    simulators. `ids` may be any whole numbers of 64 bits.

    ValueError: `policy` is none of `BASELINES`, or `capacity` is less than 1.
    """
    _, objects = np.unique(np.asarray(ids, np.int64), return_inverse=True)
    unique = int(objects.max(initial=-1)) + 1
    dense, tokens, parent = renumber(objects.astype(np.int64), np.ones(unique, np.int32), np.full(unique, -1, np.int64))
    trace = Trace("flat", 1, np.zeros(len(dense)), np.arange(len(dense) + 1), dense, tokens, parent)
    return simulate(trace, policy, capacity)
