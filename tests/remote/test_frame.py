"""A frame says whose bytes it holds, and every other byte is seen."""

import numpy as np
import pytest

from tiercache.remote.frame import FORMAT, TRAILER, frame_nbytes, seal, verified

IDENTS = np.array([1, 2**64 - 1, 77], dtype=np.uint64)


def frames(nbytes, idents=IDENTS, seed=0):
    blocks = np.random.default_rng(seed).integers(0, 256, (len(idents), nbytes), dtype=np.uint8)
    return blocks, seal(blocks, nbytes, idents)


@pytest.mark.parametrize("nbytes", [1, 100, 4096, 65536, 65537])
def test_what_was_sealed_is_verified(nbytes):
    blocks, rows = frames(nbytes)
    assert rows.shape == (3, frame_nbytes(nbytes)) and frame_nbytes(nbytes) == nbytes + 32
    assert (rows[:, :nbytes] == blocks).all()
    assert verified(rows, nbytes, IDENTS).all()
    wide = np.zeros((3, nbytes + 4096), dtype=np.uint8)
    wide[:, : rows.shape[1]] = rows
    assert verified(wide, nbytes, IDENTS).all()
    assert (seal(wide, nbytes, IDENTS) == rows).all()


def test_every_byte_counts():
    _, rows = frames(100)
    for byte in range(rows.shape[1]):
        for bit in (0, 7):
            wrong = rows.copy()
            wrong[1, byte] ^= 1 << bit
            assert verified(wrong, 100, IDENTS).tolist() == [True, False, True], byte


def test_another_blocks_frame_is_seen():
    _, rows = frames(100)
    assert verified(rows[[1, 0, 2]], 100, IDENTS).tolist() == [False, False, True]
    # A trailer that says what is asked for, over a payload that was sealed under another ident.
    forged = rows.copy()
    forged[:, 100:].view(TRAILER)["ident"] = 5
    assert not verified(forged, 100, np.full(3, 5, dtype=np.uint64)).any()


def test_another_format_or_length_is_a_miss():
    _, rows = frames(100)
    trailers = rows[0, 100:].view(TRAILER)
    assert trailers["format"][0] == FORMAT
    trailers["format"] = b"tcblock2"
    rows[2, 100:].view(TRAILER)["nbytes"] = 99
    assert verified(rows, 100, IDENTS).tolist() == [False, True, False]


def test_none_at_all():
    assert verified(np.empty((0, 132), dtype=np.uint8), 100, IDENTS[:0]).shape == (0,)
    assert seal(np.empty((0, 100), dtype=np.uint8), 100, IDENTS[:0]).shape == (0, 132)
