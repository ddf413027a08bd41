"""The order in which runs of blocks end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tiercache.expiry import Expiry
from tiercache.types import Hints, no_hints


@dataclass
class Run:
    id: int
    hints: Hints | None


def run(number: int, *ends: float) -> Run:
    hints = no_hints(len(ends))
    hints["expires"] = ends
    return Run(number, hints)


def test_runs_come_in_the_order_of_their_first_end() -> None:
    expiry = Expiry()
    assert expiry.next == math.inf and list(expiry.due(1e18)) == []
    for each in (run(1, math.inf, 30.0), run(2, 20.0, 20.0), run(3, 10.0), run(4, math.inf), Run(5, None)):
        expiry.note(each)
    assert expiry.next == 10.0
    assert list(expiry.due(9.9)) == [] and expiry.next == 10.0
    assert list(expiry.due(20.0)) == [3, 2] and expiry.next == 30.0
    assert list(expiry.due(1e18)) == [1] and expiry.next == math.inf


def test_an_end_that_was_put_off_is_found_out_when_its_time_comes() -> None:
    expiry, each = Expiry(), run(7, 10.0)
    expiry.note(each)
    each.hints["expires"] = 50.0
    expiry.note(each)
    assert list(expiry.due(10.0)) == [7]
    expiry.note(each)
    assert expiry.next == 50.0 and list(expiry.due(50.0)) == [7]


def test_an_earlier_end_comes_first_and_the_run_only_once() -> None:
    expiry, each = Expiry(), run(7, 50.0)
    expiry.note(each)
    each.hints["expires"] = 10.0
    expiry.note(each)
    assert list(expiry.due(100.0)) == [7]


def test_it_holds_no_more_than_an_entry_a_number_however_often_ends_are_put_off() -> None:
    expiry = Expiry()
    for i in range(10_000):
        expiry.note(run(i % 10, 1000.0 + i))
    assert len(expiry._heap) == len(expiry._entry) == 10
    expiry.clear()
    assert expiry.next == math.inf and list(expiry.due(1e18)) == []


def test_hints_of_nothing_are_priority_0_and_no_end() -> None:
    assert no_hints(3)["priority"].tolist() == [0] * 3 and np.isinf(no_hints(3)["expires"]).all()
