"""What is left after an orderly end, after SIGKILL in the middle of a store, and after the files were damaged.

Each contestant runs in a process of its own, so that one that dies of damaged files is counted and not fatal.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from typing import Any

from child import Child
from contestants import Contestant
from measure import RESTART_CASES, Answer, Race

__all__ = ["restarts"]

COUNTS = ("hits", "right", "wrong", "missed")


def restarts(race: Race) -> None:
    """All three for every contestant that has a disk and an index."""
    for contestant in race.contestants:
        if "restart" not in contestant.groups:
            continue
        for case, run in zip(RESTART_CASES, (_clean, _killed, _flipped, _torn), strict=True):
            race.say(f"restart: {contestant.name}, {case}")
            with tempfile.TemporaryDirectory(prefix="tiercache-peers-", dir=race.scratch) as directory:
                record: Answer = {"group": "restart", "case": case, "contestant": contestant.name}
                try:
                    record |= {"status": "ok", **run(race, contestant, directory)}
                except _FailedError as error:
                    record |= {"status": "failed", "why": str(error)}
                race.records.append(record)


class _FailedError(Exception):
    """An answer that says so."""


def _clean(race: Race, contestant: Contestant, directory: str) -> Answer:
    """Store, close, end; a new process looks for all of it."""
    seeds = range(1, race.plan.prompts + 1)
    child = _open(race, contestant, directory)[0]
    stored = sum(_ask(child, "restart_store", seed=seed)["stored"] for seed in seeds)
    _ask(child, "restart_close")
    child.end()
    child, opened = _open(race, contestant, directory)
    found = _found(child, seeds)
    child.end()
    return {"stored": stored, **found, "open_s": opened["s"], "files_found": opened.get("files_found")}


def _killed(race: Race, contestant: Contestant, directory: str) -> Answer:
    """SIGKILL during a store, several times; each time a new process looks for all that was ever stored."""
    n = race.plan.restart[0]
    seeds, acknowledged, seconds = [1], 0, 0.0
    child = _open(race, contestant, directory)[0]
    begin = time.monotonic()
    first = _ask(child, "restart_store", seed=1)
    seconds = time.monotonic() - begin
    acknowledged += first["stored"] if first["acknowledged"] else 0
    total: Counter[str] = Counter()
    opened: Answer = {}
    for part in race.plan.kills:
        seeds.append(seeds[-1] + 1)
        child.tell("restart_store", seed=seeds[-1])
        time.sleep(part * seconds)
        child.kill()
        child, opened = _open(race, contestant, directory)
        total = Counter(_found(child, seeds))
    child.end()
    offered = n * len(seeds)
    return {
        "stored": offered,
        "acknowledged": acknowledged,
        "kills": len(race.plan.kills),
        **{key: total[key] for key in COUNTS},
        "open_s": opened["s"],
        "files_found": opened.get("files_found"),
    }


def _flipped(race: Race, contestant: Contestant, directory: str) -> Answer:
    """One bit in the middle of each of the last blocks of a prompt."""
    return _damaged(race, contestant, directory, _flip_bit)


def _torn(race: Race, contestant: Contestant, directory: str) -> Answer:
    """The second half of each of the last blocks never reached the disk: zeros."""
    return _damaged(race, contestant, directory, _zero_half)


def _damaged(race: Race, contestant: Contestant, directory: str, damage: Any) -> Answer:
    nbytes = race.plan.restart[1]
    child = _open(race, contestant, directory)[0]
    stored = _ask(child, "restart_store", seed=1)["stored"]
    state = _ask(child, "restart_forget_memory")
    places = _ask(child, "restart_places", seed=1)["places"][-race.plan.damaged :]
    for path, offset in places:
        damage(path, offset, nbytes)
    found = _found(child, [1])
    child.end()
    return {"stored": stored, "damaged": len(places), **found, "same_process": state.get("same_process", False)}


def _flip_bit(path: str, offset: int, nbytes: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        where = offset + nbytes // 2
        os.pwrite(fd, bytes([os.pread(fd, 1, where)[0] ^ 1]), where)
        os.fsync(fd)
    finally:
        os.close(fd)


def _zero_half(path: str, offset: int, nbytes: int) -> None:
    fd = os.open(path, os.O_RDWR)
    try:
        os.pwrite(fd, bytes(nbytes // 2), offset + nbytes // 2)
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(race: Race, contestant: Contestant, directory: str) -> tuple[Child, Answer]:
    n, nbytes = race.plan.restart
    child = race.start(contestant)
    return child, _ask(child, "restart_open", directory=directory, n=n, block_nbytes=nbytes)


def _found(child: Child, seeds: Any) -> dict[str, int]:
    total: Counter[str] = Counter()
    for seed in seeds:
        answer = _ask(child, "restart_read", seed=seed)
        total.update({key: answer[key] for key in COUNTS})
    return {key: total[key] for key in COUNTS}


def _ask(child: Child, op: str, **arguments: Any) -> Answer:
    answer = child.ask(op, **arguments)
    if "failed" in answer:
        child.kill()
        raise _FailedError(f"{op}: {answer['failed']}")
    return answer
