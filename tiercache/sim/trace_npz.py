"""The reader of npz traces.

`timestamp_s[r]` and `leaf[r]` per request, `parent[b]` (-1: a root) and `tokens[b]` per block, `block_size`; a
request's blocks are the path from its root to its leaf. Blocks may come in any order.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tiercache.sim.trace import MAX_BLOCK_TOKENS, BlockIds, Trace, TraceError, renumber

__all__ = ["read_npz"]

_MAX_PATH_BLOCKS = 1 << 28
"""Bound on the sum of all path lengths (2 GiB of ids): a small file can name a huge one."""
_READ_FAULTS = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    SyntaxError,
    RuntimeError,
    MemoryError,
    zlib.error,
    zipfile.BadZipFile,
)
"""What numpy and zipfile raise on a damaged archive, by trial."""


def read_npz(file: Path, raw: BinaryIO, block_tokens: int | None) -> Trace:
    fields = _npz_fields(file, raw)
    block_size = int(fields["block_size"][()])
    if not 1 <= block_size <= MAX_BLOCK_TOKENS:
        raise TraceError(file, "block_size", f"{block_size} is not a number of tokens, 1 to {MAX_BLOCK_TOKENS}")
    if block_tokens not in (None, block_size):
        raise TraceError(file, "block_size", f"is {block_size}, but block_tokens {block_tokens} was asked for")
    times, leaf = fields["timestamp_s"].astype(np.float64), fields["leaf"].astype(np.int64)
    parent, tokens = fields["parent"].astype(np.int64), fields["tokens"].astype(np.int64)
    _check_npz(file, times, leaf, parent, tokens, block_size)
    lengths = _depths(file, parent)[leaf]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if starts[-1] > _MAX_PATH_BLOCKS:
        raise TraceError(file, "leaf", f"the paths have {starts[-1]} blocks in all, more than {_MAX_PATH_BLOCKS}")
    ids, tokens32, parent = renumber(_paths_to(leaf, parent, starts), tokens.astype(np.int32), parent)
    return Trace(file.name, block_size, times, starts, ids, tokens32, parent)


def _npz_fields(file: Path, raw: BinaryIO) -> dict[str, NDArray[Any]]:
    """The five fields, of the right kind and number of dimensions."""
    shapes = {"timestamp_s": ("iuf", 1), "leaf": ("iu", 1), "parent": ("iu", 1), "tokens": ("iu", 1)}
    fields: dict[str, NDArray[Any]] = {}
    try:
        archive = np.load(raw, allow_pickle=False)
    except _READ_FAULTS as error:
        raise TraceError(file, None, f"a damaged npz file: {error}") from error
    with archive:
        for name, (kinds, ndim) in {**shapes, "block_size": ("iu", 0)}.items():
            if name not in archive.files:
                raise TraceError(file, name, f"is missing (the file has: {', '.join(archive.files) or 'nothing'})")
            try:
                array: Any = archive[name]
            except _READ_FAULTS as error:
                raise TraceError(file, name, f"cannot be read: {error}") from error
            if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or array.ndim != ndim:
                what = "whole numbers" if kinds == "iu" else "numbers"
                found = f"{array.dtype} of shape {array.shape}" if isinstance(array, np.ndarray) else "not an array"
                raise TraceError(file, name, f"{found}; needed are {what} in {ndim} dimensions")
            fields[name] = array
    return fields


def _check_npz(
    file: Path,
    times: NDArray[np.float64],
    leaf: BlockIds,
    parent: BlockIds,
    tokens: BlockIds,
    block_size: int,
) -> None:
    if len(leaf) == 0:
        raise TraceError(file, "leaf", "holds no requests")
    if len(times) != len(leaf):
        raise TraceError(file, "timestamp_s", f"{len(times)} values for {len(leaf)} requests")
    if len(tokens) != len(parent):
        raise TraceError(file, "tokens", f"{len(tokens)} values for {len(parent)} blocks")
    has_children = np.zeros(len(parent), np.bool_)
    _refuse(file, "parent", (parent < -1) | (parent >= len(parent)), parent, f"no block (there are {len(parent)})")
    has_children[parent[parent >= 0]] = True
    _refuse(file, "leaf", (leaf < 0) | (leaf >= len(parent)), leaf, f"no block (there are {len(parent)})")
    _refuse(file, "tokens", (tokens < 1) | (tokens > block_size), tokens, f"not between 1 and block_size {block_size}")
    _refuse(file, "tokens", has_children & (tokens < block_size), tokens, "a partial block, yet others follow it")
    _refuse(file, "timestamp_s", ~(np.isfinite(times) & (times >= 0)), times, "not a time in seconds")
    backwards = np.concatenate([[False], np.diff(times) < 0])
    _refuse(file, "timestamp_s", backwards, times, "before the request above it: requests must be in order of time")


def _refuse(file: Path, field: str, bad: NDArray[np.bool_], values: NDArray[Any], reason: str) -> None:
    if bad.any():
        first = int(bad.argmax())
        raise TraceError(file, f"{field}[{first}]", f"{values[first]} is {reason}")


def _depths(file: Path, parent: BlockIds) -> BlockIds:
    """Blocks on the path from the root to each block, itself included. TraceError where parents go in a circle."""
    depth = np.ones(len(parent), np.int64)
    jump = parent.copy()
    for _ in range(len(parent).bit_length() + 1):  # each pass doubles how far `jump` reaches
        inner = np.flatnonzero(jump >= 0)
        if len(inner) == 0:
            return depth
        reached = jump[inner]
        depth[inner] += depth[reached]
        jump[inner] = jump[reached]
    circle = int(np.flatnonzero(jump >= 0)[0])
    raise TraceError(file, f"parent[{circle}]", "its ancestors go in a circle")


def _paths_to(leaf: BlockIds, parent: BlockIds, starts: BlockIds) -> BlockIds:
    """All paths, written from the leaves up, all requests at once."""
    ids = np.empty(int(starts[-1]), np.int64)
    place, block = starts[1:] - 1, leaf
    while len(block):
        ids[place] = block
        block = parent[block]
        inner = block >= 0
        place, block = place[inner] - 1, block[inner]
    return ids
