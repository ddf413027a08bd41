"""The tier on a real redis-server: the shipped suite over TCP, TLS and a unix socket; limits, passwords, databases."""

import hashlib
import logging
import os
import time

import numpy as np
import pytest
from rig_redis import HOST, Certificates, RedisServer, free_port

from tiercache.remote.urls import open_key_tier
from tiercache.testing.key_tier_suite import KeyTierSuite

pytestmark = pytest.mark.remote

S = 5.0
WIDTH = 4096


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    return Certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis")) as each:
        yield each


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory, certificates):
    with RedisServer(tmp_path_factory.mktemp("redis"), tls=certificates, password="p@ss/w:rd") as each:
        yield each


@pytest.fixture(scope="module")
def local_server(tmp_path_factory):
    with RedisServer(tmp_path_factory.mktemp("redis"), unix=True) as each:
        yield each


@pytest.fixture(autouse=True)
def empty(request):
    if "server" in request.fixturenames:
        request.getfixturevalue("server").command("FLUSHALL")


def keys_of(n, seed=0):
    return [hashlib.sha256(b"%d %d" % (seed, i)).digest() for i in range(n)]


def rows_of(n, width=WIDTH, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, width), dtype=np.uint8)


@pytest.fixture
def opened():
    tiers = []

    def open_tier(url):
        tiers.append(open_key_tier(url))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


class TestOverTCP(KeyTierSuite):
    @pytest.fixture
    def make_tier(self, server):
        return lambda: open_key_tier(server.url)


class TestWithOneConnectionAndATimeToLive(KeyTierSuite):
    @pytest.fixture
    def make_tier(self, server):
        return lambda: open_key_tier(server.url + "/3?connections=1&ttl_s=60")


class TestOverTLS(KeyTierSuite):
    @pytest.fixture
    def make_tier(self, tls_server):
        tls_server.command("FLUSHALL")
        url = tls_server.url.replace("p@ss/w:rd", "p%40ss%2Fw%3Ard")
        return lambda: open_key_tier(url)


class TestOverAUnixSocket(KeyTierSuite):
    @pytest.fixture
    def make_tier(self, local_server):
        local_server.command("FLUSHALL")
        return lambda: open_key_tier(local_server.url + "?db=2")


# --- what lies there -------------------------------------------------------------------------------------------------


def test_names_expiry_and_bytes_as_they_lie_there(server, opened):
    keys, rows = keys_of(3), rows_of(3)
    assert opened(server.url + "?ttl_s=100").put(keys, rows, S).all()
    assert sorted(server.command("KEYS", "*").split()) == sorted(f"tcblock1/{key.hex()}" for key in keys)
    assert 99_000 < int(server.command("PTTL", f"tcblock1/{keys[0].hex()}")) <= 100_000
    assert int(server.command("STRLEN", f"tcblock1/{keys[0].hex()}")) == WIDTH
    assert opened(server.url).put(keys, rows, S).all()
    assert server.command("PTTL", f"tcblock1/{keys[0].hex()}") == "-1"


def test_a_block_ends_with_its_time(server, opened):
    tier, keys = opened(server.url + "?ttl_s=0.1"), keys_of(2)
    assert tier.put(keys, rows_of(2), S).all()
    time.sleep(0.15)
    assert not tier.find(keys, S).any() and not tier.get(keys, rows_of(2), S).any()


def test_a_batch_is_about_one_round_trip(server, opened):
    """The server handles all commands of a batch in a few reads of its socket, and one connection does it all."""
    tier, keys, rows = opened(server.url), keys_of(64), rows_of(64, 100)
    tier.put(keys, rows, S)

    def reads():
        return int(server.command("INFO", "stats").partition("total_reads_processed:")[2].split()[0])

    before = reads()
    for _ in range(10):
        assert tier.get(keys, rows, S).all() and tier.find(keys, S).all()
    assert reads() - before < 10 * 2 * 4
    assert tier.connections_opened == 1


def test_long_batches_go_in_groups(server, opened):
    tier, keys, rows = opened(server.url), keys_of(1000), rows_of(1000, 300)
    assert tier.put(keys, rows, S).all() and tier.find(keys, S).all()
    back = np.zeros_like(rows)
    assert tier.get(keys, back, S).all() and (back == rows).all()
    wide = rows_of(5, 3 << 20)
    assert tier.put(keys[:5], wide, S).all()
    back = np.zeros_like(wide)
    assert tier.get(keys[:5], back, S).all() and (back == wide).all()


def test_another_database_is_another_store(server, opened):
    keys = keys_of(2)
    assert opened(server.url + "/1").put(keys, rows_of(2), S).all()
    assert opened(server.url + "/1").find(keys, S).all()
    assert not opened(server.url).find(keys, S).any()


def test_what_is_no_value_is_a_miss(server, opened):
    tier, keys = opened(server.url), keys_of(3)
    tier.put(keys, rows_of(3), S)
    server.command("DEL", f"tcblock1/{keys[1].hex()}")
    server.command("LPUSH", f"tcblock1/{keys[1].hex()}", "x")
    assert tier.get(keys, rows_of(3), S).tolist() == [True, False, True]
    assert tier.put(keys, rows_of(3), S).all() and tier.get(keys, rows_of(3), S).all()


# --- a server that says no -------------------------------------------------------------------------------------------


def test_a_full_server_refuses_and_is_seen_to_be_full(tmp_path, opened, caplog):
    with RedisServer(tmp_path / "full", maxmemory="6mb") as server:
        tier, keys, rows = opened(server.url), keys_of(64), rows_of(64, 200_000)
        assert 0 < tier.pressure(S) < 0.5
        with caplog.at_level(logging.WARNING, "tiercache"):
            taken = tier.put(keys, rows, S)
            tier.put(keys[-2:], rows[-2:], S)
        assert 0 < taken.sum() < 64
        assert tier.refused == {"OOM": 64 - taken.sum() + 2}
        assert len(caplog.records) == 1 and "OOM" in caplog.text
        back = np.zeros_like(rows)
        assert (tier.get(keys, back, S) == taken).all() and (back[taken] == rows[taken]).all()
        time.sleep(1.1)
        assert tier.pressure(S) > 0.9
        assert tier.remove(keys, S).all()
        assert tier.put(keys[:3], rows[:3], S).all()


def test_a_server_that_lets_go_of_the_oldest_takes_everything(tmp_path, opened):
    with RedisServer(tmp_path / "lru", maxmemory="6mb", policy="allkeys-lru") as server:
        tier, keys, rows = opened(server.url), keys_of(64), rows_of(64, 200_000)
        assert tier.put(keys, rows, S).all()
        there = tier.find(keys, S)
        assert 0 < there.sum() < 64 and not tier.refused
        back = np.zeros_like(rows)
        came = tier.get(keys, back, S)  # its answers on the way count as memory: reading may push more out
        assert came.any() and not (came & ~there).any() and (back[came] == rows[came]).all()


def test_a_replica_and_a_server_that_cannot_save_refuse_and_go_on_reading(tmp_path, opened):
    with RedisServer(tmp_path / "one") as server:
        tier, keys = opened(server.url), keys_of(2)
        assert tier.put(keys, rows_of(2), S).all()
        server.command("CONFIG", "SET", "min-replicas-to-write", "1")
        assert not tier.put(keys, rows_of(2, seed=1), S).any()
        back = np.zeros((2, WIDTH), dtype=np.uint8)
        assert tier.get(keys, back, S).all() and (back == rows_of(2)).all()
        server.command("CONFIG", "SET", "min-replicas-to-write", "0")
        server.command("REPLICAOF", HOST, str(free_port()))
        assert not tier.put(keys, rows_of(2, seed=1), S).any()
        assert tier.get(keys, back, S).all() and (back == rows_of(2)).all()
        assert tier.refused == {"NOREPLICAS": 2, "READONLY": 2}
        server.command("REPLICAOF", "NO", "ONE")
        assert tier.put(keys, rows_of(2, seed=1), S).all()


def test_a_server_without_a_limit_says_nothing_of_its_load(server, opened):
    tier = opened(server.url)
    assert tier.pressure(S) is None
    assert opened(f"redis://{HOST}:{free_port()}").pressure(S) is None


def test_its_load_is_asked_for_once_a_second(server, opened):
    server.command("CONFIG", "RESETSTAT")
    tier = opened(server.url)
    for _ in range(50):
        tier.pressure(S)
    assert "cmdstat_info:calls=1," in server.command("INFO", "commandstats")


@pytest.mark.parametrize("user", ["", ":wrong@", "somebody:secret-word@"])
def test_a_wrong_password_is_no_permission_and_is_never_shown(tmp_path, opened, user, caplog):
    with RedisServer(tmp_path / "locked", password="secret-word") as server:
        tier = opened(f"redis://{user}{HOST}:{server.port}")
        with caplog.at_level(logging.DEBUG), pytest.raises(PermissionError, match=r"WRONGPASS|NOAUTH") as caught:
            tier.find(keys_of(1), S)
        assert f"{HOST}:{server.port}" in str(caught.value)
        right = opened(server.url)
        assert not right.find(keys_of(1), S).any()
        for text in (repr(caught.value), repr(tier), repr(right), str(right.endpoint), caplog.text):
            assert "secret-word" not in text and "wrong" not in text


def test_a_reader_without_the_right_to_write(tmp_path, opened):
    with RedisServer(tmp_path / "acl") as server:
        opened(server.url).put(keys_of(2), rows_of(2), S)
        server.command("ACL", "SETUSER", "reader", "on", ">pw", "~*", "+get", "+exists")
        rights = ("+get", "+set", "+exists", "+unlink", "+info", "+select")  # what docs/remote.md names
        server.command("ACL", "SETUSER", "writer", "on", ">pw", "~tcblock1/*", *rights)
        writer = opened(f"redis://writer:pw@{HOST}:{server.port}/1")
        assert writer.put(keys_of(2), rows_of(2), S).all() and writer.get(keys_of(2), rows_of(2), S).all()
        assert writer.find(keys_of(2), S).all() and writer.remove(keys_of(2), S).all()
        assert writer._asked_load(S) is None and not writer.refused
        tier = opened(f"redis://reader:pw@{HOST}:{server.port}")
        assert tier.find(keys_of(2), S).all() and tier.get(keys_of(2), rows_of(2), S).all()
        assert not tier.put(keys_of(2), rows_of(2), S).any()
        assert tier.refused == {"NOPERM": 2}
        assert tier.pressure(S) is None
        with pytest.raises(PermissionError, match="NOPERM"):
            tier.remove(keys_of(2), S)


def test_no_such_database(server, opened):
    with pytest.raises(OSError, match="DB index is out of range"):
        opened(server.url + "/9999").find(keys_of(1), S)


# --- TLS -------------------------------------------------------------------------------------------------------------


def test_tls_checks_who_answers(tmp_path, certificates, opened):
    others = Certificates.make(tmp_path / "others")
    with RedisServer(tmp_path / "tls", tls=certificates) as server:
        place, right, wrong = f"{HOST}:{server.port}", f"ca={certificates.ca}", f"ca={others.ca}"
        tier = opened(f"rediss://{place}?{right}")
        assert tier.transport() == "unknown"
        assert tier.put(keys_of(2), rows_of(2), S).all()
        assert tier.transport() == "tls"
        for url in (f"rediss://{place}", f"rediss://{place}?{wrong}", f"rediss://{place}?{wrong}&check_hostname=no"):
            with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
                opened(url).find(keys_of(1), S)
        with pytest.raises(OSError):
            opened(f"redis://{place}").find(keys_of(1), S)


def test_tls_checks_the_name(tmp_path, opened):
    others = Certificates.make(tmp_path / "others", "DNS:somewhere.example")
    with RedisServer(tmp_path / "tls", tls=others) as server:
        with pytest.raises(OSError, match="IP address mismatch"):
            opened(server.url).find(keys_of(1), S)
        assert not opened(server.url + "&check_hostname=no").find(keys_of(1), S).any()


def test_plain_words_to_a_plain_server_are_no_tls(server, opened):
    with pytest.raises(OSError):
        opened(f"rediss://{HOST}:{server.port}").find(keys_of(1), 2.0)


# --- ending ----------------------------------------------------------------------------------------------------------


def test_a_forked_child_leaves_the_connections_alone(server, opened):
    tier = opened(server.url)
    tier.put(keys_of(2), rows_of(2), S)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            tier.find(keys_of(2), S)
        except OSError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert tier.get(keys_of(2), rows_of(2), S).all()
    assert tier.connections_opened == 1


def test_transports_as_the_socket_is(server, tmp_path, opened):
    tier = opened(server.url)
    tier.find(keys_of(1), S)
    assert (tier.transport(), tier.endpoint) == ("tcp", f"{HOST}:{server.port}")
    with RedisServer(tmp_path / "unix", unix=True) as local:
        tier = opened(local.url)
        tier.find(keys_of(1), S)
        assert (tier.transport(), tier.endpoint) == ("unix", str(local.socket))
