"""LMCache's engine with its CPU and local-disk backends, driven by the benchmark: drive_lmcache.py TOKENS_PER_CHUNK

The engine's own store, lookup and retrieve are called. Its GPU connector is ours: it copies between the caller's rows
and the engine's memory objects, one memcpy a chunk, which is what a GPU connector does with a device copy.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.update(LMCACHE_TRACK_USAGE="false", LMCACHE_LOG_LEVEL="ERROR", DO_NOT_TRACK="1", PYTHONHASHSEED="0")

import lmcache
import numpy as np
import torch
from protocol import UnsupportedError, serve
from standins import stand_in
from workload import census, drop_from_page_cache, memcpy_s, others, payload, places_in, prompt, sync, timed

STANDINS = stand_in("nvtx", "transformers", "cupy", "awscrt")

from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
from lmcache.v1.metadata import LMCacheMetadata

WAIT_S = 60.0
NAME = "bench"


class HostConnector(MockGPUConnector):
    """Copies between rows in host memory (one a chunk) and memory objects, in place of a GPU's blocks."""

    def __init__(self, kv_shape: tuple[int, ...], chunk_tokens: int) -> None:
        super().__init__(kv_shape)
        self.chunk_tokens = chunk_tokens
        self.rows: Any = None

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        """Rows to memory objects."""
        for item, start in zip(memory_objs, starts, strict=True):
            np.copyto(np.frombuffer(item.byte_array, np.uint8), self.rows[start // self.chunk_tokens])

    def batched_to_gpu(self, memory_objs: Any, starts: Any, ends: Any, **_: Any) -> None:
        """Memory objects to rows."""
        for item, start in zip(memory_objs, starts, strict=True):
            np.copyto(self.rows[start // self.chunk_tokens], np.frombuffer(item.byte_array, np.uint8))


class Driver:
    """One engine at a time; every set-up replaces it."""

    def __init__(self, chunk_tokens: int) -> None:
        torch.set_num_threads(1)
        self.chunk_tokens = chunk_tokens
        self.engine: Any = None
        self.seed = 0

    def hello(self) -> dict[str, Any]:
        """Versions."""
        versions = {"lmcache": lmcache.__version__, "torch": torch.__version__, "numpy": np.__version__}
        return {"versions": versions, "standins": STANDINS}

    # -- lookup -------------------------------------------------------------------------------------------------

    def lookup_setup(self, blocks: int, nodes: int, other: int) -> dict[str, Any]:
        """The same prompts; there is no tree, so the number of nodes makes no difference and is not laid out."""
        self._open(2 * self.chunk_tokens * 2 * 8, 1.0)
        self.tokens = prompt(nodes, blocks)
        for tokens in [self.tokens, *others(other)]:
            chunks = -(-len(tokens) // self.chunk_tokens)
            self.connector.rows = np.zeros((chunks, self.chunk_nbytes), np.uint8)
            if len(tokens) % self.chunk_tokens == 0:
                self.engine.store(tokens.tolist())
        return {"blocks": self.engine.lookup(self.tokens.tolist()) // 16}

    def lookup(self, hit: bool) -> dict[str, Any]:
        """One lookup, with a fresh list of ints, which is what LMCache is handed by vLLM."""
        self.seed += 1
        tokens = (self.tokens if hit else prompt(5_000_000 + self.seed, len(self.tokens) // 16)).tolist()
        seconds, found = timed(lambda: self.engine.lookup(tokens))
        return {"s": seconds, "blocks": found // 16}

    # -- DRAM ---------------------------------------------------------------------------------------------------

    def memory_setup(self, n: int, block_nbytes: int) -> dict[str, Any]:
        """The CPU backend with room for four prompts of n chunks, all of it touched."""
        self._open(block_nbytes, 4.2 * n * block_nbytes / 2**30)
        self._rows(n, block_nbytes)
        for _ in range(6):
            self.memory_store()
        return {}

    def memory_store(self) -> dict[str, Any]:
        """Store a new prompt."""
        self._next_prompt()
        self.connector.rows = self.blocks
        seconds, _ = timed(lambda: self.engine.store(self.tokens))
        assert self.engine.lookup(self.tokens) == len(self.tokens)
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target)}

    def memory_load(self) -> dict[str, Any]:
        """Retrieve the prompt stored last into the caller's rows."""
        return self._load()

    # -- disk ---------------------------------------------------------------------------------------------------

    def disk_setup(self, directory: str, n: int, block_nbytes: int, durable: bool) -> dict[str, Any]:
        """The local-disk backend, with memory for staging only."""
        self.directory, self.durable = directory, durable
        self._open(block_nbytes, 2.2 * n * block_nbytes / 2**30, directory)
        self._rows(n, block_nbytes)
        return {"asks_for_sync": False}

    def disk_store(self) -> dict[str, Any]:
        """Store a new prompt, up to the moment every file is written (with `durable`: the benchmark syncs each)."""
        self._forget()
        self._next_prompt()
        self.connector.rows = self.blocks

        def store() -> None:
            self.engine.store(self.tokens)
            self._wait_for_files()
            if self.durable:
                for path in Path(self.directory).iterdir():
                    sync(path)
                sync(Path(self.directory))

        seconds, _ = timed(store)
        assert self.engine.lookup(self.tokens) == len(self.tokens)
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target)}

    def disk_read(self, cold: bool) -> dict[str, Any]:
        """Retrieve the prompt stored last; nothing is kept in memory."""
        if cold:
            drop_from_page_cache(self.directory)
        return self._load()

    # -- restart and damage -------------------------------------------------------------------------------------

    def restart_open(self, directory: str, n: int, block_nbytes: int) -> dict[str, Any]:
        """Open a directory, perhaps one that another process left."""
        self.directory, self.durable = directory, False
        seconds, _ = timed(lambda: self._open(block_nbytes, 2.2 * n * block_nbytes / 2**30, directory))
        self._rows(n, block_nbytes)
        return {"s": seconds, "files_found": sum(1 for _ in Path(directory).iterdir())}

    def restart_store(self, seed: int) -> dict[str, Any]:
        """Store the prompt of that seed and wait until every file is written."""
        self.connector.rows = self._content(seed)
        self.engine.store(self._tokens(seed))
        self._wait_for_files()
        return {"stored": self.engine.lookup(self._tokens(seed)) // self.chunk_tokens, "acknowledged": False}

    def restart_close(self) -> dict[str, Any]:
        """An orderly end."""
        self._close()
        return {"closed": True}

    def restart_read(self, seed: int) -> dict[str, Any]:
        """Which chunks of that prompt are found, and which are right."""
        tokens, expected = self._tokens(seed), self._content(seed)
        hits = self.engine.lookup(tokens) // self.chunk_tokens
        self.out[:] = 0
        self.connector.rows = self.out
        mask = self.engine.retrieve(tokens).numpy()
        return {"hits": hits, **census(self.out, expected, [bool(x) for x in mask[:: self.chunk_tokens]])}

    def restart_places(self, seed: int) -> dict[str, Any]:
        """Where the chunks of that prompt lie on disk."""
        return {"places": places_in(self.directory, self._content(seed))}

    def restart_forget_memory(self) -> dict[str, Any]:
        """Nothing is kept in memory here, and a new engine would find nothing: the running one goes on."""
        return {"same_process": True}

    # -- parts --------------------------------------------------------------------------------------------------

    def _open(self, chunk_nbytes: int, memory_gib: float, directory: str | None = None) -> None:
        self._close()
        width = chunk_nbytes // (2 * self.chunk_tokens * 2)  # K and V, two bytes a value
        layers = next(layers for layers in (32, 16, 8, 4, 2, 1) if width % (layers * 8) == 0)
        shape = (layers, 2, self.chunk_tokens, 8, width // layers // 8)
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=self.chunk_tokens,
            local_cpu=directory is None,
            max_local_cpu_size=memory_gib,
            local_disk=directory,
            max_local_disk_size=0.0 if directory is None else 8.0,
            save_unfull_chunk=False,
        )
        metadata = LMCacheMetadata(NAME, 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=self.chunk_tokens)
        self.connector = HostConnector(shape, self.chunk_tokens)
        self.engine = LMCacheEngineBuilder.get_or_create(
            NAME, config, metadata, self.connector, lambda *_: None, lambda *_: None
        )
        self.engine.post_init()
        self.chunk_nbytes = chunk_nbytes

    def _close(self) -> None:
        if self.engine is not None:
            LMCacheEngineBuilder.destroy(NAME)
            self.engine = None

    def _rows(self, n: int, block_nbytes: int) -> None:
        self.blocks = payload(7, n, block_nbytes)
        self.out, self.target = np.zeros_like(self.blocks), np.zeros_like(self.blocks)

    def _content(self, seed: int) -> Any:
        return payload(seed, *self.blocks.shape)

    def _tokens(self, seed: int) -> list[int]:
        tokens: list[int] = prompt(seed, len(self.blocks) * self.chunk_tokens // 16).tolist()
        return tokens

    def _next_prompt(self) -> None:
        self.seed += 1
        self.tokens = self._tokens(self.seed)

    def _disk(self) -> Any:
        return self.engine.storage_manager.storage_backends["LocalDiskBackend"]

    def _wait_for_files(self) -> None:
        """Stores are asynchronous and tell nobody: until no write is under way."""
        worker, until = self._disk().disk_worker, time.monotonic() + WAIT_S
        while worker.put_tasks:
            if time.monotonic() > until:
                raise UnsupportedError(f"{len(worker.put_tasks)} writes not done after {WAIT_S:g} s")
            time.sleep(0.0005)

    def _forget(self) -> None:
        for key in list(self._disk().dict):
            self._disk().remove(key)

    def _load(self) -> dict[str, Any]:
        self.out[:] = 0
        self.connector.rows = self.out
        seconds, mask = timed(lambda: self.engine.retrieve(self.tokens))
        counted = census(self.out, self.blocks, [bool(x) for x in mask.numpy()[:: self.chunk_tokens]])
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target), **counted}


if __name__ == "__main__":
    serve(lambda: Driver(int(sys.argv[1])))
