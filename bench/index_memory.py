"""A planner filled with a trace, and what it takes in memory. Run as a program, so that nothing else is in the heap.

python -m bench.index_memory trace FILE [REQUESTS] | single BLOCKS

The planner has DRAM for every block of the trace and an NVMe level of as many slots; all blocks are stored, none is
written down. Bytes are what tracemalloc counts from before the planner is made until it is full: numpy's buffers and
every Python object, garbage collected. The growth of the resident set is told
beside it (with what tracemalloc itself takes).
"""

from __future__ import annotations

import gc
import json
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bench.fill import BLOCK_TOKENS, Ids, PlannerRig, random_ids
from tiercache.keys import encode_prompt
from tiercache.sim.expand import expand
from tiercache.sim.readers import read_trace
from tiercache.sim.trace import Trace

_DEPTH = 64


def trace_prompts(trace: Trace) -> Iterator[Ids]:
    """Token ids of each request; a block of 512 tokens is 32 blocks of 16, the last one of a prompt fewer."""
    for request in range(trace.requests):
        yield expand(trace, request)


def single_prompts(blocks: int) -> Iterator[Ids]:
    """Prompts of which every block is a run of its own: each block of a path but the last has a sibling."""
    rng = np.random.default_rng(0)
    made = 0
    while made < blocks:
        depth = min(_DEPTH, (blocks - made + 1) // 2)
        path = random_ids(rng, depth)
        yield path
        for at in range(depth - 1, 0, -1):
            yield np.concatenate([path[: at * BLOCK_TOKENS], random_ids(rng, 1)])
        made += 2 * depth - 1


def count_blocks(trace: Trace) -> int:
    """Full blocks of 16 tokens that all prompts have together."""
    return int((trace.tokens // BLOCK_TOKENS).sum())


def measure(prompts: Iterator[Ids], slots: int) -> dict[str, Any]:
    """Fill a planner and weigh it."""
    gc.collect()
    resident = _resident_nbytes()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    rig = PlannerRig(slots, slots)
    empty = tracemalloc.get_traced_memory()[0] - before
    for ids in prompts:
        rig.store(encode_prompt(ids, BLOCK_TOKENS))
    del ids
    gc.collect()
    full = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    index = rig.planner.state.residency.index
    assert rig.planner.state.residency.tables[0].free == slots - index.blocks
    return {
        "blocks": index.blocks,
        "nodes": len(index.nodes),
        "bytes": full,
        "bytes_per_block": full / index.blocks,
        "slot_tables_per_block": empty / index.blocks,
        "resident_set_growth": _resident_nbytes() - resident,
    }


def _resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def main(arguments: list[str]) -> None:
    """Print one JSON object."""
    kind, what, *rest = arguments
    if kind == "single":
        found = measure(single_prompts(int(what)), int(what))
        assert found["nodes"] == found["blocks"]
    else:
        trace = read_trace(what)
        if rest:
            trace = trace.slice(int(rest[0]))
        found = measure(trace_prompts(trace), count_blocks(trace))
        assert found["blocks"] == count_blocks(trace)
        found["requests"] = trace.requests
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
