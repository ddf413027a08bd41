"""URLs of key tiers: `redis://...`, `mooncake://...`. Checked without connecting, and shown without their passwords.

A backend is a module that is imported when a URL names it, and not before: its library is an extra.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from tiercache.errors import ConfigError
from tiercache.remote.base import KeyTier
from tiercache.values import nearest

__all__ = ["SCHEMES", "Address", "check_url", "is_url", "open_key_tier", "parse_address", "shown"]


@dataclass(frozen=True, slots=True)
class _Backend:
    module: str
    options: str
    """Its `from_url(url)` raises ConfigError for a URL that is wrong."""
    tier: str
    library: str
    """Package that has to be installed."""
    extra: str


_VALKEY = _Backend("tiercache.remote.valkey", "ValkeyOptions", "ValkeyTier", "valkey", "valkey")
_MOONCAKE = _Backend("tiercache.remote.mooncake", "MooncakeOptions", "MooncakeTier", "mooncake", "mooncake")
_BACKENDS = {
    "mooncake": _MOONCAKE,
    "redis": _VALKEY,
    "rediss": _VALKEY,
    "valkey": _VALKEY,
    "valkeys": _VALKEY,
    "unix": _VALKEY,
}
SCHEMES = tuple(_BACKENDS)
_FIELD = "Remote.tier"
_SECRET = "(?:pass|pwd|auth|secret|token)"
"""What is in the names of options that people give passwords in."""


@dataclass(frozen=True, slots=True)
class Address:
    """A URL in parts, percent-decoded."""

    scheme: str
    username: str | None
    password: str | None
    host: str
    port: int | None
    path: str
    options: Mapping[str, str]
    """What follows the question mark."""


def is_url(text: object) -> bool:
    """Whether this is meant as the URL of something."""
    return isinstance(text, str) and re.match(r"\s*[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def shown(url: object) -> Any:
    """A URL for people: `***` for a password. Anything else as it is."""
    if not isinstance(url, str):
        return url
    head, slashes, rest = url.partition("//")
    user, at, tail = rest.rpartition("@")  # the last: a password may hold what it should have percent-encoded
    if at:
        name, colon, _ = user.partition(":")
        user = f"{name}{colon}***" if colon else user
    return head + slashes + user + at + re.sub(rf"(?i)({_SECRET}\w*=)[^&#]*", r"\1***", tail)


def parse_address(url: str, options: tuple[str, ...], field: str = _FIELD) -> Address:
    """The parts of a URL that may have these options. ConfigError for one that cannot be read, has a fragment, or
    another option, or one twice."""
    special = "percent-encode what is special in names and passwords, such as @ : / ? #"
    if "@" in re.sub(r"^[^/]*//[^/?#]*", "", url):
        raise ConfigError(field, shown(url), f"an @ where none belongs: {special}")
    try:
        parts = urlsplit(url.strip())
        port = parts.port
        pairs = parse_qsl(parts.query, keep_blank_values=True, strict_parsing=True) if parts.query else []
    except ValueError as error:
        text = str(error) if "@" not in url else "it cannot be read"  # the error may quote a password
        raise ConfigError(field, shown(url), f"{text}: {special}") from None
    if parts.fragment or url.strip().endswith("#"):
        raise ConfigError(field, shown(url), "nothing may follow a #: write it as %23 where it belongs to a password")
    if not parts.netloc and parts.scheme != "unix":
        raise ConfigError(field, shown(url), f"a host is needed, such as {parts.scheme}://10.0.0.5")
    given: dict[str, str] = {}
    for key, value in pairs:
        if key not in options:
            if re.search(_SECRET, key.lower()):
                raise ConfigError(f"{field} option {key}", "***", "a password goes before the host: redis://:***@host")
            remedy = f"no such option; {', '.join(options)} are{nearest(key, options)}"
            raise ConfigError(f"{field} option {key}", value, remedy)
        if key in given:
            raise ConfigError(f"{field} option {key}", value, "given twice")
        given[key] = value
    username = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    return Address(parts.scheme, username, password, unquote(parts.hostname or ""), port, unquote(parts.path), given)


def check_url(url: str, field: str = _FIELD) -> None:
    """ConfigError where no key tier can be opened from this URL: a scheme that is not known, a library that is not
    installed, a wrong option. Connects to nothing."""
    _options(url, field)


def open_key_tier(url: str) -> KeyTier:
    """A key tier, connected at its first use. To be closed by the caller. ConfigError as `check_url`; OSError where
    the machine lacks what it needs."""
    backend, options = _options(url, _FIELD)
    return cast(KeyTier, getattr(importlib.import_module(backend.module), backend.tier)(options))


def _options(url: str, field: str) -> tuple[_Backend, Any]:
    scheme = url.strip().partition("://")[0].lower()
    backend = _BACKENDS.get(scheme)
    if backend is None or not is_url(url):
        remedy = f"one of {', '.join(f'{each}://' for each in _BACKENDS)} is needed{nearest(scheme, _BACKENDS)}"
        raise ConfigError(field, shown(url), remedy)
    options = getattr(importlib.import_module(backend.module), backend.options).from_url(url)
    if find_spec(backend.library) is None:
        raise ConfigError(field, shown(url), f"a library is missing: pip install 'tiercache[{backend.extra}]'")
    return backend, options
