"""A trace: requests as paths in a prefix tree of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import TierCacheError

__all__ = ["MAX_BLOCK_TOKENS", "BlockIds", "Trace", "TraceError", "full_blocks", "renumber"]

BlockIds = NDArray[np.int64]

MAX_BLOCK_TOKENS = 1 << 20


class TraceError(TierCacheError, ValueError):
    """A trace file cannot be used. The message names the file, the line or the field, and the reason."""

    def __init__(self, path: str | Path, where: int | str | None, reason: str) -> None:
        self.path = str(path)
        self.line = where if isinstance(where, int) else None
        self.field = where if isinstance(where, str) else None
        self.reason = reason
        place = {int: f":{where}", str: f": {where}"}.get(type(where), "")
        super().__init__(f"{path}{place}: {reason}")
        self._given = path, where, reason

    def __reduce__(self) -> tuple[type[TraceError], tuple[str | Path, int | str | None, str]]:
        """For pickle: an error may have to cross from one process to another."""
        return type(self), self._given


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """r requests over u unique blocks. Block ids are dense, 0..u-1 in order of first appearance.

    So a parent's id is smaller than its children's, and every block is used by some request. All arrays are read-only.
    """

    name: str
    block_tokens: int
    times_s: NDArray[np.float64]
    """float64[r]: when each request arrives, never going back."""
    starts: NDArray[np.int64]
    """int64[r + 1]: request i's path is `ids[starts[i]:starts[i + 1]]`, from the root to the leaf."""
    ids: BlockIds
    tokens: NDArray[np.int32]
    """int32[u]: tokens per block; `block_tokens`, or fewer where it is the partial last block of a path."""
    parent: NDArray[np.int64]
    """int64[u]: the block before it, -1 for a block that starts a prompt."""
    skipped_lines: int = 0
    """Malformed lines that `skip_bad` left out."""

    def __post_init__(self) -> None:
        for array in (self.times_s, self.starts, self.ids, self.tokens, self.parent):
            array.flags.writeable = False

    def __repr__(self) -> str:
        return (
            f"Trace({self.name!r}, {self.requests} requests, {self.unique_blocks} unique blocks of {self.block_tokens})"
        )

    @property
    def requests(self) -> int:
        """Number of requests."""
        return len(self.times_s)

    @property
    def unique_blocks(self) -> int:
        """Number of distinct blocks (u)."""
        return len(self.tokens)

    @property
    def total_prompt_tokens(self) -> int:
        """Prompt tokens of all requests together."""
        return int(self.tokens[self.ids].sum(dtype=np.int64))

    def path(self, request: int) -> BlockIds:
        """Block ids of one request, from the root to the leaf: a read-only view, valid as long as it is held."""
        if not 0 <= request < self.requests:
            raise IndexError(f"request {request} of a trace of {self.requests}")
        return self.ids[self.starts[request] : self.starts[request + 1]]

    def prompt_tokens(self, request: int) -> int:
        """Prompt tokens of one request."""
        return int(self.tokens[self.path(request)].sum(dtype=np.int64))

    def ends(self) -> NDArray[np.bool_]:
        """bool[r]: is this the end of a conversation, a request whose last full block no later one uses?

        False for a request without a full block. What only its path uses could be given up after it.
        """
        last_use = np.full(self.unique_blocks, -1, np.int64)
        last_use[self.ids] = np.repeat(np.arange(self.requests), np.diff(self.starts))  # the last assignment stays
        counts = np.diff(self.starts)
        ends = np.zeros(self.requests, np.bool_)
        for request in np.flatnonzero(counts).tolist():
            path = self.path(request)
            full = len(path) - int(self.tokens[path[-1]] < self.block_tokens)
            ends[request] = full > 0 and last_use[path[full - 1]] == request
        return ends

    def infinite_hit_ratio(self) -> float:
        """Prompt tokens that a cache without bounds would find / all prompt tokens, its cold start included.

        Every block misses exactly once, when it first appears. 0.0 where there are no prompt tokens.
        """
        total = self.total_prompt_tokens
        return 1.0 - int(self.tokens.sum(dtype=np.int64)) / total if total else 0.0

    def slice(self, n: int) -> Trace:
        """The first n requests (all, where there are fewer) and the blocks they use. ValueError for n < 1."""
        if n < 1:
            raise ValueError(f"a slice of {n} requests: at least 1 is needed")
        if n >= self.requests:
            return self
        ids = self.ids[: self.starts[n]]
        unique = int(ids.max()) + 1 if len(ids) else 0
        return Trace(
            name=self.name,
            block_tokens=self.block_tokens,
            times_s=self.times_s[:n],
            starts=self.starts[: n + 1],
            ids=ids,
            tokens=self.tokens[:unique],
            parent=self.parent[:unique],
            skipped_lines=self.skipped_lines,
        )


def full_blocks(trace: Trace) -> Trace:
    """The same requests without their partial last blocks. A request shorter than a block keeps its place, empty."""
    keep = (trace.tokens == trace.block_tokens)[trace.ids]
    kept_before = np.concatenate([[0], np.cumsum(keep)]).astype(np.int64)
    ids, tokens, parent = renumber(trace.ids[keep], trace.tokens, trace.parent)
    return Trace(
        name=trace.name,
        block_tokens=trace.block_tokens,
        times_s=trace.times_s,
        starts=kept_before[trace.starts],
        ids=ids,
        tokens=tokens,
        parent=parent,
        skipped_lines=trace.skipped_lines,
    )


def renumber(
    ids: BlockIds, tokens: NDArray[np.int32], parent: BlockIds
) -> tuple[BlockIds, NDArray[np.int32], BlockIds]:
    """Ids in order of first appearance; blocks that no path uses are left out. Paths are whole, so parents stay."""
    first = np.full(len(tokens), -1, np.int64)
    first[ids[::-1]] = np.arange(len(ids))[::-1]  # of equal ids, the last assignment (the first appearance) stays
    used = np.flatnonzero(first >= 0)
    order = used[np.argsort(first[used])]
    number = np.full(len(tokens) + 1, -1, np.int64)  # number[-1] is -1: the parent of a root
    number[order] = np.arange(len(order))
    return number[ids], tokens[order], number[parent[order]]
