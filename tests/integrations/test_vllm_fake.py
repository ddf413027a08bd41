"""The connector's two halves under an engine that checks every byte it reads."""

import random
import shutil
import time

import pytest
from fake_engine import FakeEngine, settings_of

from tiercache.assembly import Seams
from tiercache.testing import DelayingTier, FaultyTier

STRIDE = 4096


def tiers(tmp_path, dram=24, nvme=64, **more):
    table = {"kind": "nvme", "path": str(tmp_path / "kv"), "size": nvme * STRIDE, "write_after_s": 0.01, **more}
    return [f"dram:{dram * STRIDE}B", table]


def prompt(seed, n):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


@pytest.fixture
def make_engine(tmp_path):
    made = []

    def make(dram=24, nvme=64, ranks=1, **more):
        own = {name: more.pop(name) for name in ("seams", "overlaps", "loads", "stores") if name in more}
        made.append(FakeEngine(settings_of(tiers(tmp_path, dram, nvme), ranks, **own), **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_prompt_comes_back_from_dram_and_after_a_restart_from_nvme(make_engine, ranks):
    engine = make_engine(ranks=ranks)
    first = engine.ask(prompt(1, 23))
    assert engine.scheduler.counters.stored == 24
    assert engine.forget_local()
    again = engine.ask(prompt(1, 23))
    assert again.tokens == first.tokens and engine.scheduler.counters.loaded == 20
    engine.close()
    other = make_engine(ranks=ranks)
    third = other.ask(prompt(1, 23))
    assert third.tokens == first.tokens and other.scheduler.counters.loaded == 20
    assert other.scheduler.planner.check() == []


def test_ranks_that_could_not_introduce_themselves_at_the_start_are_asked_with_the_first_step(make_engine):
    engine = make_engine(ranks=2, handshake=False)
    assert engine.scheduler.planner is None
    first = engine.ask(prompt(1, 23))
    assert engine.scheduler.planner is not None
    engine.ask(prompt(1, 23))
    assert engine.forget_local()
    assert engine.ask(prompt(1, 23)).tokens == first.tokens and engine.scheduler.counters.loaded == 20


def test_what_one_rank_lost_is_forgotten_by_the_others(make_engine, tmp_path):
    engine = make_engine(ranks=2)
    first = engine.ask(prompt(1, 23))
    engine.close()
    shutil.rmtree(tmp_path / "kv" / "dp0" / "rank1")
    other = make_engine(ranks=2)
    assert other.scheduler.planner.totals().recovered == 0
    assert other.ask(prompt(1, 23)).tokens == first.tokens
    other.close()
    third = make_engine(ranks=2)
    assert third.ask(prompt(1, 23)).tokens == first.tokens and third.scheduler.counters.loaded == 20


def test_after_new_weights_nothing_is_found_also_after_a_restart(make_engine):
    engine = make_engine()
    engine.ask(prompt(1, 23))
    engine.new_weights()
    engine.ask(prompt(1, 23))
    assert engine.scheduler.counters.loaded == 0
    engine.close()
    other = make_engine()
    other.version = 1
    other.ask(prompt(1, 23))
    assert other.scheduler.counters.loaded == 20


def test_a_reset_that_no_rank_heard_of_holds_over_a_restart(make_engine):
    engine = make_engine()
    engine.ask(prompt(1, 23))
    time.sleep(0.3)  # the writes, and their commit
    engine.new_weights()
    engine.kill()
    other = make_engine()
    assert other.scheduler.planner.totals().recovered == 0
    other.version = 1
    other.ask(prompt(1, 23))
    assert other.scheduler.counters.loaded == 0


def test_what_is_on_disk_survives_a_kill(make_engine):
    engine = make_engine()
    first = engine.ask(prompt(1, 23))
    time.sleep(0.3)
    engine.kill()
    other = make_engine()
    assert other.ask(prompt(1, 23)).tokens == first.tokens and other.scheduler.counters.loaded == 20


def wander(engine, seed, steps, faults=()):
    rng = random.Random(seed)
    prompts = [prompt(i, rng.randrange(5, 40)) for i in range(6)]
    prompts += [prompts[0][:17] + prompt(99, 12), prompts[1][:8] + prompt(98, 20)]
    for _ in range(steps):
        what = rng.random()
        if what < 0.25 and len(engine.requests) < 6:
            engine.add(rng.choice(prompts)[: rng.choice([None, None, 9, 16])], rng.randrange(1, 25))
        elif what < 0.29 and engine.requests:
            engine.abort(rng.choice(list(engine.requests.values())))
        elif what < 0.33:
            engine.forget_local()
        elif what < 0.335:
            engine.new_weights()
        elif what < 0.45 and faults:
            rng.choice(faults)()
        engine.step()
        assert not (what > 0.97 and (broken := engine.scheduler.planner.check())), broken
    engine.drain()
    assert engine.scheduler.planner.check() == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("counts", [True, False], ids=["counted", "uncounted"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_walk(make_engine, ranks, overlaps, counts, seed):
    engine = make_engine(ranks=ranks, overlaps=overlaps, counts_in_flight=counts, seed=seed, num_blocks=20)
    wander(engine, seed, 300)
    assert engine.scheduler.counters.loaded > 0 and engine.preemptions > 0


def delaying(most_s, seed=0):
    """Seams: each tier of each rank takes its own time."""
    made = []

    def wrap(tier):
        rng = random.Random(seed * 100 + len(made))
        made.append(DelayingTier(tier, lambda op, slots: rng.random() * most_s))
        return made[-1]

    return Seams(wrap_tier=wrap)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_walk_with_copies_that_outlast_their_step(make_engine, ranks, overlaps, seed):
    engine = make_engine(
        ranks=ranks, overlaps=overlaps, seed=seed, num_blocks=20, slow_s=0.004, seams=delaying(0.004, seed)
    )
    wander(engine, seed, 250)
    assert engine.scheduler.counters.loaded > 0 and engine.scheduler.counters.fenced > 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [1, 2])
def test_walk_with_a_disk_that_lies_and_fails_on_one_rank(make_engine, ranks, seed):
    disks = []

    def wrap(tier):
        if not tier.verifies:
            return tier
        disks.append(FaultyTier(tier))
        return disks[-1]

    engine = make_engine(dram=8, ranks=ranks, seed=seed, seams=Seams(wrap_tier=wrap))
    rng, disk = random.Random(seed), disks[-1]
    faults = [
        lambda: disk.fail_at("read", 1),
        lambda: disk.fail_at("read", 2),
        lambda: disk.fail_at("write", 1),
        lambda: disk.flip_bit(rng.randrange(64), rng.randrange(64)),
        lambda: disk.heal(),
    ]
    wander(engine, seed, 500, faults)
    counters = engine.scheduler.counters
    assert counters.failed > 0 and counters.loaded > 0
