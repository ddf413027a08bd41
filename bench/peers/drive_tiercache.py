"""tiercache, driven by the benchmark."""

from __future__ import annotations

from typing import Any

import numpy as np
from protocol import serve
from workload import (
    Rows,
    Tokens,
    branches,
    census,
    drop_from_page_cache,
    memcpy_s,
    others,
    payload,
    places_in,
    prompt,
    timed,
)

import tiercache
from tiercache import DRAM, KVLayout, NVMe, TieredKVCache
from tiercache.config import Durability

WAIT_S = 60.0


class Driver:
    """One cache at a time; every set-up replaces it."""

    def __init__(self) -> None:
        self.cache: TieredKVCache | None = None
        self.seed = 0

    def hello(self) -> dict[str, Any]:
        """Versions."""
        return {"versions": {"tiercache": tiercache.__version__, "numpy": np.__version__}}

    # -- lookup -------------------------------------------------------------------------------------------------

    def lookup_setup(self, blocks: int, nodes: int, other: int) -> dict[str, Any]:
        """A prompt of `blocks` blocks on a path of `nodes` nodes, beside `other` unrelated prompts."""
        self._open([DRAM((2 * blocks + nodes + 5 * other + 64) * 4096)], 64)
        self.tokens = prompt(nodes, blocks)
        for tokens in [self.tokens, *branches(self.tokens, nodes), *others(other)]:
            self._fill(tokens)
        assert self.cache is not None
        return {"blocks": self.cache.lookup(self.tokens).blocks}

    def lookup(self, hit: bool) -> dict[str, Any]:
        """One lookup, with a fresh array."""
        self.seed += 1
        tokens = self.tokens.copy() if hit else prompt(5_000_000 + self.seed, len(self.tokens) // 16)
        cache = self._cache()
        seconds, match = timed(lambda: cache.lookup(tokens))
        return {"s": seconds, "blocks": match.blocks}

    # -- DRAM ---------------------------------------------------------------------------------------------------

    def memory_setup(self, n: int, block_nbytes: int) -> dict[str, Any]:
        """A cache in DRAM with room for four prompts of n blocks, every slot touched."""
        self._open([DRAM(4 * n * block_nbytes)], block_nbytes)
        self._rows(n, block_nbytes)
        for _ in range(6):
            self.memory_store()
        return {}

    def memory_store(self) -> dict[str, Any]:
        """Store a new prompt."""
        self.seed += 1
        self.tokens, cache = prompt(self.seed, len(self.blocks)), self._cache()
        seconds, stored = timed(lambda: self._stored(cache.store(self.tokens, self.blocks)))
        assert stored == len(self.blocks)
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target)}

    def memory_load(self) -> dict[str, Any]:
        """Load the prompt stored last into the caller's rows."""
        return self._load()

    # -- disk ---------------------------------------------------------------------------------------------------

    def disk_setup(self, directory: str, n: int, block_nbytes: int, durable: bool) -> dict[str, Any]:
        """DRAM for four prompts of n blocks, NVMe for twelve."""
        self.directory, self.durable = directory, durable
        self._rows(n, block_nbytes)
        self._open_disk()
        return {"asks_for_sync": durable}

    def disk_store(self) -> dict[str, Any]:
        """Store a new prompt, up to the moment it is in the files (with `durable`: synced and claimed)."""
        self.seed += 1
        if self.cache is None:
            self._open_disk()
        cache = self._cache()
        cache.invalidate([])
        self.tokens = prompt(self.seed, len(self.blocks))

        def store() -> bool:
            return self._stored(cache.store(self.tokens, self.blocks)) == len(self.blocks) and cache.flush(
                WAIT_S, to="nvme"
            )

        seconds, done = timed(store)
        assert done
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target)}

    def disk_read(self, cold: bool) -> dict[str, Any]:
        """Load the prompt stored last when DRAM holds none of it: other prompts have pushed it out."""
        cache = self._cache()
        match = cache.lookup(self.tokens)
        while match.by_tier.get("dram"):
            self.seed += 1
            cache.store(prompt(self.seed, len(self.blocks)), self.blocks).wait(WAIT_S)
            cache.flush(WAIT_S, to="nvme")
            match = cache.lookup(self.tokens)
        if cold:
            drop_from_page_cache(self.directory)
        return self._load()

    # -- restart and damage -------------------------------------------------------------------------------------

    def restart_open(self, directory: str, n: int, block_nbytes: int) -> dict[str, Any]:
        """Open a directory, perhaps one that another process left."""
        self.directory, self.durable = directory, True
        self._rows(n, block_nbytes)
        seconds, _ = timed(self._open_disk)
        return {"s": seconds}

    def restart_store(self, seed: int) -> dict[str, Any]:
        """Store the prompt of that seed and wait until it is as safe as it will be."""
        tokens, cache = prompt(seed, len(self.blocks)), self._cache()
        stored = self._stored(cache.store(tokens, self._content(seed)))
        return {"stored": stored, "acknowledged": cache.flush(WAIT_S, to="nvme")}

    def restart_close(self) -> dict[str, Any]:
        """An orderly end."""
        return {"closed": self._close()}

    def restart_read(self, seed: int) -> dict[str, Any]:
        """Which blocks of that prompt are found, and which are right."""
        tokens, expected = prompt(seed, len(self.blocks)), self._content(seed)
        cache = self._cache()
        match = cache.lookup(tokens)
        self.out[:] = 0
        with cache.load(match, out=self.out).result(WAIT_S) as loaded:
            n = loaded.block_count
        return {"hits": match.blocks, **census(self.out, expected, [i < n for i in range(len(expected))])}

    def restart_places(self, seed: int) -> dict[str, Any]:
        """Where the blocks of that prompt lie on disk."""
        return {"places": places_in(self.directory, self._content(seed))}

    def restart_forget_memory(self) -> dict[str, Any]:
        """Leave the blocks on disk only: a reopen."""
        self._close()
        self._open_disk()
        return {}

    # -- parts --------------------------------------------------------------------------------------------------

    def _cache(self) -> TieredKVCache:
        assert self.cache is not None
        return self.cache

    def _open(self, tiers: list[Any], block_nbytes: int) -> None:
        self._close()
        layout = KVLayout((block_nbytes,), "uint8")
        # LRU: other prompts must push one out of DRAM however often it was used
        self.cache = TieredKVCache(tiers, layout=layout, namespace="bench", policy="lru", exclusive=False)

    def _open_disk(self) -> None:
        n, block_nbytes = self.blocks.shape
        durability: Durability = "power" if self.durable else "process"
        nvme = NVMe(self.directory, 12 * n * block_nbytes, write_after_s=0.0, durability=durability)
        self._open([DRAM(4 * n * block_nbytes), nvme], block_nbytes)

    def _close(self) -> bool:
        cache, self.cache = self.cache, None
        return cache.close() if cache is not None else True

    def _rows(self, n: int, block_nbytes: int) -> None:
        self.blocks = payload(7, n, block_nbytes)
        self.out, self.target = np.zeros_like(self.blocks), np.zeros_like(self.blocks)

    def _content(self, seed: int) -> Rows:
        return payload(seed, *self.blocks.shape)

    def _stored(self, ticket: Any) -> int:
        ticket.wait(WAIT_S)
        return int(ticket.stored)

    def _fill(self, tokens: Tokens) -> None:
        """Store what is missing of a prompt."""
        cache = self._cache()
        while (match := cache.lookup(tokens)).blocks < len(tokens) // 16:
            n = len(tokens) // 16 - match.blocks
            cache.store(tokens, np.zeros((n, 64), np.uint8), start=match.blocks).wait(WAIT_S)

    def _load(self) -> dict[str, Any]:
        self.out[:] = 0
        cache = self._cache()

        def load() -> int:
            with cache.load(cache.lookup(self.tokens), out=self.out).result(WAIT_S) as loaded:
                return loaded.block_count

        seconds, n = timed(load)
        counted = census(self.out, self.blocks, [i < n for i in range(len(self.blocks))])
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target), **counted}


if __name__ == "__main__":
    serve(Driver)
