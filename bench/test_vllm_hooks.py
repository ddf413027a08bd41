"""The connector's hooks with nothing to do, and what a lookup costs an engine's scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from bench.fill import LONG_BLOCKS
from bench.pairs import Figure, Spread
from bench.rows import row
from bench.scale import Scale
from bench.vllm_rig import BLOCK_TOKENS, VllmRig, chained, request

_DECODES = 64
_CALLS = 30
"""Few, so that most rounds end before a busy machine lets another process run."""
Call = Callable[[], object]


@pytest.fixture
def rig() -> Iterator[VllmRig]:
    made = VllmRig(5 * LONG_BLOCKS, _DECODES * 16 + 8)
    yield made
    made.close()


class Clock:
    """Times calls and hands over the figure."""

    def __init__(self, done: Callable[[Figure], None], scale: Scale) -> None:
        self._done = done
        self._rounds, self._calls = scale.pick(101, 51, 2), scale.pick(_CALLS, _CALLS, 5)

    def __call__(self, name: str, call: Call, before: Call = lambda: None, calls: int | None = None) -> None:
        """before: runs before each round, outside the clock."""
        count = calls or self._calls
        call()
        values = []
        for _ in range(self._rounds):
            before()
            began = time.perf_counter()
            for _ in range(count):
                call()
            values.append((time.perf_counter() - began) / count * 1e6)
        self._done(Figure(row(f"hooks/{name}"), Spread.of(values), self._rounds, facts={"calls": count}))


@pytest.fixture
def clock(done: Callable[[Figure], None], scale: Scale) -> Clock:
    return Clock(done, scale)


def test_a_step_with_nothing_to_do(rig: VllmRig, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    output = rig.output(rig.decodes(_DECODES))
    scheduler, worker = rig.scheduler, rig.worker
    orders = rig.step(output)
    assert orders.is_empty() and not orders.echo and worker.report() is None and not scheduler.has_work()
    caplog.clear()

    def others() -> None:
        scheduler.take_report(None, (), ())
        scheduler.counts()
        scheduler.has_work()

    def rank() -> None:
        orders.step += 1  # a new one each time
        worker.take(orders)
        worker.finished()
        worker.counts()
        worker.report()

    with caplog.at_level(logging.DEBUG):
        clock("step", lambda: rig.step(output))
        clock("meta", lambda: scheduler.orders(output))
        clock("scheduler", others)
        clock("rank", rank)
    assert not caplog.records and scheduler.orders(output).is_empty()


def test_an_engine_that_does_not_count_its_tokens_in_flight(rig: VllmRig, clock: Clock) -> None:
    output = rig.output(rig.decodes(_DECODES, counted=False))
    clock("older", lambda: rig.step(output))


@pytest.mark.parametrize("nodes", [1, 64])
def test_a_long_prompt(rig: VllmRig, clock: Clock, scale: Scale, nodes: int) -> None:
    blocks = scale.pick(LONG_BLOCKS, LONG_BLOCKS, 512)
    hashes = chained(blocks)
    rig.fill(hashes)
    for i in range(1, nodes):
        at = i * blocks // nodes
        rig.fill([*hashes[:at], *chained(1, f"branch {i}")])
    scheduler, asked = rig.scheduler, iter(range(10**6))
    tokens = blocks * BLOCK_TOKENS + 3

    def new() -> SimpleNamespace:
        scheduler._requests.clear()
        return request(f"r{next(asked)}", hashes, tokens)

    current = [new()]

    def ask() -> None:
        assert scheduler.matched_tokens(current[0], 0) == blocks * BLOCK_TOKENS

    clock(f"first/{nodes}", ask, before=lambda: current.__setitem__(0, new()), calls=1)
    assert scheduler.planner is not None
    path = scheduler.planner.state.residency.index.walk(b"".join(hashes), blocks).path
    assert len(path.nodes) == nodes
    if nodes == 1:
        clock("again", ask)
