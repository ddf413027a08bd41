"""MooncakeTier over a stand-in for Mooncake's module: codes, batches, memory, and the life of the client."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from fake_mooncake import FakeLibrary

from tiercache.errors import ConfigError
from tiercache.remote import mooncake_client
from tiercache.remote.mooncake import MooncakeTier
from tiercache.remote.mooncake_metrics import asked_share
from tiercache.remote.mooncake_options import MooncakeOptions
from tiercache.testing.key_tier_suite import KeyTierSuite

KEYS = [bytes([i]) * 32 for i in range(8)]
NAMES = ["tcblock1/" + key.hex() for key in KEYS]
ROWS = np.arange(8 * 50, dtype=np.uint8).reshape(8, 50)


@pytest.fixture
def master() -> Iterator[str]:
    """An address that answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def library() -> FakeLibrary:
    return FakeLibrary()


@pytest.fixture
def tier(master: str, library: FakeLibrary) -> Iterator[MooncakeTier]:
    tier = MooncakeTier(MooncakeOptions.from_url(f"mooncake://{master}"), library, lambda settings: None)
    yield tier
    tier.close()
    assert [crash for client in library.clients for crash in client.crashes] == []


class TestConformance(KeyTierSuite):
    replaces = False

    @pytest.fixture
    def make_tier(self, master: str):
        return lambda: MooncakeTier(
            MooncakeOptions.from_url(f"mooncake://{master}"), FakeLibrary(), lambda settings: None
        )


def got(tier: MooncakeTier, deadline_s: float = 5.0) -> list[bool]:
    return tier.get(KEYS, np.zeros_like(ROWS), deadline_s).tolist()


@pytest.mark.parametrize(
    ("code", "count"),
    [
        (-704, None),
        (-703, "not_ready"),
        (-707, "lease_expired"),
        (-800, "transfer_failed"),
        (-801, "corrupt"),
        (-9, "other_code"),
    ],
)
def test_what_concerns_one_key_is_its_miss(
    tier: MooncakeTier, library: FakeLibrary, code: int, count: str | None
) -> None:
    """The others come, whatever the code; it is counted."""
    assert tier.put(KEYS, ROWS, 5.0).all()
    library.codes[NAMES[3]] = code
    assert got(tier) == [i != 3 for i in range(8)]
    assert {name: n for name, n in tier.counts.items() if name != "bounced"} == ({count: 1} if count else {})


@pytest.mark.parametrize("code", [-1, -800, -900, -901, -1000])
@pytest.mark.parametrize("op", ["get", "put", "remove", "exist"])
def test_trouble_with_all_of_a_batch_is_an_oserror(
    tier: MooncakeTier, library: FakeLibrary, op: str, code: int
) -> None:
    """The store's or an owner's, not the keys'."""
    library.says[op] = code
    operation = {
        "get": lambda: tier.get(KEYS, np.zeros_like(ROWS), 1.0),
        "put": lambda: tier.put(KEYS, ROWS, 1.0),
        "remove": lambda: tier.remove(KEYS, 1.0),
        "exist": lambda: tier.find(KEYS, 1.0),
    }[op]
    with pytest.raises(OSError, match=str(code)):
        operation()


def test_no_room_is_tried_again_within_the_deadline(tier: MooncakeTier, library: FakeLibrary) -> None:
    """Then a False; and where room comes, a True."""
    library.codes[NAMES[2]] = -200
    began = time.monotonic()
    assert tier.put(KEYS, ROWS, 0.2).tolist() == [i != 2 for i in range(8)]
    assert 0.05 < time.monotonic() - began < 1.0
    assert tier.counts["retries"] >= 2 and tier.counts["no_room"] == 1
    turns = iter(range(100))
    library.before = lambda _: library.codes.clear() if next(turns) == 2 else None
    library.codes[NAMES[4]] = -200
    assert tier.put(KEYS, ROWS, 1.0).all()


def test_values_go_in_batches_that_stop_at_trouble(tier: MooncakeTier, library: FakeLibrary) -> None:
    """64 at a time; after a batch of which no transfer came the rest is not tried."""
    keys, rows = [i.to_bytes(32, "little") for i in range(200)], np.zeros((200, 10), dtype=np.uint8)
    assert tier.put(keys, rows, 5.0).all()
    assert tier.get(keys, rows, 5.0).all()
    assert library.clients[0].batches == [("put", 64)] * 3 + [("put", 8)] + [("get", 64)] * 3 + [("get", 8)]
    library.clients[0].batches.clear()
    library.codes.update({"tcblock1/" + key.hex(): -800 for key in keys[64:128]})
    assert tier.get(keys, rows, 5.0).tolist() == [i < 64 for i in range(200)]
    assert library.clients[0].batches == [("get", 64)] * 2
    assert tier.counts["not_tried"] == 72
    library.codes.clear()
    library.before = lambda _: time.sleep(0.1)
    assert tier.get(keys, rows, 0.15).sum() == 128


def test_a_find_asks_once_for_8192_keys(tier: MooncakeTier, library: FakeLibrary) -> None:
    """More in further calls."""
    assert not tier.find([i.to_bytes(32, "little") for i in range(8193)], 5.0).any()
    assert library.clients[0].batches == [("exist", 8192), ("exist", 1)]


def test_memory_is_registered_with_each_client(tier: MooncakeTier, library: FakeLibrary) -> None:
    """Before and after it is opened; rows that are not wholly within are bounced, and what it refuses is too."""
    memory = np.zeros((16, 50), dtype=np.uint8)
    tier.register(memory)
    assert tier.put(KEYS, ROWS, 5.0).all()
    assert tier.get(KEYS, memory[:8], 5.0).all()
    assert (memory[:8] == ROWS).all()
    assert (tier.counts["in_place"], tier.counts["bounced"]) == (8, 8)
    assert memory.ctypes.data in library.clients[0].registered
    more = np.zeros((8, 50), dtype=np.uint8)
    library.says["register"] = -600
    with pytest.raises(OSError, match="memory"):
        tier.register(more)
    assert tier.get(KEYS, more, 5.0).all()
    assert (more == ROWS).all()
    assert tier.counts["bounced"] == 16
    tier.register(memory.reshape(-1))  # known already
    tier.unregister(memory.reshape(-1))  # another view of the same
    tier.unregister(more)
    assert memory.ctypes.data not in library.clients[0].registered
    assert tier.get(KEYS, memory[:8], 5.0).all()
    assert tier.counts["bounced"] == 24


def test_a_transfer_that_may_still_go_on_closes_the_client_first(tier: MooncakeTier, library: FakeLibrary) -> None:
    """Before the rows are given back, and with no call running; the next call opens another, with the same memory."""
    memory = np.zeros((8, 50), dtype=np.uint8)
    tier.register(memory)
    assert tier.put(KEYS, ROWS, 5.0).all()
    tier.unsettled_s = 0.05
    library.says["get"] = -800
    together = threading.Barrier(3)

    def slowly(op: str) -> None:
        if op == "get" and len(library.clients) == 1:
            together.wait(20.0)
            time.sleep(0.1)

    library.before = slowly
    errors: list[OSError] = []

    def read() -> None:
        try:
            tier.get(KEYS, memory, 1.0)
        except OSError as error:
            assert library.clients[0].closed == 1
            errors.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20.0)
    assert len(errors) == 3
    library.says.clear()
    assert got(tier) == [True] * 8
    assert len(library.clients) == 2
    assert memory.ctypes.data in library.clients[1].registered


@pytest.mark.parametrize("op", ["get", "put"])
def test_a_closed_client_is_asked_nothing_more(tier: MooncakeTier, library: FakeLibrary, op: str) -> None:
    """Neither what else is wrong with a batch that ended so, nor its other keys."""
    keys, rows = [i.to_bytes(32, "little") for i in range(80)], np.zeros((80, 10), dtype=np.uint8)
    assert tier.put(keys, rows, 5.0).all()
    tier.unsettled_s = 0.0
    names = ["tcblock1/" + key.hex() for key in keys]
    library.values[names[1]] = b"other"
    library.codes.update({names[0]: -800, names[2]: -200})
    answer = (tier.get if op == "get" else tier.put)(keys, rows, 1.0)
    assert answer[3:64].all() and not answer[[0, 2]].any() and not answer[64:].any()
    assert library.clients[0].closed == 1


def test_a_setup_that_fails_is_tried_again_later(tier: MooncakeTier, library: FakeLibrary) -> None:
    """Calls in between fail at once."""
    library.setup_says = -1
    for _ in range(3):
        with pytest.raises(OSError, match="setup"):
            tier.find(KEYS, 1.0)
    assert len(library.clients) == 1
    library.setup_says = 0
    time.sleep(0.15)
    assert not tier.find(KEYS, 1.0).any()


def test_one_thread_connects(tier: MooncakeTier, library: FakeLibrary) -> None:
    """Others wait for it a moment, then get an OSError; when it is through they are served."""
    gate = threading.Event()
    library.before = lambda op: gate.wait(20.0) if op == "setup" else None
    thread = threading.Thread(target=lambda: tier.find(KEYS, 5.0))
    thread.start()
    while not library.clients:
        time.sleep(0.01)
    with pytest.raises(OSError, match="being connected"):
        tier.find(KEYS, 0.05)
    gate.set()
    thread.join(20.0)
    assert not tier.find(KEYS, 5.0).any()
    assert len(library.clients) == 1


def test_a_client_whose_masters_are_elected_is_left_open_without_our_memory(master: str, library: FakeLibrary) -> None:
    """Its close would wait for its watch of the leader, up to 30 s, and the whole process with it."""
    tier = MooncakeTier(MooncakeOptions.from_url(f"mooncake://{master}?ha=etcd"), library, lambda settings: None)
    memory = np.zeros((8, 50), dtype=np.uint8)
    tier.register(memory)
    assert tier.put(KEYS, ROWS, 5.0).all()
    (client,) = library.clients
    assert client.registered
    tier.close()
    assert (client.closed, client.registered) == (0, {})
    with pytest.raises(OSError, match="closed"):
        tier.find(KEYS, 5.0)


def test_close_leaves_a_client_to_the_call_that_hangs(tier: MooncakeTier, library: FakeLibrary) -> None:
    """And to nobody else: the last call closes it."""
    assert tier.put(KEYS, ROWS, 5.0).all()
    gate = threading.Event()
    library.before = lambda op: gate.wait(20.0) if op == "exist" else None
    thread = threading.Thread(target=lambda: tier.find(KEYS, 5.0))
    thread.start()
    while not library.clients[0].running:
        time.sleep(0.01)
    began = time.monotonic()
    tier.close()
    assert time.monotonic() - began < 3.0
    assert library.clients[0].closed == 0
    assert tier._client.left_open == 1
    with pytest.raises(OSError, match="closed"):
        tier.find(KEYS, 1.0)
    gate.set()
    thread.join(20.0)
    assert library.clients[0].closed == 1


def test_a_forked_child_has_no_client(tier: MooncakeTier, library: FakeLibrary) -> None:
    """It is told so, and its close touches nothing."""
    assert tier.put(KEYS, ROWS, 5.0).all()
    child = os.fork()
    if not child:
        outcome = 9
        try:
            tier.find(KEYS, 1.0)
        except OSError:
            tier.close()
            outcome = library.clients[0].closed
        os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert got(tier) == [True] * 8


def test_mooncake_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said where the tier is made."""

    def lacks(name: str) -> None:
        raise ModuleNotFoundError(name)

    def cannot(name: str) -> None:
        raise ImportError("libibverbs.so.1: cannot open shared object file")

    for load, said in ((lacks, r"pip install tiercache\[mooncake\]"), (cannot, "libibverbs1")):
        monkeypatch.setattr(mooncake_client.importlib, "import_module", load)
        with pytest.raises(ConfigError, match=said):
            MooncakeTier(MooncakeOptions.from_url("mooncake://127.0.0.1:1"))


def test_options_reach_the_setup(master: str, library: FakeLibrary) -> None:
    """In Mooncake's order; our own address is the one that leads to the master."""
    url = f"mooncake://{master}?protocol=rdma&device=mlx5_0,mlx5_1&segment=8GiB&buffer=512MiB&replicas=2"
    tier = MooncakeTier(MooncakeOptions.from_url(url), library, lambda settings: None)
    tier.find(KEYS, 5.0)
    assert library.clients[0].setup_with == (
        "127.0.0.1", "P2PHANDSHAKE", 8 << 30, 512 << 20, "rdma", "mlx5_0,mlx5_1", master,
    )  # fmt: skip
    assert tier._config.replica_num == 2
    assert tier.endpoint == master
    tier.close()


def test_what_came_is_kept_before_its_buffer_goes(master: str, library: FakeLibrary) -> None:
    """Shared memory goes with the client: what was read through it is in the rows before the client is closed."""
    tier = MooncakeTier(
        MooncakeOptions.from_url(f"mooncake://{master}?client={master}"), library, lambda settings: None
    )
    assert tier.put(KEYS, ROWS, 5.0).all()
    tier.unsettled_s = 0.0
    library.codes[NAMES[0]] = -800
    rows = np.zeros_like(ROWS)
    assert tier.get(KEYS, rows, 5.0).tolist() == [False] + [True] * 7
    assert library.clients[0].closed == 1
    assert (rows[1:] == ROWS[1:]).all()
    tier.close()


def test_what_cannot_be_asked_is_not_removed(tier: MooncakeTier, library: FakeLibrary) -> None:
    """It may be being written. And where the master is gone, not every key waits for it."""
    for name in NAMES:
        library.values[name] = b"short"
    library.says["size"] = -703
    assert not tier.get(KEYS, np.zeros_like(ROWS), 5.0).any()
    assert len(library.values) == 8 and library.clients[0].sizes_asked == 8
    library.says["size"] = -900
    assert not tier.get(KEYS, np.zeros_like(ROWS), 5.0).any()
    assert library.clients[0].sizes_asked == 9
    del library.says["size"]
    library.before = lambda op: time.sleep(0.2) if op == "size" else None
    began = time.monotonic()
    tier.get(KEYS, np.zeros_like(ROWS), 0.1)
    assert time.monotonic() - began < 1.0
    assert tier.counts["healed"] == 1


def test_the_time_to_connect_is_part_of_the_deadline(tier: MooncakeTier, library: FakeLibrary) -> None:
    """One batch is tried after it, no more."""
    keys, rows = [i.to_bytes(32, "little") for i in range(200)], np.zeros((200, 10), dtype=np.uint8)
    library.before = lambda op: time.sleep(0.3) if op == "setup" else None
    assert tier.put(keys, rows, 0.2).sum() == 64


def test_a_client_that_was_closed_meanwhile_is_not_opened(master: str, library: FakeLibrary) -> None:
    """Opening and closing one holds up the process."""
    tier = MooncakeTier(
        MooncakeOptions.from_url(f"mooncake://{master}"), library, lambda settings: tier._client.close(0.0)
    )
    with pytest.raises(OSError, match="closed"):
        tier.find(KEYS, 1.0)
    assert not library.clients


def test_what_a_setup_raises_is_an_oserror(tier: MooncakeTier, library: FakeLibrary) -> None:
    """And said again by the calls that come before the next try."""

    def raises(op: str) -> None:
        raise RuntimeError("out of file handles")

    library.before = raises
    for _ in range(2):
        with pytest.raises(OSError, match="out of file handles"):
            tier.find(KEYS, 1.0)


@pytest.mark.parametrize(
    "answer", [b"no http at all\r\n\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz"]
)
def test_metrics_that_are_something_else(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An OSError, and no exception of HTTP's; a proxy of the environment is not asked."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")

    def serve() -> None:
        end, _ = server.accept()
        with end:
            end.recv(1 << 16)
            end.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(OSError, match="does not answer as a master"):
            asked_share(f"127.0.0.1:{server.getsockname()[1]}", 5.0)
        thread.join(20.0)


def test_metrics_that_come_drop_by_drop_end_at_the_deadline() -> None:
    """Each drop within the time that a socket may wait."""
    stop = threading.Event()

    def serve() -> None:
        end, _ = server.accept()
        with end:
            end.recv(1 << 16)
            end.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.suppress(OSError):
                while not stop.wait(0.05):
                    end.sendall(b"#")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            asked_share(f"127.0.0.1:{server.getsockname()[1]}", 0.3)
        assert time.monotonic() - began < 5.0
        stop.set()
        thread.join(20.0)


def test_it_connects_ahead_of_the_first_call(tier: MooncakeTier, library: FakeLibrary) -> None:
    assert not library.clients
    tier.connect_soon()
    until = time.monotonic() + 10
    while not library.clients and time.monotonic() < until:
        time.sleep(0.005)
    assert not tier.find(KEYS, 5.0).any()
    assert len(library.clients) == 1, "once"


def test_trouble_ahead_of_the_first_call_is_told_by_that(library: FakeLibrary) -> None:
    def refuse(settings: object) -> None:
        raise OSError("not now")

    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"mooncake://127.0.0.1:{server.getsockname()[1]}"
        tier = MooncakeTier(MooncakeOptions.from_url(url), library, refuse)
        tier.connect_soon()
        with pytest.raises(OSError, match="not now"):
            tier.find(KEYS, 5.0)
        tier.close()
    assert not library.clients
