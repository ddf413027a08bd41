"""docs/vllm-benchmarks.md is what its results file says, and the results are whole."""

import json

from bench.vllm.report import HOOKS_MOST, KINDS, NAMES, PAGE, page

RESULTS = PAGE.parent.parent / "bench" / "results" / "vllm"


def newest():
    return max(RESULTS.glob("*.json"), key=lambda path: json.loads(path.read_text())["date"])


def test_the_page_is_that_of_the_newest_results():
    path = newest()
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(path.read_text()), path.name)


def test_every_system_is_there_with_every_kind_and_no_answer_differs():
    results = json.loads(newest().read_text())
    rows = {(each["system"], each["kind"]): each for each in results["figures"]}
    assert set(rows) == {(system, kind) for system in NAMES for kind in KINDS}
    assert len(results["rounds"]) == results["pairs"] >= 9
    for (system, kind), each in rows.items():
        assert each["cached"] == ([0] if kind == "cold" else [results["prompt_tokens"] // 32 * 32]), (system, kind)
        assert each["equal"] == each["compared"] or system != "tiercache"


def test_what_is_behind_is_called_so():
    results = json.loads(newest().read_text())
    for each in results["figures"]:
        if each["system"] == "native" and each["kind"] == "disk":
            each["over_tiercache"] |= {"median": 0.5, "q1": 0.4, "q3": 0.6}
    assert "BEHIND native (0.50)" in page(results, "x.json")
    for each in results["hooks"]:
        each["eight requests"]["decode"]["share"] = HOOKS_MOST * 1.5
    assert "| not reached |" in page(results, "x.json")
