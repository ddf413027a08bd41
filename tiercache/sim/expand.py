"""From block ids to what a cache takes: token ids for real lookups, or short symbols where no payload is moved."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import TierCacheError
from tiercache.sim.trace import Trace

__all__ = ["ID_SYMBOL_NBYTES", "check_expandable", "expand", "no_data_symbols"]

ID_SYMBOL_NBYTES = 8
"""Width of a symbol made by `no_data_symbols`: two little-endian int32, block id and token count."""

_TOKEN_IDS = 1 << 31
"""Token ids are non-negative int32."""


def check_expandable(trace: Trace) -> None:
    """Raise TierCacheError where the trace has more blocks than token ids allow: each takes `block_tokens` of 2**31."""
    most = _TOKEN_IDS // trace.block_tokens
    if trace.unique_blocks > most:
        raise TierCacheError(
            f"trace {trace.name} has {trace.unique_blocks} unique blocks of {trace.block_tokens} tokens; "
            f"token ids (int32) allow {most}: take fewer requests, or replay it without data"
        )


def expand(trace: Trace, request: int) -> NDArray[np.int32]:
    """Token ids of one request's prompt, int32[prompt_tokens(request)], a new array.

    Block b stands for the tokens `b * block_tokens + 0, 1, 2, ...`, as many as it has. So two blocks differ from their
    first token on, and equal prefixes of ids are equal prefixes of tokens. Raises as `check_expandable` does.
    """
    check_expandable(trace)
    path = trace.path(request)
    tokens = np.arange(trace.block_tokens, dtype=np.int32) + (path * trace.block_tokens).astype(np.int32)[:, None]
    return tokens.reshape(-1)[: trace.prompt_tokens(request)]


def no_data_symbols(trace: Trace, request: int) -> bytes:
    """One symbol of ID_SYMBOL_NBYTES per block of the request's path, side by side.

    Symbols are equal exactly where the blocks' tokens would be, so a planner fed with them decides the same.
    """
    path = trace.path(request)
    pairs = np.empty((len(path), 2), "<i4")
    pairs[:, 0] = path
    pairs[:, 1] = trace.tokens[path]
    return pairs.tobytes()
