"""Assembly: builds tiers, catalog, mover and planner from settings, once the layout of a block is known."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from tiercache.catalog import Catalog, Manifest, peek_manifest
from tiercache.config import DRAM, HBM, NVMe, Settings, Tier, format_size
from tiercache.config_remote import remote_enabled
from tiercache.directory import StoreDirectory
from tiercache.errors import ConfigError
from tiercache.keys import symbol_nbytes
from tiercache.layout import KVLayout
from tiercache.loaded import Memory
from tiercache.mover import KeyTierSpec, Mover
from tiercache.planner import Limits, Planner, RemoteLimits
from tiercache.policy import make_policy
from tiercache.remote.base import ConnectsAhead, KeyTier
from tiercache.remote.urls import open_key_tier
from tiercache.tiers.base import SlotTier
from tiercache.tiers.device import open_device
from tiercache.tiers.dram import DRAMTier
from tiercache.tiers.fileio import OS_FILES, FileOps
from tiercache.tiers.hbm import HBMTier
from tiercache.tiers.nvme import NVMeTier
from tiercache.types import LevelSpec, PlannerMessage

__all__ = [
    "MEMORY_THREADS",
    "OpenTiers",
    "Seams",
    "Stack",
    "build_stack",
    "check_devices",
    "key_tier_spec",
    "known_layout",
    "make_mover",
    "make_planner",
    "namespace_digest",
    "nvme_of",
    "obtaining",
    "open_tiers",
    "steady_wall_clock",
]

_log = logging.getLogger("tiercache")

MEMORY_THREADS = 2
_EXPECTED = {HBM: (1e-4, 4e9), DRAM: (1e-4, 4e9), NVMe: (1e-3, 1e9)}
"""Latency (s) and rate (bytes/s) of a load from each kind of tier until one was measured; most machines do more."""
_NO_NAMESPACE = b"\0" * 16


@dataclass(frozen=True, slots=True)
class Seams:
    """Where tests put faulty parts (see `tiercache.testing`); by default the real ones."""

    wrap_tier: Callable[[SlotTier], SlotTier] | None = None
    """Called with each tier once it is open; what it returns is used, and closed, in its place."""
    file_ops: FileOps = OS_FILES
    """File operations of the payload files and of the catalog's allocation."""


@dataclass(slots=True)
class Stack:
    """Everything below the public API."""

    layout: KVLayout
    tiers: list[SlotTier]
    specs: list[LevelSpec]
    planner: Planner
    mover: Mover
    catalog: Catalog | None
    memory: Memory
    cold_reason: str
    """Why the start was cold, "" where it was not or nothing persists."""
    own_keys: KeyTier | None = None
    """The key tier where it was opened from a URL, and is to be closed."""


def nvme_of(settings: Settings) -> NVMe | None:
    """The NVMe tier of these settings."""
    return next((tier for tier in settings.tiers if isinstance(tier, NVMe)), None)


def check_devices(tiers: Sequence[Tier]) -> None:
    """ConfigError where the device of an HBM tier cannot be had here; told at the start, not by the first store."""
    for tier in tiers:
        if isinstance(tier, HBM):
            open_device(tier.device)


def steady_wall_clock() -> Callable[[], float]:
    """Wall-clock seconds that never go back: the wall clock now, plus what the monotonic clock adds."""
    offset = time.time() - time.monotonic()
    return lambda: time.monotonic() + offset


@contextmanager
def obtaining(settings: Settings) -> Iterator[None]:
    """Tell as a ConfigError that memory, threads or files which a cache needs from its start cannot be had."""
    try:
        yield
    except (MemoryError, OSError) as error:
        tiers = ", ".join(f"{type(tier).__name__} of {format_size(tier.size_nbytes)}" for tier in settings.tiers)
        raise ConfigError("tiers", tiers, f"what they need cannot be had now ({error or 'no memory'})") from error


def known_layout(settings: Settings, directory: StoreDirectory | None) -> tuple[KVLayout | None, bytes]:
    """The layout by the settings, else by the manifest of a directory of the same namespace and block size; and the
    epoch to begin with (the settings', else that manifest's, else a new nonce)."""
    if settings.remote is not None and settings.epoch is None:
        _log.warning("a remote tier without an epoch: only what this cache puts there can be found, give both one tag")
    manifest = peek_manifest(directory) if directory is not None else None
    layout, epoch = settings.layout, settings.epoch or b""
    same = manifest is not None and (
        manifest.namespace == namespace_digest(settings).hex() and manifest.block_tokens == settings.block_tokens
    )
    if manifest is not None and same:
        if layout is None:
            layout = KVLayout.from_dict(manifest.layout)
        epoch = epoch or manifest.epoch
    return layout, epoch or os.urandom(16)


@dataclass(slots=True)
class OpenTiers:
    """The tiers of one cache, open, and the catalog of the last."""

    tiers: list[SlotTier]
    specs: list[LevelSpec]
    catalog: Catalog | None
    own_keys: KeyTier | None = None
    """The key tier, where settings have its URL."""

    def close(self) -> None:
        """Undo opening them, where what comes next fails."""
        for each in self.tiers:
            each.close()
        if self.own_keys is not None:
            self.own_keys.close()
        if self.catalog is not None:
            self.catalog.close(clean=False)


def build_stack(
    settings: Settings,
    layout: KVLayout,
    epoch: bytes,
    directory: StoreDirectory | None,
    deliver: Callable[[PlannerMessage], None],
    seams: Seams,
) -> Stack:
    """Open every tier for blocks of this layout. ConfigError where a tier holds no block, or does not fit."""
    width, digest = symbol_nbytes(settings.block_tokens), namespace_digest(settings)
    opened = open_tiers(settings, layout, epoch, directory, seams, width, digest)
    try:
        planner = make_planner(settings, opened.specs, width, epoch, digest)
        if opened.catalog is not None:
            planner.restore(opened.catalog.recovered)
        keys = key_tier_spec(settings, opened, width)
        mover = make_mover(settings, opened, epoch, deliver, keys)
    except BaseException:
        opened.close()
        raise
    reason = opened.catalog.recovered.reason if opened.catalog is not None else ""
    memory = Memory(layout, opened.tiers[0])
    return Stack(layout, opened.tiers, opened.specs, planner, mover, opened.catalog, memory, reason, opened.own_keys)


def open_tiers(
    settings: Settings,
    layout: KVLayout,
    epoch: bytes,
    directory: StoreDirectory | None,
    seams: Seams,
    symbol_width: int,
    ident_digest: bytes,
) -> OpenTiers:
    """Open every tier. symbol_width: bytes of a symbol. ident_digest: what the idents of blocks are rooted in, beside
    the epoch. ConfigError as `build_stack`."""
    nvme = nvme_of(settings)
    capacities = [_capacity(tier, layout) for tier in settings.tiers]
    opened = OpenTiers([], [], None)
    try:
        if nvme is not None and directory is not None:
            manifest = Manifest(
                layout=layout.to_dict(),
                block_nbytes=layout.block_nbytes,
                namespace=namespace_digest(settings).hex(),
                epoch=epoch,
                block_tokens=settings.block_tokens,
                symbol_nbytes=symbol_width,
                fingerprint=str(settings.namespace or ""),
                ident_namespace="" if ident_digest == namespace_digest(settings) else ident_digest.hex(),
            )
            opened.catalog = Catalog.open(
                directory,
                manifest,
                capacities[-1],
                durability=nvme.durability,
                root_ident=manifest.root_ident,
                ops=seams.file_ops,
            )
        for tier, capacity in zip(settings.tiers, capacities, strict=True):
            each = _open_tier(tier, capacity, layout, directory, opened.catalog, seams.file_ops)
            opened.tiers.append(each if seams.wrap_tier is None else seams.wrap_tier(each))
        opened.specs = _specs(settings, opened.tiers, layout)
        if settings.remote is not None and isinstance(settings.remote.tier, str):
            opened.own_keys = open_key_tier(settings.remote.tier)
            if isinstance(opened.own_keys, ConnectsAhead) and remote_enabled():
                opened.own_keys.connect_soon()
    except BaseException:
        opened.close()
        raise
    return opened


def make_mover(
    settings: Settings,
    opened: OpenTiers,
    epoch: bytes,
    deliver: Callable[[PlannerMessage], None],
    keys: KeyTierSpec | None = None,
) -> Mover:
    """A mover over these tiers; it closes them. OSError where a thread cannot be started."""
    nvme = nvme_of(settings)
    return Mover(
        opened.tiers,
        deliver,
        catalog=opened.catalog,
        epoch=epoch,
        memory_threads=MEMORY_THREADS,
        io_threads=nvme.threads if nvme is not None else 1,
        keys=keys,
    )


def _specs(settings: Settings, opened: Sequence[SlotTier], layout: KVLayout) -> list[LevelSpec]:
    return [
        LevelSpec(
            each.name,
            each.capacity,
            layout.block_nbytes,
            persistent=isinstance(tier, NVMe),
            pool_threads=tier.threads if isinstance(tier, NVMe) else MEMORY_THREADS,
            read_latency_s=_EXPECTED[type(tier)][0],
            read_nbytes_per_s=_EXPECTED[type(tier)][1],
        )
        for tier, each in zip(settings.tiers, opened, strict=True)
    ]


def key_tier_spec(settings: Settings, opened: OpenTiers, symbol_width: int) -> KeyTierSpec | None:
    """The key tier of these settings, the caller's or the one that `open_tiers` opened, as a mover takes it."""
    remote = settings.remote
    if remote is None:
        return None
    tier = opened.own_keys if opened.own_keys is not None else remote.tier
    return KeyTierSpec(
        tier, namespace_digest(settings), symbol_width, remote.threads, write_threads=remote.write_threads
    )


def _remote_limits(settings: Settings) -> RemoteLimits | None:
    remote = settings.remote
    if remote is None:
        return None
    return RemoteLimits(
        quota=remote.quota,
        find_deadline_s=remote.find_deadline_s,
        read_deadline_s=remote.read_deadline_s,
        hint_s=remote.hint_s,
        missing_s=remote.missing_s,
        hint_blocks=remote.hint_blocks,
        pool_threads=remote.threads,
        write=remote.write,
        write_deadline_s=remote.write_deadline_s,
        write_threads=remote.write_threads,
        min_blocks=-(-remote.min_prefix_tokens // settings.block_tokens),
        max_position=remote.max_block_position,
        enabled=remote_enabled(),
        seed=int.from_bytes(os.urandom(8), "little"),
    )


def make_planner(
    settings: Settings, specs: Sequence[LevelSpec], symbol_width: int, epoch: bytes, ident_digest: bytes
) -> Planner:
    """A planner over these levels, as the settings have it; it holds nothing yet."""
    nvme, limits = nvme_of(settings), Limits()
    if nvme is not None:
        limits = Limits(read_deadline_s=nvme.read_deadline_s, write_deadline_s=nvme.write_deadline_s)
    return Planner(
        specs,
        symbol_width,
        make_policy(settings.policy),
        namespace_digest=ident_digest,
        epoch=epoch,
        exclusive=settings.exclusive,
        write_after_s=nvme.write_after_s if nvme is not None else None,
        max_writes_per_hit=nvme.max_writes_per_hit if nvme is not None else None,
        limits=limits,
        remote=_remote_limits(settings),
        measures=settings.prefill_tokens_per_s is not None,
    )


def namespace_digest(settings: Settings) -> bytes:
    """What stands for the namespace; zeros where there is none."""
    return settings.namespace.digest if settings.namespace is not None else _NO_NAMESPACE


def _capacity(tier: Tier, layout: KVLayout) -> int:
    capacity = tier.size_nbytes // layout.stride
    if capacity < 1:
        remedy = f"one block takes {format_size(layout.stride)}: make it larger"
        raise ConfigError(f"{type(tier).__name__}.size", format_size(tier.size_nbytes), remedy)
    return min(capacity, 2**31 - 1)


def _open_tier(
    tier: Tier,
    capacity: int,
    layout: KVLayout,
    directory: StoreDirectory | None,
    catalog: Catalog | None,
    ops: FileOps,
) -> SlotTier:
    if isinstance(tier, DRAM):
        return DRAMTier(capacity, layout.block_nbytes)
    if isinstance(tier, HBM):
        return HBMTier(capacity, layout.block_nbytes, tier.device)
    assert directory is not None and catalog is not None
    opened = NVMeTier(directory.path, layout.block_nbytes, capacity, extents=catalog.manifest.extents, ops=ops)
    for remark in opened.remarks:
        directory.remark(remark)
    return opened
