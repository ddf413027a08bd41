"""Children that open damaged catalogs, or have theirs damaged while it is open."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from catalog_rig import WIDTH, manifest, slots, symbols_of
from crash_power import LengthOnly
from crash_world import Shape, bytes_of, ids_of, open_cache, right, tokens_of

from tiercache import catalog_check, catalog_copy, catalog_open
from tiercache.catalog import Catalog
from tiercache.catalog_rows import DamagedCatalogError
from tiercache.directory import StoreDirectory
from tiercache.keys import chain_idents, root_ident
from tiercache.testing.crash import Report
from tiercache.types import ROOT, Claims

CAPACITY = 11_000
"""Enough for branch pages in the trees of rows and of symbols."""
RUN = 200
FILES = LengthOnly()
ROOT_IDENT = root_ident(bytes.fromhex(manifest().namespace), manifest().epoch)


class Store:
    """A directory and its catalog."""

    def __init__(self, path: Path) -> None:
        self.directory = StoreDirectory.open(path, wait_s=0.0)
        self.catalog = Catalog.open(self.directory, manifest(), CAPACITY, root_ident=ROOT_IDENT, ops=FILES)

    def claim(self, first: int, count: int, tag: int) -> None:
        """A chain of blocks under the root in the slots from `first`, not committed."""
        where = np.arange(first, first + count, dtype=np.int32)
        symbols = symbols_of(tag, count)
        idents = chain_idents(symbols, WIDTH, ROOT_IDENT)
        parents = np.concatenate(([ROOT], where[:-1])).astype(np.int32)
        above = np.concatenate((np.array([ROOT_IDENT], dtype=np.uint64), idents[:-1]))
        times = np.full(count, 1000.0 + tag)
        self.catalog.starting(where)
        self.catalog.written(where, idents, idents, Claims(parents, above, symbols, times, np.ones(count, np.uint32)))

    def commit(self) -> list[int]:
        return sorted(self.catalog.commit(lambda: True).tolist())

    def close(self, clean: bool = True) -> None:
        self.catalog.close(clean)
        self.directory.close()


def build(report: Report, argument: dict[str, str]) -> None:
    """Make a store in "path" with every kind of page, and write its truth (slot, ident, symbol) to "truth"."""
    store = Store(Path(argument["path"]))
    for number, first in enumerate(range(0, CAPACITY - RUN, RUN)):
        store.claim(first, RUN, tag=number)
        if number % 10 == 9:
            store.commit()
    store.commit()
    store.catalog.forget(np.arange(1000, 1600, dtype=np.int32))
    store.commit()
    store.claim(1000, RUN, tag=900)
    store.commit()
    store.close()
    again = Store(Path(argument["path"]))
    found = again.catalog.recovered
    symbols = np.frombuffer(found.symbols, dtype=np.uint8).reshape(-1, WIDTH)
    order = np.argsort(found.slots)
    np.savez(argument["truth"], slots=found.slots[order], idents=found.idents[order], symbols=symbols[order])
    again.close()
    report(len(found.slots))


def forked_copy(source: Path, target: Path, limit_s: float = 20.0) -> dict[str, int]:
    """As `checked_copy`: it may die of a signal. But a fork (there are no threads here), which takes less time."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 70
        try:
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            os.write(theirs, json.dumps(catalog_copy.copy(source, target)).encode())
            status = 0
        except (DamagedCatalogError, lmdb.Error, OSError):
            status = 3
        finally:
            os._exit(status)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        counts = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:
        return dict(json.loads(counts))
    assert status < 0 or status == 3, status
    raise DamagedCatalogError(f"status {status}")


Harm = list[Any]
"""["truncate", size] |
["zero", offset, nbytes] | ["noise", offset, nbytes, seed] | ["flip", offset, bit] | ["copy", from, to, nbytes]"""


def harm(path: Path, what: Harm) -> None:
    kind, *rest = what
    with path.open("r+b", buffering=0) as file:
        fd = file.fileno()
        if kind == "truncate":
            os.truncate(fd, rest[0])
        elif kind == "zero":
            os.pwrite(fd, bytes(rest[1]), rest[0])
        elif kind == "noise":
            os.pwrite(fd, random.Random(rest[2]).randbytes(rest[1]), rest[0])
        elif kind == "flip":
            os.pwrite(fd, bytes([os.pread(fd, 1, rest[0])[0] ^ 1 << rest[1]]), rest[0])
        else:
            os.pwrite(fd, os.pread(fd, rest[2], rest[0]), rest[1])


def open_damaged(report: Report, argument: dict[str, Any]) -> None:
    """After each of "harms" by itself, open a copy of the store "path": what is wrong, and what was recovered."""
    catalog_check.checked_copy = forked_copy
    truth = dict(np.load(argument["truth"]))
    for number, what in enumerate(argument["harms"]):
        report({"about_to": what})
        place = Path(argument["place"]) / str(number)
        shutil.copytree(argument["path"], place)
        harm(place / "catalog" / "data.mdb", what)
        report({"harm": what, **_open_one(place, truth)})
        shutil.rmtree(place)


def _open_one(place: Path, truth: dict[str, Any]) -> dict[str, Any]:
    store = Store(place)
    found, problems = store.catalog.recovered, []
    expected = np.searchsorted(truth["slots"], found.slots)
    symbols = np.frombuffer(found.symbols, dtype=np.uint8).reshape(-1, WIDTH)
    if not np.isin(found.slots, truth["slots"]).all():
        problems.append("slots that held nothing")
    elif (truth["idents"][expected] != found.idents).any() or (truth["symbols"][expected] != symbols).any():
        problems.append("not what these slots held")
    counters = dict(store.directory.counters)
    if len(found.slots) < len(truth["slots"]) and not (
        counters.get("bad_records") or counters.get("catalogs_set_aside")
    ):
        problems.append(f"{len(truth['slots']) - len(found.slots)} blocks fewer, and nothing counted: {counters}")
    store.claim(CAPACITY - 50, 20, tag=901)
    if store.commit() or not store.catalog.healthy or not store.catalog.claimed(slots(CAPACITY - 31)).all():
        problems.append(f"cannot go on: {store.catalog.last_error}")
    store.close()
    return {"problems": problems, "recovered": len(found.slots), "cold": found.reason, "counters": counters}


def die_reading(report: Report, argument: dict[str, Any]) -> None:
    """Open the store at "path"; the process ends as LMDB would end it, while it reads the catalog."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)

    catalog_open.load = die
    Store(Path(argument["path"]))


def open_at(report: Report, argument: dict[str, Any]) -> None:
    """Open and close the store at "path"."""
    store = Store(Path(argument["path"]))
    report([len(store.catalog.recovered.slots), dict(store.directory.counters)])
    store.close()


def damaged_while_open(report: Report, argument: dict[str, Any]) -> None:
    """A cache whose catalog is damaged under it, in the way "how" (see `spoil`): it goes on, and says so."""
    place, shape = Path(argument["place"]), Shape()
    cache = open_cache(place, shape)
    epoch = cache.epoch.hex()

    def store(path: str) -> None:
        assert cache.store(tokens_of(path), bytes_of(ids_of(path, epoch, {}))).wait(20.0)

    def loads(path: str) -> int:
        loaded = cache.load(cache.lookup(tokens_of(path))).result(20.0)
        with loaded:
            if loaded.block_count:
                assert right(ids_of(path, epoch, {})[: loaded.block_count], np.asarray(loaded.blocks)).all()
            return loaded.block_count

    store("0.0.0")
    assert cache.flush(20.0, to="nvme")
    spoil(place / "catalog" / "data.mdb", argument["how"])
    store("1.0.0")
    first = cache.flush(20.0, to="nvme")
    second = cache.flush(20.0, to="nvme")
    facts = cache.stats().directory
    assert facts is not None
    report(
        {
            "flushes": [first, second],
            "loaded": [loads("0.0.0"), loads("1.0.0")],
            "check": cache.check(),
            "healthy": facts["catalog_healthy"],
            "catalog": facts["catalog"],
            "counters": facts["counters"],
        }
    )
    os.kill(os.getpid(), signal.SIGKILL)


def spoil(path: Path, how: str) -> None:
    if how.startswith("truncate"):
        os.truncate(path, int(how.split()[1]))
    elif how == "unlink":
        path.unlink()
    elif how == "remove":
        shutil.rmtree(path.parent)
    else:
        path.rename(path.with_name("old"))
        path.write_bytes(b"something else" * 10_000)
