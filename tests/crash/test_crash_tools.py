"""The zygote, its children and their traps."""

from __future__ import annotations

import importlib
import signal
import time
from pathlib import Path

import pytest

from tiercache.testing.crash import POINTS, Zygote


def test_reports_of_any_size_arrive(zygote: Zygote) -> None:
    child = zygote.start("tool_scripts:echo", {"a": [1, None]})
    assert child.wait() == 0 and child.error == ""
    assert child.reports == [{"a": [1, None]}, {"threads": 1, "big": "x" * 200_000}]
    assert child.wait() == 0  # a second time changes nothing
    child.kill()


def test_what_a_script_raises_is_told(zygote: Zygote) -> None:
    child = zygote.start("tool_scripts:fail", "no good")
    assert child.wait() == 1 and child.reports == ["before"]
    assert "ValueError: no good" in child.error


def test_an_unknown_script_or_point_is_told(zygote: Zygote) -> None:
    child = zygote.start("tool_scripts:nothing")
    assert child.wait() == 1 and "AttributeError" in child.error
    child = zygote.start("tool_scripts:trapped", {"point": "nowhere", "nth": 1})
    assert child.wait() == 1 and "KeyError" in child.error


@pytest.mark.parametrize(("point", "last"), [("dram-write-before", [3, 2]), ("dram-write-after", [3, 2])])
def test_a_trap_kills_at_the_nth_passing_since_it_was_armed(zygote: Zygote, point: str, last: list[int]) -> None:
    child = zygote.start("tool_scripts:trapped", {"point": point, "nth": 3})
    assert child.wait() == -signal.SIGKILL
    assert child.reports == [[0, 0], [1, 0], [2, 1], last]


def test_a_trap_that_is_never_sprung_does_nothing(zygote: Zygote) -> None:
    child = zygote.start("tool_scripts:trapped", {"point": "dram-write-after", "nth": 99})
    assert child.wait() == 0 and child.reports[-1] == [7, 6]


def test_a_torn_write_is_half_there(zygote: Zygote, tmp_path: Path) -> None:
    child = zygote.start("tool_scripts:tear", str(tmp_path / "file"))
    assert child.wait() == -signal.SIGKILL and child.reports == []
    assert (tmp_path / "file").read_bytes() == b"a" * 1000 + b"b" * 24


def test_a_child_may_die_or_be_killed(zygote: Zygote) -> None:
    child = zygote.start("tool_scripts:now")
    assert child.wait() == -signal.SIGKILL and child.reports == [[1]]
    child = zygote.start("tool_scripts:sleep", 60.0)
    assert child.read(time.monotonic() + 20.0) and child.reports == ["asleep"]
    child.kill()
    assert child.wait() == -signal.SIGKILL


def test_a_child_that_takes_too_long_ends(zygote: Zygote) -> None:
    child = zygote.start("tool_scripts:sleep", 60.0, limit_s=0.2)
    assert child.wait(20.0) == -signal.SIGALRM
    child = zygote.start("tool_scripts:sleep", 60.0)
    with pytest.raises(TimeoutError, match="asleep"):
        child.wait(0.5)
    assert child.wait() == -signal.SIGKILL


def test_two_children_at_once(zygote: Zygote) -> None:
    slow, quick = zygote.start("tool_scripts:sleep", 0.3), zygote.start("tool_scripts:echo", 1)
    assert (quick.wait(), slow.wait()) == (0, 0)


def test_a_zygote_that_cannot_import_says_why() -> None:
    with pytest.raises(RuntimeError, match="No module named 'nothing_like_that'"):
        Zygote(["nothing_like_that"])


def test_children_end_with_their_zygote(tmp_path: Path) -> None:
    with Zygote(["tool_scripts"], [str(Path(__file__).parent)]) as process:
        child = process.start("tool_scripts:sleep", 60.0)
        assert child.read(time.monotonic() + 20.0)
    assert not Path(f"/proc/{child.pid}").exists()
    while child.read(time.monotonic() + 1.0):
        pass


@pytest.mark.parametrize("name", POINTS)
def test_every_point_is_a_place_in_the_package(name: str) -> None:
    module, _, path = POINTS[name].target.partition(":")
    place = importlib.import_module(module)
    for part in path.split("."):
        place = getattr(place, part)
    assert callable(place)
