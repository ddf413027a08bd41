"""Jobs that hang, fail and lie: lost slots, breakers, holes."""

import numpy as np
import pytest
from planner_kit import GARBAGE, Bench, dram, hbm, nvme

from tiercache.planner.breaker import Breaker
from tiercache.planner.state import Limits
from tiercache.slots import SlotState
from tiercache.types import JobResult


def on_nvme(bench, *prompts):
    for prompt in prompts:
        bench.stored(prompt)
        bench.drain()
        bench.deliver_all()
        bench.now += 1


# -- overdue ----------------------------------------------------------------------------------------------------------


def test_an_overdue_store_loses_its_slots_until_its_thread_returns():
    bench = Bench(dram(8, pool_threads=4))
    plan = bench.store("abc")
    assert not bench.overdue(plan.job).ok.any()
    assert bench.states(0) == {"FREE": 5, "LOST": 3}
    assert bench.where() == {} and bench.store("abc").accepted == 3
    bench.scribble()
    bench.check()
    assert not bench.deliver(plan.job).ok.any()
    assert bench.states(0) == {"FREE": 5, "WRITING": 3}, "free again, never resident"
    bench.deliver_all()
    bench.finish()


def test_an_overdue_load_ends_without_its_blocks_and_its_slots_come_back_later():
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "abcd", "wxyz")
    load = bench.load("ab")
    job = bench.job("load")
    assert bench.overdue(job.id).loads == [load]
    assert load.done and load.blocks == 0
    assert bench.states(0)["LOST"] == 2
    bench.scribble()
    assert bench.lookup("ab").by_level == (0, 2), "the source is untouched"
    bench.hint("ab")
    bench.stored("q")
    bench.drain()
    for other in bench.jobs("write"):
        assert not set(other.dst_slots.tolist()) & set(job.src_slots.tolist()), "a thread still reads the source"
        bench.deliver(other.id)
    bench.check()
    bench.deliver(job.id)
    assert "LOST" not in bench.states(0)
    bench.finish()


def test_an_overdue_load_into_rows_is_cut_before_the_job_that_hangs():
    bench = Bench(dram(4), nvme(16), limits=Limits(job_blocks=1))
    for i in range(4):
        bench.stored("abcd"[: i + 1], i)
        bench.drain()
        bench.deliver_all()
    bench.now += 1
    on_nvme(bench, "w")
    for i in range(1, 4):
        bench.stored("wxyz"[: i + 1], i)
        bench.drain()
        bench.deliver_all()
    load = bench.load("abcd", out=True)
    jobs = bench.jobs("load")
    assert [job.n for job in jobs] == [1, 1, 1, 1]
    bench.overdue(jobs[2].id)
    for job in (jobs[0], jobs[1], jobs[3]):
        bench.deliver(job.id)
    assert load.done and load.blocks == 2
    bench.deliver(jobs[2].id)
    assert load.blocks == 2 and bench.rows[load.endpoint][2] == GARBAGE
    bench.finish()


def test_an_overdue_write_loses_slots_of_nvme_and_keeps_its_source():
    bench = Bench(dram(4), nvme(8))
    bench.stored("abcd")
    hung = bench.job("write")
    bench.overdue(hung.id)
    assert bench.states(1) == {"FREE": 4, "LOST": 4} and bench.lookup("abcd").by_level == (4, 0)
    bench.drain()
    (again,) = [job for job in bench.jobs("write") if job is not hung]
    assert not set(again.dst_slots.tolist()) & set(hung.dst_slots.tolist())
    bench.scribble()
    bench.check()
    bench.deliver(again.id)
    assert bench.store("q").reason == "no_room", "the hung thread may still read what DRAM has"
    bench.deliver(hung.id)
    assert bench.states(1) == {"RESIDENT": 4, "FREE": 4}
    assert bench.store("q").accepted == 1
    bench.finish()


def test_a_slot_held_by_a_loaded_outlives_the_lost_job_that_wrote_it():
    bench = Bench(dram(8), nvme(16), limits=Limits(job_blocks=1))
    for prompt in ("abcd", "stuvwxyz"):
        for i in range(len(prompt)):
            bench.stored(prompt[: i + 1], i)
            bench.drain()
            bench.deliver_all()
        bench.now += 1
    load = bench.load("abc")
    jobs = bench.jobs("load")
    assert len(jobs) == 2 and len(load.segments) == 1
    bench.overdue(jobs[1].id)
    bench.deliver(jobs[1].id)
    assert bench.states(0)["LOST"] == 1, "the load is not over, so the slot is still held"
    bench.check()
    bench.deliver_all()
    assert load.done and load.blocks == 1 and "LOST" not in bench.states(0)
    bench.finish()


def test_an_overdue_job_gives_its_credits_back():
    """A hung read takes no credit from what can still be served."""
    bench = Bench(dram(4), nvme(16))
    on_nvme(bench, "abcd", "wxyz", "mn")
    bench.load("ab", out=True)
    hung = bench.job("load")
    bench.load("abcd", out=True)
    bench.overdue(hung.id)
    others = [bench.load("wx", out=True), bench.load("mn", out=True), bench.load("abcd", out=True)]
    for job in bench.jobs("load"):
        if job.id != hung.id:
            bench.deliver(job.id)
    for job in bench.jobs():
        if job.id != hung.id:
            bench.deliver(job.id)
    assert all(load.done for load in others) and [load.blocks for load in others] == [2, 2, 4]
    bench.finish()


def test_a_job_of_an_old_epoch_that_hangs():
    bench = Bench(dram(4, pool_threads=4), nvme(8))
    plan = bench.store("ab")
    bench.new_epoch(b"new")
    bench.overdue(plan.job)
    assert bench.states(0) == {"FREE": 2, "LOST": 2}
    bench.scribble()
    assert bench.store("abcd").accepted == 2
    bench.check()
    bench.deliver(plan.job)
    bench.finish()


def test_a_delayed_write_that_hangs():
    bench = Bench(dram(8), nvme(16), write_after_s=2.0)
    bench.stored("abcd")
    job = bench.job("write")
    assert job.start_after_s == 2.0
    bench.overdue(job.id)
    bench.check()
    bench.drain()
    bench.check()
    bench.deliver_all()
    assert bench.residents(1) == {"a", "ab", "abc", "abcd"}, "written again, by another job"
    bench.finish()


# -- too many lost jobs -----------------------------------------------------------------------------------------------


def test_lost_jobs_take_a_level_offline_until_they_return():
    bench = Bench(dram(8), nvme(16, pool_threads=3))
    on_nvme(bench, "ab", "cd", "stuvwxyz")
    first, second = bench.load("ab", out=True), bench.load("cd", out=True)
    jobs = bench.jobs("load")
    bench.overdue(jobs[0].id)
    assert bench.state.online(1)
    bench.overdue(jobs[1].id)
    assert not bench.state.online(1) and first.done and second.done
    bench.tend(later_s=1000.0)
    assert not bench.state.online(1), "no time brings the threads back"
    assert bench.lookup("ab").blocks == 0
    assert bench.store("ab").accepted == 2, "what is out of reach is stored again"
    bench.deliver(jobs[0].id)
    assert bench.state.online(1)
    bench.finish()


def test_queued_loads_end_when_their_level_goes_offline():
    blocks = {prompt[: i + 1]: 1.0 for prompt in ("abcd", "efgh") for i in range(4)}
    bench = Bench.holding(blocks, dram(16, pool_threads=4), nvme(16, pool_threads=2), limits=Limits(job_blocks=2))
    running = bench.load("ab", out=True)
    store = bench.store("mn")
    slots, joined, rows = bench.load("ef"), bench.load("ef"), bench.load("abcd", out=True)
    more = bench.load("efgh", out=True)
    hung = bench.jobs("load")[0]
    assert not slots.waiting and not joined.waiting, "no credits of level 0 are left"
    ended = bench.overdue(hung.id).loads
    assert running in ended and {slots.id, joined.id} <= {load.id for load in ended}
    bench.check()
    bench.deliver_all()
    assert all(load.done for load in (running, slots, joined, rows, more))
    assert (running.blocks, slots.blocks, joined.blocks) == (0, 0, 0)
    assert store.accepted == 2 and bench.lookup("abcd").blocks == 4, "nothing was lost but time"
    bench.finish()


def test_slots_reserved_for_loads_that_end_unread_are_free_again():
    blocks = {prompt[: i + 1]: 1.0 for prompt in ("abcd", "efgh") for i in range(4)}
    bench = Bench.holding(blocks, dram(32, pool_threads=4), nvme(16, pool_threads=2), limits=Limits(job_blocks=2))
    first, second = bench.load("abcd", out=True), bench.load("efgh", out=True)
    third = bench.load("efgh")
    assert [job.n for job in bench.jobs("load")] == [2, 2] and len(second.segments) == 2
    assert bench.states(0) == {"WRITING": 8, "FREE": 24}
    jobs = bench.jobs("load")
    assert bench.overdue(jobs[0].id).loads == [second, third]
    assert bench.states(0) == {"LOST": 2, "WRITING": 2, "FREE": 28}
    bench.check()
    bench.deliver(jobs[1].id)
    assert first.done and (first.blocks, second.blocks, third.blocks) == (0, 0, 0)
    bench.finish()


# -- breaker ----------------------------------------------------------------------------------------------------------


def fail_loads(bench, n, reason="io"):
    for _ in range(n):
        load = bench.load("ab", out=True)
        assert load.blocks == 2
        bench.deliver(bench.job("load").id, False, reason)


def test_the_breaker_opens_after_three_failures_and_closes_after_a_probe():
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "ab", "wxyz")
    fail_loads(bench, 2, "deadline")
    assert bench.state.online(1)
    fail_loads(bench, 1, "deadline")
    breaker = bench.state.breakers[1]
    assert (breaker.state, breaker.trips) == ("open", 1)
    assert bench.lookup("ab").blocks == 0 and bench.load("ab", out=True).blocks == 0
    bench.tend(later_s=1.5)
    assert bench.lookup("ab").blocks == 2
    probe = bench.load("ab", out=True)
    assert probe.blocks == 2 and breaker.state == "half-open"
    assert bench.lookup("ab").blocks == 0, "one probe at a time"
    bench.deliver(bench.job("load").id, False, "deadline")
    assert breaker.state == "open"
    bench.tend(later_s=1.5)
    assert bench.lookup("ab").blocks == 0, "the second back-off is longer"
    bench.tend(later_s=1.0)
    bench.load("ab", out=True)
    bench.deliver(bench.job("load").id)
    assert breaker.state == "closed" and bench.lookup("ab").blocks == 2
    bench.finish()


def test_damage_is_not_taken_for_a_failing_level():
    bench = Bench(dram(4), nvme(12))
    on_nvme(bench, "ab", "c", "d", "e", "wxyz")
    for prompt in ("ab", "c", "d", "e"):  # the first job brings a block, the other three nothing at all
        bench.corrupt(bench.where()[prompt][1][0])
        bench.load(prompt, out=True)
        bench.deliver_all()
    assert bench.state.breakers[1].trips == 0 and bench.state.online(1)
    assert [bench.lookup(prompt).blocks for prompt in ("ab", "c", "d", "e")] == [1, 0, 0, 0]
    bench.finish()


def test_a_probe_of_an_old_epoch_frees_the_breaker():
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "ab", "wxyz")
    fail_loads(bench, 3, "deadline")
    bench.tend(later_s=2.0)
    bench.load("ab", out=True)
    assert bench.state.breakers[1].state == "half-open"
    bench.new_epoch(b"new")
    bench.deliver(bench.job("load").id, False, "cancelled")
    bench.tend(later_s=100.0)
    assert bench.state.online(1)
    bench.finish()


def test_a_probe_that_hangs_keeps_the_level_offline_for_another_back_off():
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "ab", "wxyz")
    fail_loads(bench, 3, "deadline")
    bench.tend(later_s=2.0)
    bench.load("ab", out=True)
    bench.overdue(bench.job("load").id)
    assert bench.state.breakers[1].state == "open" and not bench.state.online(1)
    bench.tend(later_s=3.0)
    assert bench.state.online(1)
    bench.finish()


def test_failures_of_jobs_that_ran_when_the_breaker_opened_lengthen_nothing():
    breaker = Breaker(threshold=3, first_backoff_s=1.0, longest_backoff_s=8.0)
    for _ in range(60):
        breaker.failed(100.0)
    assert breaker.trips == 1 and breaker.retry_at == 101.0
    waits = []
    for _ in range(6):
        now = breaker.retry_at
        assert breaker.allows(now) and not breaker.allows(now - 0.1)
        breaker.started()
        assert not breaker.allows(now + 100.0)
        breaker.failed(now)
        waits.append(breaker.retry_at - now)
    assert waits == [2.0, 4.0, 8.0, 8.0, 8.0, 8.0]
    breaker.started()
    breaker.undecided()
    assert breaker.allows(breaker.retry_at)
    breaker.started()
    breaker.succeeded()
    assert breaker.state == "closed" and breaker.failures == 0


def test_nvme_offline_dram_goes_on_alone():
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "ab", "wxyz")
    fail_loads(bench, 3, "deadline")
    for prompt in ("cdef", "ghij"):
        assert bench.stored(prompt).accepted == 4
        assert bench.lookup(prompt).blocks == 4
    assert bench.planner.level_counters()[0].dropped_in_place == 4
    assert not bench.jobs()
    bench.finish()


# -- holes ------------------------------------------------------------------------------------------------------------


def hole(dram_blocks=4):
    """P of four blocks on NVMe only; the second was found wrong by a load."""
    bench = Bench(dram(dram_blocks), nvme(12), exclusive=False)
    on_nvme(bench, "abcd", "rstuvwxyz"[-dram_blocks:])
    slot = bench.where()["ab"][1][0]
    bench.corrupt(slot)
    load = bench.load("abcd", out=True)
    bench.deliver(bench.job("load").id)
    assert load.done and load.blocks == 1
    bench.tend()
    bench.deliver_all()
    return bench, slot


def test_a_hole_ends_lookups_and_keeps_what_lies_behind_it():
    bench, slot = hole()
    bench.check()
    found = bench.lookup("abcd")
    assert (found.blocks, found.pending) == (1, 0)
    assert bench.load("abcd", out=True).blocks == 1
    assert bench.where()["ab"][1] == (slot, SlotState.BAD)
    assert bench.residents(1) >= {"a", "abc", "abcd"}
    assert bench.store("abcd", 2).reason == "parent_missing"
    bench.deliver_all()
    bench.finish()


def test_a_store_heals_a_hole_and_the_slot_is_written_again_in_place():
    bench, slot = hole()
    plan = bench.store("abcd", 1)
    assert (plan.accepted, plan.present) == (1, 2)
    assert bench.job("store").src_slots.tolist() == [0]
    bench.deliver(plan.job)
    assert bench.lookup("abcd").blocks == 4
    bench.messages.clear()
    bench.drain()
    bench.deliver_all()
    (write,) = [m for m in bench.messages if getattr(m, "kind", "") == "write"]
    assert write.dst_slots.tolist() == [slot] and write.claims.parent_slots.tolist() == [bench.where()["a"][1][0]]
    assert bench.where()["ab"][1] == (slot, SlotState.RESIDENT)
    assert bench.planner.level_counters()[1].healed == 1
    bench.finish()


def test_only_what_a_result_calls_bad_is_spoilt():
    """The others of the job failed too, but their source is not to blame."""
    bench = Bench(dram(4), nvme(12), exclusive=False)
    on_nvme(bench, "abc", "wxyz")
    load = bench.load("abc", out=True)
    job = bench.job("load")
    bench.running.pop(job.id)
    bad = np.array([False, True, False])
    outcome = bench.planner.commit(JobResult(job.id, np.zeros(3, np.bool_), 0, 0.1, reason="io", bad=bad), bench.now)
    bench._over(outcome.loads)
    bench.take()
    assert load.done and load.blocks == 0
    assert [bench.where()[prompt][1][1] for prompt in ("a", "ab", "abc")] == [
        SlotState.RESIDENT,
        SlotState.BAD,
        SlotState.RESIDENT,
    ]


def test_a_bad_slot_is_not_written_again_while_another_load_reads_it():
    bench = Bench(dram(4), nvme(12), exclusive=False)
    on_nvme(bench, "abcd", "wxyz")
    slot = bench.where()["ab"][1][0]
    bench.corrupt(slot)
    for _ in range(2):
        bench.load("abcd", out=True)
    first, second = [job.id for job in bench.jobs("load")]
    bench.deliver(first)
    bench.stored("ab", 1)
    bench.drain()
    assert "ab" in bench.residents(0) and not bench.jobs("write")
    bench.deliver(second)
    assert bench.job("write").dst_slots.tolist() == [slot]
    bench.finish()


def test_a_hole_whose_healing_write_fails_takes_what_lies_behind_it_off_nvme():
    bench, _ = hole()
    bench.stored("abcd", 1)
    bench.drain()
    (write,) = bench.jobs("write")
    bench.deliver(write.id, False, "io")
    assert bench.residents(1) & {"a", "ab", "abc", "abcd"} == {"a"}
    bench.deliver_all()
    bench.finish()


def test_what_lies_behind_a_hole_does_not_hold_up_other_writes():
    bench, _ = hole(dram_blocks=8)
    bench.load("a", out=True)
    bench.deliver_all()
    bench.stored("pq")
    assert bench.drain() > 0
    bench.deliver_all()
    assert bench.residents(1) >= {"p", "pq"}
    assert not bench.state.unwritten
    bench.finish()


def test_a_block_behind_a_hole_is_never_written_and_is_the_first_to_be_dropped():
    bench = Bench(dram(4), nvme(16), exclusive=False)
    on_nvme(bench, "abcd", "wxyz")
    bench.stored("abcde", 4)
    bench.corrupt(bench.where()["ab"][1][0])
    bench.load("abcd", out=True)
    bench.deliver(bench.job("load").id)
    bench.deliver(bench.job("write").id, False, "cancelled")
    assert bench.lookup("abcde").blocks == 1 and bench.levels_of("abcde") == ["dram"]
    bench.drain()
    assert bench.jobs() == [] and not bench.state.unwritten, "given up, not waited for"
    bench.now += 1
    assert bench.stored("mnop").accepted == 4
    assert "abcde" not in bench.where()
    assert bench.planner.level_counters()[0].dropped_in_place == 1
    bench.finish()


def test_a_bad_block_in_dram_is_a_miss_and_a_store_heals_it():
    bench = Bench(dram(8))
    bench.stored("abc")
    bench.load("abc", out=True)
    bench.deliver(bench.job("load").id, [True, False, True], "io")
    assert bench.lookup("abc").blocks == 1 and bench.states(0)["BAD"] == 1
    bench.check()
    plan = bench.stored("abc", 1)
    assert (plan.accepted, plan.present) == (1, 1)
    assert bench.lookup("abc").blocks == 3 and "BAD" not in bench.states(0)
    bench.finish()


def test_a_bad_block_in_dram_with_a_copy_below_is_read_from_there():
    bench = Bench(dram(8), nvme(16))
    on_nvme(bench, "abc")
    bench.load("abc", out=True)
    bench.deliver(bench.job("load").id, [True, False, True], "io")
    assert bench.lookup("abc").by_level == (2, 1) and "BAD" not in bench.states(0)
    load = bench.load("abc")
    bench.deliver_all()
    assert load.blocks == 3 and bench.lookup("abc").by_level == (3, 0)
    bench.finish()


def test_a_bad_block_in_use_is_healed_in_another_slot():
    bench = Bench(dram(8))
    bench.stored("ab")
    held = bench.pin("ab")
    bench.load("ab", out=True)
    bench.deliver(bench.job("load").id, [False, True], "io")
    bench.stored("ab")
    assert bench.lookup("ab").blocks == 2 and bench.states(0)["DETACHED"] == 1
    bench.check()
    bench.unpin(held)
    bench.finish()


def test_drop_bad_removes_holes_and_what_lies_behind():
    bench, _ = hole()
    assert bench.planner.drop_bad(bench.now) == 3
    bench.take()
    assert {prompt for prompt in bench.where() if prompt.startswith("a")} == {"a"}
    bench.finish()


# -- writes that fail -------------------------------------------------------------------------------------------------


def test_a_failed_write_takes_its_descendants_off_nvme():
    bench = Bench(dram(16), nvme(16), limits=Limits(job_blocks=2))
    bench.stored("abcd")
    bench.stored("abcde", 4)
    bench.drain()
    first, *others = bench.jobs("write")
    for job in others:
        bench.deliver(job.id)
    bench.deliver(first.id, [True, False], "io")
    bench.check()
    assert bench.residents(1) == {"a"}
    assert bench.lookup("abcde").blocks == 5, "DRAM has them all"
    bench.drain()
    bench.deliver_all()
    assert bench.residents(1) == {"abcde"[: i + 1] for i in range(5)}
    bench.finish()


def test_descendants_whose_write_is_in_flight_when_their_parent_fails():
    bench = Bench(dram(16), nvme(16), limits=Limits(job_blocks=2))
    bench.stored("abcd")
    bench.drain()
    first, second = bench.jobs("write")
    bench.deliver(first.id, False, "io")
    bench.check()
    assert not bench.deliver(second.id).ok.any()
    assert bench.residents(1) == set() and bench.claims == {}
    bench.finish()


@pytest.mark.parametrize("reason", ["io", "checksum", "deadline", "cancelled", "closed"])
def test_a_load_that_fails_for_any_reason_is_a_miss(reason):
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "ab", "wxyz")
    load = bench.load("ab", out=True)
    bench.deliver(bench.job("load").id, False, reason)
    assert load.done and load.blocks == 0
    assert bench.lookup("ab").blocks == (0 if reason in ("io", "checksum") else 2)
    bench.finish()


def test_a_hung_nvme_write_does_not_hold_up_loads_from_dram():
    bench = Bench(dram(4), nvme(8))
    bench.stored("abcd")
    assert bench.job("write").n == 4
    load = bench.load("abcd", out=True)
    bench.deliver(bench.job("load").id)
    assert load.done and load.blocks == 4
    bench.finish()


def test_loads_from_hbm_do_not_wait_for_loads_from_nvme():
    bench = Bench(hbm(4), dram(8), nvme(32), limits=Limits(job_blocks=2))
    for prompt in ("ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"):
        bench.stored(prompt)
        bench.deliver_all()
        bench.drain()
        bench.deliver_all()
        bench.now += 1
    deep = next(prompt for prompt in ("ab", "cd", "ef") if bench.lookup(prompt).by_level == (0, 0, 2))
    slow = [bench.load(deep, out=True) for _ in range(8)]
    assert any(not load.waiting for load in slow), "some wait for credits"
    fast = bench.load("op", out=True)
    assert fast.waiting, "its job was submitted"
    bench.deliver_all()
    assert fast.done and all(load.done for load in slow)
    bench.finish()
