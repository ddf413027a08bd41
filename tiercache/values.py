"""Values as people write them: sizes with units, and names that are nearly right."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from tiercache.errors import ConfigError

__all__ = ["format_size", "nearest", "parse_size"]

_UNITS = {"B": 1} | {
    unit: base**power
    for power, letter in enumerate("KMGTP", start=1)
    for unit, base in ((f"{letter}B", 1000), (f"{letter}IB", 1024))
}


def parse_size(value: int | str, field_name: str = "size") -> int:
    """Bytes of `8GiB` (2**30), `200GB` (10**9), `4096B`, `1.5MiB`, or of a plain number. At least 0, below 2**63.

    ConfigError where it is none of these; `8G` is refused, for it may mean either unit.
    """
    remedy = 'write a number with a unit, such as "8GiB" (2^30) or "8GB" (10^9)'
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ConfigError(field_name, value, remedy)
    if isinstance(value, int):
        return _checked_size(value, value, field_name)
    match = re.fullmatch(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", value, re.ASCII)
    if match is None:
        raise ConfigError(field_name, value, remedy)
    number, unit = match[1], match[2].upper() or "B"
    if len(unit) == 1 and unit in "KMGTP":
        binary, decimal = f"{number}{unit}iB", f"{number}{unit}B"
        raise ConfigError(field_name, value, f'ambiguous: write "{binary}" (powers of 1024) or "{decimal}" (of 1000)')
    if unit not in _UNITS:
        raise ConfigError(field_name, value, remedy)
    whole, _, decimals = number.partition(".")
    scaled, rest = divmod(int(whole + decimals) * _UNITS[unit], 10 ** len(decimals))
    if rest and unit == "B":
        raise ConfigError(field_name, value, "bytes come whole")
    return _checked_size(scaled, value, field_name)


def _checked_size(nbytes: int, value: int | str, field_name: str) -> int:
    if not 0 <= nbytes < 1 << 63:
        raise ConfigError(field_name, value, "a size of at least 0 and below 2^63 bytes is needed")
    return nbytes


def format_size(nbytes: int) -> str:
    """`nbytes` in the largest binary unit that it reaches, at most two decimals, rounded down: 8GiB, 1.5MiB, 999B."""
    for power, unit in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << power:
            hundredths = nbytes * 100 >> power
            return f"{hundredths / 100:.2f}".rstrip("0").rstrip(".") + unit
    return f"{nbytes}B"


def nearest(value: object, choices: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing."""
    near = difflib.get_close_matches(str(value), list(choices), n=1)
    return f"; did you mean {near[0]}?" if near else ""
