"""What carried bytes is counted, not believed."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from tiercache.remote import carried
from tiercache.remote.carried import Carried, Counted, count_bytes

NBYTES = 1 << 20


def test_bytes_over_tcp_are_counted() -> None:
    """On connections that were there before, and on new ones; what is sent is not."""

    def send() -> None:
        with socket.create_connection(server.getsockname()) as start:
            start.sendall(bytes(NBYTES))

    with socket.create_server(("127.0.0.1", 0)) as server:
        before = count_bytes()
        thread = threading.Thread(target=send)
        thread.start()
        end, _ = server.accept()
        with end:
            left = NBYTES
            while left:
                left -= len(end.recv(left))
            thread.join(20.0)
            carried = Carried.between(before, count_bytes(), NBYTES)
            assert NBYTES <= carried.tcp < NBYTES + 65536
            assert carried.way == "tcp"
            assert str(carried).startswith("tcp (1048576 bytes read, ")
            again = count_bytes()
            assert Carried.between(again, count_bytes(), NBYTES).way == "memory"


def test_what_cannot_be_counted_spoils_no_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """No /proc: nothing is seen. A number that is no socket by the time it is looked at costs no descriptor."""
    descriptors = Path("/proc/self/fd")
    with Path("/dev/null").open("rb") as file:
        before = len(list(descriptors.iterdir()))
        with pytest.raises(OSError):
            carried._socket_at(file.fileno())
        assert len(list(descriptors.iterdir())) == before
    monkeypatch.setattr(carried, "_DESCRIPTORS", Path("/no/such/folder"))
    assert count_bytes().tcp == {}


def test_the_way_of_a_read() -> None:
    """Where at least half of its bytes were seen; nowhere: memory. A socket closed meanwhile takes nothing back."""
    nothing = Counted({1: 500}, 0)
    assert Carried.between(nothing, Counted({1: 600}, 0), 200).way == "tcp"
    assert Carried.between(nothing, Counted({1: 599}, 0), 200).way == "memory"
    assert Carried.between(nothing, Counted({1: 500}, 100), 200).way == "rdma"
    assert Carried.between(nothing, Counted({2: 150}, 0), 200).way == "tcp"
    assert Carried.between(nothing, Counted({}, 0), 200) == Carried(200, 0, 0)
