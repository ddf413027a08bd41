"""From facts to a file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from tiercache.errors import ConfigError, TierCacheError
from tiercache.sim.page import sections, sections_trace
from tiercache.sim.page.answer import answer
from tiercache.sim.page.facts import Facts
from tiercache.sim.page.markup import Markup, document, paragraph, section, tag

__all__ = ["REPORT_INSTALL", "check_page", "page_html", "write_page"]

REPORT_INSTALL = "pip install 'tiercache[report]'"
_SECTIONS = (
    sections.where_tokens_went,
    sections.capacity,
    sections.sizing,
    sections.prefill,
    sections.over_time,
    sections.writes,
    sections_trace.shared,
    sections_trace.coming_back,
    sections_trace.leaving,
    sections.replayed,
)


def check_page(path: Path) -> None:
    """Raise, before anything takes long, where the page could not be written: ConfigError, TierCacheError."""
    if find_spec("matplotlib") is None:
        raise TierCacheError(f"the page needs matplotlib for its pictures: {REPORT_INSTALL}")
    target = path.resolve()
    if target.exists() and not target.is_file():
        raise ConfigError("--report", str(path), "the name of a file, to be written or replaced")
    if not target.parent.is_dir():
        raise ConfigError("--report", str(path), f"a file in a directory that is there: make {target.parent} first")
    if not os.access(target.parent, os.W_OK):
        raise ConfigError("--report", str(path), f"a file in a directory that you may write to, unlike {target.parent}")


def page_html(facts: Facts) -> str:
    """The whole page; the same facts give the same text. Needs matplotlib."""
    from tiercache.sim.page.pictures import draw_all

    pictures = draw_all(facts)
    title = f"Sizing a KV cache: {facts.report.trace}"
    made = [*(make(facts, pictures) for make in _SECTIONS), _how(facts)]
    links = [tag("li", tag("a", name, href=f"#{anchor}")) for anchor, name in _CONTENTS.items()]
    contents = tag("nav", tag("h2", "Contents", id="contents"), tag("ul", *links), aria_labelledby="contents")
    return document(title, [tag("h1", title), answer(facts), contents, *made])


_CONTENTS = {
    "tokens": "What became of every prompt token",
    "capacity": "Hit ratio over capacity",
    "sizing": "Sizing table",
    "prefill": "Prefill saved",
    "time": "Tiers over time",
    "writes": "Writes to NVMe",
    "shared": "What prompts share",
    "gaps": "When blocks come back",
    "leaving": "Where prompts leave the cached path",
    "replay": "What was replayed",
    "how": "How it was measured",
}


def _how(facts: Facts) -> Markup:
    return section(
        "how",
        "How it was measured",
        paragraph(tag("code", facts.page.command)) if facts.page.command else "",
        paragraph(
            f"tiercache {facts.page.version}. Every figure is counted on the trace by the planner of the cache, "
            f"without payload: "
            "it decides as the cache itself does, and no figure depends on the machine. No requests were left out. A "
            "token is "
            "found when the request's load accepts it; the cold start is included. ",
            "A day is the trace's own time, stretched to 24 hours: another load brings other figures."
            if facts.per_day
            else "",
        ),
    )


def write_page(facts: Facts, path: Path) -> None:
    """Write the page whole or not at all: what is in `path` is replaced at the end. Raises OSError."""
    target = path.resolve()
    text = page_html(facts)
    new = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        new.write_text(text, encoding="utf-8")
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)
