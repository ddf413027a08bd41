"""The connector with a clock around each of its hooks. Only for one process that holds both halves."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from tiercache.integrations.vllm import TierCacheConnector

__all__ = ["SPENT", "TimedConnector"]

SPENT: Counter[str] = Counter()
"""Seconds per hook. A hook that calls another has its time, too, and the other none."""
_inside = False


def _timed(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(hook)
    def timed(*args: Any, **kwargs: Any) -> Any:
        global _inside
        if _inside:
            return hook(*args, **kwargs)
        _inside, began = True, time.perf_counter()
        try:
            return hook(*args, **kwargs)
        finally:
            SPENT[name] += time.perf_counter() - began
            _inside = False

    return timed


class TimedConnector(TierCacheConnector):
    """See the module."""


_NOT_IN_STEPS = ("shutdown", "register_kv_caches")
for _name, _hook in vars(TierCacheConnector).items():
    _is_method = callable(_hook) and not isinstance(_hook, staticmethod | classmethod)
    if _is_method and not _name.startswith("_") and _name not in _NOT_IN_STEPS:
        setattr(TimedConnector, _name, _timed(_name, _hook))
