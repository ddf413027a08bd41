"""How full a Mooncake Store is, of the metrics that its master shows over HTTP."""

from __future__ import annotations

import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException

__all__ = ["asked_share"]

_ALLOCATED, _CAPACITY = "master_allocated_bytes", "master_total_capacity_bytes"
_MOST_NBYTES = 1 << 22
_LEAST_WAIT_S = 0.01
_straight = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Whatever proxy the environment names: it is for other places than the store's own network."""


def asked_share(address: str, deadline_s: float) -> float | None:
    """Memory taken, of the store's whose master shows its metrics at `address` (host:port): 0 to 1, None where it has
    none. OSError where nobody answers in time, or what answers is something else."""
    until = time.monotonic() + deadline_s
    text = b""
    try:
        with _straight.open(f"http://{address}/metrics", timeout=max(_LEAST_WAIT_S, deadline_s)) as answer:
            while len(text) < _MOST_NBYTES and (piece := answer.read1(1 << 16)):
                text += piece
                if time.monotonic() >= until:  # one that comes drop by drop
                    raise TimeoutError(f"{address}: no metrics in {deadline_s:g} s")
    except (HTTPException, ValueError) as error:
        raise OSError(f"{address} does not answer as a master shows its metrics: {error!r:.100}") from None
    return _share(text.decode("utf-8", "replace"))


def _share(metrics: str) -> float | None:
    figures: dict[str, float] = {}
    for line in metrics.splitlines():
        name, _, value = line.partition(" ")
        if name in (_ALLOCATED, _CAPACITY):
            with suppress(ValueError):
                figures[name] = float(value)
    capacity = figures.get(_CAPACITY, 0.0)
    if not capacity > 0 or _ALLOCATED not in figures:
        return None
    return min(1.0, max(0.0, figures[_ALLOCATED] / capacity))
