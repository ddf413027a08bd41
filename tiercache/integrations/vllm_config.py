"""What an operator writes into vLLM's `kv_connector_extra_config`, as settings of one rank.

Sizes are per engine as a whole: they are divided over data-parallel engines and over the ranks of each. Files of a rank
lie in `<path>/dp<engine>/rank<rank>`, what belongs to the whole engine in `<path>/dp<engine>`.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from tiercache.assembly import Seams
from tiercache.config import DRAM, HBM, NVMe, Settings, format_size, load_config, ram_nbytes, read_config
from tiercache.config_memory import check_memory
from tiercache.config_remote import Remote, remote_enabled
from tiercache.errors import ConfigError

__all__ = ["MOST_PATIENCE_S", "ConnectorSettings", "read_settings"]

_T = TypeVar("_T")

_log = logging.getLogger("tiercache.vllm")
_WHERE = "kv_connector_extra_config"
MOST_PATIENCE_S = 60.0
_OWN = ("config", "namespace", "engines", "seams", "lora", "remote", "find_patience_s")
_REFUSED = {
    "layout": "the engine's own is used",
    "block_tokens": "the engine's --block-size is used",
    "ttl_s": "blocks do not end by themselves in this version",
    "prefill_tokens_per_s": "all that is found is offered in this version",
}


@dataclass(frozen=True)
class ConnectorSettings:
    """Settings of one engine, as each of its ranks needs them."""

    settings: Settings
    """Of one rank: sizes are its share. `directory` gives its place."""
    ranks: int
    engine: int
    """Number of this data-parallel engine."""
    loads: bool
    """False for a kv_producer, and where the kill switch turns them off."""
    stores: bool
    overlaps: bool
    """The engine schedules a step before the output of the one before was taken over."""
    named: str | None
    """The operator's own name of model and weights, instead of a fingerprint."""
    seams: Seams
    tag: bytes | None = None
    """The epoch that engines with one remote tier share; None: none was given, or there is no such tier."""
    patience_s: float = 0.0
    """How long a request waits at most for what a remote tier says that it has."""

    @property
    def directory(self) -> Path | None:
        """What belongs to the whole engine; None where nothing persists."""
        nvme = next((tier for tier in self.settings.tiers if isinstance(tier, NVMe)), None)
        return None if nvme is None else nvme.directory / f"dp{self.engine}"

    def of_rank(self, rank: int) -> Settings:
        """The settings of this rank: its files have a folder of their own."""
        folder = self.directory
        if folder is None:
            return self.settings
        tiers = [
            replace(tier, path=folder / f"rank{rank}") if isinstance(tier, NVMe) else tier
            for tier in self.settings.tiers
        ]
        return replace(self.settings, tiers=tuple(tiers))


def read_settings(vllm_config: Any) -> ConnectorSettings:
    """Read the connector's configuration. ConfigError names the field, its value, and the remedy.

    Logs loudly where `kv_load_failure_policy` makes an engine fail requests that it could recompute.
    """
    transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    extra = dict(transfer.kv_connector_extra_config or {})
    settings = _settings(extra)
    engine, engines = _engines(extra, parallel)
    ranks = int(parallel.world_size)
    check_memory(ram_nbytes(settings.tiers))
    _warn_of_policy(transfer)
    role = str(transfer.kv_role)
    patience_s = _patience(extra, settings.remote)
    return ConnectorSettings(
        settings=replace(
            settings,
            tiers=_shares(settings, engines * ranks),
            epoch=None,  # the ranks' files tell theirs, the scheduler's half decides
            block_tokens=_block_tokens(vllm_config),
            # an engine ends without a drain: what has left the disk for DRAM would end with it
            exclusive=bool(settings.exclusive),
        ),
        ranks=ranks,
        engine=engine,
        loads=role in ("kv_both", "kv_consumer") and settings.loads_enabled,
        stores=role in ("kv_both", "kv_producer") and settings.stores_enabled,
        overlaps=bool(getattr(vllm_config.scheduler_config, "async_scheduling", False)),
        named=_text(extra, "namespace"),
        seams=_made(extra, "seams", Seams) or Seams(),
        tag=settings.epoch,
        patience_s=patience_s,
    )


def _settings(extra: Mapping[str, Any]) -> Settings:
    values, where = {name: value for name, value in extra.items() if name not in _OWN}, _WHERE
    if "config" in extra:
        if values:
            name = min(values)
            raise ConfigError(f"{_WHERE}.{name}", values[name], "put it into the file `config` names")
        values, where = read_config(_text(extra, "config") or ""), f"{_WHERE}.config"
        for name in sorted(values.keys() & set(_OWN)):
            raise ConfigError(f"{where}: {name}", values[name], "put it beside `config`, not into the file")
    elif "tiers" not in values:
        raise ConfigError(f"{_WHERE}.tiers", None, 'a list is needed, such as ["dram:64GiB", "nvme:/mnt/kv:1TiB"]')
    for name, why in _REFUSED.items():
        if name in values:
            raise ConfigError(f"{where}.{name}", values[name], f"leave it out: {why}")
    settings = load_config({**values, "namespace": "of each rank"})
    if not any(isinstance(tier, DRAM) for tier in settings.tiers):
        raise ConfigError(f"{where}.tiers", values.get("tiers"), "a DRAM tier is needed, such as dram:64GiB")
    if any(isinstance(tier, HBM) for tier in settings.tiers):
        raise ConfigError(f"{where}.tiers", values.get("tiers"), "leave out hbm: that is the engine's own memory")
    return _with_remote(settings, extra)


def _with_remote(settings: Settings, extra: Mapping[str, Any]) -> Settings:
    """The same with a test's remote tier, or without any where the environment turns it off."""
    made = _made(extra, "remote", Remote)
    if made is not None:
        settings = replace(settings, remote=made)
    if settings.remote is None:
        if settings.epoch is not None:
            remedy = "leave it out: the engine's resets make epochs; a tag is for engines that share a remote tier"
            raise ConfigError(f"{_WHERE}.epoch", settings.epoch.decode(errors="replace"), remedy)
        return settings
    if not remote_enabled():
        _log.warning("TIERCACHE_REMOTE=off: the remote tier is neither asked nor written to")
        return replace(settings, remote=None)
    if settings.epoch is None:
        _log.warning(
            "a remote tier without an epoch: only what this very engine puts there is found, and only until it ends. "
            'Give all engines that share it one tag, such as "epoch": "v1".'
        )
    return settings


def _patience(extra: Mapping[str, Any], remote: Remote | None) -> float:
    given = extra.get("find_patience_s")
    if given is None:
        return remote.find_deadline_s if remote is not None else 0.0
    if not isinstance(given, int | float) or isinstance(given, bool) or not 0 <= given <= MOST_PATIENCE_S:
        raise ConfigError(f"{_WHERE}.find_patience_s", given, f"seconds from 0 to {MOST_PATIENCE_S:g} are needed")
    return float(given)


def _shares(settings: Settings, parts: int) -> tuple[DRAM | NVMe, ...]:
    """The tiers with one of `parts` equal shares of their sizes."""
    shares = []
    for tier in settings.tiers:
        share = tier.size_nbytes // parts
        if share < 1:
            remedy = f"{parts} ranks share it: make it larger"
            raise ConfigError(f"{type(tier).__name__}.size", format_size(tier.size_nbytes), remedy)
        shares.append(replace(cast("DRAM | NVMe", tier), size=share))
    return tuple(shares)


def _engines(extra: Mapping[str, Any], parallel: Any) -> tuple[int, int]:
    """The number of this data-parallel engine, and how many there are.

    To an engine of a dense model vLLM says which one it is, but not among how many: the operator has to.
    """
    engine = int(getattr(parallel, "data_parallel_index", None) or getattr(parallel, "data_parallel_rank", None) or 0)
    told = extra.get("engines")
    if told is not None and (not isinstance(told, int) or isinstance(told, bool) or told < 1):
        raise ConfigError(f"{_WHERE}.engines", told, "the number of data-parallel engines on this machine is needed")
    engines = max(int(parallel.data_parallel_size), told or 1)
    if engine >= engines:
        remedy = f"write the number of data-parallel engines (at least {engine + 1}): they share the sizes"
        raise ConfigError(f"{_WHERE}.engines", told, remedy)
    return engine, engines


def _block_tokens(vllm_config: Any) -> int:
    return int(vllm_config.cache_config.block_size)


def _text(extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise ConfigError(f"{_WHERE}.{name}", value, "a text is needed, or leave it out")
    return value


def _made(extra: Mapping[str, Any], field: str, kind: type[_T]) -> _T | None:
    """Tests put parts of their own in a place: `module:function`, which returns one of this kind."""
    name = _text(extra, field)
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        made = getattr(importlib.import_module(module), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{_WHERE}.{field}", name, f"module:function is needed ({error})") from None
    if not isinstance(made, kind):
        raise ConfigError(f"{_WHERE}.{field}", name, f"it must return {kind.__module__}.{kind.__name__}")
    return made


def _warn_of_policy(transfer: Any) -> None:
    policy = getattr(transfer, "kv_load_failure_policy", "recompute")
    if policy != "recompute":
        _log.warning(
            'kv_load_failure_policy is "%s": a block that cannot be loaded (a bad disk, a wrong checksum) '
            'FAILS ITS REQUEST, although it could be recomputed. Set "kv_load_failure_policy": "recompute".',
            policy,
        )
