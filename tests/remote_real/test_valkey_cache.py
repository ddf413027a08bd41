"""A cache over a real redis-server by its URL: right bytes, no wait, no hang and no exception under every fault, and
well again by itself once the fault is over."""

import gc
import threading
import time

import numpy as np
import pytest
from rig_late import Lateness
from rig_net import Proxy
from rig_redis import HOST, RedisServer

from tiercache import DRAM, KVLayout, Remote, TieredKVCache
from tiercache.remote.urls import open_key_tier
from tiercache.testing import put_blocks
from tiercache.testing.model import payload_of

pytestmark = pytest.mark.remote

BLOCK_TOKENS = 4
LAYOUT = KVLayout((2, 4096), "float32")
N = 8
EPOCH = b"weights-1"
DEADLINE_S = 0.2
LATE_S = 0.05
WAIT_S = 10.0


def prompt(number):
    """N blocks that no other number shares."""
    return np.arange(number * N * BLOCK_TOKENS, (number + 1) * N * BLOCK_TOKENS, dtype=np.int32)


def blocks_of(tokens):
    return payload_of(tokens, LAYOUT, BLOCK_TOKENS)


def fill(url, *numbers):
    """As another cache leaves them there."""
    tier = open_key_tier(url)
    for number in numbers:
        tokens = prompt(number)
        put_blocks(tier, tokens, blocks_of(tokens), namespace="test", epoch=EPOCH, block_tokens=BLOCK_TOKENS)
    tier.close()


def open_cache(url, slots=256, **fields):
    fields = {"quota": 1.0, "find_deadline_s": DEADLINE_S, "read_deadline_s": DEADLINE_S, "missing_s": 0.05, **fields}
    tiers = [DRAM(slots * LAYOUT.stride), Remote(url, **fields)]
    return TieredKVCache(tiers, layout=LAYOUT, namespace="test", epoch=EPOCH, block_tokens=BLOCK_TOKENS)


def read(cache, number, deadline_s=WAIT_S):
    """Blocks loaded of a prompt, every byte compared; and what lookup and load took beyond their deadlines."""
    tokens = prompt(number)
    began = time.monotonic()
    match = cache.lookup(tokens, deadline_s=deadline_s)
    looked = time.monotonic()
    with cache.load(match).result(WAIT_S) as loaded:
        loading = time.monotonic() - looked
        got = np.asarray(loaded.blocks)
        assert got.tobytes() == np.asarray(blocks_of(tokens))[: loaded.block_count].tobytes()
        return loaded.block_count, max(looked - began - deadline_s, loading - DEADLINE_S)


def eventually(condition, within_s=WAIT_S):
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_what_another_cache_put_is_loaded_right(server, proxy):
    fill(server.url, *range(20))
    with open_cache(server.url) as cache:
        for number in range(20):
            assert read(cache, number)[0] == N
        stats = cache.stats().remote
        assert (stats["fetched"], stats["wrong"], stats["endpoint"]) == (20 * N, 0, f"{HOST}:{server.port}")
        assert cache.check() == []


def test_what_one_cache_stored_another_loads(server, proxy):
    """Written after prefill, over TCP as the socket says; a wrong value is removed, and the next store heals it."""
    with open_cache(server.url) as first:
        for number in range(10):
            first.store(prompt(number), blocks_of(prompt(number))).wait(WAIT_S)
        assert eventually(lambda: first.stats().remote["written"] == 10 * N), first.stats().remote
        assert (first.stats().remote["endpoint"], first.stats().remote["transport"]) == (f"{HOST}:{server.port}", "tcp")
    name = server.command("KEYS", "tcblock1/*").split()[0]
    server.command("SETRANGE", name, "777", "wrong")
    with open_cache(server.url) as second:
        counts = [read(second, number)[0] for number in range(10)]
        assert sorted(counts)[1:] == [N] * 9 and counts.count(N) == 9
        assert eventually(lambda: second.stats().remote["removed_wrong"] == 1)
        assert server.command("EXISTS", name) == "0"
        hurt = int(np.argmin(counts))
        second.store(prompt(hurt), blocks_of(prompt(hurt))).wait(WAIT_S)
        assert eventually(lambda: server.command("EXISTS", name) == "1"), second.stats().remote
        assert second.check() == []
    with open_cache(server.url) as third:
        assert [read(third, number)[0] for number in range(10)] == [N] * 10


def test_a_full_server_refuses_and_nobody_waits(tmp_path):
    with RedisServer(tmp_path / "full", maxmemory="8mb") as server, open_cache(server.url, slots=1024) as cache:
        for number in range(60):
            began = time.monotonic()
            assert cache.store(prompt(number), blocks_of(prompt(number))).wait(WAIT_S)
            assert time.monotonic() - began < 2.0
        assert eventually(lambda: cache.stats().remote["writes_refused"] > 0), cache.stats().remote
        stats = cache.stats().remote
        assert stats["written"] > 0 and stats["online"]
        assert eventually(lambda: (cache.stats().remote["pressure"] or 0) > 0.9), cache.stats().remote
        assert read(cache, 0)[0] == N
        assert cache.check() == []


@pytest.mark.parametrize("where", ["/1", ""])
def test_another_database_or_another_epoch_has_nothing(server, proxy, where):
    fill(server.url, 1)
    tiers = [DRAM(64 * LAYOUT.stride), server.url + where]
    epoch = EPOCH if where else b"weights-2"
    with TieredKVCache(tiers, layout=LAYOUT, namespace="test", epoch=epoch, block_tokens=BLOCK_TOKENS) as cache:
        assert cache.lookup(prompt(1), deadline_s=WAIT_S).blocks == 0


def test_a_server_that_is_not_there_is_no_error_and_is_found_when_it_comes(tmp_path):
    server = RedisServer(tmp_path / "redis")
    with open_cache(server.url) as cache:
        for number in range(10):
            blocks, late = read(cache, number, 0.05)
            assert blocks == 0 and late < 10 * LATE_S
        with server:
            fill(server.url, 100)
            assert eventually(lambda: read(cache, 100)[0] == N)
        assert cache.check() == []


def test_a_wrong_password_costs_hits_only(tmp_path):
    with RedisServer(tmp_path / "redis", password="secret") as server:
        fill(server.url, 1)
        with open_cache(f"redis://:other@{HOST}:{server.port}") as cache:
            for _ in range(10):
                assert read(cache, 1, 0.05)[0] == 0
            assert "other" not in repr(cache.stats()) + repr(cache) + repr(cache.settings)


def hang(server, proxy):
    server.stop()


def kill(server, proxy):
    server.kill()


def silence(server, proxy):
    proxy.hangs = True


def slow(server, proxy):
    proxy.rate = 100_000


def late(server, proxy):
    proxy.delay_s = 0.15


def refuse(server, proxy):
    proxy.refuses = True
    proxy.cut()


def half(server, proxy):
    proxy.hang_after = 50_000


def noisy(server, proxy):
    proxy.flip_every["down"] = 50_000


FAULTS = {each.__name__: each for each in (hang, kill, silence, slow, late, refuse, half, noisy)}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_costs_hits_and_nothing_else(tmp_path, name):
    """Several threads look up and load all the while; what comes is right, nothing raises, nothing is late."""
    gc.collect()
    server = RedisServer(tmp_path / "redis").start()
    numbers, lateness, blocks, failures = range(400), [], {"during": 0, "after": 0}, []
    with server, Proxy(server.port) as proxy:
        fill(server.url, *numbers)
        with open_cache(f"redis://{HOST}:{proxy.port}", slots=64) as cache:
            assert read(cache, 0)[0] == N
            for number in range(300):  # known to be there: loads will be tried
                assert eventually(lambda number=number: cache.lookup(prompt(number), deadline_s=WAIT_S).blocks == N)
            FAULTS[name](server, proxy)
            ends = time.monotonic() + 2.5

            def work(first):
                number = first
                try:
                    while time.monotonic() < ends:
                        number = 1 + (number + 4) % 300
                        count, over = read(cache, number, 0.02)
                        blocks["during"] += count
                        lateness.append(over)
                        time.sleep(0.002)
                except BaseException as error:  # noqa: BLE001
                    failures.append(error)

            threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
            with Lateness() as own:
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join(30)
            during = cache.stats().remote
            if name == "hang":
                server.go_on()
            elif name == "kill":
                server.start()
                fill(server.url, *numbers)
            proxy.heal()
            assert failures == []
            assert eventually(lambda: read(cache, 350)[0] == N), cache.stats().remote
            blocks["after"] = sum(read(cache, number)[0] for number in range(360, 400))
            assert cache.check() == []
            wrong, jobs = cache.stats().remote["wrong"], cache.stats().remote
    p99 = float(np.quantile(lateness, 0.99))
    print(
        f"{name}: {len(lateness)} lookups and loads, {p99 * 1e3:.1f} ms late at p99, {max(lateness) * 1e3:.1f} at most;"
        f" {blocks['during']} blocks meanwhile, {wrong} wrong, {during['overdue_jobs']} late, trips {during['trips']}"
    )
    print(f"this process: {own.p99() * 1e3:.1f} ms, {own.most() * 1e3:.1f} at most")
    assert p99 < LATE_S + 2 * own.p99()
    assert blocks["after"] == 40 * N
    assert (wrong > 0) == (name == "noisy")
    assert jobs["lost_jobs"] == 0


def test_a_server_that_hangs_holds_up_no_close(tmp_path):
    """The call under way ends by itself; the tier is closed after it."""
    with RedisServer(tmp_path / "redis") as server:
        fill(server.url, 1)
        cache = open_cache(server.url, read_deadline_s=1.0, find_deadline_s=1.0)
        assert read(cache, 0)[0] == 0
        tier = cache.stack.own_keys
        server.stop()
        match = cache.lookup(prompt(1))
        assert match.blocks == 0
        began = time.monotonic()
        cache.close(timeout=0.3)
        assert time.monotonic() - began < 0.9
        server.go_on()
        assert eventually(lambda: tier._pool._closed, 5.0)
        with pytest.raises(OSError, match="closed"):
            tier.find([bytes(32)], 1.0)


def test_a_tier_object_stays_open(server, proxy):
    fill(server.url, 1)
    tier = open_key_tier(server.url)
    for _ in range(2):
        with open_cache(tier) as cache:
            assert read(cache, 1)[0] == N
    assert tier.find([bytes(32)], 1.0).tolist() == [False]
    tier.close()
