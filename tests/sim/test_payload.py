"""Payloads tell their blocks apart, and any damage is seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.sim.payload import PAGE_NBYTES, fill, fill_rows, verify, verify_rows

SIZES = [8, 13, 4096, 4100, PAGE_NBYTES - 8, PAGE_NBYTES, PAGE_NBYTES + 5, 4 * PAGE_NBYTES, 6 * PAGE_NBYTES + 12]


def payload(ident: int, nbytes: int) -> np.ndarray:
    out = np.full(nbytes, 0xAA, np.uint8)
    fill(ident, out)
    return out


@pytest.mark.parametrize("nbytes", SIZES)
def test_rows_and_single_blocks_agree(nbytes: int) -> None:
    idents = np.array([0, 1, 7, 2**63 + 5, 2**64 - 1], np.uint64)
    slab = np.full((5, nbytes + 32), 0x55, np.uint8)
    rows = slab[:, :nbytes]
    fill_rows(idents, rows)
    assert (slab[:, nbytes:] == 0x55).all()
    for ident, row in zip(idents.tolist(), rows, strict=True):
        assert (row == payload(ident, nbytes)).all()
        assert verify(ident, row)
        assert not verify(ident ^ 1, row)
    assert verify_rows(idents, rows).tolist() == [True] * 5
    assert verify_rows(idents[::-1].copy(), rows).tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("nbytes", [1, 3, 7])
def test_blocks_shorter_than_a_word(nbytes: int) -> None:
    row = payload(5, nbytes)
    assert verify(5, row)
    row[-1] ^= 1
    assert not verify(5, row)


def test_every_word_of_a_page_differs_between_ids() -> None:
    rows = np.empty((200, 2 * PAGE_NBYTES), np.uint8)
    fill_rows(np.arange(200), rows)
    words = rows.view("<u8")
    for column in (0, 1, 4095, 8191, 8192, 16383):
        assert len(np.unique(words[:, column])) == 200


def test_every_page_of_a_block_differs_from_the_others() -> None:
    pages = payload(3, 64 * PAGE_NBYTES).reshape(64, PAGE_NBYTES)
    assert len({page.tobytes() for page in pages}) == 64
    words = pages.view("<u8")
    assert len(np.unique(words[:, 17])) == 64


def test_a_page_does_not_repeat_within_itself() -> None:
    words = payload(3, PAGE_NBYTES).view("<u8")
    assert len(np.unique(words)) == len(words)


def test_payloads_never_change() -> None:
    """They are compared with what an earlier process wrote, so this value is for ever."""
    assert payload(1, 16).tobytes().hex() == payload(1, 100).tobytes()[:16].hex()
    assert payload(12345, 20).tobytes().hex() == "d5d7e9a3d9551c9e04e72915ed59a25b2275c185"


@settings(max_examples=200, deadline=None)
@given(nbytes=st.sampled_from(SIZES), data=st.data())
def test_any_flipped_bit_is_found(nbytes: int, data: st.DataObject) -> None:
    rows = np.empty((3, nbytes), np.uint8)
    idents = np.array([4, 5, 6])
    fill_rows(idents, rows)
    row, byte = data.draw(st.integers(0, 2)), data.draw(st.integers(0, nbytes - 1))
    rows[row, byte] ^= 1 << data.draw(st.integers(0, 7))
    assert verify_rows(idents, rows).tolist() == [i != row for i in range(3)]
    assert verify(int(idents[row]), rows[row]) is False


def test_swapped_and_shifted_pages_are_found() -> None:
    nbytes = 6 * PAGE_NBYTES
    good = payload(9, nbytes)
    swapped = good.reshape(6, PAGE_NBYTES)[[0, 1, 2, 3, 5, 4]].reshape(-1)
    assert not verify(9, swapped)
    assert not verify(9, np.roll(good, 8))
    assert not verify(9, np.zeros(nbytes, np.uint8))


def test_unaligned_rows() -> None:
    buffer = np.zeros(4 * 4099 + 1, np.uint8)[1:].reshape(4, 4099)
    fill_rows(np.arange(4), buffer)
    assert verify_rows(np.arange(4), buffer).all()
    assert verify_rows(np.arange(4), buffer.copy()).all()


def test_no_rows() -> None:
    fill_rows(np.zeros(0, np.int64), np.zeros((0, 100), np.uint8))
    assert verify_rows(np.zeros(0, np.int64), np.zeros((0, 100), np.uint8)).tolist() == []


def test_verify_only_reads() -> None:
    row = payload(2, 5000)
    row.flags.writeable = False
    assert verify(2, row)


@pytest.mark.parametrize(
    "rows",
    [np.zeros((2, 8), np.int8), np.zeros((2, 8, 1), np.uint8), np.zeros((2, 16), np.uint8)[:, ::2]],
    ids=["dtype", "dimensions", "strides"],
)
def test_wrong_rows_are_refused(rows: np.ndarray) -> None:
    with pytest.raises(ValueError, match="uint8 rows"):
        fill_rows(np.arange(2), rows)
    with pytest.raises(ValueError, match="uint8 rows"):
        verify_rows(np.arange(2), rows)


def test_as_many_idents_as_rows() -> None:
    with pytest.raises(ValueError, match="2 rows need as many idents"):
        fill_rows(np.arange(3), np.zeros((2, 8), np.uint8))
