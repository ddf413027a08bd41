"""The data plane: runs copy jobs over tiers, verifies what it reads, and records what a persistent tier holds."""

from tiercache.mover.keyed import KeyTierSpec
from tiercache.mover.ledger import BlockLedger, MemoryLedger
from tiercache.mover.mover import Mover
from tiercache.mover.stats import LevelStats, MoverStats
from tiercache.mover.threads import is_worker_thread

__all__ = ["BlockLedger", "KeyTierSpec", "LevelStats", "MemoryLedger", "Mover", "MoverStats", "is_worker_thread"]
