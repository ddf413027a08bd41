"""A dict model of the cache: what a lookup may claim and what a load may bring, given all that was stored.

The model never evicts, so it bounds a cache from above: a cache that holds less is fine, one that claims more, or
brings other bytes, is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tiercache.layout import KVLayout

__all__ = ["CacheModel", "payload_of"]

Path = tuple[bytes, ...]
"""One entry per block: its tokens and extra."""


class CacheModel:
    """Every prefix that was stored, with every payload it was stored with. No concurrency of its own."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._stored: dict[Path, set[bytes]] = {}

    def __len__(self) -> int:
        return len(self._stored)

    def store(
        self,
        tokens: Sequence[int],
        blocks: Any,
        start: int = 0,
        extra: str | bytes | None = None,
        *,
        partial_tail: bool = False,
    ) -> None:
        """`blocks` were offered for blocks `start` on; whatever part of them the cache took, it may bring them."""
        path = self.path_of(tokens, extra, partial_tail=partial_tail)
        payloads = _bytes_of(blocks)
        assert len(payloads) == len(path) - start, f"{len(payloads)} blocks for {len(path)} from {start} on"
        for i, payload in enumerate(payloads, start + 1):
            self._stored.setdefault(path[:i], set()).add(payload)

    def invalidate(self, prefix: Sequence[int], extra: str | bytes | None = None) -> None:
        """Nothing that begins with the full blocks of `prefix` may be found any more (no tokens: nothing at all)."""
        gone = self.path_of(prefix, extra)
        if gone or not len(prefix):
            self._stored = {path: kept for path, kept in self._stored.items() if path[: len(gone)] != gone}

    def new_epoch(self) -> None:
        """Nothing stored so far may be found any more."""
        self._stored.clear()

    def longest(self, tokens: Sequence[int], extra: str | bytes | None = None, *, partial_tail: bool = False) -> int:
        """The most leading blocks of a prompt that a cache may claim."""
        path = self.path_of(tokens, extra, partial_tail=partial_tail)
        return next((n for n in range(len(path)) if path[: n + 1] not in self._stored), len(path))

    def wrong(
        self,
        tokens: Sequence[int],
        blocks: Any,
        extra: str | bytes | None = None,
        *,
        partial_tail: bool = False,
    ) -> list[int]:
        """Which of these leading blocks are not what was stored under exactly that prefix: the numbers of them."""
        path = self.path_of(tokens, extra, partial_tail=partial_tail)
        payloads = _bytes_of(blocks)
        if len(payloads) > len(path):
            return list(range(len(path), len(payloads)))
        return [i for i, payload in enumerate(payloads) if payload not in self._stored.get(path[: i + 1], set())]

    def prompts(self) -> Iterator[list[int]]:
        """Tokens of every stored prefix without `extra`, in no particular order."""
        for path in self._stored:
            if all(part.startswith(b"-") for part in path):
                yield [token for part in path for token in np.frombuffer(part[1:], dtype="<i4").tolist()]

    def path_of(self, tokens: Sequence[int], extra: str | bytes | None = None, *, partial_tail: bool = False) -> Path:
        """The blocks of a prompt."""
        ids = np.asarray(tokens, dtype="<i4")
        end = len(ids) if partial_tail else len(ids) // self.block_tokens * self.block_tokens
        mark = (
            b"-" if extra is None else b"s%d-" % len(extra) + extra.encode() if isinstance(extra, str) else b"b" + extra
        )
        return tuple(mark + ids[at : at + self.block_tokens].tobytes() for at in range(0, end, self.block_tokens))


def payload_of(
    tokens: Sequence[int], layout: KVLayout, block_tokens: int, start: int = 0, extra: str = "", version: int = 0
) -> Any:
    """Blocks `start` on of a prompt, numpy `[n, *block_shape]` of an integer or float dtype, derived from the prefix.

    Another prefix, extra or version gives other bytes in every block.
    """
    ids = np.asarray(tokens, dtype="<i4")
    n = len(ids) // block_tokens
    rows = np.empty((max(0, n - start), layout.block_nbytes), dtype=np.uint8)
    for i in range(start, n):
        seed = np.frombuffer(
            ids[: (i + 1) * block_tokens].tobytes() + extra.encode() + bytes([version]), dtype=np.uint8
        )
        rows[i - start] = np.random.default_rng(seed).integers(0, 256, layout.block_nbytes, dtype=np.uint8)
    return layout.view(rows)


def _bytes_of(blocks: Any) -> list[bytes]:
    """The bytes of each block of an array or tensor `[n, *block_shape]`; none of None."""
    if blocks is None or len(blocks) == 0:
        return []
    rows = KVLayout.of(blocks).rows(blocks)
    return [row.tobytes() for row in rows.take(0, rows.n)]
