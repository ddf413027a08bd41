"""What the Makefile's targets rely on: the gate on branches, and the profiles of Hypothesis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import branch_coverage
import pytest
from hypothesis import settings

HERE = Path(__file__).parent


def report(*files: tuple[str, int, int]) -> dict[str, object]:
    summaries = {name: {"summary": {"covered_branches": taken, "num_branches": of}} for name, taken, of in files}
    totals = {"covered_branches": sum(each[1] for each in files), "num_branches": sum(each[2] for each in files)}
    return {"files": summaries, "totals": totals}


def test_the_gate_counts_branches_and_names_the_worst() -> None:
    enough, lines = branch_coverage.judge(report(("a.py", 9, 10), ("b.py", 9, 10)), 90)
    assert enough and lines[-1] == "branches: 18 of 20 taken, 90.0 % (at least 90 % wanted)"
    enough, lines = branch_coverage.judge(report(("a.py", 10, 10), ("b.py", 79, 90)), 90)
    assert not enough and lines[0].endswith("b.py") and "89.0 %" in lines[-1]
    assert not branch_coverage.judge(report(("a.py", 0, 0)), 90)[0]  # nothing measured is not enough


def test_the_gate_s_exit_status(tmp_path: Path) -> None:
    path = tmp_path / "coverage.json"
    assert branch_coverage.main(str(path), "90") == 2
    path.write_text("no json")
    assert branch_coverage.main(str(path), "90") == 2
    path.write_text(json.dumps(report(("a.py", 1, 2))))
    assert (branch_coverage.main(str(path), "90"), branch_coverage.main(str(path), "50")) == (1, 0)


@pytest.mark.parametrize(("profile", "derandomized"), [("ci", True), ("nightly", False), (None, True)])
def test_hypothesis_profiles(profile: str | None, derandomized: bool) -> None:
    """ci: the same examples every time; nightly: new ones, and more of them; a failure prints how to repeat it."""
    code = "import conftest; from hypothesis import settings as s; d = s(); "
    code += "print(d.derandomize, d.max_examples, d.print_blob)"
    environment = {name: value for name, value in os.environ.items() if name != "HYPOTHESIS_PROFILE"}
    if profile is not None:
        environment["HYPOTHESIS_PROFILE"] = profile
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, cwd=HERE)
    assert done.returncode == 0, done.stderr
    derandomize, examples, blob = done.stdout.split()
    assert derandomize == str(derandomized)
    assert (int(examples) > 100, blob) == (not derandomized, str(not derandomized))


def test_a_run_has_one_of_the_profiles() -> None:
    wanted = os.environ.get("HYPOTHESIS_PROFILE", "ci")
    assert settings.default.derandomize == (wanted == "ci")


def test_no_two_test_modules_have_the_same_name() -> None:
    """They are imported by their bare names: a second one would stop the whole run at its collection."""
    names = [path.name for path in HERE.rglob("*.py") if path.name != "conftest.py"]
    assert sorted({name for name in names if names.count(name) > 1}) == []
