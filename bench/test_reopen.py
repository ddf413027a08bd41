"""From the start of a process's cache to the first bytes out of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.child import run_child
from bench.pairs import Pairs, Seconds
from bench.payload import Payload
from bench.reopen import BLOCK_NBYTES, write_scan_file
from bench.rows import row
from bench.scale import Scale
from bench.store_dir import Tree, build

_RUN = 16


@pytest.fixture(scope="module")
def scan_file(place: Path, scale: Scale) -> Path:
    path = place / "scan.mdb"
    write_scan_file(path, scale.pick(1_000_000, 1_000_000, 10_000))
    return path


@pytest.fixture(scope="module")
def stores(place: Path, scale: Scale) -> Callable[[int], tuple[Path, int]]:
    """Makes the directory of so many blocks, once; its path, and how many it really has at this scale."""
    made: dict[int, tuple[Path, int]] = {}

    def store(blocks: int) -> tuple[Path, int]:
        if blocks not in made:
            tree = Tree(scale.pick(blocks, min(blocks, 300_000), blocks // 100) // _RUN, _RUN)
            path, last = place / f"store-{blocks}", tree.blocks_of(tree.runs - 1)
            slots = np.arange(tree.blocks, dtype=np.int32)
            build(path, tree, Payload(BLOCK_NBYTES), slots, written=last)
            np.save(place / f"{path.name}-prompt.npy", tree.prompt(tree.runs - 1))
            np.save(place / f"{path.name}-blocks.npy", last)
            made[blocks] = path, tree.blocks
        return made[blocks]

    return store


def opened(path: Path, blocks: int, kind: str = "open") -> Seconds:
    """One start in a fresh process."""
    ends = -signal.SIGKILL if kind == "kill" else 0
    found = run_child("reopen", kind, path, blocks, ends=ends)
    return Seconds(found["seconds"], found["cpu_s"])


def scanned(path: Path) -> Seconds:
    """One scan in a fresh process."""
    found = run_child("reopen", "scan", path)
    return Seconds(found["seconds"], found["cpu_s"])


@pytest.mark.parametrize("stop", ["clean", "unclean"])
@pytest.mark.parametrize("blocks", [100_000, 1_000_000])
def test_reopen(
    blocks: int, stop: str, stores: Callable[[int], tuple[Path, int]], scan_file: Path, pairs: Pairs, scale: Scale
) -> None:
    path, count = stores(blocks)
    pairs.run(
        row(f"reopen/{blocks}/{stop}"),
        lambda _: opened(path, count, "open" if stop == "clean" else "kill"),
        {"LMDB scan": lambda _: scanned(scan_file)},
        pairs=scale.pick(7, 5, 1),
        warmup=scale.pick(1, 1, 0),
        blocks=count,
    )


def test_linear(stores: Callable[[int], tuple[Path, int]], pairs: Pairs, scale: Scale) -> None:
    (few, few_count), (many, many_count) = stores(100_000), stores(1_000_000)
    pairs.run(
        row("reopen/linear"),
        lambda _: opened(many, many_count),
        {"100,000 blocks": lambda _: opened(few, few_count)},
        pairs=scale.pick(5, 3, 1),
        warmup=scale.pick(1, 1, 0),
        blocks=[few_count, many_count],
    )
