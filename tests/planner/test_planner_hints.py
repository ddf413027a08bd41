"""What callers say of blocks: priorities, ends in time, blocks for the slow tiers only, pins that end."""

import math
import time

import numpy as np
import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.core import Planner
from tiercache.policy import make_policy
from tiercache.types import COLD, Forget, LevelSpec, NoteUse

# -- priority ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_blocks_of_a_higher_priority_leave_after_all_of_a_lower_one_whatever_their_use(policy):
    bench = Bench(dram(4), policy=policy)
    for prompt, priority in (("a", 1), ("b", -1), ("c", 0), ("d", 100)):
        bench.stored(prompt, priority=priority)
        bench.now += 1000.0
    left = []
    for i, prompt in enumerate("wxyz"):
        bench.stored(prompt, priority=100)
        left.append(next(each for each in "abcd" if each not in bench.where() and each not in left))
        bench.now += 1.0 + i
    assert left == ["b", "c", "a", "d"]


def test_within_one_priority_the_policy_decides():
    bench = Bench(dram(4))
    for prompt in "abcd":
        bench.now += 1.0
        bench.stored(prompt, priority=5)
    bench.touch("a")
    bench.stored("e", priority=5)
    assert set(bench.where()) == {"a", "c", "d", "e"}


def test_what_was_there_keeps_the_higher_priority_and_the_later_end():
    bench = Bench(dram(8))
    bench.stored("ab", priority=2, ttl=10.0)
    bench.stored("abcd", priority=1, ttl=20.0)
    assert [bench.priorities[each] for each in ("a", "ab", "abc", "abcd")] == [2, 2, 1, 1]
    assert {bench.ends[each] for each in ("a", "ab", "abc", "abcd")} == {1020.0}
    bench.stored("ab", priority=3)
    assert bench.priorities["ab"] == 3 and math.isinf(bench.ends["ab"]) and bench.ends["abcd"] == 1020.0
    bench.check()


def test_prioritize_sets_it_also_lower_and_says_how_many_it_changed():
    bench = Bench(dram(4))
    for prompt in ("ab", "c"):
        bench.now += 1.0
        bench.stored(prompt, priority=7)
    assert bench.prioritize("cd", -1) == 1 and bench.prioritize("c", -1) == 0 and bench.prioritize("xy", 3) == 0
    bench.check()
    bench.stored("ef")
    assert set(bench.where()) == {"a", "ab", "e", "ef"} or "c" not in bench.where()
    bench.finish()


def test_a_run_of_two_priorities_leaves_only_as_far_as_they_are_alike():
    bench = Bench(dram(6))
    bench.stored("abcd")
    bench.prioritize("ab", 3)
    bench.now += 1.0
    bench.stored("wx")
    bench.stored("xyz", priority=1)
    assert set(bench.where()) == {"a", "ab", "w", "x", "xy", "xyz"}, "the last of w goes before b"


def test_a_drain_writes_what_has_a_higher_priority_first():
    bench = Bench(dram(16), nvme(64))
    bench.stored("abcd")
    bench.prioritize("ab", 3)
    bench.now += 1.0
    bench.stored("xy")
    node, _, _ = _run(bench, "abcd")
    assert bench.planner.victims.alike(1, node, np.arange(4)) == [(0, 2), (2, 4)]
    bench.drain()
    assert [job.n for job in bench.jobs("write")] == [2, 2, 2]
    order = [[bench.tokens[ident][1] for ident in job.idents.tolist()] for job in bench.jobs("write")]
    assert order == [["a", "ab"], ["x", "xy"], ["abc", "abcd"]]
    bench.finish()


def test_priorities_count_in_a_persistent_level_too():
    bench = Bench(dram(2), nvme(4), write_after_s=0.0)
    for prompt, priority in (("a", 9), ("b", 0), ("c", 0), ("d", 0), ("e", 0)):
        bench.now += 1.0
        bench.stored(prompt, priority=priority)
        bench.deliver_all()
    assert bench.residents(1) == {"a", "c", "d", "e"}


def test_the_gate_of_writes_lets_through_what_matters():
    bench = Bench(dram(4), nvme(40), policy="reuse", max_writes_per_hit=1.0)
    index = bench.state.residency.index
    bench.state.policy.worth = lambda node, at: 0.0
    for prompt, priority, worth in (("a", 0, False), ("b", 1, True), ("c", -1, False), ("d", COLD, True)):
        bench.stored(prompt, priority=priority)
        node = index.walk(*bench.encode(prompt)).path.nodes[0]
        assert bench.state.is_worth_writing(node, 0) == worth, prompt


# -- slow tiers only --------------------------------------------------------------------------------------------------


def test_cold_blocks_are_written_at_once_and_leave_memory_first():
    bench = Bench(dram(6), nvme(40))
    bench.stored("ab")
    bench.now += 1000.0
    bench.stored("cd", priority=COLD)
    job = bench.job("write")
    assert job.n == 2 and job.start_after_s == 0.0
    bench.deliver(job.id)
    bench.now += 1000.0
    bench.stored("efgh")
    assert bench.residents(0) == {"a", "ab", "e", "ef", "efg", "efgh"} and bench.residents(1) == {"c", "cd"}


def test_cold_blocks_are_not_brought_up_beside_a_load_into_rows():
    bench = Bench(dram(8), nvme(40))
    bench.stored("abc")
    bench.prioritize("ab", COLD)
    bench.drain()
    bench.deliver_all()
    bench.planner.room.drop(0, *_run(bench, "abc"))
    bench.load("abc", out=True)
    assert bench.job("load").also_slots.tolist()[:2] == [-1, -1] and bench.job("load").also_slots[2] >= 0
    bench.finish()


def _run(bench, prompt):
    node, take = bench.state.residency.index.walk(*bench.encode(prompt)).path.end
    return node, 0, take


def test_a_load_to_level_0_brings_cold_blocks_up_and_they_leave_first_again():
    bench = Bench(dram(4), nvme(40))
    bench.stored("a", priority=COLD)
    bench.deliver_all()
    bench.planner.room.drop(0, *_run(bench, "a"))
    load = bench.load("a")
    bench.deliver_all()
    assert load.blocks == 1 and bench.residents(0) == {"a"}
    bench.release_load(load)
    for prompt in "bcde":
        bench.stored(prompt)
    assert bench.residents(0) == {"b", "c", "d", "e"} and bench.residents(1) == {"a"}


def test_prioritize_cold_writes_what_only_memory_has():
    bench = Bench(hbm(4), dram(8), nvme(40))
    bench.stored("abc")
    assert bench.jobs("write") == [] and bench.prioritize("ab", COLD) == 2
    bench.deliver_all()
    assert bench.residents(2) == {"a", "ab"}


def test_cold_counts_as_none_in_the_persistent_level_and_as_the_lowest_without_one():
    bench = Bench(dram(2))
    bench.stored("a", priority=COLD)
    bench.stored("b", priority=-99)
    bench.stored("c")
    assert set(bench.where()) == {"b", "c"}
    bench = Bench(dram(4), nvme(8))
    bench.stored("a", priority=COLD)
    node, _, _ = _run(bench, "a")
    assert bench.planner.victims.key(0, node, 0) == -math.inf
    assert bench.planner.victims.key(1, node, 0) == bench.now


# -- ends in time -----------------------------------------------------------------------------------------------------


def test_a_block_ends_at_its_time_with_all_that_continues_it():
    bench = Bench(dram(8), nvme(40), write_after_s=0.0)
    bench.stored("ab", ttl=10.0)
    bench.stored("abc", ttl=5.0)
    bench.stored("xyz")
    bench.deliver_all()
    bench.now += 5.0
    assert bench.lookup("abcd").blocks == 2 and bench.lookup("abcd").words == 4
    assert "abc" in bench.where(), "a lookup changes nothing"
    bench.tend()
    assert set(bench.where()) == {"a", "ab", "x", "xy", "xyz"}
    assert len([each for each in bench.messages if isinstance(each, Forget)]) == 1
    bench.now += 5.0
    assert bench.lookup("ab").blocks == 0 and bench.lookup("ab").words == 0
    bench.stored("ab")
    assert bench.planner.totals().expired == 3 and math.isinf(bench.ends["ab"])
    bench.now += 1e6
    assert bench.lookup("ab").blocks == 2
    bench.finish()


def test_using_a_block_does_not_put_its_end_off():
    bench = Bench(dram(8))
    bench.stored("ab", ttl=10.0)
    for _ in range(3):
        bench.now += 3.0
        bench.touch("ab")
        bench.release_load(bench.load("ab"))
    bench.now += 1.0
    assert bench.load("ab").blocks == 0 and bench.where() == {}


def test_each_verb_sees_what_has_ended_as_gone():
    for verb in ("load", "touch", "pin", "hint", "invalidate", "prioritize"):
        bench = Bench(dram(8))
        bench.stored("ab", ttl=10.0)
        bench.now += 10.0
        got = bench.prioritize("ab", 3) if verb == "prioritize" else getattr(bench, verb)("ab")
        assert (got.blocks if verb == "load" else got) in (0, []), verb
        bench.check()


def test_explain_says_what_was_said_and_leaves_out_what_has_ended():
    bench = Bench(dram(8))
    bench.stored("abc", priority=3)
    bench.stored("abcd", priority=COLD, ttl=10.0)
    index = bench.planner.explain(*bench.encode("abcd"), bench.now)
    assert [(each.begin, each.end, each.priority, each.expires_s) for each in index] == [
        (0, 3, 3, math.inf),
        (3, 4, COLD, 1010.0),
    ]
    assert bench.planner.explain(*bench.encode("abcd"), 1010.0)[-1].end == 3


def test_what_is_loaded_and_what_is_being_written_may_end_too():
    bench = Bench(dram(8), nvme(40), write_after_s=0.0)
    bench.stored("ab", ttl=10.0)
    load = bench.load("ab")
    assert load.blocks == 2 and bench.jobs("write")
    bench.now += 10.0
    bench.tend()
    assert bench.where() == {}
    bench.check()
    bench.deliver_all()
    bench.release_load(load)
    bench.finish()
    assert bench.states(0) == {"FREE": 8} and bench.states(1) == {"FREE": 40}


def test_both_halves_of_a_split_run_end():
    bench = Bench(dram(16))
    bench.stored("abcd", ttl=10.0)
    bench.stored("abx", ttl=20.0)
    bench.now += 10.0
    bench.tend()
    assert set(bench.where()) == {"a", "ab", "abx"}
    bench.now += 10.0
    bench.tend()
    assert bench.where() == {}


def test_a_run_that_is_cut_by_anything_else_than_a_store_ends_too():
    bench = Bench(dram(16))
    bench.stored("abcd", ttl=10.0)
    residency = bench.state.residency
    symbols, _ = bench.encode("abx")
    residency.extend(residency.index.walk(symbols, 3).path, symbols[-8:], np.zeros(1, dtype=np.uint64), False)
    halves = [node.id for node in residency.index.walk_nodes() if node.hints is not None]
    assert len(halves) == 2 and sorted(residency.expiry.due(1010.0)) == sorted(halves)


def test_hints_come_back_after_a_restart_and_an_end_meanwhile_counts():
    bench = Bench(dram(8), nvme(40), write_after_s=0.0)
    bench.stored("ab", priority=4, ttl=10.0)
    claims = bench.job("write").claims
    assert claims.hints["priority"].tolist() == [4, 4] and claims.hints["expires"].tolist() == [1010.0] * 2
    bench.deliver_all()
    bench.messages.clear()
    bench.stored("abc", priority=5, ttl=30.0)
    (note,) = [each for each in bench.messages if isinstance(each, NoteUse)]
    assert note.hints["priority"].tolist() == [5, 5] and note.hints["expires"].tolist() == [1030.0] * 2
    bench.messages.clear()
    bench.now += 7.0
    bench.prioritize("a", COLD)
    (note,) = [each for each in bench.messages if isinstance(each, NoteUse)]
    assert note.last_use.tolist() == [1000.0], "that was no use"
    assert note.hints["priority"].tolist() == [COLD]


def test_a_restart_takes_hints_over():
    from planner_kit import recovered_of

    from tiercache.types import Recovered, no_hints

    plain = recovered_of({"a": 1.0, "ab": 1.0, "c": 2.0})
    hints = no_hints(3)
    hints["expires"][1], hints["priority"][2] = 900.0, 8  # sorted by length: a, c, ab
    fields = {name: getattr(plain, name) for name in plain.__slots__}
    bench = Bench(dram(8), nvme(40), recovered=Recovered(**{**fields, "hints": hints}))
    bench.encode("ab")
    assert bench.lookup("ab").blocks == 2, "the planner has no clock of its own"
    bench.encode("c")
    explained = bench.planner.explain(*bench.encode("ab"), bench.now)
    assert explained[1].priority == 8
    assert bench.planner.explain(*bench.encode("c"), 899.0)[0].expires_s == 900.0
    assert bench.lookup("c").blocks == 0, "it ended at 900, and it is 1000"


def test_pins_end_by_themselves_and_those_that_were_ended_keep_no_memory():
    bench = Bench(dram(8))
    bench.stored("ab")
    held = bench.pin("ab", ttl=10.0)
    assert bench.states(0)["RESIDENT"] == 2 and bench.state.credits[0].held == 2
    bench.now += 9.9
    bench.tend()
    assert bench.state.credits[0].held == 2
    bench.now += 0.1
    bench.tend()
    assert bench.state.credits[0].held == 0 and bench.state.pinned == []
    bench.unpin(held)
    bench.check()
    for _ in range(100):
        bench.unpin(bench.pin("ab", ttl=1e9))
    assert len(bench.planner.pins._ends) <= 10 and bench.state.credits[0].held == 0
    longer = bench.pin("ab", ttl=1e9)
    for _ in range(100):
        bench.unpin(bench.pin("ab", ttl=1e9))
    bench.now += 1e9
    bench.tend()
    assert bench.state.pinned == [] and longer
    bench.finish()


# -- cost -------------------------------------------------------------------------------------------------------------


def _filled(others):
    """A planner with `others` prompts of 8 blocks, and 50 more below one block."""
    planner = Planner((LevelSpec("dram", 8 * others + 1000, 4096),), 8, make_policy("lru"), namespace_digest=b"n" * 16)
    chance = np.random.default_rng(others)
    first = chance.bytes(8)

    def put(symbols, ttl):
        planner.plan_store(symbols, len(symbols) // 8, 0, b"", 1000.0, 1, expires=1000.0 + ttl)
        for message in planner.take_messages():
            from tiercache.types import JobResult

            planner.commit(JobResult(message.id, np.ones(message.n, np.bool_), 0, 0.0), 1000.0)

    for _ in range(others):
        put(chance.bytes(64), math.inf)
    for _ in range(50):
        put(first + chance.bytes(64), 50.0)
    return planner, first


@pytest.mark.parametrize("by", ["invalidate", "expire"])
def test_cost_is_proportional_to_what_is_removed(by):
    """The same 401 blocks, out of 800 others and out of 64,000."""
    seconds = {}
    for others in (100, 8000):
        least = math.inf
        for _ in range(3):
            planner, first = _filled(others)
            began = time.perf_counter()
            if by == "invalidate":
                assert planner.invalidate(first, 1, 1000.0) == 401
            else:
                planner._begin(1050.0)
                assert planner.totals().expired == 401
            least = min(least, time.perf_counter() - began)
            assert planner.state.residency.index.blocks == 8 * others
        seconds[others] = least
    assert seconds[8000] < 5 * seconds[100], seconds


def test_a_new_epoch_waits_for_no_old_end():
    bench = Bench(dram(8))
    bench.stored("ab", ttl=10.0)
    assert bench.state.residency.expiry.next == 1010.0
    bench.new_epoch(b"other")
    assert bench.state.residency.expiry.next == math.inf


def test_blocks_that_a_run_grows_by_have_no_hints_of_their_own():
    bench = Bench(dram(8))
    bench.stored("ab", priority=4, ttl=10.0)
    residency = bench.state.residency
    symbols, _ = bench.encode("abc")
    node, at = residency.extend(
        residency.index.walk(symbols, 3).path, symbols[-8:], np.zeros(1, dtype=np.uint64), False
    )
    assert at == 2 and node.hints[2].tolist() == (0, math.inf)


def test_a_write_of_which_some_blocks_failed_records_the_hints_of_the_others():
    from tiercache.mover.ledger import chosen_claims

    bench = Bench(dram(8), nvme(40), write_after_s=0.0)
    bench.stored("ab", ttl=10.0)
    bench.deliver_all()
    bench.stored("abc", start=2, priority=7, ttl=90.0)
    bench.stored("abcd", start=3, ttl=50.0)
    claims = bench.planner.writes._claims(*_run(bench, "abcd")[:1], 0, 4, 1)
    some = chosen_claims(claims, np.array([True, False, False, True]))
    assert some.hints["priority"].tolist() == [7, 0] and some.hints["expires"].tolist() == [1090.0, 1050.0]
