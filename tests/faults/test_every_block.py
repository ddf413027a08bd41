"""A fault at each block of a run, on each level: a load ends right before it, never with a wrong byte; then it heals.

Memory is not verified when it is read (what protects it is ECC), so wrong bytes are planted on NVMe only.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    SLOT,
    WAIT_S,
    bits,
    blocks_of,
    eventually,
    is_clean,
    open_cache,
    prompt,
    store,
)

from tiercache import TieredKVCache
from tiercache.assembly import Seams
from tiercache.keys import encode_prompt
from tiercache.testing import FaultyFiles, FaultyTier

N = 5
TOKENS = prompt(1, 2, 3, 4, 5)
POSITIONS = range(N)


def slots_of(cache: TieredKVCache, level: int) -> list[int]:
    """Slots of the run in a level, -1 where a block has none there."""
    symbols = encode_prompt(TOKENS, BLOCK_TOKENS, None, False).symbols
    index = cache.stack.planner.state.residency.index
    return index.gather(index.walk(symbols, N).path)[level].tolist()


def load(cache: TieredKVCache, into_out: bool) -> int:
    """Blocks loaded, every byte of them compared."""
    match = cache.lookup(TOKENS)
    out = np.full((N, *LAYOUT.block_shape), 7.0, dtype=np.float32) if into_out else None
    with cache.load(match, out).result(WAIT_S) as loaded:
        n = loaded.block_count
        assert bits(loaded.blocks) == bits(blocks_of(TOKENS)[:n])
        return n


def fill_hole(cache: TieredKVCache, hole: int) -> None:
    """A store supplies what is missing from block `hole` on; then the run is whole again, on NVMe too."""
    assert cache.lookup(TOKENS).blocks == hole
    ticket = cache.store(TOKENS, blocks_of(TOKENS, hole), hole)
    assert ticket.wait(WAIT_S)
    assert ticket.accepted >= 1
    assert ticket.accepted + ticket.present == N - hole
    assert cache.lookup(TOKENS).blocks == N
    assert load(cache, False) == N
    assert load(cache, True) == N


def wrapping(level: int, made: list[FaultyTier]) -> Seams:
    """Level `level` is a FaultyTier; level 0 still shows its memory."""
    opened: list[Any] = []

    def wrap(tier: Any) -> Any:
        opened.append(tier)
        if len(opened) - 1 != level:
            return tier
        made.append(FaultyTier(tier, shows_memory=level == 0))
        return made[0]

    return Seams(wrap_tier=wrap)


# -- NVMe --------------------------------------------------------------------------------------------------------------

ReadFault = Callable[[FaultyTier, FaultyFiles, int], None]
READ_FAULTS: dict[str, ReadFault] = {
    "tier-error": lambda tier, files, slot: tier.fail_slots("read", [slot]),
    "tier-flip": lambda tier, files, slot: tier.flip_bit(slot, 100, 3),
    "file-error": lambda tier, files, slot: files.hit("preadv", slot * SLOT, (slot + 1) * SLOT),
    "file-short": lambda tier, files, slot: files.hit("preadv", slot * SLOT, (slot + 1) * SLOT, "short"),
    "file-wrong": lambda tier, files, slot: files.hit("preadv", slot * SLOT, (slot + 1) * SLOT, "wrong"),
}


def faulty_nvme(path: Path, **settings: Any) -> tuple[TieredKVCache, FaultyTier, FaultyFiles]:
    made: list[FaultyTier] = []
    files = FaultyFiles()
    last = 2 if settings.get("hbm_slots") else 1
    seams = Seams(wrap_tier=wrapping(last, made).wrap_tier, file_ops=files)
    return open_cache(path, seams=seams, **settings), made[0], files


@pytest.mark.parametrize("fault", READ_FAULTS)
def test_reading_nvme(tmp_path: Path, fault: str) -> None:
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
        assert cache.flush(WAIT_S, to="nvme")
    for at in POSITIONS:
        cache, tier, files = faulty_nvme(tmp_path, exclusive=False)
        with cache:
            slots = slots_of(cache, 1)
            READ_FAULTS[fault](tier, files, slots[at])
            assert load(cache, at % 2 == 0) == at
            assert load(cache, at % 2 == 1) == at, "the other way"
            assert cache.check() == []
            tier.heal()
            files.heal()
            fill_hole(cache, at)
            assert cache.flush(WAIT_S, to="nvme")
            assert is_clean(cache)
        with open_cache(tmp_path, exclusive=False) as cache:
            assert load(cache, True) == N


@pytest.mark.parametrize("effect", ["raise", "short", "wrong"])
def test_writing_nvme(tmp_path: Path, effect: Any) -> None:
    """What could not be written is not claimed, nor what hangs below it; what was written wrong is found by its
    checksum."""
    for at in POSITIONS:
        place = tmp_path / str(at)
        place.mkdir()
        cache, _, files = faulty_nvme(place)
        store(cache, TOKENS)
        files.hit("pwritev", at * SLOT, (at + 1) * SLOT, effect)  # a new directory: slots are taken from 0 on
        assert cache.flush(WAIT_S, to="nvme") == (effect == "wrong")
        assert slots_of(cache, 1)[:at] == list(range(at))
        claimed = cache.stack.catalog.claimed_slots
        assert claimed == (N if effect == "wrong" else at)
        assert load(cache, False) == N, "the copies above are whole"
        assert is_clean(cache)
        cache.switch = "loads-off"
        assert cache.close(1.0) == (effect == "wrong")
        cache, _, _ = faulty_nvme(place)
        with cache:
            assert cache.lookup(TOKENS).blocks == claimed
            assert load(cache, at % 2 == 0) == at
            fill_hole(cache, at)
            assert cache.flush(WAIT_S, to="nvme")
            assert is_clean(cache)
        with open_cache(place) as cache:
            assert load(cache, True) == N


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hbm", [0, 16], ids=["dram", "hbm"])
def test_writing_level_0(tmp_path: Path, hbm: int) -> None:
    """A store whose block cannot be written ends there, with what would hang below it; so does a load from NVMe."""
    with open_cache(tmp_path, hbm_slots=hbm) as cache:
        store(cache, TOKENS)
        assert cache.flush(WAIT_S, to="nvme")
    fresh = prompt(11, 12, 13, 14, 15)
    for at in POSITIONS:
        made: list[FaultyTier] = []
        with open_cache(tmp_path, hbm_slots=hbm, exclusive=False, seams=wrapping(0, made)) as cache:
            made[0].fail_slots("write", [at])  # nothing is in level 0: slots are taken from 0 on
            assert load(cache, False) == at
            assert cache.lookup(TOKENS).blocks == N, "what is on NVMe is not touched by that"
            # Into out: over DRAM alone level 0 gets a copy too, and the block counts only with that.
            assert load(cache, True) == (N if hbm else at)
            assert cache.check() == []
            made[0].heal()
            assert load(cache, False) == N
            cache.invalidate([])
            assert eventually(lambda cache=cache: cache.stats().tiers[0].free == cache.stats().tiers[0].capacity)
            made[0].fail_slots("write", [at])
            ticket = cache.store(fresh, blocks_of(fresh))
            assert ticket.wait(WAIT_S)
            assert cache.flush(WAIT_S)
            assert cache.lookup(fresh).blocks == at
            made[0].heal()
            store(cache, fresh, at)
            with cache.load(cache.lookup(fresh)).result(WAIT_S) as loaded:
                assert bits(loaded.blocks) == bits(blocks_of(fresh))
            assert is_clean(cache)
            store(cache, TOKENS)
            assert cache.flush(WAIT_S, to="nvme")


def test_reading_dram_below_hbm(tmp_path: Path) -> None:
    """The copy in DRAM fails: the load ends before it; the next takes that block from NVMe."""
    with open_cache(tmp_path, hbm_slots=16) as cache:
        store(cache, TOKENS)
        assert cache.flush(WAIT_S, to="nvme")
    for at in POSITIONS:
        made: list[FaultyTier] = []
        with open_cache(tmp_path, hbm_slots=16, exclusive=False, seams=wrapping(1, made)) as cache:
            assert load(cache, True) == N  # leaves copies in DRAM
            slots = slots_of(cache, 1)
            assert min(slots) >= 0
            made[0].fail_slots("read", [slots[at]])
            assert load(cache, at % 2 == 0) == at
            assert cache.check() == []
            assert load(cache, False) == N
            made[0].heal()
            assert load(cache, True) == N
            assert is_clean(cache)


@pytest.mark.parametrize("op", ["read", "write"])
def test_dram_as_the_last_level(op: Any) -> None:
    """No copy anywhere else: what cannot be read is a hole until it is stored, what cannot be written stays above."""
    others = [prompt(50 + i, 60 + i) for i in range(8)]
    for at in POSITIONS:
        made: list[FaultyTier] = []
        with open_cache(None, hbm_slots=8, dram_slots=32, exclusive=False, seams=wrapping(1, made)) as cache:
            if op == "write":
                made[0].fail_slots("write", [at])
            store(cache, TOKENS)
            for tokens in others:  # pushes the run down to DRAM
                if max(slots_of(cache, 0)) < 0:
                    break
                assert cache.store(tokens, blocks_of(tokens)).wait(WAIT_S)
                cache.flush(WAIT_S)
            assert cache.check() == []
            if op == "read":
                slots = slots_of(cache, 1)
                assert max(slots_of(cache, 0)) < 0 <= min(slots), "all of it is in DRAM, nothing in HBM"
                made[0].fail_slots("read", [slots[at]])
                assert load(cache, True) == at
            made[0].heal()
            there = cache.lookup(TOKENS).blocks
            if there < N:
                assert op == "write" or there == at
                assert cache.store(TOKENS, blocks_of(TOKENS, there), there).wait(WAIT_S)
                cache.flush(WAIT_S)
            assert cache.lookup(TOKENS).blocks == N
            assert load(cache, True) == N
            assert is_clean(cache)
