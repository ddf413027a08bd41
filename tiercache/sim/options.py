"""What a replay is asked to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from tiercache.config import check_max_writes_per_hit, parse_size
from tiercache.errors import ConfigError
from tiercache.sim import example
from tiercache.tiers.base import slot_stride

__all__ = ["EXAMPLE", "Hints", "Progress", "ReplayOptions", "Share", "Size", "parse_share_or_size", "slots_of"]

EXAMPLE = "example"
"""Stands for the trace that ships with the package, where a file is asked for."""

Progress: TypeAlias = Callable[[int, int, str], None]
"""Called with what is done, what there is to do in all, and a few words on what is going on."""


@dataclass(frozen=True, slots=True)
class Share:
    """A size given as a share of the trace's unique blocks."""

    fraction: float
    """0.05 for 5 %; may be above 1."""


Hints: TypeAlias = Literal["none", "perfect"]
"""What the replayed engine tells the cache about the future."""

Size: TypeAlias = int | Share
"""Bytes, or a share of the trace's unique blocks."""


def parse_share_or_size(text: str, field: str) -> Size:
    """`"2GiB"` is bytes, `"5%"` a Share. Raises ConfigError that names `field`."""
    text = text.strip()
    if not text.endswith("%"):
        try:
            return parse_size(text, field)
        except ConfigError as error:
            raise ConfigError(field, text, f'{error.remedy}; or a share of the trace\'s unique blocks, "5%"') from error
    try:
        percent = float(text[:-1])
    except ValueError as error:
        raise ConfigError(field, text, "a number before the percent sign, like '5%'") from error
    if not 0 < percent <= 1e6:
        raise ConfigError(field, text, "a share above 0 %")
    return Share(percent / 100)


def slots_of(size: Size, unique_blocks: int, block_nbytes: int, field: str) -> int:
    """How many blocks of `block_nbytes` fit (slots lie at multiples of 4 KiB). ConfigError where not even one does."""
    if isinstance(size, Share):
        return max(1, round(size.fraction * unique_blocks))
    slots = size // slot_stride(block_nbytes)
    if slots < 1:
        raise ConfigError(field, size, f"at least one block, {slot_stride(block_nbytes)} bytes")
    return slots


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How to replay a trace. Raises ConfigError for what cannot be, or cannot be together.

    Without `keep` the replay leaves nothing in `nvme_path`: it fills a directory of its own making there.
    """

    trace: str
    """Path of a trace file, or EXAMPLE."""
    dram: Size
    nvme_path: Path | None = None
    """Directory for the NVMe tier. Not needed with `no_data`, which writes nothing."""
    nvme: Size | None = None
    """None: no NVMe tier."""
    block_nbytes: int = 256 * 1024
    """Payload of one block."""
    block_tokens: int | None = None
    """Tokens per block of the trace, where its file does not say: None is 512."""
    policy: str = "reuse"
    hints: Hints = "none"
    """"perfect": `release` after the last request of each conversation, which the trace tells (`Trace.ends`)."""
    in_flight: int = 4
    """Requests in flight: step i delivers the results of jobs issued up to step i - in_flight."""
    write_after_s: float | None = None
    """Age, in trace seconds, at which a block is written to NVMe; None: only when it is evicted from DRAM."""
    max_writes_per_hit: float | None = None
    """See `NVMe`; None: every block may be written."""
    exclusive: bool | None = None
    """Whether a block that is promoted leaves NVMe; None: by size."""
    no_data: bool = False
    """Same decisions, no payload and no tokens."""
    full_blocks: bool = False
    """Leave partial last blocks out."""
    skip_bad: bool = False
    requests: int | None = None
    """Only the first so many requests; None: all."""
    kill_at: float | None = None
    """Share of the requests after which the process that holds the cache is killed (SIGKILL) and a new one goes on."""
    keep: bool = False
    """Leave the NVMe directory's files there."""

    def __post_init__(self) -> None:
        if self.block_nbytes < 1:
            raise ConfigError("block_bytes", self.block_nbytes, "at least 1 byte")
        if self.hints not in get_args(Hints):
            raise ConfigError("hints", self.hints, f"one of {', '.join(get_args(Hints))}")
        if not 1 <= self.in_flight <= 256:
            raise ConfigError("in_flight", self.in_flight, "1 to 256 requests")
        if self.requests is not None and self.requests < 1:
            raise ConfigError("requests", self.requests, "at least 1")
        if self.write_after_s is not None and not 0 <= self.write_after_s < float("inf"):
            raise ConfigError("write_after", self.write_after_s, "seconds, 0 or more, or 'off'")
        if self.nvme is None and self.write_after_s is not None:
            raise ConfigError("write_after", self.write_after_s, "'off': there is no NVMe tier to write to")
        if self.max_writes_per_hit is not None:
            check_max_writes_per_hit("max_writes_per_hit", self.max_writes_per_hit, self.policy)
            if self.nvme is None:
                raise ConfigError("max_writes_per_hit", self.max_writes_per_hit, "'off': there is no NVMe tier")
        if self.nvme is not None and self.nvme_path is None and not self.no_data:
            raise ConfigError("nvme", None, "DIR:SIZE, a directory for the data (only no_data goes without)")
        if self.kill_at is not None:
            self._check_kill(self.kill_at)

    def _check_kill(self, kill_at: float) -> None:
        if not 0 < kill_at < 1:
            raise ConfigError("kill_at", kill_at, "a share of the requests between 0 and 1, like 0.5")
        if self.nvme is None:
            raise ConfigError("kill_at", kill_at, "not without an NVMe tier: nothing would be left after the kill")
        if self.no_data:
            raise ConfigError("kill_at", kill_at, "not with no_data: there is nothing on NVMe to come back to")

    @property
    def trace_path(self) -> Path:
        """Where the trace lies."""
        return example.path() if self.trace == EXAMPLE else Path(self.trace)
