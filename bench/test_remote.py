"""What a key tier costs a lookup that has nothing to do with it, and what frames cost beside a copy of their bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from bench.fill import BLOCK_TOKENS, LONG_BLOCKS, Ids, branched, random_ids
from bench.pairs import Pairs
from bench.payload import Payload
from bench.rows import row
from bench.scale import Scale
from tiercache import DRAM, KVLayout, Remote, TieredKVCache
from tiercache.keys import encode_prompt
from tiercache.planner import Found
from tiercache.remote.frame import frame_nbytes, seal, seal_rows, verified
from tiercache.testing import FaultyKeyTier, MemoryKeyTier, put_blocks

_BLOCK_NBYTES = 64
_SMOKE_BLOCKS = 512
_CALLS = 20
"""Lookups of one round: one takes some ten microseconds."""
_NOW = 1000.0
"""The caches' clock stands: no hint ends, and no breaker's back-off."""
_WAIT_S = 60.0
_FRAME_NBYTES = 256 << 10


class Half:
    """A cache that holds the first half of a long prompt, among others, on one path of 64 nodes."""

    def __init__(self, stack: ExitStack, ids: Ids, nodes: int, others: int, tier: FaultyKeyTier | None) -> None:
        blocks = len(ids) // BLOCK_TOKENS
        layout = KVLayout((_BLOCK_NBYTES,), "uint8")
        remote = [Remote(tier, write="never", find_deadline_s=_WAIT_S)] if tier is not None else []
        self.cache = stack.enter_context(
            TieredKVCache(
                [DRAM(3 * blocks * layout.stride), *remote],
                layout=layout,
                namespace="bench",
                epoch=b"bench",
                block_tokens=BLOCK_TOKENS,
                clock=lambda: _NOW,
            )
        )
        assert self.cache.stack is not None
        branched(self.cache, ids[: len(ids) // 2], nodes, others, _BLOCK_NBYTES)
        self._planner, self._prompt = self.cache.stack.planner, encode_prompt(ids, BLOCK_TOKENS)

    def look(self) -> Found:
        """What the planner finds; as often as a round has it."""
        planner, prompt = self._planner, self._prompt
        for _ in range(_CALLS):
            found = planner.lookup(prompt.symbols, prompt.n, _NOW, prompt.tail)
        return found


@contextmanager
def halves(scale: Scale) -> Iterator[tuple[Half, Half, FaultyKeyTier, MemoryKeyTier, Ids]]:
    """A cache with a key tier that has the whole prompt, and one without."""
    nodes, others = scale.pick(64, 64, 8), scale.pick(2_000, 2_000, 50)
    blocks = scale.pick(LONG_BLOCKS, LONG_BLOCKS, _SMOKE_BLOCKS)
    ids = random_ids(np.random.default_rng(0), blocks)
    memory = MemoryKeyTier(2 * blocks)
    rows = np.zeros((blocks, _BLOCK_NBYTES), np.uint8)
    put_blocks(memory, ids, rows, namespace="bench", epoch=b"bench", block_tokens=BLOCK_TOKENS)
    tier = FaultyKeyTier(memory)
    with ExitStack() as stack:
        yield Half(stack, ids, nodes, others, tier), Half(stack, ids, nodes, others, None), tier, memory, ids


@pytest.mark.parametrize("state", ["off", "open", "there"])
def test_lookup(state: str, pairs: Pairs, scale: Scale) -> None:
    with halves(scale) as (with_tier, without, tier, memory, ids):
        cache, blocks = with_tier.cache, len(ids) // BLOCK_TOKENS
        if state == "off":
            cache.remote.disable()
        elif state == "open":
            tier.raises["find"] = OSError("gone")
            for n in range(20):
                if not cache.stats().remote["online"]:
                    break
                cache.lookup(random_ids(np.random.default_rng(n), 4), deadline_s=_WAIT_S)
            assert not cache.stats().remote["online"]
            tier.heal()  # a question would be counted
        else:
            assert cache.lookup(ids, deadline_s=_WAIT_S).blocks == blocks
        before = dict(memory.calls), cache.stats().remote

        def check(found: Found) -> None:
            assert (found.blocks, found.remote) == ((blocks, blocks // 2) if state == "there" else (blocks // 2, 0))

        assert without.look().blocks == blocks // 2
        pairs.run(
            row(f"remote/{state}"),
            lambda _: with_tier.look(),
            {"no key tier": lambda _: without.look()},
            check=check,
            pairs=scale.pick(201, 101, 3),
            warmup=scale.pick(10, 10, 1),
            tokens=len(ids),
            calls=_CALLS,
        )
        after = cache.stats().remote
        assert memory.calls == before[0] and after["finds"] == before[1]["finds"], "the key tier was asked"


@pytest.mark.parametrize("verb", ["seal", "verified"])
def test_frames_against_memcpy(verb: str, pairs: Pairs, scale: Scale) -> None:
    blocks = scale.pick(256, 256, 16)
    payload = Payload(_FRAME_NBYTES).rows(blocks)
    target, idents = np.ones_like(payload), np.arange(1, blocks + 1, dtype=np.uint64)
    rows = seal(payload, _FRAME_NBYTES, idents)
    sealed = rows.copy()

    def work(_: object) -> None:
        if verb == "seal":
            seal_rows(rows, _FRAME_NBYTES, idents)
        else:
            assert verified(rows, _FRAME_NBYTES, idents).all()

    def fresh() -> None:
        if verb == "seal":
            rows[:, _FRAME_NBYTES:] = 0

    def check(_: object) -> None:
        assert (rows == sealed).all()

    pairs.run(
        row(f"remote/{verb}"),
        work,
        {"memcpy": lambda _: np.copyto(target, payload)},
        fresh=fresh,
        check=check,
        pairs=scale.pick(31, 15, 2),
        nbytes=blocks * frame_nbytes(_FRAME_NBYTES),
    )
