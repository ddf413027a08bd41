"""A catalog damaged in every kind of page, cut at every page, or damaged while it is open: no process dies of it."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from catalog_scripts import Harm
from crash_world import Shape, blocks_of
from lmdb_pages import PAGE, kinds

from tiercache.catalog_rows import used_nbytes
from tiercache.testing.crash import Zygote


class Base:
    """A closed store with every kind of page."""

    def __init__(self, zygote: Zygote, place: Path) -> None:
        self.path, self.truth = place / "kv", place / "truth.npz"
        child = zygote.start("catalog_scripts:build", {"path": str(self.path), "truth": str(self.truth)})
        assert child.wait() == 0, child.error
        (self.blocks,) = child.reports
        self.raw = (self.path / "catalog" / "data.mdb").read_bytes()[: used_nbytes(self.path / "catalog" / "data.mdb")]
        (self.path / "catalog" / "data.mdb").write_bytes(self.raw)  # without what is only reserved: quicker to copy
        self.pages = kinds(self.raw)


@pytest.fixture(scope="module")
def base(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(zygote, tmp_path_factory.mktemp("pages"))


def open_each(zygote: Zygote, base: Base, place: Path, harms: list[Harm]) -> list[dict[str, Any]]:
    """What comes of each of the harms. A child that dies (of SIGBUS, say) shows as its status, and what it was at."""
    argument = {"path": str(base.path), "truth": str(base.truth), "place": str(place), "harms": harms}
    child = zygote.start("catalog_scripts:open_damaged", argument, 100.0)
    status = child.wait(110.0)
    assert status == 0, f"status {status} {child.reports[-1:]} {child.error}"
    found = [facts for facts in child.reports if "harm" in facts]
    assert len(found) == len(harms)
    assert [facts for facts in found if facts["problems"]] == []
    return found


def test_the_store_has_every_kind_of_page(base: Base) -> None:
    assert {kind for kind, pages in base.pages.items() if pages} == {
        *("meta", "old meta", "branch", "leaf", "overflow", "free list", "unused")
    }
    assert base.blocks > 10_000


def harms_of(base: Base, kind: str, rng: random.Random, count: int) -> list[Harm]:
    """Flipped bits: in the header of a page, in its table of nodes, anywhere; pages zeroed, overwritten, exchanged."""
    everywhere = [page for pages in base.pages.values() for page in pages]
    harms: list[Harm] = []
    for number in range(count):
        begin, bit = rng.choice(base.pages[kind]) * PAGE, rng.randrange(8)
        offers: list[Harm] = [
            ["flip", begin + rng.randrange(16), bit],
            ["flip", begin + 16 + rng.randrange(200), bit],
            ["flip", begin + rng.randrange(PAGE), bit],
            ["flip", begin + PAGE - 1 - rng.randrange(200), bit],
            ["zero", begin, PAGE],
            ["noise", begin, PAGE, rng.randrange(1 << 30)],
            ["noise", begin + 16, 64, rng.randrange(1 << 30)],
            ["copy", rng.choice(everywhere) * PAGE, begin, PAGE],
        ]
        harms.append(offers[number % len(offers)])
    return harms


KINDS = ["meta", "old meta", "branch", "leaf", "overflow", "free list", "unused"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_page(zygote: Zygote, base: Base, place: Path, kind: str) -> None:
    found = open_each(zygote, base, place, harms_of(base, kind, random.Random(kind), 8))
    if kind == "unused":
        assert {facts["recovered"] for facts in found} == {base.blocks}
    else:
        assert any(facts["counters"].get("unclean_opens") or facts["cold"] == "corrupt" for facts in found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_damaged_pages(zygote: Zygote, base: Base, place: Path, kind: str) -> None:
    found = open_each(zygote, base, place, harms_of(base, kind, random.Random(kind + "!"), 160))
    left = Counter(facts["recovered"] == base.blocks for facts in found)
    cold = sum(facts["cold"] == "corrupt" for facts in found)
    assert left[True] > 0 or kind in ("branch", "leaf", "overflow"), (left, cold)
    assert left[False] > 0 or kind in ("unused", "old meta", "free list"), (left, cold)


def truncated(zygote: Zygote, base: Base, place: Path, sizes: list[int]) -> None:
    found = open_each(zygote, base, place, [["truncate", size] for size in sizes])
    assert {(facts["cold"], facts["recovered"]) for facts in found} == {("corrupt", 0)}
    assert {facts["counters"]["catalogs_set_aside"] for facts in found} == {1}


def test_a_catalog_cut_at_some_pages_and_beside_them(zygote: Zygote, base: Base, place: Path) -> None:
    last = len(base.raw) // PAGE
    pages = sorted({0, 1, 2, 3, last - 1, *range(0, last, 40)})
    odd = [1, 100, 2 * PAGE + 152, len(base.raw) // 2 + 1000, len(base.raw) - 1]
    truncated(zygote, base, place, [*(page * PAGE for page in pages), *(page * PAGE - 1 for page in pages[1:]), *odd])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_catalog_cut_at_every_page(zygote: Zygote, base: Base, place: Path, part: int) -> None:
    truncated(zygote, base, place, [page * PAGE for page in range(part, len(base.raw) // PAGE, 4)])


def test_a_catalog_that_ended_a_process_is_checked_before_it_is_read_again(
    zygote: Zygote, base: Base, tmp_path: Path
) -> None:
    """It was closed in order, so nobody would check it otherwise, and each start would end like the first."""
    path = shutil.copytree(base.path, tmp_path / "kv")
    child = zygote.start("catalog_scripts:open_at", {"path": str(path)})
    assert (child.wait(), child.reports) == (0, [[base.blocks, {"unclean_opens": 1}]])  # the file was shortened
    child = zygote.start("catalog_scripts:open_at", {"path": str(path)})
    assert (child.wait(), child.reports) == (0, [[base.blocks, {}]])
    child = zygote.start("catalog_scripts:die_reading", {"path": str(path)})
    assert child.wait() == -signal.SIGSEGV
    for counted in ({"unclean_opens": 1}, {}):
        child = zygote.start("catalog_scripts:open_at", {"path": str(path)})
        assert (child.wait(), child.reports) == (0, [[base.blocks, counted]])


@pytest.mark.parametrize("how", ["truncate 0", "truncate 4096", "truncate 12288", "unlink", "remove", "replace"])
def test_damage_to_an_open_catalog(zygote: Zygote, tmp_path: Path, how: str) -> None:
    """No SIGBUS, nothing wrong, counted; what the old file claimed is written anew, and found after a kill."""
    place = tmp_path / "kv"
    child = zygote.start("catalog_scripts:damaged_while_open", {"place": str(place), "how": how})
    assert child.wait() == -signal.SIGKILL, child.error or f"status {child.status}"
    (facts,) = child.reports
    assert facts["check"] == [] and facts["healthy"] and facts["flushes"][1]
    blocks = [blocks_of("0.0.0"), blocks_of("1.0.0")]
    assert facts["loaded"] == blocks
    assert facts["catalog"]["begun_anew"] == 1
    assert facts["counters"] == ({"catalogs_set_aside": 1} if how != "remove" else {})
    child = zygote.start("crash_scripts:verify_damaged", {"place": str(place), "shape": Shape().as_json()})
    assert child.wait() == 0, child.error
    (after,) = child.reports
    assert after["problems"] == [] and after["recovered"] == sum(blocks)
    assert after["lost"] == 0
