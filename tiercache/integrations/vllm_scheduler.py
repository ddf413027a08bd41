"""The scheduler's half of the connector: one planner over all ranks of an engine. It decides, and moves no byte.

Called by the engine's scheduler only, from one thread. What was decided goes to the ranks with the next step
(`orders`), and what they report comes back with its output (`take_report`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tiercache.assembly import steady_wall_clock
from tiercache.config_remote import REMOTE_NAME
from tiercache.integrations.vllm_config import ConnectorSettings
from tiercache.integrations.vllm_counts import Payload, SchedulerCounters, SchedulerMeter
from tiercache.integrations.vllm_epoch import EpochFile
from tiercache.integrations.vllm_events import BlockEvents
from tiercache.integrations.vllm_messages import Attach, Hello, LoadOrder, StepOrders, StepReport
from tiercache.integrations.vllm_ranks import RankResults
from tiercache.integrations.vllm_requests import RequestState
from tiercache.integrations.vllm_start import start
from tiercache.planner import Load, Planner
from tiercache.types import Forget, JobResult, Slots

__all__ = ["SchedulerSide"]

_log = logging.getLogger("tiercache.vllm")


@dataclass(slots=True, eq=False)
class _LoadState:
    """A load for a waiting request."""

    request: str
    endpoint: int
    load: Load
    block_ids: Slots
    start: int
    end: int
    came: int
    """Where the first block that failed is, `end`: none yet."""


class SchedulerSide:
    """See the module. Until all ranks have introduced themselves it finds nothing and stores nothing."""

    def __init__(
        self, engine: ConnectorSettings, ident_digest: bytes, *, clock: Callable[[], float] | None = None
    ) -> None:
        """ident_digest: of what makes the engine's KV interchangeable; the same in all ranks."""
        self.engine = engine
        self.block_tokens = engine.settings.block_tokens
        self.counters = SchedulerCounters()
        self.planner: Planner | None = None
        self.events: BlockEvents | None = None
        """Where the engine publishes KV events."""
        self.cold_reason = ""
        """Why nothing was found at the start."""
        self._meter = SchedulerMeter(self.block_tokens)
        self._epoch_file = EpochFile(engine.directory)
        self._digest = ident_digest
        self._clock = clock or steady_wall_clock()
        self._hellos: dict[int, Hello] = {}
        self._results = RankResults(engine.ranks)
        self._requests: dict[str, RequestState] = {}
        self._loads: dict[str, _LoadState] = {}
        """Not over yet, by request."""
        self._open: list[_LoadState] = []
        """Not closed yet."""
        self._orders = StepOrders(0)
        """Of the step to come."""
        self._step = 0
        self._reading: dict[int, set[int]] = {}
        """Engine blocks that stores read: jobs by block."""
        self._sources: dict[int, list[int]] = {}
        """Engine blocks by store job."""
        self._allocated: list[int] = []
        """Engine blocks handed out since the last step."""
        self._processed = 0
        self._under_way: deque[tuple[int, dict[str, int]]] = deque()
        """Steps whose output was not taken over, and their tokens by request; where the engine does not count them."""
        self._counted = False
        """The engine counts the tokens of its requests that are in flight (0.32)."""
        self._endpoints = 0
        self.version = 0
        """Changes whenever an answer of the planner may."""
        self.stale_engine_cache = False
        """The engine's own prefix cache may hold KV of an epoch before."""

    # -- the start ----------------------------------------------------------------------------------------------

    def take_hello(self, hello: Hello) -> None:
        """A rank introduces itself; when all have, the planner is there. ConfigError where they do not fit."""
        if self.planner is not None:
            return
        self._hellos[hello.rank] = hello
        if len(self._hellos) < self.engine.ranks:
            return
        was_reset = self.counters.resets > 0
        begun = start(self.engine, self._hellos, self._epoch_file, self._digest, self.events, self._clock(), was_reset)
        self.planner, self.cold_reason = begun.planner, begun.cold_reason
        if begun.lacking is not None:
            self._orders.messages.append(Forget(begun.lacking))
        self.version += 1
        found = self.planner.totals().recovered
        _log.info("tiercache: %d blocks (%d tokens) are there from before", found, found * self.block_tokens)

    # -- what the engine asks -----------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """A new request."""
        self._requests[request.request_id] = state = RequestState(request)
        self._counted = state.counted

    def _state(self, request: Any) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
        return state

    def matched_tokens(self, request: Any, local_tokens: int) -> int | None:
        """Tokens past the first `local_tokens`, which the engine has, that can be loaded now. None: a remote tier is
        being asked for more, so ask again with the next step. No side effects but statistics and questions to a remote
        tier; cheap where nothing changed since it was last asked."""
        planner, state = self.planner, self._state(request)
        state.local_blocks = local_tokens // self.block_tokens
        if planner is None or not self.engine.loads:
            return 0
        version, local, tokens = state.answer
        if version == self.version and local == local_tokens:
            return None if state.waits and self._waits(state) else tokens
        again = version >= 0
        blocks = min(state.hashes, request.num_tokens // self.block_tokens)
        if state.most is not None:
            blocks = min(blocks, state.most)
        tokens, state.waits = 0, False
        if blocks > state.local_blocks and planner.loads.has_room():
            found = planner.lookup(state.symbols(), blocks, self._clock(), again=again)
            tokens = max(0, found.blocks * self.block_tokens - local_tokens)
            finds = planner.finds if found.pending else None
            state.waits = finds is not None and finds.is_asked(state.symbols(), found.blocks, blocks)
        if not again:
            self.counters.asked += max(0, request.num_tokens - local_tokens)
        state.answer = (self.version, local_tokens, tokens)
        return None if state.waits and self._waits(state) else tokens

    def _waits(self, state: RequestState) -> bool:
        """May a request go on waiting for what a remote tier says?"""
        return state.goes_on_waiting(self._clock(), self.engine.patience_s, self.counters)

    def allocated(self, request: Any, block_ids: Sequence[int], tokens: int) -> None:
        """The engine has given the request these blocks (all of its table), and lets us load `tokens` into those after
        what it has itself."""
        state = self._state(request)
        state.table = []  # until the step says that the request runs
        self._allocated.extend(block_ids[state.local_blocks :])
        if tokens <= 0 or self.planner is None:
            return
        start, end = state.local_blocks, state.local_blocks + tokens // self.block_tokens
        ids = np.array(block_ids[:end], dtype=np.int32)
        endpoint = self._endpoint(ids, once=False)
        now = self._clock()
        load = self.planner.plan_load(state.symbols(), end, self.planner.epoch, now, endpoint, None, start)
        self._orders.loads.append(LoadOrder(endpoint, request.request_id, start, end))
        mine = _LoadState(request.request_id, endpoint, load, ids, start, end, end)
        self._loads[request.request_id] = mine
        self._open.append(mine)
        self.counters.loads += 1
        self.counters.promised += tokens
        self.version += 1

    def hit_sources(self, request: Any, tokens: int) -> dict[str, int]:
        """Of the tokens that are being loaded for this request, how many come from each level."""
        mine = self._loads.get(request.request_id)
        if mine is None or self.planner is None:
            return {}
        names = [*(spec.name for spec in self.planner.levels), REMOTE_NAME]
        size, counts = self.block_tokens, zip(names, mine.load.by_level, strict=False)
        by_level = {name: blocks * size for name, blocks in counts if blocks}
        return by_level if sum(by_level.values()) == tokens else {}

    # -- a step -------------------------------------------------------------------------------------------------

    def orders(self, output: Any) -> StepOrders:
        """What the ranks have to do in the step of this `SchedulerOutput`; begins a new one."""
        orders, planner = self._orders, self.planner
        self._step += 1
        orders.step = self._step
        orders.drains = not output.num_scheduled_tokens
        fresh = self._follow(output)
        while self._under_way and self._under_way[0][0] <= self._processed:
            self._under_way.popleft()
        if planner is None:
            orders.wants_hello = True
        else:
            self._store_processed(output.num_scheduled_tokens)
            if self._reading and fresh:
                orders.fence.extend(self._fence(fresh))
            if self._open:
                self._close_loads(orders)
            orders.messages.extend(planner.take_messages())
        for request_id, tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request_id)
            if state is not None and not state.begun:
                state.scheduled(tokens)
        if not self._counted and output.num_scheduled_tokens:
            self._under_way.append((self._step, dict(output.num_scheduled_tokens)))
            orders.echo = True
        self._orders = StepOrders(0)
        return orders

    def _follow(self, output: Any) -> list[int]:
        """Take over the step's block tables. Returns engine blocks that it, or a load, may write to."""
        fresh, self._allocated = self._allocated, []
        for new in output.scheduled_new_reqs:
            state = self._requests.get(new.req_id)
            ids = list(new.block_ids[0])
            fresh += ids[new.num_computed_tokens // self.block_tokens :]
            if state is not None:
                state.restart(ids)
                self._meter.begins(state)
        cached = output.scheduled_cached_reqs
        resumed = cached.resumed_req_ids
        for i, new_ids in enumerate(cached.new_block_ids):
            if not new_ids and not resumed:
                continue
            request_id = cached.req_ids[i]
            if request_id in resumed:
                ids = list(new_ids[0]) if new_ids else []
                fresh += ids[cached.num_computed_tokens[i] // self.block_tokens :]
                state = self._requests.get(request_id)
                if state is not None:
                    state.restart(ids)
            elif new_ids:
                fresh += new_ids[0]
                state = self._requests.get(request_id)
                if state is not None:
                    state.table.extend(new_ids[0])
        for copy in getattr(output, "kv_cache_block_copies", None) or ():
            fresh.append(int(copy[1]))  # (from, to)
        return fresh

    def _store_processed(self, request_ids: Iterable[str]) -> None:
        requests, size = self._requests, self.block_tokens
        counted, under_way = self._counted, self._under_way
        for request_id in request_ids:
            state = requests.get(request_id)
            if state is None:
                continue
            request = state.request
            if counted:
                pending = request.num_in_flight_tokens
            else:
                pending = self._pending(request_id, self._processed) if under_way else 0
            if not state.first_step:  # in the middle of a block, as most are most of the time?
                more = request.num_computed_tokens - state.stored * size
                if pending <= more < size:
                    continue
            done = min(state.processed_tokens(pending) // size, state.hashes)
            if done > state.stored or (state.first_step and done):
                self._store(state, done)
            elif done < state.stored:
                state.stored = max(done, 0)

    def _pending(self, request_id: str, processed_step: int) -> int:
        """Tokens of this request in steps after this one, as far as they were noted."""
        return sum(tokens.get(request_id, 0) for step, tokens in self._under_way if step > processed_step)

    def _store(self, state: RequestState, blocks: int) -> None:
        """Store what of the request's first `blocks` blocks is not there; of a request that is scheduled for the first
        time all of it, and its path is used."""
        planner = self.planner
        if planner is None or not state.may_store or state.retry_at > self.version:
            return
        first, state.first_step = state.first_step, False
        if first and not self.engine.stores:
            planner.touch(state.symbols(), blocks, planner.epoch, self._clock())
        if first and self.stale_engine_cache and state.local_blocks:
            state.may_store = False  # what the engine's own cache supplied may be of an epoch before
        if not self.engine.stores or not state.may_store:
            state.may_store = False
            return
        start = 0 if first else state.stored
        plan = None
        for begin in (start, 0) if start else (0,):
            ids = np.array(state.table[begin:blocks], dtype=np.int32)
            endpoint = self._endpoints + 1
            now, epoch = self._clock(), planner.epoch
            plan = planner.plan_store(state.symbols(), blocks, begin, epoch, now, endpoint)
            if plan.job:
                self._endpoint(ids, once=True)
                self._note_sources(plan.job)
                if self.events is not None:
                    self.events.stores(plan.job, state.request, state.symbols(), begin, blocks)
            if plan.reason != "parent_missing":
                break
        assert plan is not None
        state.stored = blocks if not plan.reason else min(blocks, max(plan.end, 0))
        state.retry_at = self.version + 1 if plan.reason else 0
        self.counters.stores += bool(plan.accepted)
        self.counters.stores_cut += bool(plan.reason)
        self.counters.stored += plan.accepted * self.block_tokens
        if plan.accepted:
            self.version += 1

    def _note_sources(self, job_id: int) -> None:
        """Remember which engine blocks a store reads until it is over. It is the last job that was planned."""
        planner = self.planner
        assert planner is not None
        rows = planner.state.jobs[job_id].job.src_slots
        ids = self._orders.attach[-1].block_ids[rows].tolist()
        self._sources[job_id] = ids
        for block in ids:
            self._reading.setdefault(block, set()).add(job_id)

    def _forget_sources(self, job_id: int) -> None:
        for block in self._sources.pop(job_id, ()):
            jobs = self._reading[block]
            jobs.discard(job_id)
            if not jobs:
                del self._reading[block]

    def _fence(self, fresh: Collection[int]) -> list[int]:
        """Stores that read blocks which are about to be written to."""
        jobs = {job for block in self._reading.keys() & set(fresh) for job in self._reading[block]}
        self.counters.fenced += len(jobs)
        return sorted(jobs)

    def _endpoint(self, block_ids: Slots, once: bool) -> int:
        self._endpoints += 1
        self._orders.attach.append(Attach(self._endpoints, block_ids, once))
        return self._endpoints

    def _close_loads(self, orders: StepOrders) -> None:
        """Loads all of whose jobs were submitted, or given up."""
        waiting = []
        for mine in self._open:
            if mine.load.segments:
                waiting.append(mine)
            else:
                orders.closed.append(mine.endpoint)
        self._open = waiting

    def take_report(self, report: StepReport | None, finished: Collection[str], invalid: Collection[int]) -> None:
        """What the ranks reported of a step. finished: requests whose loads are over, on all ranks. invalid: engine
        blocks into which nothing valid was loaded."""
        if report is not None:
            self._processed = max(self._processed, report.step)
            for hello in report.hellos.values():
                self.take_hello(hello)
            if report.messages:
                self._take_messages(report)
        if invalid:
            self._failed(set(invalid))
        for request_id in finished:
            mine = self._loads.pop(request_id, None)
            if mine is not None:
                self._load_over(mine)

    def _take_messages(self, report: StepReport) -> None:
        planner = self.planner
        assert planner is not None
        now = self._clock()
        for message in self._results.take(report.messages):
            if self.events is not None:
                self.events.commits(message)
            planner.commit(message, now)
            if isinstance(message, JobResult):
                self._forget_sources(message.job)
        self.version += 1

    def _failed(self, invalid: set[int]) -> None:
        """Some rank could not load these engine blocks. (Ranks may tell so in steps before the load is over on all.)"""
        if self._reading:
            self._orders.fence.extend(self._fence(invalid))
        for state in self._requests.values():
            if not invalid.isdisjoint(state.table):
                state.distrust()
        for mine in self._loads.values():
            hit = np.isin(mine.block_ids[mine.start : mine.came], list(invalid))
            if hit.any():
                mine.came = mine.start + int(hit.argmax())

    def _load_over(self, mine: _LoadState) -> None:
        self.counters.loaded += (mine.came - mine.start) * self.block_tokens
        self.counters.failed += (mine.end - mine.came) * self.block_tokens
        state = self._requests.get(mine.request)
        if state is not None and mine.came < mine.end:  # offered again, it would fail again, step after step
            state.most = mine.came
            self.version += 1

    def finish(self, request: Any, block_ids: Sequence[int]) -> None:
        """The request is over (or aborted); its blocks are the engine's again when this returns."""
        self._meter.ends(request)
        state = self._requests.pop(request.request_id, None)
        if state is None or not state.table or request.request_id in self._loads:
            return  # it never ran, or what it waits for has not come
        if self._counted:
            pending = request.num_in_flight_tokens
        else:
            pending = self._pending(request.request_id, self._processed if self.engine.overlaps else self._step)
        blocks = min(state.processed_tokens(pending) // self.block_tokens, state.hashes, len(block_ids))
        if blocks > state.stored or (state.first_step and blocks):
            state.table, state.retry_at = list(block_ids), 0
            self._store(state, blocks)

    def counts(self) -> Payload | None:
        """What happened since this was last asked; None: nothing, or it is too early to ask again."""
        draining = not self._requests and not self.has_work()
        return self._meter.take(self.version, self.counters, self.planner, self.cold_reason, draining)

    def has_work(self) -> bool:
        """Must the engine make steps although it has nothing to do? While stores copy, while a remote tier is written
        to, and for what was decided since the last step."""
        if self._sources or self._orders.attach or self._orders.messages:
            return True
        planner = self.planner
        if planner is None:
            return False
        writes = planner.remote_writes
        if writes is not None and writes.is_stuck:
            planner.tend(self._clock())
        return bool(planner.state.outbox) or (writes is not None and not writes.is_idle)

    def reset(self, engine_cache_is_empty: bool) -> None:
        """The weights changed: nothing stored so far is ever found again, also after a restart. Durable on return.

        engine_cache_is_empty: False where the engine's own prefix cache, or a running request, may hold KV of before.
        """
        epoch = self._epoch_file.leave(self.engine.tag)
        self.counters.resets += 1
        if self.engine.tag is not None and self.counters.resets == 1:
            _log.warning("a reset: the remote tier finds nothing of others, until a start with another epoch")
        self.stale_engine_cache = not engine_cache_is_empty
        if self.planner is None:
            return
        self.planner.new_epoch(epoch, self._clock())
        self._orders.voided.extend(mine.endpoint for mine in self._loads.values())
        if self.stale_engine_cache:
            for state in self._requests.values():
                state.may_store = False
        self.version += 1
