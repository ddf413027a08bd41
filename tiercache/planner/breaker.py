"""Breaker: takes a level offline after consecutive failures, lets one job probe it after a back-off."""

from __future__ import annotations

import math
import random
from collections import deque

from tiercache.remote.guard import FIRST_BACKOFF_S, JITTER, LONGEST_BACKOFF_S, THRESHOLD, WINDOW_S

__all__ = ["Breaker", "KeyTierBreaker"]


class Breaker:
    """Closed (works), open (offline until `retry_at`), half-open (one probe under way). No clock of its own."""

    def __init__(self, threshold: int = 3, first_backoff_s: float = 1.0, longest_backoff_s: float = 30.0) -> None:
        self.threshold = threshold
        self.first_backoff_s = first_backoff_s
        self.longest_backoff_s = longest_backoff_s
        self.failures = 0
        """Consecutive."""
        self.trips = 0
        self.retry_at: float | None = None
        """None: closed."""
        self.probing = False
        self.backoff_s = first_backoff_s

    @property
    def state(self) -> str:
        """ "closed", "open" or "half-open"."""
        if self.retry_at is None:
            return "closed"
        return "half-open" if self.probing else "open"

    def allows(self, now: float) -> bool:
        """May a job use the level now?"""
        return self.retry_at is None or (now >= self.retry_at and not self.probing)

    def started(self) -> None:
        """A job that uses the level was submitted; where the breaker is open, it is the probe."""
        if self.retry_at is not None:
            self.probing = True

    def succeeded(self) -> None:
        """A job came back well."""
        self.failures = 0
        self.retry_at = None
        self.probing = False
        self.backoff_s = self.first_backoff_s

    def failed(self, now: float) -> None:
        """A job failed or is overdue."""
        self.failures += 1
        if self.retry_at is None:
            if self.failures < self.threshold:
                return
            self.trips += 1
        elif self.probing:
            self.backoff_s = min(self.backoff_s * 2, self.longest_backoff_s)
        else:
            return  # of a job that was under way when the level went offline: no news
        self.probing = False
        self.retry_at = now + self.backoff_s

    def timed_out(self, now: float) -> None:
        """A job failed at its deadline: somebody may have waited all that time."""
        self.failed(now)

    def undecided(self) -> None:
        """A job came back without telling anything of the level (cancelled, of an old epoch)."""
        self.probing = False


class KeyTierBreaker(Breaker):
    """A key tier's: while it is open no load and no write goes out, only a question that nobody waits for.

    A question that was answered says nothing of deliveries: where these had failed too, the breaker closes on trial,
    and the next failure opens it again for twice as long. Time-outs that requests wait for open it also where others
    are served in between (of two owners of a store one is dead): so many of them within WINDOW_S as failures in a row,
    and while there are any the back-off goes on growing. It is also the kill switch (`enabled`).
    """

    def __init__(self, seed: int, enabled: bool = True) -> None:
        """seed: of the jitter, so that caches which lost the same store do not come back together."""
        super().__init__(THRESHOLD, FIRST_BACKOFF_S, LONGEST_BACKOFF_S)
        self.enabled = enabled
        self.quiet_until = -math.inf
        """No lookup has anything to do with the key tier before: -inf where it is closed, inf where it is off, or a
        probe is under way. One comparison, so that what is off costs a lookup nothing."""
        self._jitter = random.Random(seed)
        self._on_trial = False
        self._deliveries_failed = False
        self._timed_out_at: deque[float] = deque(maxlen=THRESHOLD)
        self._opened_late = False
        self._changed()

    def allows(self, now: float) -> bool:
        """May a load, a write, or a question that somebody waits for, go out?"""
        return self.retry_at is None and self.enabled

    def may_probe(self, now: float) -> bool:
        """Is it time to ask whether it answers again?"""
        return self.enabled and self.retry_at is not None and now >= self.retry_at and not self.probing

    def started(self) -> None:
        """A job was submitted: never a probe."""

    def switch(self, enabled: bool) -> None:
        """The kill switch."""
        self.enabled = enabled
        self._changed()

    def probes(self) -> None:
        """The probe was submitted."""
        self.probing = True
        self._changed()

    def _changed(self) -> None:
        if not self.enabled or self.probing:
            self.quiet_until = math.inf
        else:
            self.quiet_until = -math.inf if self.retry_at is None else self.retry_at

    def succeeded(self) -> None:
        """A job delivered."""
        backoff_s = self.backoff_s
        super().succeeded()
        if self._timed_out_at:  # maybe of another part of the store
            self.backoff_s = backoff_s
        self._on_trial = self._deliveries_failed = False
        self._changed()

    def answered(self) -> None:
        """A question was answered."""
        if not self._deliveries_failed:
            self.succeeded()
        elif self.retry_at is not None:
            self.retry_at, self.probing = None, False
            self.failures, self._on_trial = self.threshold - 1, True
            self._changed()

    def timed_out(self, now: float, *, delivery: bool = True, probe: bool = False) -> None:
        """A load, or a question, failed at its deadline."""
        late = self._timed_out_at
        late.append(now)
        while late[0] <= now - WINDOW_S:
            late.popleft()
        self._fail(now, delivery, probe, len(late) >= self.threshold)

    def failed(self, now: float, *, delivery: bool = True, probe: bool = False) -> None:
        """A job failed."""
        self._fail(now, delivery, probe, False)

    def _fail(self, now: float, delivery: bool, probe: bool, too_late: bool) -> None:
        self.failures += 1
        self._deliveries_failed |= delivery
        if self.retry_at is None:
            if self.failures < self.threshold and not too_late:
                return
            self.trips += 1
        elif not probe:
            return  # it was under way when the level went offline: no news
        if self._timed_out_at and self._timed_out_at[-1] <= now - WINDOW_S:
            self.backoff_s = self.first_backoff_s
        if probe or self._on_trial or (too_late and self._opened_late):
            self.backoff_s = min(self.backoff_s * 2, self.longest_backoff_s)
        self.probing = self._on_trial = False
        self._opened_late = too_late
        self.retry_at = now + self.backoff_s * (1 - JITTER * self._jitter.random())
        self._changed()

    def undecided(self, *, probe: bool = False) -> None:
        """A job came back without telling anything of the level."""
        self.probing &= not probe
        self._changed()
