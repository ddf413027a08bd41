"""The page as text: what it says, that nothing of the data is markup, and how it is written."""

from __future__ import annotations

import html
import os
import re
from collections import defaultdict
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from page_kit import COMMAND, facts_of, options_for, trace_file

from tiercache.errors import ConfigError, TierCacheError
from tiercache.sim.options import Share
from tiercache.sim.page import figures, pictures, write
from tiercache.sim.page.answer import drive_writes_per_day, saved_gpu_hours, writes_per_day
from tiercache.sim.page.facts import Facts, PageOptions
from tiercache.sim.page.markup import Markup, document, paragraph, table, tag
from tiercache.sim.page.write import check_page, page_html, write_page
from tiercache.sim.prefill import PrefillCost
from tiercache.sim.report import PhaseReport

VOID = {"meta", "img", "br", "link"}


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Facts:
    return facts_of(options_for(tmp_path_factory.mktemp("page")))


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch, facts: Facts) -> None:
    """For tests of the words alone."""
    monkeypatch.setattr(pictures, "draw_all", lambda facts: defaultdict(bytes))


@pytest.fixture(scope="module")
def page(facts: Facts) -> str:
    return page_html(facts)


class Outline(HTMLParser):
    """Checks that elements close in order, and collects what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, name: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).replace("\u00a0", " ").split())

    def all(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for each, attributes in self.elements if each == name]


def test_the_page_holds_together(page: str) -> None:
    outline = Outline(page)
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [str(attributes["href"]) for attributes in outline.all("a")]
    assert len(links) == 11 and all(link[1:] in ids for link in links)
    assert [each for each in ("h1", "title", "main", "nav") if len(outline.all(each)) != 1] == []
    assert len(outline.all("section")) == len(links)
    pictures = outline.all("img")
    assert len(pictures) == 9
    assert all(len(str(each["alt"])) > 40 and str(each["src"]).startswith("data:image/svg+xml") for each in pictures)
    assert len(outline.all("table")) == len(outline.all("caption")) >= 15
    assert all(each["scope"] in ("col", "row") for each in outline.all("th"))


def test_it_needs_nothing_else(page: str) -> None:
    outline = Outline(page)
    assert not [name for name, _ in outline.elements if name in ("script", "link", "iframe", "object", "video")]
    for _, attributes in outline.elements:
        for name in ("src", "href", "srcset", "action"):
            assert str(attributes.get(name, "#")).startswith(("#", "data:"))
    assert "url(" not in page and "@import" not in page
    assert "default-src 'none'" in page


def test_the_answer_comes_first(facts: Facts, page: str) -> None:
    words = Outline(page).words
    start = words.index("With DRAM")
    assert start < words.index("Contents") < words.index("Hit ratio over capacity")
    share = 100 * facts.report.hit_tokens / facts.prompt_tokens
    assert f"{share:.1f} % of the {facts.prompt_tokens:,} prompt tokens need no prefill" in words
    assert "Twice the NVMe" in words and "twice the DRAM" in words and "GPU-hours a day" in words
    assert "Sizes are not yet yours" in words and "Model and GPU are assumed: 8 B parameters on one H100" in words
    assert "tiercache 1.2.3" in words


def test_text_from_the_data_is_escaped(page: str) -> None:
    assert "a <b>" not in page
    assert html.escape("a <b> & 'c'.jsonl") in page
    assert html.escape(COMMAND) in page


def test_the_same_facts_give_the_same_bytes(facts: Facts, page: str) -> None:
    assert page_html(facts) == page
    assert not re.search(r"20[0-9]{2}-[0-9]{2}-[0-9]{2}", page)


@pytest.mark.usefixtures("no_pictures")
def test_the_given_model_is_in_the_formula(facts: Facts) -> None:
    given = PageOptions(PrefillCost(70e9, "h200", 989.0, 0.4), True, True, COMMAND, "1.2.3")
    words = Outline(page_html(replace(facts, page=given))).words
    assert "989e12 * 0.4 / (2 * 70e9) = 2,826 prompt tokens a second" in words
    assert "assumed" not in words and "not yet yours" not in words
    rate = 989e12 * 0.4 / 140e9
    hours = facts.report.hit_tokens / rate / 3600 * 86400 / facts.span_s
    assert saved_gpu_hours(replace(facts, page=given), facts.report.hit_tokens) == pytest.approx(hours)
    measured = replace(given, prefill=PrefillCost(measured_tokens_per_s=5000.0))
    assert "5,000 prompt tokens a second on one GPU" in Outline(page_html(replace(facts, page=measured))).words


def test_writes_a_day(facts: Facts) -> None:
    daily = writes_per_day(facts, 10)
    assert daily == pytest.approx(10 * (1 << 20) * 86400 / facts.span_s)
    drives = drive_writes_per_day(facts, 10, 5)
    assert drives == pytest.approx(2 * 86400 / facts.span_s)
    assert drive_writes_per_day(facts, 10, None) is None


def test_without_nvme(tmp_path: Path) -> None:
    facts = facts_of(replace(options_for(tmp_path), nvme=None))
    words = Outline(page_html(facts)).words
    assert "There is no NVMe tier in this replay" in words
    assert "an NVMe tier of" in words and "Twice the DRAM" in words and "found on NVMe" not in words


def test_without_times_nothing_is_said_of_a_day(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t.jsonl", [(5, [number % 7, 100 + number % 7]) for number in range(40)])
    facts = facts_of(replace(options_for(tmp_path), trace=str(path)))
    words = Outline(page_html(facts)).words
    assert "the trace has no times" in words and "a day" not in words.replace("divided", "").split("DWPD:")[0]


@pytest.mark.usefixtures("no_pictures")
def test_a_trace_in_which_nothing_comes_again(tmp_path: Path) -> None:
    path = trace_file(tmp_path / "t.jsonl", [(number, [number]) for number in range(20)])
    words = Outline(page_html(facts_of(replace(options_for(tmp_path), trace=str(path))))).words
    assert "0.0 % of the 320 prompt tokens need no prefill" in words
    assert "No block is used twice." in words


@pytest.mark.usefixtures("no_pictures")
def test_room_for_everything_is_said(tmp_path: Path) -> None:
    facts = facts_of(replace(options_for(tmp_path), dram=Share(2.0)))
    assert "has room in it: nothing larger finds more" in Outline(page_html(facts)).words


@pytest.mark.usefixtures("no_pictures")
def test_a_failed_or_killed_replay_is_said(facts: Facts) -> None:
    killed = replace(
        facts.report,
        data=True,
        wrong_bytes=5,
        verified_blocks=9,
        skipped_lines=3,
        before_kill=PhaseReport(4, 400, 100, {"dram": 90, "nvme": 10}),
        after_kill=PhaseReport(6, 600, 300, {"dram": 210, "nvme": 90}),
        recovered_blocks=1,
    )
    words = Outline(page_html(replace(facts, report=killed))).words
    assert words.index("The replay failed: 5 wrong bytes were served.") < words.index("With DRAM")
    assert "25.0 % before, 50.0 % after; the figures on this page are without the kill" in words
    assert "5 in 9 loaded blocks, all compared" in words and "malformed lines left out 3" in words


def test_markup_escapes_what_is_no_markup() -> None:
    assert tag("p", "<&\"'>", Markup("<b>"), title='"<') == ('<p title="&quot;&lt;">&lt;&amp;&quot;&#x27;&gt;<b></p>')
    assert "<td>&lt;x&gt;</td>" in table("c", ["a", "b"], [["<r>", "<x>"]])
    assert document("<t>", [paragraph("<p>")]).count("<p>") == 1


@pytest.mark.parametrize(
    ("text", "is_"),
    [
        (figures.percent(0.2896), "29.0 %"),
        (figures.percent(0.00123), "0.12 %"),
        (figures.percent(0), "0.0 %"),
        (figures.percent(1e-9), "under 0.01 %"),
        (figures.tokens(9_999), "9,999"),
        (figures.tokens(40_648_900), "40.6 M"),
        (figures.size(5 << 30), "5 GiB"),
        (figures.size(1000), "1,000 B"),
        (figures.amount(13.7e9), "13.7 GB"),
        (figures.amount(999), "999 B"),
        (figures.rate(30906.25), "30,906"),
        (figures.rate(0.1234), "0.123"),
        (figures.duration(0), "0 s"),
        (figures.duration(0.02), "20 ms"),
        (figures.duration(48), "48 s"),
        (figures.duration(324), "5.4 min"),
        (figures.duration(86400), "24 h"),
        (figures.duration(3 * 86400), "3 days"),
        (figures.duration(1e-6), "under 1 ms"),
    ],
)
def test_figures_as_text(text: str, is_: str) -> None:
    assert text.replace("\u00a0", " ") == is_


@pytest.mark.usefixtures("no_pictures")
def test_the_file_is_replaced_whole(facts: Facts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.html"
    path.write_text("before")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", _no_room)
        with pytest.raises(OSError, match="No space"):
            write_page(facts, path)
    assert (path.read_text(), [each.name for each in tmp_path.iterdir()]) == ("before", ["out.html"])
    link = tmp_path / "link.html"
    link.symlink_to(path)
    write_page(facts, link)
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert link.is_symlink() and sorted(each.name for each in tmp_path.iterdir()) == ["link.html", "out.html"]


def _no_room(self: Path, target: Path) -> Path:
    raise OSError(28, "No space left on device")


def test_what_could_not_be_written_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_page(tmp_path / "new.html")
    for path, says in (
        (tmp_path / "no" / "new.html", "make .*no first"),
        (tmp_path, "the name of a file"),
        (Path("/dev/null"), "the name of a file"),
    ):
        with pytest.raises(ConfigError, match=says):
            check_page(path)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="may write"):
        check_page(tmp_path / "new.html")
    monkeypatch.setattr(write, "find_spec", lambda name: None)
    with pytest.raises(TierCacheError, match=r"pip install 'tiercache\[report\]'"):
        check_page(tmp_path / "new.html")
