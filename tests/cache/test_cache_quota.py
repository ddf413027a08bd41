"""A local hot set in a real cache, while queued prompts that all hit the key tier come in between."""

import random

import numpy as np
import pytest
from cache_kit import BLOCK_TOKENS, LAYOUT, WAIT_S, bits, dram, is_clean

from tiercache import Remote, TieredKVCache
from tiercache.testing import MemoryKeyTier, SlowKeyTier, put_blocks

EPOCH = "weights"
HOT, HOT_BLOCKS = 24, 8
QUEUED, QUEUED_BLOCKS = 20, 48
SLOTS = QUEUED * QUEUED_BLOCKS // 4
"""A quarter of what the queued prompts need; the hot set takes 80 % of it."""


def tokens_of(number, blocks):
    ids = np.full(blocks * BLOCK_TOKENS, number, dtype=np.int32)
    ids[::BLOCK_TOKENS] = np.arange(blocks)
    ids[0] = number
    return ids


def payload(tokens):
    """Quick, and of its own for every block of every prompt."""
    n = len(tokens) // BLOCK_TOKENS
    rows = np.zeros((n, *LAYOUT.block_shape), dtype=np.float32)
    rows[:] = (int(tokens[0]) * 1000 + np.arange(n))[:, None, None]
    return rows


def request(cache, tokens):
    """Ask, load, store the rest; how many blocks were found in this cache, and all that were loaded are right."""
    match = cache.lookup(tokens, deadline_s=WAIT_S)
    with cache.load(match).result(WAIT_S) as loaded:
        n = loaded.block_count
        assert bits(loaded.blocks) == bits(payload(tokens)[:n])
    local = match.blocks - match.by_tier.get("remote", 0)
    cache.store(tokens, payload(tokens)[n:], n).wait(WAIT_S)
    return min(n, local)


def hot_set_share(quota, queued, key_tier):
    """Share of the hot set's blocks that are found, and the stats at the end."""
    with TieredKVCache(
        [dram(SLOTS), Remote(key_tier, quota=quota, write="never")],
        layout=LAYOUT,
        namespace="quota",
        epoch=EPOCH,
        block_tokens=BLOCK_TOKENS,
        policy="lru",
    ) as cache:
        hot = [tokens_of(number, HOT_BLOCKS) for number in range(1, HOT + 1)]
        for tokens in hot:
            request(cache, tokens)
        rng, found, asked = random.Random(1), 0, 0
        for turn in range(QUEUED):
            if turn < queued:
                request(cache, tokens_of(1000 + turn, QUEUED_BLOCKS))
            for tokens in rng.sample(hot, 12):
                found += request(cache, tokens)
                asked += HOT_BLOCKS
        assert is_clean(cache)
        return found / asked, cache.stats().remote


def test_queued_remote_prompts_do_not_push_the_hot_set_out():
    assert HOT * HOT_BLOCKS == SLOTS * 8 // 10
    memory = MemoryKeyTier(QUEUED * QUEUED_BLOCKS)
    for turn in range(QUEUED):
        tokens = tokens_of(1000 + turn, QUEUED_BLOCKS)
        put_blocks(memory, tokens, payload(tokens), namespace="quota", epoch=EPOCH, block_tokens=BLOCK_TOKENS)
    slow = SlowKeyTier(memory, 0.002)
    alone, _ = hot_set_share(0.2, 0, slow)
    share, stats = hot_set_share(0.2, QUEUED, slow)
    without, _ = hot_set_share(1.0, QUEUED, slow)
    print(f"\nhot set found {alone:.4f} alone, {share:.4f} with the quota, {without:.4f} without it")
    assert share == pytest.approx(alone, abs=0.01)
    assert stats["fetched"] >= QUEUED * (SLOTS // 5) * 0.9, "the queued prompts did hit"
    assert stats["charged"]["dram"] <= stats["quota"]["dram"] == SLOTS // 5
    assert without < alone - 0.05, "without the quota the hot set suffers, or the test shows nothing"
