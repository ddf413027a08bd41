"""Histories of a cache whose power is cut at some moment, and what a next cache makes of what was left."""

from __future__ import annotations

import copy
import random
import shutil
import threading
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
from tiercache.testing.power import PowerCut, tear_lmdb


class History:
    """Runs operations in `place` until the `at`-th event, and then leaves in `target` what a power cut may leave."""

    current: History | None = None

    def __init__(self, place: Path, target: Path, at: int, rng: random.Random, model: Model | None = None) -> None:
        """`model`: what is promised already by what lies in `place`."""
        place.mkdir(mode=0o700, exist_ok=True)
        self.power = PowerCut(place, watch=self.event)
        self.target = target
        self.results: list[Any] = []
        self.left: list[Any] | None = None
        """The results that there were at the cut."""
        self.events = 0
        self._at = at
        self._rng = rng
        self._driver = Driver(str(place), UNIVERSE, seams=Seams(file_ops=self.power))
        self._driver.model = copy.deepcopy(model or Model())

    def run(self, ops: list[Op]) -> Model:
        """Until the cut, which comes at the end if it did not come before; what is promised of what it left."""
        History.current, model = self, copy.deepcopy(self._driver.model)
        try:
            for op in ops:
                self.results.append(self._driver.step(op))
                if self.left is not None:
                    break
            with self.power.lock:
                self.cut()
        finally:
            History.current = None
            if self._driver.cache is not None:
                self._driver.cache.switch = "stores-off"
                self._driver.cache.close(1.0)
            self.power.end()
        assert self.left is not None
        return model.after(ops, self.left)

    def event(self, _name: str) -> None:
        self.events += 1
        if self.events == self._at:
            self.cut()

    def cut(self, instead: dict[Path, bytes] | None = None) -> None:
        if self.left is None:
            self.left = list(self.results)
            self.power.cut(self.target, self._rng, instead)

    def transaction(self, store: RowStore, change: Change, apply: Any) -> None:
        """A commit of the catalog: an event before, one in its middle, one after."""
        with self.power.lock:
            self.event("before a transaction")
            in_the_middle = self.events + 1 == self._at
            before = _used(store.path) if in_the_middle else b""
            apply(store, change)
            self.events += 1
            if in_the_middle:
                self.cut({store.path: tear_lmdb(before, _used(store.path), self._rng)})
            self.event("after a transaction")


def _used(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(used_nbytes(path))


def watch_everything() -> None:
    """In this process: let the current history know of catalog commits and of directory syncs."""
    apply, sync_directory = RowStore.apply, tiercache.directory.sync_directory

    def watched_apply(store: RowStore, change: Change) -> None:
        if History.current is None:
            apply(store, change)
        else:
            History.current.transaction(store, change, apply)

    def watched_sync(path: Path) -> None:
        if History.current is None:
            sync_directory(path)
        else:
            History.current.power.sync_directory(str(path))

    Mover.__init__.__kwdefaults__["commit_every_s"] = 0.01  # more commits in less time
    RowStore.apply = watched_apply  # type: ignore[method-assign]
    tiercache.directory.sync_directory = watched_sync
    tiercache.catalog_check.sync_directory = watched_sync
    tiercache.tiers.fileio.sync_directory = lambda path: None  # PowerCut calls it no more


def plan(seed: int, durability: str) -> tuple[list[Op], int, random.Random]:
    """Operations, at which event to cut, and the rest of the random numbers."""
    rng = random.Random(seed)
    shape = random_shape(rng)
    shape = Shape(shape.dram, shape.nvme, shape.write_after, durability, shape.roomy)
    at = rng.randrange(1, 30) if rng.random() < 0.15 else rng.randrange(25, 120)
    return random_ops(rng, shape, rng.randrange(8, 28)), at, rng


def histories(report: Report, argument: dict[str, Any]) -> None:
    """Run one history per seed below `place`; report per seed what is wrong, and a few numbers.

    Every third in which no slot was used twice goes on: from what the cut left, another session, cut while it opens or
    not long after.
    """
    copy_inside()
    watch_everything()
    for seed in argument["seeds"]:
        base = Path(argument["place"]) / str(seed)
        base.mkdir()
        durability = argument.get("durability", "power")
        ops, at, rng = plan(seed, durability)
        history = History(base / "kv", base / "cut", at, rng)
        model = history.run(ops)
        # Where a slot was used twice, the cut may have left a claim whose bytes are another block's: a miss when it is
        # read. Nobody reads it before the next close says what is on NVMe, so that would promise too much.
        again = rng.random() < 0.33 and model.shape.roomy and not model.reused
        if again:
            ops = random_ops(rng, model.shape, 6)
            at = rng.randrange(1, 50)
            history = History(base / "cut", base / "cut2", at, rng, model)
            model = history.run(ops)
        assert threading.active_count() == 1
        facts = examine(str(history.target), model, UNIVERSE, go_on=False)
        report({**facts, "seed": seed, "events": history.events, "at": at, "again": again})
        shutil.rmtree(base)
