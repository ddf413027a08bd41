"""Invalidation and epochs: what is dropped is never found again, on no tier, after no crash."""

import asyncio

import numpy as np
import pytest
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    WAIT_S,
    HeldDelivery,
    bits,
    blocks_of,
    crash_image,
    is_clean,
    open_cache,
    prompt,
    read,
    store,
)

from tiercache import ConfigError, NotDurableError, TieredKVCache
from tiercache.assembly import Seams
from tiercache.testing import HangingTier

# -- invalidate -------------------------------------------------------------------------------------------------------


def fill(cache):
    store(cache, prompt(1, 2, 3, 4))
    store(cache, prompt(1, 2, 5))
    store(cache, prompt(6, 7))
    assert cache.flush(WAIT_S, to="nvme")


def held(cache):
    return [cache.lookup(prompt(*parts)).blocks for parts in ((1, 2, 3, 4), (1, 2, 5), (6, 7))]


@pytest.mark.parametrize(
    ("prefix", "dropped", "left"),
    [
        (prompt(1, 2, 3), 2, [2, 3, 2]),
        (prompt(1, 2), 4, [1, 1, 2]),
        (prompt(1), 5, [0, 0, 2]),
        (prompt(1, 2, 5, tail=3), 1, [4, 2, 2]),
        (prompt(1, 2, 9), 0, [4, 3, 2]),
        (prompt(8), 0, [4, 3, 2]),
        (prompt(tail=3), 0, [4, 3, 2]),
        ([], 7, [0, 0, 0]),
    ],
)
def test_invalidate_drops_a_prefix_and_all_that_continues_it(tmp_path, prefix, dropped, left):
    with open_cache(tmp_path) as cache:
        fill(cache)
        assert cache.invalidate(prefix) == dropped
        assert held(cache) == left
        assert is_clean(cache)
        image = crash_image(tmp_path, tmp_path / "crashed") if dropped else tmp_path
    with open_cache(image) as cache:
        assert held(cache) == left, "a kill brought back what was invalidated"
        assert cache.check() == []
        for parts in ((1, 2, 3, 4), (1, 2, 5), (6, 7)):
            read(cache, prompt(*parts))


def test_invalidate_what_is_under_way_and_held(tmp_path):
    delivery = HeldDelivery(holding=False)
    with open_cache(tmp_path, delivery=delivery) as cache:
        store(cache, prompt(1, 2))
        loaded = cache.load(cache.lookup(prompt(1, 2))).result(WAIT_S)
        before = bits(loaded.blocks)
        delivery.holding = True
        ticket = cache.store(prompt(1, 2, 3), blocks_of(prompt(1, 2, 3), 2), 2)
        delivery.wait(1)
        assert cache.invalidate(prompt(1)) == 3
        assert cache.lookup(prompt(1, 2, 3)).pending == 0
        delivery.let_go()
        assert (ticket.copied, ticket.stored) == (True, 0)
        assert cache.lookup(prompt(1, 2, 3)).blocks == 0
        assert store(cache, prompt(1, 2), version=1).accepted == 2
        assert before == bits(loaded.blocks), "what is held changed"
        loaded.release()
        assert read(cache, prompt(1, 2), version=1) == 2
        assert is_clean(cache)


# -- epochs -----------------------------------------------------------------------------------------------------------


def test_a_new_epoch_forgets_everything_on_every_tier(tmp_path):
    with open_cache(tmp_path, dram_slots=8) as cache:
        fill(cache)
        old = cache.epoch
        match = cache.lookup(prompt(6, 7))
        new = cache.bump_epoch()
        assert new != old
        assert cache.epoch == new
        assert held(cache) == [0, 0, 0]
        stats = cache.stats()
        assert stats.blocks == 0
        assert [tier.free for tier in stats.tiers] == [tier.capacity for tier in stats.tiers]
        assert cache.load(match).result(WAIT_S).block_count == 0
        assert cache.pin(match).blocks == 0
        assert cache.stats().totals["stale_epoch"] == 2
        image = crash_image(tmp_path, tmp_path / "crashed")
        assert is_clean(cache)
    for place in (tmp_path, image):
        with open_cache(place) as cache:
            assert cache.epoch == new
            assert held(cache) == [0, 0, 0]
            store(cache, prompt(6, 7), version=1)
            assert read(cache, prompt(6, 7), version=1) == 2


def test_an_old_match_finds_nothing_of_the_new_epoch(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, prompt(1, 2))
        match = cache.lookup(prompt(1, 2))
        cache.bump_epoch("two")
        store(cache, prompt(1, 2), version=1)
        assert cache.load(match).result(WAIT_S).block_count == 0
        assert read(cache, prompt(1, 2), version=1) == 2


def test_going_back_to_an_earlier_epoch_finds_nothing_of_it(tmp_path):
    with open_cache(tmp_path, epoch="one") as cache:
        store(cache, prompt(1, 2))
        assert cache.flush(to="nvme")
        match = cache.lookup(prompt(1, 2))
        cache.bump_epoch("two")
        cache.bump_epoch("one")
        assert cache.epoch == b"one"
        assert cache.load(match).result(WAIT_S).block_count == 0
        assert cache.lookup(prompt(1, 2)).blocks == 0
    with open_cache(tmp_path, epoch="one") as cache:
        assert cache.lookup(prompt(1, 2)).blocks == 0


def test_bumping_to_the_same_tag_forgets_all_the_same(tmp_path):
    with open_cache(tmp_path, epoch="one") as cache:
        store(cache, prompt(1, 2))
        assert cache.flush(to="nvme")
        cache.bump_epoch(b"one")
        assert cache.lookup(prompt(1, 2)).blocks == 0
        store(cache, prompt(1, 2), version=1)
        assert cache.flush(to="nvme")
    with open_cache(tmp_path, epoch="one") as cache:
        assert read(cache, prompt(1, 2), version=1) == 2


def test_loads_and_stores_under_way_end_empty_at_a_new_epoch(tmp_path):
    delivery = HeldDelivery(holding=False)
    with open_cache(tmp_path, dram_slots=16, delivery=delivery) as cache:
        store(cache, prompt(1, 2, 3))
        assert cache.flush(to="nvme")
        for part in range(20, 36):
            store(cache, prompt(part))
        match = cache.lookup(prompt(1, 2, 3))
        assert match.by_tier["nvme"] == 3
        delivery.holding = True
        future = cache.load(match)
        out = np.empty((3, *LAYOUT.block_shape), dtype=np.float32)
        into_out = cache.load(match, out=out)
        ticket = cache.store(prompt(8, 9), blocks_of(prompt(8, 9)))
        delivery.wait(3)
        cache.bump_epoch()
        assert cache.lookup(prompt(8, 9)).pending == 0
        delivery.let_go()
        assert future.result(WAIT_S).block_count == 0
        assert into_out.result(WAIT_S).block_count == 0
        assert ticket.wait(WAIT_S)
        assert ticket.stored == 0
        assert cache.stats().blocks == 0
        assert is_clean(cache)


@pytest.mark.parametrize("how", ["bump_epoch", "invalidate"])
def test_what_is_forgotten_while_it_is_read_is_no_checksum_failure(tmp_path, how):
    with open_cache(tmp_path) as cache:
        store(cache, prompt(1, 2, 3))
    seams = Seams(wrap_tier=lambda tier: HangingTier(tier) if tier.verifies else tier)
    with open_cache(tmp_path, seams=seams) as cache:
        tier = cache.stack.tiers[-1]
        tier.hang("read")
        future = cache.load(cache.lookup(prompt(1, 2, 3)))
        assert tier.wait_hung()
        cache.bump_epoch() if how == "bump_epoch" else cache.invalidate([])
        tier.wake()
        assert future.result(WAIT_S).block_count == 0
        assert cache.flush(WAIT_S)
        stats = cache.stats().tiers[-1]
        assert (stats.checksum_failures, stats.io_errors, stats.bad, stats.free) == (0, 0, 0, stats.capacity)
        assert is_clean(cache)


def test_what_is_held_across_a_new_epoch_stays_as_it_was(tmp_path):
    with open_cache(tmp_path, dram_slots=8) as cache:
        store(cache, prompt(1, 2, 3))
        loaded = cache.load(cache.lookup(prompt(1, 2, 3))).result(WAIT_S)
        pin = cache.pin(cache.lookup(prompt(1)))
        before = bits(loaded.blocks)
        cache.bump_epoch()
        for part in range(30):
            store(cache, prompt(part, part + 50))
            assert cache.check() == []
        assert before == bits(loaded.blocks)
        loaded.release()
        cache.unpin(pin)
        assert is_clean(cache)


@pytest.mark.parametrize("tag", ["", b"", "x" * 256, 5, 1.5, ["a"]])
def test_tags_that_are_none(tag):
    with open_cache(None) as cache:
        before = cache.epoch
        with pytest.raises(ConfigError, match="tag"):
            cache.bump_epoch(tag)
        assert cache.epoch == before


def test_a_new_epoch_before_the_layout_is_known(tmp_path):
    with open_cache(tmp_path, layout=None) as cache:
        assert cache.bump_epoch("two") == b"two"
        store(cache, prompt(1, 2))
        assert cache.epoch == b"two"
    with open_cache(tmp_path, layout=None) as cache:
        assert cache.epoch == b"two"
        assert read(cache, prompt(1, 2)) == 2


def test_instances_that_share_a_tag_share_a_directory_in_turn(tmp_path):
    with open_cache(tmp_path, epoch="weights-7") as cache:
        store(cache, prompt(1, 2))
    with open_cache(tmp_path, epoch="weights-7") as cache:
        assert read(cache, prompt(1, 2)) == 2
    with open_cache(tmp_path, epoch="weights-8") as cache:
        assert cache.lookup(prompt(1, 2)).blocks == 0
        assert cache.stats().directory["cold_reason"] == "epoch"


def test_what_cannot_be_made_durable_is_told_and_holds_in_this_process(tmp_path):
    walls = []

    def wall(tier):
        if not tier.verifies:
            return tier
        walls.append(HangingTier(tier, max_s=WAIT_S))
        return walls[0]

    with open_cache(tmp_path, seams=Seams(wrap_tier=wall)) as cache:
        store(cache, prompt(1, 2))
        assert cache.flush(to="nvme")
        walls[0].hang("sync", "write")
        store(cache, prompt(3, 4))
        cache.flush(0.05, to="nvme")  # a write hangs now, so nothing can be committed over it
        walls[0].unblock("write")
        walls[0].wake()
        assert cache.flush(WAIT_S, to="nvme")
        store(cache, prompt(5, 6))
        walls[0].hang("sync")
        assert cache.flush(0.3, to="nvme") is False
        with pytest.raises(NotDurableError, match=r"invalidate: not durable after 0.1 s"):
            cache.invalidate(prompt(1), timeout=0.1)
        assert cache.lookup(prompt(1, 2)).blocks == 0
        with pytest.raises(NotDurableError, match="bump_epoch"):
            cache.bump_epoch(timeout=0.1)
        assert cache.stats().blocks == 0
        walls[0].wake()
        assert cache.invalidate([]) == 0
    with open_cache(tmp_path) as cache:
        assert cache.stats().blocks == 0


def test_a_load_that_was_cancelled_by_asyncio_holds_nothing(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, prompt(1, 2))

        async def run():
            match = await cache.alookup(prompt(1, 2))
            with await cache.aload(match) as loaded:
                assert loaded.block_count == 2
            for _ in range(20):
                task = asyncio.ensure_future(cache.aload(match))
                await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task

        asyncio.run(run())
        assert is_clean(cache)


def test_block_tokens_are_part_of_what_a_directory_holds(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, prompt(1, 2))
    with open_cache(tmp_path, block_tokens=2 * BLOCK_TOKENS) as cache:
        assert isinstance(cache, TieredKVCache)
        assert cache.lookup(prompt(1, 2)).blocks == 0
