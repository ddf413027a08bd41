"""What room ahead of need is sized by: the largest recent store, and what recent stores lacked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.planner.core import Planner
from tiercache.planner.demotion import RecentMax
from tiercache.policy import make_policy
from tiercache.types import LevelSpec


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=40))
def test_the_largest_of_the_last_steps(window: int, noted: list[tuple[int, int]]) -> None:
    recent, step, all_of_them = RecentMax(window), 0, []
    for ahead, value in noted:
        step += ahead
        recent.note(step, value)
        all_of_them.append((step, value))
        assert recent.largest(step) == max(v for s, v in all_of_them if s > step - window)
    assert recent.largest(step + window) == 0


def test_what_a_store_lacked_is_in_the_target_for_the_next_thousand_stores_and_then_forgotten() -> None:
    specs = [LevelSpec("dram", 1000, 4096), LevelSpec("nvme", 9000, 4096, persistent=True)]
    demotion = Planner(specs, 36, make_policy("lru")).demotion
    demotion.note_store(500)
    assert demotion.watermark(0) == 10, "1 % of the slots, for the store was larger"
    demotion._note_shortfall(0, 70)
    for _ in range(998):
        demotion.note_store(3)
        assert demotion.watermark(0) == 80
    demotion._note_shortfall(0, 5)
    demotion.note_store(3)
    demotion.note_store(3)
    assert demotion.watermark(0) == 3 + 5, "the large store and the large shortfall are too long ago"
    demotion._note_shortfall(0, 10_000)
    assert demotion.watermark(0) == 500, "never more than half the level"
