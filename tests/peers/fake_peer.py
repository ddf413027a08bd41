"""A peer for the tests of the benchmark: fake_peer.py MODE. A file a block, nothing verified.

MODE: "honest", or what goes wrong: "wrong" (another byte comes back), "raises", "dies", "hangs", "stillborn".
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from protocol import UnsupportedError, serve
from workload import census, memcpy_s, payload, places_in, timed


class Driver:
    def __init__(self, mode: str) -> None:
        self.mode = mode
        if mode == "stillborn":
            sys.exit("cannot be imported here")

    def hello(self) -> dict[str, Any]:
        print("what a library prints does not disturb the answers")
        return {"versions": {"fake": "1.0"}}

    def lookup_setup(self, blocks: int, nodes: int, other: int) -> dict[str, Any]:
        if nodes > 1 and self.mode == "raises":
            raise ValueError("only one node")
        self.n = blocks
        return {"blocks": blocks}

    def lookup(self, hit: bool) -> dict[str, Any]:
        if self.mode == "dies":
            os._exit(3)
        if self.mode == "hangs":
            time.sleep(60)
        seconds, _ = timed(lambda: time.sleep(0.001))
        return {"s": seconds, "blocks": self.n if hit else 0}

    def memory_setup(self, n: int, block_nbytes: int) -> dict[str, Any]:
        raise UnsupportedError("keeps nothing in memory")

    def disk_setup(self, directory: str, n: int, block_nbytes: int, durable: bool) -> dict[str, Any]:
        self.restart_open(directory, n, block_nbytes)
        return {}

    def disk_store(self) -> dict[str, Any]:
        seconds, _ = timed(lambda: self.restart_store(7))
        return {"s": seconds, "memcpy_s": memcpy_s(self.rows(7), self.out)}

    def disk_read(self, cold: bool) -> dict[str, Any]:
        seconds, found = timed(lambda: self.restart_read(7))
        return {**found, "s": seconds, "memcpy_s": memcpy_s(self.rows(7), self.out)}

    def restart_open(self, directory: str, n: int, block_nbytes: int) -> dict[str, Any]:
        self.directory, self.n, self.nbytes = Path(directory), n, block_nbytes
        self.out = np.zeros((n, block_nbytes), np.uint8)
        return {"s": 0.001, "files_found": len(list(self.directory.iterdir()))}

    def restart_store(self, seed: int) -> dict[str, Any]:
        for i, row in enumerate(self.rows(seed)):
            row.tofile(self.directory / f"{seed}-{i}")
        return {"stored": self.n, "acknowledged": True}

    def restart_read(self, seed: int) -> dict[str, Any]:
        self.out[:] = 0
        files = [self.directory / f"{seed}-{i}" for i in range(self.n)]
        loaded = [path.exists() and path.stat().st_size == self.nbytes for path in files]
        for row, path, there in zip(self.out, files, loaded, strict=True):
            if there:
                row[:] = np.fromfile(path, np.uint8)
        if self.mode == "wrong":
            self.out[0, 0] ^= 1
        return {"hits": sum(loaded), **census(self.out, self.rows(seed), loaded)}

    def restart_close(self) -> dict[str, Any]:
        return {}

    def restart_places(self, seed: int) -> dict[str, Any]:
        return {"places": places_in(str(self.directory), self.rows(seed))}

    def restart_forget_memory(self) -> dict[str, Any]:
        return {}

    def rows(self, seed: int) -> Any:
        return payload(seed, self.n, self.nbytes)


if __name__ == "__main__":
    serve(lambda: Driver(sys.argv[1]))
