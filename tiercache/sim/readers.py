"""Reads trace files. Which format a file has is told by its first bytes, never by its name."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import BinaryIO, cast

from tiercache.errors import ConfigError
from tiercache.sim.trace import MAX_BLOCK_TOKENS, Trace, TraceError
from tiercache.sim.trace_jsonl import read_jsonl
from tiercache.sim.trace_npz import read_npz

__all__ = ["DEFAULT_BLOCK_TOKENS", "read_trace"]

DEFAULT_BLOCK_TOKENS = 512
"""Tokens per block of the Mooncake traces; their files do not say it."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")


def read_trace(path: str | Path, *, block_tokens: int | None = None, skip_bad: bool = False) -> Trace:
    """Read a trace file of either format, whole, into memory.

    `block_tokens`: tokens per block of a JSONL trace (None: 512); an npz file says its own, and must agree.
    `skip_bad`: count malformed lines of a JSONL trace (`Trace.skipped_lines`) and go on. An npz file has no lines:
    it is good or it is not. Raises TraceError for what cannot be read or used, ConfigError for a bad `block_tokens`.
    """
    if block_tokens is not None and not 1 <= block_tokens <= MAX_BLOCK_TOKENS:
        raise ConfigError("block_tokens", block_tokens, f"tokens per block, 1 to {MAX_BLOCK_TOKENS}")
    file = Path(path)
    try:
        with file.open("rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            if magic in _ZIP_MAGICS:
                return read_npz(file, raw, block_tokens)
            stream = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if magic.startswith(_GZIP_MAGIC) else raw
            return read_jsonl(file, stream, block_tokens or DEFAULT_BLOCK_TOKENS, skip_bad)
    except OSError as error:
        raise TraceError(file, None, f"cannot be read: {error.strerror or error}") from error
