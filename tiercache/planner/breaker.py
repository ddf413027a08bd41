"""Breaker: takes a level offline after consecutive failures, lets one job probe it after a back-off."""

from __future__ import annotations

__all__ = ["Breaker"]


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
        self._backoff_s = first_backoff_s

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
        self._backoff_s = self.first_backoff_s

    def failed(self, now: float) -> None:
        """A job failed or is overdue."""
        self.failures += 1
        if self.retry_at is None:
            if self.failures < self.threshold:
                return
            self.trips += 1
        elif self.probing:
            self._backoff_s = min(self._backoff_s * 2, self.longest_backoff_s)
        else:
            return  # of a job that was under way when the level went offline: no news
        self.probing = False
        self.retry_at = now + self._backoff_s

    def undecided(self) -> None:
        """A job came back without telling anything of the level (cancelled, of an old epoch)."""
        self.probing = False
