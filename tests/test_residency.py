"""Residency: slots of blocks, counts up the path, what becomes stale, stretches of slots."""

import numpy as np
import pytest

from tiercache.index import ABSENT, Path
from tiercache.residency import Residency
from tiercache.slots import NO_OWNER, SlotState
from tiercache.types import LevelSpec

WIDTH = 8


def make(*capacities):
    return Residency([LevelSpec(f"level{i}", n, 4096) for i, n in enumerate(capacities)], WIDTH)


def symbols(prompt):
    return b"".join(ord(letter).to_bytes(8, "little") for letter in prompt)


def add(residency, prompt, level=0):
    """Store the blocks of a prompt that are not there, with slots in one level. Returns the slots."""
    walk = residency.index.walk(symbols(prompt), len(prompt))
    fresh = len(prompt) - walk.blocks
    path = walk.path.copy()
    idents = np.arange(fresh, dtype=np.uint64)
    node, at = residency.extend(path, symbols(prompt[walk.blocks :]), idents, False)
    slots = residency.tables[level].take(fresh)
    residency.place(node, at, level, slots)
    residency.tables[level].state[slots] = SlotState.RESIDENT
    return slots


def node_of(residency, prompt):
    node, take = residency.index.walk(symbols(prompt), len(prompt)).path.end
    return node, take - 1


def counts(residency):
    """(first block, held, kids) of every node."""
    return sorted((node.depth, node.n, node.held, node.kids) for node in residency.index.walk_nodes())


def test_kids_count_children_in_whose_subtree_a_level_holds_something():
    residency = make(16, 16)
    add(residency, "abcd")
    add(residency, "abxy", level=1)
    assert counts(residency) == [(0, 2, [2, 0], [1, 1]), (2, 2, [0, 2], [0, 0]), (2, 2, [2, 0], [0, 0])]
    assert residency.index.root.kids == [1, 1]
    node, _ = node_of(residency, "abxy")
    residency.tables[1].give(residency.unplace(node, 0, 2, 1))
    residency.trim(node)
    assert counts(residency) == [(0, 2, [2, 0], [1, 0]), (2, 2, [2, 0], [0, 0])]
    assert residency.index.root.kids == [1, 0]
    node, _ = node_of(residency, "abcd")
    residency.tables[0].give(residency.unplace(node, 0, 2, 0))
    residency.trim(node)
    assert counts(residency) == [(0, 2, [2, 0], [0, 0])]


def test_place_and_unplace_keep_owner_and_position():
    residency = make(8, 8)
    slots = add(residency, "abcd")
    node, _ = node_of(residency, "abcd")
    table = residency.tables[0]
    assert table.owner[slots].tolist() == [node.id] * 4 and table.pos[slots].tolist() == [0, 1, 2, 3]
    gone = residency.unplace(node, 1, 3, 0)
    assert gone.tolist() == slots[1:3].tolist() and (table.owner[gone] == NO_OWNER).all()
    assert node.slots[:, 0].tolist() == [slots[0], ABSENT, ABSENT, slots[3]] and node.held[0] == 2
    assert residency.unplace(node, 1, 3, 0).tolist() == []
    with pytest.raises(AssertionError):
        residency.place(node, 0, 0, gone)
    table.give(gone)


def test_a_node_goes_with_its_last_block_and_its_ancestors_with_it():
    residency = make(8)
    add(residency, "ab")
    add(residency, "abcd")
    add(residency, "abxy")
    assert len(residency.index.nodes) == 3
    for prompt in ("abcd", "abxy"):
        node, _ = node_of(residency, prompt)
        residency.tables[0].give(residency.unplace(node, 0, 2, 0))
        residency.trim(node)
    (head,) = residency.index.nodes.values()
    assert head.n == 2
    residency.tables[0].give(residency.unplace(head, 0, 2, 0))
    residency.trim(head)
    assert not residency.index.nodes and residency.index.blocks == 0


def test_what_changes_becomes_stale():
    residency = make(8, 8)
    slots = add(residency, "abcd")
    node, _ = node_of(residency, "abcd")
    assert node in residency.stale
    residency.stale.clear()
    residency.pin(0, slots[:1])
    assert list(residency.stale) == [node]
    residency.stale.clear()
    residency.unpin(0, slots[:1])
    assert list(residency.stale) == [node]
    residency.stale.clear()
    add(residency, "abx")
    assert {each.depth for each in residency.stale} >= {0, 2} and len(residency.stale) >= 3
    residency.stale.clear()
    residency.pin(0, np.empty(0, dtype=np.int32))
    assert not residency.stale


def test_slots_are_grouped_into_stretches_of_one_run():
    residency = make(16)
    first = add(residency, "abcd")
    second = add(residency, "abxy")
    head, tail, other = node_of(residency, "ab")[0], node_of(residency, "abcd")[0], node_of(residency, "abxy")[0]
    assert residency.runs_of(0, first) == [(head, 0, 2), (tail, 0, 2)]
    order = np.array([second[1], second[0], first[2], first[3], first[0]], dtype=np.int32)
    assert residency.runs_of(0, order) == [(other, 1, 2), (other, 0, 1), (tail, 0, 2), (head, 0, 1)]
    assert residency.runs_of(0, np.array([15], dtype=np.int32)) == []
    assert residency.runs_of(0, np.empty(0, dtype=np.int32)) == []


def test_states_best_level_and_copies_below():
    residency = make(8, 8, 8)
    slots = add(residency, "abcd")
    node, _ = node_of(residency, "abcd")
    lower = residency.tables[2].take(2)
    residency.place(node, 1, 2, lower)
    residency.tables[2].state[lower[0]] = SlotState.RESIDENT
    residency.tables[0].state[slots[0]] = SlotState.BAD
    states = residency.states(residency.index.gather(Path([node], 4)))
    assert states.tolist() == [[3, 2, 2, 2], [0, 0, 0, 0], [0, 2, 1, 0]]
    assert residency.best_level(states, [True, True, True]).tolist() == [-1, 0, 0, 0]
    assert residency.best_level(states, [False, True, True]).tolist() == [-1, 2, -1, -1]
    assert residency.copy_below(node, 0, 4, 0).tolist() == [False, True, False, False]
    assert residency.copy_below(node, 0, 4, 2).tolist() == [False] * 4


def test_paths_and_subtrees():
    residency = make(16)
    for prompt in ("abcd", "abxy", "abxyz", "abxyq"):
        add(residency, prompt)
    deep, at = node_of(residency, "abxyq")
    path = residency.path_to(deep, at + 1)
    assert [(node.depth, take) for node, take in path] == [(0, 2), (2, 2), (4, 1)]
    head = path.nodes[0]
    tree = residency.subtree(head)
    assert tree[0] is head and len(tree) == len(residency.index.nodes) == 5
    assert all(tree.index(node.parent) < tree.index(node) for node in tree[1:])


def test_a_forgotten_tree_is_empty():
    residency = make(8)
    add(residency, "ab")
    residency.tables[0].clear()
    residency.forget_tree()
    assert residency.index.blocks == 0 and not residency.stale and residency.tables[0].free == 8
    assert residency.index.walk(symbols("ab"), 2).blocks == 0
