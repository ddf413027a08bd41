"""Shipped for tests: tiers that fail, delay and hang, a mover run by hand, and the suite every tier must pass.

The suite is in `tiercache.testing.tier_suite`, the only module that needs pytest.
"""

from tiercache.testing.stepped import SteppedMover
from tiercache.testing.tiers import DelayingTier, FaultyTier, HangingTier, WrappedTier

__all__ = ["DelayingTier", "FaultyTier", "HangingTier", "SteppedMover", "WrappedTier"]
