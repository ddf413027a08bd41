"""All that a page tells, as plain values, and how they are gathered."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercache.sim.drivers import DriverSettings
from tiercache.sim.options import Progress, ReplayOptions
from tiercache.sim.page.cells import Cell, Found, measure, processes
from tiercache.sim.page.choose import LONG_TRACE, choose
from tiercache.sim.page.leaving import Leaving, leave_cached_path
from tiercache.sim.page.sharing import Sharing, first_places, share_of_trace
from tiercache.sim.page.timeline import Timeline, over_time
from tiercache.sim.prefill import PrefillCost
from tiercache.sim.report import ReplayReport
from tiercache.sim.requests import driver_settings, load_trace
from tiercache.tiers.base import slot_stride

__all__ = ["DAY_S", "Facts", "PageOptions", "Sized", "gather"]

DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class PageOptions:
    """What a page is made with, besides the replay."""

    prefill: PrefillCost = field(default_factory=PrefillCost)
    prefill_given: bool = False
    """Whether the user said anything about model and GPU; else the page says that they are an assumption."""
    block_bytes_given: bool = False
    command: str = ""
    """The command line, to be shown."""
    version: str = ""
    """Of tiercache."""


@dataclass(frozen=True, slots=True)
class Sized:
    """Two sizes and what they bring."""

    dram_slots: int
    nvme_slots: int | None
    found: Found


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything on the page."""

    report: ReplayReport
    options: ReplayOptions
    page: PageOptions
    settings: DriverSettings
    span_s: float
    """From the first request to the last; 0 where the trace has no times."""
    accesses: int
    """Blocks of all prompts together."""
    capacities: tuple[int, ...]
    """Of the sweep, in blocks, ascending."""
    sweep: dict[str, tuple[int, ...]]
    """Hit tokens per policy and capacity, requests one after another."""
    simulated: frozenset[str]
    """The policies of `sweep` that the cache does not have."""
    grid: tuple[Sized, ...]
    """DRAM times NVMe, by DRAM and then NVMe."""
    own: Found
    """The user's sizes, replayed without data and without a kill."""
    timeline: Timeline
    sharing: Sharing
    leaving: Leaving

    @property
    def prompt_tokens(self) -> int:
        """Of all requests."""
        return self.report.prompt_tokens

    @property
    def infinite_tokens(self) -> int:
        """Hit tokens of a cache without bounds: whatever comes again."""
        return self.prompt_tokens - sum(self.sharing.unique_tokens_by_uses)

    @property
    def per_day(self) -> float | None:
        """What turns a figure of the trace into one of a day; None where the trace has no times."""
        return DAY_S / self.span_s if self.span_s > 0 else None

    @property
    def long_trace(self) -> bool:
        """Whether fewer sizes were tried because of its length."""
        return self.accesses > LONG_TRACE

    @property
    def footprint_nbytes(self) -> int:
        """Room that all unique blocks take."""
        return self.nbytes(self.report.unique_blocks)

    def nbytes(self, slots: int) -> int:
        """Bytes that so many slots take."""
        return slots * slot_stride(self.options.block_nbytes)

    def ratio(self, tokens: int) -> float:
        """Of all prompt tokens."""
        return tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def sized(self, dram_slots: int, nvme_slots: int | None) -> Sized | None:
        """What these sizes bring, where they were tried."""
        return next(
            (each for each in self.grid if (each.dram_slots, each.nvme_slots) == (dram_slots, nvme_slots)), None
        )


def gather(
    options: ReplayOptions, report: ReplayReport, page: PageOptions, progress: Progress, workers: int | None = None
) -> Facts:
    """Measure what the page needs. `workers`: processes to use, 0 for none but this one; None: as it pays.

    Raises what reading the trace and `measure` raise.
    """
    trace = load_trace(options)
    settings = driver_settings(options, trace)
    choice = choose(settings, trace.unique_blocks, len(trace.ids))
    cells = choice.cells
    workers = processes(len(trace.ids), len(cells)) if workers is None else workers
    found = measure(cells, trace, options, progress, workers)
    progress(len(cells), len(cells), "what prompts share")
    own, places = found[choice.own].watched, first_places(trace)
    assert own is not None
    policies = tuple(dict.fromkeys(cell.policy for cell in choice.sweep))
    capacities = tuple(sorted({cell.dram_slots for cell in choice.sweep}))
    return Facts(
        report=report,
        options=options,
        page=page,
        settings=settings,
        span_s=float(trace.times_s[-1] - trace.times_s[0]),
        accesses=len(trace.ids),
        capacities=capacities,
        sweep={name: tuple(_swept(choice.sweep, found, name)) for name in policies},
        simulated=frozenset(cell.policy for cell in choice.sweep if cell.simulated),
        grid=tuple(Sized(cell.dram_slots, cell.nvme_slots, found[cell]) for cell in choice.grid),
        own=found[choice.own],
        timeline=over_time(trace, own),
        sharing=share_of_trace(trace, places),
        leaving=leave_cached_path(trace, places, own),
    )


def _swept(sweep: tuple[Cell, ...], found: dict[Cell, Found], policy: str) -> list[int]:
    cells = sorted((cell for cell in sweep if cell.policy == policy), key=lambda cell: cell.dram_slots)
    return [found[cell].hit_tokens for cell in cells]
