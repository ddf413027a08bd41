"""Verified reads from NVMe and durable writes to it, against fio on the same disk at the same size, depth and syncs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from bench import fio
from bench.nvme import Reader, Writer
from bench.pairs import Pairs, Seconds
from bench.payload import Payload
from bench.rows import row
from bench.scale import Scale
from tiercache.tiers.nvme import slots_file

pytestmark = pytest.mark.skipif(bool(fio.MISSING), reason=fio.MISSING)


@pytest.fixture(scope="module")
def total_nbytes(scale: Scale) -> int:
    return scale.pick(2 << 30, 512 << 20, 32 << 20)


@pytest.fixture(scope="module", params=[256 << 10, 2 << 20], ids=lambda nbytes: f"{nbytes >> 10}KiB")
def payload(request: pytest.FixtureRequest) -> Payload:
    return Payload(request.param)


@pytest.fixture(scope="module")
def reader(place: Path, payload: Payload, total_nbytes: int) -> Iterator[Reader]:
    made = Reader(place / f"read-{payload.block_nbytes}", payload, total_nbytes)
    yield made
    made.file.unlink()


@pytest.mark.parametrize("depth", [4, 16])
def test_verified_read(depth: int, reader: Reader, pairs: Pairs, scale: Scale) -> None:
    block_nbytes, total = reader.payload.block_nbytes, reader.total_nbytes

    def reference(_: object, engine: str) -> Seconds:
        return fio.run(engine, "randread", reader.file, total, block_nbytes, depth)

    with reader.open(depth) as cache:
        pairs.run(
            row(f"nvme/read/{block_nbytes}/{depth}"),
            lambda match: reader.load(cache, match),
            {f"fio {engine}": partial(reference, engine=engine) for engine in fio.ENGINES},
            fresh=lambda: reader.match(cache),
            check=reader.check,
            pairs=scale.pick(5, 5, 1),
            warmup=scale.pick(1, 1, 0),
            nbytes=total,
            fio_buffers=fio.BUFFERS,
        )


@pytest.fixture(scope="module")
def fio_file(place: Path, total_nbytes: int) -> Path:
    path = place / "fio.dat"
    fio.prepare(path, total_nbytes)
    return path


@pytest.mark.parametrize("depth", [4, 16])
def test_durable_write(
    depth: int, payload: Payload, place: Path, fio_file: Path, total_nbytes: int, pairs: Pairs, scale: Scale
) -> None:
    writer = Writer(place / f"write-{payload.block_nbytes}-{depth}", payload, total_nbytes, threads=depth)
    writer.fill()

    def reference(_: object, engine: str) -> Seconds:
        return fio.run(engine, "write", fio_file, total_nbytes, payload.block_nbytes, depth, writer.commits)

    pairs.run(
        row(f"nvme/write/{payload.block_nbytes}/{depth}"),
        writer.flush,
        {f"fio {engine}": partial(reference, engine=engine) for engine in fio.ENGINES},
        check=writer.check,
        after=writer.fill,
        pairs=scale.pick(5, 5, 1),
        warmup=scale.pick(1, 1, 0),
        nbytes=total_nbytes,
        fio_buffers=fio.BUFFERS,
        syncs=writer.commits,
    )
    assert writer.flush(None)
    writer.close_and_check()
    (writer.path / slots_file(0)).unlink()
