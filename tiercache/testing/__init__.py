"""Shipped for tests: faulty, delaying and hanging tiers and files, a mover run by hand, and the suite for every tier.

The suite is in `tiercache.testing.tier_suite`, the only module that needs pytest.
"""

from tiercache.testing.faults import FaultPlan, FaultyFiles
from tiercache.testing.stepped import SteppedMover
from tiercache.testing.tiers import DelayingTier, FaultyTier, FlakyTier, HangingTier, WrappedTier

__all__ = [
    "DelayingTier",
    "FaultPlan",
    "FaultyFiles",
    "FaultyTier",
    "FlakyTier",
    "HangingTier",
    "SteppedMover",
    "WrappedTier",
]
