"""The one checksum of a block, with the same value on every device.

`xxh3_64(d0 || d1 || ..., seed=ident)`, where `d_i` is the little-endian 64-bit `xxh3_64` (seed 0) of the i-th page of
PAGE_NBYTES of the block, the last page short; also where there is only one page. Pages are digested independently, so a
GPU can give each one to a warp. The seed is the block's ident: bytes that belong to another block, prefix, namespace or
epoch fail although they are intact.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiercache.types import Idents

__all__ = ["PAGE_NBYTES", "block_checksum", "checksums"]

PAGE_NBYTES = 65536
"""Bytes digested independently of each other. Part of the on-disk format."""

Buffer: TypeAlias = NDArray[np.uint8] | memoryview | bytes | bytearray

_digest = xxhash.xxh3_64_intdigest


def block_checksum(block: Buffer, ident: int) -> int:
    """The 64-bit checksum of `block` (the payload only: `block_nbytes` bytes, not the stride) under `ident`.

    `block` is a 1-D C-contiguous buffer of bytes, and is not copied. ValueError where it is empty, strided or made of
    larger items, or where `ident` is outside 64 bits.
    """
    view = block.data if isinstance(block, np.ndarray) else memoryview(block)
    ident = int(ident)
    nbytes = view.nbytes
    if view.ndim != 1 or view.itemsize != 1 or not view.contiguous or nbytes == 0:
        raise ValueError(f"a non-empty contiguous 1-D buffer of bytes is needed, not {view.shape} of {view.format!r}")
    if not 0 <= ident < 1 << 64:
        raise ValueError(f"ident = {ident}: an unsigned 64-bit number is needed")
    pages = [_digest(view[begin : begin + PAGE_NBYTES]) for begin in range(0, nbytes, PAGE_NBYTES)]
    return _digest(struct.pack(f"<{len(pages)}Q", *pages), ident)


def checksums(rows: NDArray[np.uint8], nbytes: int, idents: Idents | Iterable[int]) -> NDArray[np.uint64]:
    """Checksums of n blocks: the first `nbytes` of each of `rows` (uint8 `[n, width]`), under its ident; uint64 `[n]`.

    Each row is contiguous, with any stride on axis 0; nothing is copied. ValueError where rows or lengths do not fit,
    OverflowError for an ident outside 64 bits.
    """
    if rows.ndim != 2 or rows.dtype != np.uint8 or not 0 < nbytes <= rows.shape[1]:
        raise ValueError(f"rows are {rows.dtype} {rows.shape}: uint8 [n, width], width >= {nbytes} > 0, is needed")
    if len(rows) and rows.shape[1] > 1 and rows.strides[1] != 1:
        raise ValueError("rows must be contiguous along axis 1")
    seeds = np.asarray(idents if isinstance(idents, np.ndarray) else list(idents), dtype=np.uint64).tolist()
    if len(seeds) != len(rows):
        raise ValueError(f"{len(rows)} rows, but {len(seeds)} idents")
    pages = [slice(begin, min(begin + PAGE_NBYTES, nbytes)) for begin in range(0, nbytes, PAGE_NBYTES)]
    pack = struct.Struct(f"<{len(pages)}Q").pack
    values = []
    for row, seed in zip(rows, seeds, strict=True):  # as block_checksum, without asking of each row what it is
        view = row.data
        values.append(_digest(pack(*[_digest(view[page]) for page in pages]), seed))
    return np.array(values, dtype=np.uint64)
