"""One process to fork from, for all crash tests, and what they counted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.testing.crash import POINTS, Zygote

_HERE = Path(__file__).parent
_MEMORY = Path("/dev/shm")
_CUTS = pytest.StashKey[Counter[str]]()
_KILLS = pytest.StashKey[Counter[str]]()
_SHOWN = {
    "histories": "histories",
    "sessions": "sessions",
    "cuts": "power cuts",
    "commits": "catalog commits",
    "torn_commits": "cuts within a commit",
    "sectors_lost": "unsynced sectors lost",
    "sectors_kept": "unsynced sectors kept",
    "lengths_lost": "file lengths lost",
    "names_lost": "directories with names lost",
    "opened": "directories opened afterwards",
    "warm": "of them warm",
    "acked": "blocks acknowledged",
    "served": "blocks served",
    "lost": "blocks offered that were a miss",
    "wrong_bytes": "prompts with wrong bytes",
}


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CUTS], config.stash[_KILLS] = Counter(), Counter()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote(["crash_scripts", "catalog_scripts"], [str(_HERE), str(_HERE.parent)]) as process:
        yield process


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """An empty directory, in memory where there is enough: for tests of which nothing need last."""
    if not os.access(_MEMORY, os.W_OK) or shutil.disk_usage(_MEMORY).free < 512 << 20:
        yield tmp_path
        return
    path = Path(tempfile.mkdtemp(dir=_MEMORY))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def power_tally(request: pytest.FixtureRequest) -> Counter[str]:
    """What all power-cut histories of this run counted together."""
    return request.config.stash[_CUTS]


@pytest.fixture
def kill_tally(request: pytest.FixtureRequest) -> Counter[str]:
    """How often a process of this run was killed, by named point, or as "outside" or "afterwards"."""
    return request.config.stash[_KILLS]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    cuts, kills = config.stash.get(_CUTS, Counter()), config.stash.get(_KILLS, Counter())
    if cuts:
        terminalreporter.section("power cuts")
        terminalreporter.write_line(", ".join(f"{cuts[name]} {text}" for name, text in _SHOWN.items()))
    if kills:
        at_points = sum(kills[name] for name in POINTS)
        hit = sum(kills[name] > 0 for name in POINTS)
        terminalreporter.section("kill -9")
        terminalreporter.write_line(
            f"{at_points} at named points ({hit} of {len(POINTS)} points), {kills['outside']} at a random moment, "
            f"{kills['afterwards']} after a promise"
        )
