"""What the planner counts. Plain integers, read through `Planner.stats()`."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["LevelCounters", "PlannerCounters", "RemoteCounters"]


@dataclass(slots=True)
class LevelCounters:
    """Of one level, since the planner was made. Blocks unless the name says otherwise."""

    hits: int = 0
    """Blocks that a load took from this level."""
    written: int = 0
    """Blocks that became resident here by a store, a demotion or a write."""
    promoted: int = 0
    """Blocks that became resident here by a load from below."""
    evicted: int = 0
    """Blocks that left this level to make room."""
    demoted: int = 0
    """Blocks copied from this level to a slower one."""
    dropped_in_place: int = 0
    """Evicted although this was the only copy and a slower level exists (no room or no way to copy it)."""
    detached: int = 0
    """Blocks taken away by invalidation, a new epoch, a failed parent, or since their time was over."""
    failed_reads: int = 0
    failed_writes: int = 0
    bad: int = 0
    """Blocks found wrong when read."""
    healed: int = 0
    """Bad blocks written again in place."""
    overdue_jobs: int = 0
    lost_claims: int = 0
    load_nbytes: int = 0
    load_seconds: float = 0.0
    store_nbytes: int = 0
    store_seconds: float = 0.0


@dataclass(slots=True)
class PlannerCounters:
    """Of the whole cache."""

    lookups: int = 0
    lookup_blocks: int = 0
    """Whole blocks asked for."""
    found_blocks: int = 0
    """Of those, with a readable copy."""
    blocks_withheld: int = 0
    """Of those, not offered since a recompute was expected to be faster."""
    probes: int = 0
    """Jobs that only measured how fast a level is."""
    loads: int = 0
    loads_cut: int = 0
    """Loads that took fewer blocks than their match (holds, credits, room)."""
    loads_refused: int = 0
    stores: int = 0
    store_blocks_accepted: int = 0
    store_blocks_present: int = 0
    stores_cut: dict[str, int] = field(default_factory=dict)
    """By reason."""
    recovered: int = 0
    recovered_forgotten: int = 0
    expired: int = 0
    """Blocks whose time was over, and what continued them."""
    stale_epoch: int = 0
    """Calls and results of an earlier epoch."""


@dataclass(slots=True)
class RemoteCounters:
    """Of a key tier. Blocks unless the name says otherwise."""

    finds: int = 0
    """Questions sent."""
    finds_failed: int = 0
    """Questions that got no answer."""
    finds_refused: int = 0
    """Lookups that asked nothing, for too many finds waited."""
    blocks_asked: int = 0
    blocks_found: int = 0
    """Said to be there, as far as they follow each other."""
    fetched: int = 0
    """Arrived, and verified."""
    missing: int = 0
    """Asked for by a load, and not there, or not in time."""
    timeouts: int = 0
    """Jobs of any kind that ended by their deadline."""
    write_timeouts: int = 0
    """Of these, jobs that write: no request waited for them."""
    writes: int = 0
    """Jobs that write."""
    write_blocks_queued: int = 0
    written: int = 0
    """Taken by it."""
    writes_refused: int = 0
    """Not taken: it is full."""
    writes_dropped: dict[str, int] = field(default_factory=dict)
    """By reason: "full" (the queue), "gone" (left memory before its turn), "known" (it has them), "failed", "deadline",
    "behind" (of a run of which something was not taken), "offline", "off", "stale" (of an earlier epoch), ..."""
    wrong: int = 0
    """Of jobs in which a block was not what it should be, those that did not arrive."""
