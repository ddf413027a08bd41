"""Random calls from several threads on two caches over a key tier that lies, fails, refuses and forgets: never a wrong
byte, whoever wrote it."""

import random
import threading
from contextlib import suppress

import numpy as np
import pytest
from cache_kit import BLOCK_TOKENS, LAYOUT, WAIT_S, bits, blocks_of, dram, is_clean, nvme, prompt

from tiercache import Remote, TieredKVCache
from tiercache.testing import FaultyKeyTier, MemoryKeyTier, SlowKeyTier, put_blocks

EPOCH = "weights"


def some_prompt(rng):
    return prompt(*(rng.choice([1, 1, 2, 3]) for _ in range(rng.randint(1, 8))))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("with_nvme", [False, True], ids=["dram", "nvme"])
def test_walk(tmp_path, seed, with_nvme):
    memory = MemoryKeyTier(60)
    faulty = FaultyKeyTier(memory)
    slow = SlowKeyTier(faulty, lambda op, n: random.choice([0.0, 0.0, 0.003]))
    fields = {"quota": 0.3, "missing_s": 0.01, "hint_s": 0.2, "threads": 4}
    write = random.Random(seed).choice(["prefill", "eviction"])
    tiers = [dram(24), Remote(slow, **fields)]
    if with_nvme:
        tiers.append(nvme(tmp_path, 40, durability="process", write_after_s=0.01))
    others = [dram(16), Remote(slow, write=write, **fields)]
    names = {"layout": LAYOUT, "namespace": "walk", "epoch": EPOCH, "block_tokens": BLOCK_TOKENS}
    wrong = []
    with TieredKVCache(tiers, **names) as first, TieredKVCache(others, **names) as second:

        def work(number):
            rng = random.Random(f"{seed}-{number}")
            for _ in range(60):
                cache = rng.choice([first, first, second])
                tokens = some_prompt(rng)
                n = len(tokens) // BLOCK_TOKENS
                what = rng.choice([*["load"] * 3, "rows", "store", "share", "spoil", "touch", "drop", "switch"])
                if what in ("load", "rows"):
                    match = cache.lookup(tokens, deadline_s=rng.choice([0.0, 0.05]))
                    out = np.zeros((n, *LAYOUT.block_shape), dtype=np.float32) if what == "rows" else None
                    with cache.load(match, out).result(WAIT_S) as loaded:
                        if bits(loaded.blocks) != bits(blocks_of(tokens)[: loaded.block_count]):
                            wrong.append((number, tokens.tolist()))
                elif what == "store":
                    cache.store(tokens, blocks_of(tokens))
                elif what == "share":
                    with suppress(OSError):  # where it is full
                        put_blocks(memory, tokens, blocks_of(tokens), namespace="walk", epoch=EPOCH, block_tokens=4)
                elif what == "spoil":
                    for key in rng.sample(memory.held(), min(3, len(memory))):
                        faulty.flips[key] = (rng.randrange(LAYOUT.block_nbytes + 32), 1 << rng.randrange(8))
                    faulty.gone = {key for key in memory.held() if rng.random() < 0.1}
                elif what == "switch":
                    cache.remote.disable()
                    memory.refuses = rng.choice([True, False])
                    cache.remote.enable()
                elif what == "touch":
                    cache.touch(cache.lookup(tokens))
                elif rng.random() < 0.5:
                    cache.invalidate(tokens)
                else:
                    faulty.heal()
                    cache.flush(1.0)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert wrong == []
        assert first.stats().remote["fetched"] > 0
        assert first.stats().remote["written"] > 0
        assert is_clean(first) and is_clean(second)
