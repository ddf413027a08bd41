"""PrefixIndex against a dict of prefixes, by brute force."""

import random
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercache.index import _APPEND_LIMIT, _SCAN_LIMIT, PrefixIndex
from tiercache.keys import chain_idents
from tiercache.slots import SlotTable

WIDTHS = [8, 36, 64]
QUICK = settings(max_examples=120, deadline=None)


class Model:
    """An index, and the same as a dict: prefix (tuple of symbols) -> (ident, slots per level)."""

    def __init__(self, width, levels=2, capacity=6000):
        self.width = width
        self.tables = [SlotTable(capacity) for _ in range(levels)]
        self.index = PrefixIndex(width, self.tables)
        self.blocks = {}

    def symbol(self, letter):
        """Symbols share words with others: all but the word that says which letter of its hundred it is."""
        word = letter % (self.width // 4)
        words = [1000] * word + [letter] + [7] * (self.width // 4 - word - 1)
        return struct.pack(f"<{len(words)}i", *words)

    def encode(self, prompt):
        return b"".join(self.symbol(letter) for letter in prompt)

    def words(self, prompt, tail=()):
        """All int32 words of a prompt and its tail."""
        data = self.encode(prompt) + struct.pack(f"<{len(tail)}i", *tail)
        return struct.unpack(f"<{len(data) // 4}i", data)

    def add(self, prompt, partial=False, chance=None):
        """Store what is missing, every new block with a slot in one level or both."""
        symbols = self.encode(prompt)
        walk = self.index.walk(symbols, len(prompt))
        if walk.blocks == len(prompt):
            return
        path = walk.path.copy()
        fresh = symbols[walk.blocks * self.width :]
        above = int(path.idents()[-1]) if path else 5
        idents = chain_idents(fresh, self.width, above)
        node, at = self.index.extend(path, fresh, idents, partial)
        if path:
            last, take = path.end
            assert take == last.n or last is node, "the path is corrected where its last node was split"
        for i in range(len(idents)):
            levels = range(len(self.tables))
            if chance is not None and chance.random() < 0.5:
                levels = [chance.choice(levels)]
            slots = [-1] * len(self.tables)
            for level in levels:
                (slot,) = self.tables[level].take(1).tolist()
                node.slots[at + i, level] = slot
                self.tables[level].owner[slot], self.tables[level].pos[slot] = node.id, at + i
                self._count(node, level, 1)
                slots[level] = slot
            node.last_use[at + i], node.uses[at + i] = len(self.blocks), at + i
            prefix = tuple(prompt[: walk.blocks + i + 1])
            self.blocks[prefix] = (int(idents[i]), tuple(slots), float(len(self.blocks)), at + i)

    def remove_leaf(self, prefix):
        """Take the slots of a block without descendants away, and trim."""
        walk = self.index.walk(self.encode(prefix), len(prefix))
        node, take = walk.path.end
        assert take == node.n and not node.children
        for level, table in enumerate(self.tables):
            slot = int(node.slots[take - 1, level])
            if slot >= 0:
                node.slots[take - 1, level] = -1
                table.give(np.array([slot], dtype=np.int32))
                self._count(node, level, -1)
        del self.blocks[prefix]
        for node in reversed(walk.path.nodes):
            if not self.index.trim(node):
                break

    def _count(self, node, level, change):
        """held and kids, from scratch: they are Residency's to keep."""
        node.held[level] += change
        while node.parent is not None:
            node = node.parent
            node.kids[level] = sum(child.held[level] > 0 or child.kids[level] > 0 for child in node.children.values())

    def leaves(self):
        return [
            prefix
            for prefix in self.blocks
            if not any(len(other) == len(prefix) + 1 and other[:-1] == prefix for other in self.blocks)
        ]

    def check(self):
        """Arrays, owner and pos, ids, counts and order agree with the dict."""
        index, seen = self.index, {}
        stack = [(child, ()) for child in index.root.children.values()]
        assert index.blocks == len(self.blocks)
        count = 0
        while stack:
            node, prefix = stack.pop()
            count += 1
            assert index.nodes[node.id] is node and node.n > 0 and node.depth == len(prefix)
            first = node.run[: self.width]
            assert node.parent.children[first] is node
            if node.parent.order is not None:
                assert list(node.parent.order) == sorted(node.parent.children)
            for i in range(node.n):
                symbol = node.run[i * self.width : (i + 1) * self.width]
                prefix = (*prefix, self.letter(symbol))
                slots = tuple(node.slots[i].tolist())
                seen[prefix] = (int(node.idents[i]), slots, float(node.last_use[i]), int(node.uses[i]))
                for level, slot in enumerate(slots):
                    if slot >= 0:
                        assert self.tables[level].owner[slot] == node.id and self.tables[level].pos[slot] == i
            for level in range(len(self.tables)):
                assert node.held[level] == sum(int(slot) >= 0 for slot in node.slots[:, level])
                assert node.kids[level] == sum(bool(c.held[level] or c.kids[level]) for c in node.children.values())
            stack += [(child, prefix) for child in node.children.values()]
        assert count == len(index.nodes) == len(list(index.walk_nodes()))
        assert seen == self.blocks

    def letter(self, symbol):
        words = struct.unpack(f"<{self.width // 4}i", symbol)
        return next(word for word in words if word != 1000)

    def check_walk(self, prompt, tail=()):
        symbols = self.encode(prompt)
        walk = self.index.walk(symbols, len(prompt), struct.pack(f"<{len(tail)}i", *tail))
        expected = next((i for i in range(len(prompt)) if tuple(prompt[: i + 1]) not in self.blocks), len(prompt))
        assert walk.blocks == expected == sum(take for _, take in walk.path)
        assert all(take == node.n for node, take in list(walk.path)[:-1])
        mine = self.words(prompt, tail)
        common = 0
        for other in self.blocks:
            theirs = self.words(other)
            size = min(len(mine), len(theirs))
            differ = next((i for i in range(size) if mine[i] != theirs[i]), size)
            common = max(common, differ)
        assert walk.words == common
        gathered = self.index.gather(walk.path)
        assert [tuple(column) for column in gathered.T.tolist()] == [
            self.blocks[tuple(prompt[: i + 1])][1] for i in range(expected)
        ]


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@pytest.mark.parametrize("width", WIDTHS)
@QUICK
@given(stored=st.lists(prompts, min_size=1, max_size=8), asked=st.lists(prompts, max_size=6), tail=st.integers(0, 3))
def test_walks_and_splits(width, stored, asked, tail):
    model = Model(width)
    for prompt in stored:
        model.add(prompt)
        model.check()
    for prompt in [*stored, *asked, []]:
        model.check_walk(prompt)
        next_words = model.words([*prompt, 1])[-width // 4 :]
        model.check_walk(prompt, next_words[: min(tail, width // 4 - 1)])


@pytest.mark.parametrize("width", WIDTHS)
@settings(QUICK, max_examples=60, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False))
def test_storing_and_removing(width, chance):
    model = Model(width)
    for _ in range(chance.randint(1, 25)):
        if model.blocks and chance.random() < 0.5:
            model.remove_leaf(chance.choice(model.leaves()))
        else:
            model.add([chance.randint(0, 2) for _ in range(chance.randint(1, 8))], chance=chance)
        model.check()
        model.check_walk([chance.randint(0, 2) for _ in range(chance.randint(0, 9))])
    while model.blocks:
        model.remove_leaf(chance.choice(model.leaves()))
        model.check()
    assert not model.index.nodes and not model.index.root.children


@pytest.mark.parametrize("width", WIDTHS)
def test_many_children_are_searched_in_order(width):
    chance, model = random.Random(width), Model(width)
    letters = chance.sample(range(100, 1000), 3 * _SCAN_LIMIT)
    for letter in letters[: 2 * _SCAN_LIMIT]:
        model.add([1, letter, 2])
        model.check()
    node = model.index.walk(model.encode([1]), 1).path.nodes[0]
    assert node.order is not None and len(node.children) == 2 * _SCAN_LIMIT
    for letter in letters:
        model.check_walk([1, letter, 2])
        model.check_walk([1], model.words([letter])[:1])
        model.check_walk([1], model.words([letter])[:-1])
    for letter in letters[: 2 * _SCAN_LIMIT]:
        model.remove_leaf((1, letter, 2))
        model.remove_leaf((1, letter))
        model.check()
        model.check_walk([1, letters[-1]])


def test_the_root_has_children_in_order_too():
    model = Model(8)
    for letter in range(100, 100 + 3 * _SCAN_LIMIT):
        model.add([letter])
    model.check()
    for letter in range(90, 160):
        model.check_walk([letter, 1])


def test_a_leaf_grows_in_place_up_to_a_limit():
    model = Model(8, levels=1)
    index = model.index
    symbols = model.encode([1] * (_APPEND_LIMIT + 10))

    def extend(begin, end):
        path = index.walk(symbols, begin).path.copy()
        run = symbols[begin * 8 : end * 8]
        return index.extend(path, run, np.arange(begin, end, dtype=np.uint64), False)

    first, _ = extend(0, 10)
    again, at = extend(10, _APPEND_LIMIT)
    assert again is first and at == 10 and first.n == _APPEND_LIMIT
    beyond, at = extend(_APPEND_LIMIT, _APPEND_LIMIT + 10)
    assert beyond is not first and at == 0 and beyond.parent is first
    assert index.blocks == _APPEND_LIMIT + 10
    assert index.walk(symbols, _APPEND_LIMIT + 10).blocks == _APPEND_LIMIT + 10


def test_nothing_grows_under_a_partial_tail():
    model = Model(8)
    model.add([1, 2, 9], partial=True)
    node = model.index.walk(model.encode([1]), 1).path.nodes[0]
    assert node.partial
    model.add([1, 2, 3])
    head = next(iter(model.index.root.children.values()))
    assert head.n == 2 and not head.partial
    assert sorted(child.partial for child in head.children.values()) == [False, True]
    model.remove_leaf((1, 2, 9))
    model.check()


def test_a_walk_does_not_go_beyond_what_was_asked():
    """The caller may hand over a longer prompt than it asks for."""
    model = Model(8)
    model.add([1, 2, 3, 4])
    symbols = model.encode([1, 2, 3, 4])
    for n in range(5):
        walk = model.index.walk(symbols, n)
        assert walk.blocks == n == sum(take for _, take in walk.path)


def test_trim_keeps_blocks_that_have_a_slot_in_any_level():
    model = Model(8)
    model.add([1, 2, 3, 4])
    (node,) = model.index.nodes.values()
    node.slots[2:, 0] = -1
    node.held[0] -= 2
    assert not model.index.trim(node) and node.n == 4
    node.slots[3, 1] = -1
    node.held[1] -= 1
    assert not model.index.trim(node) and node.n == 3
    assert len(node.run) >= 3 * 8 and model.index.walk(model.encode([1, 2, 3, 4]), 4).blocks == 3
    assert model.index.blocks == 3


def test_a_trimmed_run_is_copied_to_size_so_that_it_keeps_no_memory():
    model = Model(8, levels=1)
    model.add([1] * 64)
    (node,) = model.index.nodes.values()
    node.slots[4:, 0] = -1
    node.held[0] = 4
    model.index.trim(node)
    assert node.n == 4 and node.slots.shape == (4, 1) and len(node.run) == 32 and len(node.idents) == 4
    assert node.slots.base is None and node.idents.base is None


def test_a_split_copies_its_arrays_so_that_neither_half_keeps_the_other_alive():
    model = Model(8)
    model.add([1, 1, 1, 1])
    model.add([1, 1, 2])
    for node in model.index.nodes.values():
        for array in (node.slots, node.idents, node.last_use, node.uses):
            assert array.base is None and len(array) == node.n
    model.check()


def test_looking_changes_nothing():
    model = Model(36)
    model.add([1, 2, 3])
    before = repr(model.index.nodes), dict(model.blocks)
    for prompt in ([1], [1, 2, 3, 4], [2], []):
        model.check_walk(prompt)
    assert (repr(model.index.nodes), model.blocks) == before
    model.check()


def test_a_path_shortens_to_any_number_of_blocks():
    model = Model(36)
    for prompt in ([1, 2, 3, 4, 5, 6], [1, 2, 9], [1, 2, 3, 4, 8]):
        model.add(prompt)
    path = model.index.walk(model.encode([1, 2, 3, 4, 5, 6]), 6).path
    assert (len(path), path.blocks, path.takes(), path.starts().tolist()) == (3, 6, [2, 2, 2], [0, 2, 4, 6])
    for blocks in range(8):
        short = path.shorten(blocks)
        assert short.blocks == min(blocks, 6) and short.nodes == path.nodes[: len(short)]
        assert short.idents().tolist() == path.idents().tolist()[:blocks]
        assert short.uses().tolist() == path.uses().tolist()[:blocks]
        assert model.index.gather(short).tolist() == model.index.gather(path)[:, :blocks].tolist()
        assert all(take > 0 for _, take in short)


def test_what_was_gathered_may_be_changed_without_changing_the_tree():
    model = Model(36)
    model.add([1, 2, 3])
    path = model.index.walk(model.encode([1, 2]), 2).path
    before = model.index.gather(path).tolist()
    gathered = model.index.gather(path)
    gathered[:] = 77
    path.idents()[:] = 0
    assert model.index.gather(path).tolist() == before
    model.check()
