"""Counters of the mover."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields

__all__ = ["Counters", "LevelStats", "MoverStats"]


@dataclass(frozen=True, slots=True)
class LevelStats:
    """One level since the mover started. Blocks and bytes count per copy, not per block that exists."""

    name: str
    bytes_read: int
    """Payload copied out of this level."""
    bytes_written: int
    """Payload copied into this level."""
    read_s: float
    """Thread seconds spent on copies out of this level."""
    write_s: float
    """Thread seconds spent on copies into this level."""
    blocks_ok: int
    """Blocks of this level's jobs that arrived; a job belongs to the slower of its two levels."""
    blocks_failed: int
    checksum_failures: int
    removed: int
    """Values of a key tier that were found wrong, and removed there."""
    io_errors: int
    overdue: int
    """Jobs that passed their deadline while running."""
    lost: int
    """Jobs overdue now, whose thread has not returned."""
    busy_s: float
    """Seconds that threads of this level's pool were in a copy."""
    queued: int
    """Jobs with a part that no thread has begun."""
    delayed: int
    """Jobs that may not start yet."""


@dataclass(frozen=True, slots=True)
class MoverStats:
    """A snapshot of everything the mover counts; `levels[i]` is level i."""

    levels: tuple[LevelStats, ...]
    unexpected_errors: int
    """Exceptions of a tier, a ledger or the mover itself that ended a job."""
    delivery_errors: int
    """Exceptions that came out of `deliver`."""
    commits: int
    commit_failures: int
    lost_claims: int
    """Slots reported in LostClaims."""


@dataclass(slots=True)
class _Level:
    bytes_read: int = 0
    bytes_written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0
    blocks_ok: int = 0
    blocks_failed: int = 0
    checksum_failures: int = 0
    removed: int = 0
    io_errors: int = 0
    overdue: int = 0
    lost: int = 0
    busy_s: float = 0.0


@dataclass(slots=True)
class _Whole:
    unexpected_errors: int = 0
    delivery_errors: int = 0
    commits: int = 0
    commit_failures: int = 0
    lost_claims: int = 0


class Counters:
    """The numbers behind `MoverStats`; every method may be called from any thread."""

    def __init__(self, names: list[str]) -> None:
        self._lock = threading.Lock()
        self._names = names
        self._levels = [_Level() for _ in names]
        self._whole = _Whole()

    def add_level(self, level: int, **amounts: float) -> None:
        """Add to counters of one level by name."""
        with self._lock:
            counted = self._levels[level]
            for name, amount in amounts.items():
                setattr(counted, name, getattr(counted, name) + amount)

    def add(self, **amounts: int) -> None:
        """Add to counters of the mover as a whole by name."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._whole, name, getattr(self._whole, name) + amount)

    def snapshot(self, queued: list[int], delayed: list[int]) -> MoverStats:
        """Everything counted so far, with the queue lengths given per level."""
        with self._lock:
            levels = tuple(
                LevelStats(
                    name=name,
                    queued=queued[level],
                    delayed=delayed[level],
                    **{field.name: getattr(counted, field.name) for field in fields(counted)},
                )
                for level, (name, counted) in enumerate(zip(self._names, self._levels, strict=True))
            )
            return MoverStats(levels=levels, **{f.name: getattr(self._whole, f.name) for f in fields(self._whole)})
