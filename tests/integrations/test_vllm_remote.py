"""A remote tier under an engine that checks every byte: two engines and one store that is slow, dead or lies."""

import random
import shutil
import time

import pytest
from fake_engine import FakeEngine, settings_of

from tiercache.config import Remote
from tiercache.integrations.vllm_messages import SYMBOL_NBYTES
from tiercache.integrations.vllm_scheduler import SchedulerSide
from tiercache.keys import chain_keys
from tiercache.layout import Namespace
from tiercache.testing import FaultyKeyTier, HangingKeyTier, MemoryKeyTier, SlowKeyTier

STRIDE = 4096
TAG = b"weights 1"
DRAM = [f"dram:{24 * STRIDE}B"]
OPTIONS = ("find_deadline_s", "read_deadline_s", "write_deadline_s", "write")
N = 23
LOADED = 20


def prompt(seed, n=N):
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(n)]


def rank_keys(engine, request, rank):
    """Where blocks of this request are in the store."""
    symbols = b"".join(request.block_hashes)
    return chain_keys(symbols, SYMBOL_NBYTES, Namespace(f"m{rank}").digest, engine.scheduler.planner.epoch)


def ask_and_put(engine, tokens):
    """The answer of an engine, whose blocks are in the store afterwards."""
    before = engine.scheduler.planner.finds.counters.written
    request = engine.ask(tokens, 1)
    assert engine.scheduler.planner.finds.counters.written == before + LOADED // 4
    return request


@pytest.fixture
def make_engine():
    made = []

    def make(store, tiers=DRAM, ranks=1, *, overlaps=False, tag=TAG, patience_s=2.0, loads=True, stores=True, **more):
        own = {name: more.pop(name) for name in OPTIONS if name in more}
        remote = Remote(store, **{"missing_s": 0.05, "quota": 1.0, **own})
        settings = settings_of(
            tiers, ranks, remote, tag=tag, patience_s=patience_s, overlaps=overlaps, loads=loads, stores=stores
        )
        made.append(FakeEngine(settings, **more))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def found(engine):
    return engine.scheduler.counters.loaded


@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_one_engine_put_is_a_hit_of_another(make_engine, monkeypatch, ranks, overlaps):
    store = MemoryKeyTier(1000)
    first = ask_and_put(make_engine(store, ranks=ranks, overlaps=overlaps), prompt(1))
    other = make_engine(store, ranks=ranks, overlaps=overlaps)
    allocated, sources = other.scheduler.allocated, []

    def told(request, block_ids, tokens):
        allocated(request, block_ids, tokens)
        sources.append(other.scheduler.hit_sources(request, tokens))

    monkeypatch.setattr(other.scheduler, "allocated", told)
    assert other.ask(prompt(1), 1).tokens == first.tokens and found(other) == LOADED
    assert sources[0] == {"remote": LOADED} and other.asked_again > 0
    assert (other.scheduler.counters.waits, other.scheduler.counters.impatient) == (1, 0)
    # it landed in DRAM: no more questions, no more reads
    calls = dict(store.calls)
    assert other.forget_local()
    assert other.ask(prompt(1), 1).tokens == first.tokens and found(other) == 2 * LOADED
    assert dict(store.calls) == calls
    assert other.scheduler.planner.check() == []


def test_another_epoch_another_world(make_engine):
    store = MemoryKeyTier(1000)
    ask_and_put(make_engine(store), prompt(1))
    other = make_engine(store, tag=b"weights 2")
    other.version = 1
    other.ask(prompt(1), 1)
    assert found(other) == 0 and store.calls["get"] == 0


def test_only_what_all_ranks_have_is_a_hit(make_engine):
    store = MemoryKeyTier(1000)
    engine = make_engine(store, ranks=2)
    request = ask_and_put(engine, prompt(1))
    store.remove(rank_keys(engine, request, 1)[3:], 1.0)
    other = make_engine(store, ranks=2)
    assert other.ask(prompt(1), 1).tokens == request.tokens
    assert found(other) == 12


def test_a_value_of_another_rank_is_a_miss(make_engine):
    """Ranks give a block one ident: only the frame tells theirs apart."""
    store = MemoryKeyTier(1000)
    engine = make_engine(store, ranks=2)
    request = ask_and_put(engine, prompt(1))
    mine, theirs = (rank_keys(engine, request, rank) for rank in (0, 1))
    for key, other in zip(mine[:5], theirs[:5], strict=True):
        store.replace(key, store.value(other))
    other = make_engine(store, ranks=2)
    assert other.ask(prompt(1), 1).tokens == request.tokens
    assert found(other) == 0 and other.scheduler.planner.finds.counters.wrong > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_lies(make_engine, ranks):
    """Found, but gone; found, but other bytes: on one rank alone."""
    store = FaultyKeyTier(MemoryKeyTier(1000))
    engine = make_engine(store, ranks=ranks)
    requests = [ask_and_put(engine, prompt(seed)) for seed in range(4)]
    for seed, request in enumerate(requests):
        keys = rank_keys(engine, request, ranks - 1)
        if seed % 2:
            store.gone.add(keys[3])
        else:
            store.flips[keys[2]] = (seed, 0x40)
    other = make_engine(store, ranks=ranks)
    for seed, request in enumerate(requests):
        assert other.ask(prompt(seed), 1).tokens == request.tokens
    counters = other.scheduler.counters
    assert counters.loaded == 8 + 12 + 8 + 12 and counters.failed == 4 * LOADED - counters.loaded
    assert other.scheduler.planner.check() == []


def test_a_slow_store_is_waited_for(make_engine):
    inner = MemoryKeyTier(1000)
    first = ask_and_put(make_engine(inner), prompt(1))
    other = make_engine(SlowKeyTier(inner, 0.1))
    began = time.monotonic()
    assert other.ask(prompt(1), 1).tokens == first.tokens and found(other) == LOADED
    assert time.monotonic() - began > 0.2


def test_no_longer_than_the_patience(make_engine):
    """The answer that came too late serves the next request."""
    inner = MemoryKeyTier(1000)
    first = ask_and_put(make_engine(inner), prompt(1))
    other = make_engine(SlowKeyTier(inner, 0.3), patience_s=0.1)
    request, began = other.add(prompt(1), 1), time.monotonic()
    while request.status != "FINISHED":
        other.step()
    assert 0.1 <= time.monotonic() - began < 0.3
    assert request.tokens == first.tokens and found(other) == 0
    assert (other.scheduler.counters.waits, other.scheduler.counters.impatient) == (1, 1)
    while not other.scheduler.planner.finds.counters.blocks_found:
        other.step()
    assert other.forget_local()
    other.scheduler.planner.invalidate(b"", 0, time.time())
    assert other.ask(prompt(1), 1).tokens == first.tokens and found(other) == LOADED


def test_without_patience_nobody_waits(make_engine):
    inner = MemoryKeyTier(1000)
    first = ask_and_put(make_engine(inner), prompt(1))
    other = make_engine(inner, patience_s=0.0)
    assert other.ask(prompt(1), 1).tokens == first.tokens and found(other) == 0
    assert other.asked_again == other.scheduler.counters.waits == 0 and inner.calls["find"] > 0


@pytest.mark.parametrize("op", ["find", "get"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_store_that_hangs_costs_its_deadline_and_then_nothing(make_engine, ranks, op):
    store = HangingKeyTier(MemoryKeyTier(1000))
    engine = make_engine(store, ranks=ranks)
    requests = [ask_and_put(engine, prompt(seed)) for seed in range(8)]
    other = make_engine(store, ranks=ranks, find_deadline_s=0.15, read_deadline_s=0.15, write="never")
    store.hang(op)
    took = []
    for seed, request in enumerate(requests):
        began = time.monotonic()
        assert other.ask(prompt(seed), 1).tokens == request.tokens
        took.append(time.monotonic() - began)
    assert found(other) == 0
    assert max(took) < 0.15 + 0.85, "a busy machine, but no second deadline after another"
    assert other.scheduler.planner.state.breakers[-1].trips >= 1
    if op == "find":
        assert sum(each >= 0.14 for each in took) <= 3
    store.wake()
    deadline = time.monotonic() + 10
    while not found(other):
        assert time.monotonic() < deadline
        other.forget_local()
        other.scheduler.planner.invalidate(b"", 0, time.time())
        assert other.ask(prompt(7), 1).tokens == requests[7].tokens
        time.sleep(0.05)
    assert other.scheduler.planner.check() == []


def test_an_engine_that_only_waits_for_an_answer_makes_few_steps(make_engine):
    inner = MemoryKeyTier(1000)
    ask_and_put(make_engine(inner), prompt(1))
    other = make_engine(SlowKeyTier(inner, 0.3))
    request, steps = other.add(prompt(1), 1), 0
    began = time.monotonic()
    while request.status == "WAITING":
        other.step()
        steps += 1
    assert steps < 1000 * (time.monotonic() - began) + 10
    other.drain()


def test_an_engine_without_requests_goes_on_until_all_is_written(make_engine):
    store = MemoryKeyTier(1000)
    engine = make_engine(SlowKeyTier(store, 0.05), num_blocks=64)
    for seed in range(4):
        engine.add(prompt(seed), 1)
    engine.drain()
    assert len(store) == 4 * LOADED // 4
    assert not engine.scheduler.has_work(), "and then it rests"


def test_a_request_that_is_aborted_while_it_waits(make_engine):
    store = HangingKeyTier(MemoryKeyTier(1000))
    other = make_engine(store, find_deadline_s=0.2)
    store.hang("find")
    request = other.add(prompt(1), 1)
    for _ in range(5):
        other.step()
    assert request.status == "WAITING" and other.asked_again == 5
    other.abort(request)
    other.drain()
    store.wake()
    assert other.ask(prompt(2), 1).tokens[:N] == prompt(2)
    assert other.scheduler.planner.check() == []


def test_the_questions_of_all_that_wait_in_line_go_out_at_once(make_engine):
    inner = MemoryKeyTier(1000)
    engine = make_engine(inner)
    requests = [ask_and_put(engine, prompt(seed)) for seed in range(6)]
    began = []

    def slow(op, n):
        began.extend([time.monotonic()] * (op == "find"))
        return 0.5 if op == "find" else 0.0

    other = make_engine(SlowKeyTier(inner, slow), num_blocks=64, patience_s=10.0)
    for seed in range(6):
        other.add(prompt(seed), 1)
    other.drain()
    assert found(other) == 6 * LOADED
    assert sorted(other.answers.values()) == sorted(each.tokens for each in requests)
    assert len(began) == 6 and began[3] - began[0] < 0.5, "as many as threads may ask"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("overlaps", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_walk_of_two_engines_over_a_store_that_does_what_it_likes(make_engine, ranks, overlaps, seed):
    """It is late, fails, forgets, lies, and hangs now and then; blocks are few everywhere."""
    rng = random.Random(seed)
    inner = MemoryKeyTier(60 * ranks)
    faulty = FaultyKeyTier(inner)
    slow = SlowKeyTier(faulty, lambda op, n: rng.random() * rng.choice([0.0, 0.003, 0.02]))
    store = HangingKeyTier(slow)
    own = {"find_deadline_s": 0.05, "read_deadline_s": 0.05, "patience_s": 0.03, "write_deadline_s": 0.05}
    engines = [
        make_engine(
            store, [f"dram:{16 * STRIDE}B"], ranks, overlaps=overlaps, num_blocks=20, seed=seed, slow_s=0.002, **own
        )
        for _ in range(2)
    ]
    prompts = [prompt(i, rng.randrange(5, 40)) for i in range(6)]
    prompts += [prompts[0][:17] + prompt(99, 12), prompts[1][:8] + prompt(98, 20)]

    def lie():
        held = inner.held()
        if held:
            faulty.flips[rng.choice(held)] = (rng.randrange(90), 1 << rng.randrange(8))
            faulty.gone.add(rng.choice(held))

    faults = [
        lie,
        lambda: inner.remove(inner.held()[::3], 1.0),
        lambda: store.hang(rng.choice(["find", "get", "put"])),
        store.wake,
        store.wake,
        lambda: faulty.raises.update({rng.choice(["find", "get", "put"]): OSError("planned")}),
        faulty.heal,
        faulty.heal,
    ]
    for _ in range(300):
        engine, what = rng.choice(engines), rng.random()
        if what < 0.25 and len(engine.requests) < 5:
            engine.add(rng.choice(prompts)[: rng.choice([None, None, 9, 16])], rng.randrange(1, 9))
        elif what < 0.28 and engine.requests:
            engine.abort(rng.choice(list(engine.requests.values())))
        elif what < 0.33:
            engine.forget_local()
        elif what < 0.335:
            engine.scheduler.planner.invalidate(b"", 0, time.time())
            engine.scheduler.version += 1
        elif what < 0.38:
            rng.choice(faults)()
        engine.step()
    store.wake()
    faulty.heal()
    until, fetched = time.monotonic() + 30, [engine.scheduler.planner.finds.counters.fetched for engine in engines]
    while any(engine.scheduler.planner.finds.counters.fetched <= fetched[i] for i, engine in enumerate(engines)):
        assert time.monotonic() < until, "well again, and not shared"
        tokens = prompt(until - time.monotonic())
        for engine in (*engines, *engines):
            engine.forget_local()
            engine.ask(tokens, 1)
            time.sleep(0.05)
        engines.reverse()
        fetched.reverse()
    for engine in engines:
        engine.drain()
        assert engine.scheduler.planner.check() == []


def test_roles(make_engine):
    store = MemoryKeyTier(1000)
    first = ask_and_put(make_engine(store), prompt(1))
    consumer = make_engine(store, stores=False)
    assert consumer.ask(prompt(1), 1).tokens == first.tokens and found(consumer) == LOADED
    calls = store.calls["find"]
    producer = make_engine(store, loads=False)
    assert producer.ask(prompt(1), 1).tokens == first.tokens and found(producer) == 0
    assert store.calls["find"] == calls


def disk(tmp_path):
    return [*DRAM, {"kind": "nvme", "path": str(tmp_path / "kv"), "size": 64 * STRIDE, "write_after_s": 0.01}]


def test_a_restart_keeps_disk_and_tag(make_engine, tmp_path):
    store = MemoryKeyTier(1000)
    engine = make_engine(store, disk(tmp_path))
    first = ask_and_put(engine, prompt(1))
    engine.close()
    calls = store.calls["get"]
    again = make_engine(store, disk(tmp_path))
    assert again.scheduler.planner.epoch == TAG
    assert again.ask(prompt(1), 1).tokens == first.tokens and found(again) == LOADED
    assert store.calls["get"] == calls, "of the disk"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reset_leaves_the_tag_also_after_a_restart(make_engine, tmp_path, caplog, ranks):
    """What others put under it is of the weights before."""
    store = MemoryKeyTier(1000)
    engine = make_engine(store, disk(tmp_path), ranks)
    ask_and_put(engine, prompt(1))
    ask_and_put(make_engine(store, ranks=ranks), prompt(2))
    engine.new_weights()
    engine.ask(prompt(1), 1)
    assert found(engine) == 0 and "finds nothing of others" in caplog.text
    mine = ask_and_put(engine, prompt(3))
    engine.close()
    again = make_engine(store, disk(tmp_path), ranks)
    again.version = 1
    assert "left by a reset" in caplog.text and again.scheduler.planner.epoch != TAG
    again.ask(prompt(2), 1)
    assert found(again) == 0
    assert again.ask(prompt(3), 1).tokens == mine.tokens and found(again) == LOADED, "its own, from disk"
    again.new_weights()
    again.close()
    third = make_engine(store, disk(tmp_path), ranks)
    assert third.scheduler.planner.epoch != TAG
    third.close()
    fourth = make_engine(store, disk(tmp_path), ranks, tag=b"weights 3")
    assert fourth.scheduler.planner.epoch == b"weights 3"
    fourth.close()
    fifth = make_engine(store, disk(tmp_path), ranks, tag=b"weights 3")
    assert fifth.scheduler.planner.epoch == b"weights 3", "no reset since"


def of_tag(make_engine, store, tmp_path, tag=TAG, *, seed=2):
    """The epoch of one more start over this disk, and what it finds of what others put under the first tag."""
    engine = make_engine(store, disk(tmp_path), tag=tag)
    engine.version = 1
    engine.ask(prompt(seed), 1)
    epoch = engine.scheduler.planner.epoch
    loaded = found(engine)
    engine.close()
    return epoch, loaded


@pytest.mark.parametrize("follows", ["a rank's files are gone", "another tag"])
def test_a_tag_that_was_left_is_left_whatever_follows(make_engine, tmp_path, follows):
    store = MemoryKeyTier(1000)
    for seed in (2, 3):
        ask_and_put(make_engine(store), prompt(seed))
    engine = make_engine(store, disk(tmp_path))
    engine.ask(prompt(1), 1)
    engine.new_weights()
    engine.close()
    if follows == "another tag":
        assert of_tag(make_engine, store, tmp_path, b"weights 2", seed=4)[0] == b"weights 2"
    else:
        shutil.rmtree(tmp_path / "kv/dp0/rank0")
    for seed in (2, 3):  # the first start begins a new epoch
        epoch, loaded = of_tag(make_engine, store, tmp_path, seed=seed)
        assert epoch != TAG and not loaded


def test_a_second_tag_is_left_as_the_first_was(make_engine, tmp_path):
    store = MemoryKeyTier(1000)
    for tag in (b"weights 2", TAG):
        engine = make_engine(store, disk(tmp_path), tag=tag)
        engine.ask(prompt(1), 1)
        engine.new_weights()
        engine.new_weights()
        engine.close()
    for tag in (TAG, b"weights 2"):
        assert of_tag(make_engine, store, tmp_path, tag)[0] not in (TAG, b"weights 2")
    assert len((tmp_path / "kv/dp0/epoch").read_text().split()) < 8, "no nonce of every reset"


def test_a_tag_is_not_used_where_the_epoch_file_cannot_be_read(make_engine, tmp_path, caplog):
    """It may have been left."""
    store = MemoryKeyTier(1000)
    for seed in (2, 3):
        ask_and_put(make_engine(store), prompt(seed))
    make_engine(store, disk(tmp_path)).close()
    (tmp_path / "kv/dp0/epoch").write_text("garbage")
    for seed in (2, 3):
        epoch, loaded = of_tag(make_engine, store, tmp_path, seed=seed)
        assert epoch != TAG and not loaded
    assert "cannot be read" in caplog.text


def test_a_reset_before_the_ranks_introduced_themselves(make_engine):
    store = MemoryKeyTier(1000)
    engine = make_engine(store)
    for was_reset in (False, True):
        scheduler = SchedulerSide(engine.scheduler.engine, bytes(16))
        if was_reset:
            scheduler.reset(engine_cache_is_empty=True)
        for worker in engine.workers:
            scheduler.take_hello(worker.hello())
        assert scheduler.planner is not None and (scheduler.planner.epoch == TAG) is not was_reset


def test_a_reset_while_a_load_is_under_way(make_engine):
    """What comes of the weights before is nobody's."""
    inner = MemoryKeyTier(1000)
    ask_and_put(make_engine(inner), prompt(1))
    other = make_engine(SlowKeyTier(inner, lambda op, n: 0.2 if op == "get" else 0.0))
    request = other.add(prompt(1), 1)
    while request.status != "LOADING":
        other.step()
    other.new_weights()
    other.drain()
    assert found(other) == 0 and other.scheduler.counters.failed == LOADED
