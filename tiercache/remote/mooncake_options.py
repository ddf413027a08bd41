"""What `mooncake://...` says: which store, and how this process takes part in it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from tiercache.config import parse_size
from tiercache.errors import ConfigError
from tiercache.remote.urls import shown
from tiercache.values import nearest

__all__ = ["MooncakeOptions"]

_FIELD = "Remote.tier"
_PROTOCOLS = ("tcp", "rdma")
_NAMES = ("protocol", "device", "segment", "buffer", "replicas", "metadata", "local", "client", "ha", "metrics")
_ADDRESS = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):[0-9]{1,5}")
_LEAST_BUFFER = 1 << 20


@dataclass(frozen=True)
class MooncakeOptions:
    """A Mooncake Store and our part in it. Of a URL by `from_url`; ConfigError names the option, its value, and what
    would be right."""

    masters: tuple[str, ...]
    """`host:port` of the master; with `ha="etcd"` of the etcd that elects it, one or more."""
    protocol: str = "tcp"
    device: str = ""
    """Names of RDMA devices, with commas; empty: Mooncake chooses."""
    segment_nbytes: int = 0
    """Memory that this process gives to the store; what is in it goes with the process."""
    buffer_nbytes: int = 16 << 20
    """Mooncake's own buffers."""
    replicas: int = 1
    metadata: str = "P2PHANDSHAKE"
    local: str = ""
    """This machine's address as others reach it; empty: the one that leads to the master."""
    client: str = ""
    """`host:port` of a `mooncake_client` on this machine, reached over shared memory; empty: one in this process."""
    ha: str = ""
    metrics: str = ""
    """`host:port` of the master's metrics, for `pressure`; empty: the pressure is unknown."""

    @classmethod
    def from_url(cls, url: str) -> MooncakeOptions:
        """Read `mooncake://host:port[,host:port...]?option=value&...`. Connects to nothing."""
        try:
            parts = urlsplit(url.strip())
        except ValueError as error:
            raise ConfigError(_FIELD, shown(url), f"a URL that can be read is needed: {error}") from None
        if parts.scheme != "mooncake":
            raise ConfigError(_FIELD, shown(url), "it begins with mooncake://")
        if parts.path not in ("", "/") or parts.fragment or "@" in parts.netloc:
            raise ConfigError(
                _FIELD, shown(url), "a host, a port and options are all: mooncake://host:50051?protocol=tcp"
            )
        masters = tuple(_address("host", each) for each in parts.netloc.split(","))
        given = _given(parts.query)
        if len(masters) > 1 and given.get("ha") != "etcd":
            raise ConfigError(f"{_FIELD}, host", parts.netloc, "more than one is for ha=etcd")
        client = given.get("client", "")
        return cls(
            masters=masters,
            protocol=_one_of("protocol", given.get("protocol", "tcp"), _PROTOCOLS),
            device=given.get("device", ""),
            segment_nbytes=_size("segment", given.get("segment", "0B"), 0),
            buffer_nbytes=_size("buffer", given.get("buffer", "16MiB"), _LEAST_BUFFER),
            replicas=_count("replicas", given.get("replicas", "1")),
            metadata=given.get("metadata", "P2PHANDSHAKE"),
            local=given.get("local", ""),
            client=_address("client", client) if client else "",
            ha=_one_of("ha", given.get("ha", ""), ("", "etcd")),
            metrics=_address("metrics", given["metrics"]) if given.get("metrics") else "",
        )

    @property
    def endpoint(self) -> str:
        """The store, for people."""
        return ",".join(self.masters)

    @property
    def master_address(self) -> str:
        """As Mooncake wants it."""
        return "etcd://" + ";".join(self.masters) if self.ha else self.masters[0]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[::1]:port` included."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _given(query: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=False)
    given: dict[str, str] = {}
    for name, value in pairs:
        if name not in _NAMES:
            raise ConfigError(f"{_FIELD}, option", name, f"options are {', '.join(_NAMES)}{nearest(name, _NAMES)}")
        if name in given:
            raise ConfigError(f"{_FIELD}, {name}", value, "each option is given once")
        given[name] = value
    return given


def _address(name: str, text: str) -> str:
    if not _ADDRESS.fullmatch(text) or not 0 < split_address(text)[1] < 1 << 16:
        raise ConfigError(f"{_FIELD}, {name}", text, "host:port is needed, such as 10.0.0.1:50051")
    try:
        split_address(text)[0].encode("idna")
    except UnicodeError:
        raise ConfigError(f"{_FIELD}, {name}", text, "this cannot be the name of a host") from None
    return text


def _one_of(name: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ConfigError(f"{_FIELD}, {name}", value, f"one of {', '.join(filter(None, known))} is needed")
    return value


def _size(name: str, value: str, least: int) -> int:
    nbytes = parse_size(value, f"{_FIELD}, {name}")
    if nbytes < least:
        raise ConfigError(f"{_FIELD}, {name}", value, f"at least {least} bytes are needed")
    return nbytes


def _count(name: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= 16:
        raise ConfigError(f"{_FIELD}, {name}", value, "a number from 1 to 16 is needed")
    return int(value)
