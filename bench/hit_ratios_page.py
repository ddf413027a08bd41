"""docs/policy.md, from one results file of `bench.hit_ratios`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bench.machine import ROOT

__all__ = ["PAGE", "TARGETS", "Target", "markdown", "value_of"]

PAGE = ROOT / "docs" / "policy.md"

_HEAD = """\
# Which block leaves first

`policy="reuse"` (the default) or `policy="lru"`, in the configuration and for `tiercache replay --policy`.

**lru** evicts the leaf that was used longest ago. A request uses its whole path at once, so parents outlive their
children.

**reuse** evicts by last use plus a bonus (mostly negative) for the class of that use: `2 * gap * ln p`, where p is
the share of the blocks of that class that are used again before four times the capacity of the first tier has passed
through it, and gap is the mean time between two uses. The class is how many new blocks the request brought (powers of
two), how often the block was used before (0, 1, more), and whether it is a partial tail. So the long one-shot suffix
of a prompt leaves before the shared beginning of many, and what is learnt follows the load: old observations fade,
blocks that left are remembered as long as the window, p has a prior of 30 observations at the mean, and before there
are 30 it is leaf-first LRU exactly. Nothing in it is tied to a trace or a size. A persistent tier has the same order,
with a p and a gap of its own, over a window of twice its capacity; what a restart found there goes by last use alone.

It is counted by runs of blocks: a request costs a few microseconds per node of its path, whatever the blocks are
(`tiercache/policy/reuse.py`).

**Hints** say what no policy can know: `release(tokens)` when a conversation has ended. Below, "told of every end" is
a replay with `--hints perfect`, which releases each conversation after its last request.

## Token hit ratios

Of all prompt tokens, cold start included; one tier, its capacity in % of the trace's unique blocks; requests one
after another (`tiercache replay TRACE --no-data --in-flight 1 --dram 5%`). lru and reuse are the planner of the real
cache. arc, s3fifo, lru2 (unlimited memory of what left) and min are simulated block by block: min looks into the
future, and no policy finds more blocks.

"""


_SLOW = """\
## Over a slow tier

A block that is promoted keeps its copy on NVMe where that is at least five times as large as DRAM (`exclusive`: it
leaves), and partial tails are never written. `NVMe(max_writes_per_hit=N)` (`--max-writes-per-hit N`) writes a block
only where N such writes bring at least one hit: where the share of its class that is used again before the tier would
have let go of it is at least 1/N. So N is a price, the same for every class of blocks, and the last write that is made
is worth it; the average is better than N. It is also held: where hits do not come as expected and the measured writes
per hit rise over N, more is asked of a class until they do not. What is not worth its write leaves DRAM without one.
The same holds at the age of `write_after_s`; a flush and an orderly close write everything. It is off by default: what
was not written is not warm after a crash.

Below, blocks are written when DRAM evicts them, in % of the trace's unique blocks (`tiercache replay TRACE --no-data
--in-flight 1 --dram 1% --nvme 10% --max-writes-per-hit 6`). Each row is compared with two ways to write everything:

- **textbook**: exclusive caching block by block (`tiercache/sim/exclusive.py`). LRU in both levels, all that DRAM
  evicts is demoted, partial tails too, a block that is brought up leaves NVMe. What the targets are set against.
- **own exclusive**: `reuse` with `exclusive=True`. It writes less than the textbook: no partial tails, and a block that
  others hang on stays on NVMe when it is brought up, so that what is there can be reached after a crash.

"fewer" is how many times fewer blocks a row writes, "points" what it finds more or less, in % of all prompt tokens. One
N is not one loss: the smaller the tier, the less comes back before it is evicted there, and the more writes cost more
than N (synthetic at 1/10 %). Where all classes come back often enough, N changes nothing (claude_code, conversation at
5/50 %).

"""


@dataclass(frozen=True)
class Target:
    """A cell and what it must reach."""

    trace: str
    percent: float
    least: float
    stretch: float | None = None
    hints: str = "none"


TARGETS = (
    Target("conversation", 2, 0.130, 0.150),
    Target("conversation", 5, 0.228, 0.240),
    Target("conversation", 10, 0.297, 0.305),
    Target("synthetic", 10, 0.285, 0.300),
    Target("claude_code", 0.5, 0.530, 0.560),
    Target("conversation", 5, 0.300, hints="perfect"),
)
WORST_LOSS = 0.003
"""Against leaf-first LRU, on any trace at any capacity."""


def value_of(results: dict[str, Any], trace: str, percent: float, policy: str, **what: Any) -> dict[str, Any] | None:
    """One cell of the results; None where it was not measured. what: other fields of a cell, where not as usual."""
    usual = {"full": False, "hints": "none", "below": None, "exclusive": None, "max_writes_per_hit": None}
    wanted = {"trace": trace, "percent": percent, "policy": policy, **usual, **what}
    return next((cell for cell in results["cells"] if all(cell[key] == value for key, value in wanted.items())), None)


def markdown(results: dict[str, Any], name: str) -> str:
    """The page."""
    cells = results["cells"]
    traces = list(dict.fromkeys(cell["trace"] for cell in sorted(cells, key=lambda cell: cell["blocks"], reverse=True)))
    facts = results["machine"]
    commit = results["commit"]["id"] + (" with changes" if results["commit"]["dirty"] else "")
    lines = [_HEAD.rstrip(), ""]
    for trace in sorted(traces):
        lines += _table(results, trace)
    lines += [_SLOW.rstrip(), ""]
    for trace in sorted(traces):
        lines += _slow_table(results, trace)
    lines += ["## Targets", "", *_targets(results), "", "## Where it was measured", ""]
    lines += [
        f"`bench/results/hit-ratios/{name}`: {results['date']}, commit {commit}, `{results['command']}` "
        f"(`make hit-ratios`), {results['seconds'] // 60} min {results['seconds'] % 60} s; {facts['cpu']}, "
        f"{facts['cores']} cores, Python {facts['python']}, numpy {facts['packages']['numpy']}.",
        "",
    ]
    if results["missing"]:
        lines += [f"Not there: {', '.join(results['missing'])}.", ""]
    return "\n".join(lines)


def _table(results: dict[str, Any], trace: str) -> list[str]:
    mine = [cell for cell in results["cells"] if cell["trace"] == trace and cell["below"] is None]
    percents = sorted({cell["percent"] for cell in mine if cell["hints"] == "none"})
    infinite = max(cell["infinite"] for cell in mine if not cell["full"])
    rows = [
        f"**{trace}**: {mine[0]['blocks']:,} block accesses; a cache without bounds finds {infinite:.4f}.",
        "",
        "| | " + " | ".join(f"{percent:g} %" for percent in percents) + " |",
        "|---|" + "---|" * len(percents),
    ]
    kinds: list[tuple[str, dict[str, Any]]] = [(policy, {}) for policy in ("lru", "reuse")]
    kinds += [("arc", {}), ("s3fifo", {}), ("lru2", {}), ("min", {})]
    kinds += [("lru", {"full": True}), ("reuse", {"full": True})]
    kinds += [("lru", {"hints": "perfect"}), ("reuse", {"hints": "perfect"})]
    for policy, what in kinds:
        found = [value_of(results, trace, percent, policy, **what) for percent in percents]
        if any(found):
            label = policy + (", full blocks only" if what.get("full") else ", told of every end" if what else "")
            cells = [f"{cell['hit_ratio']:.4f}" if cell else "" for cell in found]
            if policy == "reuse":
                label, cells = f"**{label}**", [f"**{cell}**" if cell else "" for cell in cells]
            rows.append(f"| {label} | {' | '.join(cells)} |")
    return [*rows, ""]


def _slow_table(results: dict[str, Any], trace: str) -> list[str]:
    lines = []
    mine = [cell for cell in results["cells"] if cell["trace"] == trace and cell["below"] is not None]
    for fast, slow in dict.fromkeys((cell["percent"], cell["below"]) for cell in mine):
        rows = [cell for cell in mine if (cell["percent"], cell["below"]) == (fast, slow)]
        lines += [f"**{trace}**, DRAM {fast:g} %, NVMe {slow:g} %:", "", *_slow_rows(rows), ""]
    return lines


def _textbook(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in rows if each["policy"] == "exclusive")


def _own_exclusive(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return next(each for each in rows if each["policy"] == "reuse" and each["exclusive"])


def _slow_rows(rows: list[dict[str, Any]]) -> list[str]:
    against = (_textbook(rows), _own_exclusive(rows))
    lines = [
        "| | in DRAM | in all | written | fewer than textbook | points | fewer than own exclusive | points |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        limit = each["max_writes_per_hit"]
        how = "exclusive" if each["exclusive"] else "" if limit is None else f"at most {limit:g} writes a hit"
        label = ", ".join(filter(None, ("textbook" if each is against[0] else each["policy"], how)))
        cells = [f"{each['fast']:.4f}", f"{each['hit_ratio']:.4f}", f"{each['writes']:,}"]
        for other in against:
            points = 100 * (each["hit_ratio"] - other["hit_ratio"])
            cells += [f"{other['writes'] / each['writes']:.2f}", f"{points:+.2f}"]
        lines.append(f"| {' | '.join([label, *cells])} |")
    return lines


FEWER_WRITES = (("claude_code", 1.0, 4.0), ("synthetic", 2.0, 3.0), ("conversation", 1.0, 1.7))
"""Trace, DRAM, and how many times fewer blocks than textbook exclusive must be written."""
MOST_LOST = 0.005
"""Of hits."""


def fewest_writes(results: dict[str, Any], trace: str, fast: float, own: bool) -> tuple[float, dict[str, Any]] | None:
    """Of the rows of `reuse` that lose half a point at most, the one that writes least, and how many times fewer than
    the textbook, or than our own exclusive mode. None where it was not measured."""
    rows = [
        each
        for each in results["cells"]
        if each["trace"] == trace and each["percent"] == fast and each["below"] is not None
    ]
    if not rows:
        return None
    always = _own_exclusive(rows) if own else _textbook(rows)
    kept = [
        each
        for each in rows
        if each["policy"] == "reuse" and not each["exclusive"] and each["hit_ratio"] >= always["hit_ratio"] - MOST_LOST
    ]
    best = min(kept, key=lambda each: each["writes"], default=always)
    return always["writes"] / best["writes"], best


def _fewer_writes(results: dict[str, Any]) -> list[str]:
    lines = []
    for trace, fast, times in FEWER_WRITES:
        for own in (False, True):
            found = fewest_writes(results, trace, fast, own)
            if found is None:
                continue
            fewer, best = found
            limit = best["max_writes_per_hit"]
            how = (
                f"no limit, {fast:g}/{best['below']:g} %"
                if limit is None
                else f"N = {limit:g}, {fast:g}/{best['below']:g} %"
            )
            what = f"{trace}, times fewer writes than {'our own exclusive' if own else 'textbook exclusive'} ({how})"
            least = "" if own else f"{times:g}"
            reached = "stated" if own else "reached" if fewer >= times else "NOT REACHED"
            lines.append(f"| {what} | {least} | | **{fewer:.2f}** | {reached} |")
    return lines


def _targets(results: dict[str, Any]) -> list[str]:
    lines = ["| what | must reach | stretch | measured | |", "|---|---|---|---|---|"]
    for target in TARGETS:
        cell = value_of(results, target.trace, target.percent, "reuse", hints=target.hints)
        if cell is None:
            continue
        told = ", told of every end" if target.hints == "perfect" else ""
        reached = "reached" if cell["hit_ratio"] >= target.least else "NOT REACHED"
        stretch = "" if target.stretch is None else f"{target.stretch:.3f}"
        what = f"{target.trace}, {target.percent:g} %{told}"
        lines.append(f"| {what} | {target.least:.3f} | {stretch} | **{cell['hit_ratio']:.4f}** | {reached} |")
    for full in (False, True):
        loss, trace, percent = _worst(results, full)
        reached = "stated" if full else "reached" if loss >= -WORST_LOSS else "NOT REACHED"
        what = f"the worst of all, against lru{', full blocks only' if full else ''} ({trace}, {percent:g} %)"
        least = "" if full else f"{-WORST_LOSS:.3f}"
        lines.append(f"| {what} | {least} | | **{loss:+.4f}** | {reached} |")
    for trace, seconds in (("conversation", 10), ("claude_code", 90)):
        slowest = max(
            (
                cell["seconds"]
                for cell in results["cells"]
                if cell["trace"] == trace and cell["policy"] == "reuse" and cell["below"] is None
            ),
            default=None,
        )
        if slowest is not None:
            reached = "reached" if slowest <= seconds else "NOT REACHED"
            what = f"{trace}, slowest replay, seconds of one core"
            lines.append(f"| {what} | at most {seconds} | | **{slowest:.1f}** | {reached} |")
    return [*lines, *_fewer_writes(results)]


def _worst(results: dict[str, Any], full: bool) -> tuple[float, str, float]:
    """Where reuse finds least, compared with leaf-first LRU: the difference, trace, capacity."""
    return min(
        (cell["hit_ratio"] - lru["hit_ratio"], cell["trace"], cell["percent"])
        for cell in results["cells"]
        if cell["policy"] == "reuse" and cell["hints"] == "none" and cell["full"] == full and cell["below"] is None
        if (lru := value_of(results, cell["trace"], cell["percent"], "lru", full=full)) is not None
    )
