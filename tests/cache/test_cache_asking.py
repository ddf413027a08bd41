"""Lookup, match, explain, statistics: what the cache says of itself."""

import threading
import time

import numpy as np
import pytest
import torch
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    SLOT,
    WAIT_S,
    HeldDelivery,
    bits,
    blocks_of,
    failed,
    open_cache,
    prompt,
    read,
    store,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache import DRAM, KVLayout, TieredKVCache
from tiercache.keys import INT32_MIN, encode_prompt


def test_the_example_of_the_design(tmp_path):
    blocks = np.arange(4 * 8, dtype=np.float16).reshape(4, 8)
    prompt_tokens = list(range(64))
    used = []

    cache = TieredKVCache(tiers=[DRAM("1MiB"), f"nvme:{tmp_path}/kv:2MiB"])
    match = cache.lookup(prompt_tokens)
    with cache.load(match).result() as loaded:
        assert (match.blocks, loaded.block_count, loaded.blocks) == (0, 0, None)
    ticket = cache.store(prompt_tokens, blocks)
    assert ticket.accepted == 4
    ticket.wait()
    match = cache.lookup(prompt_tokens)
    with cache.load(match).result() as loaded:
        used.append(bits(loaded.blocks))
    cache.release(prompt_tokens)
    assert cache.close()
    assert used == [blocks.tobytes()]

    again = TieredKVCache(tiers=[DRAM("1MiB"), f"nvme:{tmp_path}/kv:2MiB"])
    with again, again.load(again.lookup(prompt_tokens)).result() as loaded:
        assert bits(loaded.blocks) == blocks.tobytes()


TOKEN_FORMS = {
    "list": lambda ids: ids.tolist(),
    "tuple": lambda ids: tuple(ids.tolist()),
    "int64": lambda ids: ids.astype(np.int64),
    "uint8": lambda ids: ids.astype(np.uint8),
    "strided": lambda ids: np.repeat(ids, 2)[::2],
    "big-endian": lambda ids: ids.astype(">i4"),
    "torch.int64": lambda ids: torch.tensor(ids.tolist()),
    "torch.int32": lambda ids: torch.tensor(ids.tolist(), dtype=torch.int32),
    "numpy scalars": lambda ids: list(ids),
}


@pytest.mark.parametrize("form", TOKEN_FORMS)
def test_tokens_of_every_form_are_the_same_prompt(form):
    tokens = prompt(1, 2, 3, tail=2)
    with open_cache(None) as cache:
        store(cache, tokens)
        match = cache.lookup(TOKEN_FORMS[form](tokens))
        assert (match.blocks, match.tokens, match.diverged_at) == (3, 12, 12)


def test_tokens_that_are_none_are_refused():
    with open_cache(None) as cache:
        for wrong, error in (("abcd", TypeError), ([1.5] * 4, TypeError), ([[1, 2]], TypeError), ([2**31], ValueError)):
            with pytest.raises(error):
                cache.lookup(wrong)
            with pytest.raises(error):
                cache.store(wrong, blocks_of(prompt(1)))
        with pytest.raises(ValueError, match="one axis"):
            cache.lookup(np.zeros((2, 4), dtype=np.int32))


def rows(n):
    return np.zeros((n, 8), np.float16)


def test_an_array_with_an_id_that_is_none_finds_what_comes_before_it_and_is_never_stored():
    tokens = np.arange(32, dtype=np.int32)
    bad = np.concatenate([tokens, np.full(16, INT32_MIN, dtype=np.int32)])
    with TieredKVCache([DRAM("1MiB")]) as cache:
        assert cache.store(tokens, rows(2)).wait(WAIT_S)
        assert cache.lookup(bad).blocks == 2
        for verb in (lambda: cache.store(bad, rows(3)), lambda: cache.release(bad), lambda: cache.invalidate(bad)):
            with pytest.raises(ValueError, match=rf"tokens\[32\] = {INT32_MIN}: ids must be above"):
                verb()
        assert cache.lookup(tokens).blocks == 2 and cache.check() == []


def test_an_id_that_is_none_never_passes_for_a_part_of_a_hashed_or_padded_symbol():
    tokens = np.arange(32, dtype=np.int32)
    with TieredKVCache([DRAM("1MiB")]) as cache:
        assert cache.store(tokens, rows(2), extra="tenant").wait(WAIT_S)
        assert cache.store(tokens[:20], rows(2), partial_tail=True).wait(WAIT_S)
        hashed = encode_prompt(tokens, 16, extra="tenant").symbols
        padded = encode_prompt(tokens[:20], 16, partial_tail=True).symbols
        for symbols in (hashed, padded):
            with pytest.raises(ValueError, match="ids must be above"):
                cache.lookup(np.frombuffer(symbols, dtype=np.int32).copy())
        assert cache.lookup(tokens).blocks == 1 and cache.lookup(tokens, extra="tenant").blocks == 2
        assert cache.check() == []


def test_a_match_says_where_the_blocks_are(tmp_path):
    tokens = prompt(1, 2, 3, 4)
    with open_cache(tmp_path) as cache:
        store(cache, tokens[:8])
        assert cache.flush(to="nvme")
    with open_cache(tmp_path) as cache:
        assert read(cache, tokens[:4]) == 1
        store(cache, tokens, start=2)
        match = cache.lookup(prompt(1, 2, 3, 4, 5, tail=1))
        assert (match.blocks, match.tokens, match.pending, match.diverged_at) == (4, 16, 0, 16)
        assert match.by_tier == {"dram": 3, "nvme": 1}
        assert match.estimated_load_s > 0


def test_a_lookup_holds_nothing_and_does_not_count_as_a_use():
    with open_cache(None, dram_slots=2) as cache:
        store(cache, prompt(1))
        store(cache, prompt(2))
        for _ in range(5):
            cache.lookup(prompt(1))
        store(cache, prompt(3))
        assert [cache.lookup(prompt(part)).blocks for part in (1, 2, 3)] == [0, 1, 1]
        assert cache.stats().totals["lookups"] == 8


def test_a_use_counts_once_per_match():
    tokens = prompt(1, 2)

    def uses():
        return [each.uses for each in cache.explain(tokens).stretches]

    with open_cache(None) as cache:
        store(cache, tokens)
        assert uses() == [1]
        match = cache.lookup(tokens)
        cache.load(match).result().release()
        cache.load(match).result().release()
        cache.touch(match)
        assert uses() == [2]
        match = cache.lookup(tokens)
        cache.touch(match)
        cache.touch(match)
        cache.load(match).result().release()
        assert uses() == [3]
        store(cache, tokens)
        assert uses() == [4]


@pytest.mark.parametrize("how", ["touch", "load"])
def test_a_request_that_stores_after_it_used_what_is_there_counts_once(how):
    with open_cache(None) as cache:
        store(cache, prompt(1, 2))
        tokens = prompt(1, 2, 3)
        match = cache.lookup(tokens)
        if how == "touch":
            cache.touch(match)
        else:
            cache.load(match).result().release()
        assert cache.store(tokens, blocks_of(tokens)[2:], 2).wait(WAIT_S)
        assert [each.uses for each in cache.explain(tokens).stretches] == [2]


@pytest.mark.parametrize("how", ["touch", "load", "store", "pin"])
def test_what_was_used_last_leaves_last(how):
    with open_cache(None, dram_slots=2) as cache:
        store(cache, prompt(1))
        store(cache, prompt(2))
        match = cache.lookup(prompt(1))
        if how == "touch":
            cache.touch(match)
        elif how == "load":
            cache.load(match).result().release()
        elif how == "store":
            assert (store(cache, prompt(1)).present, match.blocks) == (1, 1)
        else:
            pin = cache.pin(match)
        store(cache, prompt(3))
        assert [cache.lookup(prompt(part)).blocks for part in (1, 2, 3)] == [1, 0, 1]
        if how == "pin":
            cache.unpin(pin)


def test_release_sends_what_only_that_prompt_uses_to_the_cold_end():
    with open_cache(None, dram_slots=5) as cache:
        store(cache, prompt(1, 2, 3))
        store(cache, prompt(1, 4))
        store(cache, prompt(5))
        assert cache.release(prompt(1, 4)) == 1
        assert cache.release(prompt(7)) == 0
        store(cache, prompt(6))
        assert [cache.lookup(prompt(*parts)).blocks for parts in ((1, 2, 3), (1, 4), (5,), (6,))] == [3, 1, 1, 1]


# -- pending ----------------------------------------------------------------------------------------------------------


def test_blocks_in_flight_are_pending_and_a_store_under_them_is_taken():
    delivery = HeldDelivery()
    with open_cache(None, delivery=delivery) as cache:
        tokens = prompt(1, 2, 3, 4)
        first = cache.store(tokens[:8], blocks_of(tokens[:8]))
        match = cache.lookup(tokens)
        assert (match.blocks, match.pending, match.diverged_at) == (0, 2, 8)
        assert cache.load(match).result(WAIT_S).block_count == 0
        second = cache.store(tokens, blocks_of(tokens, 2), start=2)
        assert (second.accepted, second.reason) == (2, "")
        assert cache.lookup(tokens).pending == 4
        assert not first.copied
        assert not second.copied
        delivery.deliver(1)
        assert cache.lookup(tokens).blocks in (0, 2)
        delivery.deliver(1)
        assert (first.stored, second.stored) == (2, 2)
        assert read(cache, tokens) == 4
        delivery.let_go()


def test_a_store_under_blocks_that_fail_fails_with_them():
    delivery = HeldDelivery()
    with open_cache(None, delivery=delivery) as cache:
        tokens = prompt(1, 2, 3, 4)
        first = cache.store(tokens[:8], blocks_of(tokens[:8]))
        delivery.wait(1)
        second = cache.store(tokens, blocks_of(tokens, 2), start=2)
        assert cache.lookup(tokens).pending == 4
        delivery.deliver(1, failed)
        assert (first.copied, first.stored) == (True, 0)
        match = cache.lookup(tokens)
        assert (match.blocks, match.pending, match.diverged_at) == (0, 0, 0)
        delivery.deliver(1)
        assert (second.copied, second.stored) == (True, 0)
        assert cache.stats().blocks == 0
        delivery.let_go()
        assert cache.store(tokens, blocks_of(tokens, 2), start=2).reason == "parent_missing"
        assert store(cache, tokens).accepted == 4
        assert read(cache, tokens) == 4
        assert cache.check() == []


def test_a_lookup_with_a_deadline_waits_for_blocks_in_flight():
    delivery = HeldDelivery()
    with open_cache(None, delivery=delivery) as cache:
        tokens = prompt(1, 2)
        cache.store(tokens, blocks_of(tokens))
        late = threading.Timer(3.0, delivery.let_go)  # ends a lookup that does not end by itself
        late.start()
        began = time.monotonic()
        assert cache.lookup(tokens, deadline_s=0.05).pending == 2
        assert 0.05 <= time.monotonic() - began < 0.3
        timer = threading.Timer(0.05, delivery.let_go)
        timer.start()
        began = time.monotonic()
        match = cache.lookup(tokens, deadline_s=WAIT_S)
        assert (match.blocks, match.pending) == (2, 0)
        assert time.monotonic() - began < 0.25, "it slept past the moment when the blocks arrived"
        timer.join()
        late.cancel()
        assert cache.stats().totals["lookups"] == 2


# -- where prompts part -----------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), max_size=14)


@settings(max_examples=150, deadline=None)
@given(
    block_tokens=st.sampled_from([1, 2, 3, 12]),
    stored=st.lists(st.tuples(TOKENS, st.booleans()), max_size=5),
    asked=TOKENS,
    partial=st.booleans(),
)
def test_diverged_at_is_the_exact_token(block_tokens, stored, asked, partial):
    layout = KVLayout((8,), "uint8")
    with TieredKVCache([DRAM(128 * SLOT)], layout=layout, block_tokens=block_tokens) as cache:
        paths = []
        for tokens, whole in stored:
            n = -(-len(tokens) // block_tokens) if whole else len(tokens) // block_tokens
            ticket = cache.store(tokens, np.zeros((n, 8), dtype=np.uint8), partial_tail=whole)
            assert ticket.accepted + ticket.present == n
            paths.append(tokens if whole else tokens[: n * block_tokens])
        shared = max((_shared(asked, path) for path in paths), default=0)
        match = cache.lookup(asked, partial_tail=partial)
        expected = None if shared == len(asked) else shared
        assert match.diverged_at == expected
        if not partial:
            assert cache.explain(asked).diverged_at == expected


def _shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_with_extra_a_prompt_parts_at_a_block():
    with open_cache(None) as cache:
        tokens = prompt(1, 2, 3)
        cache.store(tokens, blocks_of(tokens), extra="tenant").wait(WAIT_S)
        other = tokens.copy()
        other[6] = 9
        assert cache.lookup(other, extra="tenant").diverged_at == 4
        assert cache.lookup(tokens, extra="tenant").diverged_at is None
        assert cache.lookup(tokens).diverged_at == 0


def test_explain_names_tiers_uses_and_where_prompts_leave(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, prompt(1, 2, 3))
        assert cache.flush(to="nvme")
        store(cache, prompt(1, 2, 4))
        for part in (5, 6, 7):
            cache.lookup(prompt(1, 2, part))
        found = cache.explain(prompt(1, 2, 8))
        assert (found.blocks_asked, found.blocks_found, found.diverged_at) == (3, 2, 8)
        text = str(found)
        assert "2 of 3 blocks lie on a cached path" in text
        assert "blocks 0..1: dram, nvme" in text
        assert "3 lookups left here, 2 branches" in text
        assert "leaves the cached path at token 8" in text
        assert str(cache.explain(prompt(9))).startswith("0 of 1 blocks")


def test_explain_of_a_cache_that_knows_no_layout_yet():
    with TieredKVCache([DRAM(8 * SLOT)], block_tokens=4) as cache:
        assert cache.lookup(prompt(1)).diverged_at == 0
        assert cache.lookup([]).diverged_at is None
        assert (cache.explain(prompt(1)).blocks_found, cache.explain(prompt(1)).diverged_at) == (0, 0)
        assert (cache.layout, cache.check(), cache.stats().tiers) == (None, [], ())
        assert cache.load(cache.lookup(prompt(1))).result().blocks is None
        assert cache.pin(cache.lookup(prompt(1))).blocks == cache.release(prompt(1)) == cache.invalidate([]) == 0
        assert cache.flush()


# -- statistics -------------------------------------------------------------------------------------------------------


def test_statistics_add_up_to_what_happened(tmp_path):
    with open_cache(tmp_path, dram_slots=6, nvme_slots=16, exclusive=False) as cache:
        store(cache, prompt(1, 2, 3))
        store(cache, prompt(4, 5, 6))
        assert cache.flush(to="nvme")
        store(cache, prompt(7, 8))
        assert cache.flush(to="nvme")
        before = cache.stats()
        assert [tier.evicted for tier in before.tiers] == [2, 0]
        assert read(cache, prompt(1, 2, 3)) == 3
        out = np.empty((2, *LAYOUT.block_shape), dtype=LAYOUT.dtype)
        assert cache.load(cache.lookup(prompt(1, 2, 3)), out=out).result(WAIT_S).block_count == 2
        cache.lookup(prompt(9, 10))
        stats = cache.stats()
        upper, lower = stats.tiers
        size = LAYOUT.block_nbytes
        totals = stats.totals
        assert (totals["lookups"], totals["lookup_blocks"], totals["found_blocks"]) == (3, 8, 6)
        assert (totals["loads"], totals["loads_cut"], totals["stores"]) == (2, 0, 3)
        assert (totals["store_blocks_accepted"], totals["store_blocks_present"], totals["stores_cut"]) == (8, 0, {})
        assert stats.blocks == lower.held == 8
        assert (upper.hits, lower.hits, upper.promoted) == (3, 2, 2)
        assert upper.written == lower.written == upper.demoted == 8
        assert upper.written + upper.promoted - upper.evicted == upper.held == 6
        assert lower.written_nbytes == 8 * size
        assert upper.written_nbytes == 10 * size
        assert lower.read_nbytes == 2 * size
        assert upper.read_nbytes == (8 + 2) * size
        assert (stats.mover["unexpected_errors"], stats.mover["delivery_errors"]) == (0, 0)
        assert stats.mover["commits"] == stats.directory["catalog"]["commits"] > 0
        assert stats.directory["pending_slots"] == 0
        assert stats.namespace == "test"
        assert stats.layout == LAYOUT.to_dict()
        assert isinstance(stats.as_dict()["tiers"][0]["held"], int)


def test_statistics_are_plain_values(tmp_path):
    import json

    with open_cache(tmp_path) as cache:
        store(cache, prompt(1))
        json.dumps(cache.stats().as_dict())


def test_block_tokens_of_the_cache_are_those_of_the_prompt():
    with TieredKVCache([DRAM(8 * SLOT)], layout=LAYOUT, block_tokens=16) as cache:
        tokens = np.arange(40, dtype=np.int32)
        rows = np.zeros((2, *LAYOUT.block_shape), dtype=np.float32)
        cache.store(tokens, rows).wait(WAIT_S)
        match = cache.lookup(tokens)
        assert (match.blocks, match.tokens, match.diverged_at) == (2, 32, 32)
        assert BLOCK_TOKENS != 16
