"""Ends: close, use after close, fork, ownership, worker threads, garbage collection, cancellation."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import CancelledError
from contextlib import contextmanager

import numpy as np
import pytest
from cache_kit import (
    LAYOUT,
    SLOT,
    WAIT_S,
    HeldDelivery,
    bits,
    blocks_of,
    crash_image,
    eventually,
    is_clean,
    open_cache,
    prompt,
    read,
    store,
)

from tiercache import (
    DRAM,
    CacheClosedError,
    ConfigError,
    DirectoryInUseError,
    Loaded,
    TieredKVCache,
    WorkerThreadError,
)
from tiercache.directory import StoreDirectory
from tiercache.mover.threads import start_thread

TOKENS = prompt(1, 2, 3)

# -- close ------------------------------------------------------------------------------------------------------------


def test_close_writes_what_lives_only_in_memory(tmp_path):
    cache = open_cache(tmp_path)
    ticket = cache.store(TOKENS, blocks_of(TOKENS))  # still under way
    assert cache.close()
    assert (ticket.copied, ticket.stored) == (True, 3)
    assert cache.close()
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == 3
        assert cache.stats().directory["cold_reason"] == ""


def test_close_says_whether_all_of_it_is_there(tmp_path):
    with open_cache(None) as cache:
        store(cache, TOKENS)
        assert cache.close(), "nothing persists, so nothing is missing"
    cache = open_cache(tmp_path, dram_slots=8, nvme_slots=4)
    store(cache, prompt(*range(10, 18)))
    assert cache.close() is False
    with open_cache(tmp_path, dram_slots=8, nvme_slots=4) as cache:
        assert read(cache, prompt(*range(10, 18))) == 4


def test_with_stores_off_close_writes_nothing(tmp_path):
    cache = open_cache(tmp_path)
    store(cache, TOKENS)
    cache.switch = "off"
    assert cache.close()
    with open_cache(tmp_path) as cache:
        assert cache.lookup(TOKENS).blocks == 0


def test_after_close_every_verb_raises(tmp_path):
    cache = open_cache(tmp_path)
    store(cache, TOKENS)
    match = cache.lookup(TOKENS)
    pin = cache.pin(match)
    cache.close()
    calls = {
        "lookup": lambda: cache.lookup(TOKENS),
        "lookup(deadline)": lambda: cache.lookup(TOKENS, deadline_s=1),
        "load": lambda: cache.load(match),
        "prefetch": lambda: cache.prefetch(match),
        "store": lambda: cache.store(TOKENS, blocks_of(TOKENS)),
        "touch": lambda: cache.touch(match),
        "release": lambda: cache.release(TOKENS),
        "pin": lambda: cache.pin(match),
        "unpin": lambda: cache.unpin(pin),
        "invalidate": lambda: cache.invalidate(TOKENS),
        "bump_epoch": lambda: cache.bump_epoch(),
        "stats": lambda: cache.stats(),
        "check": lambda: cache.check(),
        "explain": lambda: cache.explain(TOKENS),
        "flush": lambda: cache.flush(),
    }
    for name, call in calls.items():
        with pytest.raises(CacheClosedError, match="closed"):
            call()
            pytest.fail(name)
    assert issubclass(CacheClosedError, RuntimeError)


def test_what_is_loaded_stays_readable_after_close(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
        loaded = cache.load(cache.lookup(TOKENS)).result(WAIT_S)
        other = cache.load(cache.lookup(TOKENS[:4])).result(WAIT_S)
    gc.collect()
    assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
    assert [bits(part) for part in loaded.parts] == [bits(blocks_of(TOKENS))]
    with open_cache(tmp_path) as again:
        store(again, prompt(7, 8, 9))
        assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        loaded.release()
        other.release()
        assert read(again, TOKENS) == 3


def test_futures_and_tickets_open_at_close_end(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
    delivery = HeldDelivery(holding=False)
    cache = open_cache(tmp_path, delivery=delivery)
    delivery.holding = True
    future = cache.load(cache.lookup(TOKENS))
    ticket = cache.store(prompt(8), blocks_of(prompt(8)))
    assert not future.done()
    assert cache.close(timeout=1.0) is False
    assert future.result(WAIT_S).block_count == 0
    assert (ticket.copied, ticket.stored) == (True, 0)
    delivery.let_go()
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == 3


def test_close_while_other_threads_call(tmp_path):
    for i in range(5):
        cache = open_cache(tmp_path / str(i))
        stop, unexpected, tickets = threading.Event(), [], []

        def use(cache=cache, stop=stop, unexpected=unexpected, tickets=tickets):
            n = 0
            while not stop.is_set():
                n += 1
                try:
                    tickets.append(cache.store(prompt(n % 9, n), blocks_of(prompt(n % 9, n))))
                    cache.load(cache.lookup(prompt(n % 9, n))).result(WAIT_S).release()
                except CacheClosedError:
                    return
                except BaseException as error:
                    unexpected.append(error)
                    raise

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        time.sleep(0.03)
        cache.close(WAIT_S)
        assert cache.close()
        stop.set()
        for thread in threads:
            thread.join(WAIT_S)
            assert not thread.is_alive(), "a call hangs after close"
        assert unexpected == []
        assert all(ticket.wait(WAIT_S) for ticket in tickets)


def test_a_call_that_began_before_close_and_goes_on_after_it(tmp_path):
    cache = open_cache(tmp_path)
    store(cache, TOKENS)
    link, check_open = cache._link, cache._link.check_open
    waiting, closed, outcomes = threading.Event(), threading.Event(), []

    def check_and_wait():
        check_open()
        if threading.current_thread() is caller and not closed.is_set():
            waiting.set()
            assert closed.wait(WAIT_S)

    def call():
        try:
            with link.planning():
                outcomes.append("planned on a closed cache")
        except CacheClosedError:
            outcomes.append("closed")

    caller = threading.Thread(target=call)
    link.check_open = check_and_wait
    caller.start()
    assert waiting.wait(WAIT_S)
    assert cache.close()
    closed.set()
    caller.join(WAIT_S)
    assert outcomes == ["closed"]


def test_two_threads_close(tmp_path):
    cache = open_cache(tmp_path)
    store(cache, TOKENS)
    outcomes = []

    def close():
        try:
            outcomes.append(cache.close())
        except CacheClosedError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert outcomes == [True] * 4


def test_threads_and_memory_are_given_back():
    before = threading.active_count()
    for _ in range(3):
        with open_cache(None) as cache:
            store(cache, TOKENS)
            slab = weakref.ref(cache.stack.tiers[0])
    del cache
    assert eventually(lambda: threading.active_count() <= before)
    gc.collect()
    assert slab() is None


def test_a_program_that_forgets_to_close_ends_well(tmp_path, python):
    code = f"""
import numpy as np
from tiercache import DRAM, NVMe, TieredKVCache
cache = TieredKVCache([DRAM("1MiB"), NVMe({str(tmp_path / "kv")!r}, "1MiB", write_after_s=0.0)], namespace="m")
cache.store(list(range(32)), np.ones((2, 8), dtype=np.float32)).wait(10)
assert cache.flush(10)
print(cache.lookup(list(range(32))).blocks)
"""
    assert python(code) == "2\n"
    assert python(code) == "2\n"


# -- own threads ------------------------------------------------------------------------------------------------------


def test_blocking_calls_on_a_worker_thread_raise(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
    delivery = HeldDelivery(holding=False)
    with open_cache(tmp_path, delivery=delivery) as cache:
        delivery.holding = True
        future = cache.load(cache.lookup(TOKENS))
        ticket = cache.store(prompt(30), blocks_of(prompt(30)))
        calls = {
            "flush": lambda: cache.flush(1),
            "close": lambda: cache.close(),
            "invalidate": lambda: cache.invalidate(TOKENS),
            "bump_epoch": lambda: cache.bump_epoch(),
            "lookup(deadline_s=)": lambda: cache.lookup(prompt(30), deadline_s=1),
            "result()": lambda: future.result(1),
            "exception()": lambda: future.exception(1),
            "Ticket.wait()": lambda: ticket.wait(1),
        }
        outcomes = {}

        def try_all():
            for name, call in calls.items():
                try:
                    outcomes[name] = call()
                except (WorkerThreadError, TimeoutError) as error:
                    outcomes[name] = str(error)

        start_thread("test", try_all).join(WAIT_S)
        delivery.let_go()
        for name in calls:
            assert str(outcomes[name]).startswith(f"{name} would wait for the thread that called it"), outcomes[name]
        assert cache.lookup(TOKENS).blocks == 3
        loaded = future.result(WAIT_S)
        assert ticket.wait(WAIT_S)
        start_thread("test", try_all).join(WAIT_S)
        assert (outcomes["result()"].block_count, outcomes["exception()"], outcomes["Ticket.wait()"]) == (3, None, True)
        loaded.release()


def test_a_done_callback_runs_on_a_worker_and_may_look_up_store_and_load(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
    with open_cache(tmp_path) as cache:
        outcomes = []
        finished = threading.Event()

        def callback(future):
            loaded = future.result()
            with loaded:
                outcomes.append(bits(loaded.blocks) == bits(blocks_of(TOKENS)))
            outcomes.append(cache.lookup(TOKENS).blocks)
            outcomes.append(cache.store(prompt(9), blocks_of(prompt(9))).accepted)
            try:
                cache.flush(1)
            except WorkerThreadError:
                outcomes.append("worker")
            cache.load(cache.lookup(TOKENS)).add_done_callback(lambda each: (each.result().release(), finished.set()))

        match = cache.lookup(TOKENS)
        assert match.by_tier["nvme"] == 3
        future = cache.load(match)
        future.add_done_callback(callback)
        assert finished.wait(WAIT_S)
        assert outcomes[:3] == [True, 3, 1]
        assert cache.flush(WAIT_S)
        assert is_clean(cache)
        assert cache.stats().mover["delivery_errors"] == 0


def test_futures_are_completed_with_no_lock_held(tmp_path):
    """A callback that calls the cache would wait for itself otherwise."""
    delivery = HeldDelivery(holding=False)
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
    with open_cache(tmp_path, delivery=delivery) as cache:
        delivery.holding, held = True, []
        future = cache.load(cache.lookup(TOKENS))
        future.add_done_callback(lambda each: held.append(cache._link.lock.locked()))
        delivery.deliver()
        future.result().release()
        delivery.let_go()
        assert held == [False]


# -- garbage collection, cancellation ---------------------------------------------------------------------------------


def test_a_loaded_that_is_collected_warns_and_gives_its_pins_back():
    with open_cache(None) as cache:
        store(cache, TOKENS)
        loaded = cache.load(cache.lookup(TOKENS)).result()
        assert cache.stats().tiers[0].pinned == 3
        with pytest.warns(ResourceWarning, match=r"Loaded\(3 blocks.* was never released"):
            del loaded
            gc.collect()
        assert cache.stack.planner.state.credits[0].held == 3, "whoever asks next lets go of it"
        cache.lookup(TOKENS)
        assert cache.stack.planner.state.credits[0].held == 0
        assert is_clean(cache)


def test_the_finaliser_of_a_loaded_takes_no_lock(monkeypatch):
    """It may run anywhere, also in a thread that holds the planner's lock."""
    taken = []

    class Watched:
        def __enter__(self):
            taken.append("lock")

        def __exit__(self, *exc):
            pass

    with open_cache(None) as cache:
        store(cache, TOKENS)
        loaded = cache.load(cache.lookup(TOKENS)).result()
        monkeypatch.setattr(cache._link, "lock", Watched())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            del loaded
            gc.collect()
        monkeypatch.undo()
        assert taken == []
        cache.lookup(TOKENS)
        assert is_clean(cache)


def test_a_future_that_is_collected_with_its_result_gives_the_pins_back():
    with open_cache(None) as cache:
        store(cache, TOKENS)
        with pytest.warns(ResourceWarning, match="never released"):
            cache.load(cache.lookup(TOKENS))
            gc.collect()
        assert cache.stats().tiers[0].pinned in (0, 3)
        cache.touch(cache.lookup(TOKENS))
        assert is_clean(cache)


def test_the_callers_rows_are_let_go_once_they_are_copied():
    with open_cache(None) as cache:
        blocks = np.zeros((3, *LAYOUT.block_shape), dtype=LAYOUT.dtype)
        kept = weakref.ref(blocks)
        assert cache.store(TOKENS, blocks).wait(WAIT_S)
        del blocks
        assert eventually(lambda: gc.collect() >= 0 and kept() is None, 2.0)


def test_a_released_loaded_warns_of_nothing():
    with open_cache(None) as cache:
        store(cache, TOKENS)
        for release in (Loaded.release, lambda each: each.__exit__(None, None, None)):
            loaded = cache.load(cache.lookup(TOKENS)).result()
            release(loaded)
            del loaded
        gc.collect()
        assert is_clean(cache)


def test_a_cancelled_load_holds_nothing(tmp_path):
    delivery = HeldDelivery()
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
    with open_cache(tmp_path, delivery=delivery) as cache:
        delivery.holding = True
        future = cache.load(cache.lookup(TOKENS))
        seen = []
        future.add_done_callback(lambda each: seen.append(each.cancelled()))
        assert future.cancel()
        assert seen == [True]
        with pytest.raises(CancelledError):
            future.result(WAIT_S)
        assert cache.stats().tiers[0].pinned == 3, "the copy under way keeps its slots"
        delivery.let_go()
        assert cache.flush(WAIT_S)
        assert is_clean(cache)
        assert read(cache, TOKENS) == 3
        done = cache.load(cache.lookup(TOKENS))
        assert done.done()
        assert not done.cancel()
        done.result().release()


# -- one owner --------------------------------------------------------------------------------------------------------


def test_a_second_cache_on_a_directory_is_refused(tmp_path):
    code = f"""
from tiercache import DirectoryInUseError, TieredKVCache
try:
    TieredKVCache(["dram:1MiB", "nvme:{tmp_path}/kv:1MiB"])
except DirectoryInUseError as error:
    print(error)
"""
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with pytest.raises(DirectoryInUseError, match="in use by this process"):
            open_cache(tmp_path)
        text, _ = other.communicate(timeout=60)
        assert f"in use by process {os.getpid()}" in text
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == 3


def test_the_next_owner_waits_for_one_that_closes(tmp_path):
    cache = open_cache(tmp_path)
    store(cache, TOKENS)
    timer = threading.Timer(0.3, cache.close)
    timer.start()
    with open_cache(tmp_path) as again:
        assert read(again, TOKENS) == 3
    timer.join()


# -- fork -------------------------------------------------------------------------------------------------------------


@contextmanager
def forked(body):
    """Run `body` in a forked child, which ends as an interpreter does; then check that it ended well."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            signal.alarm(20)
            body()
            gc.collect()
            status = 0
        finally:
            os._exit(status)
    yield pid
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_has_a_dead_cache_and_the_parent_a_living_one(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
        assert cache.flush(to="nvme")
        match = cache.lookup(TOKENS)
        loaded = cache.load(match).result(WAIT_S)

        def child():
            for call in (
                lambda: cache.lookup(TOKENS),
                lambda: cache.load(match),
                lambda: cache.store(TOKENS, blocks_of(TOKENS)),
                lambda: cache.flush(),
                lambda: cache.stats(),
                lambda: cache.bump_epoch(),
            ):
                with pytest.raises(CacheClosedError, match="parent process"):
                    call()
            loaded.release()
            assert cache.close()
            with pytest.raises(DirectoryInUseError):
                StoreDirectory.open(tmp_path / "kv", wait_s=0.0)
            with open_cache(tmp_path / "child") as own:
                store(own, TOKENS)
                assert read(own, TOKENS) == 3

        with forked(child):
            store(cache, prompt(4, 5))
        assert bits(loaded.blocks) == bits(blocks_of(TOKENS))
        loaded.release()
        with pytest.raises(DirectoryInUseError):
            StoreDirectory.open(tmp_path / "kv", wait_s=0.0)
        assert read(cache, TOKENS) == 3
        assert read(cache, prompt(4, 5)) == 2
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == 3
        assert read(cache, prompt(4, 5)) == 2


def test_a_child_that_ends_like_a_program_leaves_the_parent_alone(tmp_path, python):
    """With every finaliser and atexit hook run in the child, from multiprocessing and from a plain fork."""
    code = f"""
import multiprocessing, os, sys, warnings
import numpy as np
warnings.filterwarnings("ignore", category=DeprecationWarning)
from tiercache import CacheClosedError, DRAM, NVMe, TieredKVCache

cache = TieredKVCache([DRAM("64MiB"), NVMe({str(tmp_path / "kv")!r}, "1MiB")], namespace="m")
rows = np.arange(16, dtype=np.float32).reshape(2, 8)
cache.store(list(range(32)), rows).wait(10)
assert cache.flush(to="nvme")
loaded = cache.load(cache.lookup(list(range(32)))).result()

def child():
    junk = [bytearray(1 << 20) for _ in range(200)]
    try:
        cache.lookup([1])
    except CacheClosedError:
        return
    sys.exit(3)

process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(30)
assert process.exitcode == 0, process.exitcode
pid = os.fork()
if pid == 0:
    child()
    sys.exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert np.array_equal(loaded.blocks, rows)
loaded.release()
cache.store(list(range(100, 132)), rows).wait(10)
assert cache.flush(to="nvme")
assert cache.check() == []
assert cache.close()
with TieredKVCache([DRAM("1MiB"), NVMe({str(tmp_path / "kv")!r}, "1MiB")], namespace="m") as cache:
    for first in (0, 100):
        with cache.load(cache.lookup(list(range(first, first + 32)))).result(10) as loaded:
            assert np.array_equal(loaded.blocks, rows)
print("well")
"""
    assert python(code) == "well\n"


# -- places -----------------------------------------------------------------------------------------------------------


def test_a_directory_in_shared_memory_works_and_is_remarked(tmp_path):
    place = "/dev/shm"
    if not os.access(place, os.W_OK):
        pytest.skip("no /dev/shm here")
    import shutil
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(dir=place))
    try:
        with open_cache(folder) as cache:
            store(cache, TOKENS)
            directory = cache.stats().directory
            assert directory["fs_type"] == "tmpfs"
            assert any("tmpfs" in remark for remark in directory["remarks"])
        with open_cache(folder) as cache:
            assert read(cache, TOKENS) == 3
            assert is_clean(cache)
    finally:
        shutil.rmtree(folder)


def test_flush_to_what_these_tiers_have_not():
    with TieredKVCache([DRAM(8 * SLOT)]) as cache:
        with pytest.raises(ConfigError, match="nvme"):
            cache.flush(to="nvme")
        with pytest.raises(ConfigError, match="nvme"):
            cache.flush(to="disk")


def test_flush_right_after_a_store_acknowledges_that_store(tmp_path):
    with open_cache(tmp_path, dram_slots=64, nvme_slots=256) as cache:
        for part in range(30):
            tokens = prompt(part, part + 50)
            cache.store(tokens, blocks_of(tokens))
            assert cache.flush(WAIT_S, to="nvme")
            assert cache.explain(tokens).stretches[0].tiers == ("dram", "nvme")


def test_what_a_flush_acknowledged_survives_a_kill_right_after_it(tmp_path):
    tokens = prompt(1, 2, 3)
    with open_cache(tmp_path) as cache:
        cache.store(tokens, blocks_of(tokens))
        assert cache.flush(WAIT_S, to="nvme")
        crash_image(tmp_path, tmp_path / "crash")
    with open_cache(tmp_path / "crash") as cache:
        assert read(cache, tokens) == 3


def test_a_flush_ends_at_its_timeout_although_a_copy_does_not():
    delivery = HeldDelivery()
    with open_cache(None, delivery=delivery) as cache:
        cache.store(TOKENS, blocks_of(TOKENS))
        late = threading.Timer(3.0, delivery.let_go)  # ends a flush that does not end by itself
        late.start()
        assert cache.flush(0.05) is False
        late.cancel()
        delivery.let_go()
        assert cache.flush(WAIT_S)


def test_flush_says_what_did_not_fit(tmp_path):
    with open_cache(tmp_path, dram_slots=16, nvme_slots=4) as cache:
        store(cache, prompt(*range(1, 9)))
        assert cache.flush(WAIT_S, to="nvme") is False
        assert cache.flush(WAIT_S)
        assert cache.stats().tiers[1].held == 4
        pin = cache.pin(cache.lookup(prompt(*range(1, 9))))
        began = time.monotonic()
        assert cache.flush(to="nvme") is False
        assert time.monotonic() - began < 5, "a flush waits for what nobody will end"
        cache.unpin(pin)
        assert is_clean(cache)


def test_a_close_that_another_one_overtakes_does_nothing_more() -> None:
    cache, flush, calls = open_cache(None), TieredKVCache.flush, []

    def overtaken(timeout=None, to=None):
        calls.append(to)
        if len(calls) == 1:
            assert cache.close()
        return flush(cache, timeout, to)

    cache.flush = overtaken
    assert cache.close() and len(calls) == 2


def test_only_one_of_two_closes_stops_what_is_below() -> None:
    cache = open_cache(None)
    assert cache._link.shut() and not cache._link.shut()
    cache.stack.mover.close(5.0)
