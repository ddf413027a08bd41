"""A cache over a key tier: right bytes, misses for all else, no wait for the network, no hang."""

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

from tiercache import HBM, Remote, TieredKVCache
from tiercache.remote import frame_nbytes
from tiercache.testing import FaultyKeyTier, HangingKeyTier, MemoryKeyTier, SlowKeyTier, put_blocks

EPOCH = b"weights-1"
TOKENS = prompt(*range(1, 13))
N = 12
SLOT = 4096


def fill(tier, tokens=TOKENS, blocks=None, epoch=EPOCH, extra=None):
    if blocks is None:
        blocks = blocks_of(tokens, extra=extra or "")
    return put_blocks(tier, tokens, blocks, namespace="test", epoch=epoch, block_tokens=BLOCK_TOKENS, extra=extra)


def open_cache(tier, path=None, dram_slots=64, hbm_slots=0, clock=None, nvme_slots=64, nvme_fields=None, **remote):
    remote = {"quota": 0.5, "write": "never", **remote}
    tiers = [HBM(hbm_slots * SLOT, "cpu")] if hbm_slots else []
    tiers += [dram(dram_slots), Remote(tier, **remote)]
    if path is not None:
        tiers.append(nvme(path, nvme_slots, **(nvme_fields or {})))
    return TieredKVCache(
        tiers, layout=LAYOUT, namespace="test", epoch=EPOCH, block_tokens=BLOCK_TOKENS, clock=clock or Clock()
    )


def found(cache, tokens=TOKENS, extra=None):
    """A lookup once everything asked for is answered."""
    match = cache.lookup(tokens, extra, deadline_s=WAIT_S)
    assert match.pending == 0
    return match


def answers_again(cache):
    """A lookup sends the probe, and waits for nothing; its answer lets the key tier take part again."""
    assert cache.lookup(prompt(404)).pending == 0
    assert eventually(lambda: cache.stats().remote["online"])


@pytest.fixture
def memory():
    return MemoryKeyTier(1000)


# --- what comes is right ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [False, True], ids=["slots", "rows"])
@pytest.mark.parametrize("hbm_slots", [0, 64], ids=["dram", "hbm"])
def test_blocks_come_from_the_key_tier(memory, out, hbm_slots, tmp_path):
    fill(memory)
    with open_cache(memory, tmp_path, hbm_slots=hbm_slots) as cache:
        match = cache.lookup(TOKENS)
        assert (match.blocks, match.pending, sum(match.by_tier.values())) == (0, N, 0)
        match = found(cache)
        assert (match.blocks, match.tokens, match.by_tier["remote"]) == (N, N * BLOCK_TOKENS, N)
        rows = np.zeros((N, *LAYOUT.block_shape), dtype=np.float32) if out else None
        with cache.load(match, rows).result(WAIT_S) as loaded:
            assert loaded.block_count == N
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        again = cache.lookup(TOKENS)
        assert again.blocks == N and "remote" not in again.by_tier
        assert read(cache, TOKENS) == N
        assert memory.calls["find"] == 1 and memory.keys["get"] == N
        stats = cache.stats().remote
        assert (stats["fetched"], stats["missing"], stats["wrong"], stats["finds"]) == (N, 0, 0, 1)
        assert sum(stats["charged"].values()) == N
        assert stats["online"] and stats["hits"] == N
        assert is_clean(cache)


def test_only_what_is_not_known_is_asked_for(memory):
    fill(memory)
    with open_cache(memory) as cache:
        store(cache, TOKENS[: 5 * BLOCK_TOKENS])
        match = found(cache)
        assert (match.blocks, match.by_tier) == (N, {"dram": 5, "remote": 7})
        assert memory.keys["find"] == 7
        assert read(cache, TOKENS) == N
        assert memory.keys["get"] == 7
        assert is_clean(cache)


def test_a_cold_prompt_with_a_shared_beginning(memory):
    """Of another prompt only the part that is not known is asked for, and what it lacks is not asked twice."""
    fill(memory)
    other = prompt(1, 2, 3, 77, 78)
    with open_cache(memory) as cache:
        assert found(cache).blocks == N
        assert found(cache, other).blocks == 3
        assert memory.keys["find"] == N + 2
        assert found(cache, other).blocks == 3
        assert memory.calls["find"] == 2
        assert read(cache, other) == 3


def test_extra_has_keys_of_its_own(memory):
    fill(memory, extra="lora")
    with open_cache(memory) as cache:
        assert found(cache).blocks == 0
        match = found(cache, TOKENS, "lora")
        assert match.blocks == N
        with cache.load(match).result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS, extra="lora"))


@pytest.mark.parametrize("wrong", [{"epoch": b"weights-2"}, {"namespace": "other"}])
def test_another_epoch_or_namespace_is_another_key(memory, wrong):
    put_blocks(memory, TOKENS, blocks_of(TOKENS), **{"namespace": "test", "epoch": EPOCH, "block_tokens": 4, **wrong})
    with open_cache(memory) as cache:
        assert found(cache).blocks == 0


def test_a_new_epoch_forgets_hints_and_fetches_nothing_old(memory):
    fill(memory)
    with open_cache(memory) as cache:
        match = found(cache)
        cache.bump_epoch(b"weights-2")
        with cache.load(match).result(WAIT_S) as loaded:
            assert loaded.block_count == 0
        assert found(cache).blocks == 0
        fill(memory, epoch=b"weights-2")
        assert cache.lookup(TOKENS).pending == 0  # it is not there, was the answer a moment ago
        cache._link.clock.ahead += 3
        assert found(cache).blocks == N and read(cache, TOKENS) == N
        assert is_clean(cache)


# --- what is wrong is a miss -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("byte", [0, 100, LAYOUT.block_nbytes, frame_nbytes(LAYOUT.block_nbytes) - 1])
def test_a_flipped_byte_is_a_miss(memory, byte):
    keys = fill(memory)
    memory.spoil(keys[7], byte)
    with open_cache(memory) as cache:
        assert found(cache).blocks == N
        assert read(cache, TOKENS) == 7
        assert cache.lookup(TOKENS).blocks == 7
        assert cache.stats().remote["wrong"] == 1
        assert cache.stats().remote["online"]
        assert is_clean(cache)


def test_another_blocks_value_is_a_miss(memory):
    keys = fill(memory)
    memory.replace(keys[3], memory.value(keys[4]))
    memory.replace(keys[5], b"short")
    with open_cache(memory) as cache:
        assert found(cache).blocks == N
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)


@pytest.mark.parametrize("out", [False, True], ids=["slots", "rows"])
def test_what_went_since_it_was_found_is_a_miss(memory, out):
    keys = fill(memory)
    with open_cache(memory) as cache:
        match = found(cache)
        memory.remove(keys[4:6], 1)
        rows = np.zeros((N, *LAYOUT.block_shape), dtype=np.float32) if out else None
        with cache.load(match, rows).result(WAIT_S) as loaded:
            assert loaded.block_count == 4
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS)[:4])
        match = cache.lookup(TOKENS)
        assert (match.blocks, match.pending) == (4, 0), "it is known to be missing"
        assert cache.stats().remote["missing"] == 2
        fill(memory)
        cache._link.clock.ahead += 3
        assert found(cache).blocks == N
        assert read(cache, TOKENS) == N
        assert is_clean(cache)


def test_hints_end(memory):
    keys = fill(memory)
    with open_cache(memory, hint_s=30.0) as cache:
        assert found(cache).blocks == N
        memory.remove(keys, 1)
        cache._link.clock.ahead += 31
        assert cache.lookup(TOKENS).blocks == 0
        assert found(cache).blocks == 0
        assert memory.calls["find"] == 2


@pytest.mark.parametrize("error", [OSError(111, "refused"), TimeoutError("slow"), ValueError("a bug of the client")])
@pytest.mark.parametrize("op", ["find", "get"])
def test_a_key_tier_that_raises(memory, op, error):
    faulty = FaultyKeyTier(memory)
    fill(memory)
    faulty.raises[op] = error
    with open_cache(faulty, clock=(now := Clock(standing=True))) as cache:
        store(cache, prompt(50, 51))
        for i in range(3):
            now.ahead += 3
            tokens = TOKENS if op == "get" else prompt(100 + i)
            assert found(cache, tokens).blocks == (N if op == "get" else 0)
            assert read(cache, tokens) == 0
        stats = cache.stats().remote
        assert stats["trips"] == 1 and not stats["online"]
        asked = memory.calls["find"]
        assert cache.lookup(prompt(60)).pending == 0, "offline: nothing is asked"
        assert memory.calls["find"] == asked
        assert read(cache, prompt(50, 51)) == 2
        faulty.heal()
        now.ahead += 10
        answers_again(cache)
        assert found(cache).blocks == N and read(cache, TOKENS) == N
        assert cache.stats().remote["breaker"] == "closed"
        assert is_clean(cache)


# --- slow, and hanging -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.05, 0.2])
def test_a_slow_key_tier_holds_up_no_lookup(memory, seconds):
    fill(memory)
    with open_cache(SlowKeyTier(memory, seconds)) as cache:
        began = time.monotonic()
        match = cache.lookup(TOKENS)
        assert time.monotonic() - began < seconds / 2
        assert (match.blocks, match.pending) == (0, N)
        assert cache.lookup(TOKENS, deadline_s=seconds / 10).pending == N
        assert found(cache).blocks == N
        assert time.monotonic() - began >= seconds
        assert read(cache, TOKENS) == N
        assert is_clean(cache)


@pytest.mark.parametrize("op", ["find", "get"])
def test_a_key_tier_that_hangs(memory, op):
    hanging = HangingKeyTier(memory)
    fill(memory)
    with open_cache(hanging, find_deadline_s=0.1, read_deadline_s=0.1, threads=4) as cache:
        store(cache, prompt(50, 51))
        if op == "get":
            match = found(cache)
        hanging.hang(op)
        began = time.monotonic()
        if op == "get":
            with cache.load(match).result(WAIT_S) as loaded:
                assert loaded.block_count == 0
        else:
            assert found(cache).blocks == 0
        assert time.monotonic() - began < 1.0
        assert cache.check() == []
        assert cache.stats().remote["lost_jobs"] == 1
        for i in range(8):  # until the breaker opens or all threads but one are lost: bounded, and every call ends
            found(cache, prompt(70 + i)) if op == "find" else read(cache, TOKENS)
            cache._link.clock.ahead += 3 if op == "get" else 0
            if op == "get":
                cache.lookup(TOKENS, deadline_s=0.5)
        assert hanging.hung <= 3
        assert read(cache, prompt(50, 51)) == 2
        hanging.wake()
        assert eventually(lambda: cache.stats().remote["lost_jobs"] == 0)
        cache._link.clock.ahead += 40
        answers_again(cache)
        assert found(cache).blocks == N and read(cache, TOKENS) == N
        assert is_clean(cache)


@pytest.mark.parametrize("op", ["find", "get"])
def test_close_ends_in_time_while_the_key_tier_hangs(memory, op, tmp_path):
    hanging = HangingKeyTier(memory)
    fill(memory)
    cache = open_cache(hanging, tmp_path, find_deadline_s=60.0, read_deadline_s=60.0)
    store(cache, prompt(50, 51))
    match = found(cache)
    hanging.hang(op)
    future = cache.load(match) if op == "get" else None
    if op == "find":
        assert cache.lookup(prompt(90)).pending == 1
    assert hanging.wait_hung()
    began = time.monotonic()
    complete = cache.close(1.0)
    assert time.monotonic() - began < 1.5
    if future is not None:
        assert future.result(1).block_count == 0
    assert complete, "what is only read is not lost"
    hanging.wake()
    with open_cache(memory, tmp_path) as cache:
        assert cache.lookup(prompt(50, 51)).blocks == 2, "what was stored is there"
        assert cache.stats().directory["cold_reason"] == ""


def test_late_bytes_land_nowhere(memory):
    hanging = HangingKeyTier(memory)
    fill(memory)
    with open_cache(hanging, read_deadline_s=0.1) as cache:
        match = found(cache)
        out = np.zeros((N, *LAYOUT.block_shape), dtype=np.float32)
        hanging.hang("get")
        with cache.load(match, out).result(WAIT_S) as loaded:
            assert loaded.block_count == 0
        out[:] = 7
        slab = cache.stack.tiers[0].slab.copy()
        hanging.wake()
        assert eventually(lambda: cache.stats().remote["lost_jobs"] == 0)
        assert (out == 7).all()
        assert (cache.stack.tiers[0].slab == slab).all()
        assert is_clean(cache)


# --- together --------------------------------------------------------------------------------------------------------


def test_eight_threads_that_ask_the_same_cost_one_find_and_one_fetch(memory):
    fill(memory)
    slow = SlowKeyTier(memory, 0.05)
    with open_cache(slow) as cache:
        start, wrong = threading.Barrier(8), []

        def ask():
            start.wait(WAIT_S)
            match = cache.lookup(TOKENS, deadline_s=WAIT_S)
            with cache.load(match).result(WAIT_S) as loaded:
                if loaded.block_count != N or bits(loaded.blocks) != bits(blocks_of(TOKENS)):
                    wrong.append(loaded.block_count)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert wrong == []
        assert (memory.calls["find"], memory.keys["find"]) == (1, N)
        assert (memory.calls["get"], memory.keys["get"]) == (1, N)
        assert is_clean(cache)


def test_a_store_while_the_same_is_fetched(memory):
    """Whoever comes first: the bytes are the same, and nobody waits for the other's failure."""
    hanging = HangingKeyTier(memory)
    fill(memory)
    with open_cache(hanging) as cache:
        match = found(cache)
        hanging.hang("get")
        future = cache.load(match)
        assert hanging.wait_hung()
        longer = np.concatenate([TOKENS, prompt(50)])
        ticket = cache.store(longer, blocks_of(longer))
        assert (ticket.accepted, ticket.present) == (1, N)
        hanging.wake()
        assert future.result(WAIT_S).block_count == N
        future.result().release()
        assert ticket.wait(WAIT_S) and read(cache, longer) == N + 1
        assert is_clean(cache)


def test_what_was_stored_under_blocks_that_never_arrive_goes_with_them(memory):
    faulty = FaultyKeyTier(memory)
    hanging = HangingKeyTier(faulty)
    keys = fill(memory)
    faulty.gone.add(keys[2])
    with open_cache(hanging) as cache:
        match = found(cache)
        hanging.hang("get")
        future = cache.load(match)
        assert hanging.wait_hung()
        longer = np.concatenate([TOKENS, prompt(50)])
        assert cache.store(longer, blocks_of(longer)[N:], N).wait(WAIT_S)
        hanging.wake()
        assert future.result(WAIT_S).block_count == 2
        future.result().release()
        assert cache.lookup(longer).blocks == 2
        assert is_clean(cache)


def test_a_long_prompt_comes_in_jobs(memory):
    tokens = prompt(*range(1, 201))
    fill(memory, tokens)
    with open_cache(memory, dram_slots=500) as cache:
        match = found(cache, tokens)
        assert match.blocks == 200
        assert read(cache, tokens) == 200
        assert memory.calls["get"] == 4 and memory.keys["get"] == 200
        assert is_clean(cache)


def test_a_restart_finds_ordinary_blocks_only(memory, tmp_path):
    """Charged blocks are not written to NVMe; what was used twice more is."""
    other = prompt(20, 21, 22)
    fill(memory)
    fill(memory, other)
    with open_cache(memory, tmp_path) as cache:
        for tokens, times in ((TOKENS, 3), (other, 1)):
            found(cache, tokens)
            for _ in range(times):
                assert read(cache, tokens) == len(tokens) // BLOCK_TOKENS
        assert cache.stats().remote["charged"] == {"dram": 3}
        assert cache.flush(WAIT_S, to="nvme")
    with open_cache(MemoryKeyTier(1), tmp_path) as cache:
        assert cache.lookup(TOKENS).by_tier["nvme"] == N
        assert cache.lookup(other).blocks == 0
        assert cache.stats().remote["charged"] == {"dram": 0}
        assert read(cache, TOKENS) == N
        assert is_clean(cache)


def test_a_remote_tier_without_an_epoch_is_warned_of(memory, caplog):
    with TieredKVCache([dram(8), Remote(memory)], layout=LAYOUT, namespace="test", block_tokens=4) as cache:
        assert "without an epoch" in caplog.text
        assert "Remote" in repr(cache)
