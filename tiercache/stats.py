"""Stats: a snapshot of everything the cache counts, as plain values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from tiercache.assembly import Stack
from tiercache.config import Settings
from tiercache.directory import StoreDirectory
from tiercache.slots import FREE, LOST

__all__ = ["CacheStats", "TierStats", "collect"]


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier. Counts are blocks since the start unless the name says otherwise; see `planner.counters`."""

    name: str
    capacity: int
    """Slots."""
    free: int
    held: int
    """Slots that are neither free nor lost."""
    lost: int
    """Slots whose job is overdue."""
    pinned: int
    online: bool
    breaker: str
    trips: int
    """How often the breaker opened."""
    jobs: int
    """Jobs in flight."""
    hits: int
    written: int
    promoted: int
    evicted: int
    demoted: int
    dropped_in_place: int
    detached: int
    failed_reads: int
    failed_writes: int
    bad: int
    healed: int
    overdue_jobs: int
    lost_claims: int
    read_nbytes: int
    """Payload copied out of this tier."""
    read_s: float
    """Thread seconds of those copies."""
    written_nbytes: int
    """Payload copied into this tier."""
    write_s: float
    checksum_failures: int
    io_errors: int


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The whole cache."""

    tiers: tuple[TierStats, ...]
    switch: str
    namespace: str
    """"" where the directory is the identity: one directory per model."""
    layout: dict[str, Any] | None
    blocks: int
    """Blocks in the index."""
    nodes: int
    """Runs they are kept in."""
    totals: dict[str, Any]
    """See `planner.counters.PlannerCounters`."""
    mover: dict[str, int]
    """Unexpected errors, delivery errors, commits, commit failures, lost claims."""
    directory: dict[str, Any] | None
    """Path, file system, remarks, cold-start reason, catalog counters; None without NVMe."""
    remote: dict[str, Any] | None = None
    """Of the key tier (None without one): what was asked, fetched and written (`planner.counters.RemoteCounters`),
    hints, the breaker and the switch, what is under way and waits, how fast it may be written to, what it says of
    itself, and per level in memory how many slots are charged and how many may be."""

    def as_dict(self) -> dict[str, Any]:
        """Nested plain values, ready for JSON."""
        return asdict(self)


def collect(settings: Settings, switch: str, stack: Stack | None, directory: StoreDirectory | None) -> CacheStats:
    """Read every counter. Under the planner's lock."""
    namespace = str(settings.namespace or "")
    if stack is None:
        place = None if directory is None else {"path": str(directory.path), "remarks": list(directory.remarks)}
        return CacheStats((), switch, namespace, None, 0, 0, {}, {}, place)
    planner, mover = stack.planner, stack.mover.stats()
    index = planner.state.residency.index
    tiers = tuple(_tier_stats(stack, level, mover.levels[level]) for level in range(len(stack.specs)))
    return CacheStats(
        tiers=tiers,
        switch=switch,
        namespace=namespace,
        layout=stack.layout.to_dict(),
        blocks=index.blocks,
        nodes=len(index.nodes),
        totals=asdict(planner.totals()),
        mover={
            "unexpected_errors": mover.unexpected_errors,
            "delivery_errors": mover.delivery_errors,
            "commits": mover.commits,
            "commit_failures": mover.commit_failures,
            "lost_claims": mover.lost_claims,
        },
        directory=_directory_stats(stack, directory),
        remote=_remote_stats(stack, mover.levels[-1].removed),
    )


def _tier_stats(stack: Stack, level: int, moved: Any) -> TierStats:
    state = stack.planner.state
    table, counters, breaker = state.residency.tables[level], state.counters[level], state.breakers[level]
    held = int(((table.state != FREE) & (table.state != LOST)).sum())
    return TierStats(
        name=stack.specs[level].name,
        capacity=table.capacity,
        free=table.free,
        held=held,
        lost=table.lost,
        pinned=int((table.pins > 0).sum()),
        online=state.online(level),
        breaker=breaker.state,
        trips=breaker.trips,
        jobs=state.credits[level].jobs,
        hits=counters.hits,
        written=counters.written,
        promoted=counters.promoted,
        evicted=counters.evicted,
        demoted=counters.demoted,
        dropped_in_place=counters.dropped_in_place,
        detached=counters.detached,
        failed_reads=counters.failed_reads,
        failed_writes=counters.failed_writes,
        bad=counters.bad,
        healed=counters.healed,
        overdue_jobs=counters.overdue_jobs,
        lost_claims=counters.lost_claims,
        read_nbytes=moved.bytes_read,
        read_s=moved.read_s,
        written_nbytes=moved.bytes_written,
        write_s=moved.write_s,
        checksum_failures=moved.checksum_failures,
        io_errors=moved.io_errors,
    )


def _remote_stats(stack: Stack, removed: int) -> dict[str, Any] | None:
    finds, quota, state = stack.planner.finds, stack.planner.quota, stack.planner.state
    writes, keyed = stack.planner.remote_writes, getattr(stack.mover, "keyed", None)
    if finds is None or quota is None or writes is None:
        return None
    breaker, rate = state.key_breaker, writes.rate
    memory = [level for level, spec in enumerate(stack.specs) if not spec.persistent]
    return {
        **asdict(finds.counters),
        "hints": len(finds.hints),
        "finds_under_way": len(finds.under_way),
        "finds_waiting": finds.waiting,
        "jobs": state.credits[finds.level].jobs,
        "lost_jobs": state.credits[finds.level].lost_jobs + writes.lost,
        "enabled": breaker.enabled,
        "online": state.online(finds.level),
        "breaker": breaker.state,
        "trips": breaker.trips,
        "hits": state.counters[finds.level].hits,
        "overdue_jobs": state.counters[finds.level].overdue_jobs,
        "failures_in_a_row": breaker.failures,
        "writes_under_way": len(writes.under_way) - writes.lost,
        "writes_waiting": len(writes.runs),
        "write_blocks_waiting": writes.waiting_blocks,
        "write_jobs_allowed": rate.jobs,
        "write_job_nbytes": int(rate.job_nbytes),
        "write_nbytes_per_s": rate.measured,
        "write_pace_nbytes_per_s": rate.pace if rate.pace < math.inf else None,
        "write_slowdowns": rate.falls,
        "pressure": rate.pressure,
        "removed_wrong": removed,
        "endpoint": getattr(keyed, "endpoint", ""),
        "transport": "unknown" if keyed is None else keyed.transport,
        "quota": {stack.specs[level].name: quota.limit(level) for level in memory},
        "charged": {stack.specs[level].name: quota.charged(level) for level in memory},
        "evicted_by_quota": quota.evicted,
        "refused_by_quota": quota.refused,
        "became_ordinary": quota.ordinary,
    }


def _directory_stats(stack: Stack, directory: StoreDirectory | None) -> dict[str, Any] | None:
    if directory is None or stack.catalog is None:
        return None
    return {
        "path": str(directory.path),
        "store_id": directory.store_id,
        "fs_type": directory.fs_type,
        "remarks": list(directory.remarks),
        "direct_io": bool(getattr(stack.tiers[-1], "direct", False)),
        "cold_reason": stack.cold_reason,
        "counters": dict(directory.counters),
        "catalog": dict(stack.catalog.counters),
        "catalog_healthy": stack.catalog.healthy,
        "last_error": stack.catalog.last_error or getattr(stack.tiers[-1], "last_error", ""),
        "pending_slots": stack.catalog.pending_slots,
    }
