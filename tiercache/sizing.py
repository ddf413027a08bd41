"""Sizing: what a workload asks of memory, disk and bandwidth. Pure arithmetic; each figure carries its formula.

Sizes are bytes, rates bytes per second, times seconds. In words, sizes are in powers of 1024 (GiB) and rates in powers
of 1000 (GB/s), as drives and links are sold.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tiercache.config import format_size
from tiercache.errors import ConfigError
from tiercache.sizing_model import TokenKV

__all__ = ["Figure", "Missing", "Plan", "Workload", "plan"]

HOT_POOL = 2
"""Times the concurrent KV that the fast tier should hold: what runs, and what comes next."""
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class Workload:
    """What is known of the use; None where it is not. ConfigError, which names the option, for what is out of range."""

    block_tokens: int = 16
    concurrency: int | None = None
    """Requests at a time."""
    context_tokens: int | None = None
    """Of one request."""
    latency_s: float | None = None
    """That loading may take until the first token (TTFT target)."""
    requests_per_s: float | None = None
    hit_ratio: float | None = None
    """Share of tokens that the cache has, 0 to 1."""
    prefill_tokens_per_s: float | None = None
    """Of all GPUs of one replica together."""
    dram: int | None = None
    """Bytes, of all ranks together."""
    nvme: int | None = None
    nvme_gbps: float | None = None
    """10^9 bytes per second, of all ranks together."""
    days: float | None = None

    def __post_init__(self) -> None:
        """Check."""
        for each in fields(self):
            value = getattr(self, each.name)
            option = "--" + {"latency_s": "latency"}.get(each.name, each.name).replace("_", "-")
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
                raise ConfigError(option, value, "a finite number is needed")
            if each.name == "hit_ratio":
                if not 0 <= value <= 1:
                    raise ConfigError(option, value, "a share from 0 to 1 is needed")
            elif value <= 0:
                raise ConfigError(option, value, "a number above 0 is needed")


@dataclass(frozen=True, slots=True)
class Figure:
    """One answer."""

    name: str
    what: str
    value: float
    unit: str
    """B, B/s, s, or "" for a count."""
    text: str
    """The value in words."""
    formula: str
    """With the numbers in it."""


@dataclass(frozen=True, slots=True)
class Missing:
    """What could not be computed, and the options that it needs."""

    what: str
    give: tuple[str, ...]


@dataclass(slots=True)
class Plan:
    """The answers to one question, in the order to be read. Filled by `plan` only."""

    figures: list[Figure] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def value(self, name: str) -> float | None:
        """A figure by name, None where it was not computed."""
        return next((each.value for each in self.figures if each.name == name), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON: raw numbers, units and formulas."""
        return asdict(self)

    def add(self, name: str, what: str, value: float, unit: str, formula: str) -> float:
        """One more answer."""
        self.figures.append(Figure(name, what, value, unit, _in_words(value, unit), formula))
        return value

    def lacks(self, what: str, **given: object) -> None:
        """One that cannot be given: names the options that are None."""
        names = tuple("--" + name.replace("_", "-") for name, value in given.items() if value is None)
        self.missing.append(Missing(what, names))


def plan(kv: TokenKV, work: Workload) -> Plan:
    """Everything that can be said of this workload. Deterministic; linear in bytes per token, contexts and requests."""
    made = Plan(notes=list(kv.notes))
    _bytes(made, kv, work)
    context = _contexts(made, kv, work)
    _bandwidth(made, kv, work, context)
    _writes(made, kv, work)
    for name, tier, size in (("dram", "DRAM", work.dram), ("nvme", "NVMe", work.nvme)):
        if size is not None and context is not None:
            fits = int(size // context)
            made.add(f"{name}_contexts", f"contexts in {tier}", fits, "", f"{_b(size)} / {_b(context)}")
    hot = made.value("hot_pool")
    if hot is not None and work.dram is not None:
        formula = f"{_b(work.dram)} / {_b(hot)}"
        made.add("dram_of_hot_pool", "DRAM holds of the hot pool", work.dram / hot, "x", formula)
    return made


def _bytes(made: Plan, kv: TokenKV, work: Workload) -> None:
    made.add("token_rank", "KV of a token, per rank", kv.rank_nbytes, "B", kv.formula)
    if kv.ranks > 1:
        made.add("token", "KV of a token, all ranks", kv.nbytes, "B", f"{kv.rank_nbytes:,} B x {kv.ranks} ranks")
    size, block = work.block_tokens, kv.rank_nbytes * work.block_tokens
    made.add("block_rank", "a block, per rank", block, "B", f"{kv.rank_nbytes:,} B/token x {size} tokens")
    if kv.ranks > 1:
        made.add("block", "a block, all ranks", block * kv.ranks, "B", f"{_b(block)} x {kv.ranks} ranks")


def _contexts(made: Plan, kv: TokenKV, work: Workload) -> int | None:
    """Bytes of one context."""
    tokens, many = work.context_tokens, work.concurrency
    if tokens is None:
        made.lacks("KV of a context, and all that follows from it", context_tokens=tokens)
        return None
    context = kv.nbytes * tokens
    made.add("context", "KV of one context", context, "B", f"{kv.nbytes:,} B/token x {tokens:,} tokens")
    if many is None:
        made.lacks("concurrent KV and hot pool", concurrency=many)
        return context
    formula = f"{kv.nbytes:,} B/token x {tokens:,} tokens x {many:,} requests"
    at_once = made.add("concurrent", "concurrent KV", context * many, "B", formula)
    made.add("hot_pool", "hot pool, at least", HOT_POOL * at_once, "B", f"{HOT_POOL} x {_b(at_once)}")
    return context


def _bandwidth(made: Plan, kv: TokenKV, work: Workload, context: int | None) -> None:
    speed, tokens = work.prefill_tokens_per_s, work.context_tokens
    if context is not None and work.latency_s is not None and work.concurrency is not None:
        need = context * work.concurrency / work.latency_s
        formula = f"{_b(context)} x {work.concurrency:,} requests / {_s(work.latency_s)}"
        made.add("load_bandwidth", "bandwidth to load them in time", need, "B/s", formula)
    else:
        given = {"context_tokens": context, "concurrency": work.concurrency, "latency": work.latency_s}
        made.lacks("bandwidth to load contexts in time", **given)
    if speed is None:
        made.lacks("break-even bandwidth, prefill time", prefill_tokens_per_s=speed)
    else:
        formula = f"{kv.nbytes:,} B/token x {speed:,.10g} tokens/s"
        made.add("break_even", "break-even: a load pays above", kv.nbytes * speed, "B/s", formula)
        if tokens is not None:
            made.add(
                "prefill_time", "prefill of a context", tokens / speed, "s", f"{tokens:,} / {speed:,.10g} tokens/s"
            )
    if work.nvme_gbps is None:
        made.lacks("load time from NVMe", nvme_gbps=None)
    elif context is not None:
        rate = work.nvme_gbps * 1e9
        load = made.add(
            "nvme_load_time", "load of a context from NVMe", context / rate, "s", f"{_b(context)} / {_r(rate)}"
        )
        if speed is not None and tokens is not None:
            formula = f"{_s(tokens / speed)} / {_s(load)}"
            made.add("load_gain", "load from NVMe is faster by", tokens / speed / load, "x", formula)


def _writes(made: Plan, kv: TokenKV, work: Workload) -> None:
    requests, tokens, speed = work.requests_per_s, work.context_tokens, work.prefill_tokens_per_s
    miss = 1 - (work.hit_ratio or 0)
    if requests is not None and tokens is not None:
        rate = requests * tokens * miss * kv.nbytes
        formula = f"{requests:,.10g} requests/s x {tokens:,} tokens x {miss:.4g} missed x {kv.nbytes:,} B/token"
        if work.hit_ratio is None:
            made.notes.append(
                "without --hit-ratio every token is taken to be new: the write rate is the highest possible"
            )
    elif speed is not None:
        rate, formula = (
            speed * kv.nbytes,
            f"{speed:,.10g} tokens/s x {kv.nbytes:,} B/token (the GPUs prefill all the time)",
        )
    else:
        given = {"requests_per_s": requests, "context_tokens": tokens}
        made.lacks("write rate, drive writes per day, reach", **given)
        return
    made.add("write_rate", "new KV, and writes to NVMe at most", rate, "B/s", formula)
    if work.nvme is None:
        made.lacks("drive writes per day, reach of NVMe", nvme=None)
    else:
        formula = f"{_r(rate)} x 86,400 s / {_b(work.nvme)}"
        made.add("drive_writes", "drive writes per day", rate * _DAY_S / work.nvme, "", formula)
    if work.days is not None:
        formula = f"{_r(rate)} x 86,400 s x {work.days:,.10g} days"
        made.add("written", "written in that time", rate * _DAY_S * work.days, "B", formula)
    if work.dram is None:
        made.lacks("reach of DRAM", dram=None)
    for name, tier, size in (("dram", "DRAM", work.dram), ("nvme", "NVMe", work.nvme)):
        if size is not None and rate > 0:
            what = f"{tier} reaches back"
            made.add(f"{name}_reach", what, size / rate, "s", f"{_b(size)} / {_r(rate)}")


# -- numbers in words -----------------------------------------------------------------------------------------------


def _b(nbytes: float) -> str:
    return format_size(int(nbytes))


def _r(rate: float) -> str:
    for power, unit in ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")):
        if rate >= power:
            return f"{rate / power:.3g} {unit}" if rate / power < 100 else f"{rate / power:,.0f} {unit}"
    return f"{rate:.3g} B/s"


def _s(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for length, unit in ((_DAY_S, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * length:
            return f"{seconds / length:,.3g} {unit}" if seconds / length < 1000 else f"{seconds / length:,.0f} {unit}"
    return f"{seconds:.3g} s"


def _in_words(value: float, unit: str) -> str:
    if unit == "B":
        return f"{int(value):,} B" if value < 1 << 20 else _b(value)
    if unit in ("B/s", "s"):
        return _r(value) if unit == "B/s" else _s(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"
    return f"{number} {unit}".strip()
