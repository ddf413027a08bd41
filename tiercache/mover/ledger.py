"""What the slots of a persistent tier hold: the one face the mover sees, and its plain form in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiercache.types import Bools, Claims, Floats, Hints, Idents, Slots, Uses

__all__ = ["BlockLedger", "Checksums", "MemoryLedger", "chosen_claims", "fail_orphans"]

Checksums = NDArray[np.uint64]


class BlockLedger(Protocol):
    """Slot -> (ident, checksum) of one tier that verifies, and what of it survives a restart.

    All but `commit` and `close` are short, touch memory only, and may be called while a commit runs.
    """

    healthy: bool
    """False after a commit that failed, until one succeeds."""

    def expected(self, slots: Slots) -> tuple[Idents, Checksums]:
        """Ident and checksum that the bytes of each slot must have; both 0 where it holds nothing. Changes nothing."""

    def claimed(self, slots: Slots) -> Bools:
        """Which of these slots hold something that a commit has made last."""

    def starting(self, slots: Slots) -> None:
        """These slots are about to be overwritten: what they held is gone, and its claim ends with the next commit."""

    def written(self, slots: Slots, idents: Idents, checksums: Checksums, claims: Claims) -> None:
        """These slots hold these blocks now: readable at once, claimed by a later commit.

        A slot that was forgotten since its `starting` stays so.
        """

    def forget(self, slots: Slots) -> None:
        """These slots hold nothing any more."""

    def note_use(self, slots: Slots, last_use: Floats, uses: Uses, hints: Hints | None = None) -> None:
        """Recency, and what was said of blocks (None: as before), to be written with a later commit."""

    def new_epoch(self, epoch: bytes) -> None:
        """Forget everything; what is written from now on belongs to `epoch`."""

    def commit(self, sync: Callable[[], bool]) -> Slots:
        """Make what was recorded before the call last: `sync()` the data first, then claim in one transaction.

        Slots whose parent is being written wait for a later commit. Returns those whose parent holds nothing, which
        are forgotten (mostly none). Sets `healthy`; after a failure nothing is lost, and the caller calls again.
        """

    def close(self, clean: bool, wait_s: float) -> bool:
        """Give files back; `clean` says that the last commit holds everything and no write is left running.

        False where a commit still runs after `wait_s`: it claims nothing more, but the files are not closed.
        """


class MemoryLedger:
    """A ledger that lasts as long as the process: for tiers that verify without a catalog."""

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self._idents: Idents = np.zeros(capacity, dtype=np.uint64)
        self._checksums: Checksums = np.zeros(capacity, dtype=np.uint64)
        self._held: Bools = np.zeros(capacity, dtype=np.bool_)
        self.healthy = True

    def expected(self, slots: Slots) -> tuple[Idents, Checksums]:
        """See `BlockLedger.expected`."""
        with self._lock:
            return self._idents[slots], self._checksums[slots]

    def claimed(self, slots: Slots) -> Bools:
        """Which of these slots hold something; there is no more to claim than that."""
        with self._lock:
            return self._held[slots]

    def starting(self, slots: Slots) -> None:
        """See `BlockLedger.starting`."""
        self.forget(slots)

    def written(self, slots: Slots, idents: Idents, checksums: Checksums, claims: Claims) -> None:
        """See `BlockLedger.written`. Claims say what a restart needs, so they are of no use here."""
        with self._lock:
            self._idents[slots] = idents
            self._checksums[slots] = checksums
            self._held[slots] = True

    def forget(self, slots: Slots) -> None:
        """See `BlockLedger.forget`."""
        with self._lock:
            self._idents[slots] = 0
            self._checksums[slots] = 0
            self._held[slots] = False

    def note_use(self, slots: Slots, last_use: Floats, uses: Uses, hints: Hints | None = None) -> None:
        """Nothing: recency is kept for a restart only."""

    def new_epoch(self, epoch: bytes) -> None:
        """See `BlockLedger.new_epoch`."""
        self.forget(np.arange(len(self._held), dtype=np.int32))

    def commit(self, sync: Callable[[], bool]) -> Slots:
        """See `BlockLedger.commit`; there is nothing to claim, so no slot is ever lost."""
        self.healthy = sync()
        return np.empty(0, dtype=np.int32)

    def close(self, clean: bool, wait_s: float) -> bool:
        """True: there are no files."""
        return True


def chosen_claims(claims: Claims, ok: Bools) -> Claims:
    """The claims of the blocks that arrived."""
    if ok.all():
        return claims
    symbols = np.frombuffer(claims.symbols, dtype=np.uint8).reshape(len(ok), -1)[ok].tobytes()
    hints = None if claims.hints is None else claims.hints[ok]
    parents = claims.parent_slots[ok], claims.parent_idents[ok]
    return Claims(*parents, symbols, claims.last_use[ok], claims.uses[ok], hints)


def fail_orphans(ok: Bools, slots: Slots, parent_slots: Slots) -> None:
    """Clear `ok` of blocks whose parent within the same job failed, and of theirs."""
    while True:
        orphans = ok & np.isin(parent_slots, slots[~ok])
        if not orphans.any():
            return
        ok[orphans] = False
