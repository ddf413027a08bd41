"""The kill switch of a cache's key tier at run time."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["RemoteSwitch"]


class RemoteSwitch:
    """`TieredKVCache.remote`. Off, nothing is asked for, fetched from or written to the key tier, and nothing found
    there is offered; what waits ends at once, and what runs by its deadline. A cache without a key tier is never on."""

    def __init__(self, exists: bool, enabled: bool, changed: Callable[[], None]) -> None:
        """changed: called after each change."""
        self._exists = exists
        self._enabled = enabled
        self._changed = changed

    def __repr__(self) -> str:
        return f"RemoteSwitch({'on' if self.enabled else 'off' if self._exists else 'no key tier'})"

    @property
    def enabled(self) -> bool:
        """Does the key tier take part? (Whether it answers is told by `stats().remote["breaker"]`.)"""
        return self._exists and self._enabled

    def enable(self) -> None:
        """Use it, whatever TIERCACHE_REMOTE said at the start. CacheClosedError."""
        self._set(True)

    def disable(self) -> None:
        """Leave it alone from now on. CacheClosedError."""
        self._set(False)

    def _set(self, enabled: bool) -> None:
        self._enabled = enabled
        if self._exists:
            self._changed()
