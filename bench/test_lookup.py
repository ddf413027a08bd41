"""Lookup of a 128K-token prompt, on paths of few and of many nodes, and of one that is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from bench.fill import BLOCK_TOKENS, LONG_BLOCKS, Ids, branched, memory_cache, random_ids
from bench.pairs import Pairs
from bench.rows import row
from bench.scale import Scale
from tiercache import Match, TieredKVCache

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
        kept = ids.copy()

        def check(match: Match) -> None:
            assert match.blocks == len(ids) // BLOCK_TOKENS and sum(match.by_tier.values()) == match.blocks

        pairs.run(
            row(f"lookup/{nodes}"),
            cache.lookup,
            {"np.array_equal": lambda fresh: np.array_equal(fresh, kept)},
            fresh=ids.copy,
            check=check,
            pairs=scale.pick(201, 101, 3) if nodes < 8192 else scale.pick(51, 25, 3),
            warmup=scale.pick(10, 10, 1),
            tokens=len(ids),
        )


def test_absent(pairs: Pairs, scale: Scale) -> None:
    with long_prompt(1, scale) as (cache, ids):
        rng, kept = np.random.default_rng(1), ids.copy()

        def check(match: Match) -> None:
            assert match.blocks == 0 and match.diverged_at is not None

        pairs.run(
            row("lookup/absent"),
            lambda fresh: cache.lookup(fresh[1]),
            {"np.array_equal": lambda fresh: np.array_equal(fresh[0], kept)},
            fresh=lambda: (ids.copy(), random_ids(rng, len(ids) // BLOCK_TOKENS)),
            check=check,
            pairs=scale.pick(201, 101, 3),
            warmup=scale.pick(10, 10, 1),
            tokens=len(ids),
        )
