"""Limits: the bounds that the planner counts, and what it has counted against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiercache.config_remote import RemoteWrite
from tiercache.types import LevelSpec

__all__ = ["LOAD_JOB_NBYTES", "Credits", "Limits", "RemoteLimits"]

LOAD_JOB_NBYTES = 64 << 20
"""What one job reads from a disk at most, unless that is less than 64 blocks: a fraction of its deadline's worth."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that the planner counts, per level unless said otherwise."""

    jobs: int = 64
    job_blocks: int = 64
    """A demotion of more blocks is split into jobs of this many; for loads see `load_job_blocks`."""
    queued_loads: int = 256
    read_deadline_s: float | None = 5.0
    write_deadline_s: float | None = 30.0
    copy_deadline_s: float | None = 30.0
    """Of copies between memory levels and the caller."""

    def in_flight_blocks(self, capacity: int) -> int:
        """Blocks of one level under copy in one direction (out of it: by loads, and by writes): a quarter of its slots,
        but at least one job's worth."""
        return max(capacity // 4, min(capacity, self.job_blocks))

    def load_job_blocks(self, ends: Sequence[LevelSpec]) -> int:
        """Blocks of one job of a load between these levels (the caller is none): up to eight times `job_blocks` within
        memory, as many as 64 MiB from a disk, for a job costs as much as copying a block or two. Two such jobs fit into
        what may be in flight at either end."""
        room = min(self.in_flight_blocks(spec.capacity) // 2 for spec in ends)
        if any(spec.persistent for spec in ends):
            room = min(room, LOAD_JOB_NBYTES // ends[0].block_nbytes)
        return max(self.job_blocks, min(8 * self.job_blocks, room))

    def held_blocks(self, capacity: int) -> int:
        """Blocks of one level that loads and pins may hold: half of its slots, at least one."""
        return max(1, capacity // 2)

    def delayed_blocks(self, capacity: int) -> int:
        """Blocks of one level that delayed writes may hold: half of its slots."""
        return capacity // 2


@dataclass(frozen=True, slots=True)
class RemoteLimits:
    """What the planner must know of a key tier; see `config_remote.Remote`."""

    quota: float = 0.2
    find_deadline_s: float | None = 1.0
    read_deadline_s: float | None = 1.0
    hint_s: float = 30.0
    missing_s: float = 2.0
    hint_blocks: int = 1 << 18
    pool_threads: int = 8
    waiting_finds: int = 64
    write: RemoteWrite = "never"
    write_deadline_s: float | None = 0.2
    write_threads: int = 0
    """Jobs that may write at once; each has a thread of its own beside the pool's others."""
    queued_writes: int = 256
    """Runs of blocks that wait to be written,"""
    queued_write_blocks: int = 8192
    """and their blocks."""
    min_blocks: int = 0
    """A prompt that does not reach so many blocks from here takes no part."""
    max_position: int | None = None
    """Blocks at this position or behind it take no part."""
    enabled: bool = True
    """Its kill switch at the start."""
    seed: int = 0
    """Of the jitter in its breaker's back-off."""


@dataclass(slots=True)
class Credits:
    """What is in flight at one level."""

    jobs: int = 0
    inbound: int = 0
    outbound: int = 0
    outbound_writes: int = 0
    """Of `outbound`, blocks being copied down."""
    held: int = 0
    """Blocks that loads, Loaded and explicit pins hold, each counted once."""
    queued: int = 0
    """Blocks that loads are yet to submit a job for."""
    shared: int = 0
    """Blocks of this level being written to a key tier; they count nowhere else."""
    others: int = 0
    """Of a key tier: finds and writes in flight, which `jobs` does not count."""
    delayed: int = 0
    """Source blocks of jobs that wait for `write_after`, or were told not to wait."""
    hastened: int = 0
    """Of `delayed`, those that were told not to wait."""
    lost_jobs: int = 0
