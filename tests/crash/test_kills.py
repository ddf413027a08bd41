"""kill -9 at named points and at random moments: what a next process finds is right, and all that was promised.

After each kill another process opens the directory: `check()` finds nothing, whatever a lookup offers loads to exactly
its own bytes or is a miss, all that a flush acknowledged is on NVMe, what was invalidated or belongs to an older epoch
is gone, nothing is left over, and the cache goes on working.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from crash_scripts import disk_nbytes, longest, paths_of
from crash_world import UNIVERSE, Model, Op, Shape, blocks_of, random_ops, random_shape, total_blocks

from tiercache.testing.crash import POINTS, Zygote

OPEN: Op = ["open", Shape().as_json()]
TIGHT: Op = ["open", Shape(dram=12, nvme=16, write_after=0.0, roomy=False).as_json()]
AGED: Op = ["open", Shape(write_after=0.005).as_json()]
LARGE: Op = ["open", Shape(nvme=224).as_json()]
SMALL: Op = ["open", Shape(nvme=24, roomy=False).as_json()]
DIE: Op = ["die"]
FLUSHED: list[Op] = [["store", "0.0.0"], ["store", "1.0.1"], ["flush"]]
MORE: list[Op] = [["store", "0.1.0"], ["store", "2.0.0"], ["store", "2.0.1"]]
MANY: list[Op] = [["store", path] for path in UNIVERSE if path.count(".") == 2]

Case = tuple[list[list[Op]], str]
"""Operations of each life, and the point at which the last one dies ("~": in the slow runs only, "*2": second time)."""


def cases(before: list[Op], then: list[Op], points: str, earlier: list[list[Op]] | None = None) -> list[Case]:
    return [([*(earlier or []), [*before, arm(point), *then]], point) for point in points.split()]


def name_of(point: str) -> str:
    return point.removeprefix("~").partition("*")[0]


def arm(point: str) -> Op:
    return ["arm", name_of(point), int(point.partition("*")[2] or 1)]


KILLS: dict[str, list[Case]] = {
    "store": cases([OPEN, *FLUSHED], MORE, "submit ~submit*2 dram-write-before ~dram-write-after*2"),
    "load": cases(
        [OPEN, *FLUSHED, ["close"], OPEN],
        [["out", "0.0.0"], ["load", "1.0.1"]],
        "~nvme-read-before nvme-read-after ~dram-write-before dram-write-after*2",
    ),
    "demote": cases(
        [OPEN, *FLUSHED, *MORE],
        [["flush"]],
        "~drain starting ~nvme-write-before nvme-write-torn ~nvme-write-torn*2 nvme-write-after written-before "
        "~written-after",
    ),
    "commit": cases(
        [OPEN, *FLUSHED, *MORE],
        [["flush"]],
        "~commit-begin sync-before sync-after transaction-before transaction-inside transaction-after ~settled "
        "~commit-end",
    ),
    "flush": cases([OPEN, *FLUSHED, *MORE], [["flush"]], "~mover-sync-before mover-sync-after"),
    "evict": cases(
        [TIGHT, *MANY[:3], ["flush"]],
        [*MANY[:8], ["flush"], *MANY[8:16], ["flush"], *MANY, ["flush"], *MANY],
        "forget-before ~forget-after forget-after*3 ~starting*4 nvme-write-torn*4 ~written-after*5 sync-after*2 "
        "~transaction-before*2 transaction-inside*2 transaction-after*2",
    ),
    "write_after": cases(
        [AGED, ["store", "0.0.0"], ["warm", 3]],
        [*MORE, ["sleep", 1.0]],
        "delay-over ~nvme-write-torn written-after ~sync-before sync-after ~transaction-before ~transaction-inside "
        "transaction-after ~commit-end",
    ),
    "invalidate": cases(
        [OPEN, *FLUSHED, *MORE, ["flush"]],
        [["invalidate", "2.0"]],
        "invalidated ~forget-before ~forget-after transaction-before transaction-inside transaction-after "
        "mover-sync-after",
    ),
    "bump_epoch": cases(
        [OPEN, *FLUSHED],
        [["bump", "weights-2"]],
        "~new-epoch-planned new-epoch-told epoch-file-before ~file-replaced epoch-file-after ~transaction-before "
        "transaction-inside transaction-after mover-sync-after",
    ),
    "close": cases(
        [OPEN, *FLUSHED, *MORE],
        [["close"]],
        "~nvme-write-torn transaction-inside mover-close-before ~last-commit-before catalog-close-before marker-before "
        "marker-after ~catalog-close-after ~unlock-before",
    ),
    "first open": cases(
        [],
        [OPEN],
        "locked ~store-id-before ~file-replaced file-replaced*2 ~store-id-after transaction-after ~fallocate-before "
        "fresh-install-before fresh-install-after ~reserved ~reserved*2 probe ~fallocate-after*2 files-open",
    ),
    "reopen": cases(
        [],
        [OPEN],
        "~locked ~swept copy-before copy-running ~transaction-after*2 copy-written copy-after ~install-before "
        "marker-dropped install-after start-marker-after ~reserved ~probe ~files-open",
        earlier=[[OPEN, *FLUSHED, *MORE, DIE]],
    ),
    "reopen after a close": cases(
        [OPEN, *FLUSHED, ["close"]], [OPEN], "open-marker-dropped ~reserved ~probe files-open"
    ),
    "grow": cases(
        [OPEN, *FLUSHED, ["close"]],
        [LARGE, *MORE, ["flush"]],
        "reserved ~fallocate-before*2 fallocate-after*2 ~files-open nvme-write-torn ~transaction-inside "
        "transaction-after",
    ),
    "shrink": cases(
        [OPEN, *MANY[:8], *FLUSHED, ["close"], LARGE, *MANY[8:], ["flush"], ["close"]],
        [SMALL, ["store", "0.0.0"]],
        "transaction-before transaction-after moved ~transaction-before*2 transaction-inside*2 shrunk truncate-before "
        "truncate-after unlink-after ~files-open",
    ),
    "reopen after damage": cases(
        [["spoil", "catalog"]],
        [OPEN],
        "set-aside-before set-aside-after ~fresh-install-before ~fresh-install-after ~files-open",
        earlier=[[OPEN, *FLUSHED, DIE]],
    ),
    "repair": cases(
        [["spoil", "payload"]],
        [["fix"]],
        "~locked payload-read ~copy-before ~marker-dropped ~open-marker-dropped transaction-before transaction-inside "
        "transaction-after ~marker-after",
        earlier=[[OPEN, *FLUSHED, *MORE, ["flush"], DIE]],
    ),
}
COLD = {"bump_epoch", "evict", "first open", "reopen after damage"}
"""Phases after which nothing may be there."""
INSIDE = {"copy-written"}
"""Points of the copy of a catalog, which in the other runs is made by a process of its own."""
OUTSIDE = {"copy-running"}


def live(
    zygote: Zygote, tally: Counter[str], place: Path, lives: list[list[Op]], inside: bool
) -> tuple[list[Op], list[Any]]:
    """Run one life after the other in `place`, each until it kills itself; operations and results of all of them."""
    ops: list[Op] = []
    results: list[Any] = []
    for life in lives:
        ops = ops[: len(results)] + life
        argument = {"place": str(place), "ops": ops, "results": results, "inside": inside}
        child = zygote.start("crash_scripts:run", argument)
        assert child.wait() == -signal.SIGKILL, child.error or "it survived"
        tally["afterwards" if life[-1] == DIE else next(op[1] for op in life if op[0] == "arm")] += 1
        results = results + child.reports
    return ops, results


def verify(zygote: Zygote, place: Path, ops: list[Op], results: list[Any], inside: bool) -> dict[str, Any]:
    argument = {"place": str(place), "ops": ops, "results": results, "inside": inside}
    child = zygote.start("crash_scripts:verify", argument)
    assert child.wait() == 0, child.error or f"status {child.status}\n{zygote.log()}"
    (facts,) = child.reports
    assert facts["problems"] == [], zygote.log()[-2000:]
    return dict(facts)


def test_the_children_come_from_a_process_without_threads(zygote: Zygote) -> None:
    threads = [int(task.name) for task in Path(f"/proc/{zygote.pid}/task").iterdir()]
    assert threads == [zygote.pid]


NUMBERED = [
    pytest.param(
        phase,
        case,
        name_of(case[1]) in INSIDE or (number % 5 != 0 and name_of(case[1]) not in OUTSIDE),
        id=f"{phase}-{case[1].removeprefix('~')}".replace(" ", "-"),
        marks=[pytest.mark.slow] if case[1].startswith("~") else [],
    )
    for number, (phase, case) in enumerate((phase, case) for phase, list_ in KILLS.items() for case in list_)
]


@pytest.mark.parametrize(("phase", "case", "inside"), NUMBERED)
def test_kill_at_a_point(
    zygote: Zygote, kill_tally: Counter[str], tmp_path: Path, phase: str, case: Case, inside: bool
) -> None:
    ops, results = live(zygote, kill_tally, tmp_path / "kv", case[0], inside)
    facts = verify(zygote, tmp_path / "kv", ops, results, inside)
    assert facts["served"] > 0 or phase in COLD


@pytest.mark.parametrize(
    "ops",
    [
        pytest.param([AGED, *MORE, ["warm", 8], DIE], id="no flush at all"),
        pytest.param([AGED, *MORE, ["warm", 8], ["load", "2.0.0"], ["store", "3.0.0"], DIE], id="no flush, then more"),
        pytest.param([OPEN, *FLUSHED, *MORE, ["flush"], DIE], id="flushed"),
        pytest.param([OPEN, *FLUSHED, ["invalidate", "0.0"], DIE], id="invalidated"),
        pytest.param([OPEN, *FLUSHED, ["invalidate", "0.0"], ["store", "0.0.0"], DIE], id="invalidated, stored anew"),
        pytest.param(
            [OPEN, *FLUSHED, ["invalidate", "0"], ["store", "0.0.0"], ["flush"], DIE], id="invalidated, flushed anew"
        ),
        pytest.param([OPEN, *FLUSHED, ["bump", "weights-2"], DIE], id="new epoch"),
        pytest.param([OPEN, *FLUSHED, ["bump", "weights-2"], *FLUSHED, DIE], id="new epoch, flushed anew"),
        pytest.param([OPEN, *FLUSHED, *MORE, ["close"], DIE], id="closed"),
    ],
)
def test_kill_after_the_promise(zygote: Zygote, kill_tally: Counter[str], tmp_path: Path, ops: list[Op]) -> None:
    ops, results = live(zygote, kill_tally, tmp_path / "kv", [ops], inside=True)
    facts = verify(zygote, tmp_path / "kv", ops, results, inside=True)
    model = Model.of(ops, results)
    assert facts["recovered"] >= max(model.claimed, *model.acked.values(), 0)
    assert facts["served"] > 0 or ops[-2][0] == "bump"


def test_every_point_is_named_in_a_case() -> None:
    """And a case whose process does not die at its point is red."""
    assert {name_of(point) for list_ in KILLS.values() for _, point in list_} == set(POINTS)


UNUSUAL = {point for phase in ("reopen", "reopen after damage", "repair", "shrink") for _, point in KILLS[phase]}
USUAL = sorted(set(POINTS) - {name_of(point) for point in UNUSUAL} | {"transaction-before", "transaction-inside"})
"""Points that most lives pass."""


def kill_at_random(zygote: Zygote, tally: Counter[str], place: Path, seed: int) -> None:
    """Random operations, until the process dies at a point, or (one in five) is killed from outside at any moment."""
    rng = random.Random(seed)
    ops = random_ops(rng, random_shape(rng), rng.randrange(10, 40))
    point = rng.choice(USUAL) if seed % 5 else ""
    if point:
        at = 0 if rng.random() < 0.3 else rng.randrange(len(ops))
        ops.insert(at, ["arm", point, rng.choice([1, 1, 1, 2, 4])])
        opening = [op for op in ops if op[0] == "open"][-1]
        ops += [["store", "0.0.0"], ["flush"], ["load", "0.0.0"], ["out", "1"], ["invalidate", "0.0"], ["bump", "last"]]
        ops += [["close"], opening]
    ops.append(DIE)
    inside = rng.random() < 0.8
    child = zygote.start("crash_scripts:run", {"place": str(place), "ops": ops, "results": [], "inside": inside})
    if not point:
        wanted, until = rng.randrange(len(ops)), time.monotonic() + 30
        while len(child.reports) < wanted and child.read(until):
            pass
        time.sleep(rng.random() * rng.choice([0.001, 0.01, 0.05]))
        child.kill()
    assert child.wait() == -signal.SIGKILL, child.error
    tally["outside" if not point else "afterwards" if len(child.reports) == len(ops) - 1 else point] += 1
    verify(zygote, place, ops, child.reports, inside)


@pytest.mark.parametrize("seed", range(12))
def test_kill_at_random(zygote: Zygote, kill_tally: Counter[str], tmp_path: Path, seed: int) -> None:
    kill_at_random(zygote, kill_tally, tmp_path / "kv", seed)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 500, 20))
def test_kill_at_random_often(zygote: Zygote, kill_tally: Counter[str], tmp_path: Path, first: int) -> None:
    for seed in range(first, first + 20):
        kill_at_random(zygote, kill_tally, tmp_path / str(seed), seed)


def test_five_lives_within_the_limit(zygote: Zygote, kill_tally: Counter[str], tmp_path: Path) -> None:
    """Killed, or closed, five times: the directory does not grow past its limit, and all that was stored is found."""
    parts = [MANY[i : i + 5] for i in range(0, 25, 5)]
    ends: list[list[Op]] = [[["flush"], DIE], [["close"], DIE]]
    lives = [[OPEN, *part, *end] for part, end in zip(parts, itertools.cycle(ends))]
    ops, results = live(zygote, kill_tally, tmp_path / "kv", lives, inside=False)
    opened = [result for op, result in zip(ops, results, strict=False) if op[0] == "open"]
    stored = [path for life in lives for kind, *path in life if kind == "store"]
    assert len(opened) == 5
    for i, result in enumerate(opened):
        assert result["recovered"] == total_blocks([path for (path,) in stored[: 5 * i]])
        assert result["disk_nbytes"] <= Shape().disk_nbytes
    assert disk_nbytes(tmp_path / "kv") <= Shape().disk_nbytes
    facts = verify(zygote, tmp_path / "kv", ops, results, inside=False)
    assert facts["recovered"] == total_blocks([path for (path,) in stored])
    assert facts["served"] == sum(blocks_of(path) for path in longest(paths_of(ops)))
