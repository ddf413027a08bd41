"""Writes to a key tier, stepped by hand: what is queued, what is dropped, what a job holds, and when it is given up."""

import dataclasses

import numpy as np
import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.state import Limits, RemoteLimits
from tiercache.types import COLD, JobOverdue

REMOTE = RemoteLimits(quota=0.5, pool_threads=4, write="prefill", write_threads=2)
P = "abcdefgh"


def bench(*specs, limits=None, policy="lru", **remote):
    return Bench(*(specs or (dram(32),)), remote=dataclasses.replace(REMOTE, **remote), limits=limits, policy=policy)


def writes(each):
    return [job for job in each.jobs("write") if job.dst_level == len(each.specs)]


def counters(each):
    return each.planner.finds.counters


def dropped(each):
    return counters(each).writes_dropped


def names(each, job):
    return [each.tokens[ident][1] for ident in job.idents.tolist()]


# --- what is written -------------------------------------------------------------------------------------------------


def test_what_was_stored_is_written_and_known_to_be_there():
    each = bench()
    each.stored(P)
    (job,) = writes(each)
    assert (job.src_level, job.dst_level, job.dst_slots.tolist(), job.deadline_s) == (0, 1, list(range(8)), 0.2)
    assert each.tables[0].pins[job.src_slots].tolist() == [1] * 8
    each.check()
    each.deliver(job.id)
    assert {prompt for _, prompt in each.shared} == {P[: i + 1] for i in range(8)}
    assert not each.tables[0].pins.any() and counters(each).written == 8
    each.invalidate("a")
    assert each.lookup(P).remote == 8, "hinted at, without a question"
    each.finish()


def test_a_store_is_written_once_and_ancestors_that_were_not_come_along():
    each = bench(pool_threads=4)
    each.switch(False)
    each.stored("abcd")
    assert not writes(each) and dropped(each) == {"off": 4}
    each.switch(True)
    each.stored(P, 4)
    (job,) = writes(each)
    assert job.dst_slots.tolist() == list(range(8)), "the last four alone are of no use elsewhere"
    each.deliver_all()
    each.stored(P)
    each.stored("abcdxy")
    (job,) = writes(each)
    assert names(each, job) == ["abcdx", "abcdxy"]
    each.finish()


def test_blocks_computed_under_a_charged_prefix_are_written_and_those_that_came_are_not():
    each = bench()
    each.share("abcd")
    assert each.asked("abcd").remote == 4
    load = each.load(P)
    each.deliver_all()
    each.release_load(load)
    assert not writes(each)
    each.stored(P, 4)
    (job,) = writes(each)
    assert names(each, job) == ["abcde", "abcdef", "abcdefg", P]
    each.finish()


def test_partial_blocks_blocks_with_an_end_and_cold_ones_are_not_written():
    each = bench(dram(32), nvme(64))
    each.stored("abC")
    assert names(each, writes(each)[0]) == ["a", "ab"]
    each.deliver_all()
    each.stored("xy", ttl=100.0)
    assert not writes(each)
    each.stored("xyz")
    assert [names(each, job) for job in writes(each)] == [["x", "xy", "xyz"]], "another store said that they stay"
    each.deliver_all()
    each.stored("uv", priority=COLD)
    assert not writes(each)
    each.finish()
    alone = bench()
    alone.stored("uv", priority=COLD)
    assert len(writes(alone)) == 1, "there is no other place for them"
    alone.finish()


def test_thresholds():
    each = bench(max_position=3, min_blocks=5)
    each.stored("abcd")
    assert not writes(each), "too short"
    each.stored("xyzuv")
    assert [names(each, job) for job in writes(each)] == [["x", "xy", "xyz"]]
    each.deliver_all()
    each.share("mnopq")
    found = each.asked("mnopq")
    assert (found.blocks, found.remote) == (0, 0), "three blocks may come, which is too little"
    each.stored("mn")
    assert each.lookup("mn").blocks == 2
    each.finish()


def test_what_is_hinted_at_is_not_written():
    each = bench()
    each.share("abc")
    assert each.asked("abcde").remote == 3
    each.stored("abcde")
    assert [names(each, job) for job in writes(each)] == [["abcd", "abcde"]]
    assert dropped(each) == {"known": 3}
    each.finish()


def test_jobs_are_bounded():
    each = bench(dram(800))
    each.stored("".join(chr(ord("a") + i % 26) for i in range(90)))
    assert sorted(job.n for job in writes(each)) == [26, 64]
    each.finish()


def test_a_write_waits_for_finds_that_wait():
    each = bench(pool_threads=2)
    for prompt in ("x", "y", "z"):
        each.lookup(prompt), each.take()
    assert each.planner.finds.waiting == 2
    each.stored(P)
    assert not writes(each)
    each.answer(), each.answer(), each.answer()
    assert len(writes(each)) == 1
    each.finish()


def test_the_largest_run_goes_first_and_the_smallest_is_dropped():
    each = bench(dram(100), write_threads=1, queued_write_blocks=12, queued_writes=8)
    each.stored("zz")
    assert len(writes(each)) == 1
    for prompt in ("ab", "cdefg", "hij", "klmnop"):
        each.stored(prompt)
    waiting = [run.left for run in each.planner.remote_writes.runs]
    assert waiting == [6, 5] and dropped(each) == {"full": 5}
    each.deliver(writes(each)[0].id)
    assert names(each, writes(each)[0])[-1] == "klmnop"
    each.check()
    each.stored("ab")
    each.finish()


# --- what is gone by its turn ----------------------------------------------------------------------------------------


def test_a_slot_that_holds_another_block_by_its_turn_is_not_written():
    each = bench(dram(8), write_threads=1)
    each.stored("z")
    each.stored("abcd")
    assert each.planner.remote_writes.waiting_blocks == 4
    slots = each.planner.remote_writes.runs[0].slots.tolist()
    each.invalidate("a")
    each.stored("wxyz")
    taken = {place[0][0] for prompt, place in each.where().items() if prompt.startswith("w")}
    assert taken & set(slots), "its slots hold other blocks"
    while each.running:
        each.deliver(next(iter(each.running)))
    assert dropped(each)["gone"] == 4
    assert {prompt for _, prompt in each.shared} == {"z", "w", "wx", "wxy", "wxyz"}
    each.finish()


# --- hanging, failing, full ------------------------------------------------------------------------------------------


def test_an_overdue_write_frees_its_source_at_once():
    each = bench(dram(8))
    each.stored("abcd")
    (job,) = writes(each)
    each.overdue(job.id)
    assert not each.tables[0].pins.any() and each.states(0) == {"FREE": 4, "RESIDENT": 4}
    assert each.tables[0].lost == 0 and each.state.credits[0].shared == 0
    assert each.state.credits[-1].lost_jobs == 0, "finds and loads have threads of their own"
    each.invalidate("a")
    each.stored("wxyz")
    each.check()
    each.deliver(job.id)
    assert dropped(each)["deadline"] == 4
    each.finish()


def test_hung_writes_take_the_threads_of_writes_only():
    each = bench(dram(64))
    for prompt in ("ab", "cd"):
        each.stored(prompt)
    for job in writes(each):
        each.overdue(job.id)
    each.now += 1.0
    each.stored("ef")
    assert len(writes(each)) == 2 and dropped(each)["offline"] == 2
    each.share("xy")
    assert each.asked("xy").remote == 2
    each.finish()


@pytest.mark.parametrize("reason", ["io", "deadline"])
def test_writes_that_fail_take_it_offline(reason):
    each = bench()
    each.share("mno")
    assert each.asked("mno").remote == 3
    for prompt in ("ab", "cd", "ef"):
        each.stored(prompt)
        each.deliver(writes(each)[0].id, False, reason)
    breaker = each.state.key_breaker
    assert (breaker.state, breaker.trips) == ("open", 1)
    assert each.lookup("mno").remote == 0, "hints are not offered"
    each.stored("gh")
    assert not writes(each) and not each.finds and dropped(each)["offline"] == 2
    each.now += 0.05
    each.stored("ij")
    assert not writes(each) and len(each.finds) == 1, "a question, not a write"
    each.answer()
    assert breaker.state == "closed" and each.lookup("mno").remote == 3, "they were kept"
    each.stored("kl")
    each.deliver(writes(each)[0].id, False, reason)
    assert (breaker.state, breaker.trips) == ("open", 2), "it is on trial"
    assert breaker.backoff_s == pytest.approx(0.1)
    each.now += 0.1
    each.lookup("qr"), each.take()
    each.answer()
    each.stored("st")
    each.deliver(writes(each)[0].id)
    assert breaker.failures == 0 and breaker.backoff_s == 0.05
    each.stored("ab" + "uv")
    assert names(each, writes(each)[0])[0] == "a", "what failed is tried again with what continues it"
    each.finish()


def test_after_a_failure_no_more_is_under_way_than_may_fail():
    each = bench(dram(64), pool_threads=16, write_threads=4)
    each.stored("ab")
    each.deliver(writes(each)[0].id, False, "io")
    for prompt in "uvwxyz":
        each.lookup(prompt), each.take()
        each.stored("ab" + prompt)
    assert len(each.finds) + len(writes(each)) == 2
    each.check()
    (find,), (write,) = each.finds, writes(each)
    each.planner.commit(JobOverdue(find), each.now), each.take()
    assert each.state.key_breaker.failures == 2
    assert len(each.finds) + len(writes(each)) == 2, "one hangs, one is under way"
    each.overdue(write.id)
    assert each.state.key_breaker.state == "open"
    assert len(each.finds) + len(writes(each)) == 2 and each.planner.finds.waiting == 0
    assert each.planner.remote_writes.waiting_blocks == 0
    each.answer(find)
    each.finish()


def test_refused_blocks_are_no_failure_and_end_their_run():
    each = bench(dram(800), write_threads=1)
    each.stored("".join(chr(ord("a") + i % 26) for i in range(90)))
    (job,) = writes(each)
    each.deliver(job.id, [True] * 10 + [False] * 54, "refused")
    assert (counters(each).written, counters(each).writes_refused) == (10, 54)
    assert dropped(each) == {"behind": 26} and not writes(each)
    assert each.state.key_breaker.failures == 0
    assert each.planner.remote_writes.rate.falls == 1
    each.finish()


def test_a_slow_pace_is_a_delay_of_the_job():
    each = bench(dram(64), write_threads=1)
    rate = each.planner.remote_writes.rate
    rate.pace = 4 * 4096.0
    each.stored("ab")
    each.stored("cd")
    each.stored("ef")
    assert writes(each)[0].start_after_s == 0.0
    each.deliver(writes(each)[0].id)
    assert writes(each)[0].start_after_s == pytest.approx(0.5, abs=0.01)
    each.finish()


# --- eviction --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [(dram(16),), (dram(16), nvme(64)), (hbm(8), dram(16))], ids=["dram", "nvme", "hbm"])
def test_blocks_are_written_before_they_leave_memory(specs):
    each = bench(*specs, write="eviction")
    for i in range(12):
        each.now += 1.0
        each.stored("abcd" if i == 0 else chr(ord("e") + i) * 4)
        each.deliver_all()
    written = {prompt for _, prompt in each.shared}
    assert "abcd" in written and "a" in written
    level = each.state.memory_level
    assert "abcd" not in each.residents(level)
    before = counters(each).write_blocks_queued
    each.tend(), each.tend()
    assert counters(each).write_blocks_queued == before, "each once"
    each.finish()


def test_nothing_is_queued_while_there_is_room():
    each = bench(dram(64), write="eviction")
    each.stored("abcd")
    each.tend()
    assert counters(each).write_blocks_queued == 0
    each.finish()


# --- epochs, switches ------------------------------------------------------------------------------------------------


def test_a_new_epoch_drops_what_waits_and_takes_no_hint_of_what_runs():
    each = bench(write_threads=1)
    each.stored("ab")
    each.stored("cd")
    (job,) = writes(each)
    each.new_epoch(b"epoch-1")
    assert dropped(each) == {"stale": 2} and each.planner.remote_writes.waiting_blocks == 0
    each.check()
    each.deliver(job.id)
    assert each.lookup("ab").remote == 0
    assert len(each.planner.finds.hints) == 2, "what the lookup asks for"
    each.finish()


def test_the_switch_drops_what_waits():
    each = bench(write_threads=1)
    each.stored("ab")
    each.stored("cd")
    each.switch(False)
    assert dropped(each) == {"off": 2} and not each.planner.remote_writes.waiting_blocks
    each.lookup("x"), each.take()
    assert not each.finds
    each.deliver_all()
    each.switch(True, stores=False)
    each.stored("ef")
    assert not writes(each) and dropped(each) == {"off": 4}
    each.lookup("x"), each.take()
    assert len(each.finds) == 1
    each.switch(True)
    each.stored("gh")
    assert len(writes(each)) == 1
    each.finish()


def test_the_switch_ends_loads_that_wait():
    each = Bench(dram(200), remote=dataclasses.replace(REMOTE, pool_threads=2), limits=Limits(job_blocks=2))
    each.share(P)
    assert each.asked(P).remote == 8
    load = each.load(P)
    assert len(each.running) == 1 and not load.done
    each.switch(False)
    assert not load.done, "what runs goes on"
    each.deliver_all()
    assert load.done and load.blocks == 2
    each.release_load(load)
    each.finish()


def test_a_key_tier_that_is_given_up_is_asked_nothing_by_a_lookup():
    each = bench()
    each.share(P)
    assert each.asked(P).remote == 8
    each.switch(False)
    assert not each.planner.begins(each.encode("q")[0][:8])
    for _ in range(3):
        assert each.lookup(P)[:3] == (0, (0,), 0)
        assert each.lookup("q").pending == 0
    each.take()
    assert not each.finds
    each.finish()


def test_a_load_counts_writes_of_nvme_only():
    """Blocks on their way to the key tier are not about to be free."""
    each = bench(dram(16), nvme(64))
    each.stored("abcd")
    assert each.state.credits[0].outbound_writes == 0 and each.state.credits[0].shared == 4
    assert np.array_equal(each.tables[0].pins > 0, each.tables[0].state > 0)
    each.finish()
