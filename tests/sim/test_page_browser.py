"""The page in a real browser: chromium without a window, in a profile of its own and without a network."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from page_kit import facts_of, options_for

from tiercache.sim.page.write import page_html

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WITHIN_S = 60
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--hide-scrollbars",
    "--enable-logging=stderr",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]
DESKTOP, PHONE = 1100, 360
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")

WATCH = """
addEventListener("load", () => {
  const frame = document.querySelector("iframe"), inside = frame.contentDocument;
  const seen = (name) => [...inside.querySelectorAll(name)];
  document.querySelector("pre").textContent = JSON.stringify({
    title: inside.title,
    headings: seen("h1, h2").map((each) => each.textContent),
    tables: seen("table").map((each) => each.rows.length),
    pictures: seen("img").map((each) => [each.naturalWidth, each.clientWidth, each.clientHeight, each.alt.length]),
    fetched: frame.contentWindow.performance.getEntriesByType("resource").map((each) => each.name),
    wide: inside.documentElement.scrollWidth,
    high: inside.documentElement.scrollHeight,
    smallest: Math.min(...seen("p, td, li").map((each) => parseFloat(getComputedStyle(each).fontSize))),
    dangling: seen("nav a").filter((each) => !inside.querySelector(each.getAttribute("href"))).length,
  });
});
"""


def browse(folder: Path, *arguments: str) -> tuple[str, str]:
    """Run the browser; its stdout, and the lines in which the page complains."""
    assert CHROMIUM is not None
    command = [
        CHROMIUM,
        *FLAGS,
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'profile'}",
        *arguments,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = process.communicate(timeout=WITHIN_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # it and the processes that it started
            process.communicate()
    assert process.returncode == 0, err.decode(errors="replace")
    complaints = [line for line in err.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return out.decode(), "\n".join(complaints)


def look(folder: Path, page: str, width: int) -> dict[str, Any]:
    """What a browser makes of a page in a window of `width` pixels: a frame, for a window is never so narrow."""
    frame = f'<iframe srcdoc="{html.escape(page)}" width="{width}" height="800" style="border:0"></iframe>'
    outer = folder / "outer.html"
    outer.write_text(f"<!DOCTYPE html><meta charset=utf-8><pre></pre>{frame}<script>{WATCH}</script>", encoding="utf-8")
    dom, complaints = browse(folder, "--dump-dom", outer.as_uri())
    found = re.search(r"<pre>(.*?)</pre>", dom, re.DOTALL)
    assert found is not None
    seen: dict[str, Any] = json.loads(html.unescape(found[1]))
    seen["complaints"] = complaints
    return seen


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_html(facts_of(options_for(tmp_path_factory.mktemp("page"))))


@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_the_page_opens(page: str, tmp_path: Path, width: int) -> None:
    """All of it is there, it fetches nothing, complains of nothing, and is as wide as the window."""
    seen = look(tmp_path, page, width)
    assert seen["complaints"] == ""
    assert seen["title"] == seen["headings"][0] == "Sizing a KV cache: a <b> & 'c'.jsonl"
    assert len(seen["headings"]) == 13 and seen["dangling"] == 0
    assert len(seen["tables"]) >= 15 and min(seen["tables"]) >= 2
    assert len(seen["pictures"]) == 9
    for natural, wide, high, described in seen["pictures"]:
        assert natural > 0 and described > 40
        assert 0.8 * min(width, 544) - 40 < wide <= width and high > 60
    assert [name for name in seen["fetched"] if not name.startswith("data:")] == []
    assert seen["wide"] == width
    assert seen["smallest"] >= 14


def test_what_is_wrong_would_be_seen(tmp_path: Path) -> None:
    """The same look at a page with a broken picture, a fetch, a script error, and a table that is too wide."""
    wrong = (
        "<!DOCTYPE html><title>t</title><h1>t</h1><p style='font-size:9px'>x</p><nav><a href='#no'>x</a></nav>"
        "<img alt='' src='data:image/svg+xml;base64,AAAA'><img alt='' src='http://example.com/x.png'>"
        "<table style='width:900px'><tr><td>x</td></tr></table><script>nothing_there()</script>"
    )
    seen = look(tmp_path, wrong, PHONE)
    assert "nothing_there" in seen["complaints"]
    assert [each[0] for each in seen["pictures"]] == [0, 0]
    assert "http://example.com/x.png" in seen["fetched"]
    assert seen["wide"] > PHONE and seen["dangling"] == 1 and seen["smallest"] == 9


def test_the_screenshot_is_not_blank(page: str, tmp_path: Path) -> None:
    """Dark on white, in every fifth of the first 4,000 lines."""
    file, shot = tmp_path / "page.html", tmp_path / "page.png"
    file.write_text(page, encoding="utf-8")
    _, complaints = browse(tmp_path, f"--screenshot={shot}", "--window-size=1100,4000", file.as_uri())
    assert complaints == ""
    pixels = imread(shot)[:, :, :3]
    assert pixels.shape == (4000, 1100, 3)
    grey = pixels.mean(axis=2)
    assert (grey > 0.98).mean() > 0.6
    for fifth in range(5):
        dark = (grey[800 * fifth : 800 * (fifth + 1)] < 0.4).mean()
        assert 0.002 < dark < 0.3
