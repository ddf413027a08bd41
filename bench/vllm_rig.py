"""Both halves of the vLLM connector in one process, driven as an engine drives them, without vLLM."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np

from tiercache.assembly import Seams
from tiercache.config import DRAM, Settings
from tiercache.integrations.vllm_config import ConnectorSettings
from tiercache.integrations.vllm_messages import StepOrders
from tiercache.integrations.vllm_rows import HostPages
from tiercache.integrations.vllm_scheduler import SchedulerSide
from tiercache.integrations.vllm_worker import WorkerSide
from tiercache.layout import Namespace
from tiercache.types import CopyJob, JobResult

__all__ = ["BLOCK_TOKENS", "VllmRig", "chained", "request"]

BLOCK_TOKENS = 16
_PAGE_NBYTES = 64


def chained(blocks: int, what: str = "") -> list[bytes]:
    """As vLLM hashes blocks: 32 bytes each, of the parent's hash and its own tokens."""
    hashes = [hashlib.sha256(what.encode()).digest()]
    for i in range(blocks):
        hashes.append(hashlib.sha256(hashes[-1] + i.to_bytes(4, "little")).digest())
    return hashes[1:]


def request(name: str, hashes: list[bytes], tokens: int) -> SimpleNamespace:
    """As vLLM's, so far as the connector looks at it."""
    return SimpleNamespace(
        request_id=name,
        block_hashes=hashes,
        num_tokens=tokens,
        num_prompt_tokens=tokens,
        num_computed_tokens=0,
        num_in_flight_tokens=0,
        num_output_tokens=0,
        arrival_time=0.0,
        all_token_ids=range(tokens),
    )


class VllmRig:
    """A scheduler's half and one rank's, over DRAM with `slots` blocks."""

    def __init__(self, slots: int, engine_blocks: int = 1024) -> None:
        settings = Settings(tiers=(DRAM(slots * 4096),), block_tokens=BLOCK_TOKENS)
        engine = ConnectorSettings(settings, 1, 0, loads=True, stores=True, overlaps=True, named=None, seams=Seams())
        pages = HostPages(np.zeros((2, engine_blocks, _PAGE_NBYTES), dtype=np.uint8))
        self.scheduler = SchedulerSide(engine, b"i" * 16)
        self.worker = WorkerSide(engine, 0, pages, {"model": "m"}, b"i" * 16, Namespace("m"))
        self.scheduler.take_hello(self.worker.hello())

    def close(self) -> None:
        """End the rank's threads."""
        self.worker.shutdown()

    @staticmethod
    def output(scheduled: dict[str, int], new: Any = ()) -> SimpleNamespace:
        """A SchedulerOutput: tokens by request. new: (request, block ids) of those that are scheduled first."""
        fresh = [SimpleNamespace(req_id=each.request_id, block_ids=(ids,), num_computed_tokens=0) for each, ids in new]
        names = [name for name in scheduled if name not in {each.req_id for each in fresh}]
        cached = SimpleNamespace(
            req_ids=names,
            resumed_req_ids=set(),
            new_block_ids=[None] * len(names),
            num_computed_tokens=[0] * len(names),
        )
        return SimpleNamespace(scheduled_new_reqs=fresh, scheduled_cached_reqs=cached, num_scheduled_tokens=scheduled)

    def step(self, output: SimpleNamespace) -> StepOrders:
        """Every hook that an engine calls in one step, in its order."""
        scheduler, worker = self.scheduler, self.worker
        orders = scheduler.orders(output)
        worker.take(orders)
        worker.finished()
        worker.counts()
        report = worker.report()
        scheduler.take_report(report, (), ())
        scheduler.counts()
        scheduler.has_work()
        return orders

    def settle(self) -> None:
        """Empty steps until nothing is under way."""
        while self.scheduler.has_work():
            self.step(self.output({}))

    def decodes(self, n: int, blocks: int = 15, *, counted: bool = True) -> dict[str, int]:
        """So many requests that have stored their prompts and decode now, in the middle of a block; their next step.

        counted: the engine counts its tokens in flight.
        """
        new, at = [], 1
        for i in range(n):
            tokens = blocks * BLOCK_TOKENS + 5
            each = request(f"r{i}", chained(blocks, f"prompt {i}"), tokens)
            if not counted:
                del each.num_in_flight_tokens
            ids = list(range(at, at + blocks + 1))
            at += blocks + 1
            self.scheduler.add(each)
            self.scheduler.matched_tokens(each, 0)
            self.scheduler.allocated(each, ids, 0)
            each.num_computed_tokens = tokens
            new.append((each, ids))
        self.step(self.output({each.request_id: each.num_tokens for each, _ in new}, new))
        for each, _ in new:
            each.num_output_tokens = 1
        scheduled = dict.fromkeys((each.request_id for each, _ in new), 1)
        for _ in range(3):
            self.step(self.output(scheduled))
            while self.scheduler.has_work():
                self.step(self.output(scheduled))
        return scheduled

    def fill(self, hashes: list[bytes]) -> None:
        """Have these blocks cached, as after stores whose copies all went well."""
        planner, symbols = self.scheduler.planner, b"".join(hashes)
        assert planner is not None
        begin = 0
        while begin < len(hashes):
            plan = planner.plan_store(symbols, len(hashes), begin, planner.epoch, 1e9, 1)
            for message in planner.take_messages():
                if isinstance(message, CopyJob):
                    planner.commit(JobResult(message.id, np.ones(message.n, dtype=np.bool_), 0, 0.0), 1e9)
            assert plan.end > begin
            begin = plan.end
        self.scheduler.version += 1
