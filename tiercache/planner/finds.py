"""Finds: asks a key tier which blocks of a prompt it has, each once, and remembers the answers as hints.

A lookup never waits for it: what is not known is asked for, and told by the hints of a later lookup. Finds that wait,
finds under way and hints are bounded; past a bound nothing is asked, and the prompt is a miss.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from tiercache.arrays import counting, first_false
from tiercache.planner.counters import RemoteCounters
from tiercache.planner.hints import ASKED, MISSING, THERE, UNKNOWN, Hints
from tiercache.planner.state import Flight, PlannerState, RemoteLimits
from tiercache.types import CALLER, Bools, CopyJob, JobOverdue, JobResult

__all__ = ["Find", "Finds"]

_NOT_THERE = ("missing", "checksum", "io", "deadline")
"""Reasons of a failed load that speak of the key tier."""
_NO_SLOTS = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class Find:
    """Blocks `[begin, end)` of a prompt that are asked for."""

    symbols: bytes
    begin: int
    end: int
    overdue: bool = False
    stale: bool = False
    """The epoch changed under it."""
    probe: bool = False
    """Asked to see whether it answers at all; nobody waits for it."""


class Finds:
    """See the module. Mutates hints, outbox, counters and the remote level's breaker."""

    def __init__(self, state: PlannerState, limits: RemoteLimits) -> None:
        self.state = state
        self.limits = limits
        self.level = len(state.specs)
        self.most = 1 << 60 if limits.max_position is None else limits.max_position
        """Blocks of a prompt that may take part."""
        self.hints = Hints(state.residency.width, limits.hint_blocks)
        self.counters = RemoteCounters()
        self.under_way: dict[int, Find] = {}
        """By job."""
        self._waiting: deque[Find] = deque()
        self._overdue = 0
        """Of those under way."""

    @property
    def waiting(self) -> int:
        """Finds that wait for a thread."""
        return len(self._waiting)

    def takes_part(self, symbols: bytes, begin: int, n: int) -> bool:
        """May blocks of a prompt from `begin` on come from here? Where it was given up a while ago, asks whether it
        answers again."""
        if begin >= self.most or n < self.limits.min_blocks:
            return False
        if self.state.online(self.level):
            return True
        self.probe(symbols, min(begin, n - 1))  # held to its end, but with a hole
        return False

    def probe(self, symbols: bytes, at: int) -> None:
        """Ask for one block, where the key tier was given up, its back-off is over, and nobody asks yet. Nobody waits
        for the answer. (`symbols`: at least to that block.)"""
        breaker = self.state.key_breaker
        if breaker.may_probe(self.state.now) and self.state.has_threads(self.level):
            breaker.probes()
            self._send(Find(symbols[: (at + 1) * self.state.residency.width], at, at + 1, probe=True))

    def known(self, symbols: bytes, begin: int, n: int) -> int:
        """How many blocks of a prompt from `begin` on a load may ask for. Asks nothing."""
        if not self.state.online(self.level):
            return 0
        there = self.hints.known(symbols, begin, min(n, self.most), self.state.now).there
        return there if begin + there >= self.limits.min_blocks else 0

    def look(self, symbols: bytes, begin: int, n: int) -> tuple[int, int]:
        """How many blocks of a prompt from `begin` on should be there, and how many after these are asked for; asks for
        those of which nothing is known."""
        n = min(n, self.most)
        if not self.state.online(self.level) or begin >= n:
            return 0, 0
        there, asked, missing = self.hints.known(symbols, begin, n, self.state.now)
        at = begin + there + asked
        if at < n and not missing and self._ask(symbols, at, n):
            asked += n - at
        if begin + there < self.limits.min_blocks:
            return 0, (there + asked if asked else 0)
        return there, asked

    def is_asked(self, symbols: bytes, begin: int, n: int) -> bool:
        """Is block `begin` of a prompt of n being asked for, as of the last lookup? Mutates nothing."""
        return self.hints.known(symbols, begin, n, self.state.now).asked > 0

    def _ask(self, symbols: bytes, begin: int, end: int) -> bool:
        if len(self._waiting) >= self.limits.waiting_finds:
            self.counters.finds_refused += 1
            return False
        symbols = symbols[: end * self.state.residency.width]
        self.hints.note(symbols, begin, end, ASKED, self.state.now + self.limits.hint_s)
        self._waiting.append(Find(symbols, begin, end))
        self.pump()
        return True

    def pump(self) -> None:
        """Send finds while threads are left for them."""
        state = self.state
        while (
            self._waiting
            and state.takes_another(self.level, len(self.under_way) - self._overdue)
            and state.online(self.level)
        ):
            self._send(self._waiting.popleft())

    def _send(self, find: Find) -> None:
        state, n = self.state, find.end - find.begin
        job = CopyJob(
            id=next(state.ids),
            kind="find",
            epoch=state.epoch,
            src_level=self.level,
            src_slots=counting(find.begin, find.end),
            dst_level=CALLER,
            dst_slots=_NO_SLOTS,
            idents=np.zeros(n, dtype=np.uint64),
            deadline_s=self.limits.find_deadline_s,
            symbols=find.symbols,
        )
        self.under_way[job.id] = find
        state.credits[self.level].others += 1
        self.counters.finds += 1
        self.counters.blocks_asked += n
        state.outbox.append(job)

    def take(self, message: JobResult | JobOverdue) -> None:
        """The mover says what became of one of these."""
        find = self.under_way[message.job]
        state, breaker, credit = self.state, self.state.key_breaker, self.state.credits[self.level]
        if isinstance(message, JobOverdue):
            find.overdue = True
            self._overdue += 1
            credit.lost_jobs += 1
            credit.others -= 1
            state.counters[self.level].overdue_jobs += 1
            self.counters.timeouts += 1
            breaker.timed_out(state.now, delivery=False, probe=find.probe)
            self._failed(find)
            return
        del self.under_way[message.job]
        if find.overdue:
            self._overdue -= 1
            credit.lost_jobs -= 1
            return
        credit.others -= 1
        self.counters.timeouts += message.reason == "deadline"
        if message.reason == "deadline":
            breaker.timed_out(state.now, delivery=False, probe=find.probe)
        elif message.reason == "io":
            breaker.failed(state.now, delivery=False, probe=find.probe)
        elif message.reason:
            breaker.undecided(probe=find.probe)
        else:
            breaker.answered()
        if message.reason:
            self._failed(find)
        elif not find.stale:
            self._answered(find, message.ok)

    def _answered(self, find: Find, ok: Bools) -> None:
        now, at = self.state.now, find.begin + first_false(ok)
        self.counters.blocks_found += at - find.begin
        self.hints.note(find.symbols, find.begin, at, THERE, now + self.limits.hint_s)
        self._end(find, at)

    def _failed(self, find: Find) -> None:
        self.counters.finds_failed += 1
        if not (find.stale or find.probe):
            self._end(find, find.begin)

    def _end(self, find: Find, at: int) -> None:
        """From block `at` on nothing is there, as far as is known, and nothing more is asked for a while."""
        self.hints.note(find.symbols, at, find.end, UNKNOWN, -np.inf)
        self._lacks(find.symbols, at, find.end)

    def _lacks(self, symbols: bytes, at: int, end: int) -> None:
        self.hints.note(symbols, at, min(at + 1, end), MISSING, self.state.now + self.limits.missing_s)

    def fetched(self, flight: Flight, ok: Bools, reason: str) -> None:
        """A load from the key tier is over, or overdue: the first block that did not come is not to be had."""
        job, counters = flight.job, self.counters
        if job.symbols is None or flight.stale:
            return
        counters.timeouts += reason == "deadline"
        came = int(ok.sum())
        counters.fetched += came
        if reason == "checksum":
            counters.wrong += job.n - came
        elif reason in _NOT_THERE:
            counters.missing += job.n - came
        if came < job.n and reason in _NOT_THERE:
            at = int(job.src_slots[first_false(ok)])
            self._lacks(job.symbols, at, at + 1)

    def fail_offline(self) -> None:
        """Finds that wait while the key tier is offline are not asked any more."""
        if not self._waiting or not self.state.is_given_up(self.level):
            return
        while self._waiting:
            self._failed(self._waiting.popleft())

    def new_epoch(self) -> None:
        """Keys are other ones now."""
        self.hints.clear()
        self._waiting.clear()
        for find in self.under_way.values():
            find.stale = True

    def load_s(self, blocks: int) -> float:
        """Seconds that a load of so many blocks takes, as far as loads have told."""
        cost = self.state.costs[self.level]
        return cost.seconds(blocks * self.state.specs[0].block_nbytes) if cost.jobs else 0.0

    def worth(self, remote: int, blocks: int, load_s: float, block_s: float) -> tuple[int, int, float]:
        """Of `blocks` found, `remote` come from here and the others take `load_s`; the same with these, or without
        them where computing them is quicker (`block_s` seconds each; 0: unknown)."""
        remote_s = self.load_s(remote) if remote else 0.0
        if block_s and remote_s > remote * block_s:
            return 0, blocks - remote, load_s
        return remote, blocks, max(load_s, remote_s)
