"""What is measured: capacities for the comparison of policies, and sizes around the user's own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tiercache.sim.drivers import DriverSettings
from tiercache.sim.page.cells import Cell

__all__ = ["LONG_TRACE", "SHARES", "SIMULATED", "Choice", "choose"]

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Capacities compared, in parts of the trace's unique blocks. With all of them in, every policy finds the same."""
PLANNED = ("reuse", "lru")
"""Policies that the cache has, in the order of the page; that of the replay comes first where it is another one."""
SIMULATED = ("arc", "s3fifo", "lru2", "min")
LONG_TRACE = 4_000_000
"""Block accesses from which on fewer sizes are tried."""
_MULTIPLES = (0.5, 1.0, 2.0, 4.0)
_FEW_MULTIPLES = (0.5, 1.0, 2.0)
_OF_DRAM = (5.0, 20.0)
"""NVMe sizes tried where the user has none, in multiples of DRAM."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The cells of a page."""

    sweep: tuple[Cell, ...]
    """One tier."""
    grid: tuple[Cell, ...]
    """DRAM times NVMe; the user's own sizes are among them."""
    own: Cell

    @property
    def cells(self) -> list[Cell]:
        """All of them, longest first: the planner before the simulation, small sizes (much to evict) before large."""
        every = dict.fromkeys((*self.grid, *self.sweep))
        return sorted(every, key=lambda each: (each.simulated, each.nvme_slots is None, each.dram_slots))


def choose(settings: DriverSettings, unique_blocks: int, accesses: int) -> Choice:
    """Which cells a trace of so many unique blocks and block accesses is worth, with `settings` as the user's own."""
    few = accesses > LONG_TRACE
    own = Cell(settings.policy, settings.dram_slots, settings.nvme_slots, watched=True)
    planned = tuple(dict.fromkeys((*PLANNED, settings.policy)))
    capacities = sorted({max(1, round(share * unique_blocks)) for share in SHARES})
    sweep = [Cell(policy, slots, alone=True) for policy in planned for slots in capacities]
    sweep += [Cell(policy, slots, simulated=True) for policy in SIMULATED for slots in capacities]
    drams = _around(settings.dram_slots, unique_blocks, few)
    if settings.nvme_slots is None:
        slow = sorted({min(unique_blocks, round(times * settings.dram_slots)) for times in _OF_DRAM})
    else:
        slow = _around(settings.nvme_slots, unique_blocks, few)
    grid = [Cell(settings.policy, dram, nvme) for dram in drams for nvme in (None, *slow)]
    return Choice(tuple(sweep), tuple(own if replace(own, watched=False) == cell else cell for cell in grid), own)


def _around(own: int, unique_blocks: int, few: bool) -> list[int]:
    """Sizes in blocks around the user's own; of those in which the whole trace has room, the smallest and their own."""
    multiples = _FEW_MULTIPLES if few else _MULTIPLES
    sizes = sorted({own, *(max(1, round(times * own)) for times in multiples)})
    if own > 4 * unique_blocks:  # none of the smaller ones would evict anything either
        sizes = sorted(
            {own, *(max(1, round(share * unique_blocks)) for share in ((0.05, 0.2) if few else SHARES[1::2]))}
        )
    ample = [size for size in sizes if size >= unique_blocks]
    return [size for size in sizes if size < unique_blocks or size == own or size == ample[0]]
