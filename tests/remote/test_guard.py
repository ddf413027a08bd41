"""The figures that keep a key tier from being pressed: how many writes at once, and how fast."""

import math

import pytest

from tiercache.planner.breaker import KeyTierBreaker
from tiercache.remote.guard import (
    FIRST_BACKOFF_S,
    JITTER,
    JOB_NBYTES,
    LONGEST_BACKOFF_S,
    LONGEST_WAIT_S,
    SLOWEST_NBYTES_PER_S,
    SMALLEST_JOB_NBYTES,
    WINDOW_S,
    WriteRate,
    job_blocks,
)

MIB = 1 << 20


def test_jobs_of_blocks_of_any_size():
    assert job_blocks(1000) == 64
    assert job_blocks(MIB) == 16
    assert job_blocks(JOB_NBYTES * 2) == 1


# --- rate ------------------------------------------------------------------------------------------------------------


def steady(rate, jobs, seconds=0.01, now=0.0):
    for i in range(jobs):
        at = now + i
        rate.sent(MIB, at)
        rate.well(MIB, seconds, at, at + seconds)
    return now + jobs


def test_jobs_that_go_well_are_not_slowed_down():
    rate = WriteRate(4)
    steady(rate, 50)
    assert (rate.jobs, rate.pace, rate.falls, rate.wait_s(50.0)) == (4, math.inf, 0, 0.0)
    assert rate.measured == pytest.approx(100 * MIB)


def test_trouble_halves_and_good_jobs_bring_it_back_slowly():
    rate = WriteRate(4)
    now = steady(rate, 10)
    rate.badly(now, now)
    assert rate.jobs == 2 and rate.pace == pytest.approx(200 * MIB)
    rate.badly(now + 1, now + 1)
    assert rate.jobs == 1 and rate.pace == pytest.approx(100 * MIB)
    now = steady(rate, 1, now=now + 2)
    assert rate.jobs == 1 and 100 * MIB < rate.pace < 110 * MIB
    steady(rate, 400, now=now)
    assert rate.jobs == 4 and rate.pace == math.inf


def test_several_jobs_that_tell_of_the_same_trouble_count_once():
    rate = WriteRate(8)
    for _ in range(4):
        rate.badly(10.0, 10.5)
    assert rate.falls == 1 and rate.jobs == 4
    rate.badly(10.6, 10.7)
    assert rate.falls == 2 and rate.jobs == 2


def test_jobs_begin_small_and_grow_while_they_go_well():
    rate = WriteRate(2)
    assert rate.job_nbytes == JOB_NBYTES / 4
    steady(rate, 20)
    assert rate.job_nbytes == JOB_NBYTES
    for i in range(20):
        rate.badly(100.0 + i, 100.5 + i)
    assert rate.job_nbytes == SMALLEST_JOB_NBYTES


def test_it_never_stands_still():
    rate = WriteRate(2)
    for i in range(100):
        rate.badly(float(i), i + 0.5)
    assert rate.jobs == 1 and rate.pace == SLOWEST_NBYTES_PER_S
    rate.sent(100 * MIB, 200.0)
    assert rate.wait_s(200.0) == LONGEST_WAIT_S


def test_the_pace_spreads_jobs():
    rate = WriteRate(2)
    rate.pace = 10.0 * MIB
    rate.sent(MIB, 0.0)
    assert rate.wait_s(0.0) == pytest.approx(0.1)
    rate.sent(MIB, 0.0)
    assert rate.wait_s(0.0) == pytest.approx(0.2)
    assert rate.wait_s(1.0) == 0.0


def test_slow_is_against_the_best_of_jobs_of_that_size():
    rate = WriteRate(4)
    now = steady(rate, 10)
    rate.well(16 * MIB, 0.16, now, now)
    assert rate.falls == 0, "a large job takes longer"
    rate.well(MIB, 0.02, now + 1, now + 1)
    assert rate.falls == 0, "some spread is nothing"
    rate.well(MIB, 0.1, now + 2, now + 2)
    assert rate.falls == 1
    steady(rate, 300, seconds=0.1, now=now + 3)
    assert rate.jobs == 4, "what was best is forgotten"


@pytest.mark.parametrize(("said", "kept"), [(None, None), (-1.0, None), (1.5, None), (math.nan, None), (0.5, 0.5)])
def test_pressure(said, kept):
    rate = WriteRate(4)
    rate.told(said, 1.0, 1.0)
    assert (rate.pressure, rate.falls) == (kept, 0)
    rate.told(0.99, 2.0, 2.0)
    assert (rate.pressure, rate.falls) == (0.99, 1)


# --- breaker ---------------------------------------------------------------------------------------------------------


def opened(seed=1):
    breaker = KeyTierBreaker(seed)
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.retry_at is not None
    return breaker


def test_the_back_off_doubles_up_to_a_limit_and_is_shortened_by_chance():
    breaker, now, waits = opened(), 0.0, []
    for _ in range(12):
        waits.append(breaker.retry_at - now)
        now = breaker.retry_at
        assert not breaker.may_probe(now - 1e-6) and breaker.may_probe(now)
        breaker.probes()
        assert not breaker.may_probe(now), "one at a time"
        breaker.failed(now, probe=True)
    for i, wait in enumerate(waits):
        full = min(FIRST_BACKOFF_S * 2**i, LONGEST_BACKOFF_S)
        assert full * (1 - JITTER) <= wait <= full
    assert len({round(wait / FIRST_BACKOFF_S / 2**i, 6) for i, wait in enumerate(waits[:6])}) > 1
    assert opened(1).retry_at == opened(1).retry_at != opened(2).retry_at


def test_only_a_probe_tells_of_an_open_one():
    breaker = opened()
    until = breaker.retry_at
    breaker.failed(10.0)
    assert breaker.retry_at == until
    breaker.probes()
    breaker.undecided()
    assert breaker.probing
    breaker.undecided(probe=True)
    assert not breaker.probing and not breaker.allows(1e9)


def test_an_answer_closes_on_trial_where_deliveries_failed():
    breaker = opened()
    breaker.answered()
    assert breaker.allows(0.0) and breaker.failures == 2
    breaker.answered()
    assert breaker.failures == 2, "answers are no deliveries"
    breaker.failed(1.0)
    assert breaker.state == "open" and breaker.trips == 2 and breaker.backoff_s == 2 * FIRST_BACKOFF_S
    breaker.answered()
    breaker.succeeded()
    assert (breaker.failures, breaker.backoff_s) == (0, FIRST_BACKOFF_S)


def test_an_answer_is_enough_where_only_questions_failed():
    breaker = KeyTierBreaker(1)
    for _ in range(3):
        breaker.failed(0.0, delivery=False)
    breaker.answered()
    assert breaker.allows(0.0) and breaker.failures == 0


def half_dead(now):
    """A breaker whose store serves one load and lets the next time out, until it opened; it opened then."""
    breaker = KeyTierBreaker(1)
    for turn in range(3):
        assert breaker.allows(now)
        breaker.succeeded()
        breaker.timed_out(now + turn)
    return breaker, now + 2


def test_time_outs_open_it_also_where_others_are_served_in_between():
    breaker, now = half_dead(100.0)
    assert breaker.state == "open" and breaker.trips == 1
    waits = [breaker.backoff_s]
    for _ in range(4):  # it answers, it serves again, and one more request waits in vain
        breaker.probes()
        breaker.answered()
        breaker.succeeded()
        now += 1.5
        assert breaker.allows(now)
        breaker.timed_out(now)
        assert breaker.state == "open", "one is enough now"
        waits.append(breaker.backoff_s)
    assert waits == [FIRST_BACKOFF_S * 2**i for i in range(5)], "it goes on growing"


def test_time_outs_long_ago_are_forgotten():
    breaker, now = half_dead(100.0)
    breaker.answered()
    breaker.succeeded()
    now += WINDOW_S
    for turn in range(2):
        breaker.timed_out(now + turn)
        breaker.succeeded()
    assert breaker.state == "closed"
    now += 2 * WINDOW_S
    for turn in range(3):
        breaker.failed(now + turn)
    assert (breaker.state, breaker.backoff_s) == ("open", FIRST_BACKOFF_S)


def test_failures_that_are_no_time_outs_have_to_follow_each_other():
    breaker = KeyTierBreaker(1)
    for turn in range(20):
        breaker.failed(float(turn))
        breaker.failed(float(turn))
        breaker.succeeded()
    assert breaker.state == "closed"


def test_the_switch():
    breaker = KeyTierBreaker(1, enabled=False)
    assert not breaker.allows(0.0) and not breaker.may_probe(0.0)
    breaker = opened()
    breaker.switch(False)
    assert not breaker.may_probe(1e9)


def test_until_when_a_lookup_need_not_look():
    breaker = KeyTierBreaker(1)
    assert breaker.quiet_until == -math.inf
    breaker.switch(False)
    assert breaker.quiet_until == math.inf
    breaker.switch(True)
    for _ in range(3):
        breaker.failed(0.0)
    assert breaker.quiet_until == breaker.retry_at
    breaker.probes()
    assert breaker.quiet_until == math.inf
    breaker.failed(1.0, probe=True)
    assert breaker.quiet_until == breaker.retry_at > 1.0
    breaker.probes()
    breaker.answered()
    assert breaker.quiet_until == -math.inf and breaker.allows(0.0)
