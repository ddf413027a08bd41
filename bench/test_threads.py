"""Eight threads on one cache must not do less than one."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bench.fill import BLOCK_TOKENS, LONG_BLOCKS, memory_cache, random_ids, store_all
from bench.pairs import Pairs
from bench.rows import row
from bench.scale import Scale
from tiercache import TieredKVCache

_WAIT_S = 60.0
_BLOCK_NBYTES = 64 << 10
_MOVED_BLOCKS = 16
"""Of a load or store: 1 MiB."""
_PROMPT_BLOCKS = 512
_PROMPTS = 16
"""Stored before; the cache has room for twice as many."""

Operation = Callable[[int], int]


def _prompts(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(LONG_BLOCKS)
    return [random_ids(rng, _PROMPT_BLOCKS) for _ in range(count)]


def operations(cache: TieredKVCache, threads: int, scale: Scale) -> dict[str, tuple[Operation, int]]:
    """What a thread does once (its number given), and how often all of them together. Returns blocks."""
    prompts = _prompts(scale.pick(_PROMPTS, _PROMPTS, 2))
    heads = [cache.lookup(prompt[: _MOVED_BLOCKS * BLOCK_TOKENS]) for prompt in prompts]
    outs = np.ones((threads, _MOVED_BLOCKS, _BLOCK_NBYTES), np.uint8)
    source = np.ones((_MOVED_BLOCKS, _BLOCK_NBYTES), np.uint8)
    turn = itertools.count()

    def lookup(_: int) -> int:
        return cache.lookup(prompts[next(turn) % len(prompts)]).blocks

    def load(thread: int) -> int:
        return cache.load(heads[next(turn) % len(heads)], out=outs[thread]).result(_WAIT_S).block_count

    def store(_: int) -> int:
        ids = np.full(_MOVED_BLOCKS * BLOCK_TOKENS, 200_000 + next(turn), dtype=np.int32)
        ticket = cache.store(ids, source)
        assert ticket.wait(_WAIT_S)
        return ticket.stored

    return {"lookup": (lookup, 4_000), "load": (load, 800), "store": (store, 800)}


@pytest.mark.parametrize("threads", [2, 4, 8])
@pytest.mark.parametrize("verb", ["lookup", "load", "store"])
def test_threads(verb: str, threads: int, pairs: Pairs, scale: Scale) -> None:
    prompts = scale.pick(_PROMPTS, _PROMPTS, 2)
    with memory_cache(prompts * _PROMPT_BLOCKS * 2, _BLOCK_NBYTES) as cache:
        for prompt in _prompts(prompts):
            store_all(cache, prompt, _PROMPT_BLOCKS, _BLOCK_NBYTES)
        operation, count = operations(cache, threads, scale)[verb]
        count = scale.pick(count, count // 2, 32)
        with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(threads) as many:

            def run(pool: ThreadPoolExecutor, of: int) -> int:
                """The same operations in all, spread over so many threads."""
                loops = [pool.submit(_repeat, operation, thread, count // of) for thread in range(of)]
                return sum(each.result(_WAIT_S) for each in loops)

            def check(blocks: int) -> None:
                assert blocks == count * (_PROMPT_BLOCKS if verb == "lookup" else _MOVED_BLOCKS)

            pairs.run(
                row(f"threads/{verb}/{threads}"),
                lambda _: run(many, threads),
                {"1 thread": lambda _: run(one, 1)},
                check=check,
                pairs=scale.pick(9, 7, 1),
                operations=count,
            )


def _repeat(operation: Operation, thread: int, times: int) -> int:
    return sum(operation(thread) for _ in range(times))
