"""Cells: single replays of a trace, run side by side in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tiercache.sim.baselines import simulate
from tiercache.sim.drivers import DriverSettings, PlanDriver
from tiercache.sim.options import Progress, ReplayOptions
from tiercache.sim.ordered import ReplayError
from tiercache.sim.requests import driver_settings, load_trace, replay_requests
from tiercache.sim.trace import Trace

__all__ = ["Cell", "Found", "Watched", "measure", "processes", "run_cell", "watch"]

_MOST_PROCESSES = 16
_ENDS_WITHIN_S = 10.0
_WORTH_A_PROCESS = 2_000_000
"""Block accesses of all cells together, from which processes of their own pay."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay without data."""

    policy: str
    dram_slots: int
    nvme_slots: int | None = None
    """None: no NVMe tier."""
    simulated: bool = False
    """By `simulate`; else by the planner of the cache."""
    alone: bool = False
    """Requests one after another and told nothing, as the simulation has them; else as the options say."""
    watched: bool = False
    """Whether what every request found is kept."""


@dataclass(frozen=True, slots=True, eq=False)
class Watched:
    """One replay, request by request."""

    hits: NDArray[np.int64]
    """int64[r, tiers]: prompt tokens of each request that came from each tier."""
    nvme_writes: NDArray[np.int64]
    """int64[r]: blocks written to NVMe from the request before to this one; the last has all that follow."""


@dataclass(frozen=True, slots=True)
class Found:
    """What came of a cell."""

    hit_tokens: int
    dram_tokens: int
    """Of `hit_tokens`, those from DRAM."""
    nvme_writes: int
    """Blocks written to NVMe."""
    watched: Watched | None = field(default=None, compare=False)
    """Of a cell that asks for it."""


def watch(trace: Trace, settings: DriverSettings, in_flight: int) -> Watched:
    """Replay with the planner alone, and keep what every request found."""
    hits = np.zeros((trace.requests, len(settings.tiers)), np.int64)
    written = np.zeros(trace.requests + 1, np.int64)
    last = trace.requests - 1
    with PlanDriver(trace, settings) as driver:
        for served in replay_requests(driver, in_flight):
            if served.hit_tokens:
                hits[served.request] = served.hit_tokens_by_tier
            if settings.nvme_slots is not None:
                written[min(served.request + in_flight, last) + 1] = driver.counts()[-1].blocks_written
        if settings.nvme_slots is not None:
            written[-1] = driver.counts()[-1].blocks_written
    return Watched(hits, np.diff(np.maximum.accumulate(written)))


def run_cell(cell: Cell, trace: Trace, options: ReplayOptions) -> Found:
    """Measure one cell in this process."""
    if cell.simulated:
        hit_tokens = simulate(trace, cell.policy, cell.dram_slots)
        return Found(hit_tokens, hit_tokens, 0)
    settings = replace(
        driver_settings(options, trace), dram_slots=cell.dram_slots, nvme_slots=cell.nvme_slots, policy=cell.policy
    )
    if cell.nvme_slots is None:
        settings = replace(settings, write_after_s=None, max_writes_per_hit=None, exclusive=None)
    if cell.alone:
        settings = replace(settings, hints="none")
    seen = watch(trace, settings, 1 if cell.alone else options.in_flight)
    tokens = seen.hits.sum(axis=0)
    return Found(int(tokens.sum()), int(tokens[0]), int(seen.nvme_writes.sum()), seen if cell.watched else None)


def processes(accesses: int, cells: int) -> int:
    """How many processes measure `cells` cells of a trace with `accesses` block accesses: 0 is this one alone."""
    if accesses * cells < _WORTH_A_PROCESS:
        return 0
    return max(1, min(len(os.sched_getaffinity(0)), cells, _MOST_PROCESSES))


def measure(
    cells: Sequence[Cell], trace: Trace, options: ReplayOptions, progress: Progress, workers: int
) -> dict[Cell, Found]:
    """Measure all cells in their order, `workers` at a time (0: in this process), and say after each how far it is.

    Each worker reads the trace for itself. Raises what a cell raises, and ReplayError where a worker died.
    """
    found: dict[Cell, Found] = {}
    cells = list(dict.fromkeys(cells))

    def note(cell: Cell, result: Found) -> None:
        found[cell] = result
        size = f"{cell.dram_slots:,}" + ("" if cell.nvme_slots is None else f" + {cell.nvme_slots:,}")
        share = result.hit_tokens / max(1, trace.total_prompt_tokens)
        progress(len(found), len(cells), f"{cell.policy}, {size} blocks: {share:.3f}")

    progress(0, len(cells), "")
    if not workers:
        for cell in cells:
            note(cell, run_cell(cell, trace, options))
        return found
    try:
        with _pool(workers, options) as submit:
            waiting = {submit(cell): cell for cell in cells}
            for future in as_completed(waiting):
                note(waiting[future], future.result())
    except BrokenProcessPool as error:
        raise ReplayError(
            f"a process that replayed for the page ended by itself: is there memory for {workers}, and still a trace?"
        ) from error
    return found


@contextmanager
def _pool(workers: int, options: ReplayOptions) -> Iterator[Callable[[Cell], Future[Found]]]:
    """Processes that end with the block, also where it is left early. New interpreters: this one may have threads."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin, (options,))
    try:
        yield lambda cell: pool.submit(_run, cell)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        ours = set(multiprocessing.active_children()) - before
        for child in ours:
            child.terminate()
        for child in ours:
            child.join(_ENDS_WITHIN_S)
        raise
    finally:
        pool.shutdown()


_given: list[tuple[Trace, ReplayOptions]] = []
"""In a worker: what it works on."""


def _begin(options: ReplayOptions) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends a worker without a word
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _given.append((load_trace(options), options))


def _end_with_parent() -> None:
    """Else a worker would wait for ever for the next cell of a parent that was killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)  # at once, whatever the other threads hold


def _run(cell: Cell) -> Found:
    trace, options = _given[0]
    return run_cell(cell, trace, options)
