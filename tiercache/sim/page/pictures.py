"""The pictures of a page, as SVG. Readable without colour: lines differ in dash and marker, areas in hatching.

They are as wide as a phone shows legibly. The same facts give the same bytes. Needs matplotlib (the extra `report`);
its state of the process is not touched.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from tiercache.sim.page.facts import Facts
from tiercache.sim.page.figures import amount, size
from tiercache.sim.page.words import (
    KIND_WORDS,
    gap_labels,
    length_labels,
    policy_name,
    tier_name,
    token_fates,
    use_labels,
)

__all__ = ["draw_all"]

_STYLE: dict[Any, Any] = {
    "svg.hashsalt": "tiercache",
    "svg.fonttype": "path",
    "font.family": "DejaVu Sans",
    "font.size": 10.3,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
    "axes.edgecolor": "#333333",
    "text.color": "#111111",
    "axes.labelcolor": "#111111",
    "xtick.color": "#111111",
    "ytick.color": "#111111",
    "hatch.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9.6,
    "legend.handlelength": 2.8,
    "legend.columnspacing": 1.2,
}
_WIDTH = 5.2
_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#0b3c6f", "linestyle": "-", "marker": "o", "linewidth": 2.4},
    {"color": "#b3541e", "linestyle": "--", "marker": "s", "linewidth": 1.8},
    {"color": "#1b7a4b", "linestyle": ":", "marker": "^", "linewidth": 1.5},
    {"color": "#7a3b9a", "linestyle": "-.", "marker": "D", "linewidth": 1.3},
    {"color": "#666666", "linestyle": (0, (6, 2, 1, 2, 1, 2)), "marker": "v", "linewidth": 1.3},
    {"color": "#8a6d00", "linestyle": (0, (1, 3)), "marker": "P", "linewidth": 1.5},
    {"color": "#00707a", "linestyle": (0, (4, 4)), "marker": "X", "linewidth": 1.3},
)
_MIN: dict[str, Any] = {"color": "#000000", "linestyle": (0, (8, 3)), "marker": "*", "linewidth": 1.3, "markersize": 9}
_AREAS: tuple[dict[str, Any], ...] = (
    {"facecolor": "#0b3c6f", "hatch": ""},
    {"facecolor": "#f0b27a", "hatch": "////"},
    {"facecolor": "#ffffff", "hatch": "---"},
    {"facecolor": "#bcd9c6", "hatch": "xxx"},
    {"facecolor": "#d9d9d9", "hatch": "\\\\\\\\"},
    {"facecolor": "#f7f7f7", "hatch": ""},
)
_EDGE = {"edgecolor": "#222222", "linewidth": 0.6}


def draw_all(facts: Facts) -> dict[str, bytes]:
    """SVG by name: capacity, where, sizes, tiers, uses, prefixes, gaps, exits, and with an NVMe tier writes."""
    made = {}
    for name, draw in _drawings(facts).items():
        with mpl.rc_context(_STYLE):
            target = io.BytesIO()
            _figure(name, draw, facts).savefig(target, format="svg", metadata={"Date": None, "Creator": None})
            made[name] = target.getvalue()
    return made


_HEIGHTS = {
    "capacity": 4.1,
    "where": 2.7,
    "sizes": 3.9,
    "tiers": 3.4,
    "writes": 2.9,
    "uses": 3.0,
    "prefixes": 3.1,
    "gaps": 3.2,
    "exits": 3.7,
}
"""In inches, per picture."""


def _drawings(facts: Facts) -> dict[str, Callable[[Any, Facts], None]]:
    drawings: dict[str, Callable[[Any, Facts], None]] = {
        "capacity": _capacity,
        "where": _where,
        "sizes": _sizes,
        "tiers": _tiers,
        "uses": _uses,
        "prefixes": _prefixes,
        "gaps": _gaps,
        "exits": _exits,
    }
    return drawings if facts.settings.nvme_slots is None else {**drawings, "writes": _writes}


def _figure(name: str, draw: Callable[[Any, Facts], None], facts: Facts) -> Figure:
    figure = Figure(figsize=(_WIDTH, _HEIGHTS[name]), layout="constrained")
    draw(figure.add_subplot(), facts)
    return figure


def _capacity(axes: Any, facts: Facts) -> None:
    unique = facts.report.unique_blocks
    x = [100 * slots / unique for slots in facts.capacities]
    infinite = facts.ratio(facts.infinite_tokens)
    ends = [*x, 100.0] if x[-1] < 100 else x
    styles = iter(_LINES)
    for policy, hits in facts.sweep.items():
        style = _MIN if policy == "min" else next(styles)
        y = [100 * facts.ratio(each) for each in hits] + [100 * infinite] * (len(ends) - len(x))
        axes.plot(
            ends, y, label=policy_name(policy, long=True), **{"markersize": 5, "markerfacecolor": "white", **style}
        )
    axes.axhline(100 * infinite, color="#000000", linewidth=1.0, linestyle=(0, (1, 1)), label="no bounds")
    axes.set_xscale("log")
    axes.set_xticks(ends, [f"{each:.2g}" if each < 100 else "100" for each in ends])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"capacity, % of the trace's unique blocks (100 % is {size(facts.footprint_nbytes)})")
    _percent_axis(axes, "prompt tokens found, %")
    _mark_own_sizes(axes, facts)
    _legend(axes, 3)


def _mark_own_sizes(axes: Any, facts: Facts) -> None:
    """A line at the user's DRAM, and one at DRAM and NVMe together, named above the picture at two heights."""
    left, right = axes.get_xlim()
    dram, nvme = facts.settings.dram_slots, facts.settings.nvme_slots
    marks = (
        [(dram, "your DRAM", 1.02)] if nvme is None else [(dram, "your DRAM", 1.02), (dram + nvme, "with NVMe", 1.08)]
    )
    for slots, name, height in marks:
        at = 100 * slots / facts.report.unique_blocks
        if left < at < right:
            axes.axvline(at, color="#555555", linewidth=0.9, linestyle=(0, (2, 2)), zorder=1)
            side = "left" if at * at < left * right else "right"
            axes.text(at, height, name, ha=side, fontsize=9, transform=axes.get_xaxis_transform())


def _where(axes: Any, facts: Facts) -> None:
    """One bar: what became of every prompt token."""
    at = 0.0
    for (label, count), style in zip(token_fates(facts), _AREAS, strict=False):
        share = 100 * facts.ratio(count)
        axes.barh([0], [share], left=[at], height=0.6, label=label, **style, **_EDGE)
        if share >= 6:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
            axes.text(at + share / 2, 0, f"{share:.0f} %", ha="center", va="center", fontsize=9, bbox=box)
        at += share
    axes.set_xlim(0, 100)
    axes.set_yticks([])
    axes.set_ylim(-0.5, 0.5)
    axes.grid(visible=False)
    axes.set_xlabel("% of all prompt tokens")
    _legend(axes, 1)


def _tiers(axes: Any, facts: Facts) -> None:
    line = facts.timeline
    x, bar, unit = _time_axis(facts)
    bottom = [0.0] * line.bins
    for (name, _), hits, style in zip(facts.settings.tiers, line.hit_tokens, _AREAS, strict=False):
        y = [100 * hit / every if every else 0.0 for hit, every in zip(hits, line.prompt_tokens, strict=True)]
        axes.bar(x, y, bar, bottom=bottom, align="edge", label=f"from {tier_name(name)}", **style, **_EDGE)
        bottom = [low + high for low, high in zip(bottom, y, strict=True)]
    axes.set_xlabel(unit)
    _percent_axis(axes, "prompt tokens found, %")
    _legend(axes, 3)


def _writes(axes: Any, facts: Facts) -> None:
    x, bar, unit = _time_axis(facts)
    y = [facts.nbytes(blocks) for blocks in facts.timeline.nvme_writes]
    axes.bar(x, y, bar, align="edge", **_AREAS[1], **_EDGE)
    axes.set_xlabel(unit)
    axes.set_ylabel("written to NVMe per bar")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: amount(value) if value else "0"))
    axes.set_ylim(bottom=0)


def _time_axis(facts: Facts) -> tuple[list[float], float, str]:
    """Left edges of the bins, their width, and what the axis says."""
    line = facts.timeline
    if not line.timed:
        return [line.width * each for each in range(line.bins)], line.width, "requests"
    unit_s, unit = next(
        ((s, name) for s, name in ((86400, "days"), (3600, "hours"), (60, "minutes")) if facts.span_s >= 3 * s),
        (1, "seconds"),
    )
    return (
        [line.width * each / unit_s for each in range(line.bins)],
        line.width / unit_s,
        f"{unit} from the first request",
    )


def _sizes(axes: Any, facts: Facts) -> None:
    """A line per DRAM size over the size of NVMe."""
    drams = list(dict.fromkeys(each.dram_slots for each in facts.grid))
    slow = sorted({each.nvme_slots or 0 for each in facts.grid})
    others = iter(_LINES[1:])
    for dram in drams:
        style = _LINES[0] if dram == facts.settings.dram_slots else next(others)
        rows = [each for each in facts.grid if each.dram_slots == dram]
        y = [100 * facts.ratio(each.found.hit_tokens) for each in rows]
        own = " (yours)" if dram == facts.settings.dram_slots else ""
        x = [slow.index(each.nvme_slots or 0) for each in rows]
        axes.plot(x, y, label=f"DRAM {size(facts.nbytes(dram))}{own}", markersize=5, markerfacecolor="white", **style)
    axes.axhline(
        100 * facts.ratio(facts.infinite_tokens), color="#000000", linewidth=1, linestyle=(0, (1, 1)), label="no bounds"
    )
    axes.set_xticks(
        range(len(slow)), ["\n".join(size(facts.nbytes(each)).split()) if each else "none" for each in slow]
    )
    axes.set_xlabel("NVMe")
    _percent_axis(axes, "prompt tokens found, %")
    _legend(axes, 2)


def _uses(axes: Any, facts: Facts) -> None:
    _bars(axes, use_labels(), [100 * facts.ratio(each) for each in facts.sharing.tokens_by_uses], _AREAS[3])
    axes.set_xlabel("requests that have the token's block")
    axes.set_ylabel("% of all prompt tokens")


def _prefixes(axes: Any, facts: Facts) -> None:
    sharing = facts.sharing
    every = max(1, sum(sharing.requests_by_prefix))
    _bars(axes, length_labels(sharing.prefix_edges), [100 * n / every for n in sharing.requests_by_prefix], _AREAS[1])
    axes.set_xlabel("tokens shared with another request, up to")
    axes.set_ylabel("% of all requests")


def _gaps(axes: Any, facts: Facts) -> None:
    every = max(1, sum(facts.sharing.tokens_by_gap))
    _bars(axes, gap_labels(), [100 * n / every for n in facts.sharing.tokens_by_gap], _AREAS[4])
    axes.set_xlabel("time since the block was used last")
    axes.set_ylabel("% of the tokens\nthat come again")


def _exits(axes: Any, facts: Facts) -> None:
    leaving = facts.leaving
    every = max(1, sum(leaving.requests))
    labels = length_labels(leaving.edges)
    bottom = [0.0] * len(labels)
    for (_, words), counts, style in zip(KIND_WORDS.items(), leaving.requests_by_depth, _AREAS, strict=False):
        y = [100 * count / every for count in counts]
        axes.bar(range(len(labels)), y, 0.8, bottom=bottom, label=words, **style, **_EDGE)
        bottom = [low + high for low, high in zip(bottom, y, strict=True)]
    _category_axis(axes, labels)
    axes.set_xlabel("tokens before the prompt leaves, up to")
    axes.set_ylabel("% of all requests")
    _legend(axes, 1)


def _bars(axes: Any, labels: Sequence[str], values: Sequence[float], style: dict[str, Any]) -> None:
    axes.bar(range(len(labels)), values, 0.8, **style, **_EDGE)
    for place, value in enumerate(values):
        if value > 0:
            text = f"{value:.0f}" if value >= 1 else "<1"
            axes.annotate(text, (place, value), (0, 2), textcoords="offset points", ha="center", fontsize=9)
    _category_axis(axes, labels)
    axes.margins(y=0.12)


def _category_axis(axes: Any, labels: Sequence[str]) -> None:
    crowded = sum(map(len, labels)) > 34
    axes.set_xticks(range(len(labels)), labels, rotation=45 if crowded else 0, ha="right" if crowded else "center")
    axes.grid(visible=False, axis="x")
    axes.set_ylim(bottom=0)


def _percent_axis(axes: Any, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(axes: Any, columns: int) -> None:
    """Below the picture, where it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside lower center", ncols=columns)
