"""With one level and one request at a time the planner is an LRU over blocks, leaf first."""

import random
from collections import OrderedDict

import pytest
from planner_kit import Bench, dram


class BlockLRU:
    """Per block: a request refreshes its whole path, the last block first, so that of one request's blocks the
    deepest is the oldest. What a request finds is no victim while its new blocks are taken, as far as room goes."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.blocks = OrderedDict()

    def request(self, prompt):
        path = [prompt[: i + 1] for i in range(len(prompt))]
        hit = next((i for i, block in enumerate(path) if block not in self.blocks), len(path))
        found = set(path[:hit])
        victims = [block for block in self.blocks if block not in found]
        lacking = len(path) - hit - (self.capacity - len(self.blocks))
        for block in victims[: max(0, lacking)]:
            del self.blocks[block]
        taken = min(len(path), hit + self.capacity - len(self.blocks))
        for block in reversed(path[:taken]):
            self.blocks[block] = None
            self.blocks.move_to_end(block)
        return hit, taken


def trace(chance, n):
    """Conversations that grow, one-shot prompts, and a shared beginning."""
    talks = [chance.choice(["", "s", "sy"]) for _ in range(8)]
    for _ in range(n):
        if chance.random() < 0.3:
            yield "".join(chance.choice("abcdef") for _ in range(chance.randint(1, 6)))
            continue
        which = chance.randrange(len(talks))
        if len(talks[which]) > 14 or chance.random() < 0.1:
            talks[which] = chance.choice(["", "s", "sy"])
        talks[which] += "".join(chance.choice("mnop") for _ in range(chance.randint(1, 3)))
        yield talks[which]


@pytest.mark.parametrize("capacity", [3, 8, 20, 50])
@pytest.mark.parametrize("seed", range(3))
def test_a_random_trace(seed, capacity):
    chance = random.Random(seed * 100 + capacity)
    bench, reference, hits = Bench(dram(capacity)), BlockLRU(capacity), 0
    for i, prompt in enumerate(trace(chance, 200)):
        bench.now = float(i)
        load = bench.load(prompt, out=True)
        plan = bench.stored(prompt, load.blocks)
        bench.deliver_all()
        hit, taken = reference.request(prompt)
        assert (load.blocks, load.blocks + plan.accepted) == (hit, taken)
        assert bench.residents(0) == set(reference.blocks)
        hits += hit
    assert hits > 50 or capacity == 3
    bench.check()
