"""Every exception that tiercache raises on purpose.

Misuse raises one of these. I/O trouble never does: it is a counted miss.
"""

from __future__ import annotations

__all__ = [
    "CacheClosedError",
    "ConfigError",
    "DirectoryInUseError",
    "FormatVersionError",
    "LayoutError",
    "NotDurableError",
    "TierCacheError",
    "WorkerThreadError",
]


class TierCacheError(Exception):
    """Base of all errors of this package."""


class ConfigError(TierCacheError, ValueError):
    """A setting is wrong. The message names the field, its value and what would be right."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{field} = {value!r}: {remedy}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        """For pickle: an error may have to cross from one process to another."""
        return type(self), (self.field, self.value, self.remedy)


class LayoutError(TierCacheError, ValueError):
    """A payload does not have the shape or dtype that this cache holds."""


class DirectoryInUseError(TierCacheError):
    """Another cache, in this or another process, owns the NVMe directory."""


class FormatVersionError(TierCacheError):
    """The NVMe directory was written by a version whose format this one does not know."""


class CacheClosedError(TierCacheError, RuntimeError):
    """The cache was closed, or it was inherited through fork and is dead in this process."""


class WorkerThreadError(TierCacheError, RuntimeError):
    """A blocking call (flush, close, result) was made from one of the cache's own threads."""


class NotDurableError(TierCacheError, TimeoutError):
    """What must survive a crash (a new epoch, an invalidation) could not be written in time.

    It holds in this process. Until a later commit succeeds, a crash may bring the old state back.
    """
