"""Writes to a key tier through a whole cache: what one stored another finds, and no trouble there is anybody's wait."""

import threading
import time

import numpy as np
import pytest
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    WAIT_S,
    Clock,
    bits,
    blocks_of,
    dram,
    eventually,
    is_clean,
    nvme,
    prompt,
    read,
    store,
)

from tiercache import COLD, HBM, Remote, TieredKVCache
from tiercache.errors import ConfigError
from tiercache.testing import FaultyKeyTier, HangingKeyTier, MemoryKeyTier, SlowKeyTier, WrappedKeyTier

EPOCH = b"weights-1"
TOKENS = prompt(*range(1, 13))
N = 12
SLOT = 4096


def open_cache(tier, path=None, dram_slots=64, hbm_slots=0, standing=False, **remote):
    tiers = [HBM(hbm_slots * SLOT, "cpu")] if hbm_slots else []
    tiers += [dram(dram_slots), Remote(tier, **{"quota": 0.5, "write_deadline_s": 5.0, **remote})]
    if path is not None:
        tiers.append(nvme(path, 64))
    return TieredKVCache(
        tiers,
        layout=LAYOUT,
        namespace="test",
        epoch=EPOCH,
        block_tokens=BLOCK_TOKENS,
        clock=Clock(standing),
        switch="on",
    )


def remote(cache):
    return cache.stats().remote


def written(cache, blocks=N):
    """Wait until so many blocks were written."""
    assert eventually(lambda: remote(cache)["written"] >= blocks), remote(cache)
    return remote(cache)


def idle(cache):
    assert eventually(lambda: cache.stack.planner.remote_writes.is_idle)
    return remote(cache)


@pytest.fixture
def memory():
    return MemoryKeyTier(1000)


# --- what one stored, another finds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("hbm_slots", [0, 64], ids=["dram", "hbm"])
def test_what_one_cache_stored_is_a_hit_on_another(memory, hbm_slots):
    with open_cache(memory, hbm_slots=hbm_slots) as first, open_cache(memory, hbm_slots=hbm_slots) as second:
        store(first, TOKENS)
        stats = written(first)
        assert (stats["writes"], stats["write_blocks_queued"], stats["writes_dropped"]) == (1, N, {})
        match = second.lookup(TOKENS, deadline_s=WAIT_S)
        assert match.by_tier["remote"] == N
        with second.load(match).result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        assert idle(second)["writes"] == 0, "what came from there is not written back"
        assert is_clean(first) and is_clean(second)


def test_what_was_computed_under_a_fetched_prefix_is_written_too(memory):
    longer = np.concatenate([TOKENS, prompt(50, 51)])
    with open_cache(memory) as first, open_cache(memory) as second:
        store(first, TOKENS)
        written(first)
        with second.load(second.lookup(longer, deadline_s=WAIT_S)).result(WAIT_S):
            ticket = second.store(longer, blocks_of(longer)[N:], N)
            assert ticket.wait(WAIT_S) and ticket.accepted == 2
        assert written(second, 2)["write_blocks_queued"] == 2
        first._link.clock.ahead += 3
        assert first.lookup(longer, deadline_s=WAIT_S).by_tier == {"dram": N, "remote": 2}
        assert read(first, longer) == N + 2


def test_partial_blocks_and_those_with_an_end_are_not_written(memory, tmp_path):
    other, third = prompt(30, 31), prompt(40, 41)
    with open_cache(memory, tmp_path) as cache:
        tokens = TOKENS[:-1]
        assert cache.store(tokens, blocks_of(TOKENS), partial_tail=True).wait(WAIT_S)
        assert cache.store(other, blocks_of(other), ttl_s=100.0).wait(WAIT_S)
        assert cache.store(third, blocks_of(third), priority=COLD).wait(WAIT_S)
        assert idle(cache)["written"] == N - 1 == len(memory)


def test_nothing_is_written_where_that_is_not_asked_for(memory):
    with open_cache(memory, write="never") as cache:
        store(cache, TOKENS)
        assert idle(cache)["write_blocks_queued"] == 0 and not memory.calls["put"]


def test_the_coldest_blocks_are_written_before_they_leave_memory(memory):
    with open_cache(memory, write="eviction", dram_slots=32) as cache:
        store(cache, TOKENS)
        assert idle(cache)["written"] == 0, "there is room still"
        for number in range(100, 110):
            store(cache, prompt(*range(number * 10, number * 10 + 6)))
            idle(cache)
        stats = remote(cache)
        assert cache.lookup(TOKENS, deadline_s=WAIT_S).by_tier.get("dram", 0) < N, "it left memory"
        assert stats["written"] >= 30
        assert read(cache, TOKENS) == N
        assert is_clean(cache)


def test_a_prompt_is_written_once(memory):
    with open_cache(memory) as cache:
        for _ in range(3):
            store(cache, TOKENS)
            idle(cache)
        assert memory.keys["put"] == N


def test_close_gives_what_is_queued_a_moment(memory):
    with open_cache(SlowKeyTier(memory, lambda op, n: 0.05 if op == "put" else 0.0), dram_slots=256) as cache:
        for number in range(4):
            assert cache.store(prompt(number), blocks_of(prompt(number))).wait(WAIT_S)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert len(memory) == 4


# --- thresholds ------------------------------------------------------------------------------------------------------


def test_blocks_far_into_a_prompt_take_no_part(memory):
    with open_cache(memory) as first, open_cache(memory, max_block_position=5) as second:
        store(first, TOKENS)
        written(first)
        assert second.lookup(TOKENS, deadline_s=WAIT_S).by_tier["remote"] == 5
        assert memory.keys["find"] == 5
        other = prompt(*range(70, 79))
        store(second, other)
        assert idle(second)["written"] == 5


def test_short_prefixes_take_no_part(memory):
    with open_cache(memory) as first, open_cache(memory, min_prefix_tokens=9 * BLOCK_TOKENS) as second:
        store(first, TOKENS)
        written(first)
        asked = memory.calls["find"]
        assert second.lookup(TOKENS[: 8 * BLOCK_TOKENS], deadline_s=WAIT_S).blocks == 0
        assert memory.calls["find"] == asked, "it is not asked for"
        assert second.lookup(TOKENS, deadline_s=WAIT_S).by_tier["remote"] == N
        short = np.concatenate([TOKENS[: 7 * BLOCK_TOKENS], prompt(90, 91, 92, 93)])
        assert second.lookup(short, deadline_s=WAIT_S).blocks == 0, "it reaches 7 blocks only"
        store(second, prompt(*range(70, 78)))
        assert idle(second)["written"] == 0
        store(second, prompt(*range(70, 79)))
        assert idle(second)["written"] == 9


# --- a store that is full, lies or fails -----------------------------------------------------------------------------


def test_a_full_store_refuses_and_stays_online():
    memory = MemoryKeyTier(5, refuses=True)
    with open_cache(memory) as cache:
        store(cache, TOKENS)
        stats = idle(cache)
        assert (stats["written"], stats["writes_refused"], stats["trips"]) == (5, 7, 0)
        assert stats["pressure"] == 1.0 and stats["write_slowdowns"] == 1
        assert (stats["endpoint"], stats["transport"]) == ("memory-keys", "memory")
        assert is_clean(cache)


def test_a_wrong_value_is_removed_and_healed_by_the_next_write(memory):
    with open_cache(memory) as first, open_cache(memory) as second, open_cache(memory) as third:
        store(first, TOKENS)
        written(first)
        key = memory.held()[7]
        memory.spoil(key, 100)
        assert second.lookup(TOKENS, deadline_s=WAIT_S).blocks == N
        assert read(second, TOKENS) == 7
        assert remote(second)["wrong"] == remote(second)["removed_wrong"] == 1
        assert key not in memory.held()
        store(second, TOKENS)
        written(second, 1)
        assert third.lookup(TOKENS, deadline_s=WAIT_S).blocks == N
        assert read(third, TOKENS) == N
        assert is_clean(second) and is_clean(third)


@pytest.mark.parametrize("error", [OSError(111, "refused"), TimeoutError("slow"), ValueError("a bug of the client")])
def test_puts_that_raise_take_it_offline(memory, error):
    faulty = FaultyKeyTier(memory)
    faulty.raises["put"] = error
    with open_cache(faulty, standing=True) as cache:
        for number in range(8):
            store(cache, prompt(number))
            idle(cache)
        stats = remote(cache)
        assert stats["trips"] == 1 and not stats["online"] and stats["writes"] == 3
        assert stats["writes_dropped"]["offline"] == 5
        assert memory.calls["put"] == 0
        faulty.heal()
        cache._link.clock.ahead += 10
        store(cache, prompt(100))  # asks whether it answers again
        assert eventually(lambda: remote(cache)["online"])
        store(cache, prompt(101))
        assert written(cache, 1)["breaker"] == "closed"
        assert is_clean(cache)


class Odd(WrappedKeyTier):
    """Answers with something that is no answer."""

    def __init__(self, inner, answer):
        super().__init__(inner)
        self.answer = answer

    def put(self, keys, rows, deadline_s):
        return self.answer(super().put(keys, rows, deadline_s))

    def find(self, keys, deadline_s):
        return self.answer(super().find(keys, deadline_s))

    def get(self, keys, rows, deadline_s):
        return self.answer(super().get(keys, rows, deadline_s))


@pytest.mark.parametrize(
    "answer",
    [
        lambda ok: None,
        lambda ok: True,
        lambda ok: ok[:-1],
        lambda ok: [*ok, True],
        lambda ok: 1 / 0,
    ],
    ids=["none", "one", "short", "long", "raises"],
)
def test_an_answer_that_is_none_is_a_failure_of_the_endpoint(memory, answer):
    with open_cache(Odd(memory, answer), standing=True) as cache:
        for number in range(6):
            store(cache, prompt(number, number + 50))
            assert cache.lookup(prompt(number + 200, 1), deadline_s=WAIT_S).blocks == 0
            idle(cache)
        stats = cache.stats()
        assert stats.remote["written"] == 0 and stats.remote["trips"] == 1
        assert stats.mover["unexpected_errors"] == 3
        assert read(cache, prompt(0, 50)) == 2
        assert is_clean(cache)


# --- slow, and hanging -----------------------------------------------------------------------------------------------


def test_a_put_that_hangs_is_nobodys_wait(memory):
    hanging = HangingKeyTier(memory)
    with open_cache(hanging, write_deadline_s=1.0) as cache:
        hanging.hang("put")
        waits = []

        def timed(what):
            began = time.monotonic()
            what()
            waits.append(time.monotonic() - began)

        timed(lambda: store(cache, TOKENS))
        assert hanging.wait_hung()
        timed(lambda: cache.flush(WAIT_S))
        timed(lambda: cache.lookup(TOKENS))
        timed(lambda: read(cache, TOKENS))
        assert max(waits) < 0.7, waits
        assert eventually(lambda: remote(cache)["overdue_jobs"] == 1)
        dram_stats = cache.stats().tiers[0]
        assert (dram_stats.lost, dram_stats.pinned) == (0, 0), "its source is free at once, and nothing of it is lost"
        assert cache.check() == []
        for number in range(100, 112):
            store(cache, prompt(number))
            idle(cache)
        assert hanging.hung <= 2, "a thread of the pool, and no more than write"
        assert cache.lookup(prompt(999), deadline_s=WAIT_S).pending == 0, "its threads for finds are not taken"
        hanging.wake()
        assert eventually(lambda: remote(cache)["lost_jobs"] == 0)
        cache._link.clock.ahead += 10
        cache.lookup(prompt(998))
        assert eventually(lambda: remote(cache)["online"])
        store(cache, prompt(500))
        written(cache, 1)
        assert is_clean(cache)


def test_no_more_than_three_time_outs_in_a_row(memory):
    """Whatever hangs: finds, reads and writes of many requests at once."""
    hanging = HangingKeyTier(memory)
    deadline = 0.3
    with open_cache(
        hanging, dram_slots=256, find_deadline_s=deadline, read_deadline_s=deadline, write_deadline_s=deadline
    ) as cache:
        store(cache, prompt(50, 51))
        written(cache, 2)
        for op in ("find", "get", "put"):
            hanging.hang(op)
        waited, lock = {}, threading.Lock()

        def work(number):
            for i in range(10):
                tokens = prompt(number * 100 + i, 1, 2)
                began = time.monotonic()
                match = cache.lookup(tokens, deadline_s=1.0)
                cache.load(match).result(WAIT_S).release()
                took = time.monotonic() - began
                cache.store(tokens, blocks_of(tokens)).wait(WAIT_S)
                with lock:
                    waited[number] = waited.get(number, 0) + (took > deadline * 0.9)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4, 12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert max(waited.values()) <= 3, waited
        stats = remote(cache)
        assert stats["trips"] >= 1 and not stats["online"]
        hanging.wake()
        assert eventually(lambda: remote(cache)["lost_jobs"] == 0)
        assert is_clean(cache)


def test_close_ends_in_time_while_puts_hang(memory, tmp_path):
    hanging = HangingKeyTier(memory)
    cache = open_cache(hanging, tmp_path, write_deadline_s=60.0)
    hanging.hang("put")
    store(cache, TOKENS)
    assert hanging.wait_hung()
    began = time.monotonic()
    complete = cache.close(2.0)
    assert time.monotonic() - began < 2.5
    assert complete, "what is only written there is not lost"
    hanging.wake()
    with open_cache(memory, tmp_path) as cache:
        assert cache.lookup(TOKENS).blocks == N


def test_an_epoch_that_changes_under_a_write(memory):
    hanging = HangingKeyTier(memory)
    with open_cache(hanging, write_deadline_s=10.0) as cache, open_cache(memory) as other:
        hanging.hang("put")
        store(cache, TOKENS)
        assert hanging.wait_hung()
        cache.bump_epoch(b"weights-2")
        store(cache, TOKENS, version=1)
        hanging.wake()
        assert written(cache, 2 * N)["writes"] == 2
        assert other.lookup(TOKENS, deadline_s=WAIT_S).blocks == N
        assert read(other, TOKENS) == N, "under the old epoch lie the old bytes"
        assert is_clean(cache)


# --- switches --------------------------------------------------------------------------------------------------------


def test_the_switch(memory):
    with open_cache(memory) as first, open_cache(memory) as cache:
        store(first, TOKENS)
        written(first)
        assert cache.remote.enabled
        assert cache.lookup(TOKENS, deadline_s=WAIT_S).blocks == N
        cache.remote.disable()
        assert not cache.remote.enabled and not remote(cache)["enabled"]
        calls = dict(memory.calls)
        assert cache.lookup(TOKENS, deadline_s=WAIT_S).blocks == 0, "hints are not offered"
        assert cache.lookup(prompt(77)).pending == 0
        store(cache, prompt(60))
        assert cache.flush(WAIT_S) and dict(memory.calls) == calls, "nothing goes out"
        cache.remote.enable()
        assert cache.lookup(TOKENS).blocks == N, "they are kept"
        store(cache, prompt(61))
        written(cache, 1)
        assert read(cache, TOKENS) == N
        assert is_clean(cache)


def test_the_switch_ends_what_waits(memory):
    hanging = HangingKeyTier(memory)
    tokens = prompt(*range(1, 201))
    with open_cache(memory, dram_slots=500) as first:
        store(first, tokens[: 100 * BLOCK_TOKENS])
        store(first, tokens)
        written(first, 200)
    with open_cache(hanging, dram_slots=500, threads=2, read_deadline_s=0.5) as cache:
        match = cache.lookup(tokens, deadline_s=WAIT_S)
        hanging.hang("get")
        future = cache.load(match)
        assert hanging.wait_hung()
        began = time.monotonic()
        cache.remote.disable()
        assert future.result(WAIT_S).block_count == 0
        assert time.monotonic() - began < 1.2, "one deadline, and not one for each job"
        hanging.wake()
        assert is_clean(cache)


def test_the_switch_at_the_start(memory, monkeypatch):
    monkeypatch.setenv("TIERCACHE_REMOTE", "off")
    with open_cache(memory) as cache:
        store(cache, TOKENS)
        cache.lookup(prompt(5))
        assert not cache.remote.enabled and not memory.calls
        cache.remote.enable()
        assert cache.lookup(prompt(5)).pending == 1
    monkeypatch.setenv("TIERCACHE_REMOTE", "maybe")
    with pytest.raises(ConfigError, match="TIERCACHE_REMOTE"):
        open_cache(memory)


def test_a_cache_without_a_key_tier_has_a_switch_that_is_off():
    with TieredKVCache([dram(8)], layout=LAYOUT, block_tokens=BLOCK_TOKENS) as cache:
        cache.remote.enable()
        assert not cache.remote.enabled and "no key tier" in repr(cache.remote)
        cache.remote.disable()
        assert cache.stats().remote is None


@pytest.mark.parametrize("switch", ["off", "stores-off"])
def test_the_switch_of_stores_stops_writes(memory, switch):
    with open_cache(SlowKeyTier(memory, 0.05), dram_slots=256, threads=4) as cache:
        for number in range(12):
            assert cache.store(prompt(number), blocks_of(prompt(number))).wait(WAIT_S)
        cache.switch = switch
        assert idle(cache)["writes_dropped"]["off"] > 0
        count = memory.calls["put"]
        time.sleep(0.1)
        assert memory.calls["put"] == count
        cache.switch = "on"
        store(cache, prompt(50))
        assert eventually(lambda: memory.calls["put"] > count)
