"""A pytest plugin (`-p verdicts`): writes what became of each test to the file named by PLANTED_VERDICTS.

One line of JSON per test and phase that did not pass, and one per test that did; the first says which package was
imported. It tells a test that failed from one that never ran, and a hang that the test's own deadline ended.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

_PATH = Path(os.environ["PLANTED_VERDICTS"])


def _write(**facts: Any) -> None:
    with _PATH.open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    import tiercache  # not at the top: the fault may break it, which is an error of the collection then

    own = [item.nodeid for item in session.items if item.get_closest_marker("timeout")]
    _write(package=tiercache.__file__, own_deadline=own)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome == "failed":
        crash = getattr(report.longrepr, "reprcrash", None)
        text = crash.message if crash is not None else str(report.longrepr or "")
        _write(test=report.nodeid, when=report.when, outcome=report.outcome, text=text, seconds=report.duration)
