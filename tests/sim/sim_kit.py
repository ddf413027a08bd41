"""Random traces, and a replay of them step by step, for the tests of this folder."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

import numpy as np

from tiercache.sim.drivers import Driver
from tiercache.sim.requests import Life, replay_requests
from tiercache.sim.trace import Trace, renumber

BLOCK_TOKENS = 16


def random_trace(seed: int, requests: int = 80, longest: int = 12) -> Trace:
    """Conversations that branch, many at one timestamp, some with a partial last block."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    parent: list[int] = []
    kids: dict[int, list[int]] = {-1: []}
    paths: list[list[int]] = []

    def child(of: int, n_tokens: int, again: bool) -> int:
        known = [each for each in kids[of] if tokens[each] == n_tokens]
        if known and again:
            return int(random.choice(known))
        tokens.append(n_tokens)
        parent.append(of)
        kids[of].append(len(tokens) - 1)
        kids[len(tokens) - 1] = []
        return len(tokens) - 1

    for _ in range(requests):
        path: list[int] = []
        while len(path) < random.integers(1, longest + 1):
            path.append(child(path[-1] if path else -1, BLOCK_TOKENS, random.random() < 0.7))
        if random.random() < 0.4:
            path.append(child(path[-1], int(random.integers(1, BLOCK_TOKENS)), True))
        paths.append(path)
    ids = np.array([block for path in paths for block in path], np.int64)
    starts = np.cumsum([0, *map(len, paths)]).astype(np.int64)
    times = np.cumsum(random.integers(0, 3, requests)).astype(np.float64)
    dense, block_tokens, above = renumber(ids, np.array(tokens, np.int32), np.array(parent, np.int64))
    return Trace(f"random-{seed}", BLOCK_TOKENS, times, starts, dense, block_tokens, above)


def decisions(driver: Driver, in_flight: int, *, check: bool = False) -> list[Any]:
    """Run the whole trace; per request what it hit, then what each tier counted, without seconds."""
    life, found = Life(len(driver.settings.tiers)), []
    with driver:
        for served in replay_requests(driver, in_flight):
            life.add(served)
            found.append((served.request, served.hit_tokens, served.hit_tokens_by_tier))
            if check:
                assert driver.check() == []
        assert driver.check() == []
        assert (life.wrong_bytes, driver.delivery.failed_blocks) == (0, 0)
        return [*found, *(astuple(counts)[:5] for counts in driver.counts())]
