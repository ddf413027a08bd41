"""The Valkey tier against a server of a few lines that answers as told; the real server has its own tests."""

import hashlib
import os
import socket
import ssl
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

pytest.importorskip("valkey", reason="the extra valkey")

from tiercache.remote.urls import open_key_tier
from tiercache.remote.valkey import ValkeyOptions, ValkeyTier
from tiercache.remote.valkey_wire import Wire
from tiercache.testing.key_tier_suite import KeyTierSuite

KEYS = [hashlib.sha256(b"%d" % i).digest() for i in range(6)]
ROWS = np.random.default_rng(1).integers(0, 256, (6, 300), dtype=np.uint8)
S = 5.0


class Server:
    """Knows what the tier says. `answer(words)` may give other bytes, or None for its own; `waits`: how long before
    each answer. `connections` counts those taken."""

    def __init__(self):
        self.values = {}
        self.answer = lambda words: None
        self.waits = 0.0
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}"
        self._socks = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                self.connections += 1
                self._socks.append(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        with suppress(OSError, ValueError), sock, sock.makefile("rb") as lines:
            while first := lines.readline():
                words = []
                for _ in range(int(first[1:])):
                    nbytes = int(lines.readline()[1:])
                    words.append(lines.read(nbytes + 2)[:-2])
                answer = self.answer(words)
                if self.waits:
                    time.sleep(self.waits)
                sock.sendall(self._own(words) if answer is None else answer)

    def _own(self, words):
        verb, key = words[0], words[1]
        if verb == b"SET":
            self.values[key] = words[2]
            return b"+OK\r\n"
        if verb == b"GET":
            value = self.values.get(key)
            return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)
        if verb == b"INFO":
            return b"$36\r\n# Memory\r\nused_memory:3\r\nmaxmemory:4\r\n\r\n"
        return b":%d\r\n" % (self.values.pop(key, None) is not None if verb == b"UNLINK" else key in self.values)

    def cut(self):
        """End every connection."""
        socks, self._socks = self._socks, []
        for sock in socks:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self):
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()


@pytest.fixture
def server():
    each = Server()
    yield each
    each.close()


@pytest.fixture
def tier(server):
    each = open_key_tier(server.url)
    yield each
    each.close()


class TestValkey(KeyTierSuite):
    @pytest.fixture
    def make_tier(self, server):
        return lambda: open_key_tier(server.url)


def test_nothing_connects_before_the_first_call(server, tier):
    time.sleep(0.05)
    assert server.connections == tier.connections_opened == 0
    assert tier.transport() == "unknown"
    assert tier.find(KEYS, S).sum() == 0
    assert server.connections == tier.connections_opened == 1
    assert tier.transport() == "tcp"


def test_a_late_answer_is_never_read_as_another_ones(server, tier):
    """The call that gave up takes its connection with it."""
    tier.put(KEYS, ROWS, S)
    server.waits = 0.2
    back = np.zeros_like(ROWS)
    with pytest.raises(TimeoutError):
        tier.get(KEYS[:1], back[:1], 0.05)
    server.waits = 0.0
    for i in range(1, 6):
        assert tier.get(KEYS[i : i + 1], back[i : i + 1], S).all()
        time.sleep(0.06)
    assert (back[1:] == ROWS[1:]).all()
    assert tier.connections_opened == 2


def test_an_answer_that_nobody_asked_for_ends_its_connection(server, tier):
    tier.put(KEYS, ROWS, S)
    unasked = b"$300\r\n" + ROWS[0].tobytes() + b"\r\n"
    server.answer = lambda words: b":1\r\n" + unasked if words[0] == b"EXISTS" else None
    assert tier.find(KEYS[:1], S).all()
    time.sleep(0.05)
    back = np.zeros_like(ROWS)
    assert tier.get(KEYS[1:2], back[1:2], S).all()
    assert (back[1] == ROWS[1]).all()
    assert tier.connections_opened == 2


def test_connections_that_ended_meanwhile_cost_nothing(server, tier):
    tier.put(KEYS, ROWS, S)
    for _ in range(3):
        server.cut()
        time.sleep(0.05)
        assert tier.get(KEYS, ROWS.copy(), S).all()
    assert tier.connections_opened == 4


def test_trouble_closes_the_idle_connections_too(server, tier):
    barrier = threading.Barrier(3)
    server.answer = lambda words: (barrier.wait(5), None)[1]
    threads = [threading.Thread(target=tier.find, args=(KEYS[:1], S)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert tier.connections_opened == 3
    server.answer, server.waits = (lambda words: None), 1.0
    with pytest.raises(TimeoutError):
        tier.find(KEYS[:1], 0.05)
    server.waits = 0.0
    assert tier.put(KEYS, ROWS, S).all()
    assert tier.connections_opened == 4


def test_no_more_connections_than_allowed(server):
    tier = open_key_tier(server.url + "?connections=2")
    server.waits = 0.3
    failures, began = [], time.monotonic()

    def work(seconds):
        try:
            tier.find(KEYS[:1], seconds)
        except TimeoutError as error:
            failures.append(str(error))

    threads = [threading.Thread(target=work, args=(seconds,)) for seconds in (S, S)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    work(0.1)
    assert time.monotonic() - began < 0.28
    for thread in threads:
        thread.join(5)
    assert failures == [f"127.0.0.1:{server.port}: all 2 connections are in use"]
    assert server.connections == 2
    assert tier.find(KEYS[:1], S).sum() == 0
    tier.close()


def test_close_ends_calls_under_way(server, tier):
    server.waits = 3.0
    ended = []

    def work():
        try:
            tier.find(KEYS[:1], S)
        except OSError as error:
            ended.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.2)
    tier.close()
    thread.join(1)
    assert len(ended) == 1 and not thread.is_alive()
    with pytest.raises(OSError, match="closed"):
        tier.find(KEYS[:1], S)


@pytest.mark.parametrize(
    "answer", [b"+OK\r\n", b"$-1\r\n", b"*0\r\n", b"hello\r\n", b"$300\r\nno\r\n", b":one\r\n"], ids=repr
)
def test_an_answer_that_does_not_belong_ends_its_connection(server, tier, answer):
    tier.put(KEYS, ROWS, S)
    server.answer = lambda words: answer
    with pytest.raises(OSError):
        tier.find(KEYS, 0.2)
    server.answer = lambda words: None
    assert tier.find(KEYS, S).all()
    assert tier.connections_opened == 2


@pytest.mark.parametrize("verb", ["find", "get", "put", "remove"])
@pytest.mark.parametrize(
    "code", ["LOADING it is", "BUSY with a script", "MOVED 1 elsewhere:1", "ERR unknown", "NOAUTH who"]
)
def test_errors_of_the_server_are_oserrors_and_end_no_connection(server, tier, verb, code):
    server.answer = lambda words: b"-%s\r\n" % code.encode()
    call = getattr(tier, verb)
    rows = [ROWS.copy()] if verb in ("get", "put") else []
    for _ in range(2):
        with pytest.raises(OSError, match=code.split()[0]) as caught:
            call(KEYS, *rows, S)
        assert isinstance(caught.value, PermissionError) == code.startswith("NOAUTH")
    assert tier.connections_opened == 1


@pytest.mark.parametrize("code", ["OOM", "MISCONF", "READONLY", "NOREPLICAS", "NOPERM"])
def test_a_refused_put_is_a_no_for_its_keys_alone(server, tier, code):
    refused = b"tcblock1/" + KEYS[2].hex().encode()
    server.answer = lambda words: b"-%s no\r\n" % code.encode() if words[1] == refused else None
    assert tier.put(KEYS, ROWS, S).tolist() == [True, True, False, True, True, True]
    assert tier.refused == {code: 1}
    server.answer = lambda words: None
    assert tier.put(KEYS, ROWS, S).all() and tier.get(KEYS, ROWS.copy(), S).all()
    assert tier.connections_opened == (2 if code == "READONLY" else 1)


@pytest.mark.parametrize(
    ("info", "load"),
    [
        (b"used_memory:3\r\nmaxmemory:4\r\n", 0.75),
        (b"used_memory:9\r\nmaxmemory:4\r\n", 1.0),
        (b"used_memory:3\r\nmaxmemory:0\r\n", None),
        (b"used_memory:3\r\n", None),
        (b"used_memory:x\r\nmaxmemory:4\r\n", None),
        (None, None),
    ],
)
def test_pressure(server, tier, info, load):
    server.answer = lambda words: b"-NOPERM no\r\n" if info is None else b"$%d\r\n%s\r\n" % (len(info), info)
    assert tier.pressure(S) == load


def test_pressure_is_remembered_for_a_second(server, tier):
    asked = []
    server.answer = lambda words: asked.append(words[0])
    for _ in range(20):
        assert tier.pressure(S) == 0.75
    server.close()
    assert tier.pressure(S) == 0.75
    assert asked == [b"INFO"]
    tier._load_until = 0.0
    assert tier.pressure(0.2) is None


def test_time_to_live_goes_with_every_put(server):
    asked = []
    server.answer = lambda words: asked.append(words[3:])
    tier = ValkeyTier(ValkeyOptions("127.0.0.1", server.port, ttl_s=1.5))
    tier.put(KEYS[:2], ROWS[:2], S)
    tier.close()
    assert asked == [[b"PX", b"1500"]] * 2


def test_close_ends_a_call_that_is_connecting(server):
    """Its connection is not there to be interrupted yet; nothing is asked over it when it is."""
    tier = open_key_tier(server.url + "/1")
    asked = []

    def answer(words):
        asked.append(words[0])
        if words[0] == b"SELECT":
            tier._pool._closed = True  # as close() has it, before it looks for sockets
            return b"+OK\r\n"
        return None

    server.answer = answer
    with pytest.raises(ConnectionError, match="closed"):
        tier.find(KEYS[:1], S)
    assert asked == [b"SELECT"] and not tier._pool._busy


def test_a_forked_child_takes_no_connection_from_its_parent(server, tier):
    """Neither idle ones nor one under a call, when it closes its copy of the tier."""
    server.waits = 0.6
    found = []
    thread = threading.Thread(target=lambda: found.append(tier.find(KEYS[:1], S)))
    thread.start()
    while not tier._pool._busy or not server.connections:
        time.sleep(0.01)
    time.sleep(0.1)
    child = os.fork()
    if not child:
        tier.close()
        os._exit(0)
    os.waitpid(child, 0)
    thread.join(5)
    assert len(found) == 1 and tier.connections_opened == 1


@pytest.mark.parametrize(
    "text",
    [
        b"ERR unknown command 'AUTH', with args beginning with: 'sesame' ",
        b"ERR unknown command `AUTH`, with args beginning with: `sesa",
        b"ERR what is AUTH sesame?",
    ],
)
def test_a_server_that_repeats_the_password(server, text):
    """Is not quoted with it."""
    server.answer = lambda words: b"-%s\r\n" % text
    tier = open_key_tier(f"redis://:sesame@127.0.0.1:{server.port}")
    with pytest.raises(OSError, match="AUTH") as caught:
        tier.find(KEYS[:1], S)
    assert "sesa" not in str(caught.value)
    tier.close()


def test_an_interrupted_connection_stays_encrypted():
    """Another thread may be about to send on it: it must find its socket shut, and no socket without TLS."""
    here, there = socket.socketpair()
    with there:
        context = ssl.create_default_context()
        sock = context.wrap_socket(here, server_hostname="h", do_handshake_on_connect=False)
        wire = Wire(ValkeyOptions("h", tls=True))
        wire.replies.attach(sock)
        wire.interrupt()
        assert sock._sslobj is not None
        there.settimeout(5)
        assert there.recv(1) == b""
        sock.close()
