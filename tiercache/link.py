"""Link: the only place where planner and mover meet.

It owns the planner's lock. What the planner decides under it goes to the mover before it is released; what the mover
says is committed under it, and futures are completed after it. Lock order: planner, then mover queue.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tiercache.assembly import Stack
from tiercache.delivery import Delivery
from tiercache.errors import CacheClosedError, WorkerThreadError
from tiercache.loaded import Loaded, LoadFuture
from tiercache.match import Match, Ticket
from tiercache.mover import is_worker_thread
from tiercache.patience import acquire_patiently
from tiercache.planner import Load, StorePlan
from tiercache.types import PlannerMessage

__all__ = ["Link"]

_WAKE_S = 0.25
"""The longest that a wait goes without looking again."""


class Link:
    """Runs planner calls, hands their messages on, and ends what waits for the mover."""

    def __init__(self, clock: Callable[[], float], delivery: Delivery) -> None:
        self.clock = clock
        self.delivery = delivery
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        """Notified whenever a message of the mover, or the end of a hold, took effect."""
        self.stack: Stack | None = None
        """None until the layout of a block is known."""
        self.closed = False
        self.dead = False
        """Inherited through fork."""
        self._endpoints = itertools.count(1)
        self._loads: dict[int, tuple[LoadFuture, Load, Match, Any]] = {}
        self._tickets: dict[int, tuple[Ticket, int]] = {}
        self._dropped: deque[Load] = deque()
        """Loads whose Loaded was garbage collected; drained by the next call that plans."""
        delivery.bind(self._apply)

    # -- planner calls ------------------------------------------------------------------------------------------

    @contextmanager
    def planning(self) -> Iterator[Stack | None]:
        """The planner's lock; what was decided goes to the mover before it is released. CacheClosedError."""
        self.check_open()
        self.lock.acquire()
        try:
            self.check_open()
            self._drop_loads()
            stack = self.stack
            try:
                yield stack
            finally:
                if stack is not None:
                    self._hand_over(stack)
        finally:
            self.lock.release()

    def ask(self) -> Stack | None:
        """Take the planner's lock, patiently, for a question: the caller releases it, in the `finally` of a `try` that
        comes right after this. (`planning` costs a microsecond more.) CacheClosedError, without the lock."""
        self.check_open()
        acquire_patiently(self.lock)
        try:
            self.check_open()
            if self._dropped:
                self._drop_loads()
                if self.stack is not None:
                    self._hand_over(self.stack)
            return self.stack
        except BaseException:
            self.lock.release()
            raise

    def answered(self, stack: Stack | None) -> None:
        """After a question by which something may have to be measured. Under the lock."""
        if stack is not None:
            self._hand_over(stack)

    def _hand_over(self, stack: Stack) -> None:
        messages = stack.planner.take_messages()
        if messages and not self.closed:
            self.delivery.submitted(messages)
            stack.mover.submit(messages)

    def _drop_loads(self) -> None:
        while self._dropped and self.stack is not None:
            self.stack.planner.release_load(self._dropped.popleft(), self.clock())

    def check_open(self) -> None:
        """CacheClosedError after close, and in a forked child."""
        if self.dead:
            raise CacheClosedError("this cache belongs to the parent process: open another one after fork")
        if self.closed:
            raise CacheClosedError("the cache is closed")

    def refuse_worker(self, what: str) -> None:
        """WorkerThreadError where the calling thread is one of the mover's: it would wait for itself."""
        self.check_open()
        if is_worker_thread():
            raise WorkerThreadError(f"{what} would wait for the thread that called it")

    # -- what waits for the mover -------------------------------------------------------------------------------

    def attach(self, stack: Stack, rows: Any) -> int:
        """Register caller rows with the mover; the number that jobs name them by."""
        endpoint = next(self._endpoints)
        stack.mover.attach(endpoint, rows)
        return endpoint

    def ticket(self, stack: Stack, plan: StorePlan, endpoint: int) -> Ticket:
        """The ticket of a store that was just planned. Under the lock."""
        ticket = Ticket(plan.accepted, plan.present, plan.reason, plan.job == 0)
        if plan.job:
            self._tickets[plan.job] = (ticket, endpoint)
        else:
            stack.mover.detach(endpoint)
        return ticket

    def expect(self, future: LoadFuture, load: Load, match: Match, out: Any) -> bool:
        """Complete this future once its load is done. Under the lock. False for a load that is done already: it is not
        expected, and the caller completes it. (Asked later, an expected one may be done too.)"""
        if not load.done:
            self._loads[load.id] = (future, load, match, out)
        return not load.done

    def finish(self, loads: list[Load]) -> list[tuple[LoadFuture, Load, Match, Any]]:
        """Take the expected ones among these done loads; `complete` each without the lock."""
        return [self._loads.pop(load.id) for load in loads if load.id in self._loads]

    def complete(self, future: LoadFuture, load: Load, match: Match, out: Any) -> None:
        """Hand a done load to its future. Called with no lock held: callbacks run here."""
        stack = self.stack
        assert stack is not None
        if load.endpoint:
            stack.mover.detach(load.endpoint)
        tokens = min(load.blocks * match.block_tokens, match.tokens)
        if not future.set_running_or_notify_cancel():
            self.end_load(load)
            return
        if load.endpoint:
            loaded = Loaded(tokens, load.blocks, out=out)
        elif load.blocks == 0:
            loaded = Loaded(0, 0, memory=stack.memory)
        else:
            loaded = Loaded(
                tokens,
                load.blocks,
                memory=stack.memory,
                slots=load.slots,
                release=lambda: self.end_load(load),
                abandon=lambda: self._dropped.append(load),
            )
        future.set_result(loaded)

    def end_load(self, load: Load) -> None:
        """End the hold of a Loaded; also after close, then without effect on the mover."""
        if self.dead:
            return
        with self.lock:
            self._drop_loads()
            if self.stack is not None:
                self.stack.planner.release_load(load, self.clock())
                self._hand_over(self.stack)
                self.changed.notify_all()

    def _apply(self, message: PlannerMessage) -> None:
        """One message from the mover: commit, tend, submit what follows, end its ticket; then, with no lock held,
        complete futures."""
        stack = self.stack
        if stack is None or self.dead:
            return
        with self.lock:
            outcome = stack.planner.commit(message, self.clock())
            self._hand_over(stack)
            ticket = self._tickets.pop(outcome.job, None)
            if ticket is not None:  # under the lock, so that it is copied when a flush returns
                stack.mover.detach(ticket[1])
                ticket[0].complete(int(outcome.ok.sum()) if outcome.ok is not None else 0)
            finished = self.finish(outcome.loads)
            self.changed.notify_all()
        for each in finished:
            self.complete(*each)

    # -- waiting and ending -------------------------------------------------------------------------------------

    def wait_changed(self, left_s: float) -> None:
        """Wait until something took effect, at most `left_s` seconds. The caller plans, and does not meanwhile."""
        self.changed.wait(min(left_s, _WAKE_S))
        self.check_open()

    def wait(self, stack: Stack, until: float | None, over: Callable[[], bool]) -> bool:
        """Wait until `over()`, which is asked under the lock. False at `until` (monotonic seconds), after close, and
        where nothing is under way whose end could change the answer."""
        with self.changed:
            while not over():
                left = _WAKE_S if until is None else min(_WAKE_S, until - time.monotonic())
                if left <= 0 or self.closed or not stack.planner.moves():
                    return False
                self.changed.wait(left)
                stack.planner.tend(self.clock())
                self._hand_over(stack)
        return True

    def end_everything(self) -> None:
        """After the mover has stopped: nobody waits for what will not come. A load into rows that a hung thread is
        writing just now ends when that thread returns: before, they are not the caller's."""
        busy = self.stack.mover.written_to() if self.stack is not None else frozenset()
        with self.lock:
            tickets = list(self._tickets.values())
            loads = [each for each in self._loads.values() if each[1].endpoint not in busy]
            self._tickets.clear()
            self._loads = {number: each for number, each in self._loads.items() if each[1].endpoint in busy}
            self.changed.notify_all()
        memory = self.stack.memory if self.stack is not None else None
        for ticket, _ in tickets:
            ticket.complete(0)
        for future, _, _, out in loads:
            if future.set_running_or_notify_cancel():
                future.set_result(Loaded(0, 0, memory=memory, out=out))

    def shut(self) -> bool:
        """Refuse every verb from now on. False where that was so already."""
        with self.lock:
            was, self.closed = self.closed, True
            return not was

    def abandon(self) -> None:
        """In a forked child: touch neither memory, locks nor catalog; close data descriptors."""
        self.dead = True
        if self.stack is None:
            return
        self.stack.mover.abandon()
        if self.stack.catalog is not None:
            self.stack.catalog.abandon()
        for tier in self.stack.tiers:
            abandon = getattr(tier, "abandon", None)
            if abandon is not None:
                abandon()
