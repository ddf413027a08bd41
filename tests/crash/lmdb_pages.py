"""Which page of an LMDB file is what, read without LMDB (its 0.9 format, little-endian, 64 bit)."""

from __future__ import annotations

import struct
from collections.abc import Iterator

PAGE = 4096
_BRANCH, _LEAF, _OVERFLOW, _LEAF2 = 0x01, 0x02, 0x04, 0x20
_BIG_DATA, _SUB_TREE = 0x01, 0x02
_FREE_TREE, _MAIN_TREE = 24, 72
"""Where the two trees of a meta page are described."""
_ROOT_OF_TREE = 40
_NONE = (1 << 64) - 1


def kinds(raw: bytes) -> dict[str, list[int]]:
    """Page numbers by kind: "meta" (the newest), "old meta", "branch", "leaf", "overflow", "free list", "unused"."""
    transactions = [struct.unpack_from("<Q", raw, page * PAGE + 144)[0] for page in (0, 1)]
    newest = transactions.index(max(transactions))
    last = struct.unpack_from("<Q", raw, newest * PAGE + 136)[0]
    found: dict[str, list[int]] = {"meta": [newest], "old meta": [1 - newest]}
    for tree, name in ((_FREE_TREE, "free list"), (_MAIN_TREE, "")):
        for kind, page in _walk(raw, struct.unpack_from("<Q", raw, newest * PAGE + 16 + tree + _ROOT_OF_TREE)[0]):
            found.setdefault(name or kind, []).append(page)
    known = {page for pages in found.values() for page in pages}
    found["unused"] = [page for page in range(last + 1) if page not in known]
    return found


def _walk(raw: bytes, page: int) -> Iterator[tuple[str, int]]:
    """Kind and number of each page of a tree, and of the trees named in it."""
    if page == _NONE:
        return
    begin = page * PAGE
    flags, lower = struct.unpack_from("<HH", raw, begin + 10)
    yield "branch" if flags & _BRANCH else "leaf", page
    for (at,) in struct.iter_unpack("<H", raw[begin + 16 : begin + lower]):
        low, high, node_flags, key_nbytes = struct.unpack_from("<HHHH", raw, begin + at)
        data = begin + at + 8 + key_nbytes
        if flags & _BRANCH:
            yield from _walk(raw, low | high << 16 | node_flags << 32)
        elif node_flags & _SUB_TREE:
            yield from _walk(raw, struct.unpack_from("<Q", raw, data + _ROOT_OF_TREE)[0])
        elif node_flags & _BIG_DATA:
            first = struct.unpack_from("<Q", raw, data)[0]
            count = struct.unpack_from("<I", raw, first * PAGE + 12)[0]
            yield from (("overflow", each) for each in range(first, first + count))
