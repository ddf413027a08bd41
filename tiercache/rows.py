"""Copying rows of bytes in host memory, as fast as the machine does it from Python."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PIECE_NBYTES", "copy_rows"]

PIECE_NBYTES = 512 << 10
"""Bytes that one memmove moves at most. From about 1 MiB on, memmove writes around the caches, which one thread does a
fifth slower (measured: docs/decisions.md)."""


_FEWEST_PIECES = 4
"""Fewer are not worth a second wait for the GIL."""


def copy_rows(target: NDArray[np.uint8], source: NDArray[np.uint8]) -> None:
    """`target[...] = source` for uint8 arrays `[n, width]` of one shape that do not overlap, each contiguous along
    axis 1 with any stride on axis 0. Overwrites `target`.

    numpy joins what lies side by side into one memmove. Every second piece does not: so these are two calls that
    move PIECE_NBYTES at a time, without Python per piece, and the GIL is given back for as long as each of them takes.
    """
    if target.flags.c_contiguous and source.flags.c_contiguous:
        target, source = target.reshape(1, -1), source.reshape(1, -1)
    n, width = target.shape
    pieces = width // PIECE_NBYTES
    if pieces < _FEWEST_PIECES:
        target[...] = source
        return
    whole = pieces * PIECE_NBYTES
    shape = (n, pieces, PIECE_NBYTES)
    into, of = target[:, :whole].reshape(shape), source[:, :whole].reshape(shape)
    into[:, 0::2] = of[:, 0::2]
    into[:, 1::2] = of[:, 1::2]
    target[:, whole:] = source[:, whole:]
