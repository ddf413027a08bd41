"""Load or recompute: what a lookup offers where it knows how fast a prefill is; and prefetch while a request waits."""

import asyncio
import math
import threading
import time

import numpy as np
import pytest
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    WAIT_S,
    HeldDelivery,
    bits,
    blocks_of,
    eventually,
    failed,
    is_clean,
    open_cache,
    prompt,
    store,
)

from tiercache import ConfigError, TieredKVCache
from tiercache.assembly import Seams
from tiercache.prefill import Prefill
from tiercache.testing import DelayingTier, HangingTier

TOKENS = prompt(1, 2, 3, 4, 5, 6, 7, 8)
N = 8
SLOW_S = 0.2
FAST_GPU = 1e6
"""Tokens per second: all of TOKENS in 32 us."""
SLOW_GPU = 10.0
"""All of TOKENS in 3.2 s."""


def delayed(seconds=SLOW_S):
    """Every read from NVMe takes so long."""
    wait = lambda op, slots: seconds if op == "read" else 0.0  # noqa: E731
    return Seams(wrap_tier=lambda tier: DelayingTier(tier, wait) if tier.name == "nvme" else tier)


def warm(path, **more):
    """A cache that finds TOKENS on NVMe at its start."""
    with open_cache(path) as cache:
        store(cache, TOKENS)
    return open_cache(path, **more)


def read_nbytes(cache, level=1):
    return cache.stack.mover.stats().levels[level].bytes_read


# --- load or recompute -----------------------------------------------------------------------------------------------


def test_a_slow_tier_is_withheld_from_a_fast_gpu_and_offered_to_a_slow_one(tmp_path):
    with warm(tmp_path, prefill_tokens_per_s=FAST_GPU, seams=delayed()) as cache:
        assert eventually(lambda: cache.stack.planner.state.costs[1].jobs == 1), "the probe of the start"
        fast = cache.lookup(TOKENS)
        assert (fast.blocks, fast.tokens, fast.withheld, fast.estimated_load_s, fast.pending) == (0, 0, N, 0.0, 0)
        assert fast.by_tier == {"dram": 0, "nvme": 0} and fast.diverged_at is None
        slow = cache.lookup(TOKENS, prefill_tokens_per_s=SLOW_GPU)
        assert (slow.blocks, slow.withheld) == (N, 0)
        assert SLOW_S * 0.7 < slow.estimated_load_s < SLOW_S * 2
        assert cache.lookup(TOKENS, prefill_tokens_per_s=None).blocks == N, "None: everything"
        assert cache.stats().totals["blocks_withheld"] == N
        with cache.load(fast).result(WAIT_S) as loaded:
            assert loaded.block_count == 0
        with cache.load(slow).result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        assert cache.lookup(TOKENS).by_tier == {"dram": 0, "nvme": 0}, "a microsecond a block is less than a copy"
        assert cache.lookup(TOKENS, prefill_tokens_per_s=1000.0).by_tier == {"dram": N, "nvme": 0}
        assert is_clean(cache)


def test_without_a_speed_nothing_is_withheld_and_nothing_is_probed(tmp_path):
    with warm(tmp_path, seams=delayed()) as cache:
        match = cache.lookup(TOKENS)
        assert (match.blocks, match.withheld) == (N, 0) and match.estimated_load_s > 0
        assert cache.stats().totals["probes"] == 0 and read_nbytes(cache) == 0


def test_a_start_with_blocks_on_disk_measures_it_and_delays_nobody(tmp_path):
    with warm(tmp_path, prefill_tokens_per_s=100.0) as cache:
        costs = cache.stack.planner.state.costs
        assert eventually(lambda: costs[1].jobs == 1)
        assert cache.stats().totals["probes"] == 1
        assert read_nbytes(cache) == 4 * LAYOUT.block_nbytes, "a sixteenth of its slots"
        store(cache, prompt(50, 51))
        assert eventually(lambda: costs[0].jobs == 1), "memory, once it holds blocks"
        assert is_clean(cache)


def test_a_probe_gives_up_what_it_could_not_begin_in_time(tmp_path):
    with open_cache(tmp_path, dram_slots=600, nvme_slots=2560, nvme={"threads": 2}) as cache:
        for i in range(10):
            store(cache, np.arange(100 + 20 * i, 116 + 20 * i).repeat(BLOCK_TOKENS))
    more = {"nvme": {"threads": 2}, "prefill_tokens_per_s": 100.0, "seams": delayed(0.06)}
    with open_cache(tmp_path, dram_slots=600, nvme_slots=2560, **more) as cache:
        costs = cache.stack.planner.state.costs
        assert eventually(lambda: costs[1].jobs == 1)
        assert 0 < read_nbytes(cache) < 160 * LAYOUT.block_nbytes
        assert is_clean(cache) and cache.stats().tiers[1].breaker == "closed"


def test_a_probe_that_hangs_holds_nobody_up(tmp_path):
    tiers = []

    def wrap(tier):
        if tier.name == "nvme":
            tier = HangingTier(tier)
            tier.hang("read")
            tiers.append(tier)
        return tier

    more = {"nvme": {"read_deadline_s": 1.0}, "prefill_tokens_per_s": 100.0, "seams": Seams(wrap_tier=wrap)}
    with warm(tmp_path, **more) as cache:
        assert tiers[0].wait_hung()
        began = time.monotonic()
        assert cache.lookup(TOKENS).blocks == N and store(cache, prompt(50)).accepted == 1 and cache.flush(WAIT_S)
        assert time.monotonic() - began < 1.0, "no verb waits for a probe, and none for its deadline"
        assert eventually(lambda: cache.stats().tiers[1].overdue_jobs == 1)
        tiers[0].wake()
        assert is_clean(cache) and cache.lookup(TOKENS).blocks == N


def test_the_learnt_speed(tmp_path):
    with warm(tmp_path, seams=delayed()) as cache:
        assert cache.lookup(TOKENS, prefill_tokens_per_s="learnt").blocks == N, "nothing was noted yet"
        assert eventually(lambda: cache.stack.planner.state.credits[1].jobs == 0)
        cache.note_prefill(100_000, 0.1)
        assert cache.lookup(TOKENS, prefill_tokens_per_s="learnt").withheld == N
        assert cache.lookup(TOKENS).withheld == 0, "it only counts where it is asked for"
    with open_cache(tmp_path, prefill_tokens_per_s="learnt", seams=delayed()) as cache:
        assert eventually(lambda: cache.stack.planner.state.costs[1].jobs == 1)
        cache.note_prefill(100_000, 0.1)
        assert cache.lookup(TOKENS).withheld == N
        assert asyncio.run(cache.alookup(TOKENS, prefill_tokens_per_s=None)).withheld == 0


def test_prefill_speed_is_an_average_that_short_prefills_hardly_move():
    prefill = Prefill("learnt")
    prefill.note(10_000, 1.0)
    assert prefill.learnt == 10_000
    prefill.note(16, 1.0)
    assert prefill.learnt == pytest.approx(10_000, rel=0.01)
    prefill.note(10**9, 1e9 / 80_000)
    assert prefill.learnt == pytest.approx(10_000 * 8**0.25, rel=0.01), "a quarter at most"
    for _ in range(40):
        prefill.note(8192, 8192 / 2_000)
    assert prefill.learnt == pytest.approx(2_000, rel=0.05)


def test_what_is_no_speed_or_no_prefill_is_refused(tmp_path):
    with open_cache(tmp_path) as cache:
        for wrong in (0, -1.0, math.inf, math.nan, "fast", True, [1]):
            with pytest.raises(ValueError, match="tokens per second above 0"):
                cache.lookup(TOKENS, prefill_tokens_per_s=wrong)
        for tokens, seconds in ((0, 1.0), (True, 1.0), (1.5, 1.0), ("4", 1.0), (4, 0.0), (4, math.nan), (4, math.inf)):
            with pytest.raises(ValueError, match=r"tokens|seconds"):
                cache.note_prefill(tokens, seconds)
        cache.note_prefill(np.int64(4), np.float32(0.5))
    for wrong in (0, math.nan, "default", True):
        with pytest.raises(ConfigError, match=r"prefill_tokens_per_s = .*tokens per second above 0"):
            TieredKVCache(["dram:1MiB"], prefill_tokens_per_s=wrong)
    with TieredKVCache.from_config({"tiers": ["dram:1MiB"], "prefill_tokens_per_s": 12_000}) as cache:
        assert cache.settings.prefill_tokens_per_s == 12_000


# --- prefetch --------------------------------------------------------------------------------------------------------


def test_a_load_while_its_prefetch_is_under_way_joins_it(tmp_path):
    with warm(tmp_path, seams=delayed()) as cache:
        match = cache.lookup(TOKENS)
        waiting = cache.prefetch(match)
        future = cache.load(match)
        assert not waiting.done() and not future.done()
        with future.result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        assert waiting.result(WAIT_S).block_count == N
        assert read_nbytes(cache) == N * LAYOUT.block_nbytes, "each byte once"
        assert is_clean(cache)


def test_a_load_into_own_rows_while_its_prefetch_is_under_way_joins_it_too(tmp_path):
    with warm(tmp_path, seams=delayed()) as cache:
        match, out = cache.lookup(TOKENS), np.zeros((N, 2, 32), np.float32)
        waiting = cache.prefetch(match)
        future = cache.load(match, out=out)
        with future.result(WAIT_S) as loaded:
            assert loaded.block_count == N and waiting.done()
        assert bits(out) == bits(blocks_of(TOKENS))
        assert [read_nbytes(cache, level) for level in (0, 1)] == [N * LAYOUT.block_nbytes] * 2, "each byte once"
        assert is_clean(cache)


def test_a_load_into_own_rows_whose_prefetch_fails_is_shortened(tmp_path):
    held = HeldDelivery(holding=False)
    with warm(tmp_path, delivery=held) as cache:
        match, out = cache.lookup(TOKENS), np.zeros((N, 2, 32), np.float32)
        held.holding = True
        waiting, future = cache.prefetch(match), cache.load(match, out=out)
        held.deliver(change=failed)
        assert waiting.result(WAIT_S).block_count == 0 and future.result(WAIT_S).block_count == 0
        held.let_go()
        assert is_clean(cache)


def test_a_load_into_own_rows_whose_prefetch_hangs_ends_at_its_deadline(tmp_path):
    tiers = []

    def wrap(tier):
        return tiers.append(HangingTier(tier)) or tiers[0] if tier.name == "nvme" else tier

    with warm(tmp_path, nvme={"read_deadline_s": 0.3}, seams=Seams(wrap_tier=wrap)) as cache:
        match, out = cache.lookup(TOKENS), np.zeros((N, 2, 32), np.float32)
        tiers[0].hang("read")
        waiting, future = cache.prefetch(match), cache.load(match, out=out)
        assert waiting.result(WAIT_S).block_count == 0 and future.result(WAIT_S).block_count == 0
        tiers[0].wake()
        assert is_clean(cache)
        assert cache.load(cache.lookup(TOKENS), out=out).result(WAIT_S).block_count == N
        assert bits(out) == bits(blocks_of(TOKENS))


def test_an_invalidation_while_a_load_waits_for_a_prefetch(tmp_path):
    held = HeldDelivery(holding=False)
    with warm(tmp_path, delivery=held) as cache:
        match, out = cache.lookup(TOKENS), np.zeros((N, 2, 32), np.float32)
        held.holding = True
        waiting, future = cache.prefetch(match), cache.load(match, out=out)
        cache.invalidate(TOKENS[: 3 * BLOCK_TOKENS])
        assert cache.check() == []
        held.let_go()
        assert waiting.result(WAIT_S).block_count == 2
        assert future.result(WAIT_S).block_count <= 2
        assert is_clean(cache)


def test_a_new_epoch_ends_a_load_that_waits_for_a_prefetch(tmp_path):
    with warm(tmp_path, seams=delayed()) as cache:
        match, out = cache.lookup(TOKENS), np.zeros((N, 2, 32), np.float32)
        waiting, future = cache.prefetch(match), cache.load(match, out=out)
        cache.bump_epoch()
        assert waiting.result(WAIT_S).block_count == 0 and future.result(WAIT_S).block_count == 0
        assert is_clean(cache)


def test_a_load_after_its_prefetch_finds_all_in_the_fastest_tier_and_is_one_use(tmp_path):
    with warm(tmp_path, seams=delayed(0.05)) as cache:
        match = cache.lookup(TOKENS)
        uses = lambda: [n.uses.tolist() for n in cache.stack.planner.state.residency.index.nodes.values()]  # noqa: E731
        before = uses()
        assert cache.prefetch(match).result(WAIT_S).block_count == N
        after = uses()
        assert after == [[each + 1 for each in row] for row in before]
        assert not any(tier.pinned for tier in cache.stats().tiers), "nothing is held"
        for i in range(20):  # others come and go; there is room for them
            store(cache, prompt(100 + i))
        with cache.load(match).result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        assert uses()[: len(after)] == after, "the load is no second use"
        assert [tier.hits for tier in cache.stats().tiers] == [N, N]
        assert read_nbytes(cache) == N * LAYOUT.block_nbytes
        assert is_clean(cache)


def test_a_prefetch_of_which_only_a_part_can_come(tmp_path):
    with warm(tmp_path, dram_slots=8, nvme={"write_after_s": None}) as cache:
        match = cache.lookup(TOKENS)
        assert cache.prefetch(match).result(WAIT_S).block_count == 4, "half of the tier may be held at a time"
        assert cache.lookup(TOKENS).by_tier == {"dram": 4, "nvme": 4}
        future = cache.prefetch(cache.lookup(TOKENS))
        assert future.result(WAIT_S).block_count == 4
        cache.invalidate(TOKENS[: 6 * BLOCK_TOKENS])
        assert cache.prefetch(match).result(WAIT_S).block_count <= 5, "what is gone is not brought"
        assert is_clean(cache)


def test_prefetches_beyond_the_queue_are_counted_and_come_back_empty(tmp_path):
    held = HeldDelivery(holding=False)
    prompts = [prompt(*range(10 * i + 1, 10 * i + 3)) for i in range(6)]
    with open_cache(tmp_path) as cache:
        for each in prompts:
            store(cache, each)
    with open_cache(tmp_path, delivery=held) as cache:
        state = cache.stack.planner.state
        object.__setattr__(state.limits, "queued_loads", 2)
        object.__setattr__(state.limits, "jobs", 1)
        held.holding = True
        futures = [cache.prefetch(cache.lookup(each)) for each in prompts]
        refused = [future for future in futures if future.done()]
        assert len(refused) == 3 and all(future.result(0).block_count == 0 for future in refused)
        assert cache.stats().totals["loads_refused"] == 3
        held.let_go()
        assert [future.result(WAIT_S).block_count for future in futures] == [2, 2, 2, 0, 0, 0]
        assert is_clean(cache)


def test_many_requests_that_wait_share_one_read(tmp_path):
    with warm(tmp_path, seams=delayed(0.1)) as cache:
        match = cache.lookup(TOKENS)
        futures, lock = [], threading.Lock()

        def ask(i):
            future = cache.prefetch(match) if i % 2 else cache.load(match)
            with lock:
                futures.append(future)

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for future in futures:
            future.result(WAIT_S).release()
        assert read_nbytes(cache) == N * LAYOUT.block_nbytes
        assert is_clean(cache)
