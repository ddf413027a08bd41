"""Options of a Valkey or Redis tier, as a URL gives them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from tiercache.errors import ConfigError
from tiercache.remote.urls import Address, parse_address

__all__ = ["ValkeyOptions"]

_FIELD = "Remote.tier"
_TLS = ("rediss", "valkeys")
_COMMON = ("ttl_s", "connections")
_OF_TLS = ("ca", "cert", "key", "check_hostname")
_LONGEST_TTL_S = 1e9


@dataclass(frozen=True)
class ValkeyOptions:
    """Where a server is, and how to speak to it. ConfigError for a value that is wrong."""

    host: str = ""
    port: int = 6379
    path: str = ""
    """Of a unix socket, in place of host and port."""
    db: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: bool = False
    ca: str | None = None
    """File of the certificates that are trusted, beside the system's."""
    cert: str | None = None
    """File of our own certificate, where the server asks for one, and of its key."""
    key: str | None = None
    check_hostname: bool = True
    ttl_s: float | None = None
    """Seconds after which the server forgets a block, counted from its last put; None: never by itself."""
    connections: int = 16
    """At most so many at a time; a cache's threads use one each."""

    def __post_init__(self) -> None:
        """Check."""
        if not self.host and not self.path:
            raise ConfigError(f"{_FIELD} host", self.host, "a host, or the path of a unix socket, is needed")
        try:
            self.host.encode("idna")
        except UnicodeError:
            raise ConfigError(f"{_FIELD} host", self.host, "this cannot be the name of a host") from None
        if self.ttl_s is not None and not 0.001 <= self.ttl_s <= _LONGEST_TTL_S:
            raise ConfigError(f"{_FIELD} option ttl_s", self.ttl_s, "seconds from 0.001 to 1e9 are needed, or nothing")
        for name, value, low, high in (
            ("port", self.port, 1, 65535),
            ("database", self.db, 0, 1 << 20),
            ("option connections", self.connections, 1, 256),
        ):
            if not low <= value <= high:
                raise ConfigError(f"{_FIELD} {name}", value, f"an integer from {low} to {high} is needed")
        for name in ("ca", "cert", "key"):
            file = getattr(self, name)
            if file is not None and not Path(file).is_file():
                raise ConfigError(f"{_FIELD} option {name}", file, "no such file")
        if self.key is not None and self.cert is None:
            raise ConfigError(f"{_FIELD} option key", self.key, "it belongs to a certificate: give cert, too")

    @property
    def endpoint(self) -> str:
        """Where it is, for people."""
        if self.path:
            return self.path
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def from_url(cls, url: str) -> Self:
        """From `redis://[user[:password]@]host[:port][/db]?ttl_s=...`, `rediss://` (TLS), or `unix:///path?db=...`;
        `valkey` may stand for `redis`."""
        scheme = url.strip().partition(":")[0].lower()
        tls, local = scheme in _TLS, scheme == "unix"
        address = parse_address(url, _COMMON + (_OF_TLS if tls else ()) + (("db",) if local else ()), _FIELD)
        if local and address.host:
            raise ConfigError(_FIELD, f"unix://{address.host}{address.path}", "a path is needed, such as unix:///run/s")
        option = address.options
        return cls(
            host=address.host,
            port=6379 if address.port is None else address.port,
            path=address.path if local else "",
            db=_database(address, local),
            username=address.username,
            password=address.password,
            tls=tls,
            ca=option.get("ca"),
            cert=option.get("cert"),
            key=option.get("key"),
            check_hostname=_switch("check_hostname", option.get("check_hostname", "yes")),
            ttl_s=_number("ttl_s", option["ttl_s"]) if "ttl_s" in option else None,
            connections=_integer("option connections", option.get("connections", "16")),
        )


def _database(address: Address, local: bool) -> int:
    text = address.options.get("db", "") if local else address.path.strip("/")
    return _integer("database", text) if text else 0


def _integer(name: str, text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise ConfigError(f"{_FIELD} {name}", text, "an integer is needed")
    return int(text)


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise ConfigError(f"{_FIELD} option {name}", text, "a number is needed")
    return value


def _switch(name: str, text: str) -> bool:
    known = {"yes": True, "true": True, "1": True, "on": True, "no": False, "false": False, "0": False, "off": False}
    if text.lower() not in known:
        raise ConfigError(f"{_FIELD} option {name}", text, "yes or no is needed")
    return known[text.lower()]
