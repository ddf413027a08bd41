"""Speed, printed rather than asserted tightly: run with `-m slow -s`."""

import time

import numpy as np
import pytest
from cache_kit import WAIT_S

from tiercache import DRAM, KVLayout, NVMe, TieredKVCache

pytestmark = pytest.mark.slow


def best(body, times=5):
    """Seconds of the fastest of a few runs."""
    fastest = float("inf")
    for i in range(times):
        began = time.perf_counter()
        body(i)
        fastest = min(fastest, time.perf_counter() - began)
    return fastest


def test_bytes_in_and_out_of_dram_against_memcpy():
    n, layout = 256, KVLayout((256 << 10,), "uint8")
    nbytes = n * layout.block_nbytes
    source = np.random.default_rng(0).integers(0, 256, (n, 256 << 10), dtype=np.uint8)
    target = np.empty_like(source)
    best(lambda _: np.copyto(target, source))
    memcpy = nbytes / best(lambda _: np.copyto(target, source)) / 1e9
    with TieredKVCache([DRAM(4 * nbytes)], layout=layout, block_tokens=1) as cache:
        prompts = [np.full(n, i + 1, dtype=np.int32) for i in range(3)]
        for each in prompts:
            assert cache.store(each, source).wait(WAIT_S)
        cache.invalidate([])

        def put(i):
            assert cache.store(prompts[i % 3], source).wait(WAIT_S)
            if i % 3 == 2:
                cache.invalidate([])

        store = nbytes / best(put, 9) / 1e9
        for each in prompts[:2]:
            cache.store(each, source).wait(WAIT_S)

        def get(i):
            loaded = cache.load(cache.lookup(prompts[i % 2]), out=target).result(WAIT_S)
            assert loaded.block_count == n

        load = nbytes / best(get, 9) / 1e9

        def hold(i):
            with cache.load(cache.lookup(prompts[i % 2])).result(WAIT_S) as loaded:
                assert loaded.block_count == n

        held = best(hold, 9)
        assert np.array_equal(target, source)
    print(
        f"\nDRAM, {n} blocks of 256 KiB: memcpy {memcpy:.2f} GB/s, store {store:.2f} ({store / memcpy:.2f}), "
        f"load into out {load:.2f} ({load / memcpy:.2f}), load in place {held * 1e3:.2f} ms"
    )
    assert store > 0.3 * memcpy
    assert load > 0.3 * memcpy


def test_lookup_of_a_long_prompt_against_a_compare_of_its_tokens():
    tokens = np.random.default_rng(1).integers(0, 30_000, 131_072, dtype=np.int32)
    other = tokens.copy()
    layout = KVLayout((8,), "uint8")
    with TieredKVCache([DRAM(33_000 * 4096)], layout=layout) as cache:
        assert cache.store(tokens, np.zeros((8192, 8), dtype=np.uint8)).accepted > 0
        while cache.lookup(tokens).blocks < 8192:
            there = cache.lookup(tokens, deadline_s=1).blocks
            cache.store(tokens, np.zeros((8192 - there, 8), dtype=np.uint8), start=there).wait(WAIT_S)
        compare = best(lambda _: np.array_equal(tokens, other), 50)
        found = best(lambda _: cache.lookup(tokens), 50)
        listed = tokens.tolist()
        from_list = best(lambda _: cache.lookup(listed), 10)
        miss = best(lambda _: cache.lookup(tokens[::-1]), 50)
        nodes = cache.stats().nodes
    print(
        f"\nlookup of 131,072 tokens on {nodes} node(s): {found * 1e3:.3f} ms (list {from_list * 1e3:.2f} ms), a miss "
        f"{miss * 1e3:.3f} ms; np.array_equal {compare * 1e3:.3f} ms"
    )
    assert found < 2e-3


@pytest.mark.parametrize("level", ["dram", "nvme"])
def test_the_estimate_against_the_real_time_of_a_load(tmp_path, level):
    """Loads of 1 to 128 MiB into the caller's rows, in changing order, some with others ahead of them."""
    layout, most = KVLayout((256 << 10,), "uint8"), 512
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (most, 256 << 10), dtype=np.uint8)
    tokens = [np.arange(1000 * i, 1000 * i + most, dtype=np.int32) for i in range(2)]
    disk = NVMe(tmp_path / "kv", 2 * most * (256 << 10), write_after_s=None)
    fast = 4 * most if level == "dram" else 8
    with TieredKVCache([DRAM(2 * most * (256 << 10)), disk], layout=layout, block_tokens=1, namespace="x") as cache:
        for each in tokens:
            while (there := cache.lookup(each, deadline_s=1).blocks) < most:
                cache.store(each, rows[there:], start=there).wait(WAIT_S)
            assert cache.flush(to="nvme")
    ratios, outs = [], [np.empty_like(rows) for _ in range(2)]
    tiers = [DRAM(fast * (256 << 10)), disk]
    with TieredKVCache(tiers, layout=layout, block_tokens=1, namespace="x", exclusive=False) as cache:
        if level == "dram":
            for each in tokens:
                cache.prefetch(cache.lookup(each)).result(WAIT_S)
        for i in range(80):
            n = int(rng.choice([4, 16, 64, 512]))
            ahead = [cache.load(cache.lookup(tokens[1]), out=outs[1])] if i % 4 == 3 else []
            match = cache.lookup(tokens[0][:n])
            began = time.perf_counter()
            assert cache.load(match, out=outs[0]).result(WAIT_S).block_count == n
            ratios.append((n, len(ahead), match.estimated_load_s / (time.perf_counter() - began)))
            for each in ahead:
                each.result(WAIT_S)
        cost = cache.stack.planner.state.costs[0 if level == "dram" else 1]
    alone = [ratio for _, queue, ratio in ratios[20:] if not queue]
    low, middle, high = np.quantile(alone, [0.1, 0.5, 0.9])
    queued = np.median([ratio for _, queue, ratio in ratios[20:] if queue])
    sizes = {
        n: round(float(np.median([r for m, q, r in ratios[20:] if m == n and not q])), 2) for n in (4, 16, 64, 512)
    }
    print(f"\n{level}: estimate / real {middle:.2f} ({low:.2f} to {high:.2f}), behind 128 MiB {queued:.2f}; by blocks")
    print(f"of 256 KiB {sizes}; {cost}")
    assert 0.5 < middle < 2
