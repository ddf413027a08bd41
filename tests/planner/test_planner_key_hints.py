"""Hints end, are bounded, and are told apart by prefix."""

import random

import pytest
from planner_kit import WIDTH, symbols_of

from tiercache.planner.hints import ASKED, MISSING, THERE, UNKNOWN, Hints


def hints(capacity=1000):
    return Hints(WIDTH, capacity)


def known(each, prompt, begin=0, now=0.0):
    return tuple(each.known(symbols_of(prompt), begin, len(prompt), now))


def note(each, prompt, begin, end, state, until=10.0):
    each.note(symbols_of(prompt), begin, end, state, until)


def test_nothing_is_known_at_first():
    assert known(hints(), "abc") == (0, 0, False)


def test_there_then_asked_then_missing():
    each = hints()
    note(each, "abcdef", 0, 3, THERE)
    note(each, "abcdef", 3, 5, ASKED)
    note(each, "abcdef", 5, 6, MISSING)
    assert known(each, "abcdefg") == (3, 2, True)
    assert known(each, "abcdefg", 2) == (1, 2, True)
    assert known(each, "abcdefg", 3) == (0, 2, True)
    assert known(each, "abcdefg", 5) == (0, 0, True)
    assert known(each, "abcd") == (3, 1, False)
    assert known(each, "abx") == (2, 0, False)


def test_every_hint_ends():
    each = hints()
    note(each, "abc", 0, 2, THERE, until=5.0)
    note(each, "abc", 2, 3, MISSING, until=3.0)
    assert known(each, "abc", now=2.9) == (2, 0, True)
    assert known(each, "abc", now=3.0) == (2, 0, False)
    assert known(each, "abc", now=5.0) == (0, 0, False)
    note(each, "abc", 0, 1, THERE, until=9.0)
    assert known(each, "abc", now=5.0) == (1, 0, False)


def test_blocks_above_a_hint_are_not_hinted():
    each = hints()
    note(each, "abcdef", 4, 6, THERE)
    assert known(each, "abcdef") == (0, 0, False)
    assert known(each, "abcdef", 4) == (2, 0, False)


def test_prompts_that_diverge_inside_a_run():
    each = hints()
    note(each, "abcdef", 0, 6, THERE)
    note(each, "abcxyz", 3, 5, THERE)
    assert known(each, "abcdef") == (6, 0, False)
    assert known(each, "abcxyz") == (5, 0, False)
    note(each, "abcdef", 1, 2, UNKNOWN)
    assert known(each, "abcxyz") == (1, 0, False)


def test_bounded_and_what_was_noted_longest_ago_goes_first():
    each = hints(capacity=40)
    for i in range(26):
        note(each, chr(97 + i) * 4, 0, 4, THERE, until=100.0 + i)
        assert len(each) <= 40
    assert known(each, "zzzz") == (4, 0, False)
    assert known(each, "aaaa") == (0, 0, False)
    note(each, "zz", 0, 2, THERE, until=50.0)
    assert known(each, "zzzz", now=40.0) == (4, 0, False)
    note(each, "q" * 200, 0, 200, THERE, until=50.0)
    assert len(each) <= 40


@pytest.mark.parametrize("seed", range(5))
def test_bounded_whatever_the_tree(seed):
    rng, each = random.Random(seed), hints(capacity=30)
    for _ in range(400):
        prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 12)))
        begin = rng.randint(0, len(prompt) - 1)
        note(each, prompt, begin, rng.randint(begin + 1, len(prompt)), THERE)
        assert len(each) <= 30
    note(each, "c" * 20, 0, 20, THERE)
    assert known(each, "c" * 20) == (20, 0, False)


def test_clear():
    each = hints()
    note(each, "abc", 0, 3, THERE)
    each.clear()
    assert len(each) == 0 and known(each, "abc") == (0, 0, False)


@pytest.mark.parametrize("seed", range(20))
def test_against_a_dict(seed):
    rng, each, said = random.Random(seed), hints(100_000), {}
    for step in range(120):
        prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 10)))
        begin = rng.randint(0, len(prompt))
        end = rng.randint(begin, len(prompt))
        state, until = rng.choice([UNKNOWN, MISSING, THERE, THERE, ASKED]), step + rng.randint(0, 60)
        note(each, prompt, begin, end, state, until)
        said.update({prompt[: at + 1]: (state, until) for at in range(begin, end)})
        prompt = "".join(rng.choice("ab") for _ in range(rng.randint(1, 10)))
        begin = rng.randint(0, len(prompt))
        states = [said.get(prompt[: at + 1], (UNKNOWN, 0)) for at in range(begin, len(prompt))]
        states = [state if until > step else UNKNOWN for state, until in states] + [UNKNOWN]
        there = next(i for i, state in enumerate(states) if state != THERE)
        asked = next(i for i, state in enumerate(states[there:]) if state not in (ASKED, THERE))
        assert known(each, prompt, begin, step) == (there, asked, states[there + asked] == MISSING)
