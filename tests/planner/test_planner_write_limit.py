"""`max_writes_per_hit` is held to what was measured, and lets go again."""

import pytest
from planner_kit import Bench, dram, nvme
from test_planner_worth import Judge

from tiercache.planner.counters import LevelCounters
from tiercache.planner.write_limit import WriteLimit

CAPACITY = 60


def use(bench, first, times):
    """A prompt of four blocks, named by its first character, used so often."""
    prompt = "".join(chr(first + i) for i in range(4))
    for _ in range(times):
        bench.now += 0.1
        load = bench.load(prompt, out=True)
        if load.blocks < 4:
            bench.stored(prompt, load.blocks)
        bench.deliver_all()
    bench.now += 1


def bench_of(limit):
    return Bench(dram(20), nvme(CAPACITY), policy="reuse", max_writes_per_hit=limit)


@pytest.mark.parametrize("limit", [1.5, 2.0, 6.0])
def test_it_holds_where_what_is_used_again_is_used_while_it_is_in_memory(limit):
    """Each prompt is used four times at once and never again: its class looks as good as any, and no hit comes."""
    bench, free = bench_of(limit), bench_of(None)
    for i in range(250):
        use(bench, 0x100 + 4 * i, 4)
        use(free, 0x100 + 4 * i, 4)
    counters = bench.planner.level_counters()[1]
    assert bench.state.policy._held.of(2 * (3 * 3 + 2)) > 0.5, "so often such blocks are used again, in memory"
    assert counters.hits == 0 and counters.written < 1.8 * CAPACITY, "one filling, and little more"
    assert free.planner.level_counters()[1].written > 15 * CAPACITY
    assert bench.planner.check() == []


def test_it_lets_go_when_hits_come():
    bench = bench_of(6.0)
    for i in range(200):
        use(bench, 0x100 + 4 * i, 4)
    limit, counters = bench.state.write_limit, bench.planner.level_counters()[1]
    for i in range(150):  # ten prompts in turn: more than DRAM holds, less than NVMe holds
        use(bench, 0x8000 + 4 * (i % 10), 1)
    assert counters.hits > 350 and limit.share == pytest.approx(1 / 6)


def test_the_share_follows_the_ratio_that_was_measured():
    limit, counters = WriteLimit(4.0, 640), LevelCounters()

    def pass_by(blocks, written, hits=0):
        for _ in range(blocks // 16):
            counters.written += written
            counters.hits += hits
            limit.note(limit._counted[0] + 16, counters)

    limit.note(9, counters)
    assert limit.share == 0.25 and limit._counted == (0, 0, 0), "too little passed"
    pass_by(480, 16)
    assert limit.share == 0.25, "most of the first filling counts as paid"
    pass_by(480, 16)
    assert limit.share == 1.0
    pass_by(8000, 16, 3)
    assert limit.share == 1.0, "more than five writes a hit"
    pass_by(8000, 16, 5)
    assert limit.share == 0.25, "less than four writes a hit"


def ask_for(bench, share):
    bench.state.write_limit.share = share
    bench.state.write_limit.note = lambda taken, counters: None


def letters(bench, level):
    return {prompt[-1] for prompt in bench.residents(level)}


def test_what_was_filed_as_worth_its_write_leaves_without_one_when_more_is_asked_for():
    bench = Bench(dram(4), nvme(16), policy=Judge(dict.fromkeys("abcdefgh", 0.6)), max_writes_per_hit=2.0)
    for prompt in "abcd":
        bench.now += 1
        bench.stored(prompt)
        bench.deliver_all()
    before = len(bench.residents(1))
    ask_for(bench, 0.9)
    for prompt in "efgh":
        bench.now += 1
        assert bench.stored(prompt).accepted == 1
        bench.deliver_all()
    assert len(bench.residents(1)) == before < 3 and letters(bench, 0) == set("efgh")
    assert bench.planner.check() == []


def test_what_was_filed_as_worthless_is_written_when_less_is_asked_for():
    bench = Bench(dram(4), nvme(16), policy=Judge(dict.fromkeys("abcdefgh", 0.6)), max_writes_per_hit=1.2)
    for prompt in "abcd":
        bench.now += 1
        bench.stored(prompt)
        bench.deliver_all()
    bench.planner.victims.refile(0)
    assert bench.residents(1) == set() and bench.planner.victims.count(0, True) == 4
    ask_for(bench, 0.5)
    assert bench.planner.check() == [], "filed by what was true then"
    for prompt in "efgh":
        bench.now += 1
        accepted = bench.stored(prompt).accepted
        assert accepted == (prompt != "e"), "room for the first was not made ahead; it is now"
        bench.deliver_all()
    assert {"a", "b", "c"} <= letters(bench, 1) and bench.planner.check() == []
