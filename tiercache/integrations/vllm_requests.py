"""Requests as the scheduler's half follows them: hashes, block tables, and how far their KV is known to be computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["RequestState"]

_IN_FLIGHT = "num_in_flight_tokens"
"""vLLM's own count of scheduled tokens whose output was not taken over (0.32; 0.28 has none)."""


@dataclass(slots=True, eq=False)
class RequestState:
    """One request. `request` is the engine's own object: its hashes and counts are read, never written."""

    request: Any
    table: list[int] = field(default_factory=list)
    """Engine blocks of the request, from its first."""
    stored: int = 0
    """Leading blocks of which nothing is left to store."""
    retry_at: int = 0
    """Where a store was cut: the planner's version from which on it is worth another try."""
    most: int | None = None
    """No more leading blocks than these are offered: a load of the next one failed."""
    may_store: bool = True
    """False once its KV may be of other weights than what is stored from now on."""
    given: int = 0
    """Tokens that steps were to compute since it began."""
    first_tokens: int = 0
    """Of these, those of the first step."""
    begun: bool = False
    """The first step is over."""
    first_step: bool = True
    """Nothing was stored since it began."""
    local_blocks: int = 0
    """Blocks that the engine had itself when it last asked."""
    answer: tuple[int, int, int] = (-1, -1, 0)
    """(version, tokens the engine has, tokens offered) of the last question."""
    waits: bool = False
    """At that question a remote tier was being asked for more."""
    patient_until: float | None = None
    """So long it may be told to wait for that; None: it never was."""
    gave_up: bool = False
    """It did not wait any longer."""
    _symbols: bytes = b""
    _hashes: int = 0

    @property
    def hashes(self) -> int:
        """Full blocks whose hash is known."""
        return len(self.request.block_hashes)

    def symbols(self) -> bytes:
        """The hashes of all full blocks, side by side."""
        known = len(self.request.block_hashes)
        if known != self._hashes:
            if known < self._hashes:  # tokens were taken back
                self._symbols, self._hashes = b"", 0
            self._symbols += b"".join(self.request.block_hashes[self._hashes :])
            self._hashes = known
        return self._symbols

    @property
    def counted(self) -> bool:
        """Does the engine count its tokens in flight itself?"""
        return hasattr(self.request, _IN_FLIGHT)

    def scheduled(self, tokens: int) -> None:
        """A step is going to compute this many tokens. Where the first step is over, this need not be called."""
        if not self.first_tokens:
            self.first_tokens = tokens
        self.given += tokens

    def processed_tokens(self, pending: int) -> int:
        """Leading tokens whose KV was computed by steps whose output was taken over: what is still to come may fail.
        pending: tokens of steps whose output was not.

        An engine counts its computed tokens when it schedules a step, and takes them back after a failure. And what it
        had itself when the request began may be what a neighbour computes in the very step in which this one begins:
        so nothing counts before that step is over.
        """
        if not self.begun:
            if self.given - pending < max(1, self.first_tokens):
                return 0
            self.begun = True
        tokens: int = self.request.num_computed_tokens
        return tokens - pending

    def goes_on_waiting(self, now: float, patience_s: float, counters: Any) -> bool:
        """Does it go on waiting for a remote tier? All in all for `patience_s` at most. Counts whether it began to, and
        whether it gave up (`waits` is False then until the next question)."""
        if self.patient_until is None:
            self.patient_until = now + patience_s
            counters.waits += patience_s > 0
            self.gave_up = patience_s <= 0
        self.waits = now < self.patient_until
        if not self.waits and not self.gave_up:
            self.gave_up = True
            counters.impatient += 1
        return self.waits

    def restart(self, table: list[int]) -> None:
        """It runs from the start, or anew after a preemption, in these blocks."""
        self.table, self.stored, self.retry_at = table, 0, 0
        self.given = self.first_tokens = 0
        self.begun, self.first_step = False, True

    def distrust(self) -> None:
        """Blocks of its table turned out to hold nothing valid; it computes them anew, from its next step on."""
        self.stored = self.given = self.first_tokens = 0
        self.begun = False
