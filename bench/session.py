"""One run of the benchmarks: collects figures, prints them as they come, writes them to bench/results/."""

from __future__ import annotations

import json
import re
import shlex
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.machine import ROOT, commit, facts
from bench.pairs import Figure
from bench.scale import Scale

__all__ = ["RESULTS", "Session", "command_line", "headline"]

RESULTS = ROOT / "bench" / "results"
SCHEMA = 1


class Session:
    """Figures of one run."""

    def __init__(self, scale: Scale, bench_dir: Path, command: str, *, partial: bool = False) -> None:
        """partial: only some of the rows were asked for."""
        self.scale = scale
        self.partial = partial
        self.began = time.time()
        self.bench_dir = bench_dir
        self.place = Path(tempfile.mkdtemp(prefix="tiercache-bench-", dir=bench_dir))
        """Removed by `close`."""
        self.figures: list[Figure] = []
        self.skipped: dict[str, str] = {}
        """Reason per test that was skipped."""
        self.failed: list[str] = []
        """Tests that failed: their rows are missing."""
        self._command = command
        self._commit = commit()
        self._machine = facts(self.place)

    def add(self, figure: Figure) -> None:
        """Judge a figure and keep it."""
        reached = figure.row.reached(figure.value.median)
        if not self.scale.judged:
            figure.verdict = "not judged"
        elif reached is None:
            figure.verdict = "stated"
        else:
            figure.verdict = "reached" if reached else "not reached"
        self.figures.append(figure)

    def as_dict(self) -> dict[str, Any]:
        """What the results file holds."""
        verdicts = [figure.verdict for figure in self.figures]
        return {
            "schema": SCHEMA,
            "date": datetime.fromtimestamp(self.began, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "seconds": round(time.time() - self.began),
            "scale": self.scale.name,
            "command": self._command,
            "commit": self._commit,
            "machine": self._machine,
            "verdict": {
                "reached": verdicts.count("reached"),
                "not_reached": [each.row.id for each in self.figures if each.verdict == "not reached"],
                "skipped": self.skipped,
                "failed": self.failed,
            },
            "rows": [figure.as_dict() for figure in self.figures],
        }

    def write(self, folder: Path = RESULTS) -> Path:
        """Write the results file, named by date, commit and machine; returns its path."""
        found = self.as_dict()
        stamp = found["date"].replace("-", "").replace(":", "")
        cpu = "-".join(found["machine"]["cpu"].split()[:2]).lower()
        dirty = "-dirty" if found["commit"]["dirty"] else ""
        name = f"{stamp}-{found['commit']['id']}{dirty}-{found['machine']['cores']}x{_plain(cpu)}"
        kind = self.scale.name if self.scale.name != "full" else "part" if self.partial else ""
        path = folder / f"{name}{'-' + kind if kind else ''}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(_rounded(found), indent=1) + "\n", encoding="utf-8")
        return path


def headline(figure: Figure) -> str:
    """One line for the terminal."""
    row, value = figure.row, figure.value
    text = f"{row.id}: {value.median:.4g} ({value.low:.4g} to {value.high:.4g}) {row.measure}"
    if row.target is not None:
        text += f", target at {'least' if row.measure == 'share' else 'most'} {row.target:g}"
    if figure.work_s is not None and figure.chosen:
        reference = figure.references_s[figure.chosen].median
        text += f"; {figure.work_s.median * 1e3:.4g} ms against {reference * 1e3:.4g}"
    if figure.cpu_ratio is not None:
        text += f", cpu {figure.cpu_ratio:.3g}"
    return f"{text}: {figure.verdict.upper() if figure.verdict == 'not reached' else figure.verdict}"


def command_line(args: list[str]) -> str:
    """The command as a user would repeat it; absolute paths, which are of one machine, are left out."""
    kept = [re.sub(r"(^|=)/.*", r"\1PATH", each) for each in args]
    return shlex.join(["python", "-m", "pytest", *kept])


def _plain(text: str) -> str:
    return "".join(letter if letter.isalnum() or letter == "-" else "" for letter in text)


def _rounded(value: Any) -> Any:
    """Floats with five significant digits: a results file that can be read."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list) else value
