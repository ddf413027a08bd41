"""Mooncake Store fails, in every way that was seen: the cache's callers lose hits, and nothing else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from random import Random

import pytest
from ordeal import BLOCKS, PROMPTS, Ordeal, put_prompts, put_strangers
from rig_island import Island
from rig_mooncake import HOST, MIB, Etcd, Master, Rig
from verdict import endure, judge, note

from tiercache import Remote
from tiercache.remote.urls import open_key_tier

pytestmark = pytest.mark.remote

STORE = "Mooncake Store"
NAMES = {"namespace": "ordeal", "epoch": "weights"}
LEASE = "--default_kv_lease_ttl=1000"
QUICK = (LEASE, "--client_ttl=4")
"""Leases and the life of a silent client, shortened: a test waits for their ends."""
PATIENT = (LEASE, "--client_ttl=60")
SEED = range(1, PROMPTS + 1)
SEED_S = 60.0
"""How long a store may take until it holds all prompts."""


@pytest.fixture
def rig(tmp_path):
    with Rig(tmp_path) as rig:
        yield rig


def remote(where, **more):
    """What a cache is told. It gives no memory of its own, and forgets soon what it was told."""
    query = "&".join(f"{name}={value}" for name, value in {"segment": "0B", "buffer": "64MiB", **more}.items())
    return Remote(f"mooncake://{where}?{query}", hint_s=1.0, missing_s=0.3)


def seed(where, **more):
    """Put the prompts as another machine would have, until the store has taken all of them."""
    tier, end = open_key_tier(remote(where, **more).tier), time.monotonic() + SEED_S
    with contextlib.closing(tier):
        while True:
            try:
                return put_prompts(tier, SEED, **NAMES)
            except OSError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.3)


def ordeal(where, **more):
    return Ordeal(remote(where, **more), **NAMES)


# -- owners of memory -------------------------------------------------------------------------------------------------


def test_the_owner_is_killed(rig):
    master = rig.master(*QUICK)
    owner = rig.owner(master)
    seed(master.address)
    with ordeal(master.address) as o:

        def another():
            rig.owner(master)
            seed(master.address)

        back = endure(o, owner.kill, another, fault_s=8.0)
        judge(o, opens=True)
        note(o, STORE, "the process that owns the memory is killed; later another one comes", back)


def test_one_of_two_owners_is_killed_and_every_value_is_there_twice(rig):
    master = rig.master(*QUICK)
    first, _ = rig.owner(master), rig.owner(master)
    seed(master.address, replicas=2)
    with ordeal(master.address) as o:
        back = endure(o, first.kill, lambda: None, fault_s=8.0)
        judge(o, opens="open" in o.states())
        note(o, STORE, "one of two owners is killed, every value has two replicas", back)


def test_an_owner_starts_again_while_its_old_segment_is_listed(rig):
    master = rig.master(*QUICK)
    owner = rig.owner(master)
    seed(master.address)
    with ordeal(master.address) as o:

        def restart():
            owner.kill()
            rig.owner(master)

        back = endure(o, restart, lambda: seed(master.address), fault_s=6.0)
        judge(o, opens="open" in o.states())
        note(o, STORE, "an owner is killed and started again at once: its old segment is listed still", back)


def test_the_owner_freezes(rig):
    master = rig.master(*PATIENT)
    owner = rig.owner(master)
    seed(master.address)
    with ordeal(master.address) as o:
        back = endure(o, owner.freeze, owner.thaw, fault_s=5.0)
        judge(o, opens=True)
        note(o, STORE, "an owner stops answering, its connections stay open", back)


# -- masters ----------------------------------------------------------------------------------------------------------


def test_the_master_is_killed_and_started_again(rig):
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


def test_the_master_freezes(rig):
    master = rig.master(*PATIENT)
    rig.owner(master)
    seed(master.address)
    with ordeal(master.address) as o:
        back = endure(o, master.freeze, master.thaw, fault_s=5.0)
        judge(o, opens=True)
        note(o, STORE, "the master stops answering, its connections stay open", back)


def test_another_master_takes_over(rig, tmp_path):
    etcd = rig.adopt(Etcd(tmp_path))
    first = rig.adopt(Master(tmp_path, *PATIENT, etcd=etcd))
    time.sleep(1.0)
    second = rig.adopt(Master(tmp_path, *PATIENT, etcd=etcd, stands_by=True))
    rig.owner(first)
    seed(etcd.address, ha="etcd")
    with ordeal(etcd.address, ha="etcd") as o:
        back = endure(o, first.kill, lambda: None, fault_s=4.0, back_within_s=60.0)
        judge(o, opens=True)
        note(o, STORE, "the master is killed, another takes over with its keys (etcd, oplog)", back)
    assert second.alive


def test_nobody_answers_at_the_masters_address():
    stop = threading.Event()
    with socket.create_server((HOST, 0)) as server:
        server.settimeout(0.1)
        taken = []

        def take():
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    taken.append(server.accept()[0])

        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        try:
            with ordeal(f"{HOST}:{server.getsockname()[1]}") as o:
                with o.phase("fault"):
                    o.rest(6.0)
                judge(o, opens=True)
                note(o, STORE, "who listens at the master's address never answers", None)
            assert taken
        finally:
            stop.set()
            thread.join(5)
            for each in taken:
                each.close()


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.fixture
def island():
    with Island() as island:
        yield island


@pytest.fixture
def far(rig, island):
    """A master whose owner is elsewhere too; gone before the island."""
    master = rig.master(*PATIENT, on=island)
    rig.owner(master, on=island)
    seed(master.address, local=island.here)
    yield master
    rig.close()


def test_the_wire_is_cut_and_mended(far, island):
    with ordeal(far.address, local=island.here) as o, contextlib.ExitStack() as cutting:
        back = endure(o, lambda: cutting.enter_context(island.cut()), cutting.close, fault_s=6.0, back_within_s=60.0)
        judge(o, opens=True)
        note(o, STORE, "the network is cut: packets vanish", back)


def test_the_wire_is_slow(far, island):
    with ordeal(far.address, local=island.here) as o, contextlib.ExitStack() as slowing:
        slow = island.slow("4mbit")
        back = endure(o, lambda: slowing.enter_context(slow), slowing.close, fault_s=8.0, back_within_s=60.0)
        judge(o, opens="open" in o.states())
        note(o, STORE, "the network brings 0.5 MB/s: no load ends in time", back)


# -- what it holds ----------------------------------------------------------------------------------------------------


def test_its_disk_brings_other_bytes(rig, tmp_path):
    """Values that the owner moved to its disk are spoilt there: the store serves them as they are."""
    ssd = tmp_path / "ssd"
    ssd.mkdir()
    master = rig.master("--enable_offload=true", "--default_kv_lease_ttl=200", "--client_ttl=60")
    rig.owner(master, 32 * MIB, ssd=ssd)
    _fill(master.address)
    with ordeal(master.address) as o:
        back = endure(o, lambda: _spoil(ssd), lambda: seed(master.address), fault_s=5.0)
        assert o.stats()["wrong"] > 0, "no spoilt value was read"
        judge(o, opens="open" in o.states())
        note(o, STORE, "its SSD offload holds flipped bits", back)


def _fill(where):
    """The prompts, slowly enough for the owner to write them to its disk; then others, so that they leave memory."""
    tier = open_key_tier(remote(where).tier)
    with contextlib.closing(tier):
        for number in [*SEED, *range(1000, 1000 + 2 * PROMPTS)]:
            for _ in range(20):
                with contextlib.suppress(OSError):
                    put_prompts(tier, range(number, number + 1), **NAMES)
                    break
                time.sleep(0.2)
            time.sleep(0.1)
        time.sleep(2.0)


def _spoil(ssd):
    random = Random(1)
    for file in ssd.glob("**/*.bucket"):
        with file.open("r+b") as data:
            size = data.seek(0, 2)
            for at in range(random.randrange(60_000), size, 60_000):
                data.seek(at)
                byte = data.read(1)[0]
                data.seek(at)
                data.write(bytes([byte ^ 0x40]))


def test_the_pool_is_full(rig):
    master = rig.master(LEASE, "--client_ttl=60", "--eviction_ratio=0.0")  # nothing leaves for something else
    rig.owner(master, 32 * MIB)
    seed(master.address)
    with ordeal(master.address) as o:

        def wait_full():
            o.wait_for(lambda: o.stats()["writes_refused"] > 0, 30.0)

        back = endure(o, wait_full, lambda: rig.owner(master, 256 * MIB), fault_s=2.0)
        written = o.stats()["written"]
        o.wait_for(lambda: o.stats()["written"] > written, 30.0)
        judge(o, opens=False)
        note(o, STORE, "the pool is full: it takes no more; later an owner brings memory", back)


def test_others_use_the_store_too(rig):
    master = rig.master(*PATIENT)
    rig.owner(master)
    tier = open_key_tier(remote(master.address).tier)
    with contextlib.closing(tier):
        put_strangers(tier, **NAMES)
        put_prompts(tier, range(7, PROMPTS + 1), **NAMES)
    with ordeal(master.address) as o:
        with o.phase("fault"):
            o.rest(2.0)
            o.flows(4 * BLOCKS)
        assert o.stats()["wrong"] > 0, "no frame of another version was read"
        judge(o, opens="open" in o.states())
        note(o, STORE, "instances with other weights, models, layouts and versions share the store", None)
