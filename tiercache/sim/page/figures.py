"""Figures as text: what a reader takes in at a glance, exact where it matters."""

from __future__ import annotations

__all__ = ["amount", "duration", "percent", "rate", "size", "tokens"]

_GAP = "\u00a0"
"""A space at which no line breaks."""


def percent(share: float) -> str:
    """0.2896 is "29.0 %", and what is small keeps two digits."""
    value = 100 * share
    if value == 0 or value >= 1:
        return f"{value:.1f}{_GAP}%"
    return f"{value:.2g}{_GAP}%" if value >= 0.01 else f"under 0.01{_GAP}%"


def tokens(count: float) -> str:
    """40,648,900 is "40.6 M"; below 10,000 it is written out."""
    return _scaled(count, 1000, ("", "K", "M", "G", "T"), 10_000)


def size(nbytes: float) -> str:
    """Of memory, in powers of 1024: "1.5 GiB"."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024)


def amount(nbytes: float) -> str:
    """Of what was written, in powers of 1000, as makers of drives count: "13.6 GB"."""
    return _scaled(nbytes, 1000, ("B", "kB", "MB", "GB", "TB", "PB"), 1000)


def _scaled(value: float, step: int, units: tuple[str, ...], plain_below: int) -> str:
    if value < plain_below:
        return f"{value:,.0f}{_GAP}{units[0]}".rstrip()
    power = 0
    while value >= step and power < len(units) - 1:
        value /= step
        power += 1
    digits = 2 if value < 10 else int(value < 100)
    text = f"{value:,.{digits}f}"
    return (text.rstrip("0").rstrip(".") if digits else text) + _GAP + units[power]


def rate(value: float) -> str:
    """Three digits of a number that may be large or small."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """In the unit a person would use: "48 s", "5.4 min", "23.5 h", "3.1 days"."""
    for unit_s, unit, least in ((86400.0, "days", 2 * 86400.0), (3600.0, "h", 7200.0), (60.0, "min", 120.0)):
        if seconds >= least:
            return f"{seconds / unit_s:,.1f}".removesuffix(".0") + _GAP + unit
    if seconds and seconds < 0.001:
        return f"under 1{_GAP}ms"
    return f"{seconds * 1000:.0f}{_GAP}ms" if 0 < seconds < 1 else f"{seconds:.3g}{_GAP}s"
