"""What the crash tests store, and what may come back: prompts, their only right bytes, and a model of the promises.

A prompt is a path such as "2.0.1": segments of one to three blocks, each naming the branch taken. Paths that begin
alike share their leading blocks. The bytes of a block follow from all tokens up to its end, from the epoch, and from
how often its prefix was invalidated: whatever was dropped for good would be wrong bytes.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercache import DRAM, KVLayout, NVMe, TieredKVCache
from tiercache.catalog_rows import map_nbytes_for
from tiercache.keys import symbol_nbytes
from tiercache.sim.payload import fill_rows, verify_rows

BLOCK_TOKENS = 4
BLOCK = 9000
"""Bytes; odd on purpose, and three pages of a slot, so that it can be torn."""
STRIDE = 12288
LAYOUT = KVLayout((BLOCK,), "uint8")
Op = list[Any]


@dataclass(frozen=True)
class Shape:
    """How a cache is opened. `roomy`: all prompts of the run fit on NVMe, and nothing leaves it by itself; the others
    evict, and give the copy on NVMe up when a block is promoted."""

    dram: int = 64
    nvme: int = 160
    write_after: float | None = None
    durability: str = "power"
    roomy: bool = True

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def disk_nbytes(self) -> int:
        """What the directory may take: payload, the catalog's reservation, and some small files."""
        return self.nvme * STRIDE + map_nbytes_for(self.nvme, symbol_nbytes(BLOCK_TOKENS)) + (256 << 10)


def open_cache(place: str | Path, shape: Shape, **options: Any) -> TieredKVCache:
    disk = NVMe(
        place,
        shape.nvme * STRIDE,
        write_after_s=shape.write_after,
        durability=shape.durability,  # type: ignore[arg-type]
        threads=options.pop("threads", 2),
    )
    tiers = [DRAM(shape.dram * STRIDE), disk]
    options["exclusive"] = not shape.roomy
    return TieredKVCache(tiers, layout=LAYOUT, namespace="crash", block_tokens=BLOCK_TOKENS, **options)


# -- prompts ------------------------------------------------------------------------------------------------------


def _digest(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def prefixes(path: str) -> list[str]:
    """The path's own beginnings, itself last."""
    return list(itertools.accumulate(path.split("."), lambda above, part: f"{above}.{part}"))


def is_under(path: str, above: str) -> bool:
    return path == above or path.startswith(above + ".")


@cache
def segment_blocks(path: str) -> int:
    """Blocks of the last segment of a path."""
    return 1 + _digest("length", path) % 3


@cache
def blocks_of(path: str) -> int:
    return sum(map(segment_blocks, prefixes(path)))


@cache
def tokens_of(path: str) -> NDArray[np.int32]:
    parts = [
        np.random.default_rng(_digest("tokens", each)).integers(0, 1 << 31, segment_blocks(each) * BLOCK_TOKENS)
        for each in prefixes(path)
    ]
    return np.concatenate(parts).astype(np.int32)


def ids_of(path: str, epoch: str, lives: dict[str, int]) -> NDArray[np.uint64]:
    """What each block's bytes are made from. lives: how often each path was invalidated."""
    tokens, above, ids = tokens_of(path).reshape(-1, BLOCK_TOKENS).tolist(), _digest("epoch", epoch), []
    ends = {blocks_of(each) - 1: each for each in prefixes(path)}
    for i, words in enumerate(tokens):
        above = _digest(above, words, lives.get(ends.get(i, ""), 0))
        ids.append(above)
    return np.array(ids, dtype=np.uint64)


def bytes_of(ids: NDArray[np.uint64]) -> NDArray[np.uint8]:
    rows = np.empty((len(ids), BLOCK), dtype=np.uint8)
    fill_rows(ids, rows)
    return rows


def right(ids: NDArray[np.uint64], rows: NDArray[np.uint8]) -> NDArray[np.bool_]:
    return verify_rows(ids, rows)


UNIVERSE = [
    *(str(a) for a in range(4)),
    *(f"{a}.{b}" for a in range(4) for b in range(3)),
    *(f"{a}.{b}.{c}" for a in range(4) for b in range(3) for c in range(2)),
]
"""All prompts of a random run; together they are below 100 blocks."""


def total_blocks(paths: list[str]) -> int:
    return sum(segment_blocks(each) for each in {part for path in paths for part in prefixes(path)})


assert total_blocks(UNIVERSE) < 100


# -- what was promised --------------------------------------------------------------------------------------------


@dataclass
class Model:
    """Replays a run's operations with their results; says what a cache opened afterwards must, and must not, give."""

    shape: Shape = field(default_factory=Shape)
    epoch: str = ""
    """In hex; "": not known, since no open returned."""
    doubtful_epoch: str = ""
    """An epoch that was being made when the process died."""
    lives: dict[str, int] = field(default_factory=dict)
    acked: dict[str, int] = field(default_factory=dict)
    """Blocks of each path that were said to be on NVMe."""
    stored: set[str] = field(default_factory=set)
    claimed: int = 0
    """Blocks that the catalog had at a time after which nothing left it."""
    shrinking: bool = False
    """The next open forgets what does not fit."""
    reused: bool = False
    """Slots may have had more than one life: a block that was promised nowhere may be gone."""

    spoiled: bool = False
    """Somebody damaged the store: nothing need be there."""

    @classmethod
    def of(cls, ops: list[Op], results: list[Any]) -> Model:
        """After `results`; the operation after them, if there is one, was under way."""
        return cls().after(ops, results)

    def after(self, ops: list[Op], results: list[Any]) -> Model:
        """The same, from here on; changes this one and returns it."""
        for op, result in zip(ops, results, strict=False):
            self.done(op, result)
        if len(results) < len(ops):
            self.begun(ops[len(results)])
        return self

    def begun(self, op: Op) -> None:
        """From now on this may have happened, or part of it."""
        match op:
            case ["open", shape]:
                new = Shape(**shape)
                if new.nvme < self.shape.nvme and total_blocks(sorted(self.stored)) > new.nvme:
                    self._lose_all()
                self.shrinking |= new.nvme < self.shape.nvme
                self.reused |= self.shrinking
                self.shape = new
            case ["invalidate", path]:
                self._drop(path)
                self.claimed, self.reused = 0, True
            case ["bump", tag]:
                self._lose_all()
                self.doubtful_epoch = tag.encode().hex()
            case ["store", path]:
                self.stored.add(path)
                if not self.shape.roomy and total_blocks(sorted(self.stored)) > self.shape.nvme:
                    self._lose_all()
            case ["spoil", _]:
                self._lose_all()
                self.spoiled = True
            case ["load" | "out", _] if not self.shape.roomy:
                self._lose_all()
            case _:
                pass

    def done(self, op: Op, result: Any) -> None:
        self.begun(op)
        match op:
            case ["open", _]:
                if result["epoch"] != self.epoch:
                    self.lives.clear()
                self.epoch, self.doubtful_epoch, self.shrinking = result["epoch"], "", False
            case ["flush"] | ["close"] if result is not None:
                self.acked.update(result)
            case ["warm", _]:
                self.claimed = result if self.shape.roomy else 0
            case ["invalidate", path]:
                self.lives[path] = self.lives.get(path, 0) + 1
            case ["bump", _]:
                self.epoch, self.doubtful_epoch = result, ""
                self.lives.clear()
            case _:
                pass

    def _lose_all(self) -> None:
        self.acked.clear()
        self.claimed, self.reused = 0, True

    def _drop(self, path: str) -> None:
        for each, blocks in self.acked.items():
            if is_under(each, path):
                self.acked[each] = min(blocks, blocks_of(path) - 1)


# -- random runs --------------------------------------------------------------------------------------------------


def random_shape(rng: random.Random) -> Shape:
    roomy = rng.random() < 0.7
    return Shape(
        dram=rng.choice([12, 24, 64]),
        nvme=rng.choice([128, 192]) if roomy else rng.choice([16, 40]),
        write_after=rng.choice([None, 0.0, 0.003, 0.02]),
        roomy=roomy,
    )


def random_ops(rng: random.Random, shape: Shape, n: int, churn: bool = False) -> list[Op]:
    """n operations on an open cache, the opening first. With `churn` more is dropped for good, and slots used again."""
    ops: list[Op] = [["open", shape.as_json()]]
    for _ in range(n):
        kind = rng.choices(
            ["store", "load", "out", "flush", "wait", "sleep", "invalidate", "bump", "release", "reopen", "resize"],
            [50, 8, 8, 14, 4, 8, 25 if churn else 5, 2, 3, 4, 2],
        )[0]
        path = rng.choice(UNIVERSE)
        if kind in ("store", "load", "out", "invalidate", "release"):
            ops.append([kind, path])
        elif kind == "sleep":
            ops.append(["sleep", rng.choice([0.001, 0.005, 0.04])])
        elif kind == "bump":
            ops.append(["bump", f"weights-{rng.randrange(1 << 30)}"])
        elif kind in ("reopen", "resize"):
            if kind == "resize":
                sizes = [128, 160, 224] if shape.roomy else [12, 24, 48]
                shape = Shape(shape.dram, rng.choice(sizes), shape.write_after, shape.durability, shape.roomy)
            ops += [["close"], ["open", shape.as_json()]]
        else:
            ops.append([kind])
    return ops
