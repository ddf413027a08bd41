"""copy_rows: every byte once, none beside, whatever lies contiguous and wherever the pieces end."""

import numpy as np
import pytest

from tiercache.rows import PIECE_NBYTES, copy_rows

P = PIECE_NBYTES


def guarded(n, width, stride, offset, fill):
    """Rows `[n, width]` with this stride, `offset` bytes into a buffer full of `fill`; and the whole buffer."""
    buffer = np.full(offset + n * stride + 4096, fill, dtype=np.uint8)
    rows = np.lib.stride_tricks.as_strided(buffer[offset:], (n, width), (stride, 1))
    return rows, buffer


@pytest.mark.parametrize("apart", [(0, 0), (4096, 0), (0, 64), (1, 3)], ids=["joined", "target", "source", "both"])
@pytest.mark.parametrize(
    ("n", "width"),
    [(0, 7), (1, 1), (3, P // 2), (4, P // 2), (7, P // 2 + 5), (1, P), (2, P - 1), (1, 2 * P - 1), (1, 2 * P),
     (3, 2 * P), (2, 2 * P + 1), (2, 3 * P), (3, 5 * P + 4095), (1, 4 * P - 1),
     (1, 4 * P), (2, 4 * P + 3), (1, 5 * P), (64, 4096), (300, 8192)],
)  # fmt: skip
def test_every_byte_once_and_none_beside(n, width, apart):
    given = np.random.default_rng(width).integers(0, 256, (n, width), dtype=np.uint8)
    source, source_buffer = guarded(n, width, width + apart[1], 16, 1)
    target, target_buffer = guarded(n, width, width + apart[0], 48, 2)
    source[...] = given
    before = source_buffer.copy()
    expected_rows, expected = guarded(n, width, width + apart[0], 48, 2)
    expected_rows[...] = given
    copy_rows(target, source)
    assert np.array_equal(target, given)
    assert np.array_equal(target_buffer, expected), "bytes beside the rows were written"
    assert np.array_equal(source_buffer, before)


def test_read_only_sources_and_read_only_targets():
    source = np.arange(2 * P, dtype=np.uint8).reshape(2, P)
    source.flags.writeable = False
    target = np.zeros((2, P), dtype=np.uint8)
    copy_rows(target, source)
    assert (target == source).all()
    target.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        copy_rows(target, source)


@pytest.mark.parametrize("shape", [(2, P + 1), (3, P), (2, 3 * P)])
def test_rows_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"could not broadcast|cannot reshape"):
        copy_rows(np.zeros((2, 2 * P), dtype=np.uint8), np.zeros(shape, dtype=np.uint8))
