"""A step that computes nothing lets copies go on; one that computes something waits for none."""

import time

import pytest
from fake_engine import FakeEngine, settings_of

from tiercache.integrations import vllm_worker

SLOW_S = 0.4


@pytest.fixture
def engine(tmp_path):
    made = FakeEngine(settings_of(["dram:98304B"], 1), slow_s=SLOW_S)
    yield made
    made.close()


def loading(engine):
    """A request whose load has begun."""
    engine.ask(list(range(23)))
    while not engine.forget_local() or engine.scheduler.has_work():
        engine.step()
    request = engine.add(list(range(23)))
    while request.status != "LOADING":
        engine.step()
    return request


def test_an_engine_that_only_waits_makes_few_steps(engine):
    request = loading(engine)
    began, steps = time.monotonic(), 0
    while request.status == "LOADING":
        engine.step()
        steps += 1
    assert steps <= (time.monotonic() - began) / vllm_worker.REST_S + 10


def test_the_end_of_a_copy_ends_the_rest(engine, monkeypatch):
    monkeypatch.setattr(vllm_worker, "REST_S", 30.0)
    began = time.monotonic()
    request = loading(engine)
    while request.status == "LOADING":
        engine.step()
    assert time.monotonic() - began < 15.0


def test_a_step_that_computes_does_not_rest(engine, monkeypatch):
    request = loading(engine)
    rests = []
    with monkeypatch.context() as patch:
        patch.setattr(engine.workers[0]._changed, "wait", rests.append)
        other = engine.add(list(range(100, 123)))
        while other.status != "FINISHED":
            rests.clear()
            engine.step()
            assert not rests or engine.workers[0]._drains
    assert request.status in ("LOADING", "RUNNING", "FINISHED")
