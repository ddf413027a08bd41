"""The gate on branches: `python tests/branch_coverage.py COVERAGE.JSON PERCENT`. Exit 1 below it, 2 without data."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_SHOWN = 12


def judge(report: dict[str, Any], percent: float) -> tuple[bool, list[str]]:
    """Whether enough of the branches were taken, and what to say: the worst files, then the share."""
    counted = {name: facts["summary"] for name, facts in report["files"].items()}
    missing = {name: facts["num_branches"] - facts["covered_branches"] for name, facts in counted.items()}
    worst = sorted(missing, key=lambda name: (-missing[name], name))[:_SHOWN]
    lines = [f"{missing[name]:5} of {counted[name]['num_branches']:4} not taken: {name}" for name in worst]
    taken, of = report["totals"]["covered_branches"], report["totals"]["num_branches"]
    share = 100 * taken / of if of else 0.0
    lines.append(f"branches: {taken} of {of} taken, {share:.1f} % (at least {percent:g} % wanted)")
    return share >= percent, lines


def main(path: str, percent: str) -> int:
    try:
        report = json.loads(Path(path).read_text())
    except (OSError, ValueError) as e:
        print(f"no coverage data: {e}")
        return 2
    enough, lines = judge(report, float(percent))
    print(*lines, sep="\n")
    return 0 if enough else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
