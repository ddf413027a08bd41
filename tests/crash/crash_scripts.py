"""What the children of the crash tests do: run operations on a cache until they die, or open what another one left."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from crash_world import (
    BLOCK,
    STRIDE,
    UNIVERSE,
    Model,
    Op,
    Shape,
    blocks_of,
    bytes_of,
    ids_of,
    is_under,
    open_cache,
    prefixes,
    right,
    tokens_of,
)

from tiercache import TieredKVCache, catalog_check, catalog_copy, scrub
from tiercache.catalog_rows import DamagedCatalogError
from tiercache.errors import ConfigError
from tiercache.scrub import check_directory
from tiercache.testing.crash import Report, Trap, die

OURS = {"lock", "STORE", "epoch", "clean", "catalog"}
WAIT_S = 20.0


class Driver:
    """Runs operations one by one; keeps its own model, for the bytes to store."""

    def __init__(self, place: str, paths: list[str], **options: Any) -> None:
        self.place = place
        self.paths = paths
        self.options = options
        self.model = Model()
        self.traps: dict[str, Trap] = {}
        self.cache: TieredKVCache | None = None
        self.trusted: set[int] | None = None
        """What blocks are made from whose bytes on NVMe, if any, are surely theirs; None: all. See `held`."""

    def trust_acknowledged(self) -> None:
        """For a store whose last owner did not stop in order, after it had used slots twice."""
        self.trusted = set()
        for path, blocks in self.model.acked.items():
            self._trust(self.ids(path)[:blocks])

    def _trust(self, ids: Any) -> None:
        if self.trusted is not None:
            self.trusted.update(ids.tolist())

    def step(self, op: Op) -> Any:
        """One operation, and what it promised (see Model)."""
        kind, *rest = op
        result = getattr(self, f"do_{kind}")(*rest)
        self.model.done(op, result)
        return result

    def ids(self, path: str) -> Any:
        return ids_of(path, self.model.epoch, self.model.lives)

    def held(self) -> dict[str, int]:
        """Blocks of each prompt that are found now, and must be found again if the cache says that they are on NVMe.

        A crash may leave a claim of a slot that was given to another block: found until somebody reads it, and then a
        miss. So of what was recovered only those count that were acknowledged before, or read since.
        """
        assert self.cache is not None
        stored = {each for path in self.model.stored for each in prefixes(path)}
        found = {}
        for path in self.paths:
            blocks = self.cache.lookup(tokens_of(path)).blocks if path in stored else 0
            if self.trusted is not None and blocks:
                strange = [i for i, each in enumerate(self.ids(path)[:blocks].tolist()) if each not in self.trusted]
                blocks = min([blocks, *strange])
            if blocks:
                found[path] = blocks
        return found

    # -- operations -----------------------------------------------------------------------------------------------

    def do_open(self, shape: dict[str, Any]) -> dict[str, Any]:
        self.cache = open_cache(self.place, Shape(**shape), **self.options)
        return {
            "epoch": self.cache.epoch.hex(),
            "recovered": self.cache.stats().totals["recovered"],
            "disk_nbytes": disk_nbytes(Path(self.place)),
        }

    def do_close(self) -> dict[str, int] | None:
        assert self.cache is not None
        if not self.model.shape.roomy:
            self.cache.flush(WAIT_S, to="nvme")  # or close would, and make room for it
        held = self.held()
        return held if self.cache.close(WAIT_S) else None

    def do_arm(self, point: str, nth: int = 1) -> None:
        self.traps[point].arm(nth)

    def do_die(self) -> None:
        die()

    def do_store(self, path: str) -> int:
        assert self.cache is not None
        tokens, ids, taken = tokens_of(path), self.ids(path), 0
        rows = bytes_of(ids)
        for _ in range(20 if self.model.shape.roomy else 1):
            there = self.cache.lookup(tokens).blocks
            ticket = self.cache.store(tokens, rows)
            assert ticket.wait(WAIT_S)
            taken = ticket.accepted + ticket.present
            if ticket.present == there:
                self._trust(ids[there:taken])
            if taken == len(rows):
                break
            self.cache.flush(WAIT_S)
        assert taken == len(rows) or not self.model.shape.roomy, f"{path}: only {taken} of {len(rows)} blocks taken"
        return taken

    def do_load(self, path: str) -> int:
        assert self.cache is not None
        with self.cache.load(self.cache.lookup(tokens_of(path))).result(WAIT_S) as loaded:
            if loaded.block_count:
                assert right(self.ids(path)[: loaded.block_count], np.asarray(loaded.blocks)).all()
            self._trust(self.ids(path)[: loaded.block_count])
            return loaded.block_count

    def do_out(self, path: str) -> int:
        assert self.cache is not None
        out = np.zeros((blocks_of(path), BLOCK), dtype=np.uint8)
        loaded = self.cache.load(self.cache.lookup(tokens_of(path)), out=out).result(WAIT_S)
        assert right(self.ids(path)[: loaded.block_count], out[: loaded.block_count]).all()
        self._trust(self.ids(path)[: loaded.block_count])
        return loaded.block_count

    def do_flush(self) -> dict[str, int] | None:
        assert self.cache is not None
        done = self.cache.flush(WAIT_S, to="nvme")
        assert done or not self.model.shape.roomy, "a flush gave up although there is room"
        return self.held() if done else None

    def do_wait(self) -> bool:
        assert self.cache is not None
        return self.cache.flush(WAIT_S)

    def until_idle(self) -> None:
        """Wait for all copies, also those that follow from others."""
        assert self.cache is not None
        while any(tier.jobs for tier in self.cache.stats().tiers):
            self.cache.flush(WAIT_S)

    def do_warm(self, blocks: int) -> int:
        """Without any flush: wait until the catalog holds so many blocks. Only where no block has left NVMe."""
        assert self.cache is not None
        until = time.monotonic() + WAIT_S
        while (claimed := self.claimed()) < blocks:
            assert time.monotonic() < until, f"{claimed} of {blocks} blocks are claimed"
            time.sleep(0.005)
        return claimed

    def claimed(self) -> int:
        """At least so many blocks were claimed since the cache was opened."""
        assert self.cache is not None
        stats = self.cache.stats()
        assert stats.directory is not None
        return int(stats.tiers[-1].written - stats.directory["pending_slots"])

    def do_sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def do_invalidate(self, path: str) -> int:
        assert self.cache is not None
        return self.cache.invalidate(tokens_of(path))

    def do_bump(self, tag: str) -> str:
        assert self.cache is not None
        return self.cache.bump_epoch(tag).hex()

    def do_release(self, path: str) -> int:
        assert self.cache is not None
        return self.cache.release(tokens_of(path))

    # -- without a cache ------------------------------------------------------------------------------------------

    def do_spoil(self, what: str) -> None:
        """Damage the closed store: its "catalog", or some blocks of its "payload"."""
        if what == "catalog":
            os.truncate(Path(self.place) / "catalog" / "data.mdb", 100)
        else:
            with (Path(self.place) / "slots-00.dat").open("r+b") as file:
                for slot in range(5, self.model.shape.nvme, 4):
                    os.pwrite(file.fileno(), b"spoiled", slot * STRIDE + 100)

    def do_fix(self) -> int:
        return check_directory(self.place, fix=True, scrub=True).fixed


def copy_inside() -> None:
    """In this process: copy catalogs after an unclean stop here, not in a fresh interpreter, which takes longer."""

    def checked_copy(source: Path, target: Path, limit_s: float = 0.0) -> dict[str, int]:
        try:
            return catalog_copy.copy(source, target)
        except (lmdb.Error, OSError) as e:
            raise DamagedCatalogError(str(e)) from e

    catalog_check.checked_copy = checked_copy
    scrub.checked_copy = checked_copy  # type: ignore[attr-defined]


def run(report: Report, argument: dict[str, Any]) -> None:
    """Run `ops` in the directory `place`, reporting each result. `results` are those of earlier lives."""
    if argument["inside"]:
        copy_inside()
    earlier = argument["results"]
    driver = Driver(argument["place"], paths_of(argument["ops"]))
    driver.model = Model.of(argument["ops"][: len(earlier)], earlier)
    driver.traps = {op[1]: Trap(op[1]) for op in argument["ops"][len(earlier) :] if op[0] == "arm"}
    for op in argument["ops"][len(earlier) :]:
        report(driver.step(op))


def paths_of(ops: list[Op]) -> list[str]:
    named = {part for op in ops for path in op[1:2] if isinstance(path, str) for part in prefixes(path)}
    return sorted(named & set(UNIVERSE)) if named else []


# -- afterwards ---------------------------------------------------------------------------------------------------


def verify(report: Report, argument: dict[str, Any]) -> None:
    """Open what a run left in `place`, and report what is wrong with it (`problems`), and a few numbers."""
    if argument["inside"]:
        copy_inside()
    ops, results = argument["ops"], argument["results"]
    model = Model.of(ops, results)
    report(examine(argument["place"], model, paths_of(ops), go_on=True, damaged=model.spoiled))


def verify_damaged(report: Report, argument: dict[str, Any]) -> None:
    """Open a directory that somebody damaged. Nothing in it was promised; but what comes of it must be right.

    As another user where "uid" is there. A ConfigError is reported as "refused".
    """
    if "uid" in argument:
        copy_inside()  # that user may not run this interpreter
        os.setresuid(argument["uid"], argument["uid"], argument["uid"])
    model = Model(Shape(**argument["shape"]), reused=True)
    try:
        report(examine(argument["place"], model, UNIVERSE, go_on=True, damaged=True))
    except ConfigError as e:
        report({"problems": [], "refused": str(e)})


def examine(
    place: str, model: Model, paths: list[str], go_on: bool, *, damaged: bool = False, **options: Any
) -> dict[str, Any]:
    """See `verify`. With `go_on` the cache is then used, and closed in order. `damaged`: the start may be cold."""
    begun = time.monotonic()
    cache = open_cache(place, replace(model.shape, dram=8), **options)
    opened_s = time.monotonic() - begun
    problems = [f"check: {each}" for each in cache.check()]
    facts = cache.stats().directory
    assert facts is not None
    recovered, forgotten = (cache.stats().totals[name] for name in ("recovered", "recovered_forgotten"))
    epoch = cache.epoch.hex()
    cold, counters = facts["cold_reason"], facts["counters"]
    if not damaged:
        problems += _epoch_problems(model, epoch, cold, recovered)
        if set(counters) - {"unclean_opens"}:
            problems.append(f"counted: {counters}")
        if forgotten and not model.shrinking:
            problems.append(f"{forgotten} claims hung in the air")
        problems += _directory_problems(Path(place), model.shape)
    if recovered < model.claimed:
        problems.append(f"{model.claimed} blocks were claimed, {recovered} recovered")
    lost, served = _compare(cache, model, paths, epoch, problems)
    if lost and not model.reused:
        problems.append(f"{lost} blocks were offered and did not arrive, though no slot was ever used twice")
    problems += [f"check: {each}" for each in cache.check()]
    if go_on:
        problems += _go_on(cache, model.shape, epoch)
    else:
        cache.switch = "stores-off"
        cache.close(1.0)
    return {
        "problems": problems,
        "recovered": recovered,
        "served": served,
        "lost": lost,
        "cold": cold,
        "counters": counters,
        "forgotten": forgotten,
        "open_s": opened_s,
        "acked": sum(model.acked.values()),
    }


def _epoch_problems(model: Model, epoch: str, cold: str, recovered: int) -> list[str]:
    known = [each for each in (model.epoch, model.doubtful_epoch) if each]
    if model.doubtful_epoch and not recovered:
        return []  # cold, and so were starts before it that did not get far
    if cold not in ("", "new") or (cold == "new" and model.epoch):
        return [f"the start was cold: {cold!r}"]
    return [f"epoch {epoch}, and not of {known}"] if model.epoch and epoch not in known else []


def longest(paths: list[str]) -> list[str]:
    """Those that are no beginning of another: with them all blocks are loaded."""
    return [path for path in paths if not any(is_under(other, path) for other in paths if other != path)]


def _compare(cache: TieredKVCache, model: Model, paths: list[str], epoch: str, problems: list[str]) -> tuple[int, int]:
    """Load whatever is offered; blocks offered that did not arrive, and blocks that did."""
    lost = served = 0
    for path, blocks in model.acked.items():
        found = cache.lookup(tokens_of(path)).by_tier["nvme"]
        if found < blocks:
            problems.append(f"{path}: {blocks} blocks acknowledged, {found} on NVMe")
    lives = model.lives if epoch == model.epoch else {}
    arrived_of: dict[str, int] = {}
    for path in longest(paths):
        ids = ids_of(path, epoch, lives)
        match = cache.lookup(tokens_of(path))
        out = np.zeros((len(ids), BLOCK), dtype=np.uint8)
        loaded = cache.load(match, out=out).result(WAIT_S)
        arrived = loaded.block_count
        good = right(ids[:arrived], out[:arrived])
        if not good.all():
            problems.append(f"{path}: wrong bytes in blocks {np.flatnonzero(~good).tolist()} of {arrived}")
        for each in prefixes(path):
            arrived_of[each] = max(arrived, arrived_of.get(each, 0))
        lost += match.blocks - arrived
        served += arrived
    for path, blocks in model.acked.items():
        if arrived_of.get(path, 0) < blocks:
            problems.append(f"{path}: {blocks} blocks acknowledged, {arrived_of.get(path, 0)} loaded")
    return lost, served


def _directory_problems(place: Path, shape: Shape) -> list[str]:
    names = {entry.name for entry in place.iterdir()}
    left = {name for name in names - OURS if not name.startswith("slots-")}
    used = disk_nbytes(place)
    found = [f"left over: {sorted(left)}"] if left else []
    if used > shape.disk_nbytes:
        found.append(f"{used} bytes on disk, {shape.disk_nbytes} allowed")
    return found


def disk_nbytes(place: Path) -> int:
    return sum(entry.lstat().st_blocks * 512 for entry in [place, *place.rglob("*")])


def _go_on(cache: TieredKVCache, shape: Shape, epoch: str) -> list[str]:
    """The cache is as good as any: it stores, flushes and closes."""
    path = "99.1"  # in no run
    ids, problems = ids_of(path, epoch, {}), []
    for _ in range(50):
        ticket = cache.store(tokens_of(path), bytes_of(ids))
        ticket.wait(WAIT_S)
        if cache.lookup(tokens_of(path)).blocks == len(ids):
            break
        cache.flush(WAIT_S)
    else:
        problems.append(f"afterwards: {ticket}, {cache.lookup(tokens_of(path))}")
    if not cache.flush(WAIT_S, to="nvme") and shape.roomy:
        problems.append("afterwards: a flush gave up")
    problems += [f"afterwards: check: {each}" for each in cache.check()]
    if not cache.close(WAIT_S) and shape.roomy:
        problems.append("afterwards: not closed in order")
    return problems
