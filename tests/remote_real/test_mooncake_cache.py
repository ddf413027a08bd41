"""Whole caches over the real Mooncake Store by its URL: what one computed another finds, moved in place; and no fault
of the store is more than a miss, or anybody's wait."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from rig_mooncake import MIB, Master, Rig, mooncake_rig

from tiercache import DRAM, KVLayout, Remote, TieredKVCache
from tiercache.testing.model import payload_of

pytestmark = [pytest.mark.remote, pytest.mark.timeout(180)]
__all__ = ["mooncake_rig"]

BLOCK_TOKENS = 4
LAYOUT = KVLayout((2, 4096), "float32")
N = 24
WAIT_S = 10.0


def prompt(number: int) -> np.ndarray:
    return np.arange(number * N * BLOCK_TOKENS, (number + 1) * N * BLOCK_TOKENS, dtype=np.int32)


def open_cache(master: Master, query: str = "") -> TieredKVCache:
    patient = {"write_deadline_s": 5.0, "find_deadline_s": 5.0}
    remote = Remote(f"mooncake://{master.address}?{query}", quota=1.0, missing_s=0.05, **patient)
    tiers = [DRAM(256 * LAYOUT.stride), remote]
    return TieredKVCache(tiers, layout=LAYOUT, namespace="test", epoch=b"weights-1", block_tokens=BLOCK_TOKENS)


def store(cache: TieredKVCache, number: int) -> None:
    ticket = cache.store(prompt(number), payload_of(prompt(number), LAYOUT, BLOCK_TOKENS))
    assert ticket.accepted == N


def read(cache: TieredKVCache, number: int, deadline_s: float) -> int:
    """Blocks loaded, every byte compared."""
    match = cache.lookup(prompt(number), deadline_s=deadline_s)
    with cache.load(match).result(WAIT_S) as loaded:
        right = np.asarray(payload_of(prompt(number), LAYOUT, BLOCK_TOKENS))[: loaded.block_count]
        assert np.asarray(loaded.blocks).tobytes() == right.tobytes()
        return loaded.block_count


def eventually(what: Callable[[], bool], within_s: float = 30.0) -> None:
    end = time.monotonic() + within_s
    while not what():
        assert time.monotonic() < end, f"not within {within_s} s"
        time.sleep(0.1)


def connected(cache: TieredKVCache) -> None:
    """Ask until the store has answered, which takes a second or more on a busy machine."""

    def answered() -> bool:
        cache.lookup(prompt(99), deadline_s=1.0)
        asked = cache.stats().remote
        return bool(asked["finds"] > asked["finds_failed"] + asked["finds_under_way"])

    eventually(answered)


def test_what_one_cache_computed_another_finds(mooncake_rig: Rig) -> None:
    """Written after it was stored, read by another cache, in place on both sides."""
    with Rig(mooncake_rig.folder) as rig:
        master = rig.master("--default_kv_lease_ttl=5000")
        rig.owner(master, 64 * MIB)
        with open_cache(master) as one, open_cache(master) as other:
            store(one, 1)
            eventually(lambda: one.stats().remote["written"] >= N)
            eventually(lambda: read(other, 1, 1.0) == N)
            tiers = [cache.stack.mover.keyed._tier for cache in (one, other)]
            for tier in tiers:
                assert tier.counts["in_place"] > 0 and tier.counts["bounced"] == 0, tier.counts
            assert tiers[1].transport().startswith("tcp"), tiers[1].transport()


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("whom", ["master", "owner"])
def test_a_store_in_trouble_costs_hits_and_nothing_else(mooncake_rig: Rig, whom: str, fault: str) -> None:
    """Lookups and loads keep their deadlines, bytes are right, close does not hang."""
    with Rig(mooncake_rig.folder) as rig:
        master = rig.master("--default_kv_lease_ttl=5000", "--client_ttl=600")
        owner = rig.owner(master, 64 * MIB)
        with open_cache(master) as one:
            connected(one)  # while it connects, writes are dropped
            for number in range(3):
                store(one, number)
            eventually(lambda: one.stats().remote["written"] >= 3 * N)
        cache = open_cache(master)
        try:
            assert read(cache, 0, 5.0) == N
            process = master if whom == "master" else owner
            process.kill() if fault == "kill" else process.freeze()
            for number in (1, 2, 1, 2, 5):
                began = time.monotonic()
                read(cache, number, 0.2)
                assert time.monotonic() - began < 2.5
            assert read(cache, 0, 0.2) == N
        finally:
            began = time.monotonic()
            cache.close()
            assert time.monotonic() - began < 15.0
