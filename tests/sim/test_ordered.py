"""Ordered delivery: which result takes effect at which step, whatever the order of arrival."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tiercache.sim.ordered import Busy, OrderedDelivery, ReplayError
from tiercache.types import CALLER, CopyJob, Expedite, JobOverdue, JobResult, LostClaims, MoverMessage, PlannerMessage

ONE = np.zeros(1, np.int32)


def job(number: int, kind: Any = "store", start_after_s: float = 0.0) -> CopyJob:
    src, dst = {"store": (CALLER, 0), "load": (1, 0), "write": (0, 1)}[kind]
    return CopyJob(number, kind, b"", src, ONE, dst, ONE, ONE.astype(np.uint64), start_after_s=start_after_s)


def result(number: int, ok: bool = True, seconds: float = 0.0) -> JobResult:
    return JobResult(number, np.array([ok]), 1, seconds)


class Rig:
    """A delivery whose planner only notes what reaches it, and can issue jobs when it does."""

    def __init__(self, write_after_s: float | None = None) -> None:
        self.delivery = OrderedDelivery(write_after_s, wait_s=0.05)
        self.applied: list[Any] = []
        self.sent: list[MoverMessage] = []
        self.load_of: dict[int, int] = {}
        self.follows: dict[int, list[CopyJob]] = {}
        self.followed = threading.Event()
        self.delivery.bind(self._apply)
        self.delivery.connect(lambda number: self.load_of[number], self.sent.extend)

    def _apply(self, message: PlannerMessage) -> None:
        number = getattr(message, "job", 0)
        self.applied.append(number if isinstance(message, JobResult) else message)
        self.delivery.submitted(self.follows.get(number, []))
        if self.follows.pop(number, None):
            self.followed.set()

    def issue(self, *jobs: CopyJob, answer: bool = True) -> None:
        self.delivery.submitted(jobs)
        if answer:
            self.answer(*(each.id for each in reversed(jobs)))

    def answer(self, *numbers: int) -> None:
        for number in numbers:
            self.delivery.arrived(result(number))


def test_results_wait_for_their_step_and_come_in_the_order_of_jobs() -> None:
    rig = Rig()
    rig.delivery.begin(0, 0.0)
    rig.issue(job(1), job(2))
    rig.delivery.begin(1, 1.0)
    rig.issue(job(3))
    rig.delivery.deliver(-1)
    assert rig.applied == []
    rig.delivery.deliver(0)
    assert rig.applied == [1, 2]
    rig.delivery.deliver(1)
    assert rig.applied == [1, 2, 3]
    assert not rig.delivery.deliver_next()


def test_what_a_delivery_issues_belongs_to_the_step_that_delivers() -> None:
    rig = Rig()
    rig.delivery.begin(0, 0.0)
    rig.issue(job(1))
    rig.follows[1] = [job(2, "write")]
    rig.delivery.begin(4, 4.0)
    rig.delivery.deliver(0)
    rig.answer(2)
    rig.delivery.deliver(3)
    assert rig.applied == [1]
    rig.delivery.deliver(4)
    assert rig.applied == [1, 2]


def test_a_job_that_continues_a_load_belongs_to_the_loads_step() -> None:
    rig = Rig()
    rig.load_of = {1: 1, 3: 1, 4: 2}
    rig.delivery.begin(0, 0.0)
    rig.delivery.expect_load()
    rig.issue(job(1, "load"))
    rig.delivery.begin(1, 1.0)
    rig.delivery.expect_load()
    rig.issue(job(2))
    rig.follows[1] = [job(3, "load"), job(4, "load")]
    rig.delivery.begin(2, 2.0)

    def later() -> None:
        assert rig.followed.wait(5.0)
        rig.answer(3, 4)

    thread = threading.Thread(target=later)
    rig.delivery._wait_s = 5.0
    thread.start()
    rig.delivery.deliver(0)
    thread.join()
    assert rig.applied == [1, 3]
    rig.delivery.deliver(1)
    assert rig.applied == [1, 3, 2, 4]


def test_deliver_next_goes_beyond_the_step() -> None:
    rig = Rig()
    rig.delivery.begin(7, 0.0)
    rig.issue(job(1), job(2))
    assert rig.delivery.deliver_next()
    assert rig.applied == [1]


def test_a_result_that_never_comes_is_an_error_that_names_the_job() -> None:
    rig = Rig()
    rig.load_of = {5: 1}
    rig.issue(job(5, "load"), answer=False)
    with pytest.raises(ReplayError, match=r"no result after 0\.05 s of job 5 \(load, 1 blocks, level 1 to 0\)"):
        rig.delivery.deliver(0)


def test_a_delayed_write_waits_for_trace_time() -> None:
    rig = Rig(write_after_s=10.0)
    rig.delivery.begin(0, 100.0)
    rig.issue(job(1, "write", start_after_s=1e9))
    rig.delivery.begin(1, 109.9)
    rig.delivery.deliver(1)
    assert not rig.delivery.deliver_next()
    assert rig.sent == []
    rig.delivery.begin(2, 110.0)
    assert rig.sent == [Expedite((1,))]
    rig.delivery.deliver(1)
    assert rig.applied == []
    rig.delivery.deliver(2)
    assert rig.applied == [1]


def test_the_planner_can_end_a_delay() -> None:
    rig = Rig(write_after_s=10.0)
    rig.delivery.begin(0, 0.0)
    rig.issue(job(1, "write", start_after_s=1e9))
    rig.delivery.begin(3, 1.0)
    rig.delivery.submitted([Expedite((1,))])
    rig.delivery.deliver(2)
    assert rig.applied == []
    rig.delivery.deliver(3)
    assert rig.applied == [1]
    rig.delivery.begin(4, 20.0)
    assert rig.sent == []


def test_overdue_comes_before_the_result_and_lost_claims_at_the_next_delivery() -> None:
    rig = Rig()
    rig.issue(job(1), answer=False)
    lost = LostClaims(ONE)
    rig.delivery.arrived(lost)
    rig.delivery.arrived(JobOverdue(1))
    rig.delivery.arrived(result(1, ok=False))
    rig.delivery.deliver(0)
    assert rig.applied == [lost, JobOverdue(1), 1]
    assert rig.delivery.failed_blocks == 1


def test_let_go_applies_what_waits_and_then_all_at_once() -> None:
    rig = Rig(write_after_s=1.0)
    rig.issue(job(1), job(2, "write", start_after_s=1e9), job(3))
    rig.follows[1] = [job(4)]
    rig.delivery.let_go()
    assert sorted(rig.applied) == [1, 2, 3]
    rig.answer(4)
    assert rig.applied[-1] == 4


def test_before_it_is_connected_it_says_so() -> None:
    delivery = OrderedDelivery(1.0)
    with pytest.raises(RuntimeError, match="planner"):
        delivery.submitted([job(1, "load")])


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([(0, 1), (2, 3)], 2),
        ([(0, 2), (1, 3)], 3),
        ([(1, 2), (3, 4), (0, 5)], 5),
        ([(1, 2), (3, 4), (3.5, 6)], 4),
        ([(0, 1), (1, 2)], 2),
    ],
)
def test_busy_counts_each_moment_once(spans: Sequence[tuple[float, float]], seconds: float) -> None:
    busy = Busy()
    for begin, end in spans:
        busy.add(begin, end)
    assert busy.seconds == pytest.approx(seconds)
