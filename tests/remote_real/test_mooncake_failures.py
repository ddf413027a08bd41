"""Mooncake Store fails, in every way that was seen: the cache's callers lose hits, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

import pytest
from ordeal import BLOCKS, LAYOUT, PROMPTS, Ordeal, put_prompts
from rig_etcd import Etcd
from rig_island import Island
from rig_mooncake import MIB, Owner, Rig, free_port
from verdict import endure, judge, note

from tiercache import Remote
from tiercache.remote.urls import open_key_tier
from tiercache.testing import put_blocks

pytestmark = pytest.mark.remote

STORE = "Mooncake Store"
NAMES = {"namespace": "ordeal", "epoch": "weights"}
QUICK = ("--default_kv_lease_ttl=1000", "--client_ttl=4")
"""Leases and the life of a silent client, shortened: a test waits for them."""
SEED = range(1, PROMPTS + 1)
VALUES_NBYTES = PROMPTS * BLOCKS * LAYOUT.stride


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path) as rig:
        yield rig


def remote(address, **more):
    """What a cache is told: it gives no memory of its own, and forgets soon what it was told."""
    query = "&".join(f"{name}={value}" for name, value in {"segment": 0, "buffer": "64MiB", **more}.items())
    return Remote(f"mooncake://{address}?{query}", hint_s=1.0, missing_s=0.3)


@contextlib.contextmanager
def peer(address, **more):
    """Another machine's client, as far as the store can tell."""
    tier = open_key_tier(remote(address, **more).tier)
    try:
        yield tier
    finally:
        tier.close()


def seed(address, **more):
    """Put the prompts, until the store has taken all of them."""
    end = time.monotonic() + 40
    with peer(address, **more) as tier:
        while True:
            try:
                return put_prompts(tier, SEED, **NAMES)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.3)


def ordeal(address, **more):
    return Ordeal(remote(address, **more), **NAMES)


class TestOwners:
    def test_the_owner_is_killed(self, rig):
        master = rig.master(*QUICK)
        owner = rig.owner(master)
        seed(master.address)
        with ordeal(master.address) as o:

            def again():
                rig.owner(master)
                seed(master.address)

            back = endure(o, owner.kill, again, fault_s=8.0)
            judge(o, opens=True)
            note(o, STORE, "the process that owns the memory is killed; another takes its place", back)

    def test_one_of_two_owners_is_killed_and_there_are_two_replicas(self, rig):
        master = rig.master(*QUICK)
        first, _ = rig.owner(master), rig.owner(master)
        seed(master.address, replicas=2)
        with ordeal(master.address) as o:
            back = endure(o, first.kill, lambda: None, fault_s=8.0)
            judge(o, opens=True)
            note(o, STORE, "one of two owners is killed, every value has two replicas", back)

    def test_an_owner_comes_back_at_the_address_of_a_dead_one(self, rig):
        master = rig.master(*QUICK)
        owner = rig.owner(master)
        seed(master.address)
        with ordeal(master.address) as o:

            def restart():
                owner.kill()
                rig.owner(master)  # at once: the master still lists what the dead one had

            back = endure(o, restart, lambda: seed(master.address), fault_s=6.0)
            judge(o, opens="open" in o.states())
            note(o, STORE, "an owner is killed and started again at once: its old segment is listed still", back)

    def test_the_owner_freezes(self, rig):
        master = rig.master("--default_kv_lease_ttl=1000", "--client_ttl=60")
        owner = rig.owner(master)
        seed(master.address)
        with ordeal(master.address) as o:
            back = endure(o, owner.freeze, owner.thaw, fault_s=5.0)
            judge(o, opens=True)
            note(o, STORE, "the owner stops answering, its connections stay open", back)


class TestMasters:
    def test_the_master_is_killed_and_started_again(self, rig):
        master = rig.master(*QUICK)
        rig.owner(master)
        seed(master.address)
        with ordeal(master.address) as o:

            def again():
                rig.adopt(master.again())
                seed(master.address)

            back = endure(o, master.kill, again, fault_s=6.0)
            judge(o, opens=True)
            note(o, STORE, "the master is killed, and started again without its keys", back)

    def test_the_master_freezes(self, rig):
        master = rig.master("--default_kv_lease_ttl=1000", "--client_ttl=60")
        rig.owner(master)
        seed(master.address)
        with ordeal(master.address) as o:
            back = endure(o, master.freeze, master.thaw, fault_s=5.0)
            judge(o, opens=True)
            note(o, STORE, "the master stops answering, its connections stay open", back)

    def test_another_master_takes_over(self, rig, tmp_path):
        with Etcd(tmp_path) as etcd:
            ha = ("--enable_ha=true", f"--etcd_endpoints={etcd.address}", "--enable_oplog=true", *QUICK)
            first = rig.master(*ha)
            standby = rig.standby(*ha)
            where = f"etcd://{etcd.address}"
            rig.owner_at(where)
            seed(first.address, ha=where) if False else seed_ha(where)
            with ordeal_ha(where) as o:
                back = endure(o, first.kill, lambda: None, fault_s=12.0)
                judge(o, opens=True)
                note(o, STORE, "the master is killed, another takes over (etcd, oplog): the keys stay", back)
            assert standby.alive
