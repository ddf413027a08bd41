"""docs/benchmarks.md and its pictures, from a results file: python -m bench.report [FILE] (default: the newest)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.families import FAMILIES, Family
from bench.rows import ROWS

__all__ = ["DOC", "PICTURES", "main", "markdown", "newest"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOC = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "pictures"

_HEAD = """# Benchmarks

Written by `make bench-report` from `bench/results/{name}`. Do not edit.

```
make bench           # everything, about 8 minutes; needs 8 GiB of disk and of memory, and fio for the NVMe rows
make bench QUICK=1   # a few minutes, smaller where that saves time
make bench SMOKE=1   # does every benchmark run? tiny, nothing is judged
make bench-report    # this page
```

`make bench BENCH_FLAGS="--bench-dir=/mnt/nvme -k 'nvme or reopen'"` takes another disk, and some of the rows.
The conversation trace is looked for in `../shared/traces` (or `TIERCACHE_TRACE`, `--bench-trace`); without it the slice
that the package ships is used.

**How to read it.** Every figure is a ratio within one run: work and reference alternate (which comes first, too),
each pair gives one ratio, the figure is the median of the ratios. Absolute times belong to one machine and say little
about another. *times* is the work's time over the reference's; *share* is the reference's time over the work's, so 1
is as fast. Range and quartiles are over the pairs; *cpu* is the work's processor time over the reference's (all
threads), which a busy machine disturbs less. A call gets a fresh argument, made outside the clock for both sides.
Warm-up pairs come first and do not count. Garbage collection is on, as it is for users; everything is collected
before the first pair. Every destination is compared byte by byte outside the clock, and spoilt before it is used
again.

| | |
|---|---|
"""


def newest(folder: Path = RESULTS) -> Path:
    """The latest results of a whole run. FileNotFoundError where there is none."""
    found = sorted(path for path in folder.glob("*.json") if not path.stem.endswith(("-quick", "-smoke", "-part")))
    if not found:
        raise FileNotFoundError(f"no results in {folder}: run make bench")
    return found[-1]


def markdown(results: dict[str, Any], name: str) -> str:
    """The page."""
    facts, verdict = results["machine"], results["verdict"]
    commit = results["commit"]["id"] + (" with changes" if results["commit"]["dirty"] else "")
    packages = ", ".join(f"{package} {version}" for package, version in facts["packages"].items() if version)
    about = {
        "when, how long": f"{results['date']}, {results['seconds'] // 60} min {results['seconds'] % 60} s",
        "commit": commit,
        "command": f"`{results['command']}`",
        "machine": f"{facts['cpu']}, {facts['cores']} cores{' (virtual)' if facts['virtual'] else ''}, "
        f"{facts['memory_gib']} GiB, load {facts['load_before']} at the start",
        "system": f"Linux {facts['kernel']}, {facts['filesystem']}, transparent huge pages {facts['huge_pages']}",
        "software": f"Python {facts['python']}, {packages}, {facts['fio'] or 'no fio'}",
        "targets": f"{verdict['reached']} reached, {len(verdict['not_reached'])} not reached",
    }
    lines = [_HEAD.format(name=name) + "\n".join(f"| {key} | {value} |" for key, value in about.items()), ""]
    missing = verdict["skipped"] | dict.fromkeys(verdict["failed"], "failed")
    if missing:
        lines += ["Not measured:", "", *(f"- {test}: {why}" for test, why in missing.items()), ""]
    order = {row.id: place for place, row in enumerate(ROWS)}
    found = sorted(results["rows"], key=lambda row: order.get(row["id"], len(order)))
    for family in FAMILIES:
        rows = [row for row in found if row["family"] == family.name]
        if rows:
            lines += _section(family, rows)
    return "\n".join(lines)


def _section(family: Family, rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"## {family.title}", "", family.text, ""]
    references = list(dict.fromkeys(row["reference"] for row in rows if row["reference"] != "-"))
    if len(references) == 1:
        lines += [f"Reference: {references[0]}.", ""]
    several = len(references) > 1
    lines.append(
        f"| what |{' reference |' if several else ''} must reach | measured | range | quartiles | cpu | time | |"
    )
    lines.append("|---|" + "---|" * (7 + several))
    for row in rows:
        value = row["value"]
        cells = [row["what"], *([row["reference"]] if several else []), _target(row)]
        if row["pairs"] == 1:
            cells += [f"**{_number(value['median'])}** {row['measure']}", "", ""]
        else:
            cells += [
                f"**{_number(value['median'])}** {row['measure']}",
                f"{_number(value['low'])} to {_number(value['high'])}",
                f"{_number(value['q1'])} to {_number(value['q3'])}",
            ]
        cells += ["" if row["cpu_ratio"] is None else _number(row["cpu_ratio"]), _times(row), row["verdict"]]
        lines.append(f"| {' | '.join(cells)} |")
    notes = _notes(rows)
    picture = [f"![{family.title}](pictures/bench-{family.name}.svg)", ""] if family.picture else []
    return [*lines, "", *notes, *picture]


def _target(row: dict[str, Any]) -> str:
    if row["target"] is None:
        return ""
    return f"{'at least' if row['measure'] == 'share' else 'at most'} {_number(row['target'])}"


def _times(row: dict[str, Any]) -> str:
    if row["work_s"] is None:
        return ""
    return f"{_seconds(row['work_s']['median'])} / {_seconds(row['references_s'][row['chosen']]['median'])}"


def _notes(rows: list[dict[str, Any]]) -> list[str]:
    """What a family's rows have to say beside their figures."""
    notes = []
    for row in rows:
        facts = row["facts"]
        if "slot_tables_per_block" in facts:
            part = f", {facts['requests']:,} requests of the trace ({facts['trace']})" if "trace" in facts else ""
            notes.append(
                f"- {row['what']}: {facts['blocks']:,} blocks in {facts['nodes']:,} runs{part}; of these bytes "
                f"{facts['slot_tables_per_block']:.0f} are the slot tables of two levels."
            )
    if any(len(row["references_s"]) > 1 for row in rows):
        chosen = ", ".join(f"{row['id'].partition('/')[2]}: {row['chosen'].removeprefix('fio ')}" for row in rows)
        buffers = rows[0]["facts"].get("fio_buffers", "small pages, which halves its speed at 2 MiB")
        notes.append(f"The better engine was {chosen}. Its buffers: {buffers}.")
    return [*notes, ""] if notes else []


def _number(value: float) -> str:
    """Three significant digits, no exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value * 1e6:.3g} us"


def main(arguments: list[str]) -> None:
    """Write the page and draw the pictures."""
    from bench.pictures import draw  # here: it needs matplotlib, the rest does not

    path = Path(arguments[0]) if arguments else newest()
    results = json.loads(path.read_text(encoding="utf-8"))
    DOC.write_text(markdown(results, path.name), encoding="utf-8")
    print(f"{DOC.relative_to(ROOT)} from {path.name}")
    for picture in draw(results, path.name, PICTURES):
        print(picture.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
