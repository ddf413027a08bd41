"""Whatever happens to the catalog's file: the start never fails, and nothing wrong is ever recovered."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import lmdb
import numpy as np
import pytest
from catalog_rig import Rig, slots

import tiercache.catalog_check
from tiercache.catalog import peek_manifest
from tiercache.catalog_check import checked_copy, write_marker
from tiercache.catalog_rows import Change, DamagedCatalogError, RowStore, used_nbytes
from tiercache.directory import StoreDirectory
from tiercache.errors import ConfigError

CAPACITY = 200


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, int], Path]:
    """A store of several commits, closed; what it holds; and its catalog as it was some commits earlier."""
    path = tmp_path_factory.mktemp("base") / "kv"
    rig = Rig(path, CAPACITY)
    for tag in range(5):
        rig.write(list(range(tag * 40, tag * 40 + 30)), tag=tag)
        rig.commit()
    older = shutil.copy(rig.directory.catalog_path, path.parent / "older.mdb")
    rig.catalog.forget(slots(*range(60, 70)))
    rig.write(list(range(60, 70)), parent=59, tag=77)
    rig.catalog.forget(slots(*range(10, 30)))
    rig.commit()
    rig.write(list(range(10, 20)), parent=130, tag=78)
    rig.write(list(range(35, 40)), parent=9, tag=79)
    rig.commit()
    rig.close()
    again = Rig(path, CAPACITY)
    truth = again.recovered()
    assert len(truth) == 145 and again.readable().all()
    again.close()
    return path, truth, Path(older)


def damaged(store: tuple[Path, dict[int, int], Path], tmp_path: Path, name: str = "copy") -> Path:
    return Path(shutil.copytree(store[0], tmp_path / name))


def open_and_compare(path: Path, truth: dict[int, int]) -> int:
    """Open, and check that all that is recovered is true; how much it is."""
    rig = Rig(path, CAPACITY)
    try:
        found = rig.recovered()
        assert found.items() <= truth.items()
        assert rig.readable().all()
        rig.write([199], tag=500)
        rig.commit()
        assert rig.catalog.healthy and rig.catalog.claimed(slots(199)).all()
        return len(found)
    finally:
        rig.close()


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        value = file.read(1)[0] ^ (1 << bit)
        file.seek(offset)
        file.write(bytes([value]))


def flips(path: Path, seed: int, count: int) -> list[tuple[int, int]]:
    """Bits all over the used part; half of them in the first bytes of a page, where LMDB keeps its structure."""
    rng = np.random.default_rng(seed)
    used = used_nbytes(path)
    anywhere = rng.integers(0, used, count)
    heads = rng.integers(0, used // 4096, count) * 4096 + rng.integers(0, 64, count)
    chosen = np.where(np.arange(count) % 2 == 0, anywhere, heads)
    return list(zip(chosen.tolist(), rng.integers(0, 8, count).tolist(), strict=True))


def flip_each(store: tuple[Path, dict[int, int], Path], tmp_path: Path, seed: int, count: int) -> list[int]:
    left = []
    for i, (offset, bit) in enumerate(flips(store[0] / "catalog" / "data.mdb", seed, count)):
        path = damaged(store, tmp_path, f"flip{i}")
        flip(path / "catalog" / "data.mdb", offset, bit)
        left.append(open_and_compare(path, store[1]))
        shutil.rmtree(path)
    return left


def test_flipped_bits(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    left = flip_each(store, tmp_path, seed=1, count=10)
    assert max(left) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_flipped_bits(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    left = flip_each(store, tmp_path, seed=2, count=400)
    assert sum(n > 0 for n in left) > 100


def test_a_flip_in_a_record_costs_that_record_only(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    path = damaged(store, tmp_path)
    raw = (path / "catalog" / "data.mdb").read_bytes()
    ident = store[1][199 - 10 - 20].to_bytes(8, "little")  # slot 169, in the third record of rows
    for at in range(raw.count(ident)):
        begin = -1
        for _ in range(at + 1):
            begin = raw.index(ident, begin + 1)
        flip(path / "catalog" / "data.mdb", begin, 3)
    rig = Rig(path, CAPACITY)
    assert rig.directory.counters["bad_records"] == 1
    found = rig.recovered()
    assert set(range(10)) <= set(found) and not set(found) & set(range(128, 192))
    assert rig.catalog.recovered.forgotten > 0
    rig.commit()
    assert not rig.catalog.dirty
    rig.close()


@pytest.mark.parametrize("how", ["peek", "open"])
def test_whoever_opens_a_catalog_first_has_it_checked(
    store: tuple[Path, dict[int, int], Path], tmp_path: Path, how: str
) -> None:
    path = damaged(store, tmp_path)
    (path / "clean").unlink()
    if how == "peek":
        with StoreDirectory.open(path) as directory:
            assert peek_manifest(directory) is not None
            assert directory.counters["unclean_opens"] == 1
    else:
        rig = Rig(path, CAPACITY)
        assert rig.directory.counters["unclean_opens"] == 1
        rig.close()


@pytest.mark.parametrize("name", ["rows", "symbols"])
@pytest.mark.parametrize("harm", ["a bit", "the record of another key"])
def test_a_record_that_was_wrong_when_it_was_written_is_dropped(
    store: tuple[Path, dict[int, int], Path], tmp_path: Path, name: str, harm: str
) -> None:
    """The marker of the orderly close describes the file, damage and all: only the record's own checksum can tell."""
    path = damaged(store, tmp_path)
    catalog = RowStore(path / "catalog" / "data.mdb", 16 << 20)
    (manifest, following), records = catalog.read_manifest(), dict(catalog.records(name))
    first, second = sorted(records)[:2]
    body = bytearray(records[second if harm != "a bit" else first])
    body[17] ^= 4 * (harm == "a bit")  # in the first row, its ident; in the first symbol, a token
    change = Change(manifest=manifest, next_symbol=following)
    (change.rows if name == "rows" else change.symbols)[first] = bytes(body)  # type: ignore[index]
    catalog.apply(change)
    catalog.close()
    with StoreDirectory.open(path) as directory:
        write_marker(directory)
    rig = Rig(path, CAPACITY)
    assert rig.directory.counters["unclean_opens"] == 0
    assert 0 not in rig.recovered() and rig.catalog.recovered.forgotten > 0
    rig.close()


def test_a_manifest_that_was_wrong_when_it_was_written_is_not_believed(
    store: tuple[Path, dict[int, int], Path], tmp_path: Path
) -> None:
    path = damaged(store, tmp_path)
    catalog = RowStore(path / "catalog" / "data.mdb", 16 << 20)
    with catalog._env.begin(write=True) as txn:
        text = bytearray(txn.get(b"manifest", db=catalog._manifest))
        text[text.index(b'"epoch": "') + 10] ^= 1  # the epoch of other weights, in sound JSON
        txn.put(b"manifest", bytes(text), db=catalog._manifest)
    catalog.close()
    with StoreDirectory.open(path) as directory:
        write_marker(directory)
    rig = Rig(path, CAPACITY)
    assert rig.catalog.recovered.reason == "corrupt"
    rig.close()


def test_truncation(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    used = used_nbytes(store[0] / "catalog" / "data.mdb")
    for size in [0, 1, 100, 4095, 4096, 8191, 8192, 12288, used // 2, used - 4096, used - 1]:
        path = damaged(store, tmp_path, f"cut{size}")
        os.truncate(path / "catalog" / "data.mdb", size)
        rig = Rig(path, CAPACITY)
        assert rig.catalog.recovered.reason == "corrupt"
        assert rig.directory.counters["catalogs_set_aside"] == 1
        rig.close()
        assert open_and_compare(path, store[1]) == 0
    path = damaged(store, tmp_path, "cut-unused")
    os.truncate(path / "catalog" / "data.mdb", used)
    assert open_and_compare(path, store[1]) == len(store[1])


@pytest.mark.parametrize("with_marker", [True, False])
def test_an_older_catalog(store: tuple[Path, dict[int, int], Path], tmp_path: Path, with_marker: bool) -> None:
    path = damaged(store, tmp_path)
    shutil.copy(store[2], path / "catalog" / "data.mdb")
    if not with_marker:
        (path / "clean").unlink()
    rig = Rig(path, CAPACITY)
    rig.recovered()
    right = rig.readable()
    reused = np.isin(rig.catalog.recovered.slots, [*range(10, 20), *range(60, 70)])
    assert len(right) == 150 and np.array_equal(right, ~reused)
    rig.close()


def test_garbage(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    for seed in range(4):
        path = damaged(store, tmp_path, f"garbage{seed}")
        (path / "catalog" / "data.mdb").write_bytes(np.random.default_rng(seed).bytes(50_000))
        assert open_and_compare(path, store[1]) == 0


def test_meta_pages_that_promise_too_much(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    path = damaged(store, tmp_path)
    file = path / "catalog" / "data.mdb"
    for page in (0, 4096):
        with file.open("r+b") as raw:
            raw.seek(page + 136)
            raw.write((1 << 30).to_bytes(8, "little"))
    with pytest.raises(DamagedCatalogError, match="speaks of"):
        used_nbytes(file)
    assert open_and_compare(path, store[1]) == 0


def test_a_catalog_that_is_lmdb_but_not_ours(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    path = damaged(store, tmp_path)
    file = path / "catalog" / "data.mdb"
    file.unlink()
    lmdb.open(str(file), subdir=False, lock=False).close()
    assert open_and_compare(path, store[1]) == 0


def test_only_two_bad_catalogs_are_kept(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    path = damaged(store, tmp_path)
    for i in range(4):
        (path / "catalog" / "data.mdb").write_bytes(bytes([i]) * 10_000)
        Rig(path, CAPACITY).close()
    kept = sorted(path.glob("catalog.bad-*"), key=lambda place: place.name)
    assert [(place / "data.mdb").read_bytes()[0] for place in kept] == [2, 3]
    assert not list(path.glob("catalog.new-*"))


def test_a_check_that_dies_or_hangs_is_a_cold_start(
    store: tuple[Path, dict[int, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {
        "dies": "#!/bin/sh\necho ready\nkill -SEGV $$\n",
        "hangs": "#!/bin/sh\necho ready\nexec sleep 8\n",
    }.items():
        path = damaged(store, tmp_path, name)
        (path / "clean").unlink()
        program = tmp_path / f"{name}.sh"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(program))
        monkeypatch.setattr(tiercache.catalog_check, "COPY_LIMIT_S", 0.3)
        begun = time.monotonic()
        rig = Rig(path, CAPACITY)
        assert time.monotonic() - begun < 5
        assert rig.catalog.recovered.reason == "corrupt"
        rig.close()


def test_no_space_for_the_copy_is_a_config_error_and_loses_nothing(
    store: tuple[Path, dict[int, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = damaged(store, tmp_path)
    (path / "clean").unlink()
    program = tmp_path / "full.sh"
    program.write_text("#!/bin/sh\nexit 4\n")
    program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        with pytest.raises(ConfigError, match="bytes"):
            Rig(path, CAPACITY)
    assert open_and_compare(path, store[1]) == len(store[1])


@pytest.mark.parametrize(
    "script",
    ["#!/bin/sh\necho no such module >&2; exit 1\n", None, "#!/bin/sh\necho ready\nkill -KILL $$\n"],
    ids=["cannot load", "missing", "killed from outside"],
)
def test_a_check_that_cannot_run_is_a_config_error_and_loses_nothing(
    store: tuple[Path, dict[int, int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    path = damaged(store, tmp_path)
    (path / "clean").unlink()
    program = tmp_path / "python"
    if script is not None:
        program.write_text(script)
        program.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(program))
        with pytest.raises(ConfigError, match="catalog_copy"):
            Rig(path, CAPACITY)
    assert open_and_compare(path, store[1]) == len(store[1])


def test_the_copy_ends_itself_when_its_starter_is_gone(
    store: tuple[Path, dict[int, int], Path], tmp_path: Path
) -> None:
    source = store[0] / "catalog" / "data.mdb"
    with pytest.raises(DamagedCatalogError, match="-14"):
        # the child's own timer is what ends it: the parent's is far away
        checked_copy_with_child_limit(source, tmp_path / "x.mdb", 1e-6)
    assert checked_copy(source, tmp_path / "y.mdb")["bad"] == 0


def checked_copy_with_child_limit(source: Path, target: Path, limit_s: float) -> None:
    command = [sys.executable, "-m", "tiercache.catalog_copy", str(source), str(target), str(limit_s)]
    done = subprocess.run(command, timeout=30, check=False)
    if done.returncode:
        raise DamagedCatalogError(str(done.returncode))


def test_leftovers_are_swept(store: tuple[Path, dict[int, int], Path], tmp_path: Path) -> None:
    path = damaged(store, tmp_path)
    (path / "catalog.new-dead").mkdir()
    (path / "catalog.new-dead" / "data.mdb").write_bytes(b"x")
    (path / "epoch.tmp").write_bytes(b"x")
    (path / "mine.tmp").write_bytes(b"not the cache's")
    assert open_and_compare(path, store[1]) == len(store[1])
    assert {file.name for file in path.iterdir()} == {
        *("lock", "STORE", "epoch", "clean", "catalog", "slots-00.dat", "mine.tmp")
    }


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from catalog_rig import Rig, slots
from pathlib import Path
rig = Rig(Path(sys.argv[1]), 64)
step = 0
while True:
    step += 1
    where = [(step * 5 + i) % 60 for i in range(4)]
    rig.catalog.forget(slots(*where))
    idents = rig.write(where, tag=step)
    rig.commit()
    print(step, *zip(where, idents.tolist()), flush=True, sep=";")
"""


def test_kill_at_any_time_keeps_what_was_committed(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    for round_ in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        lines = []
        for line in child.stdout:
            lines.append(line)
            if len(lines) == 20 + 13 * round_:
                child.send_signal(signal.SIGKILL)
        child.wait(10)
        child.stdout.close()
        committed: dict[int, int] = {}
        for line in lines:
            step, *pairs = line.strip().split(";")
            committed.update(eval(pair) for pair in pairs)
        next_step = int(step) + 1
        doubtful = {(next_step * 5 + i) % 60 for i in range(4)}
        rig = Rig(path, 64)
        found = rig.recovered()
        right = dict(zip(rig.catalog.recovered.slots.tolist(), rig.readable().tolist(), strict=True))
        assert rig.catalog.recovered.reason == ""
        for slot, ident in committed.items():
            if slot not in doubtful:
                assert found.get(slot) == ident and right[slot]
        rig.close()


class TestPowerCut:
    """Unsynced payload is kept, lost or torn; what a commit claimed is right all the same."""

    @pytest.mark.parametrize("seed", range(6))
    def test_claimed_is_readable(self, tmp_path: Path, seed: int) -> None:
        assert self.run(tmp_path, seed, honest=True) == 0

    def test_the_test_can_fail(self, tmp_path: Path) -> None:
        assert sum(self.run(tmp_path / str(seed), seed, honest=False) for seed in range(6)) > 0

    def run(self, tmp_path: Path, seed: int, honest: bool) -> int:
        """Blocks that were recovered, were not being overwritten, and are not readable."""
        from power_cut import PowerCutFiles

        rng = np.random.default_rng(seed)
        files = PowerCutFiles()
        rig = Rig(tmp_path / "kv", 16, ops=files)
        held: list[list[int]] = []
        touched: set[int] = set()
        for _ in range(int(rng.integers(5, 25))):
            free = [slot for slot in range(16) if not any(slot in chain for chain in held)]
            if len(free) >= 3:
                chain = rng.permutation(free)[:3].tolist()
                rig.write(chain, tag=int(rng.integers(1 << 30)))
                held.append(chain)
                touched.update(chain)
            elif held:
                rig.catalog.forget(slots(*held.pop(int(rng.integers(len(held))))))
            if rng.random() < 0.4:
                rig.catalog.commit(rig.tier.sync if honest else (lambda: True))
                touched.clear()
        copied = rig.crash_copy(tmp_path / "cut")
        files.cut(copied, rng)
        rig.close(clean=False)
        again = Rig(copied, 16)
        again.recovered()
        wrong = ~again.readable() & ~np.isin(again.catalog.recovered.slots, list(touched))
        again.close()
        return int(np.count_nonzero(wrong))
