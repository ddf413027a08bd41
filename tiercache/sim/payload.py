"""Payloads that say which block they belong to: made from an id, and recognised again.

A block is a row of bytes in pages of 64 KiB (the last may be short). Every page is one random pattern, xored with a
64-bit mix of id and page number. So in every page two ids differ (in each whole 8-byte word of it in the same
place), and within a block no two pages are equal: a torn, shifted, swapped or stale block is seen.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tiercache.types import Bools

__all__ = ["PAGE_NBYTES", "fill", "fill_rows", "verify", "verify_rows"]

PAGE_NBYTES = 65536
"""Size of a page. A block shorter than 8 bytes cannot tell all ids apart."""

_MASK = (1 << 64) - 1
_PAGE_STEP = 0x9E3779B97F4A7C15
_PATTERN_SEED = 0x7469657263616368
_PATTERN = np.random.Generator(np.random.PCG64(_PATTERN_SEED)).integers(0, _MASK, PAGE_NBYTES // 8, "<u8", True)
_SPAN_NBYTES = 4 * PAGE_NBYTES
"""Bytes compared at a time: what is expected stays in the core's own cache."""


def fill(ident: int, out: NDArray[np.uint8]) -> None:
    """Write the payload of block `ident` (any int; its low 64 bits count) into `out`, uint8[nbytes], contiguous."""
    fill_rows(_one(ident), out[None, :])


def verify(ident: int, block: NDArray[np.uint8]) -> bool:
    """Whether `block`, uint8[nbytes], is the payload of `ident` in every byte. Only reads."""
    return bool(verify_rows(_one(ident), block[None, :])[0])


def fill_rows(idents: NDArray[np.integer], out: NDArray[np.uint8]) -> None:
    """Write the payloads of n blocks into `out`, uint8[n, nbytes]: contiguous along axis 1, any stride on axis 0.

    ValueError for other shapes or dtypes.
    """
    keys = _keys(idents, out)
    for page, begin, end in _spans(out.shape[1]):
        _write(keys, page, out[:, begin:end])


def verify_rows(idents: NDArray[np.integer], rows: NDArray[np.uint8]) -> Bools:
    """For n blocks `rows`, uint8[n, nbytes], whether each is in every byte what `fill_rows` would write. Only reads.

    ValueError for other shapes or dtypes.
    """
    keys = _keys(idents, rows)
    good = np.ones(len(rows), np.bool_)
    for page, begin, end in _spans(rows.shape[1]):
        step = max(1, _SPAN_NBYTES // (end - begin))
        expected = np.empty((min(step, len(rows)), end - begin), np.uint8)
        for first in range(0, len(rows), step):
            found = rows[first : first + step, begin:end]
            wanted = expected[: len(found)]
            _write(keys[first : first + step], page, wanted)
            good[first : first + step] &= _equal_rows(found, wanted)
    return good


def _one(ident: int) -> NDArray[np.uint64]:
    return np.array([ident & _MASK], np.uint64)


def _side_by_side(rows: NDArray[np.uint8]) -> bool:
    return rows.size == 0 or rows.shape[1] == 1 or rows.strides[1] == 1


def _spans(nbytes: int) -> Iterator[tuple[int, int, int]]:
    """Number of the first page, begin and end of stretches of whole pages; the last may be one short page."""
    whole = nbytes // PAGE_NBYTES * PAGE_NBYTES
    for begin in range(0, whole, _SPAN_NBYTES):
        yield begin // PAGE_NBYTES, begin, min(begin + _SPAN_NBYTES, whole)
    if whole < nbytes:
        yield whole // PAGE_NBYTES, whole, nbytes


def _keys(idents: NDArray[np.integer], rows: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """A bijective mix of each id (the finaliser of splitmix64), after checking shapes."""
    if rows.dtype != np.uint8 or rows.ndim != 2 or not _side_by_side(rows):
        raise ValueError(f"uint8 rows, contiguous along the last axis, are needed, not {rows.dtype} {rows.shape}")
    if idents.shape != (len(rows),):
        raise ValueError(f"{len(rows)} rows need as many idents, not {idents.shape}")
    x = idents.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _write(keys: NDArray[np.uint64], page: int, out: NDArray[np.uint8]) -> None:
    """Whole pages from `page` on of n blocks into `out`, uint8[n, pages * PAGE_NBYTES], or one that is shorter."""
    n, nbytes = out.shape
    pages, page_nbytes = (nbytes // PAGE_NBYTES, PAGE_NBYTES) if nbytes >= PAGE_NBYTES else (1, nbytes)
    steps = np.array([(page + 1 + i) * _PAGE_STEP & _MASK for i in range(pages)], np.uint64)
    masks = keys[:, None] + steps
    words, rest = divmod(page_nbytes, 8)
    if words:
        target = out[:, : pages * words * 8].view("<u8").reshape(n, pages, words)  # a view: it only splits an axis
        np.bitwise_xor(_PATTERN[:words], masks[:, :, None], out=target)
    if rest:
        last = (_PATTERN[words] ^ masks[:, 0]).astype("<u8")[:, None].view(np.uint8)
        out[:, words * 8 :] = last[:, :rest]


def _equal_rows(found: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> Bools:
    width = found.shape[1] // 8 * 8
    same: Bools = np.ones(len(found), np.bool_)
    if width:
        same &= (found[:, :width].view("<u8") == wanted[:, :width].view("<u8")).all(axis=1)
    if width < found.shape[1]:
        same &= (found[:, width:] == wanted[:, width:]).all(axis=1)
    return same
