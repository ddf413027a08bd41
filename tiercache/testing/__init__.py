"""Shipped for tests: faulty, delaying and hanging tiers and files, key tiers, a mover run by hand, suites for tiers.

The suites are in `tier_suite`, `key_tier_suite` and `cache_suite`, the only modules that need pytest.
"""

from tiercache.testing.faults import FaultPlan, FaultyFiles
from tiercache.testing.key_tiers import FaultyKeyTier, HangingKeyTier, MemoryKeyTier, SlowKeyTier, WrappedKeyTier
from tiercache.testing.stepped import SteppedMover
from tiercache.testing.tiers import DelayingTier, FaultyTier, FlakyTier, HangingTier, WrappedTier

__all__ = [
    "DelayingTier",
    "FaultPlan",
    "FaultyFiles",
    "FaultyKeyTier",
    "FaultyTier",
    "FlakyTier",
    "HangingKeyTier",
    "HangingTier",
    "MemoryKeyTier",
    "SlowKeyTier",
    "SteppedMover",
    "WrappedKeyTier",
    "WrappedTier",
]
