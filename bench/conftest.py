"""Options and fixtures of `make bench`."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.machine import ROOT, free_nbytes, memory_nbytes
from bench.pairs import Figure, Pairs
from bench.scale import Scale
from bench.session import Session, command_line, headline

collect_ignore = ["peers"]  # run by a target of their own

_SESSION = pytest.StashKey[Session]()
_NEEDS_GIB = {"full": 8, "quick": 4, "smoke": 1}
"""Of disk at the bench directory, and of memory, at the same time."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Also shown by `pytest bench --help`."""
    group = parser.getgroup("tiercache benchmarks")
    group.addoption("--bench-scale", choices=("full", "quick", "smoke"), default="full", help="how much is measured")
    group.addoption("--bench-dir", type=Path, default=ROOT / "build", help="where files go (a folder in it, removed)")
    group.addoption("--bench-trace", type=Path, default=None, help="Mooncake conversation trace (or TIERCACHE_TRACE)")
    group.addoption("--bench-no-results", action="store_true", help="write no results file")
    group.addoption("--bench-strict", action="store_true", help="exit with 1 where a target is not reached")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("TIERCACHE", None)  # the kill switch
    config.option.timeout = config.option.timeout or 900
    if config.option.benchmark_columns is None:
        config.option.benchmark_columns = ["median", "iqr", "min", "max", "rounds"]
    if config.option.collectonly or config.option.help:
        return
    bench_dir = config.option.bench_dir.resolve()
    bench_dir.mkdir(parents=True, exist_ok=True)
    _refuse_too_little(bench_dir, _NEEDS_GIB[config.option.bench_scale])
    partial = bool(config.option.keyword) or any(".py" in each for each in config.args)
    command = command_line([*config.invocation_params.args])
    session = Session(Scale(config.option.bench_scale), bench_dir, command, partial=partial)
    config.stash[_SESSION] = session
    config.add_cleanup(lambda: shutil.rmtree(session.place, ignore_errors=True))
    config.pluginmanager.register(Progress(config, session), "progress")


def _refuse_too_little(bench_dir: Path, gib: int) -> None:
    free, memory = free_nbytes(bench_dir) / 2**30, memory_nbytes("MemAvailable") / 2**30
    if free < gib:
        raise pytest.UsageError(f"{gib} GiB are needed in {bench_dir}, {free:.1f} are free: give another --bench-dir")
    if memory < gib:
        raise pytest.UsageError(
            f"{gib} GiB of memory are needed, {memory:.1f} are available: --bench-scale=quick, smoke"
        )


@pytest.fixture(scope="session")
def session(pytestconfig: pytest.Config) -> Session:
    """The run."""
    return pytestconfig.stash[_SESSION]


@pytest.fixture(scope="session")
def scale(session: Session) -> Scale:
    """How much is measured."""
    return session.scale


@pytest.fixture
def done(session: Session, request: pytest.FixtureRequest) -> Any:
    """Takes a figure: judged, kept, printed."""

    def take(figure: Figure) -> None:
        session.add(figure)
        request.node.user_properties.append(("headline", headline(figure)))

    return take


@pytest.fixture
def pairs(benchmark: Any, done: Any) -> Pairs:
    """Interleaved pairs of one row."""
    return Pairs(benchmark, done)


@pytest.fixture(scope="module")
def place(session: Session, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A folder on the disk that is measured; removed after the module's last test."""
    folder = session.place / request.module.__name__.rpartition(".")[2]
    folder.mkdir()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Progress:
    """Prints what runs and what came out, writes the results at the end."""

    def __init__(self, config: pytest.Config, session: Session) -> None:
        self._config = config
        self._session = session
        self._last = ""

    def say(self, text: str) -> None:
        """A line of its own, at once."""
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(f"[{time.time() - self._session.began:4.0f} s] {text}")
            reporter.flush()

    def pytest_sessionstart(self) -> None:
        load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
        if load > cores / 2:
            self.say(f"load {load:.1f} on {cores} cores: others use this machine, so the figures will be noisy")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        name = nodeid.partition("::")[0]
        if name != self._last:
            self._last = name
            self.say(f"{name} ...")

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """No dots."""
        return ("passed" if report.when == "call" else "", "", "") if report.passed else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, text in report.user_properties if report.when == "call" else ():
            if name == "headline":
                self.say(str(text))
        if report.failed:
            self._session.failed.append(report.nodeid.partition("::")[2])
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            name = report.nodeid.partition("::")[2]
            self._session.skipped[name] = reason.removeprefix("Skipped: ")
            self.say(f"{name}: skipped: {self._session.skipped[name]}")

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if not self._session.figures:
            return
        found = self._session.as_dict()["verdict"]
        self.say(f"reached {found['reached']}, not reached: {', '.join(found['not_reached']) or 'none'}")
        if found["failed"]:
            self.say(f"FAILED, rows missing: {', '.join(found['failed'])}")
        if not self._config.option.bench_no_results:
            self.say(f"results: {self._session.write().relative_to(ROOT)}")
        if self._config.option.bench_strict and found["not_reached"] and exitstatus == 0:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
