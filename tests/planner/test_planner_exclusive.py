"""When a promoted block gives its slow copy up: by the sizes of the two levels, unless it is said."""

from __future__ import annotations

import pytest

from tiercache.planner.core import Planner
from tiercache.policy import make_policy
from tiercache.types import LevelSpec


def planner(*capacities: int, exclusive: bool | None = None) -> Planner:
    specs = [LevelSpec(f"level{i}", capacity, 4096) for i, capacity in enumerate(capacities)]
    return Planner(specs, 36, make_policy("lru"), exclusive=exclusive)


@pytest.mark.parametrize(("fast", "slow", "exclusive"), [(20, 100, False), (20, 99, True), (20, 10, True)])
def test_exclusive_by_default_under_five_times(fast: int, slow: int, exclusive: bool) -> None:
    assert planner(fast, slow).state.gives_up(1, 0) is exclusive
    assert planner(fast, slow, exclusive=not exclusive).state.gives_up(1, 0) is not exclusive


def test_exclusive_is_per_pair_of_levels() -> None:
    state = planner(10, 20, 100).state
    assert [state.gives_up(1, 0), state.gives_up(2, 1), state.gives_up(2, 0)] == [True, False, False]
