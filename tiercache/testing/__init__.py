"""Shipped for tests: faulty, delaying and hanging tiers and files, a mover run by hand, and the suite for every tier.

The suite is in `tiercache.testing.tier_suite`, the only module that needs pytest.
"""

from tiercache.testing.faults import FaultPlan, FaultyFiles
from tiercache.testing.stepped import SteppedMover
from tiercache.testing.tiers import DelayingTier, FaultyTier, HangingTier, WrappedTier

__all__ = ["DelayingTier", "FaultPlan", "FaultyFiles", "FaultyTier", "HangingTier", "SteppedMover", "WrappedTier"]
