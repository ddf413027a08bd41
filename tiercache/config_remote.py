"""Remote: the key tier of a cache, as a tier object in `tiers`, or as its URL. It has no slots of its own.

ConfigError names the field, its value, and what would be right.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from tiercache.errors import ConfigError
from tiercache.remote.urls import check_url, shown

__all__ = ["REMOTE_NAME", "Remote", "RemoteWrite", "remote_enabled", "take_remote"]

RemoteWrite: TypeAlias = Literal["prefill", "eviction", "never"]

REMOTE_NAME = "remote"
"""What `Match.by_tier` and the statistics call it."""
_VERBS = ("find", "get", "put", "remove", "close")


@dataclass(frozen=True)
class Remote:
    """Blocks that other caches have put into a key tier (`tiercache.remote.KeyTier`). Needs a `namespace`, and an
    `epoch` that those caches share. A KeyTier is the caller's: several caches may use one, none of them closes it. From
    a URL the cache opens one of its own, and closes it."""

    tier: Any
    """A KeyTier, or a URL such as `redis://10.0.0.5`: docs/remote.md. Shown without its password."""
    quota: float = 0.2
    """The share of HBM's and of DRAM's slots that blocks from here, and blocks computed under them, may take until
    their prompt was used twice more. Rounded down, but at least one block."""
    find_deadline_s: float = 1.0
    read_deadline_s: float = 1.0
    """Of one job, of at most 64 blocks and 16 MiB."""
    hint_s: float = 30.0
    """How long it is believed that a block is there."""
    missing_s: float = 2.0
    """How long it is believed that a block is not there, or cannot be had."""
    hint_blocks: int = 1 << 18
    """Blocks of which either is remembered; some 100 bytes each."""
    threads: int = 8
    """Threads that ask and read; half of them at most do the same. A quarter as many more write."""
    write: RemoteWrite = "prefill"
    """What is written there: "prefill": blocks once they were stored; "eviction": the coldest blocks of memory, a
    little before they leave it; "never". Nothing waits for it, and what cannot be written soon is dropped."""
    write_deadline_s: float = 0.2
    """Of one job, of at most 64 blocks and 16 MiB."""
    min_prefix_tokens: int = 0
    """A hit is taken from here only where it reaches so many tokens into a prompt, together with what is held locally;
    written are only prompts so long."""
    max_block_position: int | None = None
    """Blocks at this position of their prompt, or behind it, are neither asked for, fetched nor written. None: no
    position is too far."""

    def __post_init__(self) -> None:
        """Check."""
        if isinstance(self.tier, str):
            check_url(self.tier, "Remote.tier")
        lacking = [verb for verb in _VERBS if not callable(getattr(self.tier, verb, None))]
        if lacking and not isinstance(self.tier, str):
            raise ConfigError("Remote.tier", self.tier, f"a key tier with {', '.join(lacking)}, or a URL, is needed")
        if not _is_number(self.quota) or not 0 < self.quota <= 1:
            raise ConfigError("Remote.quota", self.quota, "a share above 0 and of at most 1 is needed, such as 0.2")
        for name in ("find_deadline_s", "read_deadline_s", "write_deadline_s", "hint_s", "missing_s"):
            value = getattr(self, name)
            if not _is_number(value) or value <= 0:
                raise ConfigError(f"Remote.{name}", value, "a number of seconds above 0 is needed")
        _check_int("Remote.hint_blocks", self.hint_blocks, 1, 1 << 30)
        _check_int("Remote.threads", self.threads, 2, 256)
        if self.write not in ("prefill", "eviction", "never"):
            raise ConfigError("Remote.write", self.write, "one of prefill, eviction, never is needed")
        _check_int("Remote.min_prefix_tokens", self.min_prefix_tokens, 0, 1 << 30)
        if self.max_block_position is not None:
            _check_int("Remote.max_block_position", self.max_block_position, 1, 1 << 30)

    @property
    def write_threads(self) -> int:
        """Threads that write, beside those that ask and read."""
        return 0 if self.write == "never" else max(1, self.threads // 4)

    def __repr__(self) -> str:
        values = ((item.name, shown(getattr(self, item.name))) for item in fields(self))
        return f"Remote({', '.join(f'{name}={value!r}' for name, value in values)})"


def remote_enabled() -> bool:
    """The kill switch of key tiers at the start, from the environment variable TIERCACHE_REMOTE. ConfigError."""
    value = os.environ.get("TIERCACHE_REMOTE", "").strip().lower() or "on"
    if value not in ("on", "off"):
        raise ConfigError("TIERCACHE_REMOTE (environment)", value, "on or off is needed")
    return value == "on"


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(name, value, f"an integer from {low} to {high} is needed")


def take_remote(tiers: Sequence[Any], slot_tiers: tuple[type, ...]) -> tuple[tuple[Any, ...], Remote | None]:
    """The slot tiers among these, and the remote one. ConfigError where there are two, or where it is out of order:
    it comes after HBM and DRAM, before NVMe. `slot_tiers`: the classes of slot tiers, in that order."""
    at = [i for i, tier in enumerate(tiers) if isinstance(tier, Remote)]
    rest = tuple(tier for tier in tiers if not isinstance(tier, Remote))
    if len(at) > 1:
        raise ConfigError(f"tiers[{at[1]}]", tiers[at[1]], "each kind of tier is allowed once")
    if not at:
        return rest, None
    memory, disks = slot_tiers[:-1], slot_tiers[-1:]
    if not any(isinstance(tier, memory) for tier in rest):
        raise ConfigError("tiers", list(tiers), "a tier in memory is needed before Remote, such as dram:8GiB")
    before, after = tiers[: at[0]], tiers[at[0] :]
    if any(isinstance(tier, disks) for tier in before) or any(isinstance(tier, memory) for tier in after):
        raise ConfigError(f"tiers[{at[0]}]", tiers[at[0]], "tiers go from fast to slow: HBM, DRAM, Remote, NVMe")
    return rest, tiers[at[0]]
