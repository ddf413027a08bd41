"""Facts for a page, from a small trace, for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path

from sim_kit import BLOCK_TOKENS, random_trace

from tiercache.sim.options import ReplayOptions, Share
from tiercache.sim.page.facts import Facts, PageOptions, gather
from tiercache.sim.replay import run_replay

COMMAND = "tiercache replay 'a <b> & c.jsonl' --report out.html"


def trace_file(path: Path, requests: list[tuple[float, list[int]]]) -> Path:
    """A JSONL trace of full blocks: seconds and hash ids."""
    lines = [
        json.dumps({"timestamp": 1000 * at, "input_length": 16 * len(ids), "output_length": 1, "hash_ids": ids})
        for at, ids in requests
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def random_trace_file(folder: Path, requests: int = 50, name: str = "a <b> & 'c'.jsonl") -> Path:
    """A trace with branches, partial last blocks and a name that HTML must escape."""
    trace, path = random_trace(7, requests, 10), folder / name
    lines = []
    for request in range(trace.requests):
        ids = trace.path(request).tolist()
        lines.append(
            json.dumps(
                {
                    "timestamp": 1000 * float(trace.times_s[request]),
                    "input_length": trace.prompt_tokens(request),
                    "output_length": 1,
                    "hash_ids": ids,
                }
            )
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def options_for(folder: Path, *, full_blocks: bool = False) -> ReplayOptions:
    """A replay without data of such a trace, over two tiers that are both too small for it."""
    return ReplayOptions(
        str(random_trace_file(folder)),
        Share(0.1),
        nvme=Share(0.3),
        block_tokens=BLOCK_TOKENS,
        block_nbytes=1 << 20,
        no_data=True,
        full_blocks=full_blocks,
    )


def facts_of(options: ReplayOptions, page: PageOptions | None = None, workers: int | None = 0) -> Facts:
    """Replay and gather, in this process."""
    report = run_replay(options)
    page = page or PageOptions(command=COMMAND, version="1.2.3")
    return gather(options, report, page, lambda done, total, note: None, workers)
