"""What a close is worth that had time for a part only: replay half a trace, drain so many blocks, restart, go on.

python -m bench.drained [--traces DIR]

Per trace: token hit ratio of the requests after the restart, by how much of what only DRAM had could be written, and in
which order. Blocks are written to NVMe when DRAM evicts them, and at the end. Deterministic; a few minutes; prints
a table, keeps nothing.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import numpy as np

from bench.hit_ratios import TRACES
from bench.machine import ROOT
from tiercache.planner import Planner
from tiercache.sim.drivers import DriverSettings, PlanDriver
from tiercache.sim.readers import read_trace
from tiercache.sim.requests import replay_requests
from tiercache.sim.trace import Trace
from tiercache.slots import RESIDENT
from tiercache.types import ROOT as NO_PARENT
from tiercache.types import Recovered

SIZES = {"conversation": [(5.0, 50.0), (20.0, 50.0)], "synthetic": [(5.0, 50.0), (20.0, 50.0)]}
"""DRAM and NVMe, in % of the trace's unique blocks."""
CASES = (
    (0.0, "most reusable"),
    (0.25, "most reusable"),
    (0.25, "last use"),
    (0.25, "random"),
    (1.0, "most reusable"),
    (1.0, "only what is worth 1 in 6"),
)
SOON = 1000


def drain(driver: PlanDriver, order: str, share: float) -> None:
    """Write that share of what only DRAM has, in the planner's own order or another one."""
    planner = driver._planner
    written, wanted = planner.level_counters()[-1], round(share * planner.lacking(np.inf))
    before = written.written
    if wanted and order == "most reusable":
        planner.drain(driver._now)
    elif wanted:
        _queue(planner, order)
        planner.tend(driver._now)
    driver._hand_over()
    while written.written - before < wanted and driver.delivery.deliver_next():
        pass


def _queue(planner: Planner, order: str) -> None:
    """Queue what is lacking in another order, run by run."""
    state, chance = planner.state, random.Random(1)
    found = []
    for node in state.residency.index.walk_nodes():
        lacking = planner.demotion._lacking_in(node, 1) & (node.slots[: node.n - int(node.partial), 0] >= 0)
        if order.startswith("only"):
            lacking &= np.array([state.policy.worth(node, at) >= 1 / 6 for at in range(len(lacking))], dtype=np.bool_)
        if lacking.any():
            slots = node.slots[: len(lacking), 0][lacking].astype(np.int32)
            key = chance.random() if order == "random" else float(node.last_use[: len(lacking)][lacking].max())
            found.append((key, node.depth, slots))
    for _, _, slots in sorted(found, key=lambda each: each[:2], reverse=True):
        state.unwritten.add(0, slots)


def recovered_of(planner: Planner) -> Recovered:
    """What a restart would find of the last level."""
    residency = planner.state.residency
    level = residency.levels - 1
    rows: list[tuple[int, int, int, bytes, float, int]] = []
    index_of: dict[int, int] = {}
    for node in sorted(residency.index.walk_nodes(), key=lambda node: node.depth):
        if node.parent is None:
            continue
        above = node.parent
        parent = index_of.get(int(above.idents[above.n - 1]), NO_PARENT) if above.parent is not None else NO_PARENT
        for at in range(node.n):
            slot = int(node.slots[at, level])
            if slot < 0 or residency.tables[level].state[slot] != RESIDENT:
                break
            ident = int(node.idents[at])
            symbol = bytes(node.run[at * residency.width : (at + 1) * residency.width])
            index_of[ident] = len(rows)
            rows.append((slot, parent, ident, symbol, max(0.0, float(node.last_use[at])), int(node.uses[at])))
            parent = index_of[ident]
    slots, parents, idents, symbols, last_use, uses = zip(*rows, strict=True) if rows else ((),) * 6
    return Recovered(
        np.array(slots, np.int32),
        np.array(parents, np.int64),
        np.array(idents, np.uint64),
        b"".join(symbols),
        np.array(last_use, np.float64),
        np.array(uses, np.uint32),
    )


def measure(trace: Trace, sizes: tuple[float, float], order: str, share: float) -> tuple[float, float, int]:
    """Hit ratio of the first requests after the restart, of all of them, and blocks drained."""
    half = trace.requests // 2
    dram, nvme = (round(each / 100 * trace.unique_blocks) for each in sizes)
    settings = DriverSettings(dram, nvme, 4096, "reuse", "none", None)
    first = PlanDriver(trace.slice(half), settings)
    for _ in replay_requests(first, 1):
        pass
    before = first._planner.level_counters()[1].written
    drain(first, order, share)
    drained = first._planner.level_counters()[1].written - before
    second = PlanDriver(trace, settings)
    second._planner.restore(recovered_of(first._planner))
    served = list(replay_requests(second, 1, first=half))
    soon = served[:SOON]
    ratios = [
        sum(each.hit_tokens for each in part) / sum(each.prompt_tokens for each in part) for part in (soon, served)
    ]
    return ratios[0], ratios[1], drained


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser("bench.drained", description=__doc__)
    parser.add_argument("--traces", type=Path, default=ROOT.parent / "shared" / "traces")
    folder = parser.parse_args().traces
    print(f"| trace, DRAM/NVMe | drained | order | next {SOON:,} requests | to the end | blocks |")
    print("|---|---|---|---|---|---|")
    for name, all_sizes in SIZES.items():
        trace = read_trace(folder / TRACES[name])
        for sizes in all_sizes:
            for share, order in CASES:
                soon, whole, blocks = measure(trace, sizes, order, share)
                label = f"{name} {sizes[0]:g}/{sizes[1]:g} %"
                print(f"| {label} | {share:.0%} | {order} | {soon:.4f} | {whole:.4f} | {blocks:,} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
