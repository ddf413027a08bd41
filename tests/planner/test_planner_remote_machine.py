"""Random steps against a planner with a key tier: no wrong bytes, no charge above the quota, everything checked."""

import random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from remote_steps import LEVELS, RemoteSteps

QUICK = settings(
    max_examples=4,
    stateful_step_count=40,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
LONG = settings(QUICK, max_examples=120, stateful_step_count=60, phases=[Phase.generate, Phase.shrink])
CHANCE = st.randoms(use_true_random=False)


class RemoteMachine(RuleBasedStateMachine):
    """One rule: any step. Subclasses name the levels."""

    kind = ""

    def __init__(self):
        super().__init__()
        self.steps = None

    @initialize(chance=CHANCE)
    def build(self, chance):
        self.steps = RemoteSteps(chance, self.kind)

    @rule(chance=CHANCE)
    def step(self, chance):
        self.steps.step(chance)

    def teardown(self):
        if self.steps is not None:
            self.steps.bench.finish()


def machine(kind):
    return type(f"RemoteMachine_{kind}", (RemoteMachine,), {"kind": kind})


def walk(kind, seed, steps, trouble):
    chance = random.Random(f"remote-{kind}-{seed}")
    walker = RemoteSteps(chance, kind)
    for _ in range(steps):
        walker.step(chance, trouble)
    walker.bench.finish()
    return walker.bench


@pytest.mark.parametrize("kind", LEVELS)
def test_machine(kind):
    run_state_machine_as_test(machine(kind), settings=QUICK)


@pytest.mark.parametrize("trouble", [True, False], ids=["trouble", "calm"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", LEVELS)
def test_walk(kind, seed, trouble):
    bench = walk(kind, seed, 100, trouble)
    counters = bench.planner.finds.counters
    assert counters.finds and counters.fetched, "nothing was asked for, or nothing came"


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
    for seed in range(1000, 1015):
        walk(kind, seed, 600, trouble)
