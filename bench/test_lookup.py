"""Lookup of a 128K-token prompt, on paths of few and of many nodes, and of one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bench.fill import BLOCK_TOKENS, LONG_BLOCKS, Ids, branched, memory_cache, random_ids, tiered_cache
from bench.pairs import Pairs
from bench.rows import row
from bench.scale import Scale
from tiercache import Match, TieredKVCache
from tiercache.keys import encode_prompt

_BLOCK_NBYTES = 64
_SMOKE_BLOCKS = 512


@contextmanager
def long_prompt(nodes: int, scale: Scale) -> Iterator[tuple[TieredKVCache, Ids]]:
    """A cache that holds a long prompt on a path of so many nodes, and 2,000 others."""
    blocks, others = scale.pick(LONG_BLOCKS, LONG_BLOCKS, _SMOKE_BLOCKS), scale.pick(2_000, 2_000, 50)
    ids = random_ids(np.random.default_rng(0), blocks)
    with memory_cache(5 * blocks, _BLOCK_NBYTES) as cache:
        branched(cache, ids, nodes, others, _BLOCK_NBYTES)
        assert cache.stats().nodes == 2 * nodes - 1 + others
        yield cache, ids


@pytest.mark.parametrize("nodes", [1, 64, 512, 8192])
def test_hit(nodes: int, pairs: Pairs, scale: Scale) -> None:
    with long_prompt(scale.pick(nodes, nodes, min(nodes, _SMOKE_BLOCKS)), scale) as (cache, ids):
        measure(f"lookup/{nodes}", cache, ids, pairs, scale)


def test_hit_after_restart(place: Path, pairs: Pairs, scale: Scale) -> None:
    nodes, blocks = 64, scale.pick(LONG_BLOCKS, LONG_BLOCKS, _SMOKE_BLOCKS)
    ids, others = random_ids(np.random.default_rng(0), blocks), scale.pick(2_000, 2_000, 50)
    with tiered_cache(place / "store", 5 * blocks, _BLOCK_NBYTES) as cache:
        branched(cache, ids, nodes, others, _BLOCK_NBYTES)
    with tiered_cache(place / "store", 5 * blocks, _BLOCK_NBYTES) as cache:
        assert cache.stats().nodes == 2 * nodes - 1 + others
        measure("lookup/restart", cache, ids, pairs, scale)
        assert cache.lookup(ids).by_tier == {"dram": 0, "nvme": blocks}


def measure(row_id: str, cache: TieredKVCache, ids: Ids, pairs: Pairs, scale: Scale) -> None:
    """Look the whole prompt up and gather its slots, each time as a new array, against a compare of two new arrays.

    The slots are gathered here, since a lookup needs them only where not everything is in the fastest tier.
    """
    assert cache.stack is not None
    index, prompt = cache.stack.planner.state.residency.index, encode_prompt(ids, BLOCK_TOKENS)
    path = index.walk(prompt.symbols, prompt.n).path

    def look_up(fresh: tuple[Ids, Ids]) -> tuple[Match, NDArray[np.int32]]:
        return cache.lookup(fresh[0]), index.gather(path)

    def check(found: tuple[Match, NDArray[np.int32]]) -> None:
        match, slots = found
        assert match.blocks == len(ids) // BLOCK_TOKENS and sum(match.by_tier.values()) == match.blocks
        assert slots.shape[1] == match.blocks and (slots.max(axis=0) >= 0).all()

    pairs.run(
        row(row_id),
        look_up,
        {"np.array_equal": lambda fresh: np.array_equal(*fresh)},
        fresh=lambda: (ids.copy(), ids.copy()),
        check=check,
        pairs=scale.pick(51, 25, 3) if row_id == "lookup/8192" else scale.pick(201, 101, 3),
        warmup=scale.pick(10, 10, 1),
        tokens=len(ids),
    )


def test_absent(pairs: Pairs, scale: Scale) -> None:
    with long_prompt(1, scale) as (cache, ids):
        rng = np.random.default_rng(1)

        def two_absent() -> tuple[Ids, Ids]:
            absent = random_ids(rng, len(ids) // BLOCK_TOKENS)
            return absent, absent.copy()

        def check(match: Match) -> None:
            assert match.blocks == 0 and match.diverged_at is not None

        pairs.run(
            row("lookup/absent"),
            lambda fresh: cache.lookup(fresh[0]),
            {"np.array_equal": lambda fresh: np.array_equal(*fresh)},
            fresh=two_absent,
            check=check,
            pairs=scale.pick(201, 101, 3),
            warmup=scale.pick(10, 10, 1),
            tokens=len(ids),
        )
