"""The steps of a replay: which request is looked up, delivered and ended when."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiercache.sim.drivers import Driver, DriverSettings, Served, TierCounts
from tiercache.sim.options import ReplayOptions, slots_of
from tiercache.sim.readers import read_trace
from tiercache.sim.trace import Trace, TraceError, full_blocks

__all__ = ["Life", "arrivals_s", "driver_settings", "load_trace", "replay_requests"]

_APART_S = 1e-6


def load_trace(options: ReplayOptions) -> Trace:
    """The requests that these options ask for. TraceError where there are none, or the file is bad."""
    trace = read_trace(options.trace_path, block_tokens=options.block_tokens, skip_bad=options.skip_bad)
    if options.requests is not None:
        trace = trace.slice(options.requests)
    if options.full_blocks:
        trace = full_blocks(trace)
    if trace.unique_blocks == 0:
        raise TraceError(options.trace_path, None, "no request has a block: nothing to replay")
    return trace


def driver_settings(options: ReplayOptions, trace: Trace) -> DriverSettings:
    """Sizes in blocks. ConfigError where a tier has no room for one."""
    unique, nbytes = trace.unique_blocks, options.block_nbytes
    return DriverSettings(
        dram_slots=slots_of(options.dram, unique, nbytes, "dram"),
        nvme_slots=None if options.nvme is None else slots_of(options.nvme, unique, nbytes, "nvme"),
        block_nbytes=nbytes,
        policy=options.policy,
        hints=options.hints,
        write_after_s=options.write_after_s,
        max_writes_per_hit=options.max_writes_per_hit,
        exclusive=options.exclusive,
    )


def arrivals_s(trace: Trace) -> NDArray[np.float64]:
    """When each request arrives: the trace's timestamps, those of one timestamp a microsecond apart.

    Traces have many requests at one timestamp, in an order: without it, recency could not tell them apart.
    """
    times = trace.times_s
    fresh = np.concatenate([[True], times[1:] != times[:-1]])
    index = np.arange(len(times))
    rank = index - np.maximum.accumulate(np.where(fresh, index, 0))
    return np.maximum.accumulate(times + rank * _APART_S)


def replay_requests(driver: Driver, in_flight: int, first: int = 0) -> Iterator[Served]:
    """Run the requests of the driver's trace from `first` on; yields each, in order, when its load is over.

    Step i lets the results of all jobs of steps up to i - in_flight take effect, ends request i - in_flight, and starts
    request i. After the last one, everything that is under way takes effect.
    """
    times = arrivals_s(driver.trace)
    last = len(times) - 1
    for step in range(first, len(times) + in_flight):
        driver.begin(step, float(times[min(step, last)]))
        driver.deliver(step - in_flight)
        if step - in_flight >= first:
            yield driver.finish(step - in_flight)
        if step <= last:
            driver.start(step)
    driver.drain()


@dataclass(slots=True, eq=False)
class Life:
    """What one process served."""

    tiers: int
    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    hit_tokens_by_tier: list[int] = field(init=False)
    verified_blocks: int = 0
    wrong_bytes: int = 0
    failed_blocks: int = 0
    counts: tuple[TierCounts, ...] = field(init=False)
    opened_s: float | None = None
    recovered_blocks: int = 0

    def __post_init__(self) -> None:
        self.hit_tokens_by_tier = [0] * self.tiers
        self.counts = (TierCounts(),) * self.tiers

    def add(self, served: Served) -> None:
        """Count one request."""
        self.requests += 1
        self.prompt_tokens += served.prompt_tokens
        self.hit_tokens += served.hit_tokens
        self.verified_blocks += served.verified_blocks
        self.wrong_bytes += served.wrong_bytes
        for level, tokens in enumerate(served.hit_tokens_by_tier):
            self.hit_tokens_by_tier[level] += tokens
