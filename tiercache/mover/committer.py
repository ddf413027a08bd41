"""Batches what the ledger recorded into commits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import numpy as np

from tiercache.errors import WorkerThreadError
from tiercache.mover.ledger import BlockLedger
from tiercache.mover.stats import Counters
from tiercache.mover.threads import IDLE_WAIT_S, is_worker_thread, start_thread
from tiercache.types import Slots

__all__ = ["Committer"]

_log = logging.getLogger("tiercache.mover")

FIRST_RETRY_S = 0.05
LAST_RETRY_S = 5.0
_NO_SLOTS = np.empty(0, dtype=np.int32)


class Committer:
    """One thread that commits at most every `every_s` while something was recorded, and retries with back-off.

    `deliver_lost(slots)` is called from that thread without a lock. Slots of a job whose JobResult is on its way
    (`hold` to `unhold`) are reported after it, never before.

    `record` and `over` are called in the order in which the ledger is told, under the mover's lock.
    """

    def __init__(
        self,
        ledger: BlockLedger,
        capacity: int,
        sync_tier: Callable[[], bool],
        deliver_lost: Callable[[Slots], None],
        every_s: float,
        counters: Counters,
    ) -> None:
        self._ledger = ledger
        self._sync_tier = sync_tier
        self._deliver_lost = deliver_lost
        self._every_s = every_s
        self._counters = counters
        self._changed = threading.Condition()
        self._recorded = 0
        self._committed = 0
        self._next_at = 0.0
        self._retry_s = 0.0
        self._urgent = False
        self._stopping = False
        self._ended = False
        self._held: dict[int, Slots] = {}
        self._unreported = _NO_SLOTS
        self._written_at = np.zeros(capacity, dtype=np.int64)
        """Per slot the number of the `record` that wrote it, 0 once it is claimed or over."""
        self.thread = start_thread("commit", self._run)

    def record(self, written: Slots = _NO_SLOTS) -> None:
        """The ledger has something new to commit: these slots to claim, or anything else."""
        with self._changed:
            if self._recorded == self._committed:
                self._next_at = max(self._next_at, time.monotonic() + self._every_s)
                self._changed.notify_all()
            self._recorded += 1
            self._written_at[written] = self._recorded

    def over(self, slots: Slots | None = None) -> None:
        """These slots (None: all) are not waited for any more: forgotten, or about to be overwritten."""
        with self._changed:
            self._written_at[... if slots is None else slots] = 0

    def hold(self, job: int, slots: Slots) -> None:
        """These slots are written; their JobResult is delivered next."""
        with self._changed:
            self._held[job] = slots

    def unhold(self, job: int) -> None:
        """The job's JobResult was delivered."""
        with self._changed:
            self._held.pop(job, None)
            if len(self._unreported):
                self._changed.notify_all()

    def sync(self, timeout_s: float) -> bool:
        """Commit now; True when all that was recorded before this call is committed, False at the timeout.

        Slots written before this call are claimed then, or were reported lost, or are over: also those whose parent
        was still being written, which is waited for. Raises WorkerThreadError on a mover's thread.
        """
        if is_worker_thread():
            raise WorkerThreadError("sync() would wait for the thread that called it")
        with self._changed:
            target = self._recorded
            self._urgent = target > self._committed
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._has_claimed(target) or self._ended, timeout_s)
            return self._has_claimed(target)

    def stop(self, timeout_s: float) -> bool:
        """End the thread after one last commit. True when everything recorded is committed and the thread is gone."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self.thread.join(timeout_s)
        with self._changed:
            return self._ended and self._has_claimed(self._recorded)

    def _has_claimed(self, target: int) -> bool:
        if self._committed < target:
            return False
        waiting = self._written_at[self._written_at > 0]
        return not (waiting <= target).any()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        last = False
        while not last:
            last = self._wait()
            try:
                self._report(_NO_SLOTS)
                done = self._commit()
            except Exception:  # noqa: BLE001  outermost frame of a worker thread
                _log.exception("a commit failed")
                done = False
            if not done:
                self._back_off()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _wait(self) -> bool:
        """Wait until there is something to do. True when this is the last round."""
        with self._changed:
            while not (self._stopping or self._urgent or self._reportable()):
                wait_s = IDLE_WAIT_S
                if self._recorded > self._committed:
                    wait_s = self._next_at - time.monotonic()
                    if wait_s <= 0:
                        break
                self._changed.wait(min(wait_s, IDLE_WAIT_S))
            return self._stopping

    def _commit(self) -> bool:
        """One attempt; True when all that was recorded before it is committed."""
        with self._changed:
            target = self._recorded
            self._urgent = False
            if target == self._committed:
                return True
        lost = self._ledger.commit(self._sync_tier)
        self._report(lost)
        with self._changed:
            self._written_at[lost] = 0
            waiting = np.flatnonzero(self._written_at).astype(np.int32)
            self._written_at[waiting[self._ledger.claimed(waiting)]] = 0
        if not self._ledger.healthy:
            return False
        self._counters.add(commits=1)
        with self._changed:
            self._committed = target
            self._retry_s = 0.0
            self._next_at = time.monotonic() + self._every_s
            self._changed.notify_all()
        return True

    def _back_off(self) -> None:
        self._counters.add(commit_failures=1)
        with self._changed:
            self._retry_s = min(LAST_RETRY_S, max(FIRST_RETRY_S, 2 * self._retry_s))
            self._next_at = time.monotonic() + self._retry_s

    def _reportable(self) -> bool:
        return len(self._unreported) > 0 and not self._held

    def _report(self, lost: Slots) -> None:
        """Deliver lost slots whose jobs have been reported; keep the others for later."""
        with self._changed:
            lost = np.concatenate((self._unreported, lost)).astype(np.int32)
            if not len(lost):
                return
            waits = np.isin(lost, np.concatenate((_NO_SLOTS, *self._held.values())))
            self._unreported = lost[waits]
            lost = lost[~waits]
        if len(lost):
            self._counters.add(lost_claims=len(lost))
            self._deliver_lost(lost)
