"""What checksums and power durability cost."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from bench.nvme import Reader, Writer
from bench.pairs import Pairs
from bench.payload import Payload
from bench.rows import row
from bench.scale import Scale
from tiercache.checksum import checksums
from tiercache.tiers.fileio import aligned_rows

_BLOCK_NBYTES = 256 << 10
_DEPTH = 16
_AT_A_TIME = 4
"""Blocks that a raw read takes at a time: 1 MiB, as a job's part."""


@pytest.fixture
def reader(place: Path, scale: Scale) -> Iterator[Reader]:
    made = Reader(place / "read", Payload(_BLOCK_NBYTES), scale.pick(1 << 30, 512 << 20, 32 << 20))
    yield made
    made.file.unlink()


def test_verified_read_against_raw_read(reader: Reader, pairs: Pairs, scale: Scale) -> None:
    rows = aligned_rows(reader.blocks, _BLOCK_NBYTES)
    slots = np.random.default_rng(0).permutation(reader.blocks).astype(np.int32)
    with reader.open(_DEPTH) as cache, ThreadPoolExecutor(_DEPTH) as pool:
        tier = cache.stack.tiers[-1]  # type: ignore[union-attr]

        def part(begin: int) -> bool:
            end = begin + _AT_A_TIME
            return bool(tier.read(slots[begin:end], rows[begin:end]).all())

        def raw(_: object) -> None:
            assert all(pool.map(part, range(0, reader.blocks, _AT_A_TIME)))

        pairs.run(
            row("hardening/verify"),
            lambda match: reader.load(cache, match),
            {"raw read": raw},
            fresh=lambda: reader.match(cache),
            check=reader.check,
            pairs=scale.pick(7, 5, 1),
            nbytes=reader.total_nbytes,
        )


def test_checksum_against_memcpy(pairs: Pairs, scale: Scale) -> None:
    blocks = scale.pick(1_024, 1_024, 16)
    rows = Payload(_BLOCK_NBYTES).rows(blocks)
    target, idents = np.ones_like(rows), np.arange(1, blocks + 1, dtype=np.uint64)
    pairs.run(
        row("hardening/checksum"),
        lambda _: checksums(rows, _BLOCK_NBYTES, idents),
        {"memcpy": lambda _: np.copyto(target, rows)},
        check=lambda sums: _all_differ(sums),
        pairs=scale.pick(15, 9, 2),
    )


def _all_differ(sums: np.ndarray) -> None:
    assert len(np.unique(sums)) == len(sums)


def test_power_against_process(place: Path, pairs: Pairs, scale: Scale) -> None:
    payload, total = Payload(_BLOCK_NBYTES), scale.pick(1 << 30, 256 << 20, 32 << 20)
    power = Writer(place / "power", payload, total, threads=_DEPTH)
    process = Writer(place / "process", payload, total, threads=_DEPTH, durability="process")

    def fill() -> None:
        power.fill()
        process.fill()

    fill()
    pairs.run(
        row("hardening/power"),
        power.flush,
        {"durability=process": process.flush},
        check=power.check,
        after=fill,
        pairs=scale.pick(7, 5, 1),
        nbytes=total,
    )
    for each in (power, process):
        assert each.flush(None)
        each.close_and_check()
