"""What a restart makes of what NVMe held."""

import itertools
import random

import numpy as np
import pytest
from planner_kit import WIDTH, Bench, dram, hbm, nvme, recovered_of

from tiercache.planner.state import Limits
from tiercache.types import ROOT, Forget, Recovered


def random_bench(chance):
    bench = Bench(dram(12), nvme(48), limits=Limits(job_blocks=chance.choice([2, 8, 64])))
    for _ in range(chance.randint(1, 12)):
        prompt = "".join(chance.choice("ab") for _ in range(chance.randint(1, 10)))
        bench.now += 1
        for _ in range(3):
            bench.stored(prompt, bench.lookup(prompt).blocks)
            bench.deliver_all()
        if chance.random() < 0.5 or not bench.claims:
            bench.drain()
            bench.deliver_all()
    return bench


def shuffled(recovered, chance):
    """The same blocks in another order, parents before their children still."""
    n = len(recovered.slots)
    weight = np.array([chance.random() for _ in range(n)])
    order, placed = [], set()
    while len(order) < n:
        ready = [
            i for i in range(n) if i not in placed and (recovered.parents[i] == ROOT or recovered.parents[i] in placed)
        ]
        best = min(ready, key=lambda i: weight[i])
        placed.add(best)
        order.append(best)
    new_index = {old: new for new, old in enumerate(order)}
    parents = [ROOT if recovered.parents[i] == ROOT else new_index[int(recovered.parents[i])] for i in order]
    symbols = np.frombuffer(recovered.symbols, dtype=np.uint8).reshape(n, WIDTH)[order].tobytes()
    return Recovered(
        recovered.slots[order],
        np.array(parents, dtype=np.int64),
        recovered.idents[order],
        symbols,
        recovered.last_use[order],
        recovered.uses[order],
    )


@pytest.mark.parametrize("seed", range(25))
def test_a_restart_finds_every_claimed_block_and_no_other(seed):
    chance = random.Random(seed)
    before = random_bench(chance)
    recovered = shuffled(before.recovered(), chance)
    after = Bench(dram(12), nvme(48), recovered=recovered)
    for prompt in before.where():
        after.encode(prompt)
    after.claims = dict(before.claims)
    after.content[1] = list(before.content[1])
    after.check()
    held = {prompt for _, prompt in before.claims.values()}
    assert set(after.where()) == held
    for length in range(1, 8):
        for letters in itertools.product("ab", repeat=length):
            prompt = "".join(letters)
            expected = next((i for i in range(length) if prompt[: i + 1] not in held), length)
            found = after.lookup(prompt)
            assert found.by_level == (0, expected) and found.pending == 0
    for prompt in held:
        assert after.last_use(prompt) == before.last_use(prompt)
        assert after.where()[prompt][1] == before.where()[prompt][1]
    load = after.load(max(held, key=len), out=True)
    after.deliver_all()
    assert load.blocks == max(len(prompt) for prompt in held)
    after.finish()


def test_runs_are_maximal_again():
    bench = Bench(dram(16), nvme(32), limits=Limits(job_blocks=2))
    for begin in range(0, 8, 2):
        bench.stored("abcdefgh"[: begin + 2], begin)
    bench.stored("abcdXy"[:4] + "xy", 4)
    while bench.drain():
        bench.deliver_all()
    after = Bench(dram(16), nvme(32), recovered=bench.recovered())
    runs = sorted((node.depth, node.n) for node in after.state.residency.index.walk_nodes())
    assert runs == [(0, 4), (4, 2), (4, 4)]
    assert after.planner.totals().recovered == 10


def test_recovered_blocks_go_by_last_use_then_leaf_first():
    blocks = {"a": 30.0, "ab": 30.0, "abc": 30.0, "abd": 10.0, "x": 20.0, "xy": 20.0, "p": 5.0, "pq": 5.0, "ps": 4.0}
    blocks |= {"r": 1.0, "t": 1.0, "tu": 1.0}
    bench = Bench.holding(blocks, dram(16), nvme(len(blocks)))
    prompts = sorted(blocks, key=lambda prompt: (len(prompt), prompt))
    gone = []
    for letter in "0123456789XY".lower():
        bench.stored(letter)
        bench.messages.clear()
        bench.drain()
        bench.deliver_all()
        gone += [prompts[slot] for m in bench.messages if isinstance(m, Forget) for slot in m.slots.tolist()]
        bench.check()
    assert gone == ["tu", "r", "t", "ps", "pq", "p", "abd", "xy", "x", "abc", "ab", "a"]


def test_nothing_to_recover():
    bench = Bench(dram(4), nvme(8), recovered=recovered_of({}, forgotten=3))
    assert bench.where() == {} and bench.planner.totals().recovered_forgotten == 3
    bench.stored("ab")
    bench.finish()


def test_recovery_under_three_levels():
    bench = Bench.holding({"a": 1.0, "ab": 1.0}, hbm(4), dram(4), nvme(8))
    assert bench.lookup("ab").by_level == (0, 0, 2)
    load = bench.load("ab")
    bench.finish()
    assert load.done and bench.lookup("ab").by_level == (2, 0, 0)


def test_released_blocks_are_claimed_with_a_finite_last_use():
    bench = Bench(dram(8), nvme(16))
    bench.stored("ab")
    bench.hint("ab")
    bench.drain()
    (job,) = bench.jobs("write")
    assert job.claims.last_use.tolist() == [0.0, 0.0]
    bench.finish()


@pytest.mark.parametrize("prompt", ["", "ab", "q"])
def test_what_a_restart_found_and_somebody_dropped_is_not_kept(prompt):
    """Runs that were never filed, alone or below a fork, are given up with the tree."""
    last_use = dict.fromkeys(["a", "ab", "abc", "abx", "q", "qr"], 5.0)
    bench = Bench.holding(last_use, dram(4), nvme(16))
    residency = bench.state.residency
    filed = set(residency.restored)
    assert len(filed) == 3
    bench.planner.invalidate(*bench.encode(prompt), bench.now)
    bench.take()
    there = set(residency.index.walk_nodes())
    assert set(residency.restored) == filed & there and len(there & filed) == {"": 0, "ab": 1, "q": 2}[prompt]
    assert bench.planner.check() == []
