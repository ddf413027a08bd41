"""`check()` sees each rule that is broken, and nothing where all is well."""

import numpy as np
import pytest
from planner_kit import Bench, dram, nvme

from tiercache.planner.demotion import RecentMax
from tiercache.slots import NO_OWNER, SlotState


def busy_bench():
    """Something of everything: two runs and a split, blocks on both levels, a write in flight, a delayed one, a pin."""
    bench = Bench(dram(12), nvme(24), write_after_s=2.0)
    bench.stored("abcd")
    bench.deliver_all()
    bench.stored("abxy")
    bench.stored("pq")
    bench.load("abcd", out=True)
    bench.pin("ab")
    bench.check()
    return bench


def node_of(bench, prompt):
    node, take = bench.state.residency.index.walk(*bench.encode(prompt)).path.end
    return node, take - 1


def slot_of(bench, prompt, level=0):
    return bench.where()[prompt][level][0]


FAULTS = {
    "free slots miscounted": lambda b: setattr(b.tables[0], "free", b.tables[0].free - 1),
    "lost slots miscounted": lambda b: setattr(b.tables[1], "lost", 1),
    "free twice": lambda b: b.tables[0]._stack.__setitem__(0, b.tables[0]._stack[1]),
    "free and in use": lambda b: b.tables[0]._stack.__setitem__(0, slot_of(b, "a")),
    "owned and detached": lambda b: b.tables[0].state.__setitem__(slot_of(b, "a"), SlotState.DETACHED),
    "resident and not owned": lambda b: b.tables[0].owner.__setitem__(slot_of(b, "a"), NO_OWNER),
    "wrong position": lambda b: b.tables[0].pos.__setitem__(slot_of(b, "abcd"), 0),
    "wrong owner": lambda b: b.tables[0].owner.__setitem__(slot_of(b, "abcd"), node_of(b, "a")[0].id),
    "a pin too many": lambda b: b.tables[0].pins.__setitem__(slot_of(b, "abcd"), 7),
    "a pin too few": lambda b: b.tables[0].pins.__setitem__(slot_of(b, "a"), 0),
    "nothing writes it": lambda b: b.tables[0].state.__setitem__(b.tables[0].take(1), SlotState.WRITING),
    "not a child": lambda b: b.state.residency.index.root.children.pop(b.encode("a")[0]),
    "wrong depth": lambda b: setattr(node_of(b, "abcd")[0], "depth", 1),
    "under a partial": lambda b: setattr(node_of(b, "ab")[0], "partial", True),
    "an array too short": lambda b: setattr(node_of(b, "abcd")[0], "idents", np.zeros(1, dtype=np.uint64)),
    "held miscounted": lambda b: node_of(b, "abcd")[0].held.__setitem__(0, 1),
    "kids miscounted": lambda b: node_of(b, "ab")[0].kids.__setitem__(1, 0),
    "blocks miscounted": lambda b: setattr(b.state.residency.index, "blocks", 3),
    "a block on no level": lambda b: node_of(b, "pq")[0].slots.__setitem__((0, slice(None)), -1),
    "NVMe without its parent": lambda b: node_of(b, "ab")[0].slots.__setitem__((0, 1), -1),
    "credits": lambda b: setattr(b.state.credits[1], "jobs", 5),
    "blocks in flight": lambda b: setattr(b.state.credits[0], "outbound", 0),
    "held blocks": lambda b: setattr(b.state.credits[0], "held", 0),
    "delayed blocks": lambda b: setattr(b.state.credits[0], "delayed", 0),
    "a delayed job forgotten": lambda b: b.state.delayed[0].clear(),
    "wrong filler": lambda b: b.state.filler.__setitem__(0, 99),
    "not in the order": lambda b: b.planner.victims._lists[1][True].clear(),
    "filed wrongly": lambda b: node_of(b, "abcd")[0].filed.__setitem__(1, None),
    "in the order and gone": lambda b: b.planner.victims._lists[0][False].add((0.0, 0, 77)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_check_sees(fault):
    bench = busy_bench()
    FAULTS[fault](bench)
    assert bench.planner.check() != []


def test_check_sees_children_out_of_order():
    bench = Bench(dram(64))
    for i in range(20):
        bench.stored("a" + chr(ord("b") + i))
    bench.check()
    node_of(bench, "a")[0].order.pop()
    assert bench.planner.check() != []


def test_the_largest_of_late():
    recent = RecentMax(5)
    values = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3]
    assert recent.largest(0) == 0
    for step, value in enumerate(values):
        recent.note(step, value)
        assert recent.largest(step) == max(values[max(0, step - 4) : step + 1])
    assert recent.largest(len(values) + 1) == 6
    assert recent.largest(len(values) + 3) == 3
    assert recent.largest(len(values) + 10) == 0


def test_explain_tells_where_a_prompt_lies():
    bench = busy_bench()
    symbols, n = bench.encode("abcdz")
    bench.lookup("abcdz")
    stretches = bench.planner.explain(symbols, n, bench.now)
    assert [(each.begin, each.end) for each in stretches] == [(0, 2), (2, 4)]
    assert stretches[0].tiers == stretches[1].tiers == ("dram", "nvme")
    assert (stretches[0].branches, stretches[1].exits) == (1, 1)
    (fresh,) = bench.planner.explain(*bench.encode("pq"), bench.now)
    assert (fresh.tiers, fresh.in_flight, fresh.uses) == (("dram",), ("nvme",), 1)
    assert bench.planner.words_shared(symbols, n, b"") == 8
    bench.finish()
