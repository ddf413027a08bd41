"""What is counted of a vLLM engine's cache, and how it travels: plain values that survive processes and add up.

Each side has a meter. A meter gives what happened since it was last asked (`take`), at most every `EVERY_S` while the
engine is busy, None where nothing did: so whoever adds all of it up has counted everything once, also where several
ranks report. What belongs to blocks is counted by the planner, for all ranks in one; bytes, queues and faults of the
tiers are counted by each rank, and are sums over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tiercache.config_remote import REMOTE_NAME
from tiercache.integrations.vllm_requests import RequestState
from tiercache.mover import Mover
from tiercache.planner import Planner
from tiercache.planner.finds import Finds

__all__ = [
    "METRICS",
    "PREFIX",
    "Metric",
    "RankMeter",
    "SchedulerCounters",
    "SchedulerMeter",
    "add_up",
    "result_of",
    "split_key",
    "summary",
]

PREFIX = "vllm:tiercache_"
"""vLLM lists only metrics whose names begin with `vllm:`."""
EVERY_S = 0.1
"""A busy engine makes steps of a millisecond."""
AT_LATEST_S = 1.0
"""Some numbers change although no request and no job ends."""
BREAKER = {"closed": 0, "half-open": 1, "open": 2}
TTFT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)

Payload = dict[str, dict[str, Any]]
"""`counters`: amounts by key. `gauges`: by key, values by who says so ("s": the scheduler's half, else the rank).
`samples`: lists by key. A key is a metric's name, or name|label."""
Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; its name in Prometheus is `PREFIX` + name."""

    name: str
    kind: Kind
    text: str
    label: str = ""
    """Its own label, beside vLLM's; "": none."""


METRICS: tuple[Metric, ...] = (
    Metric(
        "ttft_seconds",
        "histogram",
        "Seconds from a request's arrival to the end of its last prefill step; result: hit, partial, miss or none, by "
        "how much of what the engine lacked of the prompt's full blocks was offered (none: it lacked nothing)",
        "result",
    ),
    Metric("lookup_tokens", "counter", "Prompt tokens that were looked up: those that the engine did not have itself"),
    Metric("promised_tokens", "counter", "Tokens that the engine was told it need not compute, once they are loaded"),
    Metric("loaded_tokens", "counter", "Promised tokens whose KV was loaded"),
    Metric("failed_tokens", "counter", "Promised tokens that did not come and were recomputed"),
    Metric("loads", "counter", "Requests that waited for a load"),
    Metric("stores", "counter", "Stores of which at least one block was taken"),
    Metric("stored_tokens", "counter", "Tokens whose KV was taken to be stored"),
    Metric("stores_cut", "counter", "Attempts to store that were refused or cut short, by reason", "reason"),
    Metric("stores_fenced", "counter", "Stores that a step waited for or called off, since it overwrites their blocks"),
    Metric("resets", "counter", "Resets: nothing stored before is found again"),
    Metric("recovered_blocks", "gauge", "Blocks that were there from before when the engine started"),
    Metric("cold_start", "gauge", "1: the engine started with nothing, and why", "reason"),
    Metric("tier_hit_tokens", "counter", "Tokens that loads took from this tier", "tier"),
    Metric("tier_read_bytes", "counter", "Bytes of KV copied out of this tier, all ranks", "tier"),
    Metric("tier_written_bytes", "counter", "Bytes of KV copied into this tier, all ranks", "tier"),
    Metric("tier_blocks", "gauge", "Blocks that have a place here: readable, being written, or still in use", "tier"),
    Metric("tier_capacity_blocks", "gauge", "Blocks that have room here", "tier"),
    Metric("tier_written_blocks", "counter", "Blocks that became readable here by a store or a demotion", "tier"),
    Metric("tier_evicted_blocks", "counter", "Blocks that left this tier to make room", "tier"),
    Metric("tier_dropped_blocks", "counter", "Evicted blocks that were the last copy although a tier is below", "tier"),
    Metric("tier_bad_blocks", "counter", "Blocks found wrong on some rank when they were read", "tier"),
    Metric("tier_checksum_failures", "counter", "Blocks whose checksum was wrong, all ranks", "tier"),
    Metric("tier_io_errors", "counter", "Reads and writes that failed, all ranks", "tier"),
    Metric("tier_breaker", "gauge", "0: in use, 1: one job tries whether it works again, 2: offline", "tier"),
    Metric("tier_breaker_trips", "counter", "How often this tier went offline", "tier"),
    Metric("tier_queued_jobs", "gauge", "Jobs of which no thread has begun some part, all ranks", "tier"),
    Metric("tier_delayed_jobs", "gauge", "Jobs that wait on purpose (write_after_s), all ranks", "tier"),
    Metric("tier_overdue_jobs", "counter", "Jobs that passed their deadline on some rank", "tier"),
    Metric("tier_lost_jobs", "gauge", "Overdue jobs whose thread has not returned, all ranks", "tier"),
    Metric("remote_waits", "counter", "Requests that waited for what the remote tier says it has"),
    Metric("remote_impatient", "counter", "Requests that went on without an answer, for their patience was over"),
    Metric("remote_finds", "counter", "Questions to the remote tier"),
    Metric("remote_finds_failed", "counter", "Questions that some rank got no answer to"),
    Metric("remote_asked_blocks", "counter", "Blocks that were asked for"),
    Metric("remote_found_blocks", "counter", "Blocks that it has, it said, on all ranks and one after another"),
    Metric("remote_fetched_blocks", "counter", "Blocks that came from there to all ranks, verified"),
    Metric("remote_missing_blocks", "counter", "Blocks that it was to have, and did not bring, or not in time"),
    Metric(
        "remote_wrong_blocks",
        "counter",
        "Blocks that did not come, for what it brought is not what it should be",
    ),
    Metric("remote_written_blocks", "counter", "Blocks that it took from all ranks"),
    Metric("remote_refused_blocks", "counter", "Blocks that it did not take on some rank: it is full"),
    Metric("remote_dropped_blocks", "counter", "Blocks to be written there that were not, by reason", "reason"),
    Metric("remote_waiting_blocks", "gauge", "Blocks that wait to be written there"),
    Metric("remote_pressure", "gauge", "How full it said to be, 0 to 1, where it says so"),
    Metric("unexpected_errors", "counter", "Exceptions of tiers, catalog or mover that ended a job, all ranks"),
    Metric("commits_failed", "counter", "Commits of the catalog on disk that failed, all ranks"),
    Metric("lost_claims", "counter", "Blocks on disk that a restart would not find, all ranks"),
)
_KINDS = {each.name: each for each in METRICS}
_OF_ENGINE = {
    "asked": "lookup_tokens",
    "promised": "promised_tokens",
    "loaded": "loaded_tokens",
    "failed": "failed_tokens",
    "loads": "loads",
    "stores": "stores",
    "stored": "stored_tokens",
    "fenced": "stores_fenced",
    "resets": "resets",
    "waits": "remote_waits",
    "impatient": "remote_impatient",
}
"""Attributes of the scheduler's own counters."""
_OF_LEVEL = {
    "written": "tier_written_blocks",
    "evicted": "tier_evicted_blocks",
    "dropped_in_place": "tier_dropped_blocks",
    "bad": "tier_bad_blocks",
    "overdue_jobs": "tier_overdue_jobs",
}
"""Of the planner's counters per level."""
_OF_REMOTE = {
    "finds": "remote_finds",
    "finds_failed": "remote_finds_failed",
    "blocks_asked": "remote_asked_blocks",
    "blocks_found": "remote_found_blocks",
    "fetched": "remote_fetched_blocks",
    "missing": "remote_missing_blocks",
    "wrong": "remote_wrong_blocks",
    "written": "remote_written_blocks",
    "writes_refused": "remote_refused_blocks",
}
"""Of the planner's counters of a key tier."""
_OF_MOVER_LEVEL = {
    "bytes_read": "tier_read_bytes",
    "bytes_written": "tier_written_bytes",
    "checksum_failures": "tier_checksum_failures",
    "io_errors": "tier_io_errors",
}
_OF_MOVER = {
    "unexpected_errors": "unexpected_errors",
    "commit_failures": "commits_failed",
    "lost_claims": "lost_claims",
}


@dataclass(slots=True)
class SchedulerCounters:
    """What happened so far. Tokens unless it says otherwise."""

    asked: int = 0
    """Of prompts that were looked up, past what the engine had itself."""
    promised: int = 0
    loaded: int = 0
    failed: int = 0
    """Promised, but did not come."""
    stored: int = 0
    loads: int = 0
    stores: int = 0
    stores_cut: int = 0
    fenced: int = 0
    """Stores that a step had to wait for, or that were called off, since it overwrites their blocks."""
    resets: int = 0
    waits: int = 0
    """Requests that waited for what a remote tier says."""
    impatient: int = 0
    """Times that one did not wait any longer."""


def split_key(key: str) -> tuple[Metric, str]:
    """The metric of a key, and its label's value ("": it has none). KeyError."""
    name, _, label = key.partition("|")
    return _KINDS[name], label


def add_up(into: Payload, other: Mapping[str, Mapping[str, Any]]) -> None:
    """Add what another payload says to this one; of gauges the latest value of each side counts."""
    counters = into.setdefault("counters", {})
    for key, amount in other.get("counters", {}).items():
        counters[key] = counters.get(key, 0) + amount
    gauges = into.setdefault("gauges", {})
    for key, values in other.get("gauges", {}).items():
        gauges[key] = {**gauges.get(key, {}), **values}
    samples = into.setdefault("samples", {})
    for key, values in other.get("samples", {}).items():
        samples[key] = [*samples.get(key, ()), *values]


def summary(payload: Mapping[str, Mapping[str, Any]]) -> dict[str, int | float]:
    """A line for the log: what happened, gauges added up over ranks, of samples their number and mean."""
    found: dict[str, int | float] = dict(payload.get("counters", {}))
    found |= {key: sum(values.values()) for key, values in payload.get("gauges", {}).items()}
    for key, values in payload.get("samples", {}).items():
        found |= {f"{key} count": len(values), f"{key} mean": round(sum(values) / len(values), 4)}
    return found


def result_of(state: RequestState, block_tokens: int) -> str:
    """How much was offered of what the engine lacked of the prompt's full blocks when it last asked.

    "hit": all of it, "partial": some, "miss": nothing, "none": it lacked nothing (its own cache had it all, or the
    prompt is shorter than a block). A load that failed was offered all the same, unless the engine asked again.
    """
    full = state.request.num_prompt_tokens // block_tokens * block_tokens
    lacking, offered = full - state.local_blocks * block_tokens, state.answer[2]
    if lacking <= 0:
        return "none"
    if offered <= 0:
        return "miss"
    return "hit" if offered >= lacking else "partial"


class _Since:
    """Turns totals into what was added since the last time, and leaves out gauges where nothing changed at all."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._totals: dict[str, float] = {}
        self._gauges: dict[str, float] = {}

    def take(
        self, totals: dict[str, float], gauges: dict[str, float], samples: dict[str, list[float]]
    ) -> Payload | None:
        """None: nothing to say."""
        before = self._totals  # zeros are told once, so that every line is there from the start
        counters = {key: total - before.get(key, 0) for key, total in totals.items() if total != before.get(key)}
        if not counters and not samples and gauges == self._gauges:
            return None
        self._totals, self._gauges = totals, gauges
        told = {key: {self._who: value} for key, value in gauges.items()}
        return {"counters": counters, "gauges": told, "samples": samples}


class RankMeter:
    """Of one rank. `changed` is set by whoever knows that a job ended."""

    def __init__(self, rank: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.changed = True
        self._since = _Since(str(rank))
        self._clock = clock
        self._next = self._at_latest = 0.0

    def take(self, mover: Mover, draining: bool) -> Payload | None:
        """What the mover did. draining: the engine has nothing else to do and may stop making steps any time."""
        now = self._clock()
        if now < self._at_latest and not (self.changed and (draining or now >= self._next)):
            return None
        self.changed, self._next, self._at_latest = False, now + EVERY_S, now + AT_LATEST_S
        stats = mover.stats()
        totals: dict[str, float] = {name: getattr(stats, attribute) for attribute, name in _OF_MOVER.items()}
        gauges: dict[str, float] = {}
        for level in stats.levels:
            for attribute, name in _OF_MOVER_LEVEL.items():
                totals[f"{name}|{level.name}"] = getattr(level, attribute)
            gauges[f"tier_queued_jobs|{level.name}"] = level.queued
            gauges[f"tier_delayed_jobs|{level.name}"] = level.delayed
            gauges[f"tier_lost_jobs|{level.name}"] = level.lost
        return self._since.take(totals, gauges, {})


class SchedulerMeter:
    """Of the scheduler's half: what was asked, promised and decided, and when first tokens came."""

    def __init__(
        self,
        block_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """wall: the clock by which the engine notes when a request arrived."""
        self._block_tokens = block_tokens
        self._clock, self._wall = clock, wall
        self._since = _Since("s")
        self._prefills: dict[str, RequestState] = {}
        """Requests that run and have no token yet."""
        self._samples: dict[str, list[float]] = {}
        self._version = -1
        self._next = self._at_latest = 0.0

    def begins(self, state: RequestState) -> None:
        """A request is scheduled for the first time."""
        self._prefills[state.request.request_id] = state

    def ends(self, request: Any) -> None:
        """A request is over, maybe with its first token."""
        state = self._prefills.pop(request.request_id, None)
        if state is not None and getattr(request, "num_output_tokens", False):
            self._note(state)

    def _note(self, state: RequestState) -> None:
        seconds = max(0.0, self._wall() - state.request.arrival_time)
        self._samples.setdefault(f"ttft_seconds|{result_of(state, self._block_tokens)}", []).append(seconds)

    def take(
        self, version: int, counters: SchedulerCounters, planner: Planner | None, cold_reason: str, draining: bool
    ) -> Payload | None:
        """What happened since the last time. Called once the output of a step was taken over.

        version: changes whenever the planner decided or learnt something. cold_reason: why nothing was found at the
        start, "" where something was. draining: no request is left, and the engine may stop making steps any time.
        """
        if self._prefills:
            for name, state in list(self._prefills.items()):
                if getattr(state.request, "num_output_tokens", False):
                    self._note(self._prefills.pop(name))
        now = self._clock()
        changed = version != self._version or self._samples
        if now < self._at_latest and not (changed and (draining or now >= self._next)):
            return None
        self._version, self._next, self._at_latest = version, now + EVERY_S, now + AT_LATEST_S
        samples, self._samples = self._samples, {}
        totals: dict[str, float] = {name: getattr(counters, attribute) for attribute, name in _OF_ENGINE.items()}
        gauges: dict[str, float] = {}
        if planner is not None:
            self._of_planner(planner, totals, gauges)
            if cold_reason:
                gauges[f"cold_start|{cold_reason}"] = 1.0
        return self._since.take(totals, gauges, samples)

    def _of_planner(self, planner: Planner, totals: dict[str, float], gauges: dict[str, float]) -> None:
        whole, state = planner.totals(), planner.state
        gauges["recovered_blocks"] = whole.recovered
        for reason, count in whole.stores_cut.items():
            totals[f"stores_cut|{reason}"] = count
        levels: Sequence[Any] = planner.level_counters()
        for level, (spec, counted) in enumerate(zip(planner.levels, levels, strict=True)):
            table, breaker = state.residency.tables[level], state.breakers[level]
            for attribute, name in _OF_LEVEL.items():
                totals[f"{name}|{spec.name}"] = getattr(counted, attribute)
            totals[f"tier_hit_tokens|{spec.name}"] = counted.hits * self._block_tokens
            totals[f"tier_breaker_trips|{spec.name}"] = breaker.trips
            gauges[f"tier_breaker|{spec.name}"] = BREAKER[breaker.state]
            gauges[f"tier_blocks|{spec.name}"] = table.capacity - table.free - table.lost
            gauges[f"tier_capacity_blocks|{spec.name}"] = table.capacity
        if planner.finds is not None:
            self._of_remote(planner, planner.finds, totals, gauges)

    def _of_remote(self, planner: Planner, finds: Finds, totals: dict[str, float], gauges: dict[str, float]) -> None:
        state, name = planner.state, REMOTE_NAME
        counted, breaker = state.counters[finds.level], state.breakers[finds.level]
        totals[f"tier_hit_tokens|{name}"] = counted.hits * self._block_tokens
        totals[f"tier_overdue_jobs|{name}"] = counted.overdue_jobs
        totals[f"tier_breaker_trips|{name}"] = breaker.trips
        gauges[f"tier_breaker|{name}"] = BREAKER[breaker.state]
        for attribute, metric in _OF_REMOTE.items():
            totals[metric] = getattr(finds.counters, attribute)
        for reason, blocks in finds.counters.writes_dropped.items():
            totals[f"remote_dropped_blocks|{reason}"] = blocks
        writes = planner.remote_writes
        if writes is not None:
            gauges["remote_waiting_blocks"] = writes.waiting_blocks
            if writes.rate.pressure is not None:
                gauges["remote_pressure"] = writes.rate.pressure
