"""docs/benchmarks.md says what the newest results file says, and its pictures are of that file."""

from __future__ import annotations

import json
import re

from bench.report import DOC, PICTURES, markdown, newest


def test_page_is_that_of_the_newest_results():
    path = newest()
    assert DOC.read_text(encoding="utf-8") == markdown(json.loads(path.read_text(encoding="utf-8")), path.name), (
        "run make bench-report"
    )


def test_pictures_are_of_the_newest_results():
    named = re.findall(r"\(pictures/([\w-]+\.svg)\)", DOC.read_text(encoding="utf-8"))
    assert named
    for each in named:
        title = re.search(r"<dc:title>(.*)</dc:title>", (PICTURES / each).read_text(encoding="utf-8"))
        assert title is not None and title[1].endswith(newest().name), f"{each}: run make bench-report"


def test_every_row_of_the_results_is_judged():
    results = json.loads(newest().read_text(encoding="utf-8"))
    assert results["verdict"]["failed"] == [] and results["commit"]["dirty"] is False
    for row in results["rows"]:
        value, target = row["value"]["median"], row["target"]
        if target is None:
            assert row["verdict"] == "stated"
        else:
            reached = value >= target if row["measure"] == "share" else value <= target
            assert row["verdict"] == ("reached" if reached else "not reached"), row["id"]
    missed = [row["id"] for row in results["rows"] if row["verdict"] == "not reached"]
    assert results["verdict"]["not_reached"] == missed
