"""What Mooncake's codes mean to a key tier: a miss, a refusal, or trouble."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

__all__ = ["Codes", "is_trouble", "said"]

Codes = NDArray[np.int64]
"""One per key: bytes, or 0 or 1, or below 0 what went wrong."""

NO_ROOM = -200
INVALID = -600
MISSING = -704
TRANSFER_FAILED = -800
NO_MASTER = -900
TIMED_OUT = -901
NOT_TRIED = -1_000_000
"""Ours: the call's time was over, or what came before it had failed."""

COUNTS = {
    NO_ROOM: "no_room",
    INVALID: "invalid",
    -703: "not_ready",
    -705: "not_ready",
    -706: "leased",
    -707: "lease_expired",
    TRANSFER_FAILED: "transfer_failed",
    -801: "corrupt",
    NO_MASTER: "no_master",
    TIMED_OUT: "no_master",
    NOT_TRIED: "not_tried",
}
"""What each is counted as; MISSING is not, others are `other_code`."""
_MEANINGS = {
    -1: "internal error",
    NO_ROOM: "no room",
    INVALID: "invalid, or wider than asked for",
    -703: "not ready, it is being written or removed",
    MISSING: "missing",
    -705: "being written by another",
    -706: "leased to a reader",
    -707: "the lease ended before the transfer did",
    TRANSFER_FAILED: "the transfer failed: its owner is gone, or hangs",
    -801: "the store's own checksum is wrong",
    NO_MASTER: "the master does not answer",
    TIMED_OUT: "the master does not answer in time",
    NOT_TRIED: "not tried, time was over",
}
_QUIET = (NO_ROOM, INVALID, MISSING, -703, -705, -706, -707, -801)
"""Concerns its key alone."""


def is_trouble(code: int) -> bool:
    """Whether it is the store's, or an owner's, and not the key's."""
    return code < 0 and code not in _QUIET


def said(codes: Codes) -> str:
    """For people: `12 x -800 (the transfer failed ...), 1 x ...`."""
    each = Counter(codes.tolist())
    return ", ".join(f"{n} x {code} ({_MEANINGS.get(code, 'unknown')})" for code, n in each.most_common(3))
