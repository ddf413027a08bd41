"""docs/remote-benchmarks.md is what its results file says, of committed code, with every row judged."""

import json

from bench.remote.report import PAGE, newest, page


def test_the_page_is_that_of_the_newest_results():
    path = newest()
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(path.read_text()), path.name)


def test_results_are_of_committed_code_and_of_several_runs():
    results = json.loads(newest().read_text())
    assert not results["commit"]["dirty"] and results["commit"]["id"] in newest().name
    assert len(results["runs"]) >= 5 and results["pairs"] >= 9
    assert {each["target"] for each in results["rows"]} == {0.9, 1.3, None}


def test_a_row_is_the_median_of_the_runs_and_is_judged_by_it():
    results = json.loads(newest().read_text())
    for at, each in enumerate(results["rows"]):
        medians = sorted(run[at]["ratio"]["median"] for run in results["runs"])
        assert [run[at]["what"] for run in results["runs"]] == [each["what"]] * len(medians)
        assert each["ratio"] == {"median": medians[len(medians) // 2], "low": medians[0], "high": medians[-1]}
        value, target = each["ratio"]["median"], each["target"]
        reached = None if target is None else value >= target if each["measure"] == "speed" else value <= target
        assert each["reached"] is reached


def test_what_is_not_reached_is_called_so():
    results = json.loads(newest().read_text())
    results["rows"][0]["reached"] = False
    assert f"Not reached: {results['rows'][0]['what']}." in page(results, "x.json")
    assert "| not reached |" in page(results, "x.json")
