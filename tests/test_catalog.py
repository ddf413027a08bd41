"""The catalog: what a commit claims, and what the next start finds."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest
from catalog_rig import EPOCH, NAMESPACE, WIDTH, Rig, manifest, slots
from power_cut import PowerCutFiles

from tiercache.catalog import peek_manifest
from tiercache.catalog_rows import Change, RowStore, map_nbytes_for
from tiercache.directory import StoreDirectory
from tiercache.errors import CacheClosedError, ConfigError, FormatVersionError


def reopened(rig: Rig, tmp_path: Path, clean: bool, capacity: int = 8) -> Rig:
    if clean:
        rig.close()
        return Rig(rig.path, capacity)
    copied = rig.crash_copy(tmp_path / "after-crash")
    rig.close()
    return Rig(copied, capacity)


@pytest.mark.parametrize("clean", [True, False])
def test_what_was_committed_is_there_after_a_reopen(tmp_path: Path, clean: bool) -> None:
    rig = Rig(tmp_path / "kv")
    assert rig.catalog.recovered.reason == "new"
    trunk = rig.write([0, 1, 2])
    fork = rig.write([5], parent=1, tag=2)
    assert rig.catalog.pending_slots == 4 and rig.catalog.dirty
    assert rig.commit() == []
    assert rig.catalog.pending_slots == 0 and not rig.catalog.dirty and rig.catalog.healthy
    assert rig.catalog.claimed(slots(0, 1, 2, 3, 5)).tolist() == [True, True, True, False, True]
    again = reopened(rig, tmp_path, clean)
    found = again.catalog.recovered
    assert (found.reason, found.forgotten) == ("", 0)
    assert again.recovered() == {0: trunk[0], 1: trunk[1], 2: trunk[2], 5: fork[0]}
    assert again.readable().all()
    assert again.directory.counters["unclean_opens"] == (0 if clean else 1)
    assert sorted(zip(found.last_use.tolist(), found.uses.tolist(), strict=True)) == [(1001.0, 1)] * 3 + [(1002.0, 1)]
    again.close()


def test_what_was_not_committed_is_not_there(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    rig.write([1], parent=0, tag=2)
    again = reopened(rig, tmp_path, clean=False)
    assert set(again.recovered()) == {0}
    again.close()


def test_close_claims_nothing_that_was_not_synced(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.close()
    again = Rig(rig.path)
    assert again.recovered() == {}
    again.close()


def test_forget_and_rewrite_end_the_older_claim(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1, 2])
    rig.commit()
    rig.catalog.forget(slots(2))
    rig.catalog.starting(slots(1))
    assert [int(i) for i in rig.catalog.expected(slots(1, 2))[0]] == [0, 0]
    assert rig.catalog.dirty
    rig.commit()
    again = reopened(rig, tmp_path, clean=False)
    assert set(again.recovered()) == {0}
    again.close()


def test_a_child_waits_for_its_parent_and_is_lost_with_it(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    above, _ = rig.begin(slots(0))
    rig.catalog.starting(slots(0))
    rig.write([1], parent=0, parent_ident=int(above[0]), tag=2)
    rig.write([2], parent=1, tag=3)
    assert rig.commit() == []
    assert rig.catalog.pending_slots == 2 and rig.catalog.claimed_slots == 0
    rig.catalog.forget(slots(0))
    assert rig.commit() == [1, 2]
    assert rig.catalog.pending_slots == 0 and not rig.catalog.dirty
    assert rig.catalog.counters["lost_claims"] == 2
    rig.close()


def test_a_child_is_claimed_in_the_commit_after_its_parent_came(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    place = slots(0)
    above, claims = rig.begin(place)
    rig.catalog.starting(place)
    rig.write([1], parent=0, parent_ident=int(above[0]), tag=2)
    rig.commit()
    rig.catalog.written(place, above, above, claims)
    assert rig.commit() == []
    assert rig.catalog.claimed(slots(0, 1)).all()
    rig.close()


def test_a_parent_with_another_ident_loses_the_child(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    rig.write([1], parent=0, parent_ident=12345, tag=2)
    rig.write([2], parent=-1, parent_ident=777, tag=3)
    assert rig.commit() == [1, 2]
    rig.close()


def test_a_slot_reused_during_the_sync_is_not_claimed_with_unsynced_bytes(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.write([1], tag=2)

    def sync() -> bool:
        rig.catalog.forget(slots(0))
        rig.write([0], tag=3)
        return rig.tier.sync()

    assert rig.catalog.commit(sync).tolist() == []
    assert rig.catalog.claimed(slots(0, 1)).tolist() == [False, True]
    copied = rig.crash_copy(tmp_path / "copy")
    assert rig.commit() == []
    assert rig.catalog.claimed(slots(0)).all()
    rig.close()
    again = Rig(copied)
    assert set(again.recovered()) == {1}
    again.close()


def test_a_parent_rewritten_with_the_same_bytes_during_the_sync_makes_the_child_wait(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1])

    def sync() -> bool:
        rig.write([0])
        return rig.tier.sync()

    assert rig.catalog.commit(sync).tolist() == []
    assert rig.catalog.claimed(slots(0, 1)).tolist() == [False, False]
    rig.commit()
    assert rig.catalog.claimed(slots(0, 1)).all()
    rig.close()


def test_a_slot_taken_for_a_new_write_during_the_transaction_is_not_claimed_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.write([1], tag=2)
    apply = RowStore.apply

    def apply_and_take(store: RowStore, change: Change) -> None:
        apply(store, change)
        monkeypatch.undo()
        rig.catalog.starting(slots(0))

    monkeypatch.setattr(RowStore, "apply", apply_and_take)
    rig.commit()
    assert rig.catalog.claimed(slots(0, 1)).tolist() == [False, True]
    assert int(rig.catalog.expected(slots(0))[0][0]) == 0
    assert rig.catalog.dirty  # the claim on disk has yet to go
    rig.commit()
    again = reopened(rig, tmp_path, clean=False)
    assert set(again.recovered()) == {1}
    again.close()


def test_a_power_cut_right_after_the_transaction_takes_no_byte_that_it_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, all_is_lost = PowerCutFiles(), SimpleNamespace(choice=max, random=lambda: 0.0)
    rig = Rig(tmp_path / "kv", ops=files)
    apply = RowStore.apply

    def apply_and_cut(store: RowStore, change: Change) -> None:
        apply(store, change)
        files.cut(rig.crash_copy(tmp_path / "cut"), all_is_lost)  # type: ignore[arg-type]

    monkeypatch.setattr(RowStore, "apply", apply_and_cut)
    rig.write([0, 1, 2])
    rig.commit()
    monkeypatch.undo()
    rig.close()
    again = Rig(tmp_path / "cut")
    assert set(again.recovered()) == {0, 1, 2}
    assert again.readable().all()
    again.close()


@pytest.mark.parametrize("durability", ["power", "process"])
def test_transactions_are_synced_and_with_power_durability_their_meta_page_too(tmp_path: Path, durability: str) -> None:
    rig = Rig(tmp_path / "kv", durability=durability)
    store = rig.catalog._store
    assert store is not None
    flags = store._env.flags()
    assert (flags["sync"], flags["metasync"], flags["writemap"]) == (True, durability == "power", False)
    rig.close()


def test_a_late_write_to_a_forgotten_slot_is_refused(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    idents, claims = rig.begin(slots(0, 1))
    rig.catalog.starting(slots(0, 1))
    rig.catalog.forget(slots(1))
    rig.catalog.written(slots(0, 1), idents, idents, claims)
    assert rig.catalog.counters["refused"] == 1
    assert (rig.catalog.expected(slots(0, 1))[0] == [idents[0], 0]).all()
    rig.close()


def test_a_failed_sync_claims_nothing_and_is_retried(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1])
    rig.commit()
    rig.write([2], parent=1, tag=2)
    assert rig.catalog.commit(lambda: False).tolist() == []
    assert not rig.catalog.healthy and rig.catalog.counters["failed_sync"] == 1
    assert rig.catalog.pending_slots == 1 and rig.catalog.dirty
    assert rig.commit() == []
    assert rig.catalog.healthy and rig.catalog.claimed(slots(2)).all()
    rig.close()


def test_forgetting_goes_out_although_the_sync_fails(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.write([1], tag=2)
    rig.commit()
    rig.catalog.forget(slots(0))
    rig.write([2], tag=3)
    rig.catalog.commit(lambda: False)
    again = reopened(rig, tmp_path, clean=False)
    assert set(again.recovered()) == {1}
    again.close()


def test_a_failed_transaction_is_retried_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1, 2])
    rig.commit()
    rig.catalog.forget(slots(2))
    rig.write([3], parent=0, tag=2)
    rig.write([4], parent=3, tag=3)
    apply = RowStore.apply
    errors: list[Exception] = [lmdb.DiskError("full"), OSError(28, "No space left on device")]

    def fail(store: RowStore, change: object) -> None:
        if errors:
            raise errors.pop(0)
        apply(store, change)  # type: ignore[arg-type]

    monkeypatch.setattr(RowStore, "apply", fail)
    for failures in (1, 2):
        assert rig.commit() == []
        assert not rig.catalog.healthy and rig.catalog.dirty
        assert rig.catalog.counters["failed_transaction"] == failures
        assert rig.catalog.pending_slots == 2 and not rig.catalog.claimed(slots(3)).any()
        rig.catalog.forget(slots(4)) if failures == 2 else None
    assert rig.commit() == []
    assert rig.catalog.healthy and rig.catalog.pending_slots == 0 and not rig.catalog.dirty
    again = reopened(rig, tmp_path, clean=False)
    assert set(again.recovered()) == {0, 1, 3}
    assert again.readable().all()
    again.close()


def test_a_catalog_found_damaged_while_open_is_replaced_and_its_claims_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1])
    rig.commit()
    rig.write([2], tag=2)

    def fail(store: RowStore, change: Change) -> None:
        monkeypatch.undo()
        raise lmdb.CorruptedError("a page is not what it should be")

    monkeypatch.setattr(RowStore, "apply", fail)
    assert set(rig.commit()) >= {0, 1}
    assert not rig.catalog.claimed(slots(0, 1, 2)).any()
    assert int(rig.catalog.expected(slots(0))[0][0]) == 0
    assert (rig.catalog.counters["begun_anew"], rig.directory.counters["catalogs_set_aside"]) == (1, 1)
    rig.write([0, 1])
    assert rig.commit() == [] and rig.catalog.healthy
    again = reopened(rig, tmp_path, clean=False)
    assert {0, 1} <= set(again.recovered()) and again.readable().all()
    again.close()


def test_a_full_map_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.catalog_open.map_nbytes_for", lambda capacity, width: 16 * 4096)
    rig = Rig(tmp_path / "kv", 4096)
    for tag in range(8):
        where = range(tag * 512, tag * 512 + 512)
        idents, claims = rig.begin(slots(*where), tag=tag)
        rig.catalog.starting(slots(*where))
        rig.catalog.written(slots(*where), idents, idents, claims)
        assert rig.commit() == [] and rig.catalog.healthy
    assert rig.catalog.counters["map_grown"] >= 1
    rig.close()
    again = Rig(rig.path, 4096)
    assert len(again.recovered()) == 4096
    again.close()


def test_use_is_noted_at_close_and_with_a_commit_of_the_record(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.write([1], tag=2)
    rig.commit()
    rig.catalog.note_use(slots(0, 7), np.array([5000.0, 1.0]), np.array([9, 1], dtype=np.uint32))
    assert not rig.catalog.dirty
    again = reopened(rig, tmp_path, clean=True)
    found = again.catalog.recovered
    at = found.slots.tolist().index(0)
    assert (found.last_use[at], found.uses[at]) == (5000.0, 9)
    again.catalog.note_use(slots(1), np.array([6000.0]), np.array([3], dtype=np.uint32))
    again.catalog.forget(slots(0))
    again.commit()
    third = Rig(again.crash_copy(tmp_path / "third"))
    assert third.catalog.recovered.last_use.tolist() == [6000.0]
    again.close()
    third.close()


def test_new_epoch_forgets_everything_in_its_commit(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1])
    rig.commit()
    rig.catalog.starting(slots(5))
    rig.catalog.new_epoch(b"epoch-2")
    assert rig.catalog.manifest.epoch == b"epoch-2" and rig.catalog.dirty
    assert not rig.catalog.expected(slots(0, 1))[0].any()
    late, claims = rig.begin(slots(5), tag=9)
    rig.catalog.written(slots(5), late, late, claims)
    assert rig.catalog.counters["refused"] == 1
    before = rig.crash_copy(tmp_path / "before")
    assert rig.commit() == []
    assert rig.directory.read_epoch() == b"epoch-2"
    rig.write([3], parent_ident=rig.root, tag=4)
    assert rig.commit() == [3], "a block of the old epoch has no root any more"
    rig.close()
    old = Rig(before)
    assert set(old.recovered()) == {0, 1}
    old.close()
    stale = Rig(rig.path)
    assert stale.catalog.recovered.reason == "epoch"
    stale.close()


def test_a_failed_epoch_file_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    rig.catalog.new_epoch(b"epoch-2")

    def full(self: StoreDirectory, epoch: bytes) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StoreDirectory, "write_epoch", full)
        rig.commit()
        assert not rig.catalog.healthy and rig.catalog.dirty
        copied = rig.crash_copy(tmp_path / "half")
    halfway = Rig(copied)
    assert halfway.catalog.recovered.reason == "epoch"
    rig.commit()
    assert rig.catalog.healthy and not rig.catalog.dirty
    rig.close()
    halfway.close()
    again = Rig(rig.path, wanted=manifest(epoch=b"epoch-2"))
    assert again.catalog.recovered.reason == ""
    again.close()


def test_process_durability_does_not_sync_the_payload(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv", durability="process")
    rig.write([0])
    rig.catalog.commit(lambda: pytest.fail("synced"))
    again = reopened(rig, tmp_path, clean=False)
    assert set(again.recovered()) == {0}
    again.close()


def test_nothing_to_claim_nothing_to_sync(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    assert rig.catalog.commit(lambda: pytest.fail("synced")).tolist() == []
    rig.close()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"namespace": bytes(16).hex()}, "namespace"),
        ({"layout": {"block_shape": [2500], "dtype": "float16"}}, "layout"),
        ({"block_nbytes": 4096}, "layout"),
        ({"block_tokens": 8}, "block_tokens"),
        ({"symbol_nbytes": 32}, "block_tokens"),
        ({"epoch": b"other"}, "epoch"),
    ],
)
def test_another_kind_of_block_starts_cold(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object], reason: str
) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    rig.close()
    other = Rig(rig.path, wanted=manifest(**change))
    assert other.catalog.recovered.reason == reason
    assert len(other.catalog.recovered.slots) == 0
    assert reason in caplog.text
    other.close()
    back = Rig(rig.path)
    assert back.catalog.recovered.reason == reason and len(back.catalog.recovered.slots) == 0
    back.close()


def test_the_epoch_file_must_agree(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    rig.close()
    for content in (b"ff\n", b"nonsense"):
        (rig.path / "epoch").write_bytes(content)
        with StoreDirectory.open(rig.path) as directory:
            peeked = peek_manifest(directory)
            assert peeked is not None and peeked.epoch == b""
    again = Rig(rig.path)
    assert again.catalog.recovered.reason == "epoch"
    again.close()


def test_another_store_id_starts_cold(tmp_path: Path) -> None:
    rig, other = Rig(tmp_path / "a"), Rig(tmp_path / "b")
    rig.write([0])
    rig.commit()
    rig.close()
    other.close()
    (rig.path / "catalog" / "data.mdb").replace(other.directory.catalog_path)
    mixed = Rig(other.path)
    assert mixed.catalog.recovered.reason == "store"
    mixed.close()


def test_peek(tmp_path: Path) -> None:
    with StoreDirectory.open(tmp_path / "kv") as directory:
        assert peek_manifest(directory) is None
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    copied = rig.crash_copy(tmp_path / "copy")
    rig.close()
    for path in (rig.path, copied):
        with StoreDirectory.open(path) as directory:
            peeked = peek_manifest(directory)
        assert peeked is not None
        assert (peeked.epoch, peeked.namespace, peeked.capacity, peeked.extents) == (EPOCH, NAMESPACE.hex(), 8, (8,))
        again = Rig(path)
        assert set(again.recovered()) == {0}
        again.close()


def test_an_unknown_format_is_an_error_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tiercache.catalog_rows.FORMAT_VERSION", 99)
        rig = Rig(tmp_path / "kv")
        rig.write([0])
        rig.commit()
        copied = rig.crash_copy(tmp_path / "unclean")
        rig.close()
    for path in (rig.path, copied):
        before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}
        with pytest.raises(FormatVersionError, match="format"):
            Rig(path)
        assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and file.name != "lock"}


def test_modes(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        rig = Rig(tmp_path / "kv")
        rig.write([0])
        rig.commit()
        rig.close()
    finally:
        os.umask(old)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [rig.path, *rig.path.rglob("*")]}
    assert modes == {
        "kv": 0o700,
        "catalog": 0o700,
        **dict.fromkeys(["lock", "STORE", "epoch", "clean", "data.mdb", "slots-00.dat"], 0o600),
    }


def test_closed_and_abandoned(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.close()
    rig.close()
    with pytest.raises(CacheClosedError):
        rig.commit()
    with pytest.raises(CacheClosedError):
        type(rig.catalog).open(rig.directory, manifest(), 8, root_ident=rig.root)
    other = Rig(tmp_path / "other")
    other.write([0])
    other.commit()
    child = os.fork()
    if child == 0:
        RowStore.close = lambda store: os._exit(9)  # type: ignore[method-assign]  # nothing of LMDB is touched here
        other.directory.abandon()
        other.catalog.abandon()
        other.tier.abandon()
        other.catalog.close()
        other.tier.close()
        other.directory.close()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    other.write([1], parent=0, tag=2)
    assert other.commit() == []
    with pytest.raises(Exception, match="in use"):
        StoreDirectory.open(other.path, wait_s=0)
    other.close()


def test_too_little_space_for_the_catalog_is_a_config_error(tmp_path: Path) -> None:
    from tiercache.tiers.fileio import OsFiles

    class Full(OsFiles):
        def fallocate(self, fd: int, nbytes: int) -> None:
            raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match="bytes"):
        Rig(tmp_path / "kv", ops=Full())
    rig = Rig(tmp_path / "kv")
    rig.close()


def test_the_catalog_has_its_space_before_it_needs_it(tmp_path: Path) -> None:
    """So that a full disk cannot stop a transaction, one that forgets least of all."""
    rig = Rig(tmp_path / "kv", 1000)
    facts = rig.directory.catalog_path.stat()
    assert facts.st_blocks * 512 >= map_nbytes_for(1000, WIDTH)
    rig.close()


def test_dead_symbols_do_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.catalog_symbols._SLACK", 64)
    rig = Rig(tmp_path / "kv", 4096)
    for begin in range(0, 4096, 256):
        where = slots(*range(begin, begin + 256))
        idents, claims = rig.begin(where, tag=begin)
        # every block of its own prompt, so that any may go
        claims.parent_slots[:] = -1
        claims.parent_idents[:] = rig.root
        rig.catalog.starting(where)
        rig.catalog.written(where, idents, idents, claims)
        rig.commit()
        rig.catalog.forget(where[np.arange(256) % 60 != 0])
        rig.commit()
    for _ in range(4):
        rig.catalog.forget(slots(0))
        rig.commit()
    assert rig.catalog.counters["moved_symbols"] > 0
    total = int(rig.catalog._table.book._total.sum())
    assert total <= 2 * rig.catalog.claimed_slots + 64
    rig.close()


def test_a_commit_that_hangs_in_the_sync_claims_nothing_after_the_close(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    rig.write([1], parent=0, tag=2)
    entered, go = threading.Event(), threading.Event()

    def sync() -> bool:
        entered.set()
        return go.wait(10)

    thread = threading.Thread(target=lambda: rig.catalog.commit(sync))
    thread.start()
    assert entered.wait(10)
    assert rig.catalog.close(wait_s=0.05) is False
    go.set()
    thread.join(10)
    assert not rig.catalog.claimed(slots(1)).any()
    assert rig.catalog.close() is True
    rig.close()
    again = Rig(rig.path)
    assert set(again.recovered()) == {0}
    again.close()


def test_a_failed_transaction_is_retried_without_any_further_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = Rig(tmp_path / "kv")
    rig.write([0, 1, 2])
    rig.commit()
    rig.catalog.forget(slots(2))

    def fail(store: RowStore, change: object) -> None:
        raise lmdb.DiskError("full")

    with monkeypatch.context() as patch:
        patch.setattr(RowStore, "apply", fail)
        rig.commit()
    assert rig.catalog.dirty
    rig.commit()
    assert rig.catalog.healthy
    again = reopened(rig, tmp_path, clean=False)
    assert set(again.recovered()) == {0, 1}
    again.close()


def test_the_clean_marker_is_there_only_between_close_and_open(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "kv")
    marker = rig.directory.clean_path
    assert not marker.exists()
    rig.close()
    assert marker.exists()
    with StoreDirectory.open(rig.path) as directory:
        peek_manifest(directory)
        assert marker.exists(), "looking changes nothing"
    again = Rig(rig.path)
    assert not marker.exists()
    again.close(clean=False)
    assert not marker.exists()


def test_symbol_records_never_get_an_old_id(tmp_path: Path) -> None:
    """Else a row of an earlier life, brought back by damage, could find another prompt's symbols."""
    rig = Rig(tmp_path / "kv")
    rig.write([0])
    rig.commit()
    first = int(rig.catalog._table.rows["symbol_record"][0])
    rig.catalog.forget(slots(0))
    rig.commit()
    for clean in (True, False):
        rig = reopened(rig, tmp_path / str(clean), clean)
        rig.write([0], tag=5)
        rig.commit()
        following = int(rig.catalog._table.rows["symbol_record"][0])
        assert following > first
        first = following
        rig.catalog.forget(slots(0))
        rig.commit()
    rig.close()


def test_what_is_rewritten_while_commits_fail_does_not_pile_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiercache.catalog_table._BATCHES_MIN", 4)
    rig = Rig(tmp_path / "kv")
    for tag in range(60):
        rig.write([tag % 3], tag=tag)
        rig.catalog.commit(lambda: False)
        rig.write([tag % 3], tag=tag)
    assert len(rig.catalog._table.batches) <= 2 * 3 + 4 + 1
    rig.commit()
    assert rig.catalog.claimed_slots == 3
    rig.close()
