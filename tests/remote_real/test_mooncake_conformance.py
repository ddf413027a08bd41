"""The shipped suite of key tiers on the real Mooncake Store, rows in place and rows that are bounced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from rig_mooncake import MIB, Master, Rig, mooncake_rig

from tiercache.remote.mooncake import MooncakeTier
from tiercache.remote.mooncake_options import MooncakeOptions
from tiercache.testing.key_tier_suite import KeyTierSuite

pytestmark = pytest.mark.remote
__all__ = ["mooncake_rig"]


@pytest.fixture(scope="module")
def store(mooncake_rig: Rig) -> Iterator[tuple[Master, Any]]:
    """A master with an owner, and a client to empty it with."""
    from mooncake.store import MooncakeDistributedStore

    master = mooncake_rig.master("--default_kv_lease_ttl=1000")
    mooncake_rig.owner(master, 128 * MIB)
    client = MooncakeDistributedStore()
    assert client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 16 * MIB, "tcp", "", master.address) == 0
    yield master, client
    client.close()


def opened(url: str) -> MooncakeTier:
    """One that connects at once, in its first call: it is not opened in another process before, which is for masters
    that hang, and takes a second or more each time."""
    return MooncakeTier(MooncakeOptions.from_url(url), rehearse=lambda settings: None)


@pytest.fixture
def make_tier(store: tuple[Master, Any]) -> Callable[[], MooncakeTier]:
    master, client = store

    def make() -> MooncakeTier:
        client.remove_all(True)
        return opened(f"mooncake://{master.address}")

    return make


@pytest.fixture(scope="module")
def shared(mooncake_rig: Rig, store: tuple[Master, Any]) -> str:
    """The address of a `mooncake_client`."""
    return mooncake_rig.client(store[0]).address


class TestMooncake(KeyTierSuite):
    replaces = False

    @pytest.fixture
    def make_tier(self, make_tier: Callable[[], MooncakeTier]) -> Callable[[], MooncakeTier]:
        return make_tier


class TestMooncakeWithItsOwnMemory(KeyTierSuite):
    """The process gives memory too; most values lie in it."""

    replaces = False

    @pytest.fixture
    def make_tier(self, store: tuple[Master, Any]) -> Callable[[], MooncakeTier]:
        master, client = store

        def make() -> MooncakeTier:
            client.remove_all(True)
            return opened(f"mooncake://{master.address}?segment=64MiB")

        return make


class TestMooncakeOverSharedMemory(KeyTierSuite):
    """Through a `mooncake_client` of this machine."""

    replaces = False

    @pytest.fixture
    def make_tier(self, shared: str, store: tuple[Master, Any]) -> Callable[[], MooncakeTier]:
        master, client = store

        def make() -> MooncakeTier:
            client.remove_all(True)
            return opened(f"mooncake://{master.address}?client={shared}")

        return make


def test_rows_in_registered_memory_are_moved_in_place(make_tier: Callable[[], MooncakeTier]) -> None:
    """The bytes land where they were asked to, with any stride, whether registered before or after connecting."""
    memory = np.zeros((16, 5000), dtype=np.uint8)
    rng = np.random.default_rng(0)
    memory[:8] = rng.integers(0, 256, (8, 5000), dtype=np.uint8)
    keys = [bytes([i]) * 32 for i in range(8)]
    tier = make_tier()
    tier.register(memory.reshape(-1))
    try:
        assert tier.put(keys, memory[:8, :4000], 5.0).all()
        assert tier.get(keys, memory[8:, :4000], 5.0).all()
        assert (memory[8:, :4000] == memory[:8, :4000]).all()
        assert (memory[8:, 4000:] == 0).all()
        assert tier.counts["in_place"] == 16 and tier.counts["bounced"] == 0
        later = np.zeros((8, 4000), dtype=np.uint8)
        tier.register(later)
        assert tier.get(keys[::-1], later[::-1], 5.0).all()
        assert tier.counts["in_place"] == 24
        tier.unregister(later)
        assert tier.get(keys, later, 5.0).all()
        assert tier.counts["bounced"] == 8
        assert (later == memory[:8, :4000]).all()
    finally:
        tier.close()
