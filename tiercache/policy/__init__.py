"""Which block leaves first."""

from __future__ import annotations

from tiercache.errors import ConfigError
from tiercache.policy.base import MARK, Policy
from tiercache.policy.lru import LRU
from tiercache.policy.reuse import Reuse

__all__ = ["LRU", "MARK", "POLICIES", "Policy", "Reuse", "make_policy"]

POLICIES: dict[str, type[LRU] | type[Reuse]] = {LRU.name: LRU, Reuse.name: Reuse}
"""Name -> class, as accepted by configuration."""


def make_policy(name: str) -> Policy:
    """A new policy by name; ConfigError names the ones there are."""
    if name not in POLICIES:
        raise ConfigError("policy", name, f"choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()
