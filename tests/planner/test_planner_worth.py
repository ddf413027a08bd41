"""What is not worth a write is not copied down, and leaves when its room is needed."""

import random

import pytest
from planner_kit import WIDTH, Bench, dram, hbm, nvme

from tiercache.policy import LRU


class Judge(LRU):
    """Says of each block what it is told to, by the letter that the block stands for."""

    def __init__(self, worth):
        self.by_letter = worth

    def worth(self, node, at):
        letter = chr(int.from_bytes(node.run[at * WIDTH : at * WIDTH + 4], "little"))
        return self.by_letter.get(letter, 1.0)


def bench_of(worth, limit=2.0, **options):
    return Bench(dram(4), nvme(16), policy=Judge(worth), max_writes_per_hit=limit, **options)


def written(bench):
    return bench.planner.level_counters()[1].written


def test_the_judge_reads_letters():
    bench = bench_of({"a": 0.25})
    bench.stored("ab")
    (node,) = [node for node in bench.state.residency.index.walk_nodes() if node.parent is not None]
    assert [bench.state.policy.worth(node, at) for at in (0, 1)] == [0.25, 1.0]
    assert [bench.state.is_worth_writing(node, at) for at in (0, 1)] == [False, True]


@pytest.mark.parametrize(("worth", "copies"), [(0.49, 0), (0.5, 1)])
def test_a_block_is_written_where_enough_hits_are_to_be_expected(worth, copies):
    bench = bench_of({"a": worth})
    for prompt in "abcdefgh":
        bench.now += 1
        bench.stored(prompt)
        bench.deliver_all()
    assert bench.lookup("a").by_level == (0, copies)
    assert bench.lookup("b").by_level == (0, 1) and bench.lookup("h").by_level[0] == 1
    assert bench.planner.check() == []


def test_without_a_limit_everything_is_written():
    bench = bench_of(dict.fromkeys("abcdefgh", 0.0), limit=None)
    for prompt in "abcdefgh":
        bench.now += 1
        bench.stored(prompt)
        bench.deliver_all()
    assert sum(bench.lookup(prompt).blocks for prompt in "abcdefgh") == 8


def test_a_worthless_block_above_one_that_is_written_is_written_too():
    bench = bench_of({"a": 0.0})
    bench.stored("ab")
    for prompt in "cdefgh":
        bench.now += 1
        bench.stored(prompt)
        bench.deliver_all()
    assert bench.lookup("ab").by_level == (0, 2), "b is worth it, and would not be found without a"
    assert bench.planner.check() == []


def test_a_worthless_run_goes_at_once_and_nothing_is_written():
    bench = bench_of(dict.fromkeys("abcdefghijkl", 0.0))
    for prompt in ("abc", "defg", "hijk", "l"):
        bench.now += 1
        bench.stored(prompt)
        bench.deliver_all()
        assert bench.lookup(prompt).blocks == len(prompt)
    assert written(bench) == 0 and bench.tables[1].free == 16


def test_by_age_only_what_is_worth_it_is_written_and_a_flush_writes_all():
    bench = bench_of({"a": 0.1}, write_after_s=0.0)
    for prompt in "ab":
        bench.stored(prompt)
        bench.deliver_all()
    assert bench.lookup("b").by_level == (1, 0) and bench.residents(1) == {"b"}
    assert bench.planner.drain(bench.now) == 1
    bench.take()
    bench.deliver_all()
    assert bench.residents(1) == {"a", "b"}


@pytest.mark.parametrize("seed", range(5))
def test_on_three_levels_only_leaves_are_worthless(seed):
    """What hangs below a block may be on any level, also in a faster one."""
    chance, worthless = random.Random(seed), 0
    judge = Judge({letter: chance.choice([0.0, 1.0]) for letter in "abcdefgh"})
    bench = Bench(hbm(4), dram(8), nvme(40), policy=judge, max_writes_per_hit=2.0)
    for _ in range(150):
        bench.now += 1
        prompt = "".join(chance.choice("abcdefgh"[i : i + 3]) for i in range(chance.randint(1, 6)))
        bench.stored(prompt, bench.load(prompt, out=True).blocks)
        if chance.random() < 0.7:
            bench.deliver_all()
        assert bench.planner.check() == []
        for node in bench.state.residency.index.walk_nodes():
            place = node.filed[1]
            if place is None or not place[0]:
                continue
            last = max(i for i in range(node.n) if node.slots[i, 1] >= 0)
            if node.slots[last, 2] < 0:
                assert last == node.n - 1 and not any(node.kids)
                worthless += 1
    assert worthless > 10
