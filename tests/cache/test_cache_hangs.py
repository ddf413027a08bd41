"""Disks that hang, fail and come back: every call ends in time, no late byte lands anywhere, all is right later."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from cache_kit import (
    LAYOUT,
    WAIT_S,
    bits,
    blocks_of,
    eventually,
    is_clean,
    open_cache,
    prompt,
    read,
    store,
)

from tiercache.assembly import Seams
from tiercache.directory import StoreDirectory
from tiercache.errors import DirectoryInUseError
from tiercache.testing import FaultyTier, HangingTier

DEADLINE_S = 0.2
SLACK_S = 0.25
TOKENS = prompt(1, 2, 3)
DEADLINES = {"read_deadline_s": DEADLINE_S, "write_deadline_s": DEADLINE_S}


class Clock:
    """The cache's clock; the test can move it on."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead


@contextmanager
def in_time(seconds=DEADLINE_S, slack_s=SLACK_S):
    """The body takes no longer than a deadline, and a little."""
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    assert took < seconds + slack_s, f"it took {took:.3f} s"


def at_once():
    """The body waits for no disk; generous, for it is many calls on a machine that may be busy."""
    return in_time(0, slack_s=1.5)


def wrapped(tmp_path, kind, **settings):
    """A cache whose NVMe tier is wrapped, and the wrapper; reads and writes there have short deadlines."""
    made = []

    def wrap(tier):
        if not tier.verifies:
            return tier
        made.append(kind(tier))
        return made[0]

    settings.setdefault("nvme", {}).update({**DEADLINES, **settings["nvme"]})
    cache = open_cache(tmp_path, seams=Seams(wrap_tier=wrap), **settings)
    return cache, made[0]


def warm(tmp_path, *prompts, **settings):
    with open_cache(tmp_path, **settings) as cache:
        for tokens in prompts:
            while cache.lookup(tokens).blocks < len(tokens) // 4:
                there = cache.lookup(tokens).blocks
                cache.store(tokens, blocks_of(tokens, there), there).wait(WAIT_S)
                cache.flush(WAIT_S, to="nvme")


def test_a_read_that_hangs_is_a_miss_at_its_deadline_and_harmless_when_it_wakes(tmp_path):
    warm(tmp_path, TOKENS)
    cache, tier = wrapped(tmp_path, HangingTier)
    with cache:
        tier.hang("read")
        match = cache.lookup(TOKENS)
        out = np.full((3, *LAYOUT.block_shape), 7.0, dtype=np.float32)
        with in_time():
            future = cache.load(match, out=np.empty_like(out))
            into_out = cache.load(match, out=out)
            assert future.result(WAIT_S).block_count == 0
            assert into_out.result(WAIT_S).block_count == 0
        out[:] = 5.0  # free again at done()
        assert cache.check() == []
        lost = cache.stats().tiers
        assert (lost[0].lost, lost[1].overdue_jobs) == (3, 2)
        tier.unblock("read")
        with at_once():
            assert read(cache, TOKENS) == 3, "the others of the pool still serve"
        assert tier.hung == 2
        tier.wake()
        assert eventually(lambda: cache.stats().tiers[0].lost == 0)
        assert (out == 5.0).all(), "a late read wrote into out"
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)


def test_slots_of_a_hung_read_are_not_given_to_others(tmp_path):
    warm(tmp_path, TOKENS)
    cache, tier = wrapped(tmp_path, HangingTier, dram_slots=8)
    with cache:
        tier.hang("read")
        assert cache.load(cache.lookup(TOKENS)).result(WAIT_S).block_count == 0
        tier.unblock("read")
        assert cache.stats().tiers[0].lost == 3
        taken = [tokens for tokens in (prompt(part) for part in range(20, 36)) if store(cache, tokens).accepted]
        tier.wake()
        assert eventually(lambda: cache.stats().tiers[0].lost == 0)
        for tokens in taken:
            read(cache, tokens)
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)


def test_when_the_whole_pool_hangs_the_level_goes_offline_and_everything_else_goes_on(tmp_path):
    prompts = [prompt(part, part + 100) for part in range(1, 13)]
    warm(tmp_path, *prompts)
    clock = Clock()
    cache, tier = wrapped(tmp_path, HangingTier, clock=clock, exclusive=False)
    with cache:
        tier.hang("read")
        began = time.monotonic()
        futures = [cache.load(cache.lookup(tokens)) for tokens in prompts]
        results = [future.result(WAIT_S) for future in futures]
        waited = time.monotonic() - began
        assert [loaded.block_count for loaded in results] == [0] * 12
        assert waited < 2 * (DEADLINE_S + SLACK_S), waited
        assert cache.check() == []
        stats = cache.stats().tiers[1]
        assert not stats.online
        with at_once():
            for tokens in prompts:
                assert cache.lookup(tokens).blocks == 0
                assert cache.load(cache.lookup(tokens)).result(WAIT_S).block_count == 0
            for part in range(50, 60):
                assert store(cache, prompt(part)).accepted == 1
                assert read(cache, prompt(part)) == 1
            assert cache.flush(WAIT_S)
        tier.wake()
        assert eventually(lambda: cache.stats().tiers[0].lost == 0)
        clock.ahead += 60
        assert eventually(lambda: cache.lookup(prompts[0]).blocks == 2)
        for tokens in prompts:
            assert read(cache, tokens) == 2
        assert cache.stats().tiers[1].breaker == "closed"
        assert is_clean(cache)


def test_loads_that_wait_behind_a_hung_one_end_too(tmp_path):
    """More is asked for than credits allow: what waits in the planner must not wait for what hangs."""
    tokens = prompt(*range(1, 151))
    warm(tmp_path, tokens, dram_slots=512, nvme_slots=160)
    cache, tier = wrapped(tmp_path, HangingTier, dram_slots=512, nvme_slots=160)
    with cache:
        tier.hang("read")
        began = time.monotonic()
        futures = [cache.load(cache.lookup(tokens)) for _ in range(3)]
        out = np.empty((150, *LAYOUT.block_shape), dtype=np.float32)
        futures += [cache.load(cache.lookup(tokens), out=out) for _ in range(20)]
        for future in futures:
            with future.result(WAIT_S) as loaded:
                assert loaded.block_count == 0
        assert time.monotonic() - began < 4 * (DEADLINE_S + SLACK_S)
        assert cache.check() == []
        tier.wake()
        assert eventually(lambda: not any(each.lost for each in cache.stats().tiers))
        assert is_clean(cache)


def test_a_write_that_hangs_holds_its_source_too(tmp_path):
    cache, tier = wrapped(tmp_path, HangingTier, dram_slots=8)
    with cache:
        store(cache, TOKENS)
        tier.hang("write")
        with in_time():
            assert cache.flush(WAIT_S, to="nvme") is False
        assert cache.check() == []
        assert cache.stats().tiers[1].overdue_jobs >= 1
        assert cache.stats().tiers[1].lost >= 1
        with at_once():
            assert read(cache, TOKENS) == 3
        tier.unblock("write")
        for part in range(20, 40):
            store(cache, prompt(part))
            assert cache.check() == []
        tier.wake()
        assert eventually(lambda: cache.stats().tiers[1].lost == 0)
        assert cache.flush(WAIT_S, to="nvme")
        for tokens in (TOKENS, *(prompt(part) for part in range(20, 40))):
            read(cache, tokens)
        assert is_clean(cache)


@pytest.mark.parametrize("op", ["write", "sync", "read"])
def test_flush_and_close_end_in_time(tmp_path, op):
    warm(tmp_path, prompt(7, 8))
    cache, tier = wrapped(tmp_path, HangingTier, exclusive=False)
    store(cache, TOKENS)
    tier.hang(op)
    future = cache.load(cache.lookup(prompt(7, 8)))
    with in_time(0.3):
        cache.flush(0.3, to="nvme")
    began = time.monotonic()
    complete = cache.close(timeout=1.0)
    assert time.monotonic() - began < 1.0 + 1.0 + SLACK_S, "the last commit may take one second more"
    assert complete == (op == "read" and tier.hung == 0)
    with future.result(WAIT_S) as loaded:
        assert loaded.block_count == (0 if op == "read" else 2)
    if tier.hung:
        with pytest.raises(DirectoryInUseError):  # a thread may still write there
            StoreDirectory.open(tmp_path / "kv", wait_s=0.0)
    tier.wake()
    assert eventually(lambda: tier.hung == 0)
    with open_cache(tmp_path) as again:
        assert again.check() == []
        assert read(again, prompt(7, 8)) == 2
        assert read(again, TOKENS) == (3 if op == "read" else again.lookup(TOKENS).blocks)


def test_what_is_loaded_outlives_a_close_with_lost_jobs(tmp_path):
    warm(tmp_path, TOKENS)
    cache, tier = wrapped(tmp_path, HangingTier)
    store(cache, prompt(5, 6))
    loaded = cache.load(cache.lookup(prompt(5, 6))).result(WAIT_S)
    tier.hang("read")
    future = cache.load(cache.lookup(TOKENS))
    assert future.result(WAIT_S).block_count == 0
    with at_once():
        assert cache.close() is False, "close waits for a thread that nobody expects back"
    tier.wake()
    assert eventually(lambda: tier.hung == 0)
    assert bits(loaded.blocks) == bits(blocks_of(prompt(5, 6)))
    loaded.release()


# -- failing, not hanging ---------------------------------------------------------------------------------------------


def test_a_level_that_fails_goes_offline_and_comes_back(tmp_path):
    prompts = [prompt(part, part + 100) for part in range(1, 9)]
    warm(tmp_path, *prompts)
    clock = Clock()
    cache, tier = wrapped(tmp_path, FaultyTier, clock=clock)
    with cache:
        tier.fail_all("read")
        for tokens in prompts[:3]:
            assert cache.load(cache.lookup(tokens)).result(WAIT_S).block_count == 0
        stats = cache.stats().tiers[1]
        assert (stats.online, stats.breaker, stats.trips, stats.io_errors) == (False, "open", 1, 6)
        assert cache.lookup(prompts[5]).blocks == 0
        ticket = store(cache, prompt(50))
        assert ticket.accepted == 1
        assert cache.flush(0.1, to="nvme") is False
        clock.ahead += 2
        assert cache.lookup(prompts[5]).blocks == 2, "after the back-off one load may probe"
        assert cache.load(cache.lookup(prompts[5])).result(WAIT_S).block_count == 0
        assert cache.lookup(prompts[6]).blocks == 0
        tier.heal()
        assert cache.lookup(prompts[6]).blocks == 0, "the back-off grows"
        clock.ahead += 60
        assert read(cache, prompts[6]) == 2
        assert cache.stats().tiers[1].breaker == "closed"
        assert cache.check() == []
        for tokens in prompts[:3]:  # found unreadable, so stored again
            assert store(cache, tokens).accepted == 2
        for tokens in prompts:
            read(cache, tokens)
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        for tokens in (*prompts[:3], prompts[4], *prompts[6:]):
            assert read(cache, tokens) == 2


def test_a_flush_does_not_wait_for_a_level_that_is_offline(tmp_path):
    now = [1000.0]
    cache, tier = wrapped(tmp_path, FaultyTier, clock=lambda: now[0])  # so the back-off does not end by itself

    def come_back():
        tier.heal()
        now[0] += 60

    with cache:
        store(cache, TOKENS)
        tier.fail_all("write")
        while cache.stats().tiers[1].online:
            assert cache.flush(WAIT_S, to="nvme") is False
        late = threading.Timer(3.0, come_back)  # ends a flush that does not end by itself
        late.start()
        assert cache.flush(to="nvme") is False
        late.cancel()
        come_back()
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)


@pytest.mark.parametrize("nth", range(1, 7))
def test_any_write_may_fail(tmp_path, nth):
    """Fail the k-th write: nothing stays pinned, nothing wrong is found, the next flush writes it."""
    prompts = [prompt(1, 2, 3), prompt(1, 2, 4), prompt(5, 6)]
    cache, tier = wrapped(tmp_path, FaultyTier, nvme={"write_after_s": 0.0})
    with cache:
        tier.fail_at("write", nth)
        for tokens in prompts:
            store(cache, tokens)
            cache.flush(WAIT_S)
            assert cache.check() == []
        cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
        for tokens in prompts:
            assert read(cache, tokens) == len(tokens) // 4
        assert cache.flush(WAIT_S, to="nvme")
        image = cache.stats().tiers[1]
        assert image.held == 6
    with open_cache(tmp_path) as cache:
        for tokens in prompts:
            assert read(cache, tokens) == len(tokens) // 4


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_tier_that_raises_is_counted_and_survived(tmp_path, op, caplog):
    warm(tmp_path, TOKENS)
    cache, tier = wrapped(tmp_path, FaultyTier)
    with cache:
        tier.raise_at(op, 1, RuntimeError("a bug in a tier"))
        store(cache, prompt(8, 9))
        with cache.load(cache.lookup(TOKENS)).result(WAIT_S) as loaded:
            assert loaded.block_count == (0 if op == "read" else 3)
        cache.flush(WAIT_S, to="nvme")
        assert cache.stats().mover["unexpected_errors"] == 1
        assert "a bug in a tier" in caplog.text
        assert read(cache, prompt(8, 9)) == 2
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)


def test_failed_blocks_shorten_a_load_and_only_they_are_lost(tmp_path):
    tokens = prompt(*range(1, 9))
    warm(tmp_path, tokens)
    cache, tier = wrapped(tmp_path, FaultyTier)
    with cache:
        tier.fail_slots("read", [5])
        with cache.load(cache.lookup(tokens)).result(WAIT_S) as loaded:
            assert loaded.block_count == 5
            assert bits(loaded.blocks) == bits(blocks_of(tokens)[:5])
        match = cache.lookup(tokens)
        assert (match.blocks, match.pending, match.diverged_at) == (5, 0, None)
        ticket = cache.store(tokens, blocks_of(tokens, match.blocks), start=match.blocks)
        assert ticket.wait(WAIT_S)
        assert (ticket.accepted, ticket.present) == (1, 2), "only the hole is filled"
        tier.heal()
        assert read(cache, tokens) == 8
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        assert read(cache, tokens) == 8
