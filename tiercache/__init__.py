"""tiercache: an embeddable, persistent, tiered KV cache for LLM inference."""

from tiercache.cache import TieredKVCache
from tiercache.config import DRAM, HBM, NVMe, Settings, load_config
from tiercache.errors import (
    CacheClosedError,
    ConfigError,
    DirectoryInUseError,
    FormatVersionError,
    LayoutError,
    NotDurableError,
    TierCacheError,
    WorkerThreadError,
)
from tiercache.layout import KVLayout, Namespace
from tiercache.loaded import Loaded, LoadFuture
from tiercache.match import Match, Pin, Ticket
from tiercache.stats import CacheStats, TierStats
from tiercache.types import COLD

__version__ = "0.1.0"

__all__ = [
    "COLD",
    "DRAM",
    "HBM",
    "CacheClosedError",
    "CacheStats",
    "ConfigError",
    "DirectoryInUseError",
    "FormatVersionError",
    "KVLayout",
    "LayoutError",
    "LoadFuture",
    "Loaded",
    "Match",
    "NVMe",
    "Namespace",
    "NotDurableError",
    "Pin",
    "Settings",
    "Ticket",
    "TierCacheError",
    "TierStats",
    "TieredKVCache",
    "WorkerThreadError",
    "load_config",
]
