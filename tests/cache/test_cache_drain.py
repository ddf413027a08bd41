"""close() with too little time: what was asked for last, and all that it hangs on, is there next time."""

import threading

import pytest
from cache_kit import open_cache, prompt, read, store

from tiercache.assembly import Seams
from tiercache.testing import DelayingTier

PROMPTS = 30


class Metered(DelayingTier):
    """Counts the blocks that were written."""

    def __init__(self, inner, seconds):
        super().__init__(inner, seconds)
        self.written = 0
        self._lock = threading.Lock()

    def write(self, slots, rows):
        ok = super().write(slots, rows)
        with self._lock:
            self.written += int(ok.sum())
        return ok


def slow_cache(path, seconds):
    made = []

    def wrap(tier):
        if tier.verifies:
            made.append(Metered(tier, seconds))
            return made[-1]
        return tier

    settings = {"dram_slots": 200, "nvme_slots": 300, "nvme": {"threads": 2}, "policy": "lru"}
    cache = open_cache(path, seams=Seams(wrap_tier=wrap), **settings)
    return cache, made[0]


@pytest.mark.parametrize("seed", [0, 1])
def test_the_most_reusable_part_is_on_nvme_when_the_deadline_cuts_a_close(tmp_path, seed):
    cache, tier = slow_cache(tmp_path, 0.06)
    order = [(7 * i + seed) % PROMPTS for i in range(PROMPTS)]
    for i in range(PROMPTS):
        store(cache, prompt(1, 2, 100 + i, 200 + i, 300 + i))
    for i in order:
        cache.touch(cache.lookup(prompt(1, 2, 100 + i, 200 + i, 300 + i)))
    assert tier.written == 0
    assert cache.close(timeout=0.8) is False
    assert 5 < tier.written < 2 + 3 * PROMPTS
    with open_cache(tmp_path, 200, 300) as cache:
        there = [read(cache, prompt(1, 2, 100 + i, 200 + i, 300 + i)) for i in order]
        assert there[-1] == 5 and there[0] == 2, "the last used, and of the first only what all share"
        first = next(at for at, blocks in enumerate(there) if blocks > 2)
        assert all(blocks == 5 for blocks in there[first + 3 :]), (
            there,
            "in order, but for what two threads had in hand",
        )
        assert cache.check() == []
