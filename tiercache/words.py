"""Words: in how many leading int32 words two symbols, or runs of them, agree."""

from __future__ import annotations

import numpy as np

from tiercache.arrays import first_true

__all__ = ["common_words", "shared_words"]


def common_words(symbols: bytes, offset: int, run: bytes, nbytes: int) -> int:
    """Leading int32 words in which `symbols[offset:]` and `run` agree, looking at `nbytes` bytes at most."""
    count = nbytes // 4
    if run.startswith(symbols[offset : offset + nbytes]):
        return count
    ours = np.frombuffer(symbols, dtype=np.int32, count=count, offset=offset)
    theirs = np.frombuffer(run, dtype=np.int32, count=count)
    return first_true(ours != theirs)


def shared_words(a: bytes, b: bytes) -> int:
    """Leading int32 words that two short byte strings share."""
    if a[:4] != b[:4]:  # as most do, that meet as neighbours in a sorted list
        return 0
    size = min(len(a), len(b)) // 4 * 4
    if a[:size] == b[:size]:
        return size // 4
    differ = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    return ((differ & -differ).bit_length() - 1) // 32
