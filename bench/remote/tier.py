"""`python -m bench.remote.tier`: MooncakeTier against Mooncake's raw client, in interleaved pairs of one run.

Both have a client of their own in this process, the same master, and the same owner in another process. Each pair runs
raw and tier in alternating order; the figure is the median of the ratios. Reads: GB/s of the tier, of the raw client's
(higher is better). Finds: time of the tier, of the raw client's (lower is better). Rows are registered on both sides.

`make bench-remote` runs it in a private network. With `--write` the figures of several runs (`--runs`) become a results
file, and with `--report` the newest of these becomes docs/remote-benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bench.machine import commit, facts
from bench.pairs import Spread
from bench.remote.report import RESULTS, write
from tiercache.remote.frame import frame_nbytes, seal, verified
from tiercache.remote.mooncake import MooncakeTier
from tiercache.remote.mooncake_options import MooncakeOptions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "remote_real"))
from mooncake_folder import VERSION as MOONCAKE
from rig_mooncake import MIB, Rig, private_network

READS = ((128, 256 * 1024), (32, 2 * MIB))
"""Values, and bytes of the block in each."""
FIND_KEYS = 8192
LEAST_READ, MOST_FIND = 0.9, 1.3
DEADLINE_S = 10.0


@dataclass(frozen=True)
class Measured:
    """One row: `ratio` is tier to raw, of speeds (higher is better) or of times."""

    what: str
    measure: str
    ratio: Spread
    raw_ms: Spread
    tier_ms: Spread
    target: float | None
    reached: bool | None


def pairs(n: int, raw: Callable[[], Any], tier: Callable[[], Any]) -> tuple[list[float], list[float]]:
    """Seconds of each, in turn; the first pair is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    gc.collect()
    for turn in range(n + 1):
        for which in (0, 1) if turn % 2 else (1, 0):
            began = time.perf_counter()
            (raw, tier)[which]()
            seconds = time.perf_counter() - began
            if turn:
                times[which].append(seconds)
    return times


def row(what: str, times: tuple[list[float], list[float]], target: float | None, *, faster: bool) -> Measured:
    """`faster`: the ratio is of speeds, else of times."""
    raw, tier = times
    ratio = Spread.of([a / b if faster else b / a for a, b in zip(raw, tier, strict=True)])
    measure, ms = "speed" if faster else "time", [Spread.of([each * 1e3 for each in times]) for times in (raw, tier)]
    return Measured(what, measure, ratio, *ms, target, reaches(measure, ratio.median, target))


def reaches(measure: str, ratio: float, target: float | None) -> bool | None:
    """Does a figure meet its target? None where there is none."""
    return None if target is None else ratio >= target if measure == "speed" else ratio <= target


def reads(store: Any, tier: MooncakeTier, n_pairs: int) -> list[Measured]:
    """Batch gets, and gets with verification."""
    found = []
    for n, nbytes in READS:
        width = frame_nbytes(nbytes)
        keys = [hashlib.sha256(b"%d-%d" % (nbytes, i)).digest() for i in range(n)]
        idents = np.arange(n, dtype=np.uint64)
        blocks = np.random.default_rng(n).integers(0, 256, (n, nbytes), dtype=np.uint8)
        assert tier.put(keys, seal(blocks, nbytes, idents), DEADLINE_S).all()
        names = ["tcblock1/" + key.hex() for key in keys]
        memory = np.zeros((2, n, width), dtype=np.uint8)
        mine, its = memory
        tier.register(mine)
        assert store.register_buffer(its.ctypes.data, its.nbytes) == 0
        addresses = [its.ctypes.data + i * width for i in range(n)]

        def raw(names: list[str] = names, addresses: list[int] = addresses, width: int = width) -> None:
            codes = store.batch_get_into(names, addresses, [width] * len(names))
            assert all(code == width for code in codes)

        def get(keys: list[bytes] = keys, rows: Any = mine) -> None:
            assert tier.get(keys, rows, DEADLINE_S).all()

        def get_and_verify(
            keys: list[bytes] = keys, rows: Any = mine, nbytes: int = nbytes, idents: Any = idents
        ) -> None:
            assert tier.get(keys, rows, DEADLINE_S).all()
            assert verified(rows, nbytes, idents).all()

        name = f"get of {n} x {nbytes // 1024} KiB"
        found.append(row(name, pairs(n_pairs, raw, get), LEAST_READ, faster=True))
        found.append(row(f"{name}, verified", pairs(n_pairs, raw, get_and_verify), None, faster=True))
        assert (its[:, :nbytes] == blocks).all() and (mine[:, :nbytes] == blocks).all()
        tier.unregister(mine)
        store.unregister_buffer(its.ctypes.data)
    return found


def finds(store: Any, tier: MooncakeTier, n_pairs: int) -> list[Measured]:
    """Of keys that are there, and of keys that nobody has put, other ones in each pair."""
    there = [hashlib.sha256(b"there %d" % i).digest() for i in range(FIND_KEYS)]
    known = ["tcblock1/" + key.hex() for key in there]
    assert tier.put(there, np.ones((FIND_KEYS, 64), dtype=np.uint8), DEADLINE_S).all()
    present = pairs(n_pairs, lambda: store.batch_is_exist(known), lambda: tier.find(there, DEADLINE_S))
    assert tier.find(there, DEADLINE_S).all()
    turns = iter(range(1 << 20))

    def fresh() -> list[bytes]:
        turn = next(turns)
        return [hashlib.sha256(b"%d/%d" % (turn, i)).digest() for i in range(FIND_KEYS)]

    batches = [fresh() for _ in range(n_pairs + 1)]
    names = [["tcblock1/" + key.hex() for key in batch] for batch in batches]
    each, named = iter(batches), iter(names)

    def raw() -> None:
        assert not any(store.batch_is_exist(next(named)))

    def find() -> None:
        assert not tier.find(next(each), DEADLINE_S).any()

    return [
        row(f"find of {FIND_KEYS} keys, there", present, MOST_FIND, faster=False),
        row(f"find of {FIND_KEYS} keys, missing", pairs(n_pairs, raw, find), MOST_FIND, faster=False),
    ]


def measure(n_pairs: int) -> tuple[list[Measured], str]:
    """All rows, and what carried the bytes."""
    from mooncake.store import MooncakeDistributedStore

    with tempfile.TemporaryDirectory() as folder, Rig(Path(folder)) as rig:
        master = rig.master("--default_kv_lease_ttl=5000")
        rig.owner(master, 512 * MIB)
        tier = MooncakeTier(MooncakeOptions.from_url(f"mooncake://{master.address}"))
        tier.find([bytes(32)], DEADLINE_S)
        store = MooncakeDistributedStore()
        code = store.setup("127.0.0.1", "P2PHANDSHAKE", 0, tier.options.buffer_nbytes, "tcp", "", master.address)
        assert code == 0, code
        found = reads(store, tier, n_pairs) + finds(store, tier, n_pairs)
        transport = tier.transport()
        assert tier.counts["in_place"] >= sum(n for n, _ in READS) * n_pairs
        tier.close()
        store.close()
    return found, transport


def several(runs: Sequence[Sequence[Measured]]) -> list[dict[str, Any]]:
    """Rows of several runs: the median of their medians, with the lowest and the highest."""
    rows = []
    for same in zip(*runs, strict=True):
        ratio, first = Spread.of([each.ratio.median for each in same]), same[0]
        rows.append(
            {
                "what": first.what,
                "measure": first.measure,
                "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
                "raw_ms": statistics.median(each.raw_ms.median for each in same),
                "tier_ms": statistics.median(each.tier_ms.median for each in same),
                "target": first.target,
                "reached": reaches(first.measure, ratio.median, first.target),
            }
        )
    return rows


def results_of(runs: int, n_pairs: int) -> dict[str, Any]:
    """What a results file holds."""
    began, date = time.monotonic(), datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    machine, measured = facts(Path(tempfile.gettempdir())), commit()
    found = []
    for run in range(runs):
        found.append(measure(n_pairs))
        show(found[-1][0], f"run {run + 1} of {runs}")
    return {
        "schema": 1,
        "date": date,
        "seconds": round(time.monotonic() - began),
        "command": f'make bench-remote ARGS="{shlex.join(sys.argv[1:])}"',
        "commit": measured,
        "machine": machine,
        "load_after": round(os.getloadavg()[0], 2),
        "mooncake": MOONCAKE,
        "pairs": n_pairs,
        "transport": found[-1][1],
        "rows": several([rows for rows, _ in found]),
        "runs": [[asdict(row) for row in rows] for rows, _ in found],
    }


def show(rows: Sequence[Measured], title: str) -> None:
    """For a reader."""
    print(f"{title:34} tier to raw (quartiles)       raw ms   tier ms   target")
    for each in rows:
        ratio = each.ratio
        target = "" if each.target is None else f"{each.target:g} {'yes' if each.reached else 'NO'}"
        spread = f"{ratio.median:6.3f} ({ratio.q1:.3f} .. {ratio.q3:.3f})"
        print(f"{each.what:34} {spread:28} {each.raw_ms.median:8.2f} {each.tier_ms.median:9.2f}   {target}", flush=True)


def main() -> None:
    """Print medians, quartiles, and whether targets are reached. Exit 1 where one is not, with --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--runs", type=int, default=1, help="the figure is the median of theirs")
    parser.add_argument("--json", action="store_true", help="print all of it, instead of a table")
    parser.add_argument("--write", action="store_true", help="write a file to bench/results/remote")
    parser.add_argument("--report", action="store_true", help="only write docs/remote-benchmarks.md (newest results)")
    parser.add_argument("--strict", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    if arguments.report:
        print(write())
        return
    if not private_network():
        raise SystemExit("Mooncake's clients listen on every address: run `make bench-remote`")
    with contextlib.redirect_stdout(sys.stderr if arguments.json else sys.stdout):
        results = results_of(max(1, arguments.runs), max(9, arguments.pairs))
    if arguments.json:
        print(json.dumps(results))
    else:
        print(f"carried by {results['transport']}")
    if arguments.write:
        stamp = results["date"].replace("-", "").replace(":", "")
        path = RESULTS / f"{stamp}-{results['commit']['id']}{'-dirty' if results['commit']['dirty'] else ''}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{path} written; docs: --report", file=sys.stderr)
    if arguments.strict and any(each["reached"] is False for each in results["rows"]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
