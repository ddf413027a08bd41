"""What the k-th faults found, one by one: nothing that is only in the way may cost what was acknowledged."""

from __future__ import annotations

import errno
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import pytest
from cache_kit import WAIT_S, eventually, is_clean, open_cache, prompt, read, store
from kth_scenario import left_since, open_now

from tiercache import catalog_rows, directory
from tiercache.assembly import Seams
from tiercache.catalog_rows import DamagedCatalogError, Manifest, is_damage
from tiercache.catalog_table import SlotTable
from tiercache.errors import ConfigError
from tiercache.mover import staging
from tiercache.scrub import check_directory
from tiercache.testing import HangingTier
from tiercache.types import ROOT, Claims

TOKENS = prompt(1, 2, 3)


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A directory with TOKENS on NVMe, closed in order."""
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
        assert cache.flush(WAIT_S, to="nvme")
    return tmp_path


def still_warm(path: Path) -> bool:
    """All is there, and no catalog was set aside."""
    with open_cache(path) as cache:
        assert not list((path / "kv").glob("catalog.bad-*"))
        return read(cache, TOKENS) == 3


def once(call: Callable[..., Any], error: BaseException, nth: int = 1) -> Callable[..., Any]:
    """`call`, but the nth time the error."""
    calls = iter(range(1, 1 << 30))

    def passing(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            raise error
        return call(*args, **kwargs)

    return passing


# -- a catalog that cannot be read just now is no damaged catalog -----------------------------------------------------


@pytest.mark.parametrize(
    "error, damage",
    [
        (lmdb.CorruptedError("x"), True),
        (lmdb.InvalidError("x"), True),
        (lmdb.PageNotFoundError("x"), True),
        (DamagedCatalogError("x"), True),
        (lmdb.Error("Too many open files"), False),
        (lmdb.MemoryError("x"), False),
        (lmdb.DiskError("x"), False),
        (lmdb.ReadonlyError("x"), False),
        (OSError(errno.EIO, "x"), False),
        (MemoryError(), False),
    ],
    ids=repr,
)
def test_what_is_damage(error: Exception, damage: bool) -> None:
    assert is_damage(error) == damage


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "error", [lmdb.Error("Too many open files"), lmdb.MemoryError("x"), MemoryError("x")], ids=repr
)
def test_a_catalog_that_cannot_be_opened_stays(
    warm: Path, monkeypatch: pytest.MonkeyPatch, nth: int, error: Exception
) -> None:
    monkeypatch.setattr(lmdb, "open", once(lmdb.open, error, nth))
    with pytest.raises(ConfigError):
        open_cache(warm)
    assert still_warm(warm)


def test_a_catalog_whose_meta_pages_cannot_be_read_stays(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_rows.os, "pread", once(catalog_rows.os.pread, OSError(errno.EIO, "planned")))
    with pytest.raises(ConfigError, match="nothing was changed"):
        open_cache(warm)
    monkeypatch.undo()
    assert still_warm(warm)


def test_an_epoch_file_that_cannot_be_read_is_no_other_epoch(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_small = directory.read_small

    def passing(path: Path) -> bytes:
        if path.name == "epoch":
            raise OSError(errno.EMFILE, "planned")
        return read_small(path)

    monkeypatch.setattr(directory, "read_small", passing)
    with pytest.raises(ConfigError):
        open_cache(warm)
    monkeypatch.undo()
    assert still_warm(warm)


@pytest.mark.parametrize("script", ["echo ready; kill -9 $$", "echo ready; exit 6"], ids=["killed", "unable"])
@pytest.mark.parametrize("by", ["open", "check --fix"])
def test_a_check_that_was_killed_says_nothing(
    warm: Path, monkeypatch: pytest.MonkeyPatch, script: str, by: str
) -> None:
    (warm / "kv/clean").unlink()
    start = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: start(["/bin/sh", "-c", script], **more))
    with pytest.raises(ConfigError, match="nothing was changed"):
        if by == "open":
            open_cache(warm)
        else:
            check_directory(warm / "kv", fix=True)
    monkeypatch.undo()
    assert still_warm(warm)


# -- what cannot be had -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [1, 2, 4, 8])
def test_a_thread_that_cannot_be_started_leaves_none(warm: Path, monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    before = open_now()
    start = once(threading.Thread.start, RuntimeError("can't start new thread"), nth)
    monkeypatch.setattr(threading.Thread, "start", lambda self: start(self))
    if nth == 1:  # the one that touches the slab is no more than a help
        with open_cache(warm) as cache:
            assert read(cache, TOKENS) == 3
    else:
        with pytest.raises(ConfigError, match="thread"):
            open_cache(warm)
    monkeypatch.undo()
    assert eventually(lambda: not left_since(before)), left_since(before)
    assert still_warm(warm)


@pytest.mark.parametrize("error", [MemoryError("planned"), OSError(errno.ENOMEM, "planned")], ids=repr)
def test_a_load_without_memory_is_a_miss_and_no_damage(
    warm: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    with open_cache(warm) as cache:
        monkeypatch.setattr(staging, "map_rows", once(staging.map_rows, error))
        with cache.load(cache.lookup(TOKENS)).result(WAIT_S) as loaded:
            assert loaded.block_count == 0
        assert cache.lookup(TOKENS).blocks == 3, "its sources are as they were"
        assert cache.stats().tiers[1].bad == 0
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)


def test_a_job_without_memory_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not lost in submit, which would keep its slots and credits for ever."""
    from tiercache.mover import job

    class Without:
        def __getattr__(self, name: str) -> Any:
            return fail if name == "zeros" else getattr(np, name)

    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError("planned")

    with open_cache(tmp_path) as cache:
        monkeypatch.setattr(job, "np", Without())
        ticket = cache.store(TOKENS, np.zeros((3, 2, 32), np.float32))
        assert ticket.wait(WAIT_S)
        assert cache.lookup(TOKENS).blocks == 0
        monkeypatch.undo()
        assert cache.stats().mover["unexpected_errors"] == 1
        store(cache, TOKENS)
        assert read(cache, TOKENS) == 3
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)


def test_a_commit_without_memory_still_wants_everything() -> None:
    """All that a transaction takes out is taken when nothing can fail any more."""
    from tiercache import catalog_table

    namespace = "00" * 16
    manifest = Manifest({}, 64, namespace, b"e", 4, 16, capacity=64, extents=(64,))
    table = SlotTable(manifest, 7)
    slots = np.arange(3, dtype=np.int32)
    table.end(slots, catalog_table.BUSY)
    parents, idents = np.array([ROOT, 0, 1], np.int32), np.array([11, 12, 13], np.uint64)
    claims = Claims(parents, np.array([7, 11, 12], np.uint64), bytes(48), np.zeros(3), np.zeros(3, np.uint32))
    table.written(slots, idents, idents, claims)
    assert len(table.claim(table.waiting(), True)) == 0
    wanted, calls = catalog_table.np, iter(range(1 << 30))

    class Without:
        def __getattr__(self, name: str) -> Any:
            if name == "flatnonzero" and next(calls) == 1:  # the slots that are being claimed
                raise MemoryError("planned")
            return getattr(np, name)

    catalog_table.np = Without()
    try:
        with pytest.raises(MemoryError):
            table.take()
    finally:
        catalog_table.np = wanted
    taken = table.take()
    assert taken is not None
    assert list(taken.change.rows) == [0]
    assert len(taken.change.symbols) == 1
    assert taken.slots.tolist() == [0, 1, 2]


# -- locks ------------------------------------------------------------------------------------------------------------


def test_a_lock_that_cannot_be_had(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory.fcntl, "flock", once(directory.fcntl.flock, OSError(errno.ENOLCK, "planned")))
    with pytest.raises(ConfigError, match="locked"):
        open_cache(warm)
    assert still_warm(warm)


def test_no_thread_to_wait_for_a_hung_tier(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close does not raise; the directory stays locked until the process ends."""
    made: list[HangingTier] = []

    def wrap(tier: Any) -> Any:
        if tier.verifies:
            made.append(HangingTier(tier))
        return made[0] if tier.verifies else tier

    cache = open_cache(warm, seams=Seams(wrap_tier=wrap), nvme={"read_deadline_s": 0.1})
    made[0].hang("read")
    assert cache.load(cache.lookup(TOKENS)).result(WAIT_S).block_count == 0
    monkeypatch.setattr(threading.Thread, "start", once(threading.Thread.start, RuntimeError("can't start new thread")))
    assert not cache.close(1.0)
    monkeypatch.undo()
    made[0].wake()
    cache._directory.close()
    assert still_warm(warm)
