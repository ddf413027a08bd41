"""A Valkey or Redis server fails, in every way that was seen: the cache's callers lose hits, and nothing else."""

from __future__ import annotations

import contextlib

import pytest
from ordeal import BLOCKS, LAYOUT, PROMPTS, Ordeal, put_prompts, put_strangers
from rig_island import Island
from rig_net import Proxy
from rig_redis import RedisServer, free_port
from verdict import endure, judge, note

from tiercache import Remote
from tiercache.remote.urls import open_key_tier

pytestmark = pytest.mark.remote

STORE = "Valkey"
NAMES = {"namespace": "ordeal", "epoch": "weights"}
SEED = range(1, PROMPTS + 1)


@pytest.fixture
def server(tmp_path):
    with RedisServer(tmp_path / "redis") as server:
        yield server


@pytest.fixture
def proxy(server):
    proxy = Proxy(server.port)
    try:
        yield proxy
    finally:
        proxy.close()


def remote(port, host="127.0.0.1"):
    return Remote(f"redis://{host}:{port}", hint_s=1.0, missing_s=0.3)


def seed(server_url):
    """As a peer would have."""
    tier = open_key_tier(server_url)
    with contextlib.closing(tier):
        return put_prompts(tier, SEED, **NAMES)


def test_the_server_is_killed_and_started_again(server):
    seed(server.url)
    with Ordeal(remote(server.port), **NAMES) as o:

        def again():
            server.start()
            seed(server.url)

        back = endure(o, server.kill, again)
        judge(o, opens=True)
        note(o, STORE, "the server is killed, and started again with nothing in it", back)


def test_the_server_freezes(server):
    seed(server.url)
    with Ordeal(remote(server.port), **NAMES) as o:
        back = endure(o, server.stop, server.go_on, fault_s=5.0)
        judge(o, opens=True)
        note(o, STORE, "the server stops answering, its connections stay open", back)


def test_connections_are_reset_again_and_again(server, proxy):
    seed(server.url)
    with Ordeal(remote(proxy.port), **NAMES) as o:

        def cut():
            for _ in range(40):
                proxy.cut()
                o.rest(0.05)

        back = endure(o, cut, proxy.heal, fault_s=0.5)
        judge(o, opens="open" in o.states())
        note(o, STORE, "connections are reset 20 times a second", back)


def test_the_network_is_slow(server, proxy):
    seed(server.url)
    with Ordeal(remote(proxy.port), **NAMES) as o:

        def slow():
            proxy.rate = 400_000.0

        back = endure(o, slow, proxy.heal, fault_s=6.0)
        judge(o, opens=True)
        note(o, STORE, "the network brings 0.4 MB/s: no load ends in time", back)


def test_bytes_are_flipped_on_their_way(server, proxy):
    seed(server.url)
    with Ordeal(remote(proxy.port), **NAMES) as o:

        def spoil():
            proxy.flip_every["down"] = BLOCKS * LAYOUT.block_nbytes // 4  # about four bits of every prompt

        back = endure(o, spoil, lambda: (proxy.heal(), seed(server.url)), fault_s=3.0)
        judge(o, opens="open" in o.states())
        assert o.stats()["wrong"] > 0, "nothing was flipped"
        note(o, STORE, "bits are flipped on their way", back)


def test_the_wire_is_cut_and_mended(tmp_path):
    with Island() as island:
        port = free_port()
        with RedisServer(tmp_path / "redis", port=port, on=island) as server:
            seed(f"redis://{island.there}:{port}")
            with Ordeal(remote(port, island.there), **NAMES) as o:
                with contextlib.ExitStack() as cutting:
                    back = endure(o, lambda: cutting.enter_context(island.cut()), cutting.close, fault_s=6.0)
                judge(o, opens=True)
                note(o, STORE, "the network is cut: packets vanish", back)
            assert server.pid


def test_the_server_is_full(tmp_path):
    with RedisServer(tmp_path / "redis", maxmemory="40mb") as server:
        seed(server.url)
        with Ordeal(remote(server.port), **NAMES) as o:

            def wait_full():
                o.wait_for(lambda: o.stats()["writes_refused"] > 0, 30.0)

            back = endure(o, wait_full, lambda: server.command("CONFIG", "SET", "maxmemory", "0"), fault_s=2.0)
            written = o.stats()["written"]
            o.wait_for(lambda: o.stats()["written"] > written, 30.0)
            judge(o, opens=False)
            note(o, STORE, "the server is full and lets nothing go; later it is given memory", back)


def test_the_operator_turns_it_off_and_on(server):
    seed(server.url)
    with Ordeal(remote(server.port), **NAMES) as o:
        with o.phase("before"):
            o.flows()
        o.cache.remote.disable()
        o.rest(1.2)  # what was under way has ended by its deadline
        asked = _commands(server)
        with o.phase("fault"):
            o.rest(2.0)
        assert _commands(server) == asked, "the server was called while the remote tier was off"
        o.cache.remote.enable()
        with o.phase("after"):
            back = o.flows()
        judge(o, opens="open" in o.states())
        assert o.seen["fault"].remote_blocks == 0
        note(o, STORE, "the operator turns the remote tier off, and on again", back)


def _commands(server):
    """Commands that the server has carried out for anybody but us."""
    lines = server.command("INFO", "commandstats").splitlines()
    calls = {
        line.partition(":")[0]: int(line.partition("calls=")[2].partition(",")[0]) for line in lines if "=" in line
    }
    return sum(n for name, n in calls.items() if name not in ("cmdstat_info", "cmdstat_command|docs"))


def test_others_use_the_server_too(server):
    tier = open_key_tier(server.url)
    with contextlib.closing(tier):
        put_strangers(tier, **NAMES)
        put_prompts(tier, range(7, PROMPTS + 1), **NAMES)
    with Ordeal(remote(server.port), **NAMES) as o:
        with o.phase("fault"):
            o.rest(2.0)
            o.flows(4 * BLOCKS)
        assert o.stats()["wrong"] > 0, "no frame of another version was read"
        judge(o, opens="open" in o.states())
        note(o, STORE, "instances with other weights, models, layouts and versions share the store", None)
