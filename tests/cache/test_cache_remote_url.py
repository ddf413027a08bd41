"""A key tier that the cache opened itself, from a URL: when it is opened, when it is closed, and when it must not."""

import threading

import numpy as np
import pytest
from cache_kit import BLOCK_TOKENS, LAYOUT, WAIT_S, bits, blocks_of, dram, eventually, prompt

from tiercache import DRAM, ConfigError, Remote, TieredKVCache, assembly
from tiercache.testing import HangingKeyTier, MemoryKeyTier, put_blocks

pytest.importorskip("valkey", reason="the extra valkey")

URL = "redis://:sesame@10.0.0.5:7000"
TOKENS = prompt(1, 2, 3, 4)
EPOCH = b"weights-1"


class Watched(HangingKeyTier):
    """Counts how often it was closed, and whether a call was in it then."""

    endpoint = "10.0.0.5:7000"

    def __init__(self, url):
        super().__init__(MemoryKeyTier(100))
        self.url = url
        self.closes = []

    def close(self):
        self.closes.append(self.hung)


@pytest.fixture
def opened(monkeypatch):
    tiers = []

    def open_key_tier(url):
        tiers.append(Watched(url))
        return tiers[-1]

    monkeypatch.setattr(assembly, "open_key_tier", open_key_tier)
    yield tiers
    for tier in tiers:
        tier.wake()


def open_cache(layout=LAYOUT, **fields):
    tiers = [dram(32), Remote(URL, quota=0.9, **fields)]
    return TieredKVCache(tiers, layout=layout, namespace="test", epoch=EPOCH, block_tokens=BLOCK_TOKENS)


def fill(tier):
    put_blocks(tier, TOKENS, blocks_of(TOKENS), namespace="test", epoch=EPOCH, block_tokens=BLOCK_TOKENS)


def test_it_is_opened_used_and_closed(opened):
    with open_cache() as cache:
        (tier,) = opened
        assert tier.url == URL and tier.closes == []
        fill(tier)
        match = cache.lookup(TOKENS, deadline_s=WAIT_S)
        with cache.load(match).result(WAIT_S) as loaded:
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        assert cache.stats().remote["endpoint"] == "10.0.0.5:7000"
        assert "sesame" not in f"{cache.stats().as_dict()} {cache!r} {cache.settings}"
    assert tier.closes == [0]
    cache.close()
    assert tier.closes == [0]


def test_it_is_opened_once_the_layout_is_known(opened):
    with open_cache(layout=None) as cache:
        assert opened == []
        cache.store(TOKENS, blocks_of(TOKENS)).wait(WAIT_S)
        assert len(opened) == 1
    assert opened[0].closes == [0]


def test_it_is_closed_where_what_comes_next_fails(opened, monkeypatch):
    def no_mover(*args):
        raise OSError("no thread")

    monkeypatch.setattr(assembly, "make_mover", no_mover)
    with pytest.raises(ConfigError, match="no thread"):
        open_cache()
    assert opened[0].closes == [0]


def test_one_that_cannot_be_opened_leaves_nothing_behind(monkeypatch):
    def open_key_tier(url):
        raise OSError("no more of these")

    monkeypatch.setattr(assembly, "open_key_tier", open_key_tier)
    before = threading.active_count()
    with pytest.raises(ConfigError, match="no more of these") as caught:
        open_cache()
    assert "sesame" not in str(caught.value)
    assert threading.active_count() == before


def test_it_stays_open_while_a_thread_hangs_in_it(opened, caplog):
    cache = open_cache(find_deadline_s=0.05)
    (tier,) = opened
    tier.hang("find")
    assert cache.lookup(TOKENS, deadline_s=0.2).blocks == 0
    assert tier.wait_hung(1)
    cache.close(timeout=0.5)
    assert tier.closes == []
    assert "1 calls have not returned" in caplog.text
    tier.wake()
    assert eventually(lambda: tier.closes == [0])


def test_another_ones_tier_is_never_closed(opened):
    tier = Watched("")
    fill(tier)
    for _ in range(2):
        tiers = [DRAM("1MiB"), Remote(tier)]
        with TieredKVCache(tiers, layout=LAYOUT, namespace="test", epoch=EPOCH, block_tokens=BLOCK_TOKENS) as cache:
            assert cache.lookup(TOKENS, deadline_s=WAIT_S).blocks == 4
    assert tier.closes == opened == []
    assert np.asarray(tier.find([bytes(32)], 1.0)).tolist() == [False]
