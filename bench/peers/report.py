"""docs/peers.md from the newest results file: python bench/peers/report.py [--check]

Figures come from the results, words from `peers.toml`. --check writes nothing and ends with 1 where the page differs.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "newest", "page", "tables", "write"]

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent.parent / "docs" / "peers.md"
OWN = "tiercache"
LEVEL = 0.95
"""A time under this part of ours is told as ahead."""
TITLES = {"lookup": "Lookup", "memory": "DRAM", "disk": "Disk", "restart": "Restart and damage"}

Results = dict[str, Any]
Records = Sequence[dict[str, Any]]


def newest() -> Path:
    """The results file with the latest date in it."""
    return max(
        (HERE / "results").glob("*.json"), key=lambda path: str(json.loads(path.read_text(encoding="utf-8"))["date"])
    )


def page(path: Path) -> str:
    """The whole of docs/peers.md."""
    results = json.loads(path.read_text(encoding="utf-8"))
    words = tomllib.loads((HERE / "peers.toml").read_text(encoding="utf-8"))
    machine, commit = results["machine"], results["commit"]
    where = (
        f"{results['date'][:10]}, commit {commit['id']}{' with changes' if commit['dirty'] else ''}, "
        f"{results['seconds']} s; "
        f"{machine['cpu']}{', virtual' if machine['virtual'] else ''}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, Linux {machine['kernel']}, {machine['filesystem']}, Python {machine['python']}, "
        f"load {machine['load_before']} before"
    )
    parts = [
        "# tiercache and its peers",
        f"Measured by `{results['command']}` (`make bench-peers`), written by `python bench/peers/report.py` from\n"
        f"`bench/peers/results/{path.name}`: {where}.",
        words["page"]["intro"].strip(),
        words["page"]["run"].strip(),
        "## Who took part",
        _who(results, words["peer"]),
        tables(results, words),
        "## Where a peer is ahead, and why",
        _ahead(results["records"], words["peer"]),
        "## What each does and does not do",
        _does(words["peer"]),
        "## Caveats",
        words["page"]["caveats"].strip(),
        "## Not measured here",
        words["page"]["absent"].strip(),
    ]
    return "\n\n".join(parts) + "\n"


def tables(results: Results, words: dict[str, Any] | None = None) -> str:
    """All groups as Markdown tables."""
    parts = []
    for group, title in TITLES.items():
        records = [record for record in results["records"] if record["group"] == group]
        if records:
            text = (words or {}).get("page", {}).get(group, "").strip()
            table = _restart(records) if group == "restart" else _timed(records)
            failures = [_failure(record) for record in records if record["status"] != "ok"]
            parts += [f"## {title}", *([text] if text else []), table, *(["\n".join(failures)] if failures else [])]
    missing = [f"- {name}: not installed ({venv['why']})" for name, venv in results["venvs"].items() if venv["why"]]
    return "\n\n".join([*parts, *(["\n".join(missing)] if missing else [])])


def write() -> None:
    """Write docs/peers.md."""
    PAGE.write_text(page(newest()), encoding="utf-8")


def main() -> int:
    """The command."""
    text = page(newest())
    if "--check" in sys.argv[1:]:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == text
        print(f"{PAGE.name} is {'as' if same else 'not what'} the newest results say")
        return 0 if same else 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


# --- tables ----------------------------------------------------------------------------------------------------------


def _timed(records: Records) -> str:
    """A row a case, a column a contestant: time, its part of memcpy's speed, and its ratio to tiercache's time."""
    names = list(dict.fromkeys(record["contestant"] for record in records))
    cases = list(dict.fromkeys(record["case"] for record in records if record["case"] != "start"))
    found = {(record["case"], record["contestant"]): record for record in records}
    rows = [[case, *(_cell(found.get((case, name))) for name in names)] for case in cases]
    return _table(["", *names], rows)


def _cell(record: dict[str, Any] | None) -> str:
    if record is None:
        return "-"
    if record["status"] != "ok":
        return "failed"
    text = _time(record["s"]["median"])
    if "of_memcpy" in record:
        text += f"<br>{_spread(record['of_memcpy'])} of memcpy"
    if record["contestant"] != OWN and "over_own" in record:
        text += f"<br>x {_spread(record['over_own'])}"
    return text


def _restart(records: Records) -> str:
    cases = list(dict.fromkeys(record["case"] for record in records))
    rows: list[list[str]] = []
    for case in cases:
        rows += [_restart_row(one) for one in records if one["case"] == case and one["status"] == "ok"]
    heads = ["", "", "offered", "known safe", "damaged", "hits", "right", "**wrong**", "missed", "files there", "open"]
    return _table(heads, rows)


def _restart_row(record: dict[str, Any]) -> list[str]:
    return [
        record["case"],
        record["contestant"] + (", running" if record.get("same_process") else ""),
        str(record["stored"]),
        str(record.get("acknowledged", "")),
        str(record.get("damaged", "")),
        *(str(record[key]) for key in ("hits", "right", "wrong", "missed")),
        str(record.get("files_found") or ""),
        _time(record["open_s"]) if "open_s" in record else "",
    ]


def _who(results: Results, peers: dict[str, Any]) -> str:
    rows = []
    for name, told in results["contestants"].items():
        versions = ", ".join(f"{part} {version}" for part, version in told.get("versions", {}).items())
        venv = results["venvs"].get(told["venv"], {})
        size = f"{venv['nbytes'] / 1e9:.2f} GB" if venv.get("nbytes") else ""
        absent = ", ".join(told.get("standins", []))
        rows.append([name, _line(peers[name]["what"]), versions or "not run", size, absent])
    return _table(["", "what it is", "versions", "environment", "stood in for, not installed"], rows)


def _does(peers: dict[str, Any]) -> str:
    keys = ("sync", "checksum", "persists", "caveat")
    return _table(
        ["", "syncs before it says stored", "verifies what it reads", "finds it after a restart", "how it was driven"],
        [[name, *(_line(told[key]) for key in keys)] for name, told in peers.items()],
    )


def _ahead(records: Records, peers: dict[str, Any]) -> str:
    """Where a peer took less time than tiercache in the same rounds; one line for what has one reason."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for record in records:
        ratio = record.get("over_own")
        if ratio is None or record["contestant"] == OWN or ratio["median"] >= LEVEL:
            continue
        kind, _, rest = record["case"].partition(",")
        sure = "" if ratio["max"] < 1 else ", within the spread"
        case = f"{rest.strip()}: " if rest else ""
        found.setdefault((record["group"], kind, record["contestant"]), []).append(f"{case}{_spread(ratio)}{sure}")
    lines = []
    for (group, kind, name), ratios in found.items():
        why = peers[name].get("ahead", {}).get(group, {}).get(kind.split()[0], "Why is not known.")
        lines.append(f"- {TITLES[group]}, {kind}: **{name}** takes, of our time, {'; '.join(ratios)}. {_line(why)}")
    return "\n".join(lines) if lines else "In none of these cases."


def _failure(record: dict[str, Any]) -> str:
    return f"- {record['case']}, {record['contestant']}: failed, {record.get('why', 'no reason given')}"


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _spread(values: dict[str, float]) -> str:
    return f"{_number(values['median'])} ({_number(values['min'])} to {_number(values['max'])})"


def _number(value: float) -> str:
    """Two significant digits below 10, none after the point above."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 2 else f"{value:.2f}"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s"


def _line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
