"""A whole cache over a directory that somebody damaged: it opens, works, tells no lie, and counts what it met."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import pytest
import xxhash
from crash_world import STRIDE, UNIVERSE, Op, Shape

from tiercache.catalog_rows import used_nbytes
from tiercache.testing.crash import Zygote

SHAPE = Shape(dram=12, nvme=40, roomy=False)
PAGE = 4096
NOBODY = 65534
Harm = Callable[[Path], Any]


class Base:
    """A closed store, its catalog as it was one session earlier, and what is served of it undamaged."""

    def __init__(self, zygote: Zygote, place: Path) -> None:
        self.path = place / "kv"
        self.older = place / "older.mdb"
        self.other = place / "other.mdb"
        """A catalog of another directory."""
        leaves = [path for path in UNIVERSE if path.count(".") == 2]
        opening: Op = ["open", SHAPE.as_json()]
        first = [opening, *store_each(leaves[:10], 2), ["close"]]
        self.live(zygote, self.path, first)
        shutil.copy(self.path / "catalog" / "data.mdb", self.older)
        self.live(zygote, self.path, [opening, *store_each(leaves[10:], 3), ["close"]])
        self.live(zygote, place / "kv2", first)
        shutil.copy(place / "kv2" / "catalog" / "data.mdb", self.other)
        self.facts = examine(zygote, self.path, place / "unharmed", lambda path: None)
        assert self.facts["cold"] == "" and self.facts["counters"] == {} and self.facts["lost"] == 0
        assert self.facts["recovered"] > 30

    @staticmethod
    def live(zygote: Zygote, path: Path, ops: list[Op]) -> None:
        child = zygote.start("crash_scripts:run", {"place": str(path), "ops": ops, "results": [], "inside": True})
        assert child.wait() == 0, child.error


def store_each(paths: list[str], flush_every: int) -> list[Op]:
    ops: list[Op] = []
    for i, path in enumerate(paths):
        ops.append(["store", path])
        if i % flush_every == flush_every - 1:
            ops.append(["flush"])
    return ops


@pytest.fixture(scope="module")
def base(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(zygote, tmp_path_factory.mktemp("base"))


def examine(
    zygote: Zygote, source: Path, place: Path, harm: Harm, keep: bool = False, **options: Any
) -> dict[str, Any]:
    """Open a copy of the store after some harm; what came of it, and nothing of that is wrong."""
    shutil.copytree(source, place)
    harm(place)
    child = zygote.start("crash_scripts:verify_damaged", {"place": str(place), "shape": SHAPE.as_json(), **options})
    assert child.wait() == 0, child.error or f"status {child.status}\n{zygote.log()}"
    (facts,) = child.reports
    assert facts["problems"] == [], zygote.log()[-2000:]
    if not keep:
        shutil.rmtree(place)
    return dict(facts)


def catalog(path: Path) -> Path:
    return path / "catalog" / "data.mdb"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int) -> None:
    with path.open("rb") as file:
        file.seek(offset)
        value = file.read(1)[0]
    overwrite(path, offset, bytes([value ^ 1 << bit]))


# --- the catalog -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 100, PAGE - 1, PAGE, 2 * PAGE, 3 * PAGE, "half", "nearly all"])
def test_a_truncated_catalog_is_set_aside(zygote: Zygote, base: Base, tmp_path: Path, size: int | str) -> None:
    used = used_nbytes(catalog(base.path))
    nbytes = {"half": used // 2, "nearly all": used - 1}.get(size, size)  # type: ignore[call-overload]
    facts = examine(zygote, base.path, tmp_path / "kv", lambda path: os.truncate(catalog(path), nbytes))
    assert (facts["cold"], facts["recovered"]) == ("corrupt", 0)
    assert facts["counters"]["catalogs_set_aside"] == 1


def _not_ours(path: Path) -> None:
    catalog(path).unlink()
    lmdb.open(str(catalog(path)), subdir=False, lock=False).close()


def _promising_too_much(path: Path) -> None:
    for page in (0, PAGE):
        overwrite(catalog(path), page + 136, (1 << 30).to_bytes(8, "little"))


@pytest.mark.parametrize(
    "harm",
    [
        lambda path: catalog(path).write_bytes(random.Random(1).randbytes(50_000)),
        lambda path: catalog(path).write_bytes(bytes(1 << 20)),
        lambda path: catalog(path).write_text("this is no catalog\n" * 1000),
        lambda path: overwrite(catalog(path), 0, bytes(2 * PAGE)),
        lambda path: overwrite(catalog(path), 2 * PAGE, random.Random(2).randbytes(used_nbytes(catalog(path)))),
        _not_ours,
        _promising_too_much,
    ],
    ids=["random bytes", "zeros", "text", "no meta pages", "meta pages only", "another program's", "too much promised"],
)
def test_garbage_is_set_aside(zygote: Zygote, base: Base, tmp_path: Path, harm: Harm) -> None:
    facts = examine(zygote, base.path, tmp_path / "kv", harm)
    assert (facts["cold"], facts["recovered"]) == ("corrupt", 0)
    assert facts["counters"]["catalogs_set_aside"] == 1


def flip_somewhere(zygote: Zygote, base: Base, place: Path, seed: int) -> int:
    """Flip one bit of what is used of the catalog, every other time where LMDB keeps its structure; blocks left."""
    rng = random.Random(seed)
    used = used_nbytes(catalog(base.path))
    offset = rng.randrange(used) if seed % 2 else rng.randrange(used // PAGE) * PAGE + rng.randrange(64)
    facts = examine(zygote, base.path, place, lambda path: flip(catalog(path), offset, rng.randrange(8)))
    counters = facts["counters"]
    assert counters["unclean_opens"] + counters.get("catalogs_set_aside", 0) >= 1
    if facts["recovered"] < base.facts["recovered"]:
        assert counters.get("bad_records") or counters.get("catalogs_set_aside")
    return int(facts["recovered"])


def test_flipped_bits(zygote: Zygote, base: Base, tmp_path: Path) -> None:
    left = [flip_somewhere(zygote, base, tmp_path / str(seed), seed) for seed in range(10)]
    assert max(left) > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_flipped_bits(zygote: Zygote, base: Base, tmp_path: Path) -> None:
    left = [flip_somewhere(zygote, base, tmp_path / str(seed), seed) for seed in range(100, 400)]
    assert 0 in left and base.facts["recovered"] in left


@pytest.mark.parametrize("with_marker", [True, False])
def test_an_older_catalog_gives_no_block_that_was_overwritten(
    zygote: Zygote, base: Base, tmp_path: Path, with_marker: bool
) -> None:
    def harm(path: Path) -> None:
        shutil.copy(base.older, catalog(path))
        if not with_marker:
            (path / "clean").unlink()

    facts = examine(zygote, base.path, tmp_path / "kv", harm)
    assert facts["cold"] == "" and facts["counters"] == {"unclean_opens": 1}
    assert facts["recovered"] > 0 and facts["lost"] > 0  # found, not believed


def test_an_older_catalog_from_before_an_epoch_is_not_used(zygote: Zygote, base: Base, tmp_path: Path) -> None:
    def harm(path: Path) -> None:
        base.live(zygote, path, [["open", SHAPE.as_json()], ["bump", "weights-9"], ["store", "0.0.0"], ["close"]])
        shutil.copy(base.older, catalog(path))

    facts = examine(zygote, base.path, tmp_path / "kv", harm)
    assert (facts["cold"], facts["recovered"]) == ("epoch", 0)


def _with_manifest(value: bytes, framed: bool) -> Harm:
    """Another record in the place of the manifest, its checksum right or wrong."""

    def harm(path: Path) -> None:
        with lmdb.open(str(catalog(path)), subdir=False, lock=False, max_dbs=3, map_size=64 << 20) as env:
            db = env.open_db(b"manifest", create=False)
            with env.begin(write=True) as txn:
                txn.put(b"manifest", (xxhash.xxh3_64_digest(value) if framed else bytes(8)) + value, db=db)

    return harm


@pytest.mark.parametrize("value", [b"", b"\xff\xfe nonsense", b"[]", b'{"format": 2}', b'{"format": 2, "epoch": 5}'])
@pytest.mark.parametrize("framed", [True, False])
def test_a_manifest_of_nonsense_is_set_aside(
    zygote: Zygote, base: Base, tmp_path: Path, value: bytes, framed: bool
) -> None:
    facts = examine(zygote, base.path, tmp_path / "kv", _with_manifest(value, framed))
    assert (facts["cold"], facts["recovered"]) == ("corrupt", 0)
    assert facts["counters"] == {"unclean_opens": 1, "catalogs_set_aside": 1}


# --- the small files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "cold"),
    [
        (lambda path: (path / "STORE").write_text('{"format": 2, "store_id": "%s"}' % ("ab" * 16)), "store"),
        (lambda path: (path / "STORE").write_bytes(b"\0\xff{"), "store"),
        (lambda path: (path / "STORE").write_bytes(b""), "store"),
        (lambda path: (path / "STORE").unlink(), "store"),
        (lambda path: (path / "epoch").write_text("ab" * 16), "epoch"),
        (lambda path: (path / "epoch").write_bytes(b"\xff\0 no epoch"), "epoch"),
        (lambda path: (path / "epoch").write_bytes(b""), "epoch"),
        (lambda path: (path / "epoch").unlink(), "epoch"),
        (lambda path: shutil.rmtree(path / "catalog"), "new"),
        (lambda path: catalog(path).unlink(), "new"),
    ],
    ids=[
        *("other store", "garbage in STORE", "empty STORE", "no STORE", "other epoch", "garbage in epoch"),
        *("empty epoch", "no epoch", "no catalog directory", "no catalog"),
    ],
)
def test_what_does_not_belong_together_starts_cold(
    zygote: Zygote, base: Base, tmp_path: Path, harm: Harm, cold: str
) -> None:
    facts = examine(zygote, base.path, tmp_path / "kv", harm)
    assert (facts["cold"], facts["recovered"], facts["served"]) == (cold, 0, 0)


def test_the_catalog_of_another_directory_starts_cold(zygote: Zygote, base: Base, tmp_path: Path) -> None:
    facts = examine(zygote, base.path, tmp_path / "kv", lambda path: shutil.copy(base.other, catalog(path)))
    assert (facts["cold"], facts["recovered"]) == ("store", 0)


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff\xfe", b"[1, 2]", None], ids=str)
def test_a_marker_that_does_not_hold_costs_a_check_only(
    zygote: Zygote, base: Base, tmp_path: Path, text: bytes | None
) -> None:
    def harm(path: Path) -> None:
        (path / "clean").write_bytes(text) if text is not None else (path / "clean").unlink()

    facts = examine(zygote, base.path, tmp_path / "kv", harm)
    assert facts["counters"] == {"unclean_opens": 1} and facts["cold"] == ""
    assert (facts["recovered"], facts["lost"]) == (base.facts["recovered"], 0)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _link_to(target: str) -> Harm:
    return lambda path: path.symlink_to(target)


STRANGE: dict[str, Harm] = {
    "directory": lambda path: path.mkdir(),
    "fifo": lambda path: os.mkfifo(path),
    "dangling": _link_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
    "endless": _link_to("/dev/zero"),
    "garbage": lambda path: path.write_bytes(random.Random(5).randbytes(5000)),
}
CORRUPT, REFUSED = "corrupt", "refused"
STRANGE_PLACES = {
    "catalog/data.mdb": {**dict.fromkeys(STRANGE, CORRUPT), "dangling": "new", "loop": "new"},
    "catalog": {**dict.fromkeys(STRANGE, CORRUPT), "directory": "new"},
    "slots-00.dat": {**dict.fromkeys(STRANGE, REFUSED), "dangling": "", "garbage": ""},
    "epoch": {**dict.fromkeys(STRANGE, "epoch"), "directory": REFUSED, "loop": REFUSED},
    "STORE": {**dict.fromkeys(STRANGE, "store"), "directory": REFUSED, "loop": REFUSED},
    "clean": {**dict.fromkeys(STRANGE, ""), "directory": REFUSED},
    "lock": {**dict.fromkeys(STRANGE, REFUSED), "dangling": "", "garbage": ""},
}
"""What comes of each: the reason of a cold start, "" for a warm one, or a ConfigError that names the directory."""


@pytest.mark.parametrize("name", STRANGE_PLACES)
@pytest.mark.parametrize("kind", STRANGE)
def test_something_else_in_a_file_s_place_never_hangs_or_kills(
    zygote: Zygote, base: Base, tmp_path: Path, name: str, kind: str
) -> None:
    def harm(path: Path) -> None:
        _remove(path / name)
        STRANGE[kind](path / name)

    facts = examine(zygote, base.path, tmp_path / "kv", harm)
    if "refused" in facts:
        assert STRANGE_PLACES[name][kind] == REFUSED and str(tmp_path / "kv") in facts["refused"]
        return
    assert facts["cold"] == STRANGE_PLACES[name][kind]
    assert facts["counters"].get("catalogs_set_aside", 0) == (facts["cold"] == CORRUPT)
    assert (facts["recovered"] > 0) == (facts["cold"] == "")


@pytest.mark.parametrize(
    "name", ["catalog/data.mdb", "catalog", "slots-00.dat", "epoch", "STORE", "clean", "lock", "."]
)
def test_what_may_not_be_read_is_refused_and_lost_by_nobody(zygote: Zygote, base: Base, name: str) -> None:
    """As a user who is not root: to root nothing is forbidden. Only the marker may be done without."""
    is_root = os.getuid() == 0
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch) / "kv"

        def harm(path: Path) -> None:
            if is_root:
                Path(scratch).chmod(0o755)
                for each in [path, *path.rglob("*")]:
                    os.chown(each, NOBODY, NOBODY)
            (path / name).chmod(0)

        facts = examine(zygote, base.path, place, harm, keep=True, **({"uid": NOBODY} if is_root else {}))
        if name == "clean":
            assert facts["cold"] == "" and facts["recovered"] == base.facts["recovered"]
        else:
            assert str(place) in facts["refused"]
            (place / name).chmod(0o700)
            back = examine(zygote, place, Path(scratch) / "again", lambda path: None)
            assert back["recovered"] == base.facts["recovered"]


# --- the payload -------------------------------------------------------------------------------------------------


def _swapped(path: Path) -> None:
    data = (path / "slots-00.dat").read_bytes()
    slots = [data[at : at + STRIDE] for at in range(0, len(data), STRIDE)]
    random.Random(3).shuffle(slots)
    (path / "slots-00.dat").write_bytes(b"".join(slots))


def _flipped(path: Path) -> None:
    """A bit in every slot's first page; padding would not matter."""
    for slot in range(SHAPE.nvme):
        flip(path / "slots-00.dat", slot * STRIDE + 37 * slot % PAGE, slot % 8)


@pytest.mark.parametrize(
    ("harm", "most"),
    [
        (lambda path: os.truncate(path / "slots-00.dat", SHAPE.nvme * STRIDE // 2 + 1000), 0.9),
        (lambda path: os.truncate(path / "slots-00.dat", 0), 0.0),
        (lambda path: (path / "slots-00.dat").unlink(), 0.0),
        (_swapped, 0.3),
        (_flipped, 0.0),
    ],
    ids=["truncated", "empty", "missing", "swapped", "flipped"],
)
def test_damaged_payload_is_a_miss(zygote: Zygote, base: Base, tmp_path: Path, harm: Harm, most: float) -> None:
    """`most`: of what was served before."""
    facts = examine(zygote, base.path, tmp_path / "kv", harm)
    assert facts["cold"] == "" and facts["recovered"] == base.facts["recovered"]
    assert facts["lost"] > 0 and facts["served"] <= most * base.facts["served"]
