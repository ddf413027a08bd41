"""Priorities, ends in time, blocks for the slow tiers only and pins that end, on a real cache."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from cache_kit import bits, blocks_of, crash_image, eventually, is_clean, open_cache, prompt, read, store

from tiercache import COLD, ConfigError, FormatVersionError, TieredKVCache


class Clock:
    """Wall-clock seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1.7e9

    def __call__(self) -> float:
        return self.now


def put(cache: TieredKVCache, tokens: np.ndarray, **said: object) -> None:
    ticket = cache.store(tokens, blocks_of(tokens), **said)
    assert ticket.wait(10.0) and ticket.reason == ""


def test_a_block_ends_and_is_gone_from_every_tier_also_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    cache = open_cache(tmp_path, clock=clock)
    put(cache, prompt(1, 2), ttl_s=60.5)
    put(cache, prompt(7, 8))
    assert cache.flush(10.0, to="nvme") and read(cache, prompt(1, 2)) == 2
    clock.now += 59.0
    image = crash_image(tmp_path, tmp_path / "image")
    clock.now += 1.5
    assert cache.lookup(prompt(1, 2)).blocks == 0 and read(cache, prompt(7, 8)) == 2
    assert read(cache, prompt(1, 2)) == 0 and cache.stats().totals["expired"] == 2
    assert cache.stats().blocks == 2 and is_clean(cache)
    assert cache.close()
    for later, blocks in ((-1.0, 2), (0.0, 0), (1e6, 0)):  # the image was taken while they were there
        clock.now = 1.7e9 + 60.0 + later  # a restart rounds down to whole seconds, never up
        again = open_cache(image, clock=clock)
        assert again.lookup(prompt(1, 2)).blocks == blocks and read(again, prompt(1, 2)) == blocks
        assert read(again, prompt(7, 8)) == 2 and is_clean(again)
        again.close()


def test_the_default_time_to_live_and_how_a_store_overrides_it() -> None:
    clock = Clock()
    cache = open_cache(None, clock=clock, ttl_s=10.0)
    put(cache, prompt(1))
    put(cache, prompt(2), ttl_s=100.0)
    put(cache, prompt(3), ttl_s=math.inf)
    clock.now += 10.0
    assert [cache.lookup(prompt(part)).blocks for part in (1, 2, 3)] == [0, 1, 1]
    put(cache, prompt(2))
    clock.now += 89.9
    assert cache.lookup(prompt(2)).blocks == 1, "a shorter time does not shorten it"
    clock.now += 0.2
    assert [cache.lookup(prompt(part)).blocks for part in (1, 2, 3)] == [0, 0, 1]
    cache.close()


def test_a_loaded_block_stays_readable_when_its_time_is_over() -> None:
    clock = Clock()
    cache = open_cache(None, clock=clock)
    put(cache, prompt(1, 2), ttl_s=10.0)
    with cache.load(cache.lookup(prompt(1, 2))).result(10.0) as loaded:
        clock.now += 10.0
        store(cache, prompt(5, 6))
        assert bits(loaded.blocks) == bits(blocks_of(prompt(1, 2)))
    assert is_clean(cache)
    cache.close()


def test_cold_blocks_are_on_nvme_at_once_and_a_load_into_rows_leaves_them_there(tmp_path: Path) -> None:
    cache = open_cache(tmp_path, dram_slots=16)
    put(cache, prompt(1, 2, 3), priority=COLD)
    assert eventually(lambda: cache.stats().tiers[1].held == 3), "written without any flush"
    for part in range(20, 36):
        put(cache, prompt(part))
    assert cache.lookup(prompt(1, 2, 3)).by_tier == {"dram": 0, "nvme": 3}
    out = np.zeros_like(blocks_of(prompt(1, 2, 3)))
    assert cache.load(cache.lookup(prompt(1, 2, 3)), out=out).result(10.0).block_count == 3
    assert bits(out) == bits(blocks_of(prompt(1, 2, 3)))
    assert cache.lookup(prompt(1, 2, 3)).by_tier == {"dram": 0, "nvme": 3}
    assert cache.prioritize(prompt(1, 2, 3), 0) == 3
    assert cache.load(cache.lookup(prompt(1, 2, 3)), out=out).result(10.0).block_count == 3
    assert is_clean(cache)
    cache.close()


def test_priorities_survive_a_restart(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    put(cache, prompt(1), priority=7)
    put(cache, prompt(2))
    assert cache.flush(10.0, to="nvme")
    assert cache.prioritize(prompt(2), -3) == 1
    assert cache.close()
    again = open_cache(tmp_path)
    assert [again.explain(prompt(part)).stretches[0].priority for part in (1, 2)] == [7, -3]
    assert "priority -3" in str(again.explain(prompt(2)))
    again.close()


def test_a_pin_ends_by_itself() -> None:
    clock = Clock()
    cache = open_cache(None, dram_slots=8, clock=clock)
    put(cache, prompt(1, 2))
    pin = cache.pin(cache.lookup(prompt(1, 2)), ttl_s=30.0)
    for part in range(20, 30):
        put(cache, prompt(part))
    assert read(cache, prompt(1, 2)) == 2
    clock.now += 30.0
    for part in range(30, 40):
        put(cache, prompt(part))
    assert read(cache, prompt(1, 2)) == 0
    cache.unpin(pin)
    assert is_clean(cache)
    cache.close()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", 101),
        ("priority", -101),
        ("priority", 1.5),
        ("priority", True),
        ("priority", None),
        ("ttl_s", 0),
        ("ttl_s", -1.0),
        ("ttl_s", math.nan),
        ("ttl_s", "soon"),
        ("ttl_s", True),
    ],
)
def test_what_is_no_hint_is_refused_by_name(name: str, value: object) -> None:
    cache = open_cache(None)
    with pytest.raises(ConfigError, match=f"{name} = .* is needed"):
        put(cache, prompt(1), **{name: value})
    if name == "priority":
        with pytest.raises(ConfigError, match=r"priority = .* is needed"):
            cache.prioritize(prompt(1), value)
    else:
        with pytest.raises(ConfigError, match=r"ttl_s = .* is needed"):
            cache.pin(cache.lookup(prompt(1)), value)
        with pytest.raises(ConfigError, match=r"ttl_s = .* is needed"):
            open_cache(None, ttl_s=value)
    assert cache.stats().blocks == 0
    cache.close()


def test_priorities_of_numpy_are_fine_and_hints_before_the_first_store_too() -> None:
    cache = open_cache(None, layout=None)
    assert cache.prioritize(prompt(1), 3) == 0
    put(cache, prompt(1), priority=np.int64(3))
    assert cache.explain(prompt(1)).stretches[0].priority == 3
    cache.close()


def test_an_explanation_says_when_blocks_end() -> None:
    clock = Clock()
    cache = open_cache(None, clock=clock)
    put(cache, prompt(1), priority=COLD, ttl_s=60.0)
    put(cache, prompt(2), ttl_s=1e15)
    assert "cold, ends 2023-11-14 22:14:20 UTC" in str(cache.explain(prompt(1)))
    assert "ends 9999-12-31" in str(cache.explain(prompt(2)))
    cache.close()


def test_a_store_of_the_format_before_is_refused_and_left_alone(tmp_path: Path) -> None:
    cache = open_cache(tmp_path)
    store(cache, prompt(1))
    cache.close()
    place = tmp_path / "kv" / "STORE"
    before = place.read_bytes()
    place.write_bytes(before.replace(b'"format": 2', b'"format": 1'))
    with pytest.raises(FormatVersionError, match="format 1, this version reads 2"):
        open_cache(tmp_path)
    place.write_bytes(before)
    again = open_cache(tmp_path)
    assert read(again, prompt(1)) == 1
    again.close()
