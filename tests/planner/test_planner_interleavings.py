"""Orders of events that random search finds late or never, each stepped by hand."""

import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.state import Limits


def on_nvme_only(bench, prompt, filler="wxyz"):
    """Bring a prompt to NVMe and push it out of DRAM (of four slots) by another one, which is on NVMe too."""
    for each in (prompt, filler):
        bench.stored(each)
        bench.drain()
        bench.deliver_all()
        bench.now += 1
    assert bench.lookup(prompt).by_level == (0, len(prompt))


# -- pins -------------------------------------------------------------------------------------------------------------


def test_a_block_pinned_by_a_load_while_its_demotion_is_in_flight():
    bench = Bench(dram(4), nvme(8))
    bench.stored("abcd")
    assert bench.job("write").n == 4
    load = bench.load("ab")
    assert load.done and load.blocks == 2
    bench.deliver_all()
    plan = bench.stored("efgh")
    assert (plan.accepted, plan.reason) == (2, "no_room")
    bench.check()
    bench.release_load(load)
    assert bench.stored("efgh", 2).accepted == 2
    assert bench.lookup("abcd").by_level == (0, 4)
    bench.finish()


def test_a_demotion_in_flight_keeps_its_source_after_the_load_is_over():
    bench = Bench(dram(4), nvme(8))
    bench.stored("abcd")
    load = bench.load("abcd", out=True)
    bench.deliver(bench.job("load").id)
    assert load.done and load.blocks == 4
    assert bench.store("efgh").accepted == 0
    bench.check()
    bench.deliver(bench.job("write").id)
    assert bench.store("efgh").accepted == 4
    bench.finish()


def test_a_load_from_nvme_keeps_its_source_from_eviction():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "abcd")
    bench.load("abcd", out=True)
    job = bench.job("load")
    bench.hint("abcd")
    bench.stored("m")
    bench.drain()
    for write in bench.jobs("write"):
        assert not set(write.dst_slots.tolist()) & set(job.src_slots.tolist())
        bench.deliver(write.id)
    bench.deliver(job.id)
    bench.finish()


# -- pending ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("child_first", [True, False])
def test_blocks_that_are_pending_and_then_fail_take_along_what_was_stored_under_them(child_first):
    bench = Bench(dram(8), nvme(16))
    parent = bench.store("abc")
    found = bench.lookup("abcde")
    assert (found.blocks, found.pending) == (0, 3)
    assert bench.load("abcde").blocks == 0
    child = bench.store("abcde", 3)
    assert (child.accepted, child.reason) == (2, "")
    if child_first:
        assert bench.deliver(child.job).ok.all()
        assert bench.lookup("abcde").blocks == 0
        bench.check()
        bench.deliver(parent.job, [True, False, True], "io")
    else:
        bench.deliver(parent.job, [True, False, True], "io")
        assert not bench.deliver(child.job).ok.any()
    assert bench.lookup("abcde").blocks == 1
    assert bench.residents(0) == {"a"}
    bench.finish()


def test_a_failed_store_leaves_blocks_alone_that_have_another_copy():
    """NVMe was offline, so its blocks were stored again; the copy fails, and NVMe comes back."""
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    while bench.state.online(1):
        bench.load("ab", out=True)
        bench.deliver(bench.job("load").id, False, "deadline")
    again = bench.store("ab")
    assert again.accepted == 2
    bench.deliver(again.job, False, "io")
    assert bench.lookup("ab").blocks == 0
    bench.tend(later_s=100.0)
    assert bench.lookup("ab").by_level == (0, 2)
    bench.finish()


def test_what_fails_of_a_store_is_told_apart_from_what_arrived():
    bench = Bench(dram(8))
    plan = bench.store("abcd")
    outcome = bench.deliver(plan.job, [True, True, False, True], "io")
    assert outcome.ok.tolist() == [True, True, False, False], "the last one has lost its parent"
    assert bench.lookup("abcd").blocks == 2
    bench.finish()


def test_a_load_joins_a_promotion_in_flight():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    first, second = bench.load("a"), bench.load("a")
    job = bench.job("load")
    assert job.n == 1 and not first.done and not second.done
    assert bench.deliver(job.id).loads == [first, second]
    assert first.blocks == second.blocks == 1 and first.slots.tolist() == second.slots.tolist()
    bench.finish()


def test_a_load_joins_a_promotion_that_waits_for_credits():
    bench = Bench(dram(8), nvme(16), limits=Limits(job_blocks=1))
    for prompt in ("abcd", "stuvwxyz"):
        for i in range(len(prompt)):
            bench.stored(prompt[: i + 1], i)
            bench.drain()
            bench.deliver_all()
        bench.now += 1
    store = bench.store("mn")
    first, second = bench.load("ab"), bench.load("ab")
    assert first.blocks == second.blocks == 2
    assert not bench.jobs("load"), "the store has all credits of level 0"
    bench.deliver(store.job)
    bench.check()
    assert [job.n for job in bench.jobs("load")] == [1, 1]
    bench.deliver_all()
    assert first.done and second.done and (first.blocks, second.blocks) == (2, 2)
    assert first.slots.tolist() == second.slots.tolist()
    bench.finish()


def test_joined_promotions_end_together_when_the_copy_fails():
    bench = Bench(dram(8), nvme(16))
    bench.stored("ab")
    bench.drain()
    bench.deliver_all()
    bench.stored("stuvwxyz")
    bench.deliver_all()
    assert bench.lookup("ab").by_level == (0, 2)
    loads = [bench.load("ab"), bench.load("ab")]
    bench.deliver(bench.job("load").id, [True, False], "io")
    assert [load.blocks for load in loads] == [1, 1]
    assert bench.lookup("ab").by_level == (1, 0)
    bench.finish()


def test_a_load_waits_for_a_store_that_heals_what_came_back_online():
    """The block is on its way to level 0 by a store while a slower level has it: the load joins the store's job."""
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    while bench.state.online(1):
        bench.load("ab", out=True)
        bench.deliver(bench.job("load").id, False, "deadline")
    assert bench.lookup("ab").blocks == 0
    plan = bench.store("ab")
    assert plan.accepted == 2
    bench.tend(later_s=100.0)
    assert bench.lookup("ab").blocks == 2
    load = bench.load("ab")
    assert not load.done
    bench.deliver(plan.job)
    assert load.done and load.blocks == 2
    bench.finish()


# -- release ----------------------------------------------------------------------------------------------------------


def test_a_load_released_before_it_is_done_holds_nothing_afterwards():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    load = bench.load("ab")
    bench.release_load(load)
    assert not load.done
    outcome = bench.deliver(bench.job("load").id)
    assert outcome.loads == [load] and (load.blocks, len(load.slots)) == (0, 0)
    assert not bench.tables[0].pins.any()
    assert bench.lookup("ab").by_level == (2, 0), "the promotion was not in vain"
    bench.finish()


def test_a_load_released_twice_is_released_once():
    bench = Bench(dram(4))
    bench.stored("ab")
    first, second = bench.load("ab"), bench.load("ab")
    assert (first.blocks, second.blocks) == (2, 2)
    bench.release_load(first)
    bench.release_load(first)
    assert sorted(bench.tables[0].pins.tolist()) == [0, 0, 1, 1]
    bench.check()
    bench.release_load(second)
    bench.finish()


def test_a_conversation_released_during_its_load():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    load = bench.load("ab")
    assert bench.hint("ab") == 2
    bench.check()
    bench.deliver_all()
    assert load.done and load.blocks == 2
    bench.stored("c")
    bench.check()
    bench.finish()


# -- parents that go --------------------------------------------------------------------------------------------------


def test_a_store_whose_parent_was_evicted_is_refused():
    bench = Bench(dram(4))
    bench.stored("abcd")
    assert bench.lookup("abcdef").blocks == 4
    bench.stored("wxyz")
    plan = bench.store("abcdef", 4)
    assert (plan.accepted, plan.present, plan.reason, plan.job) == (0, 0, "parent_missing", 0)
    assert bench.store("abcdef", 0).accepted == 4
    bench.finish()


def test_a_store_under_a_parent_whose_demotion_is_in_flight_is_taken():
    bench = Bench(dram(6), nvme(8))
    bench.stored("abcdef")
    assert bench.jobs("write")
    bench.invalidate("abcdef")
    bench.invalidate("abcde")
    bench.deliver_all()
    bench.stored("xy")
    plan = bench.store("abcdEF"[:4] + "e", 4)
    assert plan.accepted == 1
    bench.deliver_all()
    assert bench.lookup("abcde").blocks == 5
    bench.finish()


def test_a_store_under_a_parent_that_is_invalidated_meanwhile():
    bench = Bench(dram(8), nvme(16))
    bench.stored("ab")
    plan = bench.store("abcd", 2)
    assert bench.invalidate("b") == 0 and bench.invalidate("ab") == 3
    assert bench.lookup("abcd").blocks == 1
    assert bench.store("abcd", 2).reason == "parent_missing"
    again = bench.store("abcd", 1)
    assert again.accepted == 3
    assert not bench.deliver(plan.job).ok.any()
    bench.deliver(again.job)
    assert bench.lookup("abcd").blocks == 4
    bench.finish()


# -- splits -----------------------------------------------------------------------------------------------------------


def test_a_split_under_a_running_store():
    bench = Bench(dram(8), nvme(16))
    first = bench.store("aaaa")
    second = bench.store("aabb", 2)
    assert second.accepted == 2
    bench.check()
    bench.deliver(first.job, [True, True, True, False], "io")
    bench.check()
    bench.deliver(second.job)
    assert bench.residents(0) == {"a", "aa", "aaa", "aab", "aabb"}
    bench.finish()


def test_a_split_under_a_running_write_and_a_running_load():
    bench = Bench(dram(8), nvme(16))
    bench.stored("aaaa")
    bench.drain()
    load = bench.load("aaaa", out=True)
    bench.stored("aabb", 2)
    bench.check()
    write = next(job for job in bench.jobs("write") if job.n == 4)
    bench.deliver(write.id, [True, True, False, True], "io")
    assert bench.residents(1) >= {"a", "aa"} and "aaaa" not in bench.residents(1)
    bench.deliver(bench.job("load").id)
    assert load.blocks == 4
    bench.deliver_all()
    bench.finish()


def test_a_split_under_a_running_promotion():
    bench = Bench(dram(4), nvme(16))
    on_nvme_only(bench, "aa")
    load = bench.load("aa")
    assert bench.store("ab", 1).accepted == 1
    bench.check()
    bench.deliver_all()
    assert load.blocks == 2 and bench.lookup("ab").blocks == 2
    bench.finish()


# -- invalidation and epochs under way --------------------------------------------------------------------------------


def test_a_load_into_rows_of_what_is_invalidated_meanwhile_still_brings_the_right_bytes():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    rows, held = bench.load("ab", out=True), bench.load("ab")
    bench.invalidate("a")
    bench.stored("a")
    bench.check()
    bench.deliver_all()
    assert rows.done and rows.blocks == 2
    assert held.done and held.blocks == 0
    bench.finish()


def test_a_commit_under_another_epoch_is_an_abort():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    rows, load, store = bench.load("ab", out=True), bench.load("ab"), bench.store("cd")
    bench.stored("m")
    held = bench.pin("w")
    assert bench.new_epoch(b"other") == []
    assert bench.where() == {} and bench.claims == {}
    again = bench.store("ab")
    for job in list(bench.running):
        if job != again.job:
            assert not bench.deliver(job).ok.any()
            bench.check()
    assert (load.done, load.blocks, rows.done, rows.blocks) == (True, 0, True, 0)
    assert bench.lookup("ab").pending == again.accepted and bench.lookup("cd").blocks == 0
    bench.deliver_all()
    assert store.job and bench.lookup("ab").blocks == again.accepted
    bench.unpin(held)
    bench.finish()


def test_a_new_epoch_ends_loads_that_wait_for_credits():
    bench = Bench(dram(8), nvme(16), limits=Limits(job_blocks=2))
    for prompt in ("abcd", "stuvwxyz"):
        for i in range(2, len(prompt) + 1, 2):
            bench.stored(prompt[:i], i - 2)
            bench.drain()
            bench.deliver_all()
        bench.now += 1
    first, second = bench.load("abcd", out=True), bench.load("abcd", out=True)
    third = bench.load("abcd", out=True)
    assert bench.new_epoch(b"other") == [second, third]
    assert third.done and third.blocks == 0 and not first.done
    bench.deliver_all()
    assert first.done and first.blocks == second.blocks == 0
    bench.finish()


def test_calls_of_another_epoch_find_nothing():
    bench = Bench(dram(4))
    bench.stored("ab")
    symbols, n = bench.encode("ab")
    assert bench.planner.plan_load(symbols, n, b"old", bench.now).blocks == 0
    assert bench.planner.touch(symbols, n, b"old", bench.now) == 0
    assert bench.planner.pin(symbols, n, b"old", bench.now) == []
    plan = bench.planner.plan_store(symbols, n, 0, b"old", bench.now, 99)
    assert (plan.accepted, plan.reason) == (0, "stale_epoch")
    assert bench.planner.totals().stale_epoch == 4


# -- what the source level loses while a copy runs --------------------------------------------------------------------


def test_a_promotion_fails_after_its_source_has_left_nvme():
    """The claim is lost while the block is read; the read fails: the block is nowhere, and so is not in the tree."""
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "abc")
    bench.load("abc")
    bench.lose_claims([bench.where()["ab"][1][0]])
    bench.check()
    bench.deliver(bench.job("load").id, [True, False], "io")
    assert set(bench.where()) >= {"a"} and "ab" not in bench.where()
    bench.finish()


def test_lost_claims_take_what_lives_below_them_on_nvme():
    bench = Bench(dram(4), nvme(12))
    on_nvme_only(bench, "abcd")
    bench.stored("abcde", 4)
    slots = [bench.where()["abcd"[: i + 1]][1][0] for i in range(4)]
    bench.lose_claims([slots[1]])
    assert bench.residents(1) & {"a", "ab", "abc"} == {"a"}
    assert bench.lookup("abcde").blocks == 1, "the others had no other copy, nor had what was stored under them"
    bench.finish()


def test_a_claim_lost_of_a_slot_with_a_new_life_changes_nothing():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "abcd")
    slot = bench.where()["abcd"][1][0]
    bench.invalidate("abcd")
    bench.stored("q")
    bench.drain()
    (job,) = bench.jobs("write")
    assert slot in job.dst_slots.tolist()
    bench.lose_claims([slot])
    bench.check()
    bench.deliver_all()
    assert "q" in bench.residents(1)
    bench.finish()


def test_a_lost_claim_of_a_slot_that_was_found_bad():
    bench = Bench(dram(4), nvme(8))
    on_nvme_only(bench, "ab")
    slot = bench.where()["a"][1][0]
    bench.corrupt(slot)
    bench.load("ab", out=True)
    bench.deliver(bench.job("load").id)
    assert bench.states(1)["BAD"] == 1
    bench.lose_claims([slot])
    assert bench.lookup("ab").blocks == 0 and not bench.residents(1) & {"a", "ab"}
    bench.finish()


def test_hbm_blocks_go_to_dram_and_nvme_by_way_of_one_tree():
    bench = Bench(hbm(4), dram(8), nvme(24))
    bench.stored("abcd")
    bench.deliver_all()
    bench.stored("efgh")
    bench.deliver_all()
    bench.stored("efgh", bench.lookup("efgh").blocks)
    bench.deliver_all()
    assert bench.lookup("abcd").blocks == 4 and bench.lookup("efgh").blocks == 4
    bench.drain()
    bench.deliver_all()
    assert len(bench.residents(2)) == 8
    load = bench.load("ab")
    bench.deliver_all()
    assert load.done and load.blocks == 2
    bench.finish()
