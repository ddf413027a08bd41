"""HTML, small: every text is escaped, what is markup already is of the type `Markup`."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

__all__ = ["Markup", "document", "join", "paragraph", "picture", "section", "table", "tag"]

_CSS = """
:root { color-scheme: light; }
body { background: #fff; color: #111; font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 50rem;
  padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; overflow-wrap: anywhere; }
h2 { border-top: 1px solid #bbb; font-size: 1.25rem; margin-top: 2.2rem; padding-top: 1rem; }
h3 { font-size: 1.05rem; }
.answer { border-left: .3rem solid #111; font-size: 1.1rem; margin: 1rem 0; padding: .1rem 0 .1rem 1rem; }
.warning { border: 2px solid #111; padding: .2rem 1rem; }
figure { margin: 1rem 0; }
figure img { display: block; height: auto; max-width: 100%; width: 34rem; }
figcaption, caption, .note { color: #333; font-size: .9rem; }
caption { padding: .3rem 0; text-align: left; }
.scroll { margin: 1rem 0; overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: .25rem .6rem; text-align: right; vertical-align: top; }
th:first-child, td:first-child { padding-left: 0; text-align: left; }
thead th { border-bottom: 2px solid #111; }
tr.own > * { border-bottom: 2px solid #111; border-top: 2px solid #111; font-weight: bold; }
td { white-space: nowrap; }
tbody th { min-width: 6.5rem; }
td.own { font-weight: bold; outline: 2px solid #111; }
code { font-size: .9em; overflow-wrap: anywhere; }
summary { cursor: pointer; }
a { color: #0b3c6f; }
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  nav { display: none; }
  .scroll { overflow: visible; }
  details::details-content { content-visibility: visible; height: auto; }
}
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
"""Tells the browser to fetch nothing and to run nothing."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def _safe(part: str) -> Markup:
    return part if isinstance(part, Markup) else Markup(html.escape(part))


def join(parts: Sequence[str], between: str = "") -> Markup:
    """One after the other."""
    return Markup(_safe(between).join(_safe(part) for part in parts))


def tag(name: str, *parts: str, **attributes: str) -> Markup:
    """An element. An attribute's trailing underscore goes, inner ones become hyphens; its value is escaped too."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items())
    return Markup(f"<{name}{given}>{join(parts)}</{name}>")


def paragraph(*parts: str, **attributes: str) -> Markup:
    """A paragraph of texts and markup."""
    return tag("p", *parts, **attributes)


def section(name: str, title: str, *parts: str) -> Markup:
    """A section with a heading that can be linked to as `#name`."""
    heading = tag("h2", title, id=f"{name}-title")
    return Markup(f"\n{tag('section', heading, *parts, id=name, aria_labelledby=f'{name}-title')}\n")


def picture(svg: bytes, alt: str, caption: str) -> Markup:
    """An SVG in the page itself. It is an image, so that the names inside it meet nobody else's."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode('ascii')}"
    image = Markup(f'<img src="{source}" alt="{html.escape(alt)}">')
    return tag("figure", image, tag("figcaption", caption))


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    own: Sequence[int] = (),
    cell: int | None = None,
) -> Markup:
    """A table that scrolls by itself where the screen is narrow. The first cell of a row is its heading.

    own: rows that stand out. cell: where given, only this column of those rows does.
    """
    head = tag("tr", *(tag("th", column, scope="col") for column in columns))
    lines = []
    for number, row in enumerate(rows):
        stands_out = number in own
        cells = [tag("th", row[0], scope="row")]
        for column, value in enumerate(row[1:], 1):
            cells.append(tag("td", value, class_="own") if stands_out and column == cell else tag("td", value))
        lines.append(tag("tr", *cells, class_="own") if stands_out and cell is None else tag("tr", *cells))
    inside = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *lines))
    return tag("div", inside, class_="scroll", role="region", tabindex="0", aria_label=caption)


def document(title: str, parts: Sequence[str]) -> str:
    """The whole page."""
    return "".join(
        (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            f"{tag('title', title)}\n<style>{_CSS}</style>\n</head>\n<body>\n<main>\n",
            join(parts),
            "\n</main>\n</body>\n</html>\n",
        )
    )
