"""Hints: what a caller may say of blocks, checked."""

from __future__ import annotations

import math
import operator

from tiercache.errors import ConfigError
from tiercache.types import COLD

__all__ = ["HIGHEST", "check_priority", "check_ttl"]

HIGHEST = 100


def check_priority(value: object) -> int:
    """The priority as an int. ConfigError for what is none."""
    try:
        priority = operator.index(value) if not isinstance(value, bool) else None  # type: ignore[arg-type]
    except TypeError:
        priority = None
    if priority is None or not COLD <= priority <= HIGHEST:
        remedy = f"an integer from {COLD + 1} (leaves first) to {HIGHEST} (leaves last), 0 for none, or COLD is needed"
        raise ConfigError("priority", value, remedy)
    return priority


def check_ttl(name: str, value: object) -> float:
    """Seconds. ConfigError for what is no time to live."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    if not number or value <= 0:  # type: ignore[operator]
        raise ConfigError(name, value, "a number of seconds above 0 is needed, or math.inf for ever")
    return float(value)  # type: ignore[arg-type]
