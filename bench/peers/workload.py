"""What every contestant is given: the same prompts, the same bytes, the same clock. Needs numpy only."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "BLOCK_TOKENS",
    "Tokens",
    "branches",
    "census",
    "drop_from_page_cache",
    "memcpy_s",
    "others",
    "payload",
    "places_in",
    "prompt",
    "sync",
    "timed",
]

BLOCK_TOKENS = 16
VOCABULARY = 100_000
Tokens = NDArray[np.int32]
Rows = NDArray[np.uint8]


def prompt(seed: int, blocks: int) -> Tokens:
    """Token ids of a prompt of that many blocks; another seed shares no first block with it."""
    return np.random.default_rng(seed).integers(0, VOCABULARY, blocks * BLOCK_TOKENS).astype(np.int32)


def branches(tokens: Tokens, nodes: int) -> Iterator[Tokens]:
    """Prompts that leave `tokens` at nodes - 1 places, the deepest first: then each insertion walks one node only."""
    step = len(tokens) // nodes
    aside = np.random.default_rng(nodes)
    for i in range(nodes - 1, 0, -1):
        yield np.concatenate([tokens[: i * step], aside.integers(0, VOCABULARY, BLOCK_TOKENS).astype(np.int32)])


def others(count: int) -> Iterator[Tokens]:
    """That many unrelated prompts of four blocks."""
    for seed in range(count):
        yield prompt(1_000_000 + seed, 4)


def payload(seed: int, n: int, block_nbytes: int) -> Rows:
    """n blocks of random bytes, `[n, block_nbytes]`."""
    words = np.random.default_rng(seed).integers(0, 1 << 63, n * block_nbytes // 8, dtype=np.int64)
    return words.view(np.uint8).reshape(n, block_nbytes)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of one call, and what it returned."""
    begin = time.perf_counter()
    result = work()
    return time.perf_counter() - begin, result


def memcpy_s(source: Rows, target: Rows) -> float:
    """Seconds of one single-thread copy of those bytes."""
    return timed(lambda: np.copyto(target, source))[0]


def census(rows: Rows, expected: Rows, loaded: list[bool]) -> dict[str, int]:
    """How many blocks came back right, wrong, or not at all."""
    right = [bool(np.array_equal(a, b)) for a, b in zip(rows, expected, strict=True)]
    return {
        "right": sum(r and there for r, there in zip(right, loaded, strict=True)),
        "wrong": sum(there and not r for r, there in zip(right, loaded, strict=True)),
        "missed": sum(not there for there in loaded),
    }


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a directory, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def drop_from_page_cache(directory: str) -> None:
    """Sync every file below `directory` and ask the kernel to forget its pages."""
    for path in Path(directory).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


def places_in(directory: str, blocks: Rows) -> list[tuple[str, int]]:
    """Where the bytes of each block lie below `directory`: path and offset, searched by their first 64 bytes.

    Looks at multiples of 4 KiB only. Blocks that are in no file are left out.
    """
    heads = {row[:64].tobytes(): i for i, row in enumerate(blocks)}
    found: dict[int, tuple[str, int]] = {}
    for path in sorted(Path(directory).rglob("*")):
        if path.is_file() and path.stat().st_size >= 4096:
            raw = np.fromfile(path, dtype=np.uint8)
            for offset in range(0, len(raw) - 63, 4096):
                i = heads.get(raw[offset : offset + 64].tobytes())
                if i is not None:
                    found[i] = (str(path), offset)
    return [found[i] for i in sorted(found)]
