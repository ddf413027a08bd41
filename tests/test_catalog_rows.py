"""The catalog's records and LMDB's meta pages: what is not whole is seen before anybody believes it."""

from __future__ import annotations

import struct
import threading
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
import pytest
from catalog_rig import WIDTH, Rig, manifest, slots, symbols_of

import tiercache.catalog
from tiercache.catalog_copy import copy
from tiercache.catalog_rows import (
    RECORD_SLOTS,
    ROW,
    Change,
    DamagedCatalogError,
    Manifest,
    RowStore,
    check_record,
    pack_rows,
    pack_symbols,
    used_nbytes,
)
from tiercache.errors import FormatVersionError

PAGE = 4096


def test_a_record_is_whole_under_its_own_key_only() -> None:
    for name, value in (
        ("rows", pack_rows(7, np.ones(RECORD_SLOTS, dtype=ROW))),
        ("symbols", pack_symbols(7, symbols_of(1, 3), WIDTH)),
    ):
        assert check_record(name, 7, value)
        assert not check_record(name, 8, value)
        for size in (0, 7, 8, 12, 15, 16, len(value) - 8, len(value) - 1):
            assert not check_record(name, 7, value[:size])
        assert not check_record(name, 7, value + b"\0")
        assert not check_record("rows" if name == "symbols" else "symbols", 7, value)
        for at in range(0, len(value), 13):
            assert not check_record(name, 7, value[:at] + bytes([value[at] ^ 4]) + value[at + 1 :])


def test_a_manifest_is_read_back_or_refused() -> None:
    written = manifest(store_id="ab", capacity=5, extents=(2, 3))
    assert Manifest.from_json(written.to_json()) == written
    for nonsense in (
        *(replace(written, capacity=6), replace(written, capacity=0, extents=()), replace(written, extents=(5, 1))),
    ):
        with pytest.raises(DamagedCatalogError, match="add up"):
            Manifest.from_json(nonsense.to_json())
    with pytest.raises(FormatVersionError, match="nothing was changed"):
        Manifest.from_json(written.to_json().replace(b'"format": 2', b'"format": 99'))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.mdb"
    with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 20) as env, env.begin(write=True) as txn:
        txn.put(b"key", b"value" * 2000)
    return path


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_the_used_part_of_an_lmdb_file(file: Path) -> None:
    with lmdb.open(str(file), subdir=False, lock=False, readonly=True) as env:
        assert used_nbytes(file) == (env.info()["last_pgno"] + 1) * PAGE


@pytest.mark.parametrize(
    ("offset", "data", "match"),
    [
        (PAGE + 40, struct.pack("=I", 8192), "differ in page size"),
        (40, struct.pack("=I", 5000), "nonsense"),
        (136, struct.pack("=Q", 0), "nonsense"),
        (PAGE + 136, struct.pack("=Q", 1 << 50), "nonsense"),
        (16, b"\0\0\0\0", "not an LMDB meta page"),
        (PAGE + 20, struct.pack("=I", 999), "not an LMDB meta page"),
        (10, struct.pack("=H", 2), "not an LMDB meta page"),
        (PAGE + 136, struct.pack("=Q", 1 << 20), "speaks of"),
    ],
)
def test_meta_pages_of_nonsense(file: Path, offset: int, data: bytes, match: str) -> None:
    poke(file, 144, struct.pack("=Q", 0))
    poke(file, PAGE + 144, struct.pack("=Q", 9))  # the second one is the newer
    poke(file, offset, data)
    with pytest.raises(DamagedCatalogError, match=match):
        used_nbytes(file)


def test_what_is_no_plain_file_is_no_catalog(tmp_path: Path) -> None:
    with pytest.raises(DamagedCatalogError, match="plain"):
        used_nbytes(tmp_path)


def test_records_that_a_tree_lost_are_counted(tmp_path: Path) -> None:
    """A page of the tree that holds no records any more hides them: nothing is read that could be called bad."""
    store = RowStore(tmp_path / "data.mdb", 4 << 20)
    rows = {index: pack_rows(index, np.ones(RECORD_SLOTS, dtype=ROW)) for index in range(300)}
    written = manifest(capacity=300 * RECORD_SLOTS, extents=(300 * RECORD_SLOTS,))
    store.apply(Change(rows=dict(rows), manifest=written))
    assert store.count("rows") == 300 and store.count("symbols") == 0
    store.close()
    raw = (tmp_path / "data.mdb").read_bytes()
    pages = range(2, len(raw) // PAGE)
    full = [page for page in pages if struct.unpack_from("=HH", raw, page * PAGE + 10) > (2, 16 + 2 * 50)]
    leaf = next(
        page for page in full if raw[page * PAGE + 10] == 2 and struct.pack(">Q", 0) in raw[page * PAGE :][:PAGE]
    )
    poke(tmp_path / "data.mdb", leaf * PAGE + 12, struct.pack("=H", 16))  # no nodes any more
    counts = copy(tmp_path / "data.mdb", tmp_path / "copy.mdb")
    assert counts["bad"] > 50 and counts["kept"] + counts["bad"] == 300


def test_a_second_commit_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiercache.catalog, "_COMMIT_WAIT_S", 0.05)
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    inside, go_on = threading.Event(), threading.Event()

    def slow_sync() -> bool:
        inside.set()
        assert go_on.wait(20.0)
        return True

    first = threading.Thread(target=rig.catalog.commit, args=(slow_sync,))
    first.start()
    try:
        assert inside.wait(20.0)
        assert rig.commit() == [] and not rig.catalog.healthy
        assert rig.catalog.counters["failed_busy"] == 1
    finally:
        go_on.set()
        first.join(20.0)
    assert rig.commit() == [] and rig.catalog.healthy and rig.catalog.claimed(slots(0)).all()
    rig.close()


class TestDamageWhileOpen:
    """The file is looked at before each transaction; see also tests/crash/test_catalog_pages.py."""

    def test_all_claims_are_lost_and_what_waits_under_them(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path / "kv")
        rig.write([0, 1], tag=1)
        rig.commit()
        rig.write([2], parent=1, tag=2)
        rig.directory.catalog_path.unlink()
        assert rig.commit() == [0, 1, 2] and not rig.catalog.healthy
        assert "gone" in rig.catalog.last_error
        assert rig.commit() == [] and rig.catalog.healthy
        rig.write([4], tag=4)
        rig.commit()
        assert rig.catalog.claimed(slots(0, 1, 2, 4)).tolist() == [False, False, False, True]
        rig.close()
        again = Rig(tmp_path / "kv")
        assert set(again.recovered()) == {4} and again.readable().all()
        again.close()

    def test_an_inode_number_that_changes_by_itself_is_no_damage(self, tmp_path: Path) -> None:
        """As on some network file systems: what counts is what the file says."""
        rig = Rig(tmp_path / "kv")
        rig.write([0], tag=1)
        rig.commit()
        assert rig.catalog._store is not None
        for tag in (2, 3):
            rig.catalog._store._inode += 1
            rig.write([tag], tag=tag)
            assert rig.commit() == [] and rig.catalog.healthy
        rig.close()
        again = Rig(tmp_path / "kv")
        assert set(again.recovered()) == {0, 2, 3}
        again.close()

    def test_an_older_copy_put_in_its_place_is_no_catalog_of_ours(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path / "kv")
        rig.write([0], tag=1)
        rig.commit()
        path = rig.directory.catalog_path
        older = path.read_bytes()
        rig.write([1], tag=2)
        rig.commit()
        path.rename(path.with_name("moved"))
        path.write_bytes(older)
        rig.write([2], tag=3)
        assert rig.commit() == [0, 1, 2] and "replaced" in rig.catalog.last_error
        rig.write([3], tag=4)
        assert rig.commit() == [] and rig.catalog.healthy and rig.catalog.claimed(slots(3)).all()
        rig.close()

    def test_where_no_new_file_can_be_made_it_is_tried_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rig = Rig(tmp_path / "kv")
        rig.write([0], tag=1)
        rig.commit()
        rig.write([1], tag=2)
        rig.directory.catalog_path.write_bytes(b"")

        def refuse(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(tiercache.catalog, "set_aside", refuse)
            for failed in (1, 2):
                assert rig.commit() == [] and not rig.catalog.healthy
                assert rig.catalog.counters["failed_anew"] == failed
        assert rig.commit() == [0, 1] and not rig.catalog.healthy
        assert rig.commit() == [] and rig.catalog.healthy
        rig.write([3], tag=3)
        rig.commit()
        assert rig.catalog.healthy and rig.catalog.counters["begun_anew"] == 1
        rig.close()
        again = Rig(tmp_path / "kv")
        assert 3 in again.recovered() and 0 not in again.recovered()
        again.close()

    def test_a_new_epoch_meanwhile_is_the_one_that_counts(self, tmp_path: Path) -> None:
        rig = Rig(tmp_path / "kv")
        rig.write([0], tag=1)
        rig.commit()
        rig.catalog.new_epoch(b"epoch-2")
        rig.directory.catalog_path.unlink()
        for _ in range(3):
            rig.commit()
        assert rig.catalog.healthy and rig.directory.read_epoch() == b"epoch-2"
        rig.close()
        again = Rig(tmp_path / "kv", wanted=manifest(epoch=b"epoch-2"))
        assert again.catalog.recovered.reason == "" and again.recovered() == {}
        again.close()
