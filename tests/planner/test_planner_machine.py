"""Random steps against the planner, with a model of what every slot holds; everything is checked after every step.

Jobs come back in any order, fail, hang past their deadline and return later; claims are lost, slots rot, epochs change.
The walks go far, the machine shrinks what it finds.
"""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from planner_steps import LEVELS, Steps

QUICK = settings(
    max_examples=15,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
LONG = settings(QUICK, max_examples=300, stateful_step_count=60, phases=[Phase.generate, Phase.shrink])
CHANCE = st.randoms(use_true_random=False)


class PlannerMachine(RuleBasedStateMachine):
    """One rule: any step. Subclasses name the levels."""

    kind = ""

    def __init__(self):
        super().__init__()
        self.steps = None

    @initialize(chance=CHANCE)
    def build(self, chance):
        self.steps = Steps(chance, self.kind)

    @rule(chance=CHANCE)
    def step(self, chance):
        self.steps.step(chance)

    def teardown(self):
        if self.steps is not None:
            self.steps.bench.finish()


def machine(kind):
    return type(f"Machine_{kind}", (PlannerMachine,), {"kind": kind})


def walk(kind, seed, steps, trouble):
    chance = random.Random(f"{kind}-{seed}")
    walker = Steps(chance, kind)
    for _ in range(steps):
        walker.step(chance, trouble)
    walker.bench.finish()
    return walker.bench


@pytest.mark.parametrize("kind", LEVELS)
def test_machine(kind):
    run_state_machine_as_test(machine(kind), settings=QUICK)


@pytest.mark.parametrize("trouble", [True, False], ids=["trouble", "calm"])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", LEVELS)
def test_walk(kind, seed, trouble):
    walk(kind, seed, 150, trouble)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", LEVELS)
def test_machine_long(kind):
    run_state_machine_as_test(machine(kind), settings=LONG)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trouble", [True, False], ids=["trouble", "calm"])
@pytest.mark.parametrize("kind", LEVELS)
def test_walk_long(kind, trouble):
    for seed in range(1000, 1060):
        walk(kind, seed, 600, trouble)
