"""SlotTable against a model: who uses each slot, who owns it, what it is."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from tiercache.slots import NO_OWNER, SlotState, SlotTable

QUICK = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def some(slots):
    return np.array(sorted(slots), dtype=np.int32)


class SlotMachine(RuleBasedStateMachine):
    """The model: a state, a number of pins and an owner per slot."""

    @initialize(capacity=st.integers(1, 12))
    def build(self, capacity):
        self.table = SlotTable(capacity)
        self.state = [SlotState.FREE] * capacity
        self.pins = Counter()
        self.owner = [NO_OWNER] * capacity

    def choose(self, data, candidates):
        return data.draw(st.sets(st.sampled_from(sorted(candidates)))) if candidates else set()

    def where(self, *states, pinned=None, owned=None):
        return {
            slot
            for slot, state in enumerate(self.state)
            if state in states
            and (pinned is None or (self.pins[slot] > 0) == pinned)
            and (owned is None or (self.owner[slot] != NO_OWNER) == owned)
        }

    def freed(self, slots):
        for slot in slots:
            self.state[slot], self.owner[slot] = SlotState.FREE, NO_OWNER

    @rule(data=st.data())
    def take(self, data):
        n = data.draw(st.integers(0, self.table.free))
        slots = self.table.take(n)
        assert slots.tolist() == sorted(set(slots.tolist())) and len(slots) == n
        assert all(self.state[slot] == SlotState.FREE for slot in slots)
        node = data.draw(st.integers(0, 5))
        self.table.owner[slots] = node
        for slot in slots.tolist():
            self.state[slot], self.owner[slot] = SlotState.WRITING, node

    @rule(data=st.data(), state=st.sampled_from([SlotState.RESIDENT, SlotState.BAD]))
    def arrive(self, data, state):
        slots = self.choose(data, self.where(SlotState.WRITING, SlotState.RESIDENT, owned=True))
        self.table.state[some(slots)] = state
        for slot in slots:
            self.state[slot] = state

    @rule(data=st.data())
    def pin(self, data):
        slots = self.choose(data, set(range(len(self.state))) - self.where(SlotState.FREE))
        self.table.pin(some(slots))
        self.pins.update(slots)

    @rule(data=st.data())
    def unpin(self, data):
        slots = self.choose(data, {slot for slot in self.pins if self.pins[slot] > 0})
        self.table.unpin(some(slots))
        self.pins.subtract(slots)
        self.freed(
            slot for slot in slots if self.pins[slot] == 0 and self.state[slot] in (SlotState.DETACHED, SlotState.LOST)
        )

    @rule(data=st.data())
    def give(self, data):
        slots = self.choose(data, self.where(SlotState.WRITING, SlotState.RESIDENT, SlotState.BAD, pinned=False))
        self.table.give(some(slots))
        self.freed(slots)

    @rule(data=st.data())
    def let_go(self, data):
        slots = self.choose(data, self.where(SlotState.WRITING, SlotState.RESIDENT, SlotState.BAD))
        self.table.let_go(some(slots))
        self.let_go_in_model(slots)

    def let_go_in_model(self, slots):
        for slot in slots:
            self.owner[slot] = NO_OWNER
            self.state[slot] = SlotState.DETACHED if self.pins[slot] else SlotState.FREE

    @rule(data=st.data())
    def lose(self, data):
        slots = self.choose(data, set(range(len(self.state))) - self.where(SlotState.FREE))
        slots = {slot for slot in slots if self.pins[slot] > 0}
        self.table.lose(some(slots))
        for slot in slots:
            self.state[slot], self.owner[slot] = SlotState.LOST, NO_OWNER

    @rule()
    def clear(self):
        owned = {slot for slot, owner in enumerate(self.owner) if owner != NO_OWNER}
        assert self.table.clear().tolist() == sorted(owned)
        self.let_go_in_model(owned)

    @invariant()
    def agrees(self):
        if not hasattr(self, "table"):
            return
        table, slots = self.table, range(len(self.state))
        assert table.state.tolist() == self.state
        assert table.pins.tolist() == [self.pins[slot] for slot in slots]
        assert table.owner.tolist() == self.owner
        assert table.free == len(self.where(SlotState.FREE)) and table.lost == len(self.where(SlotState.LOST))
        assert set(table._stack[: table.free].tolist()) == self.where(SlotState.FREE)


def test_against_a_model():
    run_state_machine_as_test(SlotMachine, settings=QUICK)


def test_low_slots_are_taken_first_so_that_runs_lie_side_by_side():
    table = SlotTable(8)
    assert table.take(3).tolist() == [0, 1, 2]
    assert table.take(2).tolist() == [3, 4]
    table.give(np.array([2, 1], dtype=np.int32))
    assert table.take(3).tolist() == [1, 2, 5]


def test_exactly_these_slots_are_taken_at_recovery():
    table = SlotTable(6)
    table.take_these(np.array([4, 1], dtype=np.int32))
    assert table.state.tolist() == [0, 2, 0, 0, 2, 0] and table.free == 4
    assert table.take(4).tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize("misuse", ["take", "give", "unpin", "lose"])
def test_misuse_is_refused(misuse):
    table = SlotTable(2)
    slots = table.take(1)
    table.pin(slots)
    with pytest.raises(AssertionError):
        if misuse == "take":
            table.take(2)
        elif misuse == "give":
            table.give(slots)
        elif misuse == "unpin":
            table.unpin(slots)
            table.unpin(slots)
        else:
            table.lose(np.array([1], dtype=np.int32))
