"""Histories of a cache whose power is cut at some moment, and what a next cache makes of what was left.

A history is up to three sessions, each on what the power cut in the one before it left. Every session ends in a cut: at
any file operation, or before, within or after any transaction of the catalog; some have one at every one of these.

In histories with an even seed nothing happens at the same time (one thread a tier, each operation waits for its copies,
commits only where they are asked for): the seed says all, and another run of it ends the same. The others have
operations, writes by age and commits overlap as they like: run such a seed often.

`python tests/crash/crash_power.py SEED [TIMES]` runs one history again, and keeps its directory where it fails.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import random
import shutil
import sys
import tempfile
import threading
import traceback
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from crash_scripts import Driver, copy_inside, examine
from crash_world import UNIVERSE, Model, Op, Shape, random_ops, random_shape

import tiercache.catalog_check
import tiercache.directory
import tiercache.tiers.fileio
from tiercache.assembly import Seams
from tiercache.catalog_rows import Change, RowStore, used_nbytes
from tiercache.mover import Mover
from tiercache.testing.crash import Report
from tiercache.testing.power import PowerCut, tear_lmdb, tear_unsynced
from tiercache.tiers.fileio import OsFiles

TRACKED = ("slots-", "epoch", "STORE", "clean")
PHASES = ("before", "inside", "inside", "after")
MOST_CUTS = 45
"""Of one session that is cut at every commit."""


@dataclass(frozen=True)
class Moment:
    """When the power is cut, if not at the end."""

    event: int = 0
    """At the so manieth operation on a file or phase of a commit."""
    commit: int = 0
    phase: str = ""
    """At this phase of the so manieth commit."""
    every: bool = False
    """At every phase of every commit, and the session goes on."""


@dataclass(frozen=True)
class Left:
    """What one cut left."""

    place: Path
    results: list[Any]
    """Those that there were at the cut."""


class Session:
    """Runs operations in `place`, and leaves below `target` what a power cut at the given moment may leave."""

    current: Session | None = None

    def __init__(
        self, place: Path, target: Path, moment: Moment, rng: random.Random, model: Model, in_order: bool
    ) -> None:
        """`model`: what is promised already by what lies in `place`; it is not changed. `in_order`: see above."""
        place.mkdir(mode=0o700, exist_ok=True)
        self.power = PowerCut(place, tracked=TRACKED, watch=self.operation)
        self.cuts: list[Left] = []
        self.counters = Counter[str]()
        self.trace: list[str] = []
        """What happened to files, and when."""
        self._target = target
        self._in_order = in_order
        self._moment = moment
        self._rng = rng
        self._results: list[Any] = []
        self._new: dict[int, bytes] = {}
        """Catalog files, by inode, that LMDB does not sync by itself: what they are now."""
        self._driver = Driver(str(place), UNIVERSE, seams=Seams(file_ops=self.power), threads=1 if in_order else 2)
        self._driver.model = copy.deepcopy(model)
        if model.reused:
            self._driver.trust_acknowledged()

    def run(self, ops: list[Op]) -> None:
        """Until the cut, which comes at the end if it did not come before."""
        Session.current = self
        Mover.__init__.__kwdefaults__["commit_every_s"] = 60.0 if self._in_order else 0.01
        try:
            for op in ops:
                result = self._driver.step(op)
                if self._in_order and op[0] != "close":
                    self._driver.until_idle()
                self._results.append(result)
                if self.cuts and not self._moment.every:
                    break
            with self.power.lock:
                if not self.cuts or self._moment.every:
                    self._cut()
        finally:
            Session.current = None
            if self._driver.cache is not None:
                self._driver.cache.switch = "stores-off"
                self._driver.cache.close(1.0)
            self.power.end()
            self.counters.update(self.power.counters)

    def operation(self, name: str) -> None:
        """A file is about to change, or has changed."""
        self.trace.append(f"{len(self._results)} {name}")
        self.event()

    def event(self, phase: str = "") -> None:
        """Something changes on disk. `phase` of a commit, if it is one."""
        self.counters["events"] += 1
        if self._is_here(phase):
            self._cut()

    def transaction(self, store: RowStore, change: Change, apply: Any) -> None:
        """A commit of the catalog: an event before, one in its middle, one after."""
        with self.power.lock:
            self.counters["commits"] += 1
            self.trace.append(f"{len(self._results)} commit")
            self.event("before")
            self.counters["events"] += 1
            inside = self._is_here("inside")
            before = _used(store.path) if inside else b""
            apply(store, change)
            if store.path.stat().st_ino in self._new:
                self._new[store.path.stat().st_ino] = _used(store.path)
            elif inside:
                self.counters["torn_commits"] += 1
                self._cut({store.path: tear_lmdb(before, _used(store.path), self._rng)})
            self.event("after")

    def opened(self, store: RowStore, is_synced: bool) -> None:
        """LMDB opened a file for writing; unless `is_synced`, its commits last from the next `synced` on only."""
        if not is_synced:
            self._new[store.path.stat().st_ino] = b""

    def synced(self, store: RowStore) -> None:
        """All of a store's commits last."""
        with self.power.lock:
            self.event()
            self._new.pop(store.path.stat().st_ino, None)
            self.event()

    def _is_here(self, phase: str) -> bool:
        moment = self._moment
        if moment.every:
            return bool(phase) and len(self.cuts) < MOST_CUTS
        if self.cuts:
            return False
        if moment.commit:
            return (self.counters["commits"], phase) == (moment.commit, moment.phase)
        return self.counters["events"] == moment.event

    def _cut(self, instead: dict[Path, bytes] | None = None) -> None:
        place = self._target / f"cut{len(self.cuts)}"
        place.parent.mkdir(exist_ok=True)
        torn = dict(instead or {})
        for path in self.power.root.rglob("data.mdb"):
            content = self._new.get(path.stat().st_ino)
            if content is not None:
                torn[path] = tear_unsynced(content, self._rng)
        self.cuts.append(Left(place, list(self._results)))
        self.power.cut(place, self._rng, torn)


def _used(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(used_nbytes(path))


class LengthOnly(OsFiles):
    """Files in memory whose room need not be had: the kernel would clear it, which takes longer than a session."""

    def fallocate(self, fd: int, nbytes: int) -> None:
        if os.fstat(fd).st_size < nbytes:
            self.ftruncate(fd, nbytes)

    def size(self, fd: int) -> tuple[int, int]:
        return os.fstat(fd).st_size, os.fstat(fd).st_size


class _WatchedOs:
    """The module `os`, for modules that write small files with it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, fd: int, data: memoryview) -> int:
        session = Session.current
        return os.write(fd, data) if session is None else session.power.write(fd, data)

    def fsync(self, fd: int) -> None:
        if Session.current is not None:
            Session.current.power.fsync(fd)


def watch_everything() -> None:
    """In this process: let the current session know of all that changes on disk other than through its `file_ops`."""
    init, apply, sync, directory_sync = (
        RowStore.__init__,
        RowStore.apply,
        RowStore.sync,
        tiercache.directory.sync_directory,
    )

    def watched_init(store: RowStore, *args: Any, **options: Any) -> None:
        init(store, *args, **options)
        if Session.current is not None and not options.get("readonly"):
            Session.current.opened(store, options.get("sync", True))

    def watched_apply(store: RowStore, change: Change) -> None:
        if Session.current is None:
            apply(store, change)
        else:
            Session.current.transaction(store, change, apply)

    def watched_sync(store: RowStore) -> None:
        sync(store)
        if Session.current is not None:
            Session.current.synced(store)

    def watched_directory_sync(path: Path) -> None:
        if Session.current is None:
            directory_sync(path)
        else:
            Session.current.power.sync_directory(str(path))

    RowStore.__init__ = watched_init  # type: ignore[method-assign]
    RowStore.apply = watched_apply  # type: ignore[method-assign]
    RowStore.sync = watched_sync  # type: ignore[method-assign]
    tiercache.directory.os = _WatchedOs()  # type: ignore[assignment]
    tiercache.directory.sync_directory = watched_directory_sync
    tiercache.catalog_check.sync_directory = watched_directory_sync
    tiercache.tiers.fileio.sync_directory = lambda path: None  # PowerCut calls it no more


# -- whole histories ----------------------------------------------------------------------------------------------


def random_moment(rng: random.Random) -> Moment:
    """When to cut."""
    kind = rng.random()
    if kind < 0.02:
        return Moment(every=True)
    if kind < 0.5:
        return Moment(commit=rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7, 8, 10]), phase=rng.choice(PHASES))
    return Moment(event=rng.randrange(1, 30) if rng.random() < 0.3 else rng.randrange(25, 120))


def first_session(rng: random.Random, durability: str, in_order: bool) -> tuple[list[Op], Moment]:
    shape = replace(random_shape(rng), durability=durability)
    if in_order:
        shape = replace(shape, write_after=None)
    churn = rng.random() < 0.3
    return random_ops(rng, shape, rng.randrange(8, 28), churn), random_moment(rng)


def next_session(rng: random.Random, shape: Shape) -> tuple[list[Op], Moment]:
    """Goes on where the last one was cut, often with another size."""
    if rng.random() < 0.4:
        shape = replace(shape, nvme=rng.choice([112, 128, 160, 224] if shape.roomy else [12, 16, 24, 40, 48]))
    return random_ops(rng, shape, rng.randrange(3, 12), rng.random() < 0.3), random_moment(rng)


def history(base: Path, seed: int, durability: str = "power") -> dict[str, Any]:
    """Run one history in the directory `base`: `problems`, `counters`, and per session what happened to files."""
    facts: dict[str, Any] = {"seed": seed, "problems": [], "counters": Counter[str](), "traces": []}
    rng, in_order = random.Random(seed), seed % 2 == 0
    place, model = base / "kv", Model()
    ops, moment = first_session(rng, durability, in_order)
    for number in range(rng.choice([1, 1, 2, 2, 3])):
        if number:
            ops, moment = next_session(rng, model.shape)
        session = Session(place, base / f"left{number}", moment, rng, model, in_order)
        session.run(ops)
        assert threading.active_count() == 1
        facts["counters"].update(session.counters, sessions=1)
        facts["traces"].append(session.trace)
        models = [copy.deepcopy(model).after(ops, left.results) for left in session.cuts]
        place, model = session.cuts[-1].place, models[-1]
        for left, promised in zip(session.cuts[:-1], models, strict=False):
            _examine(left, promised, ops, facts)
    _examine(session.cuts[-1], model, ops, facts)
    facts["counters"].update(histories=1, in_order=in_order)
    return facts


def _examine(left: Left, model: Model, ops: list[Op], facts: dict[str, Any]) -> None:
    found = examine(str(left.place), model, UNIVERSE, go_on=False, seams=Seams(file_ops=LengthOnly()))
    if found["problems"]:
        done = f"after {len(left.results)} of these operations: {json.dumps(ops)}"
        facts["problems"] += [*found["problems"], f"in {left.place.parent.name}/{left.place.name}, {done}"]
    counted = {name: found[name] for name in ("acked", "served", "recovered", "lost", "forgotten")}
    wrong = sum("wrong bytes" in each for each in found["problems"])
    facts["counters"].update(
        counted, opened=1, warm=found["recovered"] > 0, with_promises=found["acked"] > 0, wrong_bytes=wrong
    )


def histories(report: Report, argument: dict[str, Any]) -> None:
    """Run one history per seed below `place`, and report each. The first that raises is the last."""
    copy_inside()
    watch_everything()
    for seed in argument["seeds"]:
        base = Path(argument["place"]) / str(seed)
        base.mkdir()
        try:
            facts = history(base, seed, argument.get("durability", "power"))
        except Exception:  # noqa: BLE001  whatever it is, the seed must be told with it
            report({"seed": seed, "problems": [traceback.format_exc()], "counters": {}})
            return
        report({name: facts[name] for name in ("seed", "problems", "counters")})
        if not facts["problems"]:
            shutil.rmtree(base)


def again(seed: int, times: int) -> int:
    """Run one history `times` times; what is wrong goes to stdout. Returns how often something was."""
    logging.disable(logging.ERROR)
    copy_inside()
    watch_everything()
    failed = 0
    for run in range(times):
        base = Path(tempfile.mkdtemp(prefix=f"power-cut-{seed}-"))
        facts = history(base, seed)
        if facts["problems"]:
            failed += 1
            print(f"run {run}, kept in {base}:", *facts["problems"], sep="\n  ", flush=True)
        else:
            shutil.rmtree(base)
    print(f"history {seed}: {failed} of {times} runs failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(again(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 1)))
