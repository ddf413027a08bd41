"""An engine that schedules as vLLM does, on a few small blocks, and knows which bytes every block must hold.

Its KV of a token is made of the weights' version, the tokens up to it, rank and layer. Before a request runs, all KV
that it is going to read is compared: so a block that was stored too early, loaded wrong, or overwritten while it was
copied is found as soon as it would change an answer. Names and order of calls are those of vLLM's scheduler (0.32).
"""

from __future__ import annotations

import hashlib
import pickle
import random
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np

from tiercache.assembly import Seams
from tiercache.config import load_config
from tiercache.integrations.vllm_config import ConnectorSettings
from tiercache.integrations.vllm_rows import HostPages
from tiercache.integrations.vllm_scheduler import SchedulerSide
from tiercache.integrations.vllm_worker import WorkerSide
from tiercache.layout import Namespace

BLOCK_TOKENS = 4
LAYERS = 2
TOKEN_NBYTES = 8
PAGE = BLOCK_TOKENS * TOKEN_NBYTES
IDENT = b"i" * 16


def settings_of(tiers, ranks=1, remote=None, **more) -> ConnectorSettings:
    values = {"loads": True, "stores": True, "overlaps": False, "named": None, "seams": Seams(), **more}
    settings = replace(load_config({"tiers": tiers}), block_tokens=BLOCK_TOKENS, namespace="ranks", remote=remote)
    return ConnectorSettings(settings=settings, ranks=ranks, engine=0, **values)


@dataclass(eq=False)
class Request:
    """As vLLM's, so far as the connector looks at it."""

    request_id: str
    tokens: list[int]
    ends_at: int
    """Tokens at which it is over."""
    version: int
    """Of the weights that it was begun with."""
    status: str = "WAITING"
    num_computed_tokens: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    tainted: bool = False
    """Its KV is of several versions of the weights: vLLM's own affair."""
    new: bool = True
    runs: int = 0
    """Times that it was begun; what an earlier one still brings is stale."""
    loading: tuple[int, int] = (0, 0)

    def __post_init__(self):
        self.hash_tokens()

    @property
    def num_tokens(self):
        return len(self.tokens)

    def hash_tokens(self):
        while len(self.block_hashes) < len(self.tokens) // BLOCK_TOKENS:
            n = len(self.block_hashes)
            parent = self.block_hashes[-1] if n else b""
            block = self.tokens[n * BLOCK_TOKENS : (n + 1) * BLOCK_TOKENS]
            self.block_hashes.append(hashlib.sha256(parent + bytes(block)).digest())


def token_kv(version, tokens, rank, layer) -> np.ndarray:
    """KV of the last of these tokens."""
    text = repr((version, rank, layer)).encode() + bytes(tokens)
    return np.frombuffer(hashlib.blake2b(text, digest_size=TOKEN_NBYTES).digest(), dtype=np.uint8)


def _one_group(ids):
    """Block ids as vLLM gives them, None for none."""
    return (ids,) if ids else None


class SlowPages:
    """Reads and writes of an engine's blocks that take up to `most_s`; a read sees its bytes at two times."""

    def __init__(self, inner: HostPages, most_s: float, seed: int):
        self.inner, self.most_s, self.rng = inner, most_s, random.Random(seed)
        self.num_blocks, self.block_nbytes = inner.num_blocks, inner.block_nbytes

    def read(self, block_ids):
        time.sleep(self.rng.random() * self.most_s)
        rows = self.inner.read(block_ids)
        time.sleep(self.rng.random() * self.most_s)
        half = self.block_nbytes // 2
        rows[:, half:] = self.inner.read(block_ids)[:, half:]
        return rows

    def write(self, block_ids, rows):
        time.sleep(self.rng.random() * self.most_s)
        self.inner.write(block_ids, rows)


class FakeEngine:
    """See the module."""

    def __init__(
        self,
        settings: ConnectorSettings,
        num_blocks=24,
        *,
        counts_in_flight=True,
        seed=0,
        budget=40,
        slow_s=0.0,
        handshake=True,
    ):
        self.settings, self.ranks = settings, settings.ranks
        self.rng = random.Random(seed)
        self.budget = budget
        self.counts_in_flight = counts_in_flight
        shape = (LAYERS, num_blocks, PAGE)
        self.memory = [np.zeros(shape, dtype=np.uint8) for _ in range(self.ranks)]
        self.scheduler = SchedulerSide(settings, IDENT)
        self.workers = [
            WorkerSide(settings, rank, self._pages(rank, slow_s, seed), {"model": "m"}, IDENT, Namespace(f"m{rank}"))
            for rank in range(self.ranks)
        ]
        for worker in self.workers if handshake else ():
            self.scheduler.take_hello(pickle.loads(pickle.dumps(worker.hello())))
        self.version = 0
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))
        self.refs = [0] * num_blocks
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.stale_cache: set[bytes] = set()
        """Hashes that the engine's own cache holds under older weights."""
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.ready: set[str] = set()
        self.failed: set[str] = set()
        self.finished_ids: set[str] = set()
        self.in_flight: list[tuple[SimpleNamespace, list]] = []
        self.deferred: list[tuple[int, list[int]]] = []
        """Blocks that are free once this step was taken over: a step before may still write to them."""
        self.scheduled = self.taken_over = 0
        self.answers: dict[str, list[int]] = {}
        self.numbers = 0
        self.preemptions = 0
        self.asked_again = 0
        """Times that a request was told to ask again."""

    def _pages(self, rank, slow_s, seed):
        pages = HostPages(list(self.memory[rank]))
        return SlowPages(pages, slow_s * (1 + rank), seed * 7 + rank) if slow_s else pages

    # -- requests -----------------------------------------------------------------------------------------------

    def add(self, tokens, more=4) -> Request:
        self.numbers += 1
        request = Request(f"r{self.numbers}", list(tokens), len(tokens) + more, self.version)
        if self.counts_in_flight:
            request.num_in_flight_tokens = 0
        self.requests[request.request_id] = request
        self.waiting.append(request)
        self.scheduler.add(request)
        return request

    def abort(self, request: Request):
        if request.request_id not in self.requests or request.status == "FINISHED":
            return
        (self.running if request in self.running else self.waiting).remove(request)
        loading = request.status == "LOADING" and request.request_id not in self.ready
        self.ready.discard(request.request_id)
        self.failed.discard(request.request_id)
        self._finish(request, hold=loading)

    def _finish(self, request, hold=False):
        request.status = "FINISHED"
        ids = request.table[: -(-request.num_computed_tokens // BLOCK_TOKENS)]
        self.scheduler.finish(request, ids)
        self.finished_ids.add(request.request_id)
        self.answers[request.request_id] = request.tokens
        if not hold:
            self._release(request)

    def _release(self, request):
        self._free_blocks(request.table)
        request.table = []
        del self.requests[request.request_id]

    # -- blocks -------------------------------------------------------------------------------------------------

    def _free_blocks(self, ids):
        if self.settings.overlaps and self.scheduled > self.taken_over:
            self.deferred.append((self.scheduled, list(ids)))
        else:
            self._give_back(ids)

    def _give_back(self, ids):
        for block in reversed(ids):
            self.refs[block] -= 1
            if self.refs[block] == 0:
                self.free[block] = None

    def _allocate(self, n) -> list[int] | None:
        if n > len(self.free):
            return None
        ids = []
        for _ in range(n):
            block, _ = self.free.popitem(last=False)
            known = self.hash_of.pop(block, None)
            if known is not None and self.cached.get(known) == block:
                del self.cached[known]
            self.refs[block] = 1
            ids.append(block)
        return ids

    def _hold(self, ids):
        for block in ids:
            if self.refs[block] == 0:
                del self.free[block]
            self.refs[block] += 1

    def _cache_blocks(self, request, tokens):
        for i in range(min(tokens // BLOCK_TOKENS, len(request.block_hashes))):
            name = request.block_hashes[i]
            if name not in self.cached and request.table[i] not in self.hash_of:
                self.cached[name] = request.table[i]
                self.hash_of[request.table[i]] = name
                if request.tainted:
                    self.stale_cache.add(name)
                else:
                    self.stale_cache.discard(name)

    # -- scheduling ---------------------------------------------------------------------------------------------

    def schedule(self) -> SimpleNamespace:
        budget, counts = self.budget, {}
        new, resumed, grown = [], [], {}
        for request in list(self.running):
            n = min(budget, request.num_tokens - request.num_computed_tokens)
            if n <= 0 or request not in self.running:
                continue
            need = -(-(request.num_computed_tokens + n) // BLOCK_TOKENS) - len(request.table)
            ids = self._allocate(max(0, need))
            while ids is None and self.running[-1] is not request:
                victim = self.running[-1]
                self._preempt(victim)
                budget += counts.pop(victim.request_id, 0)
                grown.pop(victim.request_id, None)
                ids = self._allocate(max(0, need))
            if ids is None:
                self._preempt(request)
                break
            request.table += ids
            self._cache_blocks(request, request.num_computed_tokens + n)
            grown[request.request_id] = ids
            counts[request.request_id] = n
            budget -= n
        preempted = len(grown) < len(self.running)
        for request in list(self.waiting):
            if budget <= 0 or len(self.running) >= 4 or (preempted and self.running):
                break
            if request.status == "LOADING" and not self._is_loaded(request):
                continue
            n = self._admit(request, budget)
            if n is None:  # (one that waits for blocks must not keep out those that hold some)
                continue
            if n:
                counts[request.request_id] = n
                budget -= n
                (new if request.new else resumed).append(request)
                request.new = False
        if not counts and self.waiting and all(each.status != "LOADING" for each in self.waiting):
            self._make_way()
        output = self._output(counts, new, resumed, grown)
        output.orders = self.scheduler.orders(output)
        self.scheduled += 1
        for request_id, n in counts.items():
            request = self.requests[request_id]
            request.num_computed_tokens += n
            if self.counts_in_flight:
                request.num_in_flight_tokens += n
        return output

    def _output(self, counts, new, resumed, grown):
        cached = [self.requests[each] for each in grown if each in counts] + resumed
        finished, self.finished_ids = self.finished_ids, set()
        return SimpleNamespace(
            scheduled_new_reqs=[
                SimpleNamespace(
                    req_id=each.request_id,
                    block_ids=(list(each.table),),
                    num_computed_tokens=each.num_computed_tokens,
                )
                for each in new
            ],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[each.request_id for each in cached],
                resumed_req_ids={each.request_id for each in resumed},
                new_block_ids=[
                    (list(each.table),)
                    if each in resumed
                    else (grown[each.request_id],)
                    if grown[each.request_id]
                    else None
                    for each in cached
                ],
                num_computed_tokens=[each.num_computed_tokens for each in cached],
            ),
            num_scheduled_tokens=dict(counts),
            finished_req_ids=finished,
            work=[
                (each, list(each.table), each.num_computed_tokens, counts[each.request_id], each.runs)
                for each in self.running
                if each.request_id in counts
            ],
        )

    def _preempt(self, request):
        self.preemptions += 1
        self.running.remove(request)
        self._free_blocks(request.table)
        request.table, request.num_computed_tokens, request.status = [], 0, "PREEMPTED"
        request.runs += 1
        request.tainted = False
        request.version = self.version
        self.waiting.insert(0, request)

    def _make_way(self):
        """Those that wait hold so many blocks that none of them fits: the last one gives its own back."""
        for request in reversed(self.waiting):
            if request.table:
                self._free_blocks(request.table)
                request.table, request.num_computed_tokens = [], 0
                return

    def _is_loaded(self, request) -> bool:
        if request.request_id not in self.ready:
            return False
        self.ready.discard(request.request_id)
        if request.request_id in self.failed and request.num_computed_tokens == 0:
            self._free_blocks(request.table)
            request.table = []
        self.failed.discard(request.request_id)
        if not request.tainted:
            self._check(request, request.num_computed_tokens, "loaded")
        self._cache_blocks(request, request.num_computed_tokens)
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        request.status = "WAITING"
        return True

    def _admit(self, request, budget) -> int | None:
        """Tokens of the next step for a waiting request; None: no room for it now. 0: it loads."""
        external, hits = 0, []
        if request.num_computed_tokens == 0 and not request.table:
            for name in request.block_hashes[: (request.num_tokens - 1) // BLOCK_TOKENS]:
                if name not in self.cached:
                    break
                hits.append(self.cached[name])
            local = len(hits) * BLOCK_TOKENS
            external = self.scheduler.matched_tokens(request, local)
            if external is None:
                self.asked_again += 1
                return None
            assert external == self.scheduler.matched_tokens(request, local)
            assert 0 <= external <= request.num_tokens - local and external % BLOCK_TOKENS == 0
        computed = request.num_computed_tokens or len(hits) * BLOCK_TOKENS
        n = 0 if external else min(budget, request.num_tokens - computed)
        need = -(-(computed + external + n) // BLOCK_TOKENS) - len(hits) - len(request.table)
        whole = -(-request.num_tokens // BLOCK_TOKENS) - len(hits) - len(request.table)
        self._hold(hits)
        ids = self._allocate(max(0, need)) if whole <= len(self.free) else None
        if ids is None:
            self._free_blocks(hits)
            return None
        request.tainted |= any(self.hash_of[block] in self.stale_cache for block in hits)
        request.table += hits + ids
        self.scheduler.allocated(request, list(request.table), external)
        request.num_computed_tokens = computed + external
        if external:
            request.status, request.loading = "LOADING", (computed // BLOCK_TOKENS, external // BLOCK_TOKENS)
            return 0
        self._cache_blocks(request, computed + n)
        self.waiting.remove(request)
        request.status = "RUNNING"
        self.running.append(request)
        return n

    # -- executing ----------------------------------------------------------------------------------------------

    def execute(self, output) -> SimpleNamespace:
        """What the workers do in this step. Where steps overlap, it computes later, as on a GPU: when the next one has
        begun its copies."""
        results = [self._execute(rank, output) for rank in range(self.ranks)]
        report = None
        for _, _, each in results:
            each = pickle.loads(pickle.dumps(each))
            report = each if report is None else report if each is None else report.aggregate(each)
        return SimpleNamespace(
            finished=[each[0] for each in results], invalid=set().union(*(each[1] for each in results)), report=report
        )

    def _execute(self, rank, output):
        worker = self.workers[rank]
        orders = pickle.loads(pickle.dumps(output.orders))
        worker.take(orders)
        if not self.settings.overlaps:
            self._work(rank, output)
        worker.take(orders)
        finished = worker.finished()
        return set(finished.requests), set(finished.invalid), worker.report()

    def _work(self, rank, output):
        for request, table, begin, n, run in output.work:
            if not request.tainted and run == request.runs:
                self._check_rows(rank, request, table, begin, "read")
            self._compute(rank, request, table, begin, n)

    def _compute(self, rank, request, table, begin, n):
        for at in range(begin, min(begin + n, len(request.tokens))):
            block, offset = table[at // BLOCK_TOKENS], at % BLOCK_TOKENS * TOKEN_NBYTES
            for layer in range(LAYERS):
                kv = token_kv(self.version, request.tokens[: at + 1], rank, layer)
                self.memory[rank][layer, block, offset : offset + TOKEN_NBYTES] = kv

    def _check(self, request, tokens, what):
        for rank in range(self.ranks):
            self._check_rows(rank, request, request.table, tokens, what)

    def _check_rows(self, rank, request, table, tokens, what):
        for at in range(tokens):
            block, offset = table[at // BLOCK_TOKENS], at % BLOCK_TOKENS * TOKEN_NBYTES
            for layer in range(LAYERS):
                kv = token_kv(self.version, request.tokens[: at + 1], rank, layer)
                got = self.memory[rank][layer, block, offset : offset + TOKEN_NBYTES]
                assert (kv == got).all(), (
                    f"{request.request_id} ({what}): token {at} of {tokens}, block {block}, rank {rank}, layer {layer}"
                )

    # -- the output ---------------------------------------------------------------------------------------------

    def update(self, output, result):
        """Take over what a step brought."""
        self.taken_over += 1
        while self.deferred and self.deferred[0][0] <= self.taken_over:
            self._give_back(self.deferred.pop(0)[1])
        self._invalid(result.invalid)
        for request_id, n in output.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            if self.counts_in_flight:
                request.num_in_flight_tokens -= n
            mine = (each[4] for each in output.work if each[0] is request)
            if request.status != "RUNNING" or request.runs not in mine:
                continue
            if self._processed(request) >= request.num_tokens:
                request.tokens.append(self._next_token(request))
                request.hash_tokens()
                if request.num_tokens >= request.ends_at:
                    self.running.remove(request)
                    self._finish(request)
        over = set()
        for rank, names in enumerate(result.finished):
            for name in names:
                seen = self._seen.setdefault(name, set())
                assert rank not in seen, f"rank {rank} told {name} twice"
                seen.add(rank)
                if len(seen) == self.ranks:
                    over.add(name)
                    del self._seen[name]
        self.scheduler.take_report(result.report, over, result.invalid)
        for name in over:
            assert name in self.requests, f"{name} is not known (any more)"
            request = self.requests[name]
            if request.status == "FINISHED":
                self._release(request)
            else:
                assert request.status == "LOADING"
                self.ready.add(name)

    _seen: dict

    def _processed(self, request):
        waiting = [work for step, _ in self.in_flight for work in step.work]
        mine = sum(work[3] for work in waiting if work[0] is request and work[4] == request.runs)
        return request.num_computed_tokens - mine

    def _next_token(self, request):
        return hashlib.sha256(bytes(request.tokens)).digest()[0]

    def _invalid(self, invalid):
        if not invalid:
            return
        for request in self.waiting:
            if request.status != "LOADING":
                continue
            full = -(-request.num_computed_tokens // BLOCK_TOKENS)
            bad = [i for i, block in enumerate(request.table[:full]) if block in invalid]
            if bad:
                request.num_computed_tokens = bad[0] * BLOCK_TOKENS
                self.failed.add(request.request_id)

    # -- driving ------------------------------------------------------------------------------------------------

    def step(self):
        """One step of the engine: schedule, execute, take over; or with overlapping, take over the step before."""
        if not hasattr(self, "_seen"):
            self._seen = {}
        output = self.schedule()
        self.in_flight.append((output, self.execute(output)))
        while len(self.in_flight) > (1 if self.settings.overlaps else 0):
            self._take_over()

    def _take_over(self):
        output, result = self.in_flight.pop(0)
        if self.settings.overlaps:
            for rank in range(self.ranks):
                self._work(rank, output)
        self.update(output, result)

    def drain(self, timeout_s=30.0):
        """Step until every request is answered and the connector wants no more steps."""
        until = time.monotonic() + timeout_s
        while self.requests or self.scheduler.has_work() or self.in_flight:
            assert time.monotonic() < until, f"{self.stuck()} {self.scheduler.has_work()}"
            if not self.requests and not self.scheduler.has_work():
                self._take_over()
            else:
                self.step()
                if not self.running:
                    time.sleep(0.0005)

    def stuck(self):
        """Who still waits, in words."""
        return [
            f"{each.request_id} {each.status} computed {each.num_computed_tokens} of {each.num_tokens}, {each.table}"
            for each in self.requests.values()
        ] + [f"free {len(self.free)}, ready {self.ready}"]

    def forget_local(self):
        """As `reset_prefix_cache()`: False, and nothing done, while a request holds blocks."""
        if any(self.refs):
            return False
        self.cached.clear()
        self.hash_of.clear()
        self.stale_cache.clear()
        return True

    def new_weights(self):
        """Other weights, as after an update in place, with a reset of the connector's cache."""
        clean = self.forget_local()
        self.version += 1
        self.scheduler.reset(engine_cache_is_empty=clean)
        if not clean:
            self.stale_cache = set(self.cached)
            for request in self.requests.values():
                fresh = (
                    not self.in_flight
                    and request.status == "LOADING"
                    and not request.loading[0]
                    and request.request_id not in self.ready
                )
                request.tainted |= not fresh

    def ask(self, tokens, more=2) -> Request:
        request = self.add(tokens, more)
        self.drain()
        return request

    def close(self):
        for worker in self.workers:
            worker.shutdown()

    def kill(self):
        """Let go of files and threads without finishing anything."""
        for worker in self.workers:
            worker.mover.close(0.5)
            worker.closed = True
            if worker._directory is not None:
                worker._directory.close()
