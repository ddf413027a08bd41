"""The suite that every stack of tiers passes unchanged.

```python
class TestMyStack(CacheSuite):
    @pytest.fixture
    def make_cache(self, tmp_path):
        tiers = ["dram:256KiB", f"nvme:{tmp_path}/kv:1MiB"]
        return lambda **settings: TieredKVCache(tiers, namespace="suite", **settings)
```

Level 0 must have room for 16 blocks of 4 KiB at least. It finds out for itself whether what is stored outlives the
cache.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from tiercache.cache import TieredKVCache
from tiercache.config import NVMe
from tiercache.errors import CacheClosedError, LayoutError
from tiercache.layout import KVLayout
from tiercache.testing.model import CacheModel, payload_of

__all__ = ["CacheSuite", "MakeCache"]

MakeCache: TypeAlias = Callable[..., TieredKVCache]
"""`make_cache(**settings)` opens the same tiers each time, at the same place; one cache is open at a time."""

BLOCK_TOKENS = 4
WAIT_S = 30.0
THREADS_S = 0.5
LAYOUTS = (
    KVLayout((4096,), "uint8"),
    KVLayout((3, 7), "int16"),
    KVLayout((1,), "uint8"),
    KVLayout((2, 2, 256), "int32"),
)


def _prompt(*parts: int) -> list[int]:
    return [part for part in parts for _ in range(BLOCK_TOKENS)]


def _persists(cache: TieredKVCache) -> bool:
    return any(isinstance(tier, NVMe) for tier in cache.settings.tiers)


class CacheSuite:
    """Subclass it, name the class Test..., and supply the fixture `make_cache`."""

    @pytest.fixture
    def make_cache(self) -> MakeCache:
        """See MakeCache."""
        raise NotImplementedError("subclasses supply the fixture make_cache")

    def _store(self, cache: TieredKVCache, model: CacheModel, tokens: list[int], layout: KVLayout) -> int:
        """Store what is missing of a prompt, in as many goes as it takes; the blocks that are there then."""
        for _ in range(8):
            there = cache.lookup(tokens).blocks
            if there * BLOCK_TOKENS == len(tokens):
                break
            blocks = payload_of(tokens, layout, BLOCK_TOKENS, there)
            model.store(tokens, blocks, there)
            assert cache.store(tokens, blocks, there).wait(WAIT_S)
            assert cache.flush(WAIT_S)
        return cache.lookup(tokens).blocks

    def _load(self, cache: TieredKVCache, model: CacheModel, tokens: list[int]) -> int:
        match = cache.lookup(tokens)
        assert match.blocks + match.pending <= model.longest(tokens)
        with cache.load(match).result(WAIT_S) as loaded:
            assert loaded.block_count <= match.blocks
            assert model.wrong(tokens, loaded.blocks) == []
            return loaded.block_count

    def _quiet(self, cache: TieredKVCache) -> None:
        """Nothing is under way or held, and every rule holds."""
        cache.flush(WAIT_S, to="nvme" if _persists(cache) else None)
        until = time.monotonic() + WAIT_S
        while any(tier.pinned or tier.jobs or tier.lost for tier in cache.stats().tiers):
            assert time.monotonic() < until, cache.stats().tiers
            time.sleep(0.002)
        assert cache.check() == []
        stats = cache.stats()
        assert all(tier.free + tier.held == tier.capacity for tier in stats.tiers)
        assert stats.mover["unexpected_errors"] == stats.mover["delivery_errors"] == 0
        assert all(tier.checksum_failures == 0 for tier in stats.tiers)

    # -- bytes come back --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("layout", LAYOUTS, ids=str)
    def test_round_trip(self, make_cache: MakeCache, layout: KVLayout) -> None:
        """What was stored is found under its prompt and comes back, whole, in parts and into `out`."""
        model = CacheModel(BLOCK_TOKENS)
        tokens = _prompt(1, 2, 3, 4)
        with make_cache(layout=layout, block_tokens=BLOCK_TOKENS) as cache:
            assert cache.lookup(tokens).blocks == 0
            assert self._store(cache, model, tokens, layout) == 4
            assert self._load(cache, model, tokens) == 4
            assert self._load(cache, model, _prompt(1, 2, 9)) == 2
            out = np.zeros((3, *layout.block_shape), dtype=layout.dtype)
            loaded = cache.load(cache.lookup(tokens), out=out).result(WAIT_S)
            assert loaded.block_count == 3
            assert model.wrong(tokens, out) == []
            with cache.load(cache.lookup(tokens)).result(WAIT_S) as loaded:
                assert sum(len(part) for part in loaded.parts) == 4
            self._quiet(cache)

    def test_more_than_fits(self, make_cache: MakeCache) -> None:
        """Every tier overflows: what is found is right, what is gone is a miss."""
        layout, model = LAYOUTS[1], CacheModel(BLOCK_TOKENS)
        with make_cache(layout=layout, block_tokens=BLOCK_TOKENS) as cache:
            total = 0
            for part in range(100_000):
                tokens = _prompt(part % 7, part, part + 1)
                self._store(cache, model, tokens, layout)
                total += 2
                if total >= 1.2 * sum(tier.capacity for tier in cache.stats().tiers):
                    break
                if part % 16 == 0:
                    self._load(cache, model, _prompt(part // 2 % 7, part // 2, part // 2 + 1))
                    assert cache.check() == []
            found = sum(self._load(cache, model, list(tokens)) for tokens in list(model.prompts())[:400])
            assert found > 0
            self._quiet(cache)

    def test_another_layout_is_refused(self, make_cache: MakeCache) -> None:
        """One layout per cache; misuse raises and changes nothing."""
        layout = LAYOUTS[1]
        with make_cache(block_tokens=BLOCK_TOKENS) as cache:
            tokens = _prompt(1)
            assert cache.store(tokens, payload_of(tokens, layout, BLOCK_TOKENS)).wait(WAIT_S)
            for wrong in (np.zeros((1, 7, 3), np.int16), np.zeros((1, 3, 7), np.uint16), [[1]]):
                with pytest.raises(LayoutError):
                    cache.store(tokens, wrong)
            with pytest.raises(ValueError, match="blocks for"):
                cache.store(tokens, payload_of(_prompt(1, 2), layout, BLOCK_TOKENS))
            assert cache.lookup(tokens).blocks == 1
            self._quiet(cache)

    # -- what is forgotten, what lasts --------------------------------------------------------------------------------

    def test_invalidation_and_epochs(self, make_cache: MakeCache) -> None:
        """What was dropped is never found again, also not by the next cache."""
        layout, model = LAYOUTS[1], CacheModel(BLOCK_TOKENS)
        with make_cache(layout=layout, block_tokens=BLOCK_TOKENS) as cache:
            self._store(cache, model, _prompt(1, 2, 3), layout)
            self._store(cache, model, _prompt(1, 4), layout)
            assert cache.invalidate(_prompt(1, 2)) == 2
            assert [cache.lookup(_prompt(*parts)).blocks for parts in ((1, 2, 3), (1, 4))] == [1, 2]
            cache.bump_epoch("two")
            assert cache.stats().blocks == 0
            self._store(cache, model, _prompt(5), layout)
            assert cache.lookup(_prompt(1, 4)).blocks == 0
            self._quiet(cache)
        with make_cache(layout=layout, block_tokens=BLOCK_TOKENS) as cache:
            assert cache.lookup(_prompt(1, 4)).blocks == 0
            assert self._load(cache, model, _prompt(5)) == int(_persists(cache))

    def test_what_was_flushed_is_there_next_time(self, make_cache: MakeCache) -> None:
        """Where a tier persists, everything acknowledged is there; elsewhere nothing is."""
        layout, model = LAYOUTS[0], CacheModel(BLOCK_TOKENS)
        prompts = [_prompt(part, part + 10) for part in range(1, 5)]
        with make_cache(layout=layout, block_tokens=BLOCK_TOKENS) as cache:
            lasts = _persists(cache)
            for tokens in prompts:
                assert self._store(cache, model, tokens, layout) == 2
            assert cache.flush(WAIT_S, to="nvme" if lasts else None)
        with pytest.raises(CacheClosedError):
            cache.lookup(prompts[0])
        with make_cache(block_tokens=BLOCK_TOKENS) as cache:
            assert cache.layout == (layout if lasts else None)
            for tokens in prompts:
                assert cache.lookup(tokens).blocks == 2 * lasts
                assert self._load(cache, model, tokens) == 2 * lasts
            if lasts:
                self._quiet(cache)

    # -- many at once -------------------------------------------------------------------------------------------------

    def test_threads(self, make_cache: MakeCache) -> None:
        """Four threads store, load and release at once; every byte is right, nothing is left over."""
        layout = LAYOUTS[1]
        prompts = [_prompt(a, b, c) for a in range(3) for b in range(3) for c in range(4)]
        payloads = {tuple(tokens): payload_of(tokens, layout, BLOCK_TOKENS) for tokens in prompts}
        model = CacheModel(BLOCK_TOKENS)
        for tokens in prompts:
            model.store(tokens, payloads[tuple(tokens)])
        problems: list[BaseException] = []
        until = time.monotonic() + THREADS_S

        def work(seed: int, cache: TieredKVCache) -> None:
            chosen = random.Random(seed)
            try:
                while time.monotonic() < until:
                    tokens = chosen.choice(prompts)
                    match = cache.lookup(tokens)
                    if chosen.random() < 0.5:
                        blocks: Any = payloads[tuple(tokens)][match.blocks :]
                        assert cache.store(tokens, blocks, match.blocks).wait(WAIT_S)
                    else:
                        self._load(cache, model, tokens)
                    if chosen.random() < 0.1:
                        cache.release(tokens)
            except BaseException as error:
                problems.append(error)
                raise

        with make_cache(layout=layout, block_tokens=BLOCK_TOKENS) as cache:
            threads = [threading.Thread(target=work, args=(seed, cache)) for seed in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert not any(thread.is_alive() for thread in threads)
            assert problems == []
            self._quiet(cache)
