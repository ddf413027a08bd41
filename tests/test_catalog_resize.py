"""More or fewer slots than last time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from catalog_rig import BLOCK, Rig, manifest

from tiercache.catalog import Catalog
from tiercache.catalog_recover import oldest, trace
from tiercache.catalog_rows import ROW, RowStore
from tiercache.directory import StoreDirectory
from tiercache.errors import ConfigError
from tiercache.tiers.base import slot_stride
from tiercache.tiers.fileio import OsFiles
from tiercache.tiers.nvme import extents_for
from tiercache.types import ROOT

STRIDE = slot_stride(BLOCK)


def sizes(path: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size // STRIDE for file in path.glob("slots-*.dat")}


def filled(path: Path, capacity: int = 16) -> Rig:
    """A trunk of 4 (old), two branches of 4 from it (newer), and a chain of 3 (newest), slots all over."""
    rig = Rig(path, capacity)
    rig.write([15, 0, 14, 1], tag=1)
    rig.write([13, 2, 12, 3], parent=1, tag=2)
    rig.write([11, 4, 10, 5], parent=0, tag=3)
    rig.write([9, 6, 8], tag=4)
    assert rig.commit() == []
    return rig


def test_extents() -> None:
    assert extents_for(5) == (5,)
    assert extents_for(9, (5,)) == (5, 4)
    assert extents_for(5, (5, 4)) == (5,)
    assert extents_for(7, (5, 4)) == (5, 2)
    assert extents_for(3, (5, 4)) == (3,)


def test_growth_appends_a_file_and_keeps_everything(tmp_path: Path) -> None:
    rig = filled(tmp_path / "kv")
    rig.close()
    rig = Rig(tmp_path / "kv", 20)
    before = rig.recovered()
    assert len(before) == 15 and rig.readable().all()
    assert sizes(rig.path) == {"slots-00.dat": 16, "slots-01.dat": 4}
    assert rig.catalog.manifest.extents == (16, 4) and rig.catalog.dirty
    rig.write([7, 16, 17], parent=8, tag=9)
    assert rig.commit() == []
    unclean = Rig(rig.crash_copy(tmp_path / "copy"), 20)
    assert len(unclean.recovered()) == 18 and unclean.readable().all()
    unclean.close()
    rig.close()
    third = Rig(rig.path, 30)
    assert len(third.recovered()) == 18 and third.readable().all()
    assert sizes(rig.path) == {"slots-00.dat": 16, "slots-01.dat": 4, "slots-02.dat": 10}
    third.close()


@pytest.mark.parametrize("capacity", [15, 12, 7, 4, 1])
def test_shrinking_keeps_the_most_recent_and_its_ancestors(tmp_path: Path, capacity: int) -> None:
    rig = filled(tmp_path / "kv")
    rig.close()
    before = Rig(rig.path, 16)
    order = dict(zip(before.catalog.recovered.idents.tolist(), before.catalog.recovered.last_use.tolist(), strict=True))
    before.close()
    rig = Rig(rig.path, capacity)
    found = rig.recovered()
    assert len(found) == min(15, capacity)
    assert rig.readable().all()
    assert rig.catalog.recovered.forgotten == 15 - len(found)
    assert sizes(rig.path) == {"slots-00.dat": capacity}
    newest = sorted(order[ident] for ident in found.values())
    assert newest.count(1004.0) == min(3, capacity)
    assert rig.catalog.manifest.capacity == capacity
    rig.close()
    again = Rig(rig.path, capacity)
    assert again.recovered() == found and again.readable().all()
    again.catalog.forget(again.catalog.recovered.slots[-1:])
    again.write([int(again.catalog.recovered.slots[-1])], tag=50)
    assert again.commit() == []
    again.close()


def test_shrinking_removes_files(tmp_path: Path) -> None:
    filled(tmp_path / "kv", 16).close()
    Rig(tmp_path / "kv", 24).close()
    assert set(sizes(tmp_path / "kv")) == {"slots-00.dat", "slots-01.dat"}
    rig = Rig(tmp_path / "kv", 12)
    assert sizes(tmp_path / "kv") == {"slots-00.dat": 12}
    assert rig.readable().all() and len(rig.recovered()) == 12
    rig.close()


class DiesError(Exception):
    pass


@pytest.mark.parametrize("step", range(16))
def test_a_crash_while_shrinking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Die at the n-th write, sync or transaction; then start again with the small or with the old size."""
    filled(tmp_path / "kv").close()
    left = [step]

    def count() -> None:
        left[0] -= 1
        if left[0] < 0:
            raise DiesError

    class DyingFiles(OsFiles):
        def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            count()
            return super().pwritev(fd, buffers, offset)

        def fdatasync(self, fd: int) -> None:
            count()
            super().fdatasync(fd)

        def ftruncate(self, fd: int, nbytes: int) -> None:
            count()
            super().ftruncate(fd, nbytes)

    apply = RowStore.apply

    def dying_apply(store: RowStore, change: object) -> None:
        count()
        apply(store, change)  # type: ignore[arg-type]

    died = False
    with monkeypatch.context() as patch:
        patch.setattr(RowStore, "apply", dying_apply)
        try:
            Rig(tmp_path / "kv", 9, ops=DyingFiles()).close(clean=False)
        except DiesError:
            died = True
    assert died if step < 8 else not died or step < 15
    rig = Rig(Path(shutil.copytree(tmp_path / "kv", tmp_path / "again")), 9 if step % 2 else 16)
    found = rig.recovered()
    assert rig.readable().all()
    assert len(found) >= 9
    assert rig.catalog.recovered.reason == ""
    rig.close()


def test_what_cannot_be_read_while_moving_is_forgotten_with_its_children(tmp_path: Path) -> None:
    filled(tmp_path / "kv").close()

    class BadBlock(OsFiles):
        def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
            nbytes = sum(buffer.nbytes for buffer in buffers)
            if offset <= 15 * STRIDE < offset + nbytes:
                raise OSError(5, "Input/output error")
            return super().preadv(fd, buffers, offset)

    rig = Rig(tmp_path / "kv", 15, ops=BadBlock())
    assert set(rig.recovered()) == {9, 6, 8}, "slot 15 is the root of all others"
    assert rig.readable().all()
    rig.close()


def test_no_space_to_grow_is_a_config_error_and_the_old_size_still_opens(tmp_path: Path) -> None:
    filled(tmp_path / "kv").close()

    class Full(OsFiles):
        def free_nbytes(self, path: str) -> int:
            return 5 * STRIDE

    with pytest.raises(ConfigError) as caught:
        Rig(tmp_path / "kv", 22, ops=Full())
    assert str(6 * STRIDE) in str(caught.value) and str(5 * STRIDE) in str(caught.value)
    rig = Rig(tmp_path / "kv", 16, ops=Full())
    assert len(rig.recovered()) == 15 and rig.readable().all()
    rig.close()


def test_capacity_must_be_positive(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "kv") as directory, pytest.raises(ValueError, match="at least 1"):
        Catalog.open(directory, manifest(), 0, root_ident=1)


@pytest.mark.parametrize("seed", range(5))
def test_oldest_never_takes_a_block_before_its_children(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 60
    rows = np.zeros(n, dtype=ROW)
    rows["ident"] = np.arange(1, n + 1)
    for i in range(n):
        parent = int(rng.integers(-1, i)) if i else ROOT
        rows["parent_slot"][i] = parent
        rows["parent_ident"][i] = 99 if parent == ROOT else parent + 1
    tree = trace(rows, np.ones(n, dtype=np.bool_), 99)
    assert len(tree.slots) == n
    times = rng.random(n)
    previous = np.zeros(n, dtype=np.bool_)
    for count in range(n + 1):
        marks = oldest(tree, times, count)
        assert marks.sum() == count and (marks | ~previous).all()
        inner = np.flatnonzero(tree.parents != ROOT)
        assert not (marks[tree.parents[inner]] & ~marks[inner]).any()
        previous = marks
