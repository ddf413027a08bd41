"""Prefill: how fast a recompute is, as given or as learnt from what the engine tells."""

from __future__ import annotations

import math
from typing import Literal

from tiercache.config import SPEED_REMEDY, PrefillSpeed, is_speed

__all__ = ["Prefill"]

_MOST_SHARE = 0.25
"""Of the learnt speed, what one prefill replaces at most."""
_EVEN_TOKENS = 16_384
"""A prefill of so many tokens would replace half; a short one, which mostly is overhead, says little."""


class Prefill:
    """Tokens per second. Safe from several threads: each reads and sets one number."""

    def __init__(self, default: PrefillSpeed) -> None:
        self.default = default
        """What a lookup compares with where it does not say."""
        self.learnt: float | None = None
        """None: nothing was noted yet."""

    def note(self, tokens: int, seconds: float) -> None:
        """A prefill of so many tokens took so long. Average of logarithms: newer and longer ones weigh more.
        ValueError for what is no count of at least 1, or no finite time above 0."""
        if isinstance(tokens, bool) or not hasattr(tokens, "__index__") or tokens < 1:
            raise ValueError(f"tokens = {tokens!r}: a count of at least 1 is needed")
        if isinstance(seconds, bool) or not hasattr(seconds, "__float__") or not 0 < float(seconds) < math.inf:
            raise ValueError(f"seconds = {seconds!r}: a finite time above 0 is needed")
        speed, old = int(tokens) / float(seconds), self.learnt
        share = min(_MOST_SHARE, int(tokens) / (int(tokens) + _EVEN_TOKENS))
        self.learnt = speed if old is None else math.exp((1 - share) * math.log(old) + share * math.log(speed))

    def block_s(self, speed: PrefillSpeed | Literal["default"], block_tokens: int) -> float:
        """Seconds that the prefill of a block takes at this speed; 0.0 where no speed is given, or none is learnt yet.
        ValueError for what is no speed."""
        if speed == "default":
            speed = self.default
        elif not is_speed(speed):
            raise ValueError(f"prefill_tokens_per_s = {speed!r}: {SPEED_REMEDY}")
        if speed == "learnt":
            speed = self.learnt
        return 0.0 if speed is None else block_tokens / float(speed)
