"""What a MooncakeTier says when the store is full, hung, dead, or back: a miss or an OSError, soon, and never other
bytes than were put."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from rig_mooncake import HOST, MIB, Etcd, Master, Owner, Rig, free_port, mooncake_rig

from tiercache.remote.mooncake import MooncakeTier
from tiercache.remote.mooncake_options import MooncakeOptions

pytestmark = [pytest.mark.remote, pytest.mark.timeout(180)]
__all__ = ["mooncake_rig"]

WIDTH = 256 * 1024 + 32


def keys_of(n: int, seed: int = 0) -> list[bytes]:
    return [seed.to_bytes(16, "little") + i.to_bytes(16, "little") for i in range(n)]


def values_of(n: int, seed: int = 0, width: int = WIDTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, width), dtype=np.uint8)


@contextmanager
def opened(master: Master | str, query: str = "") -> Iterator[MooncakeTier]:
    address = master if isinstance(master, str) else master.address
    tier = MooncakeTier(MooncakeOptions.from_url(f"mooncake://{address}?{query}"))
    try:
        yield tier
    finally:
        tier.close()


def eventually(what: Callable[[], bool], within_s: float = 20.0) -> float:
    """Until it is true, an OSError being as good as false. How long it took."""
    began = time.monotonic()
    while time.monotonic() < began + within_s:
        try:
            if what():
                return time.monotonic() - began
        except OSError:
            pass
        time.sleep(0.1)
    pytest.fail(f"not within {within_s} s")


@contextmanager
def store(rig: Rig, *flags: str, nbytes: int = 128 * MIB) -> Iterator[tuple[Master, Owner]]:
    """A master and an owner, gone at the end."""
    with Rig(rig.folder) as own:
        master = own.master(*(flags or ("--default_kv_lease_ttl=5000",)))
        yield master, own.owner(master, nbytes)


def test_a_full_store_refuses(mooncake_rig: Rig) -> None:
    """What finds no room is a False after a few tries within the deadline; room that is made is used."""
    n = 80
    with (
        store(mooncake_rig, "--default_kv_lease_ttl=60000", "--eviction_ratio=0.0", nbytes=16 * MIB) as (master, _),
        opened(master) as tier,
    ):
        tier.find(keys_of(1), 10.0)  # connects
        began = time.monotonic()
        taken = tier.put(keys_of(n), values_of(n), 0.5)
        assert time.monotonic() - began < 2.0
        assert taken[:40].all() and not taken.all()
        assert tier.counts["no_room"] == (~taken).sum() and tier.counts["retries"] > 0
        back = np.zeros((n, WIDTH), dtype=np.uint8)
        came = tier.get(keys_of(n), back, 5.0)
        assert (came == taken).all()
        assert (back[came] == values_of(n)[came]).all()
        assert tier.remove(keys_of(8), 5.0).all()
        eventually(lambda: bool(tier.put(keys_of(1, seed=1), values_of(1), 0.2).all()))


def test_an_owner_that_died(mooncake_rig: Rig) -> None:
    """The master still says that it has them. Each read is over in some seconds, and what another owner holds comes."""
    keys, values = keys_of(24), values_of(24)
    with (
        store(mooncake_rig, "--default_kv_lease_ttl=1000", "--client_ttl=60") as (master, owner),
        opened(master) as tier,
    ):
        assert tier.put(keys, values, 5.0).all()
        owner.kill()
        assert tier.find(keys, 5.0).all()
        back = np.zeros_like(values)
        began = time.monotonic()
        with pytest.raises(OSError, match="transfer failed"):
            tier.get(keys, back, 1.0)
        assert time.monotonic() - began < 5.0
        assert tier.counts["transfer_failed"] > 0
        with Rig(mooncake_rig.folder) as rig:
            rig.owner(master, 64 * MIB)
            others = keys_of(24, seed=1)
            eventually(lambda: bool(tier.put(others, values, 5.0).any()))
            held = tier.find(others, 5.0)
            came = tier.get(others, back, 5.0)
            assert came.any() and not (came & ~held).any()
            assert (back[came] == values[came]).all()


def test_a_master_that_died_and_came_back(mooncake_rig: Rig) -> None:
    """An OSError within seconds, each time; and then the same tier works, with nothing in it."""
    keys, values = keys_of(4), values_of(4)
    with store(mooncake_rig) as (master, _), opened(master) as tier, Rig(mooncake_rig.folder) as rig:
        assert tier.put(keys, values, 5.0).all()
        master.kill()
        operations: list[Callable[[], object]] = [
            lambda: tier.find(keys, 1.0),
            lambda: tier.get(keys, np.zeros_like(values), 1.0),
            lambda: tier.put(keys, values, 1.0),
            lambda: tier.remove(keys, 1.0),
        ]
        for operation in operations:
            began = time.monotonic()
            with pytest.raises(OSError, match="master"):
                operation()
            assert time.monotonic() - began < 8.0
        rig.adopt(master.again())
        eventually(lambda: not tier.find(keys, 1.0).any())
        eventually(lambda: bool(tier.put(keys, values, 1.0).all()))
        back = np.zeros_like(values)
        assert tier.get(keys, back, 5.0).all()
        assert (back == values).all()
        assert tier._client.setups == 1


def test_a_master_that_another_takes_over_from(mooncake_rig: Rig) -> None:
    """Masters elected by etcd, with an oplog: misses or OSErrors for a while, then what was there is there again."""
    keys, values = keys_of(8), values_of(8)
    with Rig(mooncake_rig.folder) as rig:
        etcd = rig.adopt(Etcd(rig.folder))
        first = rig.adopt(Master(rig.folder, "--default_kv_lease_ttl=5000", etcd=etcd))
        rig.owner(first, 64 * MIB)
        with opened(etcd.address, "ha=etcd") as tier:
            eventually(lambda: bool(tier.put(keys, values, 5.0).all()))
            rig.adopt(Master(rig.folder, "--default_kv_lease_ttl=5000", etcd=etcd, stands_by=True))
            time.sleep(3.0)
            first.kill()
            eventually(lambda: bool(tier.find(keys, 1.0).all()), 60.0)
            back = np.zeros_like(values)
            eventually(lambda: bool(tier.get(keys, back, 5.0).all()), 60.0)
            assert (back == values).all()
            began = time.monotonic()
            tier.close()
            assert time.monotonic() - began < 5.0, "it waits for the watch of the leader, and everybody with it"


def test_no_master_yet(mooncake_rig: Rig) -> None:
    """A tier may be made before its store is there: OSErrors, each at once, until it is."""
    port = free_port()
    with opened(f"{HOST}:{port}") as tier, Rig(mooncake_rig.folder) as rig:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(OSError, match="does not answer"):
                tier.find(keys_of(1), 5.0)
            assert time.monotonic() - began < 1.0
        master = rig.adopt(Master(mooncake_rig.folder, port=port))
        rig.owner(master, 32 * MIB)
        eventually(lambda: bool(tier.put(keys_of(1), values_of(1), 1.0).all()))


def test_a_master_that_hangs(mooncake_rig: Rig) -> None:
    """An OSError in some seconds instead of a minute; it works again when it does."""
    with store(mooncake_rig) as (master, _), opened(master) as tier:
        assert tier.put(keys_of(2), values_of(2), 5.0).all()
        master.freeze()
        try:
            began = time.monotonic()
            with pytest.raises(OSError, match="master"):
                tier.find(keys_of(2), 1.0)
            assert time.monotonic() - began < 8.0
        finally:
            master.thaw()
        eventually(lambda: bool(tier.find(keys_of(2), 1.0).all()))


def test_a_hung_owner_writes_nothing_after_the_read_is_over(mooncake_rig: Rig) -> None:
    """The transfers' connections are closed with it: what the owner sends when it wakes goes nowhere."""
    keys, values = keys_of(12), values_of(12)
    with (
        store(mooncake_rig, "--default_kv_lease_ttl=5000", "--client_ttl=600") as (master, owner),
        opened(master) as tier,
    ):
        assert tier.put(keys, values, 5.0).all()
        rows = np.full_like(values, 0xA5)
        tier.register(rows)
        owner.freeze()
        began = time.monotonic()
        with pytest.raises(OSError, match="transfer failed"):
            tier.get(keys, rows, 1.0)
        assert time.monotonic() - began < 30.0
        before = rows.copy()
        owner.thaw()
        time.sleep(2.0)
        assert (rows == before).all()
        eventually(lambda: bool(tier.get(keys, rows, 5.0).all()))
        assert (rows == values).all()
        assert tier.counts["reopened"] == 0


def test_a_transfer_that_may_still_go_on_ends_with_its_client(mooncake_rig: Rig) -> None:
    """A read that failed late closes the client before it returns, under other calls too; the next call opens one."""
    keys, values = keys_of(6), values_of(6)
    with (
        store(mooncake_rig, "--default_kv_lease_ttl=5000", "--client_ttl=600") as (master, owner),
        opened(master) as tier,
    ):
        tier.unsettled_s = 0.5
        assert tier.put(keys, values, 5.0).all()
        rows = np.full((2, *values.shape), 0xA5, dtype=np.uint8)
        tier.register(rows.reshape(-1))
        owner.freeze()
        failed: list[OSError] = []

        def read(at: int) -> None:
            try:
                tier.get(keys, rows[at], 1.0)
            except OSError as error:
                failed.append(error)

        threads = [threading.Thread(target=read, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
        assert len(failed) == 2
        assert tier.counts["reopened"] == 2
        before = rows.copy()
        owner.thaw()
        time.sleep(1.0)
        assert (rows == before).all()
        assert tier.get(keys, rows[0], 5.0).all()
        assert (rows[0] == values).all()
        assert tier._client.setups == 2


def test_a_value_of_another_width_heals(mooncake_rig: Rig) -> None:
    """A miss, and the next put counts."""
    with store(mooncake_rig) as (master, _), opened(master) as tier:
        for there, asked in ((100, 300), (300, 100)):
            keys = keys_of(3, seed=there)
            assert tier.put(keys, values_of(3, width=there), 5.0).all()
            rows = np.zeros((3, asked), dtype=np.uint8)
            assert not tier.get(keys, rows, 5.0).any()
            assert tier.put(keys, values_of(3, width=asked), 5.0).all()
            assert tier.get(keys, rows, 5.0).all()
            assert (rows == values_of(3, width=asked)).all()
        assert tier.counts["other_width"] == tier.counts["healed"] == 6


def test_the_transport_is_measured(mooncake_rig: Rig) -> None:
    """TCP from another process; memory from our own segment, though the URL says the same."""
    keys, values = keys_of(8), values_of(8)
    with store(mooncake_rig) as (master, _), opened(master, "protocol=tcp") as tier:
        assert tier.transport() == "unknown"
        assert tier.put(keys, values, 5.0).all()
        assert tier.get(keys, np.zeros_like(values), 5.0).all()
        assert tier.transport().startswith("tcp"), tier.transport()
    with Rig(mooncake_rig.folder) as rig:
        master = rig.master()
        with opened(master, "protocol=tcp&segment=64MiB") as tier:
            assert tier.put(keys, values, 5.0).all()
            assert tier.get(keys, np.zeros_like(values), 5.0).all()
            assert tier.transport().startswith("memory"), tier.transport()


def test_over_shared_memory(mooncake_rig: Rig) -> None:
    """Measured as memory; OSErrors while the `mooncake_client` is gone, and it works again with a new one."""
    keys, values = keys_of(80), values_of(80)
    with Rig(mooncake_rig.folder) as rig:
        master = rig.master("--client_ttl=2")
        client = rig.client(master)
        with opened(master, f"client={client.address}") as tier:
            eventually(lambda: bool(tier.put(keys, values, 5.0).all()))
            back = np.zeros_like(values)
            with pytest.raises(OSError, match="shared memory"):
                tier.register(back)
            assert tier.get(keys, back, 5.0).all()
            assert (back == values).all()
            assert tier.transport().startswith("memory"), tier.transport()
            client.kill()
            for operation in (lambda: tier.find(keys, 1.0), lambda: tier.get(keys, back, 1.0)):
                began = time.monotonic()
                with pytest.raises(OSError):
                    operation()
                assert time.monotonic() - began < 8.0
            rig.adopt(client.again())
            eventually(lambda: bool(tier.put(keys[:4], values[:4], 5.0).all()))
            eventually(lambda: bool(tier.get(keys[:4], back[:4], 5.0).all()))
            assert (back[:4] == values[:4]).all()


def test_pressure(mooncake_rig: Rig) -> None:
    """Of the master's own figures."""
    with store(mooncake_rig, nbytes=32 * MIB) as (master, _):
        with opened(master, f"metrics={HOST}:{master.metrics_port}") as tier:
            assert tier.pressure(1.0) == 0.0
            assert tier.put(keys_of(32), values_of(32), 5.0).all()
            time.sleep(1.1)
            assert 0.2 < (tier.pressure(1.0) or 0.0) < 0.5
        with opened(master) as tier:
            assert tier.pressure(1.0) is None


def test_close_under_calls(mooncake_rig: Rig) -> None:
    """Nothing crashes; who calls gets its bytes or an OSError."""
    keys, values = keys_of(16), values_of(16)
    with store(mooncake_rig) as (master, _), opened(master) as tier:
        assert tier.put(keys, values, 5.0).all()
        wrong: list[str] = []
        ended = threading.Semaphore(0)

        def read() -> None:
            rows = np.zeros_like(values)
            try:
                while True:
                    if not tier.get(keys, rows, 5.0).all() or (rows != values).any():
                        wrong.append("a miss or other bytes")
            except OSError:
                ended.release()

        threads = [threading.Thread(target=read, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        began = time.monotonic()
        tier.close()
        assert time.monotonic() - began < 5.0
        for _ in threads:
            assert ended.acquire(timeout=10.0)
        assert wrong == []


_CHILD = """
import os, sys, threading, time
import numpy as np
from tiercache.remote.mooncake import MooncakeTier
from tiercache.remote.mooncake_options import MooncakeOptions
tier = MooncakeTier(MooncakeOptions.from_url("mooncake://" + sys.argv[1]))
keys, rows = [bytes([i]) * 32 for i in range(32)], np.ones((32, 262144), dtype=np.uint8)
assert tier.put(keys, rows, 5.0).all()
if sys.argv[2] == "fork":
    child = os.fork()
    if not child:
        try:
            tier.find(keys, 1.0)
        except OSError as error:
            tier.close()
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert tier.find(keys, 5.0).all()
else:
    def read():
        rows = np.zeros((32, 262144), dtype=np.uint8)
        while True:
            tier.get(keys, rows, 5.0)
    for _ in range(3):
        threading.Thread(target=read, daemon=True).start()
    time.sleep(0.5)
print("the end", flush=True)
"""


@pytest.mark.parametrize("what", ["exit", "fork"])
def test_a_process_that_ends_under_calls_or_forks(mooncake_rig: Rig, what: str) -> None:
    """It ends in order, with its threads inside calls; and a forked child is told that it has no client."""
    with store(mooncake_rig) as (master, _):
        command = [sys.executable, "-c", _CHILD, master.address, what]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=dict(os.environ))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "the end" in done.stdout
