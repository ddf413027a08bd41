"""Key tiers: shared stores of blocks, found by key, that change without us; see `base`."""

from tiercache.remote.base import KEY_NBYTES, KeyTier
from tiercache.remote.frame import frame_nbytes, seal, verified

__all__ = ["KEY_NBYTES", "KeyTier", "frame_nbytes", "seal", "verified"]
