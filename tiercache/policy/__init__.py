"""Which block leaves first."""

from __future__ import annotations

from tiercache.errors import ConfigError
from tiercache.policy.base import Policy
from tiercache.policy.lru import LRU

__all__ = ["LRU", "POLICIES", "Policy", "make_policy"]

POLICIES: dict[str, type[LRU]] = {LRU.name: LRU}
"""Name -> class, as accepted by configuration."""


def make_policy(name: str) -> Policy:
    """A new policy by name; ConfigError names the ones there are."""
    if name not in POLICIES:
        raise ConfigError("policy", name, f"choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
