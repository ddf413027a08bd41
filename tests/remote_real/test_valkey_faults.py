"""The tier while its server, or the network to it, misbehaves: it ends by its deadline, brings no wrong byte, and is
itself again as soon as the trouble is over."""

import hashlib
import threading
import time

import numpy as np
import pytest
from rig_late import Lateness
from rig_net import Proxy
from rig_redis import HOST, RedisServer

from tiercache.remote import verified
from tiercache.remote.frame import frame_nbytes, seal
from tiercache.remote.urls import open_key_tier

pytestmark = pytest.mark.remote

S = 5.0
LATE_S = 0.05
"""After its deadline a call may still take so long, at p99 of many, beside what this process is late by itself."""
ONCE_S = 1.0
"""The same for a single call, on a machine that does other things too."""
N, NBYTES = 16, 100_000
WIDTH = frame_nbytes(NBYTES)
KEYS = [hashlib.sha256(b"%d" % i).digest() for i in range(N)]
IDENTS = np.arange(1, N + 1, dtype=np.uint64)
ROWS = seal(np.random.default_rng(3).integers(0, 256, (N, NBYTES), dtype=np.uint8), NBYTES, IDENTS)


@pytest.fixture
def tier(proxy):
    each = open_key_tier(f"redis://{HOST}:{proxy.port}")
    assert each.put(KEYS, ROWS, S).all()
    yield each
    each.close()


def is_well(tier, within_s=2.0):
    """It brings everything, right."""
    until = time.monotonic() + within_s
    while True:
        try:
            back = np.zeros_like(ROWS)
            return bool(tier.put(KEYS, ROWS, S).all() and tier.get(KEYS, back, S).all() and (back == ROWS).all())
        except OSError:
            if time.monotonic() > until:
                raise


def ends_by(deadline_s, call, *args):
    """The OSError that a call ends with, about at its deadline at the latest."""
    began = time.monotonic()
    with pytest.raises(OSError) as caught:
        call(*args, deadline_s)
    assert time.monotonic() - began < deadline_s + ONCE_S, caught.value
    assert type(caught.value).__module__ == "builtins" or isinstance(caught.value, OSError)
    assert not type(caught.value).__module__.startswith("valkey")
    return caught.value


CALLS = [("find",), ("get",), ("put",), ("remove",)]


def args_of(verb):
    return (KEYS, ROWS.copy()) if verb in ("get", "put") else (KEYS,)


@pytest.mark.parametrize("verb", ["find", "get", "put", "remove"])
@pytest.mark.parametrize("connected", [True, False])
def test_a_server_that_hangs(tmp_path, verb, connected):
    """As in SIGSTOP: the kernel goes on taking connections and bytes."""
    with RedisServer(tmp_path / "redis") as server:
        tier = open_key_tier(server.url)
        if connected:
            assert tier.put(KEYS, ROWS, S).all()
        server.stop()
        try:
            for _ in range(3):
                assert isinstance(ends_by(0.1, getattr(tier, verb), *args_of(verb)), TimeoutError)
        finally:
            server.go_on()
        assert is_well(tier)
        tier.close()


@pytest.mark.parametrize("verb", ["find", "get", "put", "remove"])
def test_a_server_that_is_killed_and_started_again(tmp_path, verb):
    server = RedisServer(tmp_path / "redis")
    with server:
        tier = open_key_tier(server.url)
        assert is_well(tier)
        server.kill()
        for _ in range(3):
            assert isinstance(ends_by(S, getattr(tier, verb), *args_of(verb)), ConnectionError)
        server.start()
        assert not tier.find(KEYS, S).any()
        assert is_well(tier)
        tier.close()


def test_a_server_killed_while_it_answers(tmp_path):
    server = RedisServer(tmp_path / "redis")
    with server, Proxy(server.port) as proxy:
        tier = open_key_tier(f"redis://{HOST}:{proxy.port}")
        assert tier.put(KEYS, ROWS, S).all()
        proxy.rate = 20e6
        threading.Timer(0.2, server.kill).start()
        ends_by(S, tier.get, KEYS * 16, np.zeros((16 * N, WIDTH), dtype=np.uint8))  # more than sockets hold
        proxy.heal()
        server.start()
        assert is_well(tier)
        tier.close()


@pytest.mark.parametrize("sent", [0, 1, 5, 9, 60_000, WIDTH + 9, 5 * WIDTH + 77])
def test_a_connection_cut_in_the_middle_of_a_value(tier, proxy, sent):
    proxy.cut_after = sent if sent else None
    if not sent:
        proxy.cut()
        time.sleep(0.05)
        assert is_well(tier)  # it was idle, and is known to be gone
        return
    assert isinstance(ends_by(S, tier.get, KEYS, ROWS.copy()), ConnectionError)
    assert is_well(tier)


@pytest.mark.parametrize("sent", [1, 9, 60_000, WIDTH + 9, 5 * WIDTH + 77])
def test_half_a_reply_and_then_silence(tier, proxy, sent):
    """What comes once the silence is over belongs to a call that ended, and is read by nobody."""
    proxy.hang_after = sent
    assert isinstance(ends_by(0.2, tier.get, KEYS, ROWS.copy()), TimeoutError)
    proxy.heal()
    for i in range(N):
        back = np.zeros((1, WIDTH), dtype=np.uint8)
        assert tier.get(KEYS[i : i + 1], back, S).all()
        assert (back[0] == ROWS[i]).all()
    assert tier.connections_opened == 2


def test_a_network_that_hangs_or_refuses(tier, proxy):
    proxy.hangs = True
    assert isinstance(ends_by(0.1, tier.find, KEYS), TimeoutError)
    assert isinstance(ends_by(0.1, tier.find, KEYS), TimeoutError)
    proxy.heal()
    assert is_well(tier)
    proxy.refuses = True
    proxy.cut()
    assert isinstance(ends_by(S, tier.find, KEYS), ConnectionError)
    proxy.heal()
    assert is_well(tier)


def test_a_slow_network_is_slow_and_right(tier, proxy):
    proxy.delay_s = 0.03
    began = time.monotonic()
    assert tier.find(KEYS, S).all()
    assert 0.03 <= time.monotonic() - began < 1.0
    back = np.zeros_like(ROWS)
    assert tier.get(KEYS, back, S).all() and (back == ROWS).all()
    proxy.heal()
    proxy.rate = 200_000
    assert isinstance(ends_by(0.3, tier.get, KEYS, back), TimeoutError)
    proxy.heal()
    assert is_well(tier)


def test_deadlines_hold_whatever_the_network_does(tier, proxy):
    """p99 of many calls from several threads, over a network whose faults change all the time."""
    over, ended, stop = [], [], threading.Event()

    def work(verb):
        while not stop.is_set():
            began = time.monotonic()
            try:
                getattr(tier, verb)(*args_of(verb), 0.1)
                ended.append("answered")
            except OSError as error:
                ended.append(type(error).__name__)
            over.append(time.monotonic() - began - 0.1)

    threads = [threading.Thread(target=work, args=(verb,)) for verb in ("find", "get", "get", "put")]
    with Lateness() as own:
        for thread in threads:
            thread.start()
        for turn in range(24):
            time.sleep(0.25)
            proxy.heal()
            match turn % 6:
                case 0:
                    proxy.hangs = True
                case 1:
                    proxy.rate = 300_000
                case 2:
                    proxy.cut_after = 150_000
                case 3:
                    proxy.hang_after = 150_000
                case 4:
                    proxy.delay_s = 0.08
        proxy.heal()
        time.sleep(0.3)
        stop.set()
        for thread in threads:
            thread.join(5)
    p99 = float(np.quantile(over, 0.99))
    print(f"{len(over)} calls, {p99 * 1e3:.1f} ms late at p99, {max(over) * 1e3:.1f} at most; {set(ended)}")
    print(f"this process: {own.p99() * 1e3:.1f} ms, {own.most() * 1e3:.1f} at most")
    assert p99 < LATE_S + 2 * own.p99()
    assert {"answered", "TimeoutError"} <= set(ended)
    assert is_well(tier)


@pytest.mark.parametrize("way", ["down", "up"])
def test_flipped_bits_are_seen(tier, proxy, way):
    """In values and in what is around them, on the way there and back: a value that is verified is right."""
    proxy.flip_every[way] = 100_000
    came = wrong = failed = 0
    for turn in range(60):
        keys = [hashlib.sha256(b"%d %d" % (turn, i)).digest() for i in range(N)]
        try:
            tier.put(keys, ROWS, 0.3)
            back = np.zeros_like(ROWS)
            ok = tier.get(keys, back, 0.3)
        except OSError:
            failed += 1
            continue
        good = ok & verified(back, NBYTES, IDENTS)
        assert (back[good] == ROWS[good]).all()
        came += int(good.sum())
        wrong += int((ok & ~good).sum())
    print(f"{proxy.flipped[way]} bits flipped: {came} values right, {wrong} seen to be wrong, {failed} calls failed")
    assert proxy.flipped[way] > 20 and came > 0 and wrong > 0
    proxy.heal()
    assert is_well(tier)
