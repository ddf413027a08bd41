"""docs/remote-benchmarks.md from the newest results: `make bench-remote ARGS=--report`."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "RESULTS", "newest", "page", "write"]

_ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = _ROOT / "bench" / "results" / "remote"
PAGE = _ROOT / "docs" / "remote-benchmarks.md"

Results = dict[str, Any]


def newest(folder: Path = RESULTS) -> Path:
    """The latest results. ValueError where there are none."""
    return max(folder.glob("*.json"), key=lambda path: str(json.loads(path.read_text(encoding="utf-8"))["date"]))


def write() -> Path:
    """Write the page; returns its path."""
    path = newest()
    PAGE.write_text(page(json.loads(path.read_text(encoding="utf-8")), path.name), encoding="utf-8")
    return PAGE


def page(results: Results, name: str) -> str:
    """The whole page."""
    missed = [each["what"] for each in results["rows"] if each["reached"] is False]
    parts = [
        "# Benchmarks of key tiers",
        f"Written by `make bench-remote ARGS=--report` from `bench/results/remote/{name}`. Do not edit.",
        "```\nmake bench-remote                               # one run, under a minute\n"
        'make bench-remote ARGS="--runs 5 --write"       # a results file\n'
        "make bench-remote ARGS=--report                 # this page\n```",
        _fill(
            f"**How to read it.** The Mooncake tier against Mooncake's raw client (`mooncake` {results['mooncake']}), "
            "both in one process, each with a client of its own, over one master and one owner of memory in other "
            "processes, over TCP, in a network namespace with the loopback interface alone. They do the same in turn, "
            f"{results['pairs']} pairs a run; a run's figure is the median of its pairs' ratios, and what stands here "
            f"is the median of {len(results['runs'])} runs, with the lowest and the highest. *Reads*: speed of the "
            "tier over that of the raw client (higher is better), into registered memory on both sides; *verified* has "
            "the checksums of every block in it, which the raw client does not have. *Finds*: time of the tier over "
            "that of the raw client (lower is better); making a name of each key is in it. Absolute times say little "
            "about another machine."
        ),
        _machine(results),
        _table(results),
        f"Not reached: {', '.join(missed)}." if missed else "All targets are reached.",
    ]
    return "\n\n".join(parts) + "\n"


def _fill(text: str) -> str:
    return textwrap.fill(text, 128, break_long_words=False, break_on_hyphens=False)


def _machine(results: Results) -> str:
    machine, commit = results["machine"], results["commit"]
    rows = [
        ("when, how long", f"{results['date']}, {results['seconds']} s"),
        ("commit", commit["id"] + (" with changes" if commit["dirty"] else "")),
        ("command", f"`{results['command']}`"),
        (
            "machine",
            f"{machine['cpu']}, {machine['cores']} cores{' (virtual)' if machine['virtual'] else ''}, "
            f"{machine['memory_gib']} GiB, **shared with other work**: load {machine['load_before']} before, "
            f"{results['load_after']} after",
        ),
        ("system", f"Linux {machine['kernel']}, Python {machine['python']}, numpy {machine['packages']['numpy']}"),
        ("carried by", results["transport"]),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def _table(results: Results) -> str:
    lines = [
        "| | tier to raw | lowest to highest run | target | raw | tier | |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in results["rows"]:
        ratio, target = each["ratio"], each["target"]
        least = "at least" if each["measure"] == "speed" else "at most"
        lines.append(
            f"| {each['what']} | **{ratio['median']:.3f}** of its {each['measure']} | {ratio['low']:.3f} to "
            f"{ratio['high']:.3f} | {'' if target is None else f'{least} {target:g}'} | {each['raw_ms']:.2f} ms | "
            f"{each['tier_ms']:.2f} ms | {_VERDICTS[each['reached']]} |"
        )
    return "\n".join(lines)


_VERDICTS = {None: "stated", True: "reached", False: "not reached"}
