"""Replay: a trace through the cache, and a report of what came of it."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiercache.errors import ConfigError
from tiercache.policy import make_policy
from tiercache.sim.drivers import CacheDriver, Driver, DriverSettings, PlanDriver
from tiercache.sim.killed import replay_with_kill
from tiercache.sim.options import Progress, ReplayOptions
from tiercache.sim.report import PhaseReport, ReplayReport, TierReport
from tiercache.sim.requests import Life, driver_settings, load_trace, replay_requests
from tiercache.sim.trace import Trace

__all__ = ["run_replay"]

_SHOW_EVERY_S = 0.1


def run_replay(options: ReplayOptions, progress: Progress | None = None) -> ReplayReport:
    """Replay a trace as `options` say. Deterministic but for what is measured in seconds, and for where a kill falls.

    With data, the cache's directory is a new one in `options.nvme_path`, removed at the end; with `options.keep` it is
    that path itself, which must be empty, and what is in DRAM at the end is written there too.

    Raises TraceError, ConfigError, ReplayError (a result that never came, a process that ended by itself), OSError.
    """
    make_policy(options.policy)
    trace = load_trace(options)
    settings = driver_settings(options, trace)
    shown = _Shown(progress, trace.requests)
    began = time.monotonic()
    with _directory(options) as directory:
        lives: tuple[Life, ...]
        if options.kill_at is not None:
            assert directory is not None
            lives = replay_with_kill(options, trace.requests, len(settings.tiers), directory, shown)
        else:
            lives = (_live(options, trace, settings, directory, shown),)
    return _report(options, trace, settings, lives, time.monotonic() - began)


def _live(
    options: ReplayOptions, trace: Trace, settings: DriverSettings, directory: Path | None, shown: _Shown
) -> Life:
    """The whole trace in this process."""
    life = Life(len(settings.tiers))
    driver: Driver = PlanDriver(trace, settings) if options.no_data else CacheDriver(trace, settings, directory)
    with driver:
        for served in replay_requests(driver, options.in_flight):
            life.add(served)
            shown(life, "")
        life.counts = driver.counts()
        life.failed_blocks = driver.delivery.failed_blocks
        driver.close(keep=options.keep)
    return life


class _Shown:
    """Tells the caller how far a replay is, a few times a second."""

    def __init__(self, progress: Progress | None, requests: int) -> None:
        self._progress: Callable[[int, int, str], None] = progress or (lambda done, total, note: None)
        self._requests = requests
        self._lives: list[Life] = []
        self._next_s = 0.0
        self._note = ""

    def __call__(self, life: Life, note: str) -> None:
        if life not in self._lives:
            self._lives.append(life)
        done = sum(each.requests for each in self._lives)
        now = time.monotonic()
        if now < self._next_s and done < self._requests and note == self._note:
            return
        self._note = note
        self._next_s = now + _SHOW_EVERY_S
        tokens = sum(each.prompt_tokens for each in self._lives)
        ratio = sum(each.hit_tokens for each in self._lives) / tokens if tokens else 0.0
        self._progress(done, self._requests, note or f"hit ratio {ratio:.3f}")


@contextmanager
def _directory(options: ReplayOptions) -> Iterator[Path | None]:
    """Where the NVMe tier lies; None where there is none."""
    path = options.nvme_path
    if path is None or options.nvme is None or options.no_data:
        yield None
        return
    made = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    if options.keep:
        if any(path.iterdir()):
            raise ConfigError("nvme", str(path), "an empty directory, to keep the store there: a replay starts cold")
        yield path
        return
    own = Path(tempfile.mkdtemp(prefix="tiercache-replay-", dir=path))
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        for each in made:
            if any(each.iterdir()):
                break
            each.rmdir()


def _report(
    options: ReplayOptions, trace: Trace, settings: DriverSettings, lives: tuple[Life, ...], seconds: float
) -> ReplayReport:
    names = [name for name, _ in settings.tiers]
    phases = [
        PhaseReport(
            each.requests, each.prompt_tokens, each.hit_tokens, dict(zip(names, each.hit_tokens_by_tier, strict=True))
        )
        for each in lives
    ]
    killed = len(lives) == 2
    return ReplayReport(
        trace=trace.name,
        policy=options.policy,
        hints=options.hints,
        data=not options.no_data,
        block_tokens=trace.block_tokens,
        block_nbytes=options.block_nbytes,
        requests=sum(each.requests for each in lives),
        unique_blocks=trace.unique_blocks,
        prompt_tokens=sum(each.prompt_tokens for each in lives),
        hit_tokens=sum(each.hit_tokens for each in lives),
        infinite_hit_ratio=trace.infinite_hit_ratio(),
        tiers=tuple(_tier(name, slots, level, lives) for level, (name, slots) in enumerate(settings.tiers)),
        wrong_bytes=sum(each.wrong_bytes for each in lives),
        verified_blocks=sum(each.verified_blocks for each in lives),
        failed_blocks=sum(each.failed_blocks for each in lives),
        skipped_lines=trace.skipped_lines,
        seconds=seconds,
        before_kill=phases[0] if killed else None,
        after_kill=phases[1] if killed else None,
        reopen_s=lives[1].opened_s if killed else None,
        recovered_blocks=lives[1].recovered_blocks if killed else None,
    )


def _tier(name: str, slots: int, level: int, lives: tuple[Life, ...]) -> TierReport:
    counts = [each.counts[level] for each in lives]
    return TierReport(
        name=name,
        slots=slots,
        hit_tokens=sum(each.hit_tokens_by_tier[level] for each in lives),
        blocks_written=sum(each.blocks_written for each in counts),
        blocks_evicted=sum(each.blocks_evicted for each in counts),
        blocks_demoted=sum(each.blocks_demoted for each in counts),
        bytes_read=sum(each.bytes_read for each in counts),
        bytes_written=sum(each.bytes_written for each in counts),
        read_s=sum(each.read_s for each in counts),
        write_s=sum(each.write_s for each in counts),
    )
