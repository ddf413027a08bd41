"""Short arrays: what they give is what numpy gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.arrays import (
    as_index,
    ascending,
    count_levels,
    counting,
    each_once,
    first_false,
    first_true,
    present,
    true_at,
)

POOL = np.arange(1000, dtype=np.int32) * 7


@st.composite
def slot_lists(draw: st.DrawFn) -> np.ndarray:
    """Runs of neighbouring slots, forwards and backwards, at random places; or such a column of a matrix."""
    parts = draw(st.lists(st.tuples(st.integers(0, 900), st.integers(1, 90), st.booleans()), max_size=3))
    slots: list[int] = []
    for first, n, back in parts:
        run = list(range(first, first + n))
        slots += run[::-1] if back else run
    array = np.array(slots, dtype=np.int32)
    return np.repeat(array[:, None], 2, axis=1)[:, 1] if draw(st.booleans()) else array


@given(slot_lists())
def test_an_index_reads_and_writes_as_the_slots_do(slots: np.ndarray) -> None:
    where = as_index(slots)
    assert (POOL[where] == POOL[slots]).all() and len(POOL[where]) == len(slots)
    ours, theirs = np.zeros(1000), np.zeros(1000)
    ours[where] = 5
    theirs[slots] = 5
    assert (ours == theirs).all()


@given(slot_lists())
def test_ascending_is_a_sorted_copy(slots: np.ndarray) -> None:
    kept = slots.copy()
    found = ascending(slots)
    assert found.tolist() == sorted(slots.tolist()) and found.dtype == np.int32
    found[:] = -9
    assert (slots == kept).all()


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 500, 1 << 14, (1 << 14) + 1])
def test_neighbours_are_a_slice(n: int) -> None:
    slots = np.arange(40, 40 + n, dtype=np.int32)
    assert as_index(slots) == slice(40, 40 + n)
    if n > 2:
        slots[[1, -2]] = slots[[-2, 1]]  # the ends alone do not tell
        assert (as_index(slots) is slots) == (n > 3)


def test_an_absent_slot_is_never_part_of_a_slice() -> None:
    """-1, 0, 1 follow each other, and -1 alone would be the last slot."""
    for slots in ([-1, 0, 1], [-1], [-1, -1]):
        array = np.array(slots, dtype=np.int32)
        assert as_index(array) is array
    assert as_index(np.empty(0, np.int32)) == slice(0, 0)


@given(st.lists(st.integers(-1, 5), max_size=80))
def test_present(slots: list[int]) -> None:
    array = np.array(slots, dtype=np.int32)
    found = present(array)
    assert found.tolist() == [slot for slot in slots if slot >= 0] and found.dtype == np.int32
    assert not np.shares_memory(found, array)


@given(st.lists(st.booleans(), max_size=200), st.booleans())
def test_masks(bits: list[bool], strided: bool) -> None:
    mask = np.array(bits, dtype=np.bool_)
    if strided:
        mask = np.repeat(mask, 2)[::2]
    assert first_true(mask) == (bits.index(True) if True in bits else len(bits))
    assert first_false(mask) == (bits.index(False) if False in bits else len(bits))
    assert true_at(mask).tolist() == [i for i, bit in enumerate(bits) if bit]


@given(st.lists(st.tuples(st.integers(-1, 9), st.integers(1, 40)), max_size=8))
def test_each_once(runs: list[tuple[int, int]]) -> None:
    numbers = [number for number, n in runs for _ in range(n)]
    assert each_once(np.array(numbers, dtype=np.int32)) == list(dict.fromkeys(numbers))


@given(st.lists(st.integers(-1, 3), max_size=80))
def test_count_levels(labels: list[int]) -> None:
    assert count_levels(np.array(labels, dtype=np.int8), 3) == tuple(labels.count(level) for level in range(3))


@pytest.mark.parametrize(("begin", "end"), [(0, 0), (3, 9), ((1 << 14) - 2, 1 << 14), ((1 << 14) - 2, (1 << 14) + 2)])
def test_counting(begin: int, end: int) -> None:
    assert counting(begin, end).tolist() == list(range(begin, end))
    assert counting(begin, end).dtype == np.int32
