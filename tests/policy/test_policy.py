"""Policies by name, and what all of them must do."""

import random

import pytest
from planner_kit import Bench, dram

from tiercache import config
from tiercache.errors import ConfigError
from tiercache.policy import POLICIES, Policy, make_policy


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_has_its_name(name):
    policy = make_policy(name)
    assert isinstance(policy, Policy) and policy.name == name


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="lru"):
        make_policy("marvellous")


def test_the_settings_know_the_same_policies():
    assert set(config.POLICIES) == set(POLICIES)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_what_was_released_goes_first(name):
    bench = Bench(dram(6), policy=name)
    for prompt in ("abc", "xyz"):
        bench.now += 1
        bench.stored(prompt)
    bench.hint("xyz")
    bench.now += 1
    bench.stored("pq")
    assert bench.lookup("abc").blocks == 3 and bench.lookup("xyz").blocks == 1


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_new_epoch_starts_over(name):
    bench, chance = Bench(dram(12), policy=name), random.Random(3)
    for i in range(60):
        bench.now += 1
        if i == 30:
            bench.new_epoch(b"epoch-1")
        prompt = "".join(chance.choice("ab") for _ in range(5))
        bench.stored(prompt, bench.load(prompt, out=True).blocks)
        bench.deliver_all()
    assert bench.planner.check() == []
