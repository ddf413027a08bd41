"""The planted faults can still be planted, and docs/testing.md says of them what the registry says.

That each is caught is shown by `make planted-faults`; that its tests are green without it, by those tests.
"""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest
from plant import BEGIN, END, judge, planted, try_fault
from registry import AREAS, HERE, ROOT, Fault, broken, load_faults, table

DOCS = ROOT / "docs" / "testing.md"
FAULTS = load_faults()


def exists(test: str) -> bool:
    """Is there such a test? Of a class with a base, any test may be inherited from a suite."""
    file, _, name = test.partition("[")[0].partition("::")
    path = ROOT / file
    scope: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else []
    *classes, function = name.split("::")
    for each in classes:
        found = [node for node in scope if isinstance(node, ast.ClassDef) and node.name == each]
        if found and found[0].bases:
            return True
        scope = found[0].body if found else []
    return function in {node.name for node in scope if isinstance(node, ast.FunctionDef)}


def test_every_fault_can_be_planted() -> None:
    assert broken(FAULTS) == []


def test_every_area_has_its_file() -> None:
    assert {path.stem for path in HERE.glob("*.toml")} == set(AREAS)
    assert {fault.area for fault in FAULTS} == set(AREAS)


def test_the_tests_that_are_named_exist() -> None:
    missing = sorted({test for fault in FAULTS for test in (*fault.tests, *fault.real) if not exists(test)})
    assert missing == []


def test_tests_with_a_real_vllm_are_named_as_such() -> None:
    real = {test: fault.name for fault in FAULTS for test in fault.real}
    assert len(real) >= 8 and all(test.startswith("tests/vllm/") for test in real)
    assert not [test for fault in FAULTS for test in fault.tests if test.startswith("tests/vllm/")]


def test_the_table_in_the_docs_is_that_of_the_registry() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(FAULTS), "python tests/planted/plant.py --write-docs"


# --- the tools: what counts as caught, and what does not -------------------------------------------------------------

HEAD = {"own_deadline": ["t::own"]}
PASSED = {"test": "t::a", "when": "call", "outcome": "passed", "text": ""}
FAILED = {"test": "t::b", "when": "call", "outcome": "failed", "text": "assert 1 == 2"}
ERROR = {**FAILED, "when": "setup"}
HUNG = {**FAILED, "text": "Failed: Timeout (>120.0s) from pytest-timeout."}
OWN = {**HUNG, "test": "t::own"}


@pytest.mark.parametrize(
    ("status", "facts", "caught", "why"),
    [
        (1, [FAILED], True, "assert 1 == 2"),
        (1, [PASSED, FAILED], True, "assert 1 == 2"),
        (0, [PASSED], False, "its tests pass"),
        (1, [ERROR], False, "an error in setup: assert 1 == 2"),
        (1, [HUNG], False, "hung until the deadline of all tests"),
        (1, [OWN], True, "hung until its own deadline"),
        (None, [PASSED], False, "still running at the limit"),
        (-7, [], False, "the test process died of signal 7"),
        (4, None, False, "the tests were not collected (status 4)"),
    ],
)
def test_what_counts(status: int | None, facts: list[dict] | None, caught: bool, why: str) -> None:
    lines = [] if facts is None else [{**HEAD, "package": "/tree/tiercache/__init__.py"}, *facts]
    verdict = judge(FAULTS[0], status, lines, "", Path("/tree"))
    assert verdict.caught == caught and verdict.why.startswith(why)
    assert verdict.by == [each["test"] for each in facts or [] if caught and each["outcome"] == "failed"]


def test_tests_of_another_tree_count_for_nothing() -> None:
    verdict = judge(FAULTS[0], 1, [{**HEAD, "package": "/elsewhere/tiercache/__init__.py"}, FAILED], "", Path("/tree"))
    assert not verdict.caught and "/elsewhere" in verdict.why


@pytest.mark.parametrize(
    ("new", "caught", "why"),
    [
        ("return 41", True, "assert 41 == 42"),
        ("return 42 + 0", False, "its tests pass"),
        ("return 41\nunknown()", False, "the tests were not collected"),
        ("import time; time.sleep(600)", False, "still running at the limit"),
    ],
)
def test_a_fault_is_planted_tried_and_taken_out(tmp_path: Path, new: str, caught: bool, why: str) -> None:
    package = tmp_path / "tiercache" / "__init__.py"
    package.parent.mkdir()
    package.write_text("def answer():\n    return 42\n", encoding="utf-8")
    test = "from tiercache import answer\n\ndef test_toy():\n    assert answer() == 42\n"
    (tmp_path / "test_toy.py").write_text(test, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    before = package.stat()
    fault = Fault("toy", "", "tiercache/__init__.py", "return 42", new, ("test_toy.py::test_toy",), "", "")
    verdict = try_fault(fault, tmp_path, limit_s=10.0 if "sleep" not in new else 3.0)
    assert (verdict.caught, verdict.why[: len(why)]) == (caught, why)
    assert "42" in package.read_text(encoding="utf-8") and package.stat().st_mtime == before.st_mtime


def test_a_fault_whose_text_moved_is_told(tmp_path: Path) -> None:
    fault = Fault("gone", "", "tiercache/slots.py", "no such text", "", ("tests/test_slots.py::test",), "", "")
    assert broken([fault, fault]) == [
        *["gone: its text occurs 0 times in tiercache/slots.py"] * 2,
        "gone: the name is used twice",
    ]
    stranger = replace(fault, name="strange", old="def take(self", new="unheard_of; def take(self")
    assert broken([replace(stranger, new="def taken(self) -> None: unheard_of\n\n    def take(self")]) == [
        "strange: tiercache/slots.py knows no unheard_of"
    ]
    assert broken([stranger])[0].startswith("strange: tiercache/slots.py is no Python with it")
    with pytest.raises(ValueError, match="occurs 0 times"), planted(fault, ROOT):
        pass
