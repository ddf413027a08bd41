"""Two ways to run the same requests: the real cache with real bytes, and the planner alone.

Both make the same calls in the same order, over one `OrderedDelivery`, so they decide alike.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from tiercache.cache import TieredKVCache
from tiercache.config import DRAM, NVMe, Tier
from tiercache.errors import TierCacheError
from tiercache.layout import KVLayout, Namespace
from tiercache.loaded import Loaded, LoadFuture
from tiercache.match import Ticket
from tiercache.planner import LevelCounters, Load, Planner
from tiercache.policy import make_policy
from tiercache.sim.expand import ID_SYMBOL_NBYTES, check_expandable, expand, no_data_symbols
from tiercache.sim.null_mover import NullMover
from tiercache.sim.options import Hints
from tiercache.sim.ordered import NEVER_S, Busy, OrderedDelivery, ReplayError
from tiercache.sim.payload import fill_rows, verify_rows
from tiercache.sim.trace import Trace
from tiercache.tiers.base import slot_stride
from tiercache.types import LevelSpec, PlannerMessage

__all__ = ["CacheDriver", "Driver", "DriverSettings", "PlanDriver", "Served", "TierCounts"]

_EPOCH = b"replay"
_IO_DEADLINE_S = 3600.0
"""Longer than any wait here: a slow disk must not change what is decided."""


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """What a driver is built from, in blocks."""

    dram_slots: int
    nvme_slots: int | None
    """None: no NVMe tier."""
    block_nbytes: int
    policy: str
    hints: Hints
    write_after_s: float | None
    max_writes_per_hit: float | None = None
    exclusive: bool | None = None

    @property
    def tiers(self) -> tuple[tuple[str, int], ...]:
        """Name and slots per tier, fastest first."""
        nvme = () if self.nvme_slots is None else (("nvme", self.nvme_slots),)
        return (("dram", self.dram_slots), *nvme)


@dataclass(frozen=True, slots=True)
class Served:
    """One request, when its load was over."""

    request: int
    prompt_tokens: int
    hit_tokens: int
    """What its load accepted."""
    hit_tokens_by_tier: tuple[int, ...]
    verified_blocks: int = 0
    wrong_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierCounts:
    """One tier since its driver began; see TierReport."""

    blocks_written: int = 0
    blocks_evicted: int = 0
    blocks_demoted: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    read_s: float = 0.0
    write_s: float = 0.0


@dataclass(slots=True)
class _Open:
    """A request whose load is not over."""

    load: LoadFuture | Load | None
    by_level: tuple[int, ...]
    """Blocks planned from each level."""
    ticket: Ticket | None = None
    rows: NDArray[np.uint8] | None = None

    @property
    def done(self) -> bool:
        """Have its load and its store come to their end?"""
        if self.ticket is not None and not self.ticket.copied:
            return False
        if self.load is None:
            return True
        return self.load.done() if isinstance(self.load, LoadFuture) else self.load.done


class Driver(ABC):
    """Runs the requests of one trace through one cache. Used by one thread.

    Per step: `begin`, `deliver` what is old enough, `finish` the request of that step, `start` the next one.
    """

    def __init__(self, trace: Trace, settings: DriverSettings) -> None:
        self.trace = trace
        self.settings = settings
        self.delivery = OrderedDelivery(settings.write_after_s)
        self._now = 0.0
        self._open: dict[int, _Open] = {}
        self._ends = trace.ends() if settings.hints == "perfect" else np.zeros(trace.requests, np.bool_)

    def begin(self, step: int, now: float) -> None:
        """A step begins, at trace time `now` (seconds, never going back)."""
        self._now = now
        self.delivery.begin(step, now)

    def deliver(self, through: int) -> None:
        """Let the results of all jobs of steps up to `through` take effect."""
        self.delivery.deliver(through)

    def start(self, request: int) -> None:
        """Look a request up, load what is there, store what is missing, and tell the cache where a conversation ends
        by it. The calls that plan also tend."""
        path = self.trace.path(request)
        self._open[request] = self._start(request, path) if len(path) else _Open(None, ())
        if self._ends[request]:
            self._release(request)

    @abstractmethod
    def _start(self, request: int, path: NDArray[np.int64]) -> _Open:
        """The same, for a prompt that has blocks."""

    @abstractmethod
    def _release(self, request: int) -> None:
        """This conversation ended."""

    def finish(self, request: int) -> Served:
        """End a started request: verify what was loaded, release it.

        A load may wait for credits that jobs of later steps hold: then these are delivered too, one by one. ReplayError
        where a load or a store does not end.
        """
        opened = self._open.pop(request)
        while not opened.done:
            if not self.delivery.deliver_next():
                raise ReplayError(f"request {request} did not end although no copy is under way")
        path = self.trace.path(request)
        blocks, verified, wrong_bytes = self._end(opened, path)
        hit_tokens = int(self.trace.tokens[path[:blocks]].sum(dtype=np.int64))
        return Served(
            request,
            self.trace.prompt_tokens(request),
            hit_tokens,
            _tokens_by_level(opened.by_level, blocks, hit_tokens, self.trace.block_tokens),
            verified,
            wrong_bytes,
        )

    @abstractmethod
    def _end(self, opened: _Open, path: NDArray[np.int64]) -> tuple[int, int, int]:
        """Verify and release; returns blocks loaded, blocks verified, wrong bytes."""

    def drain(self) -> None:
        """Let all results take effect, and those of what that issues. ReplayError where that has no end."""
        for _ in range(1000 + 16 * sum(slots for _, slots in self.settings.tiers)):
            if not self.delivery.deliver_next():
                return
        raise ReplayError("the cache goes on copying blocks although nothing is asked of it any more")

    @abstractmethod
    def counts(self) -> tuple[TierCounts, ...]:
        """Everything counted so far, per tier."""

    @property
    @abstractmethod
    def recovered_blocks(self) -> int:
        """Blocks that were on NVMe when the cache was opened."""

    @abstractmethod
    def check(self) -> list[str]:
        """Broken rules of the planner, in words."""

    @abstractmethod
    def close(self, *, keep: bool = False) -> None:
        """End it; with `keep`, what lives only in memory is written to NVMe first."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class PlanDriver(Driver):
    """The planner and a null mover: same decisions, no payload, no tokens."""

    def __init__(self, trace: Trace, settings: DriverSettings) -> None:
        super().__init__(trace, settings)
        specs = [
            LevelSpec(name, slots, settings.block_nbytes, persistent=name == "nvme") for name, slots in settings.tiers
        ]
        self._planner = Planner(
            specs,
            ID_SYMBOL_NBYTES,
            make_policy(settings.policy),
            epoch=_EPOCH,
            write_after_s=None if settings.write_after_s is None else NEVER_S,
            max_writes_per_hit=settings.max_writes_per_hit,
            exclusive=settings.exclusive,
        )
        self._mover = NullMover(self.delivery.arrived, settings.block_nbytes)
        self.delivery.bind(self._apply)
        self.delivery.connect(lambda job: self._planner.state.jobs[job].owner, self._mover.submit)

    def _start(self, request: int, path: NDArray[np.int64]) -> _Open:
        n, planner, symbols = len(path), self._planner, no_data_symbols(self.trace, request)
        found = planner.lookup(symbols, n, self._now)
        opened = _Open(None, ())
        if found.blocks:
            self.delivery.expect_load()
            load = planner.plan_load(symbols, found.blocks, _EPOCH, self._now, prompt_blocks=n)
            opened = _Open(load, load.by_level)
            self._hand_over()
        if found.blocks < n:
            partial = bool(self.trace.tokens[path[-1]] < self.trace.block_tokens)
            planner.plan_store(symbols, n, found.blocks, _EPOCH, self._now, 1, partial)
            self._hand_over()
        return opened

    def _end(self, opened: _Open, path: NDArray[np.int64]) -> tuple[int, int, int]:
        load = opened.load
        if not isinstance(load, Load):
            return 0, 0, 0
        self._planner.release_load(load, self._now)
        self._hand_over()
        return load.blocks, 0, 0

    def _release(self, request: int) -> None:
        path = self.trace.path(request)
        full = len(path) - int(self.trace.tokens[path[-1]] < self.trace.block_tokens)
        self._planner.release(no_data_symbols(self.trace, request), full, self._now)

    def _apply(self, message: PlannerMessage) -> None:
        self._planner.commit(message, self._now)
        self._hand_over()

    def _hand_over(self) -> None:
        messages = self._planner.take_messages()
        self.delivery.submitted(messages)
        self._mover.submit(messages)

    def counts(self) -> tuple[TierCounts, ...]:
        """See Driver. Bytes are blocks times their size."""
        nbytes = self.settings.block_nbytes
        return tuple(
            TierCounts(
                blocks_written=each.written + each.promoted,
                blocks_evicted=each.evicted,
                blocks_demoted=each.demoted,
                bytes_read=each.load_nbytes + each.demoted * nbytes,
                bytes_written=(each.written + each.promoted) * nbytes,
            )
            for each in self._planner.level_counters()
        )

    @property
    def recovered_blocks(self) -> int:
        """See Driver."""
        return 0

    def check(self) -> list[str]:
        """See Driver."""
        return self._planner.check()

    def close(self, *, keep: bool = False) -> None:
        """See Driver."""


class CacheDriver(Driver):
    """The real cache. Payloads are made from block ids, and every loaded block is compared with what it must be."""

    def __init__(self, trace: Trace, settings: DriverSettings, directory: Path | None) -> None:
        """Open a cache, with its NVMe tier in `directory`; what is there of an earlier life is used.

        ConfigError for sizes that do not fit, TierCacheError for a trace with too many blocks for token ids.
        """
        super().__init__(trace, settings)
        check_expandable(trace)
        self._rows = _RowPool(settings.block_nbytes)
        began = time.monotonic()
        self._cache = TieredKVCache(
            _tiers(settings, directory),
            KVLayout((settings.block_nbytes,), "uint8"),
            Namespace.of(replay=trace.name, block_tokens=trace.block_tokens),
            _EPOCH,
            trace.block_tokens,
            settings.policy,
            settings.exclusive,
            switch="on",
            clock=lambda: self._now,
            delivery=self.delivery,
        )
        self.opened_s = time.monotonic() - began
        """Seconds that opening took."""
        stack = self._cache.stack
        assert stack is not None  # the layout is given
        self._stack = stack
        self.delivery.connect(lambda job: stack.planner.state.jobs[job].owner, stack.mover.submit)

    def _start(self, request: int, path: NDArray[np.int64]) -> _Open:
        tokens = expand(self.trace, request)
        match = self._cache.lookup(tokens, partial_tail=True)
        opened = _Open(None, ())
        if match.blocks:
            self.delivery.expect_load()
            before = self._hits()
            opened.load = self._cache.load(match)
            opened.by_level = tuple(now - old for now, old in zip(self._hits(), before, strict=True))
        missing = path[match.blocks :]
        if len(missing):
            opened.rows = self._rows.take(len(missing))
            blocks = opened.rows[: len(missing)]
            fill_rows(missing, blocks)
            opened.ticket = self._cache.store(tokens, blocks, match.blocks, partial_tail=True)
        return opened

    def _release(self, request: int) -> None:
        self._cache.release(expand(self.trace, request))

    def _hits(self) -> list[int]:
        return [each.hits for each in self._stack.planner.level_counters()]

    def _end(self, opened: _Open, path: NDArray[np.int64]) -> tuple[int, int, int]:
        if opened.rows is not None:
            self._rows.give(opened.rows)
        if not isinstance(opened.load, LoadFuture):
            return 0, 0, 0
        with opened.load.result(0) as loaded:
            wrong = _wrong_blocks(loaded, path)
        return loaded.block_count, loaded.block_count, wrong * self.settings.block_nbytes

    def counts(self) -> tuple[TierCounts, ...]:
        """See Driver. Bytes and seconds are what the mover measured."""
        counters: Sequence[LevelCounters] = self._stack.planner.level_counters()
        nothing, delivery = Busy(), self.delivery
        return tuple(
            TierCounts(
                blocks_written=planned.written + planned.promoted,
                blocks_evicted=planned.evicted,
                blocks_demoted=planned.demoted,
                bytes_read=moved.bytes_read,
                bytes_written=moved.bytes_written,
                read_s=delivery.busy_reading.get(level, nothing).seconds,
                write_s=delivery.busy_writing.get(level, nothing).seconds,
            )
            for level, (planned, moved) in enumerate(zip(counters, self._stack.mover.stats().levels, strict=True))
        )

    @property
    def recovered_blocks(self) -> int:
        """See Driver."""
        return self._stack.planner.totals().recovered

    def check(self) -> list[str]:
        """See Driver."""
        return self._cache.check()

    def close(self, *, keep: bool = False) -> None:
        """See Driver. TierCacheError where not all could be kept."""
        self.delivery.let_go()
        if not keep:
            self._cache.switch = "off"  # else it would write everything to NVMe
        if not self._cache.close(timeout=600.0 if keep else 60.0) and keep:
            raise TierCacheError("not everything that was in DRAM could be written to NVMe")


class _RowPool:
    """Buffers for the blocks of stores: as many as were ever taken at once, none larger than the largest store."""

    def __init__(self, block_nbytes: int) -> None:
        self._block_nbytes = block_nbytes
        self._free: list[NDArray[np.uint8]] = []

    def take(self, n: int) -> NDArray[np.uint8]:
        """Rows of undefined contents, uint8[m, block_nbytes] with m of at least n: the smallest buffer that does."""
        self._free.sort(key=len)
        at = next((i for i, rows in enumerate(self._free) if len(rows) >= n), None)
        if at is not None:
            return self._free.pop(at)
        del self._free[:1]
        return np.empty((n, self._block_nbytes), np.uint8)

    def give(self, rows: NDArray[np.uint8]) -> None:
        """Give a whole buffer back, once nobody reads it."""
        self._free.append(rows)


def _tiers(settings: DriverSettings, directory: Path | None) -> list[Tier]:
    stride = slot_stride(settings.block_nbytes)
    tiers: list[Tier] = [DRAM(settings.dram_slots * stride)]
    if settings.nvme_slots is not None:
        assert directory is not None
        tiers.append(
            NVMe(
                directory,
                settings.nvme_slots * stride,
                write_after_s=None if settings.write_after_s is None else NEVER_S,
                max_writes_per_hit=settings.max_writes_per_hit,
                read_deadline_s=_IO_DEADLINE_S,
                write_deadline_s=_IO_DEADLINE_S,
            )
        )
    return tiers


def _wrong_blocks(loaded: Loaded, path: NDArray[np.int64]) -> int:
    """How many of the loaded blocks are not what the leading blocks of `path` must be."""
    wrong = at = 0
    for part in loaded.parts:
        rows = np.asarray(part)
        wrong += len(rows) - int(verify_rows(path[at : at + len(rows)], rows).sum())
        at += len(rows)
    return wrong


def _tokens_by_level(planned: Sequence[int], blocks: int, tokens: int, block_tokens: int) -> tuple[int, ...]:
    """Split the tokens of `blocks` loaded blocks among the levels they were planned from.

    Blocks that were planned and did not arrive are taken off the slowest levels, and the tokens that a partial block
    lacks off the fastest: it is never demoted.
    """
    by_level = list(planned)
    gone = sum(by_level) - blocks
    for level in range(len(by_level) - 1, -1, -1):
        less = min(gone, by_level[level])
        by_level[level] -= less
        gone -= less
    shares = [each * block_tokens for each in by_level]
    lacking = sum(shares) - tokens
    for level, share in enumerate(shares):
        less = min(lacking, share)
        shares[level] -= less
        lacking -= less
    return tuple(shares)
