"""Planner: the control plane. It decides; it moves no byte, does no I/O, has no thread and no clock.

Every method is called under one lock of the caller's, with `now` in wall-clock seconds where time matters. What the
mover must do collects in the outbox (`take_messages`); what the mover reports goes into `commit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tiercache.arrays import true_at
from tiercache.index import Path, Walk
from tiercache.keys import root_ident
from tiercache.planner.check import check_state
from tiercache.planner.counters import LevelCounters, PlannerCounters
from tiercache.planner.demotion import Demotion
from tiercache.planner.explain import Stretch, explain_path
from tiercache.planner.finds import Finds
from tiercache.planner.hinting import Hinting
from tiercache.planner.loads import Load, Loads
from tiercache.planner.offer import Offers
from tiercache.planner.pins import Pins
from tiercache.planner.quota import Quota
from tiercache.planner.reach import reach, reach_further
from tiercache.planner.recovery import restore
from tiercache.planner.remote_writes import RemoteWrites
from tiercache.planner.results import Outcome, Results
from tiercache.planner.room import Room
from tiercache.planner.state import Limits, PlannerState, RemoteLimits
from tiercache.planner.stores import StorePlan, Stores
from tiercache.planner.uses import Uses
from tiercache.planner.victims import Victims
from tiercache.planner.writes import Writes
from tiercache.policy import Policy
from tiercache.residency import Residency
from tiercache.slots import RESIDENT, WRITING
from tiercache.types import LevelSpec, MoverMessage, NewEpoch, PlannerMessage, Recovered, Slots

__all__ = ["Found", "Outcome", "Planner"]


class Found(NamedTuple):
    """What a lookup found. Valid as a description; a load shortens it if blocks are gone by then."""

    blocks: int
    by_level: tuple[int, ...]
    """Of `blocks`, how many are fastest on each level."""
    pending: int
    """Following blocks whose only copy is in flight."""
    words: int
    """Leading int32 words of the prompt that lie on some cached path."""
    load_s: float
    """Estimated seconds of a load of `blocks`."""
    plain: bool
    """No symbol on the path has INT32_MIN in it: so nothing else that equals it has."""
    withheld: int = 0
    """Readable blocks after `blocks` that are not worth their load."""
    remote: int = 0
    """Of `blocks`, how many come from the key tier."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """Copies that were under way at one moment."""

    jobs: frozenset[int]
    loads: tuple[Load, ...]


class Planner:
    """See the module; the parts are `Loads`, `Stores`, `Demotion`, over one `PlannerState`."""

    def __init__(
        self,
        specs: Sequence[LevelSpec],
        width: int,
        policy: Policy,
        *,
        namespace_digest: bytes = b"",
        epoch: bytes = b"",
        exclusive: bool | None = None,
        write_after_s: float | None = None,
        max_writes_per_hit: float | None = None,
        limits: Limits | None = None,
        measures: bool = False,
        remote: RemoteLimits | None = None,
    ) -> None:
        """specs: the levels, fastest first. width: bytes of a symbol. exclusive: None decides per level, by size:
        a block promoted from a level of under five times the capacity leaves that one. max_writes_per_hit: a block is
        only written to a persistent level where no more writes than that are to be expected for each hit; None: always.
        measures: probe how fast levels are from the start (else from the first lookup with `block_s` on).
        remote: there is a key tier.
        """
        self._namespace_digest = namespace_digest
        self.state = PlannerState(
            Residency(specs, width, policy.leave),
            policy,
            epoch,
            root_ident(namespace_digest, epoch),
            limits or Limits(),
            exclusive,
            write_after_s,
            max_writes_per_hit,
            remote,
        )
        policy.open(specs[0].capacity, specs[-1].capacity if specs[-1].persistent else 0)
        self.uses = Uses(self.state)
        self.victims = Victims(self.state)
        self.room = Room(self.state, self.victims)
        self.writes = Writes(self.state, self.room)
        self.demotion = Demotion(self.state, self.victims, self.room, self.writes)
        self.quota = Quota(self.state, self.victims, self.demotion, remote.quota) if remote is not None else None
        self.finds = Finds(self.state, remote) if remote is not None else None
        self.loads = Loads(self.state, self.demotion, self.quota)
        self.stores = Stores(self.state, self.demotion, self.quota)
        self.hinting = Hinting(self.state, self.demotion)
        self.pins = Pins(self.state)
        finds = self.finds
        self.remote_writes = RemoteWrites(self.state, finds, self.demotion, finds.limits) if finds is not None else None
        self.results = Results(self.state, self.loads, self.demotion, self.finds, self.remote_writes)
        self.offers = Offers(self.state, measures)

    @property
    def epoch(self) -> bytes:
        """The epoch that blocks belong to."""
        return self.state.epoch

    @property
    def levels(self) -> Sequence[LevelSpec]:
        """The levels, fastest first."""
        return self.state.specs

    # -- asking -------------------------------------------------------------------------------------------------

    def begins(self, first: bytes) -> bool:
        """Does any cached prompt begin with this symbol, or may one do so elsewhere, where that is asked now?"""
        children, state = self.state.residency.index.root.children, self.state
        return first in children or state.key_breaker.quiet_until < 0

    def lookup(
        self, symbols: bytes, n: int, now: float, tail: bytes = b"", again: bool = False, block_s: float = 0.0
    ) -> Found:
        """How many leading blocks of a prompt have a readable copy. Mutates statistics only; with `again` (the same
        question asked once more) not even those. `symbols` may be the first one alone where nothing `begins` so.

        block_s: seconds that the prefill of a block takes: only blocks whose load takes less are offered, and levels
        are probed for it. 0: all are.
        """
        state, residency = self.state, self.state.residency
        state.now = now
        walk = self._alive(whole := residency.index.walk(symbols, n, tail))
        blocks, pending, by_level, load_s, withheld = reach(state, self.offers, walk.path, block_s)
        remote = 0
        asks = now >= state.key_breaker.quiet_until and blocks < n and not withheld and walk.blocks == whole.blocks
        if asks and self.finds is not None and self.finds.takes_part(symbols, walk.blocks, n):
            blocks, pending, by_level, remote = reach_further(self.state, self.loads, self.finds, walk, symbols, n)
            remote, blocks, load_s = self.finds.worth(remote, blocks, load_s, block_s)
        if not again:
            state.totals.lookups += 1
            state.totals.lookup_blocks += n
            state.totals.found_blocks += blocks + withheld
            state.totals.blocks_withheld += withheld
            if walk.path and walk.blocks < n:
                walk.path.nodes[-1].exits += 1
        plain = not remote and walk.path.is_plain()
        return Found(blocks, by_level, pending, walk.words, load_s, plain, withheld, remote)

    # -- verbs --------------------------------------------------------------------------------------------------

    def plan_load(
        self,
        symbols: bytes,
        want: int,
        epoch: bytes,
        now: float,
        endpoint: int = 0,
        prompt_blocks: int | None = 0,
        start: int = 0,
    ) -> Load:
        """Bring up to `want` leading blocks to level 0, or into the caller rows `endpoint`; touches the path. There
        the first `start` are left out: the caller has them (`Load.blocks` counts them, unless nothing is brought).

        prompt_blocks: all blocks of the prompt, where it has more (the request will bring the rest); None: this use was
        counted already.
        """
        self._begin(now)
        walk = self._walk(symbols, want, epoch)
        if self.finds is None or epoch != self.state.epoch:
            known, load = None, self.loads.plan(walk.path, want, endpoint, start=start)
        else:
            known = walk.blocks
            more = self.finds.known(symbols, known, want) if known < want else 0
            load = self.loads.plan(walk.path, want, endpoint, symbols, more, start)
        if load.blocks and prompt_blocks is not None:
            self.uses.note(walk.path.shorten(load.blocks), max(0, prompt_blocks - load.blocks), known)
            if self.quota is not None:
                self.quota.touched(walk.path.shorten(min(walk.blocks, load.blocks)))
        self.loads.give_up_new(load)
        self.demotion.tend()
        return load

    def release_load(self, load: Load, now: float) -> None:
        """End the hold of a load that is done."""
        self._begin(now)
        self.loads.release(load)

    def plan_store(
        self,
        symbols: bytes,
        n: int,
        start: int,
        epoch: bytes,
        now: float,
        endpoint: int,
        partial: bool = False,
        priority: int = 0,
        expires: float = np.inf,
    ) -> StorePlan:
        """Take blocks `[start, n)` of a prompt, whose rows are `endpoint`; touches the path. Tends when it is cut.

        priority, expires (wall-clock seconds): of the new blocks; those that are there keep the higher priority and
        the later end.
        """
        self._begin(now)
        if epoch != self.state.epoch:
            self.state.totals.stale_epoch += 1
            plan = StorePlan(0, 0, "stale_epoch")
        else:
            walk = self.state.residency.index.walk(symbols, n)
            plan = self.stores.plan(walk, symbols, n, start, endpoint, partial)
            if plan.end:
                path = self.state.residency.index.walk(symbols, plan.end).path
                self.hinting.stored(path, walk.blocks, priority, expires)
                goes_on = self.uses.note_stored(path, walk.blocks, start)
                if self.quota is not None and not goes_on:
                    self.quota.touched(path.shorten(walk.blocks))
        totals = self.state.totals
        totals.stores += 1
        totals.store_blocks_accepted += plan.accepted
        totals.store_blocks_present += plan.present
        if plan.reason:
            totals.stores_cut[plan.reason] = totals.stores_cut.get(plan.reason, 0) + 1
        self.demotion.tend()
        return plan

    def touch(self, symbols: bytes, n: int, epoch: bytes, now: float, prompt_blocks: int = 0) -> int:
        """A request used the first n blocks of this prompt (an engine's own HBM hit, say). Returns blocks touched."""
        self._begin(now)
        walk = self._walk(symbols, n, epoch)
        self.uses.note(walk.path, max(0, prompt_blocks - walk.blocks))
        if self.quota is not None:
            self.quota.touched(walk.path)
        return walk.blocks

    def release(self, symbols: bytes, n: int, now: float) -> int:
        """This conversation ended: what only its path uses goes to the cold end. Returns blocks moved."""
        self._begin(now)
        return self.uses.release(self.state.residency.index.walk(symbols, n).path)

    def tend(self, now: float) -> None:
        """Make room ahead of need, submit what waits for credits."""
        self._begin(now)
        self._pump()
        self.demotion.tend()
        self.offers.measure_new()

    def _pump(self) -> None:
        self.loads.pump()
        if self.finds is not None:
            self.finds.fail_offline()
            self.finds.pump()
        if self.remote_writes is not None:
            self.remote_writes.pump()

    def drain(self, now: float) -> int:
        """Queue everything that the last level lacks, most reusable first, and start all delayed writes.
        Returns how many blocks were queued."""
        self._begin(now)
        queued = self.demotion.queue_all()
        self.demotion.expedite_all()
        self.demotion.tend()
        return queued

    def prioritize(self, symbols: bytes, n: int, priority: int, now: float) -> int:
        """Give the cached blocks of this prompt this priority. Returns how many had another."""
        self._begin(now)
        path = self.state.residency.index.walk(symbols, n).path
        changed = self.hinting.prioritize(path, priority)
        if changed:
            self.uses.tell(path)
            self.demotion.tend()
        return changed

    def pin(self, symbols: bytes, n: int, epoch: bytes, now: float, until: float = np.inf) -> list[tuple[int, Slots]]:
        """Hold the readable blocks of a prompt where they are; returns (level, slots) for `unpin`, within bounds.

        until: wall-clock seconds at which the hold ends by itself.
        """
        self._begin(now)
        return self.pins.take(self._walk(symbols, n, epoch).path, until)

    def unpin(self, held: Sequence[tuple[int, Slots]], now: float) -> None:
        """End a hold of `pin`. A second time does nothing."""
        self._begin(now)
        self.pins.end(held)

    def invalidate(self, symbols: bytes, n: int, now: float) -> int:
        """Drop the last block of this prefix and all that continues it (n = 0: everything). Returns blocks dropped.
        Cost proportional to what is dropped."""
        self._begin(now)
        index, dropped = self.state.residency.index, 0
        if n == 0:
            for node in list(index.root.children.values()):
                dropped += self.room.take_away(node, 0)
            return dropped
        walk = index.walk(symbols, n)
        if walk.blocks < n:
            return 0
        node, take = walk.path.end
        return self.room.take_away(node, take - 1)

    def new_epoch(self, epoch: bytes, now: float) -> list[Load]:
        """Everything cached belongs to other weights now: forget it all. Returns loads that end by it, empty."""
        state = self.state
        self._begin(now)
        for flight in state.jobs.values():
            flight.stale = True
        ended = self.loads.end_all()
        if self.finds is not None:
            self.finds.new_epoch()
        if self.remote_writes is not None:
            self.remote_writes.new_epoch()
        for level, table in enumerate(state.residency.tables):
            state.counters[level].detached += len(table.clear())
        state.residency.forget_tree()
        state.policy.clear()
        self.uses.clear()
        self.victims.clear()
        state.unwritten.clear()
        state.epoch = epoch
        state.root_ident = root_ident(self._namespace_digest, epoch)
        state.outbox.append(NewEpoch(epoch))
        return ended

    def switch_remote(self, enabled: bool, stores: bool, now: float) -> list[Load]:
        """The kill switch of the key tier: without it nothing is asked for, fetched or written there, without `stores`
        nothing written; what runs ends by its deadline. Returns loads that end by it."""
        if self.remote_writes is None:
            return []
        self._begin(now)
        self.state.key_breaker.switch(enabled)
        self.remote_writes.enabled = stores
        ended = self.loads.fail_offline()
        self._pump()
        return ended

    # -- what the mover says ------------------------------------------------------------------------------------

    def commit(self, message: PlannerMessage, now: float) -> Outcome:
        """Take over what the mover reports; then tend."""
        self._begin(now)
        outcome = self.results.take(message)
        outcome.loads += self.loads.fail_offline(outcome.late)
        self._pump()
        outcome.loads += self.loads.fail_unfilled()
        self.demotion.tend()
        self.offers.measure_new()
        return outcome

    # -- the rest -----------------------------------------------------------------------------------------------

    def restore(self, recovered: Recovered) -> None:
        """Take over what the persistent level held when it was opened. Only on a planner that holds nothing."""
        restore(self.state, recovered)
        self.offers.measure_new()

    def take_messages(self) -> list[MoverMessage]:
        """What the mover must do, in order; empties the outbox. Hand it over before the lock is released."""
        messages, self.state.outbox = self.state.outbox, []
        return messages

    def explain(self, symbols: bytes, n: int, now: float) -> tuple[Stretch, ...]:
        """Where the blocks of a prompt are, stretch by stretch. Mutates nothing."""
        self.state.now = now
        return explain_path(self.state, self._alive(self.state.residency.index.walk(symbols, n)).path)

    def words_shared(self, symbols: bytes, n: int, tail: bytes) -> int:
        """Leading int32 words of a prompt that lie on some cached path. Mutates nothing."""
        return self._alive(self.state.residency.index.walk(symbols, n, tail)).words

    def drop_bad(self, now: float) -> int:
        """Drop blocks whose only copy was found wrong, and all below them. Returns blocks dropped."""
        self._begin(now)
        dropped = 0
        for node in list(self.state.residency.index.walk_nodes()):
            if node.parent is None:
                continue
            states = self.state.residency.states(node.slots.T)
            alive = (states == RESIDENT) | (states == WRITING)
            holes = true_at(np.asarray(~alive.any(axis=0)))
            if len(holes):
                dropped += self.room.take_away(node, int(holes[0]))
        return dropped

    def under_way(self) -> UnderWay:
        """What is being copied now, for `is_over`: neither delayed writes, nor probes, which are no copies, nor what
        comes from a key tier, which a flush need not wait for."""
        flights = [each for each in self.state.jobs.values() if each.job.kind != "probe" and each.job.symbols is None]
        jobs = frozenset(each.job.id for each in flights if not each.delayed or each.expedited)
        loads = (load for load in self.loads.open.values() if not load.done and not load.symbols)
        return UnderWay(jobs, tuple(loads))

    def is_over(self, under_way: UnderWay) -> bool:
        """Has all of it ended? What is overdue counts as ended: nobody waits for it any longer."""
        jobs = self.state.jobs
        ended = all(job not in jobs or jobs[job].overdue for job in under_way.jobs)
        return ended and all(load.done for load in under_way.loads)

    def backlog(self) -> int:
        """A mark, for `is_backlog_over`, of what is queued for writing now."""
        return self.state.unwritten.added

    def is_backlog_over(self, mark: int) -> bool:
        """Was all that was queued for writing at that mark submitted, or given up?"""
        return self.state.unwritten.is_over(mark)

    def moves(self) -> bool:
        """Is anything under way whose end may let something else go on?"""
        return any(not flight.overdue for flight in self.state.jobs.values())

    def failed_writes(self) -> int:
        """Blocks so far that could not be written to the last level, were lost there, or were overdue."""
        last = self.state.counters[len(self.levels) - 1]
        return last.failed_writes + last.lost_claims + last.overdue_jobs

    def lacking(self, used_before: float) -> int:
        """Full blocks, last used no later than then, without a readable copy in the persistent level."""
        return self.demotion.count_lacking(used_before)

    def check(self) -> list[str]:
        """Every broken rule found, empty where all is well. O(everything); mutates nothing."""
        self.victims.refile(len(self.levels) - 1)
        return [*check_state(self.state, self.loads, self.finds, self.quota, self.remote_writes), *self.victims.check()]

    def level_counters(self) -> list[LevelCounters]:
        """Live counters per level."""
        return self.state.counters[: len(self.levels)]

    def totals(self) -> PlannerCounters:
        """Live counters of the whole."""
        return self.state.totals

    def _begin(self, now: float) -> None:
        """A call that may change things: first, what has ended by now ends."""
        self.state.now = now
        if now >= self.state.residency.expiry.next:
            self.hinting.expire()
        self.pins.end_due()

    def _alive(self, walk: Walk) -> Walk:
        """The same walk, as far as nothing on it has ended by now."""
        if self.state.now < self.state.residency.expiry.next:
            return walk
        alive = self.hinting.alive(walk.path)
        if alive == walk.path.blocks:
            return walk
        return Walk(walk.path.shorten(alive), alive, alive * self.state.residency.width // 4)

    def _walk(self, symbols: bytes, want: int, epoch: bytes) -> Walk:
        if epoch != self.state.epoch:
            self.state.totals.stale_epoch += 1
            return Walk(Path([], 0), 0, 0)
        return self.state.residency.index.walk(symbols, want)
