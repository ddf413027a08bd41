"""Frame: how a block lies on a key tier, payload first, then a trailer that says what it is.

The trailer is 32 bytes: the format, the payload's length, the ident, and the checksum (`tiercache.checksum`) of the
payload under that ident, little-endian. A reader knows the ident that it asks for, so a value of another block,
prefix, namespace, epoch or format is seen, and so is every flipped bit: in the payload by the checksum, in the
trailer by comparison. Nothing of a frame is trusted before `verified`.
"""

from __future__ import annotations

import numpy as np

from tiercache.checksum import checksums
from tiercache.remote.base import Values
from tiercache.types import Bools, Idents

__all__ = ["FORMAT", "TRAILER", "frame_nbytes", "seal", "seal_rows", "verified"]

FORMAT = b"tcblock1"
"""Another layout of the frame gets another one, and is a miss to a reader that does not know it."""
TRAILER = np.dtype([("format", "S8"), ("nbytes", "<u8"), ("ident", "<u8"), ("checksum", "<u8")])


def frame_nbytes(block_nbytes: int) -> int:
    """Bytes of the value of one block."""
    return block_nbytes + TRAILER.itemsize


def seal(blocks: Values, block_nbytes: int, idents: Idents) -> Values:
    """Values `[n, frame_nbytes]` of n blocks (`blocks[n, >= block_nbytes]`), for `KeyTier.put`. Copies."""
    rows = np.empty((len(idents), frame_nbytes(block_nbytes)), dtype=np.uint8)
    rows[:, :block_nbytes] = blocks[:, :block_nbytes]
    return seal_rows(rows, block_nbytes, idents)


def seal_rows(rows: Values, block_nbytes: int, idents: Idents) -> Values:
    """Give blocks that lie in `rows[n, frame_nbytes]` already their trailers, in place. The checksum is of what lies
    there now. Returns the rows."""
    trailers = np.empty(len(idents), dtype=TRAILER)
    trailers["format"] = FORMAT
    trailers["nbytes"] = block_nbytes
    trailers["ident"] = idents
    trailers["checksum"] = checksums(rows, block_nbytes, idents)
    rows[:, block_nbytes:] = trailers.view(np.uint8).reshape(-1, TRAILER.itemsize)
    return rows


def verified(rows: Values, block_nbytes: int, idents: Idents) -> Bools:
    """Per row (`rows[n, >= frame_nbytes]`) whether it is, bit for bit, a frame of the block with this ident."""
    trailers = np.ascontiguousarray(rows[:, block_nbytes : frame_nbytes(block_nbytes)]).view(TRAILER).reshape(-1)
    right = (trailers["format"] == FORMAT) & (trailers["nbytes"] == block_nbytes) & (trailers["ident"] == idents)
    if right.all():  # mostly: nothing is copied then
        right = checksums(rows, block_nbytes, idents) == trailers["checksum"]
    elif right.any():
        right[right] = checksums(rows[right], block_nbytes, idents[right]) == trailers["checksum"][right]
    return np.asarray(right, dtype=np.bool_)
