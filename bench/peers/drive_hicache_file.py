"""SGLang's HiCacheFile storage (a file a page), driven by the benchmark. A page is one block here."""

from __future__ import annotations

import hashlib
import importlib
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from protocol import serve
from standins import sglang_without_gpu
from workload import census, drop_from_page_cache, memcpy_s, payload, places_in, prompt, sync, timed

warnings.simplefilter("ignore")
STANDINS = sglang_without_gpu()

from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig

# The first store that is made imports this; it is no part of opening.
importlib.import_module("sglang.srt.mem_cache.storage.file.lru_file_evictor")


class Driver:
    """One store at a time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.seed = 0

    def hello(self) -> dict[str, Any]:
        """Versions."""
        versions = {"sglang": version("sglang"), "torch": torch.__version__, "numpy": np.__version__}
        return {"versions": versions, "standins": STANDINS}

    def disk_setup(self, directory: str, n: int, block_nbytes: int, durable: bool) -> dict[str, Any]:
        """An empty directory of page files."""
        self.durable = durable
        self._rows(n, block_nbytes)
        self._open(directory)
        return {"asks_for_sync": False}

    def disk_store(self) -> dict[str, Any]:
        """Write a new prompt's pages (with `durable`: the benchmark then syncs each file and the directory)."""
        self.store.clear()
        self.seed += 1

        def store() -> bool:
            done = self._store(self.seed, self.blocks)
            if self.durable:
                for path in [*Path(self.directory).iterdir(), Path(self.directory)]:
                    sync(path)
            return done

        seconds, done = timed(store)
        assert done
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target)}

    def disk_read(self, cold: bool) -> dict[str, Any]:
        """Read the pages stored last into the caller's rows."""
        if cold:
            drop_from_page_cache(self.directory)
        self.out[:] = 0
        seconds, loaded = timed(lambda: self._read(self.seed))
        return {
            "s": seconds,
            "memcpy_s": memcpy_s(self.blocks, self.target),
            **census(self.out, self.blocks, loaded),
        }

    def restart_open(self, directory: str, n: int, block_nbytes: int) -> dict[str, Any]:
        """Open a directory, perhaps one that another process left."""
        self.durable = False
        self._rows(n, block_nbytes)
        seconds, _ = timed(lambda: self._open(directory))
        return {"s": seconds, "files_found": sum(1 for _ in Path(directory).iterdir())}

    def restart_store(self, seed: int) -> dict[str, Any]:
        """Write the pages of that seed."""
        self._store(seed, self._content(seed))
        return {"stored": self._hits(seed), "acknowledged": False}

    def restart_close(self) -> dict[str, Any]:
        """There is nothing to close."""
        return {"closed": True}

    def restart_read(self, seed: int) -> dict[str, Any]:
        """Which pages of that seed are found, and which are right."""
        self.out[:] = 0
        loaded = self._read(seed)
        return {"hits": self._hits(seed), **census(self.out, self._content(seed), loaded)}

    def restart_places(self, seed: int) -> dict[str, Any]:
        """Where the pages of that seed lie on disk."""
        return {"places": places_in(self.directory, self._content(seed))}

    def restart_forget_memory(self) -> dict[str, Any]:
        """Nothing is kept in memory."""
        return {}

    # -- parts --------------------------------------------------------------------------------------------------

    def _open(self, directory: str) -> None:
        self.directory = directory
        config = HiCacheStorageConfig(
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="bench",
        )
        self.store = HiCacheFile(config, directory)

    def _rows(self, n: int, block_nbytes: int) -> None:
        self.blocks = payload(7, n, block_nbytes)
        self.out, self.target = np.zeros_like(self.blocks), np.zeros_like(self.blocks)

    def _content(self, seed: int) -> Any:
        return payload(seed, *self.blocks.shape)

    def _keys(self, seed: int) -> list[str]:
        """Chained SHA-256, as HiCache names its pages; not timed."""
        chain, keys = b"", []
        for symbol in prompt(seed, len(self.blocks)).reshape(len(self.blocks), -1):
            chain = hashlib.sha256(chain + symbol.tobytes()).digest()
            keys.append(chain.hex())
        return keys

    def _store(self, seed: int, blocks: Any) -> bool:
        return bool(self.store.batch_set(self._keys(seed), list(torch.from_numpy(blocks))))

    def _read(self, seed: int) -> list[bool]:
        """A page whose read raises, as a short file's does, counts as a miss."""
        loaded = []
        for key, row in zip(self._keys(seed), torch.from_numpy(self.out), strict=True):
            try:
                loaded.append(self.store.get(key, row) is not None)
            except OSError:
                loaded.append(False)
        return loaded

    def _hits(self, seed: int) -> int:
        return int(self.store.batch_exists(self._keys(seed)))


if __name__ == "__main__":
    serve(Driver)
