"""Pictures of a results file: figures over size or depth, with their quartiles, and the targets as a dashed line."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.ticker

mpl.use("svg")
import matplotlib.pyplot as plt

from bench.families import FAMILIES, Family

__all__ = ["draw"]

_COLOURS = ("#1f77b4", "#d9822b", "#2a9d5c", "#9467bd", "#8c564b", "#e377c2")
_TARGET = "#c0392b"
_STYLE = {
    "svg.hashsalt": "tiercache",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}

Rows = list[dict[str, Any]]


def draw(results: dict[str, Any], name: str, folder: Path, kind: str = "svg") -> list[Path]:
    """One picture (svg or png) per family that has one; the same results give the same bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for family in FAMILIES:
        rows = [row for row in results["rows"] if row["family"] == family.name]
        if not rows or not family.picture:
            continue
        with plt.rc_context(_STYLE):
            height = 3.8 if family.picture == "lines" else 1.3 + 0.6 * len(rows)
            figure, axes = plt.subplots(figsize=(7.0, height), layout="constrained")
            (_lines if family.picture == "lines" else _bars)(axes, family, rows)
            axes.set_title(family.title, loc="left", fontweight="bold")
            figure.text(0.995, 0.005, _footnote(results), ha="right", va="bottom", fontsize=7, color="#808080")
            figure.get_layout_engine().set(rect=(0, 0.14 / height, 1, 1 - 0.14 / height))  # type: ignore[union-attr]
            path = folder / f"bench-{family.name}.{kind}"
            about = {"Title": f"{family.title}, {name}"}
            figure.savefig(path, dpi=100, metadata=about if kind == "png" else {**about, "Date": None})
            plt.close(figure)
        made.append(path)
    return made


def _footnote(results: dict[str, Any]) -> str:
    facts = results["machine"]
    commit = results["commit"]["id"] + ("+" if results["commit"]["dirty"] else "")
    where = f"{facts['cpu']}, {facts['cores']} cores, {facts['filesystem']}"
    return f"medians and quartiles; {where}; commit {commit}; {results['date'][:10]}"


def _lines(axes: Any, family: Family, rows: Rows) -> None:
    series = list(dict.fromkeys(row["series"] for row in rows))
    for name, colour in zip(series, _COLOURS, strict=False):
        mine = [row for row in rows if row["series"] == name]
        x = [row["x"] for row in mine]
        y = [row["value"]["median"] for row in mine]
        down = [row["value"]["median"] - row["value"]["q1"] for row in mine]
        up = [row["value"]["q3"] - row["value"]["median"] for row in mine]
        axes.errorbar(x, y, (down, up), marker="o", color=colour, capsize=3, label=name, linewidth=1.6)
    _target_line(axes, rows)
    axes.set_xscale("log")
    axes.set_xticks([at for at, _ in family.ticks], [text for _, text in family.ticks])
    axes.minorticks_off()
    axes.set_xlabel(family.x_label)
    axes.set_ylabel(family.y_label)
    _y_axis(axes, family)
    axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9)


def _target_line(axes: Any, rows: Rows) -> None:
    """The same target everywhere runs across; others are marks at their points, joined where a series has several."""
    judged = [row for row in rows if row["target"] is not None]
    if not judged:
        return
    label = "target (at least)" if rows[0]["measure"] == "share" else "target (at most)"
    style = {"color": _TARGET, "linestyle": "--", "linewidth": 1.2}
    if len({row["target"] for row in judged}) == 1:
        axes.axhline(judged[0]["target"], label=label, **style)
        return
    for name in dict.fromkeys(row["series"] for row in judged):
        points = [(row["x"], row["target"]) for row in judged if row["series"] == name]
        axes.plot(*zip(*points, strict=True), marker="_", markersize=12, markeredgewidth=1.6, label=label, **style)
        label = "_nolegend_"


def _bars(axes: Any, family: Family, rows: Rows) -> None:
    """One bar per row, lying, its figure beside it."""
    names = [textwrap.fill(row["series"] or row["what"], 34) for row in rows]
    places = range(len(rows))
    values = [row["value"]["median"] for row in rows]
    down = [row["value"]["median"] - row["value"]["q1"] for row in rows]
    up = [row["value"]["q3"] - row["value"]["median"] for row in rows]
    axes.barh(
        places, values, xerr=(down, up), color=_COLOURS[0], height=0.55, error_kw={"capsize": 3, "ecolor": "#404040"}
    )
    for place, row in zip(places, rows, strict=True):
        value = row["value"]
        text = f"{value['median']:,.0f}" if value["median"] >= 100 else f"{value['median']:.3g}"
        at = max(value["q3"], value["median"]), place
        behind = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axes.annotate(text, at, (6, 0), textcoords="offset points", va="center", bbox=behind, zorder=5)
        if row["target"] is not None:
            axes.plot([row["target"]] * 2, [place - 0.4, place + 0.4], color=_TARGET, linestyle="--", linewidth=1.4)
    if any(row["target"] is not None for row in rows):
        axes.plot([], [], color=_TARGET, linestyle="--", label="target (at most)")
        axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    axes.set_yticks(list(places), names)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlabel(family.y_label)
    axes.margins(x=0.15)


def _y_axis(axes: Any, family: Family) -> None:
    if family.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    else:
        axes.set_ylim(bottom=0)
