"""Bytes that can be told apart: every page of every block of every round is different, and all are compared."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Payload"]

Rows = NDArray[np.uint8]
_PAGE_NBYTES = 4096
_CHECKED_AT_A_TIME = 64 << 20
_ROUNDS = 1 << 40


class Payload:
    """Blocks of one size: a random block, with a stamp of round and block at the start of each 4 KiB."""

    def __init__(self, block_nbytes: int) -> None:
        assert block_nbytes % _PAGE_NBYTES == 0
        self.block_nbytes = block_nbytes
        self._base = np.random.default_rng(block_nbytes).integers(0, 256, block_nbytes, dtype=np.uint8)

    def rows(self, n: int, round_: int = 0, first: int = 0) -> Rows:
        """`uint8[n, block_nbytes]`, a new array, all of it touched: blocks `first` to `first + n` of a round."""
        rows = np.ones((n, self.block_nbytes), np.uint8)
        self.fill(rows, round_, first)
        return rows

    def fill(self, rows: Rows, round_: int, first: int = 0) -> None:
        """Make rows of any contents those of a round."""
        rows[:] = self._base
        self.stamp(rows, round_, first)

    def stamp(self, rows: Rows, round_: int, first: int = 0) -> None:
        """Turn rows of any round into those of another one: cheap, and an old copy no longer passes as the new one."""
        stamps = rows.view(np.uint64)[:, :: _PAGE_NBYTES // 8]
        blocks = np.arange(first, first + len(rows), dtype=np.uint64)
        stamps[:] = np.uint64(round_ * _ROUNDS) + blocks[:, None]

    def check(self, rows: Rows, round_: int = 0, first: int = 0) -> None:
        """AssertionError unless every byte is that of the round."""
        step = max(1, _CHECKED_AT_A_TIME // self.block_nbytes)
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            expected = self.rows(len(part), round_, first + begin)
            assert np.array_equal(part, expected), f"wrong bytes in blocks {begin} to {begin + len(part)}"
