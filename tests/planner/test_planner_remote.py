"""A key tier below the planner, stepped by hand: finds, fetches, hints that are no copies."""

import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.state import Limits, RemoteLimits
from tiercache.types import JobOverdue

REMOTE = RemoteLimits(quota=0.5, waiting_finds=4, pool_threads=4)
P = "abcdefgh"


def bench(*specs, remote=REMOTE, **options):
    return Bench(*(specs or (dram(32),)), remote=remote, **options)


def shared(*specs, prompt=P, **options):
    """A bench that knows the key tier to hold a prompt."""
    each = bench(*specs, **options)
    each.share(prompt)
    assert each.asked(prompt).remote == len(prompt)
    return each


def charged(each, level=0):
    each.check()
    return each.planner.quota.charged(level)


# --- asking ----------------------------------------------------------------------------------------------------------


def test_a_lookup_asks_once_and_is_told_later():
    each = bench()
    each.share(P)
    assert each.lookup(P)[:3] == (0, (0,), 8)
    each.take()
    (job,) = each.finds.values()
    assert (job.n, job.src_slots.tolist(), job.deadline_s) == (8, list(range(8)), 1.0)
    for _ in range(3):
        assert each.lookup(P).pending == 8
        each.take()
    assert len(each.finds) == 1
    each.answer()
    found = each.lookup(P)
    assert (found.blocks, found.by_level, found.remote, found.pending, found.plain) == (8, (0,), 8, 0, False)
    each.take()
    assert not each.finds
    each.finish()


def test_requests_that_share_a_prefix_ask_for_it_once():
    each = bench()
    each.share(P)
    each.lookup("abcdxy")
    each.lookup(P)
    each.take()
    first, second = each.finds.values()
    assert first.src_slots.tolist() == [0, 1, 2, 3, 4, 5]
    assert second.src_slots.tolist() == [4, 5, 6, 7]
    assert each.lookup(P).pending == 8
    each.answer(second.id)
    assert each.lookup(P)[:3] == (0, (0,), 8)
    each.answer(first.id)
    assert each.lookup(P).remote == 8
    assert each.lookup("abcdxy").remote == 4
    each.finish()


def test_only_the_suffix_is_asked_for():
    each = bench()
    each.share(P)
    each.stored("abc")
    assert each.lookup(P)[:3] == (3, (3,), 5)
    each.take()
    assert next(iter(each.finds.values())).src_slots.tolist() == [3, 4, 5, 6, 7]
    each.answer()
    assert each.lookup(P)[:3] == (8, (3,), 0)
    load = each.load(P)
    assert load.by_level == (3, 5)
    each.deliver_all()
    assert load.blocks == 8
    each.release_load(load)
    each.finish()


def test_what_is_missing_is_not_asked_for_until_that_is_forgotten():
    each = bench()
    each.share("abc")
    assert each.asked(P).blocks == 3
    each.lookup(P), each.lookup("abcdzz"), each.take()
    assert not each.finds, "the fourth block is known to be missing"
    each.now += REMOTE.missing_s
    assert each.lookup("abcdzz").pending == 3
    each.take()
    assert next(iter(each.finds.values())).src_slots.tolist() == [3, 4, 5]
    each.finish()


def test_hints_end_and_are_asked_for_again():
    each = shared()
    each.now += REMOTE.hint_s
    assert each.lookup(P)[:3] == (0, (0,), 8)
    assert each.load(P).blocks == 0
    each.finish()


def test_blocks_behind_those_in_flight_are_pending():
    each = bench()
    each.share(P)
    each.store("abc")
    assert each.lookup(P).pending == 8
    each.take()
    each.answer()
    assert each.lookup(P)[:3] == (0, (0,), 8), "the first three are on their way from the caller"
    each.deliver_all()
    assert each.lookup(P)[:3] == (8, (3,), 0)
    each.finish()


def test_finds_are_bounded():
    each = bench()
    for letter in "abcdefgh":
        each.lookup(letter)
        each.take()
    assert len(each.finds) == 2, "half of the threads"
    assert each.planner.finds.waiting == 4
    assert each.planner.finds.counters.finds_refused == 2
    assert (each.lookup("f").pending, each.lookup("h").pending) == (1, 0)
    while each.finds:
        each.answer()
    assert each.lookup("f").pending == 0 and each.planner.finds.counters.finds == 6
    each.finish()


def test_a_new_epoch_knows_nothing():
    each = shared()
    each.lookup("xyz"), each.take()
    old = next(iter(each.finds))
    match_epoch = each.epoch
    each.new_epoch(b"epoch-1")
    assert each.planner.plan_load(*each.encode(P), match_epoch, each.now).blocks == 0
    assert each.lookup(P).remote == 0
    each.shared.add((b"epoch-0", "x"))
    each.answer(old)
    assert each.lookup("xyz").remote == 0
    each.finish()


# --- a key tier that fails -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["io", "deadline"])
def test_finds_that_fail_take_it_offline(reason):
    each = bench()
    each.share(P)
    for prompt in ("x", "y", "z"):
        each.lookup(prompt), each.take()
        each.answer(reason=reason)
        assert each.lookup(prompt).pending == 0
    assert each.state.breakers[-1].state == "open"
    each.lookup(P), each.take()
    assert not each.finds
    each.now += 0.05
    assert each.lookup(P).pending == 0, "nobody waits for a probe"
    each.lookup("q"), each.take()
    assert [job.n for job in each.finds.values()] == [1], "one probe, of one block"
    each.answer()
    assert each.state.breakers[-1].state == "closed"
    assert each.asked(P).remote == 8
    each.finish()


def test_a_probe_asks_for_a_block_of_the_prompt():
    """Also of one that is held to its end, and whose blocks have not arrived yet."""
    each = bench()
    for prompt in ("x", "y", "z"):
        each.lookup(prompt), each.take()
        each.answer(reason="io")
    each.store(P)
    each.now += 0.1
    assert each.lookup(P).blocks == 0
    each.take()
    (job,) = each.finds.values()
    assert job.src_slots.tolist() == [7] and len(job.symbols) == 8 * len(each.encode(P)[0]) // 8
    each.finish()


def test_waiting_finds_end_when_it_goes_offline():
    each = bench()
    for prompt in "abcde":
        each.lookup(prompt), each.take()
    while each.finds:
        each.answer(reason="io")
    assert each.planner.finds.waiting == 0
    assert all(each.lookup(prompt).pending == 0 for prompt in "abcde")
    each.finish()


def test_a_find_that_hangs():
    each = bench()
    each.lookup(P), each.take()
    (job,) = each.finds
    assert each.planner.commit(JobOverdue(job), each.now).job == job
    assert each.lookup(P).pending == 0
    assert each.state.credits[-1].lost_jobs == 1
    each.check()
    each.share(P)
    each.answer(job)
    assert each.state.credits[-1].lost_jobs == 0
    assert each.lookup(P).remote == 0, "nobody waited for this answer"
    each.finish()


def test_answers_do_not_hide_that_loads_fail():
    each = shared()
    for _ in range(3):
        each.load(P)
        each.deliver(each.job("load").id, False, "deadline")
        each.now += REMOTE.missing_s
        each.asked(P)
    assert each.state.breakers[-1].trips == 1
    each.finish()


def test_what_is_missing_or_wrong_is_an_answer_too():
    each = shared()
    each.shared.discard((each.epoch, "abcd"))
    for reason in ("missing", "checksum", "missing", "checksum"):
        load = each.load(P)
        each.deliver(each.job("load").id, [i != 3 for i in range(each.job("load").n)], reason)
        each.release_load(load)
        each.invalidate("a")
        each.share(P)
        each.now += REMOTE.missing_s
        assert each.asked(P).remote == 8
    assert each.state.breakers[-1].trips == 0
    each.finish()


# --- fetching --------------------------------------------------------------------------------------------------------


def test_a_load_fetches_into_slots():
    each = shared()
    load = each.load(P)
    job = each.job("load")
    assert (job.src_level, job.src_slots.tolist(), job.dst_level) == (1, list(range(8)), 0)
    assert charged(each) == 8 and each.states(0)["WRITING"] == 8
    found = each.lookup(P)
    assert (found.blocks, found.remote, found.pending) == (8, 8, 0)
    each.deliver_all()
    assert load.blocks == 8 and each.lookup(P).by_level == (8,)
    each.release_load(load)
    assert charged(each) == 8
    each.finish()


def test_a_second_load_joins_the_first():
    each = shared()
    loads = [each.load(P), each.load("abcdef"), each.load(P)]
    each.job("load")
    each.deliver_all()
    assert [load.blocks for load in loads] == [8, 6, 8]
    each.finish()


def test_a_load_into_rows_reads_what_is_being_fetched_once_more():
    each = shared()
    first, second = each.load(P), each.load(P, out=True)
    jobs = each.jobs("load")
    assert [job.n for job in jobs] == [8, 8] and jobs[1].also_slots is None
    each.deliver_all()
    assert (first.blocks, second.blocks) == (8, 8)
    each.finish()


@pytest.mark.parametrize("out", [False, True], ids=["slots", "rows"])
def test_blocks_that_do_not_come_shorten_the_load(out):
    each = shared()
    load = each.load(P, out=out)
    each.shared.discard((each.epoch, "abcdef"))
    each.deliver_all()
    assert load.blocks == 5
    found = each.lookup(P)
    assert (found.blocks, found.remote, found.pending) == (5, 0, 0)
    assert charged(each) == 5, "what did not come is not charged"
    each.finish()


@pytest.mark.parametrize("out", [False, True], ids=["slots", "rows"])
def test_a_fetch_that_hangs(out):
    each = shared()
    load = each.load(P, out=out)
    job = each.job("load").id
    each.overdue(job)
    assert load.done and load.blocks == 0
    assert charged(each) == 0 and each.states(0)["LOST"] == 8
    assert each.lookup(P).blocks == 0
    each.scribble()
    each.deliver(job)
    assert each.lookup(P).blocks == 0 and each.states(0) == {"FREE": 32}
    each.finish()


def test_queued_segments_end_when_it_goes_offline():
    prompt = "a" * 200
    each = shared(dram(1000), prompt=prompt)
    load = each.load(prompt)
    assert len(each.jobs("load")) == 2 and len(load.segments) == 2
    for job in each.jobs("load"):
        each.deliver(job.id, False, "io")
    each.deliver(each.jobs("load")[0].id, False, "io")
    each.deliver_all()
    assert load.done and load.blocks == 0 and charged(each) == 0
    each.finish()


def test_blocks_stored_under_it_meanwhile_go_with_it():
    each = shared()
    load = each.load(P)
    each.stored(P + "ij", start=8)
    assert charged(each) == 10
    each.deliver(each.job("load").id, [True] * 3 + [False] * 5, "checksum")
    assert load.blocks == 3 and charged(each) == 3
    each.finish()


def test_invalidated_while_it_is_fetched():
    each = shared()
    load = each.load(P)
    each.invalidate("abc")
    assert charged(each) == 2
    each.deliver_all()
    assert load.blocks == 2
    each.finish()


def test_a_new_epoch_while_it_is_fetched():
    each = shared()
    each.load(P)
    each.new_epoch(b"epoch-1")
    assert charged(each) == 0
    each.deliver_all()
    assert each.where() == {}
    each.finish()


def test_rows_get_slots_of_the_slowest_memory():
    each = shared(hbm(16), dram(32), nvme(64))
    load = each.load(P, out=True)
    job = each.job("load")
    assert (job.also_level, (job.also_slots >= 0).sum()) == (1, 8)
    each.deliver_all()
    assert load.blocks == 8 and (charged(each, 0), charged(each, 1)) == (0, 8)
    each.finish()


def test_a_promotion_moves_the_charge():
    each = shared(hbm(8), dram(32))
    each.load(P, out=True)
    each.deliver_all()
    load = each.load(P)
    assert load.blocks == 4, "half of the faster level, which is also all that may be held"
    each.deliver_all()
    assert charged(each, 0) == 4
    each.release_load(load)
    each.finish()


# --- a hint is no copy -----------------------------------------------------------------------------------------------


def test_what_a_key_tier_holds_too_is_copied_down_all_the_same():
    """DRAM full of ordinary blocks that remote also has: they are written to NVMe before they leave."""
    each = bench(dram(8), nvme(64), limits=Limits(job_blocks=8))
    each.share(P)
    each.stored(P)
    each.asked(P + "x")
    each.now += 1
    assert each.store("qrst").accepted == 0, "nothing may be dropped yet"
    each.deliver_all()
    assert each.levels_of(P)[-1:] == ["nvme"]
    assert each.stored("qrst").accepted == 4
    assert each.lookup(P).blocks == 8
    each.finish()


def test_dropped_locally_it_is_found_there_again():
    each = shared(dram(16))
    each.release_load(load := each.load(P))
    each.deliver_all()
    assert load.done
    each.now += 1
    for letter in "qrstuvwxyz":
        each.stored(letter * 4)
        each.now += 1
    assert each.lookup(P).by_level == (0,)
    assert each.asked(P).remote == 8
    each.finish()


def test_what_is_computed_sooner_than_fetched_is_not_offered():
    """`block_s`: seconds of prefill that a block saves; a load of 8 blocks takes a second here."""
    each = shared()
    load = each.load(P)
    each.deliver(each.job("load").id, seconds=1.0)
    each.release_load(load)
    each.invalidate("a")
    symbols, n = each.encode(P)
    slow = each.planner.lookup(symbols, n, each.now, block_s=0.05)
    assert (slow.blocks, slow.remote, slow.load_s) == (0, 0, 0.0)
    worth = each.planner.lookup(symbols, n, each.now, block_s=0.5)
    assert (worth.blocks, worth.remote) == (8, 8) and worth.load_s == pytest.approx(1.0, rel=0.3)
    each.finish()


def test_no_load_waits_longer_than_one_deadline():
    """Two jobs are under way, which is all there may be; a third load waits for them, and one of them is late."""
    prompts = ["abcdefgh", "ijklmnop", "qrstuvwx"]
    each = bench(dram(64))
    for prompt in prompts:
        each.share(prompt)
        assert each.asked(prompt).remote == 8
    loads = [each.load(prompt) for prompt in prompts]
    each.take()
    under_way = each.jobs("load")
    assert len(under_way) == 2 and len(loads[2].segments) == 1
    outcome = each.overdue(under_way[0].id)
    assert loads[2] in outcome.loads and loads[2].blocks == 0, "it would wait for others that may be late too"
    each.take()
    each.deliver_all()
    assert loads[1].blocks == 8, "what is under way goes on"
    for load in loads:
        each.release_load(load)
    each.finish()


def test_a_load_does_not_wait_for_a_key_tier_that_just_failed():
    each = shared(dram(64))
    each.share("qrstuvwx"), each.asked("qrstuvwx")
    each.stored("abc")
    load = each.load(P)
    each.take()
    each.deliver(each.job("load").id, ok=False, reason="io")
    each.release_load(load)
    assert each.state.key_breaker.failures == 1
    for prompt in ("ijkl", "mnop"):  # two questions are all that may be under way now
        each.lookup(prompt)
    each.take()
    assert len(each.finds) == 2 and each.state.key_room() == 0
    load = each.load("qrstuvwx")
    assert load.done and load.blocks == 0, "it would wait for these"
    each.release_load(load)
    each.answer()
    load = each.load("qrstuvwx")
    assert not load.done, "there is room again"
    each.take()
    each.deliver_all()
    assert load.blocks == 8
    each.release_load(load)
    each.finish()
