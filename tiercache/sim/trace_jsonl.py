"""The reader of Mooncake JSONL traces.

One request a line, with `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids`: one id per
block, the last block may be partial; equal ids are equal blocks under equal prefixes.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tiercache.sim.trace import Trace, TraceError

__all__ = ["read_jsonl"]

_MAX_LINE_NBYTES = 64 << 20
_MAX_TIMESTAMP_MS = 1e15
_MAX_COUNT = 1 << 53
_MAX_HASH_ID = 1 << 64


class _BadLineError(Exception):
    """Why a line cannot be used; only within this module."""


class _PathCollector:
    """Collects requests one at a time. `add` takes a line whole or, raising, not at all."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.number: dict[int, int] = {}
        self.tokens: list[int] = []
        self.parent: list[int] = []
        self.times_s: list[float] = []
        self.starts = [0]
        self.ids: list[int] = []

    def add(self, line: bytes) -> None:
        """Raises _BadLineError with the reason."""
        record = _parse(line)
        timestamp_ms = _timestamp_ms(record)
        if self.times_s and timestamp_ms / 1000.0 < self.times_s[-1]:
            raise _BadLineError(
                f"timestamp {record['timestamp']} is before the request above it ({self.times_s[-1] * 1000:.0f}): "
                "the lines must be in order of time"
            )
        length = _count(record, "input_length")
        if "output_length" in record:
            _count(record, "output_length")
        hashes = _hash_ids(record, length, self.block_tokens)
        fresh = self._check_path(hashes, length)
        above = self.number[hashes[-fresh - 1]] if fresh < len(hashes) else -1
        for offset in range(len(hashes) - fresh, len(hashes)):
            block = len(self.tokens)
            self.number[hashes[offset]] = block
            self.tokens.append(min(self.block_tokens, length - offset * self.block_tokens))
            self.parent.append(above)
            above = block
        self.times_s.append(timestamp_ms / 1000.0)
        self.ids.extend([self.number[h] for h in hashes])
        self.starts.append(len(self.ids))

    def _check_path(self, hashes: list[int], length: int) -> int:
        """How many blocks at the path's end are new. Raises _BadLineError where the path contradicts earlier lines."""
        above = -1
        fresh = 0
        for offset, name in enumerate(hashes):
            block = self.number.get(name)
            if block is None:
                fresh += 1
                continue
            if fresh or self.parent[block] != above:
                raise _BadLineError(f"hash id {name} (place {offset}) was seen before, after another id")
            tokens = min(self.block_tokens, length - offset * self.block_tokens)
            if self.tokens[block] != tokens:
                raise _BadLineError(
                    f"hash id {name} (place {offset}) has {tokens} tokens here and had {self.tokens[block]} before"
                )
            above = block
        return fresh


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise _BadLineError(f"bad JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise _BadLineError(f"bad JSON: {error}") from error
    if not isinstance(record, dict):
        raise _BadLineError(f"a JSON object is needed, not {type(record).__name__}")
    for name in ("timestamp", "input_length", "hash_ids"):
        if name not in record:
            raise _BadLineError(f"field {name!r} is missing")
    return record


def _timestamp_ms(record: dict[str, Any]) -> float:
    value = record["timestamp"]
    if type(value) not in (int, float):
        raise _BadLineError(f"timestamp must be a number of milliseconds, not {type(value).__name__}")
    if not 0 <= value <= _MAX_TIMESTAMP_MS:  # also refuses NaN
        raise _BadLineError(f"timestamp {value} is negative or out of range")
    return float(value)


def _count(record: dict[str, Any], name: str) -> int:
    value = record[name]
    if type(value) is not int:
        raise _BadLineError(f"{name} must be a whole number, not {type(value).__name__}")
    if not 0 <= value <= _MAX_COUNT:
        raise _BadLineError(f"{name} is negative: {value}" if value < 0 else f"{name} is out of range")
    return value


def _hash_ids(record: dict[str, Any], length: int, block_tokens: int) -> list[int]:
    hashes = record["hash_ids"]
    if not isinstance(hashes, list) or not all(type(h) is int for h in hashes):
        raise _BadLineError("hash_ids must be a list of whole numbers")
    if hashes and not (min(hashes) >= 0 and max(hashes) < _MAX_HASH_ID):
        raise _BadLineError("hash_ids holds an id that is negative or has more than 64 bits")
    need = -(-length // block_tokens)
    if len(hashes) != need:
        raise _BadLineError(
            f"{len(hashes)} hash_ids, but input_length {length} makes {need} blocks of {block_tokens} tokens"
        )
    if len(set(hashes)) != len(hashes):
        raise _BadLineError("hash_ids names one id twice")
    return hashes


def _lines(file: Path, stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Numbered lines (from 1), blank ones left out. TraceError where the file breaks off or a line has no end."""
    number = 0
    while True:
        number += 1
        try:
            line = stream.readline(_MAX_LINE_NBYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise TraceError(file, number, f"the gzip data is damaged or cut short: {error}") from error
        if not line:
            return
        if len(line) > _MAX_LINE_NBYTES:
            raise TraceError(file, number, f"a line longer than {_MAX_LINE_NBYTES >> 20} MiB")
        if line.strip():
            yield number, line


def read_jsonl(file: Path, stream: BinaryIO, block_tokens: int, skip_bad: bool) -> Trace:
    paths = _PathCollector(block_tokens)
    skipped = 0
    last_reason = ""
    for number, line in _lines(file, stream):
        try:
            paths.add(line)
        except _BadLineError as error:
            if not skip_bad:
                raise TraceError(file, number, str(error)) from error
            skipped += 1
            last_reason = f"; line {number}: {error}"
    if not paths.times_s:
        raise TraceError(file, None, f"holds no requests ({skipped} lines skipped{last_reason})")
    return Trace(
        name=file.name,
        block_tokens=block_tokens,
        times_s=np.array(paths.times_s, np.float64),
        starts=np.array(paths.starts, np.int64),
        ids=np.array(paths.ids, np.int64),
        tokens=np.array(paths.tokens, np.int32),
        parent=np.array(paths.parent, np.int64),
        skipped_lines=skipped,
    )
