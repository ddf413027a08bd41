"""Orders that random search does not find: the mover's messages take effect when the test says so."""

import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from cache_kit import (
    LAYOUT,
    WAIT_S,
    HeldDelivery,
    bits,
    blocks_of,
    failed,
    is_clean,
    open_cache,
    prompt,
    read,
    store,
)

from tiercache.assembly import Seams
from tiercache.testing import FaultyTier, HangingTier

TOKENS = prompt(1, 2, 3)


def warm(tmp_path, *prompts, **settings):
    """A directory that holds these prompts."""
    with open_cache(tmp_path, **settings) as cache:
        for tokens in prompts:
            assert store(cache, tokens).reason == ""
            assert cache.flush(WAIT_S, to="nvme")


def test_a_second_load_of_blocks_that_are_coming_joins_the_first(tmp_path):
    warm(tmp_path, TOKENS)
    delivery = HeldDelivery()
    with open_cache(tmp_path, delivery=delivery) as cache:
        first = cache.load(cache.lookup(TOKENS))
        second = cache.load(cache.lookup(TOKENS[:8]))
        out = np.zeros((3, *LAYOUT.block_shape), dtype=np.float32)
        third = cache.load(cache.lookup(TOKENS), out=out)
        assert len(delivery.jobs("load")) == 1, "one for all; into out comes what has come to memory"
        assert not (first.done() or second.done() or third.done())
        assert cache.check() == []
        delivery.let_go()
        with first.result(WAIT_S) as a:
            assert bits(a.blocks) == bits(blocks_of(TOKENS))
            second.result(WAIT_S).release()
            assert bits(a.blocks) == bits(blocks_of(TOKENS)), "the second release let go of the first's blocks"
        assert third.result(WAIT_S).block_count == 3
        assert bits(out) == bits(blocks_of(TOKENS))
        assert is_clean(cache)


def test_when_the_joined_copy_fails_both_loads_end_with_what_there_is(tmp_path):
    warm(tmp_path, TOKENS)
    delivery = HeldDelivery()
    with open_cache(tmp_path, delivery=delivery) as cache:
        first = cache.load(cache.lookup(TOKENS))
        second = cache.load(cache.lookup(TOKENS[:8]))
        delivery.deliver(1, failed)
        assert first.result(WAIT_S).block_count == second.result(WAIT_S).block_count == 0
        delivery.let_go()
        assert cache.lookup(TOKENS).blocks == 0, "they were found wrong"
        assert store(cache, TOKENS).accepted == 3
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)


def test_a_load_that_is_done_before_the_call_returns_is_completed_once(tmp_path):
    warm(tmp_path, TOKENS)
    with open_cache(tmp_path) as cache:
        link, planning = cache._link, cache._link.planning

        @contextmanager
        def slow_to_return():
            with planning() as stack:
                yield stack
            time.sleep(0.05)

        link.planning = slow_to_return
        out = np.zeros((3, *LAYOUT.block_shape), dtype=np.float32)
        for into in (None, out, None):
            with cache.load(cache.lookup(TOKENS), out=into).result(WAIT_S) as loaded:
                assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        link.planning = planning
        assert is_clean(cache)


def test_release_while_a_load_is_under_way(tmp_path):
    warm(tmp_path, TOKENS)
    delivery = HeldDelivery()
    with open_cache(tmp_path, dram_slots=6, delivery=delivery) as cache:
        future = cache.load(cache.lookup(TOKENS))
        assert cache.release(TOKENS) == 3
        delivery.holding = False
        for part in range(10, 20):
            store(cache, prompt(part))
            assert cache.check() == []
        delivery.let_go()
        with future.result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        assert is_clean(cache)


def test_a_block_held_by_a_load_while_it_is_being_demoted(tmp_path):
    delivery = HeldDelivery(holding=False)
    with open_cache(tmp_path, dram_slots=6, delivery=delivery) as cache:
        store(cache, TOKENS)
        delivery.holding = True
        flusher = threading.Thread(target=cache.flush, args=(WAIT_S, "nvme"))
        flusher.start()
        delivery.wait(1)
        assert [job.n for job in delivery.jobs("write")] == [3]
        loaded = cache.load(cache.lookup(TOKENS)).result(WAIT_S)
        assert loaded.block_count == 3
        delivery.let_go()
        flusher.join(WAIT_S)
        for part in range(10, 30):
            store(cache, prompt(part))
            assert cache.check() == []
        assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        loaded.release()
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)


def test_a_demotion_that_fails_loses_nothing(tmp_path):
    delivery = HeldDelivery(holding=False)
    with open_cache(tmp_path, delivery=delivery) as cache:
        store(cache, TOKENS)
        delivery.holding = True
        outcomes = []
        flusher = threading.Thread(target=lambda: outcomes.append(cache.flush(WAIT_S, to="nvme")))
        flusher.start()
        delivery.deliver(1, failed)
        delivery.let_go()
        flusher.join(WAIT_S)
        assert outcomes == [False], "a flush acknowledged what was not written"
        assert read(cache, TOKENS) == 3
        assert cache.stats().tiers[1].failed_writes == 3
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == 3


def test_a_store_whose_parent_was_evicted_since_the_lookup():
    with open_cache(None, dram_slots=2) as cache:
        store(cache, prompt(1))
        match = cache.lookup(prompt(1, 9))
        assert match.blocks == 1
        store(cache, prompt(2))
        store(cache, prompt(3))
        assert cache.lookup(prompt(1)).blocks == 0
        tokens = prompt(1, 9)
        ticket = cache.store(tokens, blocks_of(tokens, 1), start=match.blocks)
        assert (ticket.accepted, ticket.present, ticket.reason, ticket.copied) == (0, 0, "parent_missing", True)
        assert is_clean(cache)


def test_a_store_under_a_parent_that_is_being_demoted_and_then_evicted(tmp_path):
    delivery = HeldDelivery(holding=False)
    tokens = prompt(1, 2, 3)
    with open_cache(tmp_path, dram_slots=3, exclusive=False, delivery=delivery) as cache:
        store(cache, tokens[:8])
        delivery.holding = True
        flusher = threading.Thread(target=cache.flush, args=(WAIT_S, "nvme"))
        flusher.start()
        delivery.wait(1)
        ticket = cache.store(tokens, blocks_of(tokens, 2), start=2)
        assert (ticket.accepted, ticket.reason) == (1, "")
        assert cache.check() == []
        delivery.let_go()
        flusher.join(WAIT_S)
        assert ticket.wait(WAIT_S)
        for part in (7, 8, 9, 10):
            store(cache, prompt(part))
            assert cache.flush(WAIT_S)
        match = cache.lookup(tokens)
        assert match.blocks == 3
        assert match.by_tier["nvme"] >= 1
        out = np.zeros((3, *LAYOUT.block_shape), dtype=np.float32)
        assert cache.load(match, out=out).result(WAIT_S).block_count == 3
        assert bits(out) == bits(blocks_of(tokens))
        assert is_clean(cache)


@pytest.mark.parametrize("ok", [True, False])
def test_a_split_under_running_jobs(tmp_path, ok):
    long = prompt(1, 2, 3, 4, 5, 6)
    branch = prompt(1, 2, 3, 9, 8)
    delivery = HeldDelivery(holding=False)
    with open_cache(tmp_path, delivery=delivery) as cache:
        store(cache, long)
        delivery.holding = True
        flusher = threading.Thread(target=cache.flush, args=(WAIT_S, "nvme"))
        flusher.start()
        delivery.wait(1)
        ticket = cache.store(branch, blocks_of(branch, 3), start=3)
        assert ticket.accepted == 2
        assert cache.stats().nodes == 3
        assert cache.check() == []
        delivery.deliver(1, (lambda message: message) if ok else failed)
        assert cache.check() == []
        delivery.let_go()
        flusher.join(WAIT_S)
        assert ticket.wait(WAIT_S)
        assert read(cache, long) == 6
        assert read(cache, branch) == 5
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        assert read(cache, long) == 6
        assert read(cache, branch) == 5
        assert is_clean(cache)


def test_a_split_under_a_running_load(tmp_path):
    long = prompt(1, 2, 3, 4, 5, 6)
    branch = prompt(1, 2, 9)
    warm(tmp_path, long)
    delivery = HeldDelivery()
    with open_cache(tmp_path, delivery=delivery) as cache:
        future = cache.load(cache.lookup(long))
        ticket = cache.store(branch, blocks_of(branch, 2), start=2)
        assert ticket.accepted == 1
        assert cache.check() == []
        delivery.let_go()
        with future.result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(long))
        assert ticket.wait(WAIT_S)
        assert read(cache, branch) == 3
        assert is_clean(cache)


def test_a_full_queue_of_loads_while_results_come_in(tmp_path):
    """64 jobs run, 256 loads wait, the rest is told at once that it gets nothing."""
    prompts = [prompt(part) for part in range(1, 401)]
    with open_cache(tmp_path, dram_slots=1024, nvme_slots=1024) as cache:
        for tokens in prompts:
            assert cache.store(tokens, blocks_of(tokens)).wait(WAIT_S), "at most 64 jobs are under way"
        assert cache.flush(WAIT_S, to="nvme")
        assert cache.stats().tiers[1].held == 400
    delivery = HeldDelivery()
    with open_cache(tmp_path, dram_slots=1024, nvme_slots=1024, delivery=delivery) as cache:
        futures = [cache.load(cache.lookup(tokens)) for tokens in prompts]
        assert len(delivery.jobs("load")) == 64
        refused = [future for future in futures if future.done()]
        assert len(refused) == 400 - 64 - 256
        assert cache.stats().totals["loads_refused"] == len(refused)
        assert cache.check() == []
        stored = prompt(1000)
        ticket = cache.store(stored, blocks_of(stored))
        assert ticket.accepted == 1, "loads that wait leave stores alone"
        delivery.deliver(3)
        assert cache.check() == []
        assert len(delivery.jobs("load")) >= 66, "a result lets the next load go"
        delivery.let_go()
        for tokens, future in zip(prompts, futures, strict=True):
            with future.result(WAIT_S) as loaded:
                assert loaded.block_count == (0 if future in refused else 1)
                assert bits(loaded.blocks) == bits(blocks_of(tokens)[: loaded.block_count])
        assert ticket.wait(WAIT_S)
        assert is_clean(cache)


def test_a_store_when_too_much_is_on_its_way():
    delivery = HeldDelivery()
    with open_cache(None, dram_slots=256, delivery=delivery) as cache:
        tickets, taken = [], 0
        for part in range(1, 30):
            tokens = prompt(*range(part * 100, part * 100 + 8))
            tickets.append((tokens, cache.store(tokens, blocks_of(tokens))))
            taken += tickets[-1][1].accepted
        assert taken == 64, "a quarter of the level may be on its way"
        assert tickets[-1][1].reason == "queue_full"
        assert cache.stats().totals["stores_cut"]["queue_full"] == 29 - 8
        delivery.let_go()
        for tokens, ticket in tickets:
            assert ticket.wait(WAIT_S)
            assert read(cache, tokens) == ticket.accepted
        assert is_clean(cache)


def test_a_callback_stores_and_looks_up_while_the_planner_commits(tmp_path):
    """Futures complete one after the other, each callback calls back into the cache; nothing deadlocks."""
    prompts = [prompt(part, part + 100) for part in range(1, 21)]
    warm(tmp_path, *prompts)
    with open_cache(tmp_path, dram_slots=64) as cache:
        problems, remaining = [], threading.Semaphore(0)

        def callback(future, tokens):
            with future.result() as loaded:
                if bits(loaded.blocks) != bits(blocks_of(tokens)[: loaded.block_count]):
                    problems.append(tokens)
                longer = np.append(tokens, prompt(7)).astype(np.int32)
                if loaded.block_count == 2:
                    cache.store(longer, blocks_of(longer, 2), start=2)
                cache.lookup(longer)
                cache.touch(cache.lookup(tokens))
                cache.release(longer)
            remaining.release()

        for tokens in prompts:
            future = cache.load(cache.lookup(tokens))
            future.add_done_callback(lambda each, tokens=tokens: callback(each, tokens))
        for _ in prompts:
            assert remaining.acquire(timeout=WAIT_S)
        assert problems == []
        assert cache.flush(WAIT_S)
        assert is_clean(cache)
        assert cache.stats().mover["delivery_errors"] == 0


def test_lost_claims_take_the_copy_below_away_and_nothing_else(tmp_path):
    """The parent's write fails while its child's succeeds: the child is no orphan on NVMe."""
    walls = []

    def wrap(tier):
        if not tier.verifies:
            return tier
        walls.append(FaultyTier(tier))
        return walls[0]

    with open_cache(tmp_path, seams=Seams(wrap_tier=wrap)) as cache:
        store(cache, TOKENS)
        walls[0].fail_slots("write", [0])
        assert cache.flush(WAIT_S, to="nvme") is False
        assert cache.check() == []
        assert read(cache, TOKENS) == 3
        walls[0].heal()
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == 3


def test_a_slow_write_does_not_hold_up_lookups_and_stores(tmp_path):
    walls = []

    def wrap(tier):
        walls.append(HangingTier(tier, max_s=WAIT_S))
        return walls[-1] if tier.verifies else tier

    with open_cache(tmp_path, dram_slots=16, seams=Seams(wrap_tier=wrap)) as cache:
        walls[-1].hang("write", "sync")
        store(cache, TOKENS)
        assert cache.flush(0.05, to="nvme") is False
        for part in range(20, 30):
            assert store(cache, prompt(part)).accepted == 1
            assert cache.lookup(TOKENS).blocks == 3
        walls[-1].wake()
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
