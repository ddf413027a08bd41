"""`python -m bench.remote.tier [--json]`: MooncakeTier against Mooncake's raw client, in interleaved pairs of one run.

Both have a client of their own in this process, the same master, and the same owner in another process. Each pair runs
raw and tier in alternating order; the figure is the median of the ratios. Reads: GB/s of the tier, of the raw client's
(higher is better). Finds: time of the tier, of the raw client's (lower is better). Rows are registered on both sides.

`make bench-remote` runs it in a private network.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.pairs import Spread
from tiercache.remote.frame import frame_nbytes, seal, verified
from tiercache.remote.mooncake import MooncakeTier
from tiercache.remote.mooncake_options import MooncakeOptions

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "remote_real"))
from rig_mooncake import MIB, Rig, private_network

READS = ((128, 256 * 1024), (32, 2 * MIB))
"""Values, and bytes of the block in each."""
FIND_KEYS = 8192
LEAST_READ, MOST_FIND = 0.9, 1.3
DEADLINE_S = 10.0


@dataclass(frozen=True)
class Measured:
    """One row: `ratio` is tier to raw."""

    what: str
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
    reached = None if target is None else (ratio.median >= target if faster else ratio.median <= target)
    return Measured(what, ratio, Spread.of([a * 1e3 for a in raw]), Spread.of([b * 1e3 for b in tier]), target, reached)


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


def main() -> None:
    """Print medians, quartiles, and whether targets are reached. Exit 1 where one is not, with --strict."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=21)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--strict", action="store_true", help="fail where a target is missed")
    arguments = parser.parse_args()
    if not private_network():
        raise SystemExit("Mooncake's clients listen on every address: run `make bench-remote`")
    found, transport = measure(max(9, arguments.pairs))
    if arguments.json:
        print(json.dumps({"pairs": arguments.pairs, "transport": transport, "rows": [asdict(each) for each in found]}))
    else:
        print(f"{'':34} tier to raw (quartiles)       raw ms   tier ms   target")
        for each in found:
            ratio, target = (
                each.ratio,
                "" if each.target is None else f"{each.target:g} {'yes' if each.reached else 'NO'}",
            )
            spread = f"{ratio.median:6.3f} ({ratio.q1:.3f} .. {ratio.q3:.3f})"
            print(f"{each.what:34} {spread:28} {each.raw_ms.median:8.2f} {each.tier_ms.median:9.2f}   {target}")
        print(f"carried by {transport}")
    if arguments.strict and any(each.reached is False for each in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
