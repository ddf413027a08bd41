"""Tiers and settings from Python objects, strings, dicts, TOML or JSON: checked, and explained where they are wrong.

Every ConfigError names the field, its value, and what would be right.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

from tiercache.config_remote import Remote, take_remote
from tiercache.errors import ConfigError, LayoutError
from tiercache.hints import check_ttl
from tiercache.layout import KVLayout, Namespace
from tiercache.remote.urls import SCHEMES, is_url, shown
from tiercache.values import format_size, nearest, parse_size

__all__ = [
    "DRAM",
    "EXCLUSIVE_BELOW",
    "HBM",
    "POLICIES",
    "SPEED_REMEDY",
    "Durability",
    "NVMe",
    "PrefillSpeed",
    "Remote",
    "Settings",
    "Switch",
    "Tier",
    "format_size",
    "is_speed",
    "load_config",
    "parse_size",
    "parse_tier",
    "ram_nbytes",
    "read_config",
]

EXCLUSIVE_BELOW = 5
"""A slow tier under this many times the fast one gives its copy up on promotion."""
POLICIES = ("lru", "reuse")

Durability: TypeAlias = Literal["power", "process"]
Switch: TypeAlias = Literal["on", "off", "loads-off", "stores-off"]
PrefillSpeed: TypeAlias = float | Literal["learnt"] | None
"""Tokens per second."""

SPEED_REMEDY = 'tokens per second above 0, "learnt", or nothing (all that is found is offered) is needed'
_DURABILITIES = ("power", "process")
_SWITCHES = ("on", "off", "loads-off", "stores-off")


@dataclass(frozen=True)
class HBM:
    """GPU memory, or with `device="cpu"` host memory that stands in for it (and counts as RAM)."""

    size: int | str
    device: str = "cuda"

    def __post_init__(self) -> None:
        """Check; `size` becomes bytes."""
        _set_size(self, "HBM.size", self.size)
        if not isinstance(self.device, str) or not re.fullmatch(r"cpu|cuda(:[0-9]+)?", self.device):
            raise ConfigError("HBM.device", self.device, '"cuda", "cuda:1" or "cpu" is needed')

    @property
    def size_nbytes(self) -> int:
        """The size in bytes."""
        return cast(int, self.size)


@dataclass(frozen=True)
class DRAM:
    """Host memory."""

    size: int | str

    def __post_init__(self) -> None:
        """Check; `size` becomes bytes."""
        _set_size(self, "DRAM.size", self.size)

    @property
    def size_nbytes(self) -> int:
        """The size in bytes."""
        return cast(int, self.size)


@dataclass(frozen=True)
class NVMe:
    """Files in a directory of their own. `path` becomes a Path, `~` expanded."""

    path: str | os.PathLike[str]
    size: int | str
    write_after_s: float | None = 2.0
    """Seconds after which a block in the tier above is written here too. 0: at once when it is stored, after prefill;
    None: only when it is evicted there. Flush and close write in any case: docs/operations.md has a table."""
    max_writes_per_hit: float | None = None
    """A block is written only where this many writes bring at least one hit, as far as the policy can tell, and the
    measured writes per hit are held below it: spares a disk what will not be asked for again, and gives up its warmth
    after a crash. None: every block; needs "reuse"."""
    durability: Durability = "power"
    """"power": what is acknowledged survives a power cut. "process": only a crash of the process; no data sync."""
    threads: int = 8
    """Threads of the tier's I/O pool."""
    read_deadline_s: float = 5.0
    write_deadline_s: float = 30.0

    def __post_init__(self) -> None:
        """Check; `size` becomes bytes."""
        if not isinstance(self.path, (str, os.PathLike)) or not os.fspath(self.path):
            raise ConfigError("NVMe.path", self.path, "a directory is needed")
        object.__setattr__(self, "path", Path(self.path).expanduser())
        _set_size(self, "NVMe.size", self.size)
        if self.write_after_s is not None:
            _check_seconds("NVMe.write_after_s", self.write_after_s, zero=True, also=", or None (on eviction only)")
        if self.max_writes_per_hit is not None:
            check_max_writes_per_hit("NVMe.max_writes_per_hit", self.max_writes_per_hit)
        _check_choice("NVMe.durability", self.durability, _DURABILITIES)
        _check_int("NVMe.threads", self.threads, 1, 256)
        _check_seconds("NVMe.read_deadline_s", self.read_deadline_s)
        _check_seconds("NVMe.write_deadline_s", self.write_deadline_s)

    @property
    def size_nbytes(self) -> int:
        """The size in bytes."""
        return cast(int, self.size)

    @property
    def directory(self) -> Path:
        """`path` as a Path."""
        return cast(Path, self.path)


Tier: TypeAlias = HBM | DRAM | NVMe
_TIERS: dict[str, type[HBM] | type[DRAM] | type[NVMe]] = {"hbm": HBM, "dram": DRAM, "nvme": NVMe}


def _set_size(tier: object, name: str, size: int | str) -> None:
    nbytes = parse_size(size, name)
    if nbytes == 0:
        raise ConfigError(name, size, "more than 0 bytes are needed")
    object.__setattr__(tier, "size", nbytes)


def _check_seconds(name: str, value: object, zero: bool = False, also: str = "") -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or cast(float, value) < 0 or (value == 0 and not zero):
        raise ConfigError(name, value, f"a number of seconds {'of at least' if zero else 'above'} 0 is needed{also}")


def check_max_writes_per_hit(name: str, value: object, policy: str = "reuse") -> None:
    """ConfigError for what is no limit, or one that this policy knows nothing of."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or cast(float, value) < 1:
        raise ConfigError(name, value, "a number of at least 1, such as 6, is needed, or none (every block is written)")
    if policy != "reuse":
        raise ConfigError(name, value, f"policy {policy!r} cannot tell what will be asked for again: use 'reuse'")


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(name, value, f"an integer from {low} to {high} is needed")


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(name, value, f"one of {', '.join(choices)} is needed{nearest(value, choices)}")


def _build(make: Any, values: Mapping[str, Any], where: str) -> Any:
    """Call a dataclass with a mapping; ConfigError for keys it does not have or needs."""
    known = {item.name: item for item in fields(make)}
    prefix = f"{where}." if where else ""
    for key in values:
        if key not in known:
            raise ConfigError(f"{prefix}{key}", values[key], f"no such setting{nearest(key, known)}")
    for name, item in known.items():
        if name not in values and item.default is MISSING and item.default_factory is MISSING:
            raise ConfigError(f"{prefix}{name}", None, "this setting is required")
    return make(**values)


def parse_tier(tier: Tier | Remote | str | Mapping[str, Any], where: str = "tier") -> Tier | Remote:
    """A tier from itself, from a string, or from a mapping (`kind` and the fields of the class).

    Strings: `dram:8GiB`, `nvme:/mnt/kv:200GiB` (the path may hold colons), `hbm:2GiB`, `hbm:cpu:2GiB`, and URLs of key
    tiers such as `redis://10.0.0.5` (a Remote; as a mapping `{"remote": "redis://10.0.0.5", "quota": 0.2}`).
    ConfigError otherwise.
    """
    if isinstance(tier, (HBM, DRAM, NVMe, Remote)):
        return tier
    if isinstance(tier, Mapping):
        if "remote" in tier:
            values = {("tier" if key == "remote" else key): tier[key] for key in tier}
            return cast(Remote, _build(Remote, values, where))
        kind = tier.get("kind")
        if not isinstance(kind, str) or kind not in _TIERS:
            raise ConfigError(f"{where}.kind", kind, f"one of {', '.join(_TIERS)} is needed{nearest(kind, _TIERS)}")
        return cast(Tier, _build(_TIERS[kind], {key: tier[key] for key in tier if key != "kind"}, where))
    if not isinstance(tier, str):
        raise ConfigError(where, tier, "a tier object, a string such as dram:8GiB, or a table is needed")
    if is_url(tier):
        return Remote(tier)
    kind, _, rest = tier.partition(":")
    kind = kind.strip().lower()
    if kind in SCHEMES:
        raise ConfigError(where, shown(tier), f"a URL is needed, such as {kind}://10.0.0.5")
    if kind not in _TIERS:
        raise ConfigError(where, tier, f"one of {', '.join(_TIERS)} is needed before the colon{nearest(kind, _TIERS)}")
    middle, colon, size = rest.rpartition(":")
    if not size:
        raise ConfigError(where, tier, f"a size is needed at the end, such as {tier.rstrip(':')}:8GiB")
    if kind == "nvme":
        if not middle:
            raise ConfigError(where, tier, "a directory and a size are needed, such as nvme:/mnt/kv:200GiB")
        return NVMe(middle, parse_size(size, where))
    nbytes = parse_size(size, where)
    if kind == "hbm":
        return HBM(nbytes, middle) if colon else HBM(nbytes)
    if colon:
        raise ConfigError(where, tier, "only a size is needed, such as dram:8GiB")
    return DRAM(nbytes)


def _switch_from_env() -> Switch:
    value = os.environ.get("TIERCACHE", "").strip().lower() or "on"
    _check_choice("TIERCACHE (environment)", value, _SWITCHES)
    return cast(Switch, value)


@dataclass(frozen=True)
class Settings:
    """Everything a cache is built from, checked. ConfigError (or LayoutError, from a KVLayout) where it is wrong."""

    tiers: tuple[Tier, ...]
    """Slot tiers, fastest first: HBM, DRAM, NVMe, each at most once. Also given as a list, as strings or as mappings;
    a Remote among them becomes `remote`."""
    layout: KVLayout | None = None
    """None: learnt from the first store or from the manifest. Also given as a mapping."""
    namespace: Namespace | None = None
    """None: the directory is the identity. Also given as a string, or as a mapping of parts."""
    epoch: bytes | None = None
    """Which weights; None: the manifest's, else a new nonce. Also given as a string (UTF-8)."""
    block_tokens: int = 16
    policy: str = "reuse"
    exclusive: bool | None = None
    """Give the slow copy up on promotion; None: where the slow tier is under EXCLUSIVE_BELOW times the fast one."""
    ttl_s: float | None = None
    """Seconds after which a block ends that no store names again; None: never. See `TieredKVCache.store`."""
    prefill_tokens_per_s: PrefillSpeed = None
    """Speed of a recompute, to which lookups compare loads: a number, "learnt" (from `note_prefill`), or None: they
    do not, and all that is found is offered."""
    switch: Switch = field(default_factory=_switch_from_env)
    """Kill switch at start; by default from the environment variable TIERCACHE."""
    remote: Remote | None = None
    """The key tier; also given among `tiers`, after HBM and DRAM, before NVMe. Needs a namespace."""

    def __post_init__(self) -> None:
        """Check, and turn every short form into the object it stands for."""
        tiers, remote = _checked_tiers(self.tiers)
        object.__setattr__(self, "tiers", tiers)
        if remote is not None:
            object.__setattr__(self, "remote", remote)
        layout: Any = self.layout
        if isinstance(layout, Mapping):
            try:
                object.__setattr__(self, "layout", KVLayout.from_dict(layout))
            except LayoutError as error:
                raise ConfigError("layout", layout, str(error)) from None
        elif layout is not None and not isinstance(layout, KVLayout):
            raise ConfigError("layout", layout, "a KVLayout, or a table of block_shape and dtype, is needed")
        object.__setattr__(self, "namespace", _checked_namespace(self.namespace))
        if self.remote is not None and not isinstance(self.remote, Remote):
            raise ConfigError("remote", shown(self.remote), "a Remote, or nothing, is needed; a URL goes among tiers")
        if self.remote is not None and self.namespace is None:
            raise ConfigError("namespace", None, "a remote tier is shared: name model and weights")
        object.__setattr__(self, "epoch", _checked_epoch(self.epoch))
        _check_int("block_tokens", self.block_tokens, 1, 1 << 20)
        _check_choice("policy", self.policy, POLICIES)
        for i, tier in enumerate(self.tiers):
            if isinstance(tier, NVMe) and tier.max_writes_per_hit is not None:
                check_max_writes_per_hit(f"tiers[{i}].max_writes_per_hit", tier.max_writes_per_hit, self.policy)
        if self.exclusive is not None and not isinstance(self.exclusive, bool):
            raise ConfigError("exclusive", self.exclusive, "true, false, or nothing (automatic) is needed")
        if self.ttl_s is not None:
            check_ttl("ttl_s", self.ttl_s)
        _check_choice("switch", self.switch, _SWITCHES)
        if not is_speed(self.prefill_tokens_per_s):
            raise ConfigError("prefill_tokens_per_s", self.prefill_tokens_per_s, SPEED_REMEDY)

    @property
    def loads_enabled(self) -> bool:
        """False where the switch turns loads off."""
        return self.switch in ("on", "stores-off")

    @property
    def stores_enabled(self) -> bool:
        """False where the switch turns stores off."""
        return self.switch in ("on", "loads-off")


def is_speed(value: object) -> bool:
    """Is this a `PrefillSpeed`: tokens per second (finite, above 0), "learnt", or None?"""
    if value is None or value == "learnt":
        return True
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return number and 0 < cast(float, value) < math.inf


def _checked_tiers(tiers: Any) -> tuple[tuple[Tier, ...], Remote | None]:
    example = 'a list of tiers is needed, fastest first, such as ["dram:8GiB", "nvme:/mnt/kv:200GiB"]'
    if isinstance(tiers, (str, bytes)) or not isinstance(tiers, Sequence) or not tiers:
        raise ConfigError("tiers", shown(tiers), example)
    order = tuple(_TIERS.values())
    parsed, remote = take_remote([parse_tier(tier, f"tiers[{i}]") for i, tier in enumerate(tiers)], order)
    places = [order.index(type(tier)) for tier in parsed]
    for i in range(1, len(places)):
        if places[i] == places[i - 1]:
            raise ConfigError(f"tiers[{i}]", tiers[i], "each kind of tier is allowed once")
        if places[i] < places[i - 1]:
            raise ConfigError(f"tiers[{i}]", tiers[i], "tiers go from fast to slow: HBM, DRAM, NVMe")
    return parsed, remote


def _checked_namespace(value: Any) -> Namespace | None:
    if value is None or isinstance(value, Namespace):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return Namespace.of(**value)
    return Namespace(value)


def _checked_epoch(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogatepass")
    if not isinstance(value, bytes) or not 0 < len(value) <= 255:
        raise ConfigError("epoch", value, "1 to 255 bytes, as bytes or str, are needed")
    return value


def load_config(source: Mapping[str, Any] | str | os.PathLike[str]) -> Settings:
    """Settings from a mapping, or from a `.toml` or `.json` file that holds one.

    ConfigError for a file that cannot be read or parsed, and for unknown, missing or wrong settings.
    """
    return cast(Settings, _build(Settings, source if isinstance(source, Mapping) else read_config(source), ""))


def read_config(source: str | os.PathLike[str]) -> dict[str, Any]:
    """What a `.toml` or `.json` file of settings holds, not checked yet. ConfigError where it cannot be read."""
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError("config", source, "a mapping, or the path of a .toml or .json file, is needed")
    path = Path(source).expanduser()
    if path.suffix not in (".toml", ".json"):
        raise ConfigError("config", str(path), "a file whose name ends in .toml or .json is needed")
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError("config", str(path), f"cannot be read: {error.strerror}") from None
    except ValueError as error:  # bad UTF-8, TOML or JSON
        raise ConfigError("config", str(path), f"cannot be parsed: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("config", str(path), "the file must hold one table of settings")
    return values


def ram_nbytes(tiers: Iterable[Tier]) -> int:
    """Bytes of host memory that these tiers take: DRAM, and HBM on the device "cpu"."""
    return sum(t.size_nbytes for t in tiers if isinstance(t, DRAM) or (isinstance(t, HBM) and t.device == "cpu"))
