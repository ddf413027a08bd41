"""Array code against the same rules written as plain recursion."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from catalog_rig import Rig, slots
from hypothesis import given, settings
from hypothesis import strategies as st

from tiercache.catalog_recover import BUSY, CLAIMED, CLAIMING, EMPTY, LOST, OK, WAIT, WRITTEN, judge, trace
from tiercache.catalog_rows import ROW, RowTable
from tiercache.catalog_symbols import SymbolBook
from tiercache.types import ROOT

ROOT_IDENT = 99


@st.composite
def tables(draw: st.DrawFn) -> RowTable:
    """Parents anywhere, also in circles and outside; idents and expected ones from a small range, so that they meet."""
    n = draw(st.integers(1, 14))
    rows = np.zeros(n, dtype=ROW)
    for row in rows:
        row["parent_slot"] = draw(st.integers(-2, n))
        row["ident"] = draw(st.integers(1, n + 2))
        row["parent_ident"] = draw(st.one_of(st.just(ROOT_IDENT), st.integers(1, n + 2)))
    chained = draw(st.booleans())
    for row in rows if chained else []:
        parent = int(row["parent_slot"])
        if 0 <= parent < n:
            row["parent_ident"] = rows["ident"][parent]
    return rows


def reaches_root(rows: RowTable, claimed: np.ndarray, slot: int) -> int:
    """Depth, or 0."""
    depth, seen = 0, set()
    while claimed[slot] and slot not in seen:
        seen.add(slot)
        depth += 1
        parent, expected = int(rows["parent_slot"][slot]), int(rows["parent_ident"][slot])
        if parent == ROOT:
            return depth if expected == ROOT_IDENT else 0
        if not 0 <= parent < len(rows) or int(rows["ident"][parent]) != expected:
            return 0
        slot = parent
    return 0


@settings(max_examples=150, deadline=None)
@given(rows=tables(), data=st.data())
def test_trace(rows: RowTable, data: st.DataObject) -> None:
    n = len(rows)
    claimed = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    tree = trace(rows, claimed, ROOT_IDENT)
    depths = {slot: reaches_root(rows, claimed, slot) for slot in range(n)}
    reached = {slot for slot, depth in depths.items() if depth}
    idents = [int(rows["ident"][slot]) for slot in reached]
    found = tree.slots.tolist()
    if len(set(idents)) == len(idents):
        assert set(found) == reached
    assert set(found) <= reached
    assert len({int(rows["ident"][slot]) for slot in found}) == len(found)
    assert tree.depths.tolist() == [depths[slot] for slot in found]
    for i, parent in enumerate(tree.parents.tolist()):
        assert parent < i
        assert (found[parent] if parent != ROOT else ROOT) == rows["parent_slot"][found[i]]


@pytest.mark.parametrize(
    ("what", "slot", "field", "value", "left"),
    [
        ("as it was", 0, "uses", 1, [0, 1, 2]),
        ("the parent is another block by now", 2, "parent_ident", 77, [0, 1]),
        ("the parent lies outside", 2, "parent_slot", 3, [0, 1]),
        ("the first block is of another namespace or epoch", 0, "parent_ident", 98, []),
        ("a circle", 0, "parent_slot", 2, []),
    ],
)
def test_trace_keeps_what_hangs_on_a_root(what: str, slot: int, field: str, value: int, left: list[int]) -> None:
    rows = np.zeros(3, dtype=ROW)
    rows["ident"] = [5, 6, 7]
    rows["parent_slot"] = [ROOT, 0, 1]
    rows["parent_ident"] = [ROOT_IDENT, 5, 6]
    rows[field][slot] = value
    assert trace(rows, np.ones(3, dtype=np.bool_), ROOT_IDENT).slots.tolist() == left, what


def test_trace_keeps_nothing_under_what_is_not_claimed() -> None:
    rows = np.zeros(3, dtype=ROW)
    rows["ident"] = [5, 6, 7]
    rows["parent_slot"] = [ROOT, 0, 1]
    rows["parent_ident"] = [ROOT_IDENT, 5, 6]
    assert trace(rows, np.array([True, False, True]), ROOT_IDENT).slots.tolist() == [0]


def test_trace_drops_duplicates_but_not_all_of_them() -> None:
    rows = np.zeros(4, dtype=ROW)
    rows["ident"] = [5, 5, 6, 7]
    rows["parent_slot"] = [ROOT, ROOT, 0, 1]
    rows["parent_ident"] = [ROOT_IDENT, ROOT_IDENT, 5, 5]
    assert trace(rows, np.ones(4, dtype=np.bool_), ROOT_IDENT).slots.tolist() == [0, 2]


def verdict_of(rows: RowTable, state: np.ndarray, slot: int, asked: set[int], seen: frozenset[int]) -> int:
    if slot in seen:
        return LOST
    parent, expected = int(rows["parent_slot"][slot]), int(rows["parent_ident"][slot])
    if parent == ROOT:
        return OK if expected == ROOT_IDENT else LOST
    if not 0 <= parent < len(rows) or state[parent] == EMPTY:
        return LOST
    if state[parent] == BUSY:
        return WAIT
    if int(rows["ident"][parent]) != expected:
        return LOST
    if state[parent] in (CLAIMING, CLAIMED):
        return OK
    if parent not in asked:
        return WAIT
    return verdict_of(rows, state, parent, asked, seen | {slot})


@settings(max_examples=150, deadline=None)
@given(rows=tables(), data=st.data())
def test_judge(rows: RowTable, data: st.DataObject) -> None:
    n = len(rows)
    states = st.sampled_from([EMPTY, BUSY, WRITTEN, WRITTEN, WRITTEN, CLAIMING, CLAIMED])
    state = np.array(data.draw(st.lists(states, min_size=n, max_size=n)), dtype=np.uint8)
    written = np.flatnonzero(state == WRITTEN).astype(np.int32)
    asked = np.array(data.draw(st.permutations(written.tolist())), dtype=np.int32)
    asked = asked[: data.draw(st.integers(0, len(asked)))]
    expected = [verdict_of(rows, state, slot, set(asked.tolist()), frozenset()) for slot in asked.tolist()]
    assert judge(asked, rows, state, ROOT_IDENT).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_symbol_book(data: st.DataObject) -> None:
    """Every live slot's record exists with its symbol; every record that no slot needs is deleted, once."""
    width, capacity = 2000, 12
    book = SymbolBook(capacity, width)
    disk: dict[int, bytes] = {}
    live: dict[int, tuple[int, int, int]] = {}
    tag = 0
    for _ in range(data.draw(st.integers(1, 12))):
        free = [slot for slot in range(capacity) if slot not in live]
        if free and data.draw(st.booleans()):
            chosen = data.draw(st.lists(st.sampled_from(free), min_size=1, max_size=5, unique=True))
            symbols = np.zeros((len(chosen), width), dtype=np.uint8)
            symbols[:, 0] = np.arange(tag, tag + len(chosen))
            records, offsets = book.add(slots(*chosen), symbols)
            for i, slot in enumerate(chosen):
                live[slot] = (int(records[i]), int(offsets[i]), (tag + i) % 256)
            tag += len(chosen)
        elif live:
            chosen = data.draw(st.lists(st.sampled_from(sorted(live)), min_size=1, max_size=5, unique=True))
            book.drop(slots(*chosen))
            for slot in chosen:
                del live[slot]
        puts, deletes = book.take()
        if data.draw(st.booleans()):
            book.give_back(puts, deletes)
            continue
        for record in deletes:
            disk.pop(record, None)
        assert not disk.keys() & puts.keys()
        disk.update(puts)
    puts, deletes = book.take()
    disk = {record: value for record, value in {**disk, **puts}.items() if record not in deletes}
    assert disk.keys() == {record for record, _, _ in live.values()}
    for record, offset, first in live.values():
        assert disk[record][8 + offset * width] == first


def test_threads_write_and_forget_while_one_commits(tmp_path: Path) -> None:
    """Each thread owns 16 slots; at any crash the catalog is a tree whose payload is right or was being replaced."""
    rig = Rig(tmp_path / "kv", 64)
    stop = threading.Event()
    failures: list[str] = []
    seen = 0

    def work(part: int) -> None:
        rng = np.random.default_rng(part)
        mine = np.arange(part * 16, part * 16 + 16)
        step = 0
        while not stop.is_set():
            step += 1
            chain = rng.permutation(mine)[:5]
            rig.catalog.forget(slots(*mine.tolist()))
            idents = rig.write(chain.tolist(), tag=part * 100_000 + step)
            known, _ = rig.catalog.expected(slots(*chain.tolist()))
            if not np.array_equal(known, idents):
                failures.append(f"{part}: {known} {idents}")
            if step % 3 == 0:  # otherwise it is replaced before a commit can claim it
                stop.wait(0.05)

    threads = [threading.Thread(target=work, args=(part,), daemon=True) for part in range(4)]
    for thread in threads:
        thread.start()
    try:
        for i in range(200):
            if i >= 12 and seen:  # on a busy machine it may take a while until a commit catches something whole
                break
            assert rig.commit() == []
            if i % 4 == 3:
                copied = Rig(rig.crash_copy(tmp_path / f"copy{i}"), 64)
                seen += len(copied.recovered())
                assert copied.catalog.recovered.forgotten == 0
                copied.readable()
                copied.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert failures == [] and seen > 0
    rig.commit()
    assert rig.catalog.claimed_slots == 20 and rig.catalog.pending_slots == 0
    rig.close()
    again = Rig(rig.path, 64)
    assert len(again.recovered()) == 20 and again.readable().all()
    again.close()
