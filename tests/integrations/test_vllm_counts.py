"""What is counted adds up to what happened, whatever is put together in which order; and events say what is there."""

import json
import logging
import pickle
import random
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import fake_engine
import pytest
from fake_engine import BLOCK_TOKENS, FakeEngine, settings_of
from test_vllm_fake import prompt, tiers, wander

from bench.vllm_rig import VllmRig, chained, request
from tiercache.config import Remote
from tiercache.integrations import vllm_counts
from tiercache.integrations.vllm_counts import (
    METRICS,
    PREFIX,
    RankMeter,
    SchedulerCounters,
    SchedulerMeter,
    add_up,
    result_of,
    split_key,
    summary,
)
from tiercache.integrations.vllm_events import BlockEvents
from tiercache.integrations.vllm_requests import RequestState
from tiercache.mover.stats import Counters
from tiercache.slots import RESIDENT
from tiercache.testing import MemoryKeyTier

DOC = Path(__file__).resolve().parents[2] / "docs" / "vllm-metrics.md"
WIDTH = 32


class CountedRequest(fake_engine.Request):
    """With what else a request of vLLM's has."""

    def __post_init__(self):
        super().__post_init__()
        self.num_prompt_tokens = len(self.tokens)
        self.arrival_time = time.time()

    @property
    def num_output_tokens(self):
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def all_token_ids(self):
        return self.tokens


class CountedEngine(FakeEngine):
    """Collects, after each step, what vLLM would; payloads travel as between processes."""

    def __init__(self, *args, **more):
        super().__init__(*args, **more)
        self.payload = {}
        self.with_token = 0
        """Requests that ended with a token of their own."""
        self.held = set()
        self.tokens = {}
        side = self.scheduler
        side.events = side.planner.state.residency.listener = BlockEvents(WIDTH, BLOCK_TOKENS)

    def _finish(self, request, hold=False):
        self.with_token += request.num_output_tokens > 0
        super()._finish(request, hold)

    def update(self, output, result):
        super().update(output, result)
        self.collect()

    def collect(self):
        ranks = {}
        for half in (*self.workers, self.scheduler):
            told = half.counts()
            if told is not None:
                add_up(ranks, json.loads(json.dumps(pickle.loads(pickle.dumps(told)))))
        add_up(self.payload, ranks)
        for change in self.scheduler.events.take():
            self.replay(change)

    def replay(self, change):
        if change.level < 0:
            self.held.clear()
        for i, each in enumerate(change.hashes):
            assert ((change.level, each) in self.held) != change.readable, "told twice"
            self.held ^= {(change.level, each)}
            parent = change.hashes[i - 1] if i else change.parent
            if change.tokens:
                assert len(change.tokens) == len(change.hashes) * BLOCK_TOKENS
                block = change.tokens[i * BLOCK_TOKENS : (i + 1) * BLOCK_TOKENS]
                assert each == fake_engine.hashlib.sha256((parent or b"") + bytes(block)).digest()
                self.tokens[each] = block


def there(planner):
    """(level, hash) of every readable block."""
    found = set()
    for node in planner.state.residency.index.walk_nodes():
        for at in range(node.n) if node.parent is not None else ():
            for level, table in enumerate(planner.state.residency.tables):
                slot = int(node.slots[at, level])
                if slot >= 0 and table.state[slot] == RESIDENT:
                    found.add((level, node.run[at * WIDTH : (at + 1) * WIDTH]))
    return found


@pytest.fixture
def make_engine(tmp_path, monkeypatch):
    monkeypatch.setattr(fake_engine, "Request", CountedRequest)
    monkeypatch.setattr(vllm_counts, "EVERY_S", 0.002)
    monkeypatch.setattr(vllm_counts, "AT_LATEST_S", 0.02)
    made = []

    def make(dram=24, nvme=64, ranks=1, remote=None, **more):
        place = tmp_path / f"engine{len(made)}" if remote is not None else tmp_path
        made.append(CountedEngine(settings_of(tiers(place, dram, nvme), ranks, remote, **more)))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_that_was_told_adds_up(make_engine, ranks):
    engine = make_engine(dram=12, nvme=40, ranks=ranks)
    wander(engine, seed=ranks, steps=250)
    engine.drain()
    time.sleep(0.1)  # the last writes to disk
    engine.drain()
    engine.step()
    time.sleep(0.03)
    engine.collect()
    told, side, planner = engine.payload["counters"], engine.scheduler, engine.scheduler.planner
    for attribute, name in vllm_counts._OF_ENGINE.items():
        assert told[name] == getattr(side.counters, attribute), name
    assert told["stored_tokens"] > 0 and told["loaded_tokens"] > 0
    stats = [worker.mover.stats() for worker in engine.workers]
    for level, (spec, counted) in enumerate(zip(planner.levels, planner.level_counters(), strict=True)):
        for attribute, name in vllm_counts._OF_MOVER_LEVEL.items():
            assert told[f"{name}|{spec.name}"] == sum(getattr(each.levels[level], attribute) for each in stats)
        for attribute, name in vllm_counts._OF_LEVEL.items():
            assert told[f"{name}|{spec.name}"] == getattr(counted, attribute)
        assert told[f"tier_hit_tokens|{spec.name}"] == counted.hits * BLOCK_TOKENS
        table, gauges = planner.state.residency.tables[level], engine.payload["gauges"]
        assert gauges[f"tier_blocks|{spec.name}"] == {"s": table.capacity - table.free}
        assert set(gauges[f"tier_queued_jobs|{spec.name}"]) == {str(rank) for rank in range(ranks)}
    nbytes = engine.workers[0].pages.block_nbytes
    assert told["tier_written_bytes|dram"] >= ranks * nbytes * told["stored_tokens"] // BLOCK_TOKENS
    assert {key.partition("|")[2]: n for key, n in told.items() if key.startswith("stores_cut|")} == (
        planner.totals().stores_cut
    )
    first_tokens = sum(len(each) for key, each in engine.payload["samples"].items() if key.startswith("ttft"))
    assert first_tokens == engine.with_token > 10


def test_events_replayed_are_what_the_planner_has(make_engine):
    engine = make_engine(dram=12, nvme=40)
    for seed in range(3):
        wander(engine, seed=seed, steps=120)
        engine.drain()
        engine.collect()
        assert engine.held == there(engine.scheduler.planner) != set()
    assert len(engine.tokens) > 10


def test_events_come_a_bounded_number_at_a_time(monkeypatch):
    monkeypatch.setattr("tiercache.integrations.vllm_events.AT_ONCE", 3)
    events = BlockEvents(WIDTH, BLOCK_TOKENS)
    node = SimpleNamespace(run=b"".join(chained(20)), parent=None, n=20)
    for i in range(10):
        events.changed(node, 2 * i, 2 * i + 2, 0, True)
    counts = []
    while told := events.take():
        counts.append(sum(len(each.hashes) for each in told))
    assert counts[0] == 6 and counts[-1] <= 4 and sum(counts) == 20
    events.changed(node, 0, 2, 0, True)
    events.cleared()
    assert [each.level for each in events.take()] == [-1]
    events.cleared()
    assert events.take() == []


# -- meters -----------------------------------------------------------------------------------------------------------


def test_a_rank_tells_at_most_every_tenth_of_a_second():
    now = [100.0]
    counters = Counters(["dram"])
    mover = SimpleNamespace(stats=lambda: counters.snapshot([0], [0]))
    meter = RankMeter(3, lambda: now[0])
    told = meter.take(mover, draining=False)
    assert told["gauges"]["tier_queued_jobs|dram"] == {"3": 0} and told["counters"]["tier_read_bytes|dram"] == 0
    counters.add_level(0, bytes_read=5)
    assert meter.take(mover, False) is None  # nobody said that anything changed
    meter.changed = True
    assert meter.take(mover, False) is None
    now[0] += 0.11
    assert meter.take(mover, False)["counters"] == {"tier_read_bytes|dram": 5}
    counters.add_level(0, bytes_read=7)
    counters.add(unexpected_errors=1)
    meter.changed = True
    told = meter.take(mover, True)  # the engine may stop
    assert told["counters"] == {"tier_read_bytes|dram": 7, "unexpected_errors": 1}
    meter.changed = True
    assert meter.take(mover, True) is None  # nothing did
    counters.add_level(0, io_errors=1)
    now[0] += 1.01
    assert meter.take(mover, False)["counters"] == {"tier_io_errors|dram": 1}


def state_of(prompt_tokens, local_blocks, offered, outputs=0, arrived=0.0):
    asked = SimpleNamespace(
        request_id=f"{prompt_tokens}-{local_blocks}-{offered}",
        num_prompt_tokens=prompt_tokens,
        num_output_tokens=outputs,
        arrival_time=arrived,
    )
    return RequestState(asked, local_blocks=local_blocks, answer=(1, local_blocks * 16, offered))


@pytest.mark.parametrize(
    ("state", "result"),
    [
        (state_of(100, 0, 0), "miss"),
        (state_of(100, 0, 96), "hit"),
        (state_of(100, 2, 64), "hit"),
        (state_of(100, 2, 48), "partial"),
        (state_of(100, 6, 0), "none"),
        (state_of(15, 0, 0), "none"),
    ],
)
def test_result(state, result):
    assert result_of(state, 16) == result


def test_time_to_the_first_token():
    now, wall = [0.0], [1000.0]
    meter = SchedulerMeter(16, lambda: now[0], lambda: wall[0])
    counters = SchedulerCounters()
    meter.take(0, counters, None, "", False)
    states = [state_of(100, 0, 96, arrived=999.0), state_of(100, 0, 0, arrived=998.0), state_of(100, 0, 48)]
    for each in states:
        meter.begins(each)
    now[0] += 0.5
    assert meter.take(0, counters, None, "", False) is None
    states[0].request.num_output_tokens = 1
    told = meter.take(0, counters, None, "", False)
    assert told["samples"] == {"ttft_seconds|hit": [1.0]}
    wall[0] += 0.5
    states[1].request.num_output_tokens = 1
    meter.ends(states[1].request)  # with its only token
    meter.ends(states[2].request)  # aborted before it had one
    assert meter.take(0, counters, None, "", False) is None  # too early
    assert meter.take(0, counters, None, "", True)["samples"] == {"ttft_seconds|miss": [2.5]}
    now[0] += 5.0
    assert meter.take(0, counters, None, "", True) is None


def test_payloads_add_up_in_any_grouping():
    rng = random.Random(1)
    parts = [
        {
            "counters": {rng.choice(["loads", "tier_read_bytes|dram"]): rng.randrange(9)},
            "gauges": {"tier_queued_jobs|nvme": {rng.choice("01"): i}},
            "samples": {"ttft_seconds|hit": [i]},
        }
        for i in range(20)
    ]
    whole = {}
    for each in parts:
        add_up(whole, each)
    halves = [{}, {}]
    for i, each in enumerate(parts):
        add_up(halves[i >= 7], each)
    add_up(*halves)
    assert halves[0] == whole and parts[0]["samples"] == {"ttft_seconds|hit": [0]}
    line = summary(whole)
    assert line["tier_queued_jobs|nvme"] == sum(whole["gauges"]["tier_queued_jobs|nvme"].values())
    assert (line["ttft_seconds|hit count"], line["ttft_seconds|hit mean"]) == (20, 9.5)
    assert summary({}) == {}


# -- a step with nothing to do ----------------------------------------------------------------------------------------

_opened: list[str] = []
_listening = [False]
sys.addaudithook(lambda event, args: _opened.append(f"{event} {args}") if _listening[0] and event == "open" else None)


def test_a_step_with_nothing_to_do_opens_nothing_and_logs_nothing(caplog):
    rig = VllmRig(512, 8 * 16 + 8)
    try:
        output = rig.output(rig.decodes(8))
        with caplog.at_level(logging.DEBUG):
            caplog.clear()
            _listening[0] = True
            orders = [rig.step(output) for _ in range(20)]
            _listening[0] = False
        assert all(each.is_empty() and not each.echo for each in orders)
        assert not caplog.records and not _opened
        rig.scheduler.add(long := request("long", chained(40), 700))
        assert rig.scheduler.matched_tokens(long, 0) == 0
        rig.fill(chained(40))
        assert rig.scheduler.matched_tokens(long, 0) == 640
    finally:
        _listening[0] = False
        rig.close()


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_lists_every_metric():
    rows = re.findall(r"^\| `([^`{]+)(?:\{(\w+)\})?` \| (\w+) \|", DOC.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(PREFIX + each.name, each.label, each.kind) for each in METRICS]
    assert split_key("tier_breaker|nvme") == (next(each for each in METRICS if each.name == "tier_breaker"), "nvme")


def test_a_prompt_from_dram_is_counted_as_such(make_engine):
    engine = make_engine()
    engine.ask(prompt(1, 23))
    assert engine.forget_local()
    engine.ask(prompt(1, 23))
    time.sleep(0.03)
    engine.collect()
    assert set(engine.payload["samples"]) == {"ttft_seconds|miss", "ttft_seconds|hit"}
    assert engine.payload["counters"]["tier_hit_tokens|dram"] == 20
    assert engine.payload["gauges"]["cold_start|new"] == {"s": 1}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_remote_tier_is_counted(make_engine, ranks):
    """Written by one engine, asked for and fetched by another, whose events tell where it landed."""
    remote = Remote(MemoryKeyTier(100), quota=1.0)
    engines = [make_engine(ranks=ranks, remote=remote, tag=b"t", patience_s=2.0) for _ in range(2)]
    for engine in engines:
        engine.ask(prompt(1, 23))
        time.sleep(0.03)
        engine.collect()
    wrote, read = (engine.payload["counters"] for engine in engines)
    assert wrote["remote_written_blocks"] == 6 and read["remote_written_blocks"] <= 1
    assert (read["remote_waits"], read["remote_impatient"], read["remote_finds_failed"]) == (1, 0, 0)
    assert read["tier_hit_tokens|remote"] == read["loaded_tokens"] == 20
    assert read["remote_fetched_blocks"] == read["remote_found_blocks"] == 5 and read["remote_wrong_blocks"] == 0
    assert read["tier_read_bytes|remote"] == 5 * ranks * 64
    assert wrote["tier_written_bytes|remote"] == 6 * ranks * 64
    assert engines[1].payload["gauges"]["tier_breaker|remote"] == {"s": 0}
    assert engines[1].held == there(engines[1].scheduler.planner) and min(
        (level, len(engines[1].held)) for level, _ in engines[1].held
    ) == (0, 6)
