"""Room, eviction and bounds: small cases worked out by hand."""

from dataclasses import replace

import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.state import Limits
from tiercache.types import LevelSpec


def on_nvme(bench, prompt, piece=4):
    """Bring a prompt to NVMe, a piece at a time."""
    for begin in range(0, len(prompt), piece):
        bench.stored(prompt[: begin + piece], begin)
        bench.drain()
        bench.deliver_all()
    assert bench.residents(bench.persistent) >= {prompt[: i + 1] for i in range(len(prompt))}


# -- the small cases of the design ------------------------------------------------------------------------------------


def test_uncopied_blocks_that_nvme_has_no_room_for_are_dropped_in_place():
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "abcdefgh")
    bench.stored("abcdefghijkl", 8)
    assert bench.residents(0) == {"abcdefghi", "abcdefghij", "abcdefghijk", "abcdefghijkl"}
    plan = bench.store("QRST")
    assert (plan.accepted, plan.reason) == (4, "")
    assert bench.planner.level_counters()[0].dropped_in_place == 4
    bench.finish()
    assert bench.residents(0) == {"Q", "QR", "QRS", "QRST"}
    assert bench.lookup("abcdefghijkl").blocks == 8


def test_dram_full_of_uncopied_blocks_takes_the_next_store_within_one_tend():
    bench = Bench(dram(4), nvme(8))
    bench.stored("abcd")
    refused = bench.store("efgh")
    assert (refused.accepted, refused.reason) == (0, "no_room")
    bench.deliver_all()
    assert bench.store("efgh").accepted == 4
    bench.finish()
    assert bench.lookup("abcd").by_level == (0, 4)


def test_exclusive_promotion_leaves_the_root_below_while_it_is_no_leaf_there():
    bench = Bench(dram(4), nvme(8), exclusive=True)
    on_nvme(bench, "abcdefgh")
    assert bench.lookup("abcdefgh").by_level == (4, 4)
    load = bench.load("abcd", out=True)
    bench.deliver(bench.job("load").id)  # and nothing more: a write afterwards would make up for it
    assert load.blocks == 4 and bench.lookup("abcd").by_level == (4, 0)
    assert bench.residents(1) == {"abcdefgh"[: i + 1] for i in range(8)}
    bench.check()
    bench.finish()


def test_exclusive_promotion_takes_the_slow_copies_of_leaves():
    bench = Bench(dram(4), nvme(8), exclusive=True)
    on_nvme(bench, "abcd")
    on_nvme(bench, "wxyz")
    assert bench.lookup("abcd").by_level == (0, 4)
    bench.load("abcd", out=True)
    bench.deliver(bench.job("load").id)
    assert bench.lookup("abcd").by_level == (4, 0)
    assert bench.residents(1) == {"w", "wx", "wxy", "wxyz"}
    bench.finish()


@pytest.mark.parametrize(("dram_blocks", "nvme_blocks", "stays"), [(4, 20, True), (4, 19, False)])
def test_a_slow_tier_of_five_times_the_size_keeps_what_is_promoted(dram_blocks, nvme_blocks, stays):
    bench = Bench(dram(dram_blocks), nvme(nvme_blocks))
    on_nvme(bench, "ab")
    on_nvme(bench, "wxyz")
    bench.load("ab", out=True)
    bench.deliver(bench.job("load").id)
    assert bench.lookup("ab").by_level == (2, 0)
    assert bench.residents(1) & {"a", "ab"} == ({"a", "ab"} if stays else set())


def test_whether_a_slow_copy_goes_is_decided_between_the_two_levels_of_the_copy():
    """HBM and DRAM are of one size, NVMe is far larger: what comes from NVMe to HBM stays on NVMe."""
    bench = Bench(hbm(4), dram(4), nvme(40))
    on_nvme(bench, "ab", 2)
    for prompt in ("cdef", "ghij", "klmn"):
        bench.stored(prompt)
        bench.deliver_all()
    bench.invalidate("c")
    bench.invalidate("g")
    bench.invalidate("k")
    assert bench.lookup("ab").by_level[2] == 2
    load = bench.load("ab")
    bench.deliver_all()
    assert load.done and load.blocks == 2
    assert bench.residents(2) >= {"a", "ab"}


# -- who goes first ---------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_leaves_before_their_parents():
    bench = Bench(dram(6))
    for now, prompt in enumerate(("abc", "xy", "p")):
        bench.now = float(now)
        bench.stored(prompt)
    bench.now = 10.0
    bench.load("ab", out=True)
    bench.deliver_all()
    gone = []
    for i in range(6):
        before = bench.residents(0)
        bench.now += 1
        bench.stored(chr(ord("A") + i))
        gone += sorted(before - bench.residents(0))
    assert gone == ["abc", "xy", "x", "p", "ab", "a"]


def test_a_released_conversation_goes_first_but_for_what_others_use():
    bench = Bench(dram(7))
    for now, prompt in enumerate(("ab", "cd", "cef")):
        bench.now = float(now)
        bench.stored(prompt)
    bench.now = 5.0
    assert bench.hint("cef") == 2
    bench.now = 6.0
    assert bench.hint("cef") == 2
    bench.stored("xyz")
    assert bench.residents(0) == {"a", "ab", "c", "cd", "x", "xy", "xyz"}
    assert bench.hint("nothing") == 0


def test_a_hint_takes_the_partial_tails_of_its_conversation_along():
    """Of this turn and of the turns before it; whoever asks knows full blocks only."""
    bench = Bench(dram(20))
    for prompt in ("abX", "abcdY", "abcdefZ", "abcdefgh"):
        bench.stored(prompt)
        bench.deliver_all()
    assert bench.hint("abcdefgh") == 11, "8 blocks and 3 tails"
    bench.stored("qrsT")
    assert bench.hint("qrs") == 4, "its own tail is no other prompt"
    bench.stored("qrsuv")
    assert bench.hint("qrs") == 0, "another conversation goes on there"
    assert bench.planner.check() == []


def test_a_hint_leaves_the_last_words_of_others_alone():
    """Two users of one system prompt, whose questions are partial blocks."""
    bench = Bench(dram(20))
    for prompt in ("abX", "abY"):
        bench.now += 1
        bench.stored(prompt)
    assert bench.hint("ab") == 0, "whose tail is it?"
    bench.now += 1
    bench.stored("abcd")
    bench.now += 1
    bench.touch("abY")
    assert bench.hint("abcd") == 2, "c and d; somebody came back to Y after them"
    assert bench.last_use("abY") == bench.now and bench.last_use("ab") == bench.now


def test_a_hit_from_a_slow_level_keeps_the_path_young_there():
    bench = Bench(dram(4), nvme(8), exclusive=False)
    on_nvme(bench, "abcd")
    bench.now += 1
    on_nvme(bench, "efgh")
    bench.now += 1
    bench.touch("abcd")
    bench.now += 1
    on_nvme(bench, "ij")
    assert bench.lookup("abcd").blocks == 4
    assert bench.lookup("efgh").blocks == 2


def test_touch_counts_the_whole_path_and_tells_nvme():
    bench = Bench(dram(8), nvme(16))
    on_nvme(bench, "abcd")
    on_nvme(bench, "abxy")
    bench.messages.clear()
    bench.now = 2000.0
    assert bench.touch("abcz") == 3
    (note,) = bench.messages
    slots = [bench.where()["abc"[: i + 1]][1][0] for i in range(3)]
    assert note.slots.tolist() == slots and (note.last_use == 2000.0).all() and note.uses.tolist() == [3, 3, 2]
    assert [bench.last_use(prompt) for prompt in ("a", "ab", "abc", "abcd")] == [2000.0] * 3 + [1000.0]


def under_nvme_only(bench):
    """P of four blocks on NVMe only, as cold as can be, and a partial tail under it in DRAM only."""
    on_nvme(bench, "abcd")
    bench.now += 1
    on_nvme(bench, "wxyz")
    bench.now += 1
    bench.stored("abcdE", 4)
    bench.hint("abcdE")
    assert bench.lookup("abcdE").by_level == (1, 4)


def test_an_nvme_leaf_takes_along_what_lives_under_it_in_dram_only():
    bench = Bench(dram(4), nvme(8))
    under_nvme_only(bench)
    assert bench.planner.room.free(1, 1) == 1
    bench.take()
    bench.check()
    assert "abcdE" not in bench.where() and "abcd" not in bench.where()
    assert bench.lookup("abcdE").by_level == (0, 3)
    bench.finish()


def test_an_nvme_leaf_is_passed_over_while_what_lives_under_it_is_in_use():
    bench = Bench(dram(4), nvme(8))
    under_nvme_only(bench)
    (above, below) = bench.pin("abcdE")
    bench.unpin([below])
    bench.stored("m")
    bench.drain()
    bench.deliver_all()
    assert bench.residents(1) == {"a", "ab", "abc", "abcd", "w", "wx", "wxy", "m"}
    assert bench.lookup("abcdE").by_level == (1, 4)
    bench.unpin([above])
    bench.finish()


# -- partial tails ----------------------------------------------------------------------------------------------------


def test_a_partial_tail_matches_whole_only_and_has_nothing_under_it():
    bench = Bench(dram(8), nvme(16))
    bench.stored("abT")
    assert bench.lookup("abT").blocks == 3
    assert bench.lookup("abU").blocks == 2
    bench.stored("abtu", 2)
    bench.stored("abU", 2)
    assert bench.lookup("abT").blocks == 3 and bench.lookup("abtu").blocks == 4 and bench.lookup("abU").blocks == 3
    bench.check()


def test_a_partial_tail_is_never_demoted_and_dropped_on_demand():
    bench = Bench(dram(4), nvme(16), write_after_s=1.0)
    bench.stored("abT")
    bench.drain()
    bench.deliver_all()
    assert bench.residents(1) == {"a", "ab"}
    assert bench.drain() == 0 and bench.jobs() == []
    assert bench.store("wxyz").accepted == 4
    bench.finish()
    assert bench.lookup("abT").blocks == 2


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_a_store_beyond_its_credits_is_cut_and_says_so():
    bench = Bench(dram(48), limits=Limits(job_blocks=8))
    prompt = "abcdefghijklmnopqrstuvwxyzabcdefghijklmn"
    plan = bench.store(prompt)
    assert (plan.accepted, plan.present, plan.reason, plan.end) == (12, 0, "queue_full", 12)
    full = bench.store("zzz")
    assert (full.accepted, full.reason) == (0, "queue_full")
    bench.deliver(plan.job)
    more = bench.store(prompt)
    assert (more.accepted, more.present, more.reason) == (12, 12, "queue_full")
    assert bench.planner.totals().stores_cut == {"queue_full": 3}
    bench.finish()


def test_a_job_of_a_load_never_needs_more_credits_than_either_end_has():
    limits = Limits(job_blocks=2)
    assert limits.load_job_blocks([dram(400)]) == 16 and limits.load_job_blocks([dram(40)]) == 5
    assert limits.load_job_blocks([dram(400), hbm(16)]) == 2
    disk = LevelSpec("nvme", 4_000, 8 << 20, persistent=True)
    assert limits.load_job_blocks([disk]) == 8, "64 MiB"
    assert limits.load_job_blocks([replace(disk, block_nbytes=1 << 30)]) == 2
    for capacity in range(1, 70):
        for spec in (hbm(capacity), dram(capacity), replace(disk, capacity=capacity, block_nbytes=1)):
            jobs = limits.load_job_blocks([dram(1_000), spec])
            assert min(jobs, capacity) <= limits.in_flight_blocks(capacity), "else it would wait for ever"


def test_a_load_from_a_large_level_into_a_small_one_is_cut_into_jobs_that_fit():
    bench = Bench(hbm(16), dram(64), limits=Limits(job_blocks=2))
    for prompt in ("abcdefgh", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"):
        while (there := bench.lookup(prompt).blocks) < len(prompt):
            bench.stored(prompt, there)
            bench.deliver_all()
        bench.now += 1
    assert bench.lookup("abcdefgh").by_level == (0, 8)
    bench.tend()
    bench.deliver_all()
    load = bench.load("abcdefgh")
    assert {job.n for job in bench.jobs("load")} == {2}, "and not half of what may leave the large one"
    bench.deliver_all()
    assert load.done and load.blocks > 2
    bench.finish()


def test_a_store_larger_than_its_level_is_cut_by_room():
    bench = Bench(dram(3))
    plan = bench.stored("abcde")
    assert (plan.accepted, plan.reason) == (3, "no_room")
    assert bench.lookup("abcde").blocks == 3


def test_a_prompt_longer_than_dram_is_stored_in_steps():
    bench = Bench(dram(4), nvme(64))
    prompt = "abcdefghijklmnopqrst"
    for taken in range(0, 20, 2):
        assert bench.stored(prompt[: taken + 2], taken).accepted == 2
        bench.drain()
        bench.deliver_all()
        bench.check()
    assert bench.lookup(prompt).blocks == 20


def test_holds_take_half_a_level_at_most_and_a_shared_block_counts_once():
    bench = Bench(dram(8))
    bench.stored("abcd")
    bench.stored("wxyz")
    loads = [bench.load("abc"), bench.load("abcd"), bench.load("a")]
    assert [load.blocks for load in loads] == [3, 4, 1]
    assert bench.load("wx").blocks == 0 and bench.pin("wxyz") == []
    held = bench.pin("abcd")
    assert [(level, len(slots)) for level, slots in held] == [(0, 4)]
    bench.release_load(loads[1])
    bench.check()
    assert bench.load("wx").blocks == 0, "the pin holds the fourth block"
    bench.unpin(held)
    assert bench.load("wx").blocks == 1
    bench.finish()


def test_a_pin_keeps_blocks_where_they_are_and_ends_once():
    bench = Bench(dram(4), nvme(8))
    bench.stored("ab")
    held = bench.pin("ab")
    bench.drain()
    bench.deliver_all()
    plan = bench.stored("wxyz")
    assert (plan.accepted, plan.reason) == (2, "no_room")
    assert bench.lookup("ab").by_level == (2, 0)
    bench.unpin(held)
    bench.unpin(held)
    bench.deliver_all()
    assert bench.stored("wxyz", 2).accepted == 2
    bench.finish()


def test_loads_beyond_the_queue_are_refused():
    bench = Bench(dram(8), nvme(32), limits=Limits(job_blocks=2, queued_loads=3))
    on_nvme(bench, "abcdefgh", 2)
    loads = [bench.load("abcdefgh", out=True) for _ in range(5)]
    assert [load.blocks for load in loads] == [8, 8, 8, 0, 0]
    assert loads[3].done and bench.planner.totals().loads_refused == 2
    bench.deliver_all()
    assert all(load.done for load in loads)
    assert [load.blocks for load in loads] == [8, 8, 8, 0, 0]
    bench.finish()


def test_the_default_queue_takes_256_loads():
    bench = Bench(dram(2), nvme(4), exclusive=False)
    on_nvme(bench, "ab", 2)
    bench.stored("xy")
    blocked = [bench.load("ab", out=True) for _ in range(2)]
    assert [load.blocks for load in blocked] == [2, 2] and len(bench.jobs("load")) == 2
    queued = [bench.load("ab", out=True) for _ in range(257)]
    assert [load.blocks for load in queued] == [2] * 256 + [0]
    bench.deliver_all()
    assert all(load.done and load.blocks == 2 for load in queued[:-1])
    bench.finish()


# -- invalidation -----------------------------------------------------------------------------------------------------


def test_invalidation_takes_every_branch_that_continues_the_prefix():
    bench = Bench(dram(12), nvme(24))
    on_nvme(bench, "abcd")
    bench.stored("abxy", 2)
    bench.stored("abxz", 3)
    assert bench.invalidate("ab") == 6
    assert set(bench.where()) == {"a"}
    bench.check()
    bench.finish()


# -- three levels -----------------------------------------------------------------------------------------------------


def test_room_is_made_all_the_way_down():
    """HBM and DRAM full of blocks that are nowhere else, NVMe empty: nothing is lost on the way down."""
    bench = Bench(hbm(4), dram(4), nvme(40))
    prompts = ["abcd", "efgh", "ijkl", "mnop", "qrst"]
    for prompt in prompts:
        for _ in range(4):
            found = bench.lookup(prompt).blocks
            if found == len(prompt):
                break
            bench.stored(prompt, found)
            bench.deliver_all()
            bench.check()
    assert [bench.lookup(prompt).blocks for prompt in prompts] == [4] * 5
    assert bench.planner.level_counters()[0].dropped_in_place == 0
    assert bench.planner.level_counters()[1].dropped_in_place == 0


def test_full_of_uncopied_blocks_at_every_level_still_takes_stores():
    """NVMe is offline: what HBM and DRAM hold alone is dropped in place, coldest first."""
    bench = Bench(hbm(2), dram(2), nvme(8))
    bench.stored("a")
    while bench.state.online(2):
        bench.drain()
        bench.deliver(bench.job("write").id, False, "io")
    for prompt in ("cd", "ef", "gh", "ij", "kl"):
        for _ in range(3):
            found = bench.lookup(prompt).blocks
            if found == len(prompt):
                break
            bench.stored(prompt, found)
            bench.deliver_all()
            bench.check()
        assert bench.lookup(prompt).blocks == 2
    assert bench.planner.level_counters()[1].dropped_in_place > 0
    bench.finish()


def test_a_load_into_rows_leaves_out_the_blocks_that_the_caller_has():
    bench = Bench(dram(4), nvme(8))
    on_nvme(bench, "abcdefgh")
    load = bench.load("abcdefgh", out=True, start=3)
    assert load.by_level == (4, 1)
    assert sorted(row for job in bench.jobs("load") for row in job.dst_slots.tolist()) == [3, 4, 5, 6, 7]
    bench.deliver_all()
    assert load.done and load.blocks == 8
    bench.finish()


def test_a_load_of_what_lies_behind_all_that_is_there_is_empty():
    bench = Bench(dram(4))
    bench.stored("ab")
    load = bench.load("abcd", out=True, start=2)
    assert load.done and load.blocks == 0 and load.by_level == (0,)
    bench.finish()
