"""A rank's half of the connector: mover, tiers and files. It does what the scheduler's half decides, step by step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import numpy as np

from tiercache.assembly import OpenTiers, key_tier_spec, known_layout, make_mover, nvme_of, obtaining, open_tiers
from tiercache.directory import StoreDirectory
from tiercache.integrations.vllm_config import ConnectorSettings
from tiercache.integrations.vllm_counts import Payload, RankMeter
from tiercache.integrations.vllm_messages import SYMBOL_NBYTES, Hello, LoadOrder, StepOrders, StepReport
from tiercache.integrations.vllm_rows import BlockRows, Pages
from tiercache.layout import KVLayout, Namespace
from tiercache.lifetime import close_keys, close_later, forget_forks, watch_forks
from tiercache.mover import Mover
from tiercache.types import CALLER, Bools, CopyJob, Expedite, JobOverdue, JobResult, MoverMessage, PlannerMessage, Slots

__all__ = ["SHUTDOWN_S", "Finished", "WorkerSide"]

_log = logging.getLogger("tiercache.vllm")

FENCE_S = 0.05
"""How long a step waits for copies out of blocks that it is about to overwrite, before it calls them off."""
REST_S = 0.001
"""How long a step that computes nothing waits for copies at most. Without it an engine that waits for a load makes
thousands of steps a second, and takes the interpreter from the threads that copy: loads took three times as long."""
SHUTDOWN_S = 3.0
"""vLLM gives a worker 5 s."""


@dataclass(slots=True, eq=False)
class _LoadWatch:
    """A request that waits for rows of an endpoint."""

    order: LoadOrder
    block_ids: Slots
    arrived: Bools
    """Per row of the endpoint."""
    jobs: int = 0
    """Submitted and not over."""
    closed: bool = False
    voided: bool = False


@dataclass(frozen=True, slots=True)
class Finished:
    """Requests whose loads are over, each told once, and the engine blocks among theirs that hold nothing valid."""

    requests: set[str] = field(default_factory=set)
    invalid: set[int] = field(default_factory=set)


class WorkerSide:
    """Made once the engine's KV memory is there. All methods but the mover's callback run on the engine's thread.

    Raises ConfigError, DirectoryInUseError and what else opening a cache raises.
    """

    def __init__(
        self,
        engine: ConnectorSettings,
        rank: int,
        pages: Pages,
        identity: Mapping[str, str],
        ident_digest: bytes,
        namespace: Namespace,
    ) -> None:
        """identity, ident_digest: of the whole engine. namespace: of this rank's files."""
        self.rank = rank
        self.pages = pages
        self._identity = identity
        layout = KVLayout((pages.block_nbytes,), "uint8")
        settings = replace(engine.of_rank(rank), layout=layout, namespace=namespace)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._arrived: list[PlannerMessage] = []
        self._watches: dict[int, _LoadWatch] = {}
        self._watch_of: dict[int, tuple[_LoadWatch, Slots]] = {}
        """By job: whose it is, and its rows."""
        self._over: list[_LoadWatch] = []
        self._awaited: set[int] = set()
        """Jobs into or out of the engine's blocks, and all at a remote tier, that are not over."""
        self._writes: set[int] = set()
        """Copies to the disk that are not over; delayed ones, too."""
        self._delayed: set[int] = set()
        self._step = 0
        self._wants_hello = False
        self._echo = self._drains = False
        self._meter = RankMeter(rank)
        nvme = nvme_of(settings)
        self._directory: StoreDirectory | None = None
        with obtaining(settings), ExitStack() as undo:
            if nvme is not None:
                self._directory = StoreDirectory.open(nvme.directory)
                undo.callback(self._directory.close)
            _, self.epoch = known_layout(replace(settings, remote=None), self._directory)
            self._tiers: OpenTiers = open_tiers(
                settings, layout, self.epoch, self._directory, engine.seams, SYMBOL_NBYTES, ident_digest
            )
            undo.callback(self._tiers.close)
            keys = key_tier_spec(settings, self._tiers, SYMBOL_NBYTES)
            if (
                keys is not None
            ):  # ranks give a block one ident; in a key tier, which holds those of all, each has its own
                keys = replace(keys, ident_salt=int.from_bytes(namespace.digest[:8], "little"))
            self.mover: Mover = make_mover(settings, self._tiers, self.epoch, self._deliver, keys)
            undo.pop_all()
        self.closed = False
        watch_forks(self)

    def hello(self) -> Hello:
        """What this rank opened with."""
        catalog, directory = self._tiers.catalog, self._directory
        return Hello(
            self.rank,
            self.epoch,
            dict(self._identity),
            tuple(self._tiers.specs),
            catalog.recovered if catalog is not None else None,
            str(directory.path) if directory is not None else "",
            tuple(directory.remarks) if directory is not None else (),
        )

    # -- a step -------------------------------------------------------------------------------------------------

    def take(self, orders: StepOrders) -> None:
        """Begin a step: copies start, and those out of blocks that the step overwrites are over when this returns (or
        called off). The same step a second time does nothing."""
        if orders.step == self._step:
            return
        self._step, self._echo, self._drains = orders.step, orders.echo, orders.drains
        if orders.is_empty() or self.closed:
            return
        self._wants_hello = self._wants_hello or orders.wants_hello
        rows = {each.endpoint: each.block_ids for each in orders.attach}
        for endpoint, block_ids in rows.items():
            self.mover.attach(endpoint, BlockRows(self.pages, block_ids))
        with self._lock:
            for order in orders.loads:
                block_ids = rows[order.endpoint]
                self._watches[order.endpoint] = _LoadWatch(order, block_ids, np.zeros(len(block_ids), dtype=np.bool_))
            for message in orders.messages:
                self._note(message)
        into_engine = [each for each in orders.messages if _writes_rows(each)]
        if len(into_engine) < len(orders.messages):
            self.mover.submit([each for each in orders.messages if not _writes_rows(each)])
        for each in orders.attach:
            if each.once:
                self.mover.detach(each.endpoint)
        if orders.fence:  # before any load may write into a block that a store reads
            self.mover.call_off(orders.fence, FENCE_S)
        if into_engine:
            self.mover.submit(into_engine)
        self._close_loads(orders)

    def _note(self, message: object) -> None:
        """Before the mover has it: whose job this is."""
        if not isinstance(message, CopyJob):
            return
        watch = self._watches.get(message.endpoint) if message.dst_level == CALLER else None
        if watch is not None:
            watch.jobs += 1
            self._watch_of[message.id] = watch, message.dst_slots
        if message.endpoint or message.symbols is not None:
            self._awaited.add(message.id)
        if message.kind == "write" and message.symbols is None:
            self._writes.add(message.id)
            if message.start_after_s > 0:
                self._delayed.add(message.id)

    def _close_loads(self, orders: StepOrders) -> None:
        with self._lock:
            for endpoint in orders.voided:
                if endpoint in self._watches:
                    self._watches[endpoint].voided = True
            for endpoint in orders.closed:
                watch = self._watches.get(endpoint)
                if watch is not None:
                    watch.closed = True
                    if watch.jobs == 0:
                        self._over.append(watch)
        for endpoint in orders.closed:
            self.mover.detach(endpoint)

    def _deliver(self, message: PlannerMessage) -> None:
        """Called by the mover's threads."""
        with self._changed:
            self._arrived.append(message)
            self._meter.changed = True
            if isinstance(message, JobOverdue | JobResult):
                if message.job in self._watch_of:
                    self._load_over(*self._watch_of.pop(message.job), message)
                self._delayed.discard(message.job)
                self._awaited.discard(message.job)
                self._writes.discard(message.job)
                self._changed.notify_all()

    def _load_over(self, watch: _LoadWatch, rows: Slots, message: JobOverdue | JobResult) -> None:
        """A job of this load touches its rows no more."""
        if isinstance(message, JobResult):
            watch.arrived[rows[message.ok]] = True
        watch.jobs -= 1
        if watch.closed and watch.jobs == 0:
            self._over.append(watch)

    def finished(self) -> Finished:
        """Loads that are over since the last call. In a step that computes nothing copies get a moment to go on."""
        if self._drains and self._awaited:
            with self._changed:
                if not (self._over or self._arrived):
                    self._changed.wait(REST_S)
        if not self._over:
            return _NOTHING
        with self._lock:
            over, self._over = self._over, []
            for watch in over:
                self._watches.pop(watch.order.endpoint, None)
        finished = Finished()
        for watch in over:
            finished.requests.add(watch.order.request)
            rows = slice(watch.order.start, watch.order.end)
            missing = watch.block_ids[rows][~watch.arrived[rows] | watch.voided]
            finished.invalid.update(missing.tolist())
        return finished

    def report(self) -> StepReport | None:
        """What the scheduler's half must hear of this step, jobs of the loads that `finished` told among it."""
        if not (self._arrived or self._wants_hello or self._echo):
            return None
        report = StepReport(self._step)
        if self._arrived:
            with self._lock:
                report.messages[self.rank], self._arrived = self._arrived, []
        if self._wants_hello:
            self._wants_hello = False
            report.hellos[self.rank] = self.hello()
        return report

    def counts(self) -> Payload | None:
        """What this rank's mover did since it was last asked; None: nothing, or it is too early to ask again."""
        return None if self.closed else self._meter.take(self.mover, self._drains)

    # -- the end ------------------------------------------------------------------------------------------------

    def shutdown(self, timeout_s: float = SHUTDOWN_S) -> bool:
        """Finish what is queued, delayed or not, and close the files; at most `timeout_s`. True where nothing was lost.
        A second call does nothing."""
        if self.closed:
            return True
        self.closed = True
        until = time.monotonic() + timeout_s
        with self._lock:
            delayed = tuple(self._delayed)
        if delayed:
            self.mover.submit([Expedite(delayed)])
        with self._changed:
            self._changed.wait_for(lambda: not self._writes, max(0.0, until - time.monotonic()) * 2 / 3)
            left = len(self._writes)
        if left:
            _log.warning("%d writes to disk were not over after %.1f s: what they had is lost", left, timeout_s)
        complete = self.mover.close(max(0.1, until - time.monotonic()))
        if self._tiers.own_keys is not None:
            close_keys(self.mover, self._tiers.own_keys)
        if self._directory is not None:
            if self.mover.left_open:
                close_later(self.mover, self._tiers.tiers, self._directory)
            else:
                self._directory.close()
        forget_forks(self)
        return complete and not left

    def abandon(self) -> None:
        """In a forked child: close lock and data descriptors, touch neither memory nor catalog."""
        self.closed = True
        self.mover.abandon()
        if self._tiers.catalog is not None:
            self._tiers.catalog.abandon()
        for tier in self._tiers.tiers:
            abandon = getattr(tier, "abandon", None)
            if abandon is not None:
                abandon()
        if self._directory is not None:
            self._directory.abandon()


_NOTHING = Finished()


def _writes_rows(message: MoverMessage) -> bool:
    """Is it a load into the engine's blocks?"""
    return isinstance(message, CopyJob) and message.dst_level == CALLER and message.endpoint != 0
