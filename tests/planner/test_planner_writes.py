"""Writes to NVMe: at an age, on flush, ancestors first; and loads in several jobs."""

import numpy as np
import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.backlog import Backlog
from tiercache.planner.cost import LevelCost
from tiercache.planner.state import Limits
from tiercache.types import CopyJob, Expedite


def expedited(bench):
    return [job for message in bench.messages if isinstance(message, Expedite) for job in message.jobs]


def writes(bench):
    return [m for m in bench.messages if isinstance(m, CopyJob) and m.kind == "write"]


# -- write_after ------------------------------------------------------------------------------------------------------


def test_a_stored_block_is_written_at_an_age_without_another_planner_step():
    bench = Bench(dram(16), nvme(32), write_after_s=2.0)
    bench.stored("abc")
    job = bench.job("write")
    assert (job.start_after_s, job.n, job.dst_level) == (2.0, 3, 1)
    credit = bench.state.credits[0]
    assert (credit.jobs, credit.outbound, credit.delayed) == (0, 0, 3), "a soft hold, no credits"
    bench.deliver(job.id)
    assert bench.residents(1) == {"a", "ab", "abc"} and expedited(bench) == []
    bench.finish()


def test_no_delay_means_at_once_and_with_credits():
    bench = Bench(dram(16), nvme(32), write_after_s=0.0)
    bench.stored("abc")
    job = bench.job("write")
    assert job.start_after_s == 0.0 and bench.state.credits[0].outbound_writes == 3
    bench.finish()
    assert bench.residents(1) == {"a", "ab", "abc"}


def test_a_delayed_write_starts_when_its_slots_are_needed():
    bench = Bench(dram(4), nvme(32), write_after_s=2.0)
    bench.stored("ab")
    (job,) = bench.jobs("write")
    assert expedited(bench) == []
    bench.stored("cd")
    assert bench.store("efgh").reason == "no_room"
    assert job.id in expedited(bench)
    bench.deliver_all()
    assert bench.store("efgh").accepted == 4
    bench.finish()


def test_only_as_many_delayed_writes_start_as_are_needed():
    bench = Bench(dram(16), nvme(64), write_after_s=2.0)
    prompts = [chr(ord("a") + i) for i in range(16)]
    for prompt in prompts[:8]:
        bench.stored(prompt)
    assert len(bench.jobs("write")) == 8 and expedited(bench) == []
    for prompt in prompts[8:]:
        plan = bench.store(prompt)
        bench.deliver(plan.job)
        for job in bench.jobs("write"):
            if not job.start_after_s:
                bench.deliver(job.id)
    for _ in range(5):
        bench.tend()
    assert len(expedited(bench)) <= 1, "one slot is wanted ahead of need"
    bench.finish()


def test_at_most_half_a_level_waits_and_the_rest_is_written_at_once():
    bench = Bench(dram(8), nvme(32), write_after_s=2.0)
    bench.stored("abcdef")
    delays = sorted((job.start_after_s, job.n) for job in bench.jobs("write"))
    assert delays == [(0.0, 2), (2.0, 4)]
    bench.deliver_all()
    assert bench.residents(1) == {"abcdef"[: i + 1] for i in range(6)}
    bench.finish()


def test_drain_starts_delayed_writes_and_so_does_hasten():
    for verb in ("drain", "hasten"):
        bench = Bench(dram(16), nvme(32), write_after_s=60.0)
        bench.stored("abc")
        job = bench.job("write")
        getattr(bench, verb)()
        assert expedited(bench) == [job.id]
        getattr(bench, verb)()
        assert expedited(bench) == [job.id], "told once"
        bench.finish()


def test_a_partial_tail_does_not_hold_up_the_backlog():
    bench = Bench(dram(16), nvme(32), write_after_s=2.0)
    bench.stored("abT")
    assert len(bench.state.unwritten) == 0
    bench.deliver_all()
    bench.stored("cdU")
    bench.drain()
    bench.deliver_all()
    assert bench.residents(1) == {"a", "ab", "c", "cd"}
    bench.finish()


def test_three_levels_are_written_through_to_nvme_at_an_age():
    bench = Bench(hbm(8), dram(8), nvme(32), write_after_s=2.0)
    bench.stored("abc")
    job = bench.job("write")
    assert (job.src_level, job.dst_level, job.start_after_s) == (0, 2, 2.0)
    bench.finish()
    assert bench.residents(2) == {"a", "ab", "abc"}


# -- drain ------------------------------------------------------------------------------------------------------------


def test_drain_writes_all_that_is_uncopied_ancestors_first_most_recently_used_first():
    bench = Bench(dram(32), nvme(64), limits=Limits(job_blocks=4))
    for prompt in ("abcde", "abxy", "pqr", "mn"):
        while bench.lookup(prompt).blocks < len(prompt):
            bench.stored(prompt, bench.lookup(prompt).blocks)
        bench.now += 1
    bench.touch("abcde")
    assert bench.drain() == 12
    bench.deliver_all()
    assert bench.residents(1) == bench.residents(0) and len(bench.residents(1)) == 12
    order = [bench.tokens[ident][1] for job in writes(bench) for ident in job.idents.tolist()]
    assert order == ["a", "ab", "abc", "abcd", "abcde", "m", "mn", "p", "pq", "pqr", "abx", "abxy"]
    assert bench.drain() == 0
    bench.finish()


def test_drain_from_hbm_reaches_nvme():
    bench = Bench(hbm(4), dram(4), nvme(32))
    bench.stored("ab")
    bench.stored("abcd", 2)
    bench.deliver_all()
    assert bench.drain() > 0
    bench.deliver_all()
    assert bench.residents(2) == {"a", "ab", "abc", "abcd"}
    assert bench.drain() == 0 and not bench.state.unwritten
    bench.finish()


def test_drain_where_nvme_is_too_small_gives_up_in_the_end():
    bench = Bench(dram(8), nvme(4))
    bench.stored("abcdefgh"[:4])
    bench.stored("ijkl")
    bench.drain()
    bench.deliver_all()
    assert len(bench.residents(1)) == 4 and not bench.state.unwritten
    bench.finish()


def test_drain_while_nvme_is_offline_waits_for_it():
    bench = Bench(dram(8), nvme(16))
    bench.stored("abcd")
    while bench.state.online(1):
        bench.drain()
        bench.deliver(bench.job("write").id, False, "io")
    bench.drain()
    assert bench.jobs() == [] and len(bench.state.unwritten) > 0
    bench.tend(later_s=10.0)
    bench.deliver_all()
    assert bench.residents(1) == {"a", "ab", "abc", "abcd"}
    bench.finish()


def test_a_block_behind_a_store_in_flight_is_written_once_that_is_there():
    bench = Bench(dram(8), nvme(16), write_after_s=2.0)
    first, second = bench.store("ab"), bench.store("abcd", 2)
    bench.deliver(second.job)
    assert bench.jobs("write") == [] and len(bench.state.unwritten) == 1
    bench.deliver(first.job)
    bench.deliver_all()
    assert bench.residents(1) == {"a", "ab", "abc", "abcd"}
    bench.finish()


def test_writes_keep_the_credits_of_every_level_they_read_from():
    """Ancestors that only HBM has are read from HBM, however many blocks DRAM may send."""
    bench = Bench(hbm(16), dram(16), nvme(64), limits=Limits(job_blocks=2))
    for begin in range(0, 12, 4):
        bench.stored("abcdefghijkl"[: begin + 4], begin)
    bench.drain()
    bench.check()
    assert sum(job.n for job in bench.jobs("write") if job.src_level == 0) <= 4
    bench.finish()
    assert len(bench.residents(2)) == 12


def test_the_backlog_holds_a_slot_once():
    backlog = Backlog([dram(8)])
    backlog.add(0, np.array([1, 2, 3], dtype=np.int32))
    backlog.add(0, np.array([3, 4], dtype=np.int32))
    backlog.add(0, np.array([1, 4], dtype=np.int32))
    assert len(backlog) == 2 and backlog.added == 2
    seen = []

    def write(level, slots):
        seen.append(slots.tolist())
        return True, slots[slots == 2]

    backlog.run(write)
    assert seen == [[1, 2, 3], [4]]
    assert len(backlog) == 1 and not backlog.is_over(1) and backlog.is_over(0)
    backlog.add(0, np.array([2, 3], dtype=np.int32))
    seen.clear()
    backlog.run(lambda level, slots: (seen.append(slots.tolist()), (False, slots))[1])
    assert seen == [[2]], "no use to go on"
    backlog.run(lambda level, slots: (seen.append(slots.tolist()), (True, slots[:0]))[1])
    assert seen == [[2], [2], [3]] and backlog.is_over(backlog.added)
    backlog.add(0, np.array([5], dtype=np.int32))
    backlog.clear()
    assert len(backlog) == 0
    backlog.add(0, np.array([5], dtype=np.int32))
    assert len(backlog) == 1


def test_the_backlog_passes_over_a_few_entries_that_must_wait_and_keeps_their_order():
    backlog = Backlog([dram(32)])
    for slot in range(20):
        backlog.add(0, np.array([slot], dtype=np.int32))
    asked = []
    backlog.run(lambda level, slots: (asked.append(int(slots[0])), (True, slots if slots[0] % 2 else slots[:0]))[1])
    assert asked == list(range(16)), "eight that wait are enough"
    asked.clear()
    backlog.run(lambda level, slots: (asked.append(int(slots[0])), (True, slots[:0]))[1])
    assert asked == [1, 3, 5, 7, 9, 11, 13, 15, 16, 17, 18, 19]


def test_flush_marks():
    bench = Bench(dram(16), nvme(32), limits=Limits(job_blocks=2))
    bench.stored("abcd")
    bench.drain()
    mark = bench.planner.backlog()
    under_way = bench.planner.under_way()
    assert bench.planner.moves() and not bench.planner.is_over(under_way)
    bench.stored("pq")
    bench.deliver_all()
    assert bench.planner.is_backlog_over(mark) and bench.planner.is_over(under_way)
    assert bench.planner.lacking(bench.now) == 2 and not bench.planner.moves()
    bench.finish()


def test_a_second_flush_does_not_end_the_first_one():
    bench = Bench(dram(16), nvme(32), limits=Limits(job_blocks=1))
    bench.stored("abcd")
    bench.stored("pqrs")
    bench.drain()
    first = bench.planner.backlog()
    assert not bench.planner.is_backlog_over(first)
    bench.drain()
    second = bench.planner.backlog()
    assert not bench.planner.is_backlog_over(first) and not bench.planner.is_backlog_over(second)
    bench.deliver_all()
    assert bench.planner.is_backlog_over(first) and bench.planner.is_backlog_over(second)
    assert bench.planner.lacking(bench.now) == 0
    bench.finish()


# -- loads ------------------------------------------------------------------------------------------------------------


def filled(limits):
    bench = Bench(dram(16), nvme(32), limits=limits)
    for prompt in ("abcdefgh", "ijklmnopqrstuvwx"):
        while (found := bench.lookup(prompt).blocks) < len(prompt):
            bench.stored(prompt, found)
            bench.drain()
            bench.deliver_all()
        bench.now += 1
    assert bench.lookup("abcdefgh").by_level == (0, 8)
    return bench


def test_a_load_of_more_blocks_than_a_job_takes_goes_in_several_the_next_on_commit():
    bench = filled(Limits(job_blocks=2))
    load = bench.load("abcdefgh")
    assert load.blocks == 8
    assert [job.n for job in bench.jobs("load")] == [2, 2], "a quarter of sixteen slots may be in flight"
    first = bench.jobs("load")[0]
    bench.deliver(first.id)
    assert [job.n for job in bench.jobs("load")] == [2, 2]
    bench.deliver_all()
    assert load.done and load.blocks == 8
    bench.finish()


def test_a_load_into_rows_is_larger_than_what_level_0_may_hold():
    bench = filled(Limits())
    load = bench.load("ijklmnopqrstuvwx", out=True)
    bench.deliver_all()
    assert load.blocks == 16 and bench.rows[load.endpoint] == bench.tokens_of("ijklmnopqrstuvwx")
    assert bench.load("ijklmnopqrstuvwx").blocks == 8
    bench.finish()


def test_a_load_from_two_levels():
    bench = filled(Limits())
    held = bench.load("ab")
    bench.deliver_all()
    load = bench.load("abcdefgh", out=True)
    assert load.by_level == (2, 6)
    bench.deliver_all()
    assert load.blocks == 8
    bench.release_load(held)
    bench.finish()


def test_a_load_into_rows_promotes_where_that_is_easy():
    bench = filled(Limits())
    load = bench.load("abcd", out=True)
    job = bench.job("load")
    assert job.also_level == 0 and sorted(job.also_slots.tolist()) == sorted(set(job.also_slots.tolist()))
    bench.deliver(job.id, [True, True, False, True], "io")
    assert load.blocks == 2
    assert bench.lookup("abcdefgh").blocks == 2
    bench.finish()


def test_holes_among_resident_blocks_are_fetched_and_only_they():
    bench = filled(Limits())
    bench.load("abcd", out=True)
    bench.deliver_all()
    load = bench.load("abcdefgh")
    assert load.blocks == 8 and load.by_level == (4, 4)
    assert [job.n for job in bench.jobs("load")] == [4]
    bench.deliver_all()
    bench.finish()


def test_estimates_come_from_measured_rates():
    bench = filled(Limits())
    cost = bench.state.costs[1] = LevelCost()
    assert bench.lookup("abcdefgh").load_s == 0.0
    bench.load("abcd", out=True)
    bench.deliver(bench.job("load").id, seconds=0.5)
    assert cost.jobs == 1 and cost.seconds(4 * 4096) == pytest.approx(0.5)
    found = bench.lookup("abcdefgh")
    assert found.by_level == (4, 4) and found.load_s == pytest.approx(0.5)
    bench.load("abcdefgh", out=True)
    assert bench.lookup("abcdefgh").load_s == pytest.approx(0.5), "the four are under way into memory already"
    bench.finish()


def test_a_write_of_a_branch_takes_along_what_it_hangs_on():
    bench = Bench(dram(8), nvme(40))
    bench.stored("abc")
    bench.stored("abd")
    node, take = bench.state.residency.index.walk(*bench.encode("abd")).path.end
    assert (node.depth, take) == (2, 1)
    assert bench.planner.writes.plan(node, 0, 1, 0).blocks == 3
    bench.take()
    bench.deliver_all()
    assert bench.residents(1) == {"a", "ab", "abd"}
    bench.check()


def test_a_load_into_rows_makes_no_room_of_its_own_path():
    bench = Bench(dram(2), nvme(8))
    bench.stored("ab")
    bench.drain()
    bench.deliver_all()
    node, _ = bench.state.residency.index.walk(*bench.encode("ab")).path.end
    bench.planner.room.drop(0, node, 1, 2)
    bench.stored("x")
    bench.pin("x")
    load = bench.load("ab", out=True)
    assert load.blocks == 2 and {job.src_level for job in bench.jobs("load")} == {0, 1}
    assert all(job.also_slots is None for job in bench.jobs("load")) and bench.residents(0) == {"a", "x"}
    bench.deliver_all()
    assert bench.rows[load.endpoint] == bench.tokens_of("ab")
    bench.finish()
