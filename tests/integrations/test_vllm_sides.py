"""Either half of the connector alone, stepped by hand: orders of events that walks do not come by."""

import hashlib
import threading
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import BLOCK_TOKENS, IDENT, PAGE, settings_of

from tiercache.errors import DirectoryInUseError
from tiercache.integrations.vllm_messages import Attach, LoadOrder, StepOrders, StepReport
from tiercache.integrations.vllm_rows import HostPages
from tiercache.integrations.vllm_scheduler import SchedulerSide
from tiercache.integrations.vllm_worker import WorkerSide
from tiercache.layout import Namespace
from tiercache.types import CALLER, CopyJob, JobResult

STRIDE = 4096


@dataclass(eq=False)
class Request:
    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    block_hashes: list = field(default_factory=list)

    def __post_init__(self):
        names = range(self.num_tokens // BLOCK_TOKENS)
        self.block_hashes = [hashlib.sha256(bytes([i])).digest() for i in names]


def step_of(new=(), running=None, resumed=()):
    """A SchedulerOutput. new, resumed: (request, block ids, tokens of this step); running: tokens by request id."""
    counts = {each.request_id: n for each, _, n in (*new, *resumed)} | (running or {})
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=each.request_id, block_ids=(ids,), num_computed_tokens=each.num_computed_tokens)
            for each, ids, _ in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[*(running or {}), *(each.request_id for each, _, _ in resumed)],
            resumed_req_ids={each.request_id for each, _, _ in resumed},
            new_block_ids=[None] * len(running or {}) + [(ids,) for _, ids, _ in resumed],
            num_computed_tokens=[0] * len(running or {}) + [each.num_computed_tokens for each, _, _ in resumed],
        ),
        num_scheduled_tokens=counts,
    )


@pytest.fixture
def make_worker():
    made = []

    def make(tiers, num_blocks=32, rank=0, memory=None):
        memory = np.zeros((1, num_blocks, PAGE), dtype=np.uint8) if memory is None else memory
        settings = settings_of(tiers)
        made.append(WorkerSide(settings, rank, HostPages(list(memory)), {}, IDENT, Namespace(f"r{rank}")))
        return made[-1]

    yield make
    for worker in made:
        worker.shutdown(0.5)


class Alone:
    """A scheduler's half whose one rank does what the test says."""

    def __init__(self, tmp_path, make_worker, **settings):
        tiers = [f"dram:{32 * STRIDE}B"]
        self.side = SchedulerSide(settings_of(tiers, **settings), IDENT)
        self.side.take_hello(make_worker(tiers).hello())

    def stores(self, orders):
        return [each for each in orders.messages if isinstance(each, CopyJob) and each.kind == "store"]

    def prefill(self, request, ids):
        """Computed in one step, stored by the next; the orders of that one."""
        self.side.add(request)
        assert self.side.matched_tokens(request, 0) == 0
        self.side.allocated(request, ids, 0)
        first = self.side.orders(step_of(new=[(request, ids, request.num_tokens)]))
        assert not self.stores(first)
        request.num_computed_tokens = request.num_tokens
        return self.side.orders(step_of(running={request.request_id: 1}))

    def answer(self, orders, ok=True):
        """All its jobs are over."""
        results = [
            JobResult(each.id, np.full(each.n, ok), 1, 0.001, reason="" if ok else "checksum")
            for each in orders.messages
            if isinstance(each, CopyJob)
        ]
        self.side.take_report(StepReport(orders.step, {0: results}), (), ())


@pytest.fixture
def alone(tmp_path, make_worker):
    return Alone(tmp_path, make_worker)


def stored(alone, name="a", n=16):
    request = Request(name, n)
    orders = alone.prefill(request, list(range(1, 1 + n // BLOCK_TOKENS)))
    alone.answer(orders)
    alone.side.finish(request, [])
    return orders


def test_blocks_are_stored_when_their_step_is_over(alone):
    orders = stored(alone)
    (job,) = alone.stores(orders)
    assert job.n == 4 and orders.attach[0].block_ids.tolist() == [1, 2, 3, 4] and orders.attach[0].once
    assert alone.side.planner.check() == []


def test_tokens_in_flight_are_not_stored(alone):
    request = Request("a", 16)
    alone.side.add(request)
    alone.side.allocated(request, [1, 2, 3, 4], 0)
    alone.side.orders(step_of(new=[(request, [1, 2, 3, 4], 8)]))
    request.num_computed_tokens, request.num_in_flight_tokens = 8, 8
    assert not alone.stores(alone.side.orders(step_of(running={"a": 8})))
    request.num_computed_tokens, request.num_in_flight_tokens = 16, 8
    (job,) = alone.stores(alone.side.orders(step_of(running={"a": 1})))
    assert job.n == 2


def test_an_engine_that_does_not_count_its_tokens_in_flight_has_them_counted_by_steps(alone):
    request = SimpleNamespace(**vars(Request("a", 16)))
    del request.num_in_flight_tokens
    alone.side.add(request)
    alone.side.allocated(request, [1, 2, 3, 4], 0)
    first = alone.side.orders(step_of(new=[(request, [1, 2, 3, 4], 8)]))
    assert first.echo
    request.num_computed_tokens = 8
    second = alone.side.orders(step_of(running={"a": 4}))
    assert not alone.stores(second)
    request.num_computed_tokens = 12
    alone.side.take_report(StepReport(first.step), (), ())
    (job,) = alone.stores(alone.side.orders(step_of(running={"a": 4})))
    assert job.n == 2
    request.num_computed_tokens = 16
    alone.side.finish(request, [1, 2, 3, 4])  # not overlapping: its last step is over
    (job,) = alone.stores(alone.side.orders(step_of()))
    assert job.n == 2 and not alone.side.orders(step_of()).echo


def test_what_a_neighbour_computes_in_the_first_step_is_not_stored_before_it_is_over(alone):
    request = Request("a", 16, num_computed_tokens=8)
    alone.side.add(request)
    alone.side.matched_tokens(request, 8)
    alone.side.allocated(request, [1, 2, 3, 4], 0)
    assert not alone.stores(alone.side.orders(step_of(new=[(request, [1, 2, 3, 4], 8)])))
    request.num_computed_tokens = 16
    (job,) = alone.stores(alone.side.orders(step_of(running={"a": 1})))
    assert job.n == 4


def test_what_a_failed_load_lacked_is_not_offered_again(alone):
    stored(alone)
    request = Request("b", 16)
    alone.side.add(request)
    assert alone.side.matched_tokens(request, 0) == 16
    alone.side.allocated(request, [5, 6, 7, 8], 16)
    orders = alone.side.orders(step_of())
    assert orders.closed == [orders.loads[0].endpoint]
    alone.answer(orders)
    alone.side.take_report(None, ["b"], [7])
    assert alone.side.matched_tokens(request, 0) == 8
    other = Request("c", 16)
    alone.side.add(other)
    assert alone.side.matched_tokens(other, 0) == 16


def test_ranks_tell_of_bad_blocks_in_other_steps_than_of_the_end(alone):
    stored(alone)
    request = Request("b", 16)
    alone.side.add(request)
    alone.side.matched_tokens(request, 0)
    alone.side.allocated(request, [5, 6, 7, 8], 16)
    alone.side.take_report(None, (), [6])
    alone.side.take_report(None, ["b"], [8])
    assert alone.side.counters.loaded == 4 and alone.side.counters.failed == 12


def test_a_request_that_waits_for_another_connectors_load_stores_nothing_when_it_is_aborted(alone):
    request = Request("a", 16)
    alone.side.add(request)
    alone.side.orders(step_of(new=[(request, [1, 2, 3, 4], 4)]))
    request.num_computed_tokens = 4
    alone.side.allocated(request, [5, 6, 7, 8], 0)  # preempted meanwhile, and now somebody else loads
    request.num_computed_tokens = 16
    alone.side.finish(request, [5, 6, 7, 8])
    assert not alone.stores(alone.side.orders(step_of()))


def test_an_aborted_load_stores_nothing(alone):
    stored(alone)
    request = Request("b", 16)
    alone.side.add(request)
    alone.side.orders(step_of(new=[(request, [1, 2, 3, 4], 4)]))  # and preempted
    alone.side.matched_tokens(request, 0)
    alone.side.allocated(request, [5, 6, 7, 8], 16)
    alone.side.planner.invalidate(b"", 0, 0.0)
    request.num_computed_tokens = 16
    alone.side.finish(request, [5, 6, 7, 8])
    assert not alone.stores(alone.side.orders(step_of()))


def test_stores_out_of_blocks_that_are_handed_out_are_fenced(alone):
    request = Request("a", 16)
    orders = alone.prefill(request, [1, 2, 3, 4])
    (job,) = alone.stores(orders)
    other = Request("b", 8)
    alone.side.add(other)
    alone.side.allocated(other, [9, 3], 0)
    fenced = alone.side.orders(step_of(new=[(other, [9, 3], 8)]))
    assert fenced.fence == [job.id]
    alone.answer(orders)
    assert alone.side.orders(step_of()).fence == [] and not alone.side.has_work()


def test_copy_on_write_targets_are_fenced(alone):
    orders = alone.prefill(Request("a", 16), [1, 2, 3, 4])
    output = step_of()
    output.kv_cache_block_copies = [(7, 2)]
    assert alone.side.orders(output).fence == [alone.stores(orders)[0].id]


def test_an_idle_engine_steps_while_stores_copy_and_no_longer(alone):
    request = Request("a", 16)
    assert not alone.side.has_work()
    orders = alone.prefill(request, [1, 2, 3, 4])
    assert alone.side.has_work()
    alone.answer(orders)
    alone.side.orders(step_of())
    assert not alone.side.has_work()


def test_after_a_reset_under_running_requests_nothing_of_theirs_is_stored(alone):
    running, waiting = Request("a", 16), Request("b", 16)
    alone.side.add(running)
    alone.side.orders(step_of(new=[(running, [1, 2, 3, 4], 16)]))
    alone.side.reset(engine_cache_is_empty=False)
    running.num_computed_tokens = 16
    assert not alone.stores(alone.side.orders(step_of(running={"a": 1})))
    alone.side.add(waiting)
    alone.side.matched_tokens(waiting, 8)  # the engine's own cache has blocks of before
    alone.side.allocated(waiting, [1, 2, 5, 6], 0)
    waiting.num_computed_tokens = 8
    alone.side.orders(step_of(new=[(waiting, [1, 2, 5, 6], 8)]))
    waiting.num_computed_tokens = 16
    assert not alone.stores(alone.side.orders(step_of(running={"b": 1})))
    alone.side.reset(engine_cache_is_empty=True)
    assert alone.stores(alone.prefill(Request("c", 16), [1, 2, 3, 4]))


def test_roles(tmp_path, make_worker):
    consumer = Alone(tmp_path, make_worker, stores=False)
    assert not consumer.stores(consumer.prefill(Request("a", 16), [1, 2, 3, 4]))
    producer = Alone(tmp_path, make_worker, loads=False)
    stored(producer)
    other = Request("b", 16)
    producer.side.add(other)
    assert producer.side.matched_tokens(other, 0) == 0


# -- a worker's half --------------------------------------------------------------------------------------------------


def dram(n=16):
    return [f"dram:{n * STRIDE}B"]


def job(number, kind, rows, slots, endpoint, epoch):
    rows, slots = (np.array(each, dtype=np.int32) for each in (rows, slots))
    ends = (CALLER, rows, 0, slots) if kind == "store" else (0, slots, CALLER, rows)
    idents = (slots + 1).astype(np.uint64)
    return CopyJob(number, kind, epoch, *ends, idents, endpoint=endpoint)


def ids(*numbers):
    return np.array(numbers, dtype=np.int32)


def until(worker, what, timeout_s=5.0):
    end = threading.Event()
    for _ in range(int(timeout_s / 0.005)):
        if what():
            return True
        end.wait(0.005)
    return False


def filled(make_worker):
    memory = np.random.default_rng(0).integers(1, 256, (1, 32, PAGE), dtype=np.uint8)
    worker = make_worker(dram(), memory=memory)
    worker.take(
        StepOrders(1, [Attach(1, ids(3, 4, 5), True)], [], [job(1, "store", [0, 1, 2], [0, 1, 2], 1, worker.epoch)])
    )
    assert until(worker, lambda: worker.report() is not None)
    return worker, memory


def test_a_load_is_over_with_its_last_job_once_and_tells_what_did_not_come(make_worker):
    worker, memory = filled(make_worker)
    load = LoadOrder(2, "r", 0, 4)
    first = job(2, "load", [0, 1], [0, 1], 2, worker.epoch)
    worker.take(StepOrders(2, [Attach(2, ids(10, 11, 12, 13), False)], [load], [first]))
    assert until(worker, lambda: worker.report() is not None)
    assert worker.finished().requests == set()  # another job may come
    worker.take(StepOrders(3, messages=[job(3, "load", [2], [2], 2, worker.epoch)], closed=[2]))
    over = []
    assert until(worker, lambda: over.append(worker.finished()) or over[-1].requests)
    assert (over[-1].requests, over[-1].invalid) == ({"r"}, {13})
    assert np.array_equal(memory[0, [10, 11, 12]], memory[0, [3, 4, 5]])
    assert worker.finished().requests == set()


class Traced(HostPages):
    """Reads take their time."""

    def __init__(self, layers):
        super().__init__(layers)
        self.trace = []

    def read(self, block_ids):
        self.trace.append("read")
        threading.Event().wait(0.02)
        rows = super().read(block_ids)
        self.trace.append("was read")
        return rows

    def write(self, block_ids, rows):
        self.trace.append("written")
        super().write(block_ids, rows)


def test_no_load_writes_into_a_block_before_the_store_that_reads_it_is_over(make_worker):
    worker, memory = filled(make_worker)
    worker.pages = Traced(list(memory))
    store = job(2, "store", [0], [3], 2, worker.epoch)
    worker.take(StepOrders(2, [Attach(2, ids(7), True)], [], [store]))
    load = job(3, "load", [0], [0], 3, worker.epoch)
    orders = StepOrders(3, [Attach(3, ids(7), False)], [LoadOrder(3, "r", 0, 1)], [load], closed=[3], fence=[2])
    worker.take(orders)
    assert until(worker, lambda: worker.finished().requests)
    assert worker.pages.trace == ["read", "was read", "written"]


def test_a_voided_load_brings_nothing_also_after_it_was_closed(make_worker):
    worker, _ = filled(make_worker)
    load = LoadOrder(2, "r", 0, 2)
    loads = [job(2, "load", [0, 1], [0, 1], 2, worker.epoch)]
    worker.take(StepOrders(2, [Attach(2, ids(10, 11), False)], [load], loads, closed=[2]))
    worker.take(StepOrders(3, voided=[2]))
    over = []
    assert until(worker, lambda: over.append(worker.finished()) or over[-1].requests)
    assert over[-1].invalid == {10, 11}


def test_a_second_owner_is_refused(make_worker, tmp_path, monkeypatch):
    monkeypatch.setattr("tiercache.directory._RETRY_S", 0.01)
    nvme = {"kind": "nvme", "path": str(tmp_path / "kv"), "size": 16 * STRIDE}
    make_worker([*dram(), nvme])
    with pytest.raises(DirectoryInUseError, match="in use by this process"):
        make_worker([*dram(), nvme])


def test_shutdown_finishes_delayed_writes(make_worker, tmp_path):
    from fake_engine import FakeEngine

    nvme = {"kind": "nvme", "path": str(tmp_path / "kv"), "size": 16 * STRIDE, "write_after_s": 60.0}
    engine = FakeEngine(settings_of([*dram(), nvme]))
    engine.ask(list(range(23)))
    assert engine.workers[0].shutdown()
    again = FakeEngine(settings_of([*dram(), nvme]))
    assert again.scheduler.planner.totals().recovered == 6
    again.close()


def test_settings_of_a_rank_have_their_own_folder(tmp_path):
    nvme = {"kind": "nvme", "path": str(tmp_path / "kv"), "size": 16 * STRIDE}
    settings = settings_of([*dram(), nvme])
    assert settings.of_rank(3).tiers[1].path == tmp_path / "kv" / "dp0" / "rank3"
    assert replace(settings, engine=2).directory == tmp_path / "kv" / "dp2"
    assert settings_of(dram()).directory is None
