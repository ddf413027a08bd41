"""Key tiers: shared stores of blocks, found by key, that change without us; see `base`."""

from tiercache.remote.base import (
    KEY_NBYTES,
    HasEndpoint,
    KeyTier,
    MeasuresTransport,
    RegistersMemory,
    TellsPressure,
)
from tiercache.remote.frame import frame_nbytes, seal, seal_rows, verified

__all__ = [
    "KEY_NBYTES",
    "HasEndpoint",
    "KeyTier",
    "MeasuresTransport",
    "RegistersMemory",
    "TellsPressure",
    "frame_nbytes",
    "seal",
    "seal_rows",
    "verified",
]
