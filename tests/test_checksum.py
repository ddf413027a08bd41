"""The checksum: known answers, definition, what it tells apart, and its cost."""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import xxhash

from tiercache.checksum import PAGE_NBYTES, block_checksum, checksums

KNOWN = (0x113425E2D3C1AFC3, 0x828E3ABB8F18EF34, 0xD9A642C9900A6095)


def _bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def _by_definition(data: bytes, ident: int) -> int:
    digests = b""
    for begin in range(0, len(data), 65536):
        digests += xxhash.xxh3_64(data[begin : begin + 65536]).intdigest().to_bytes(8, "little")
    return xxhash.xxh3_64(digests, seed=ident).intdigest()


@pytest.mark.parametrize("nbytes", [1, 17, 4096, 65535, 65536, 65537, 131072, 200_001])
@pytest.mark.parametrize("ident", [0, 1, 2**64 - 1])
def test_is_the_digest_of_the_page_digests(nbytes: int, ident: int) -> None:
    data = _bytes(nbytes)
    assert block_checksum(data, ident) == _by_definition(data.tobytes(), ident)


def test_known_answers() -> None:
    """The value is part of the on-disk format."""
    ramp = (np.arange(200_000) % 251).astype(np.uint8)
    assert block_checksum(ramp[:1], 0) == KNOWN[0]
    assert block_checksum(ramp[:65536], 7) == KNOWN[1]
    assert block_checksum(ramp, 0xFEDCBA9876543210) == KNOWN[2]


def test_one_page_is_not_hashed_directly() -> None:
    data = _bytes(1000)
    assert block_checksum(data, 5) != xxhash.xxh3_64_intdigest(data.tobytes(), 5)


def test_any_flipped_bit_another_ident_or_swapped_pages_are_seen() -> None:
    data = _bytes(3 * PAGE_NBYTES + 5)
    good = block_checksum(data, 9)
    assert block_checksum(data, 10) != good
    for place in (0, PAGE_NBYTES - 1, PAGE_NBYTES, len(data) - 1):
        for bit in range(8):
            data[place] ^= 1 << bit
            assert block_checksum(data, 9) != good
            data[place] ^= 1 << bit
    swapped = data.copy()
    swapped[:PAGE_NBYTES], swapped[PAGE_NBYTES : 2 * PAGE_NBYTES] = (
        data[PAGE_NBYTES : 2 * PAGE_NBYTES],
        data[:PAGE_NBYTES],
    )
    assert block_checksum(swapped, 9) != good
    assert block_checksum(data, 9) == good


def test_every_kind_of_byte_buffer_gives_the_same_value() -> None:
    data = _bytes(70_000)
    data.flags.writeable = False
    want = block_checksum(data, 3)
    for same in (data.tobytes(), bytearray(data.tobytes()), memoryview(data.tobytes()), data.view(np.int8)):
        assert block_checksum(same, np.uint64(3)) == want  # type: ignore[arg-type]


def test_many_rows_with_padding() -> None:
    rows = _bytes(5 * 8192).reshape(5, 8192)
    idents = np.array([1, 2, 3, 2**63, 2**64 - 1], dtype=np.uint64)
    got = checksums(rows, 5000, idents)
    assert got.dtype == np.uint64
    assert got.tolist() == [block_checksum(rows[i, :5000].copy(), int(idents[i])) for i in range(5)]
    assert checksums(rows[::-2], 5000, [5, 3, 1]).tolist() == [
        block_checksum(rows[i, :5000].copy(), i + 1) for i in (4, 2, 0)
    ]
    rows[:, 5000:] = 0
    assert checksums(rows, 5000, idents).tolist() == got.tolist()
    assert checksums(rows[:0], 5000, []).shape == (0,)


@pytest.mark.parametrize(
    "block",
    [np.zeros(0, np.uint8), np.zeros(8, np.uint8)[::2], np.zeros(4, np.uint16), np.zeros((2, 4), np.uint8)],
    ids=["empty", "strided", "wide items", "2-D"],
)
def test_refuses_what_is_no_block(block: np.ndarray) -> None:
    with pytest.raises(ValueError, match="buffer of bytes"):
        block_checksum(block, 0)


@pytest.mark.parametrize("ident", [-1, 2**64])
def test_refuses_idents_outside_64_bits(ident: int) -> None:
    with pytest.raises(ValueError, match="ident"):
        block_checksum(np.zeros(8, np.uint8), ident)


def test_refuses_rows_that_do_not_fit() -> None:
    rows = np.zeros((2, 16), np.uint8)
    for nbytes, idents in ((17, [0, 0]), (0, [0, 0]), (16, [0])):
        with pytest.raises(ValueError, match="rows"):
            checksums(rows, nbytes, idents)
    for wrong in (np.zeros((2, 32), np.uint8)[:, ::2], np.zeros((2, 16), np.uint16), np.zeros(16, np.uint8)):
        with pytest.raises(ValueError, match="rows"):
            checksums(wrong, 16, [0, 0])
    for ident in (-1, 2**64):
        with pytest.raises(OverflowError):
            checksums(rows, 16, [0, ident])


@pytest.mark.parametrize("nbytes", [1, PAGE_NBYTES - 1, PAGE_NBYTES, PAGE_NBYTES + 1, 3 * PAGE_NBYTES + 7])
def test_many_rows_give_what_each_row_gives(nbytes: int) -> None:
    rows = _bytes(3 * (nbytes + 100)).reshape(3, nbytes + 100)
    idents = np.array([7, 0, 2**64 - 1], dtype=np.uint64)
    want = [block_checksum(row[:nbytes], int(ident)) for row, ident in zip(rows, idents, strict=True)]
    assert checksums(rows, nbytes, idents).tolist() == want


def _ratio_to_memcpy(nbytes: int, pool_nbytes: int = 32 << 20) -> float:
    """Median over paired runs of (time of memcpy) / (time of checksum), blocks cold: above 1 is faster."""
    pool = _bytes(pool_nbytes).reshape(-1, nbytes)
    copy = np.ones_like(pool)
    ratios = []
    for _ in range(3):
        for i in range(len(pool)):
            begin = time.perf_counter()
            copy[i] = pool[i]
            middle = time.perf_counter()
            block_checksum(pool[i], i)
            ratios.append((middle - begin) / (time.perf_counter() - middle))
    return statistics.median(ratios)


@pytest.mark.parametrize("nbytes", [256 << 10, 2 << 20])
def test_is_faster_than_memcpy(nbytes: int) -> None:
    best = max(_ratio_to_memcpy(nbytes) for _ in range(2))
    print(f"checksum of {nbytes >> 10} KiB: {best:.2f} x memcpy")
    assert best >= 1.0
