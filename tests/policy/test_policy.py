"""Policies by name, and what LRU's key says."""

import math

import pytest

from tiercache import config
from tiercache.errors import ConfigError
from tiercache.policy import LRU, POLICIES, Policy, make_policy


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_has_its_name_and_a_key(name):
    policy = make_policy(name)
    assert isinstance(policy, Policy) and policy.name == name
    assert policy.key(1.0, 3, 7) < policy.key(2.0, 3, 7)
    assert policy.key(-math.inf, 3, 7) < policy.key(0.0, 1, 0), "released goes first"
    assert policy.key(5.0, 2, 1) == policy.key(5.0, 2, 1)


def test_lru_looks_at_the_last_use_only():
    assert LRU().key(12.5, 1, 0) == LRU().key(12.5, 99, 1000) == 12.5


def test_an_unknown_policy_is_refused_with_the_names_there_are():
    with pytest.raises(ConfigError, match="lru"):
        make_policy("marvellous")


def test_the_settings_know_the_same_policies():
    assert set(config.POLICIES) == set(POLICIES)
