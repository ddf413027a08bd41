"""A replay over time: what each tier gave and what was written to NVMe, in bins of the trace's own time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tiercache.sim.page.cells import Watched
from tiercache.sim.trace import Trace

__all__ = ["Timeline", "over_time"]

_WIDTHS_S = (
    0.001,
    0.01,
    0.1,
    1,
    2,
    5,
    10,
    15,
    30,
    60,
    120,
    300,
    600,
    900,
    1800,
    3600,
    7200,
    10800,
    21600,
    43200,
    86400,
)
_MOST_BINS = 48


@dataclass(frozen=True, slots=True)
class Timeline:
    """n bins of one width, the first at the first request."""

    width: float
    """Seconds; requests where the trace has no times."""
    timed: bool
    requests: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    hit_tokens: tuple[tuple[int, ...], ...]
    """[tier][bin]: of requests that arrived in the bin."""
    nvme_writes: tuple[int, ...]
    """Blocks."""

    @property
    def bins(self) -> int:
        """How many."""
        return len(self.requests)


def over_time(trace: Trace, own: Watched) -> Timeline:
    """Put every request where it arrived."""
    span = float(trace.times_s[-1] - trace.times_s[0])
    timed = span > 0
    if timed:
        last = _WIDTHS_S[-1]
        width = next((each for each in _WIDTHS_S if span / each < _MOST_BINS), last * np.ceil(span / last / _MOST_BINS))
        at = ((trace.times_s - trace.times_s[0]) // width).astype(np.int64)
    else:
        width = float(-(-trace.requests // _MOST_BINS))
        at = np.arange(trace.requests) // int(width)
    before = np.concatenate([[0], np.cumsum(trace.tokens[trace.ids], dtype=np.int64)])
    columns = np.column_stack(
        [np.ones(trace.requests, np.int64), np.diff(before[trace.starts]), own.nvme_writes, own.hits]
    )
    sums = np.zeros((int(at[-1]) + 1, columns.shape[1]), np.int64)
    np.add.at(sums, at, columns)
    requests, prompt_tokens, writes, *hits = (tuple(column) for column in sums.T.tolist())
    return Timeline(float(width), timed, requests, prompt_tokens, tuple(hits), writes)
