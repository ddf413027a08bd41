"""Whoever replays what a residency's listener hears knows which blocks are readable where, after every step."""

import random

import pytest
from planner_kit import WIDTH, Bench, dram, nvme, recovered_of, symbols_of
from planner_steps import LEVELS, Steps

from tiercache.slots import SlotState


class Replay:
    """Keeps (level, prompt's symbols up to the block) of what it hears; each change must be one."""

    def __init__(self, bench):
        self.held = set()
        self.cleared_times = 0
        bench.state.residency.listener = self

    def changed(self, node, begin, end, level, readable):
        assert begin < end
        for each in range(begin, end):
            block = (level, _prefix(node, each))
            assert (block in self.held) != readable, f"{block} was told twice"
            self.held ^= {block}

    def cleared(self):
        self.held.clear()
        self.cleared_times += 1


def _prefix(node, at):
    symbols = node.run[: (at + 1) * WIDTH]
    while node.parent is not None and node.parent.parent is not None:
        node = node.parent
        symbols = node.run[: node.n * WIDTH] + symbols
    return symbols


def readable(bench):
    found = set()
    for node in bench.state.residency.index.walk_nodes():
        for at in range(node.n) if node.parent is not None else ():
            for level, table in enumerate(bench.tables):
                slot = int(node.slots[at, level])
                if slot >= 0 and table.state[slot] == SlotState.RESIDENT:
                    found.add((level, _prefix(node, at)))
    return found


@pytest.mark.parametrize("trouble", [True, False], ids=["trouble", "calm"])
@pytest.mark.parametrize("kind", LEVELS)
def test_a_replay_is_what_is_there(kind, trouble):
    for seed in range(2):
        chance = random.Random(f"{kind}-{seed}")
        walker = Steps(chance, kind)
        replay = Replay(walker.bench)
        most = 0
        for _ in range(120):
            walker.step(chance, trouble)
            assert replay.held == readable(walker.bench)
            most = max(most, len(replay.held))
        assert most > 3
        walker.bench.finish()
        assert replay.held == readable(walker.bench)


def test_what_a_restart_found_is_told():
    bench = Bench(dram(4), nvme(8))
    replay = Replay(bench)
    bench.planner.restore(recovered_of({"a": 1.0, "ab": 1.0, "ac": 2.0}))
    assert replay.held == readable(bench) == {(1, symbols_of(each)) for each in ("a", "ab", "ac")}


def test_a_new_epoch_clears():
    bench = Bench(dram(4))
    replay = Replay(bench)
    bench.stored("ab")
    assert len(replay.held) == 2
    bench.new_epoch(b"epoch-1")
    assert (replay.held, replay.cleared_times) == (set(), 1)


def test_a_block_found_wrong_is_told_gone_and_back_once_it_is_supplied_again():
    bench = Bench.holding({"a": 1.0}, dram(4), nvme(8))
    replay = Replay(bench)
    replay.held = readable(bench)
    bench.corrupt(next(iter(bench.claims)))
    load = bench.load("a")
    bench.deliver_all()
    assert load.done and replay.held == readable(bench) == set()
    bench.stored("a")
    assert (0, symbols_of("a")) in replay.held and replay.held == readable(bench)
