"""The wire to an island carries, is cut, is slow, and carries again."""

import contextlib
import socket
import subprocess
import sys
import time

import pytest
from rig_island import Island

pytestmark = pytest.mark.remote

_SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    for _ in range(20):
        peer, _ = server.accept()
        with peer:
            peer.sendall(bytes(1 << 20))
"""


@contextlib.contextmanager
def server(island):
    command = island.on([sys.executable, "-c", _SERVER, island.there])
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield island.there, int(process.stdout.readline())
        finally:
            process.kill()


def fetch(address, timeout=1.0):
    """Bytes that came, and the seconds it took."""
    began, got = time.monotonic(), 0
    with contextlib.suppress(OSError), socket.create_connection(address, timeout) as peer:
        peer.settimeout(timeout)
        while data := peer.recv(1 << 16):
            got += len(data)
    return got, time.monotonic() - began


def test_a_wire_is_cut_slowed_and_mended():
    with Island() as island, server(island) as address:
        whole, quick = fetch(address)
        assert whole == 1 << 20
        with island.cut():
            assert fetch(address, 0.3)[0] == 0
        assert fetch(address)[0] == 1 << 20
        with island.slow("16mbit"):
            came, seconds = fetch(address, 5.0)
            assert came == 1 << 20
            assert seconds > 0.3 > quick
        assert fetch(address)[1] < 0.3


def test_islands_do_not_see_each_other():
    with Island() as one, Island() as other, server(one) as address:
        assert fetch(address)[0] == 1 << 20
        probe = f"import socket; socket.create_connection({address!r}, 0.3)"
        seen = subprocess.run(other.on([sys.executable, "-c", probe]), capture_output=True, timeout=20)
        assert seen.returncode != 0
