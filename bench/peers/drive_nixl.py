"""NIXL's POSIX plugin, driven by the benchmark: drive_nixl.py buffered|direct

NIXL moves bytes between registered memory and files; it keeps no index and names no block. One preallocated file holds
a slot a block; lists of descriptors are prepared once, and each transfer picks all of them.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from nixl_cu13._api import nixl_agent, nixl_agent_config
from protocol import UnsupportedError, serve
from workload import census, drop_from_page_cache, memcpy_s, payload, timed

WAIT_S = 60.0
NAME = "bench"


class Driver:
    """One file at a time."""

    def __init__(self, mode: str) -> None:
        self.flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if mode == "direct" else 0)
        self.agent = nixl_agent(NAME, nixl_agent_config(backends=[]))
        self.agent.create_backend("POSIX")
        self.held: list[Any] = []
        self.fd = -1

    def hello(self) -> dict[str, Any]:
        """Versions."""
        return {"versions": {"nixl-cu13": version("nixl-cu13"), "numpy": np.__version__}}

    def disk_setup(self, directory: str, n: int, block_nbytes: int, durable: bool) -> dict[str, Any]:
        """A preallocated file, the caller's rows registered."""
        self.directory, self.durable = directory, durable
        if self.fd >= 0:
            self._release()
        memory = np.frombuffer(mmap.mmap(-1, 2 * n * block_nbytes), np.uint8).reshape(2 * n, block_nbytes)
        self.blocks, self.out = memory[:n], memory[n:]
        np.copyto(self.blocks, payload(7, n, block_nbytes))
        self.target = np.zeros_like(self.blocks)
        self.fd = os.open(Path(directory) / "slots", self.flags, 0o600)
        os.posix_fallocate(self.fd, 0, n * block_nbytes)
        self.held = [
            self.agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM", backends=["POSIX"]),
            self.agent.register_memory([(0, n * block_nbytes, self.fd, "slots")], "FILE", backends=["POSIX"]),
        ]
        self.sources = self._descriptors("NIXL_INIT_AGENT", self.blocks.ctypes.data, 0, "DRAM")
        self.targets = self._descriptors("NIXL_INIT_AGENT", self.out.ctypes.data, 0, "DRAM")
        self.slots = self._descriptors(NAME, 0, self.fd, "FILE")
        self.order = np.random.default_rng(1).permutation(n).astype(np.int32)
        return {"asks_for_sync": False}

    def disk_store(self) -> dict[str, Any]:
        """Write all blocks into their slots (with `durable`: the benchmark then syncs the file)."""

        def store() -> None:
            self._transfer("WRITE", self.sources)
            if self.durable:
                os.fdatasync(self.fd)

        seconds, _ = timed(store)
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target)}

    def disk_read(self, cold: bool) -> dict[str, Any]:
        """Read all blocks into the caller's rows."""
        if cold:
            drop_from_page_cache(self.directory)
        self.out[:] = 0
        seconds, _ = timed(lambda: self._transfer("READ", self.targets))
        counted = census(self.out, self.blocks, [True] * len(self.blocks))
        return {"s": seconds, "memcpy_s": memcpy_s(self.blocks, self.target), **counted}

    def restart_open(self, **_: Any) -> dict[str, Any]:
        """NIXL has no notion of what a file holds."""
        raise UnsupportedError("keeps no index: what a file holds is the caller's business")

    # -- parts --------------------------------------------------------------------------------------------------

    def _descriptors(self, agent: str, base: int, device: int, kind: str) -> Any:
        n, nbytes = self.blocks.shape
        rows = np.array([(base + i * nbytes, nbytes, device) for i in range(n)], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(agent, rows, kind, backends=["POSIX"])

    def _transfer(self, verb: str, memory: Any) -> None:
        """Slots in an order that is not that of the file, as a cache's are."""
        slots, until = self.order, time.monotonic() + WAIT_S
        rows = np.arange(len(slots), dtype=np.int32)
        handle = self.agent.make_prepped_xfer(verb, memory, rows, self.slots, slots, backends=["POSIX"])
        state = self.agent.transfer(handle)
        while state == "PROC" and time.monotonic() < until:
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(f"transfer ended as {state}")

    def _release(self) -> None:
        for handle in (self.sources, self.targets, self.slots):
            self.agent.release_dlist_handle(handle)
        for registered in self.held:
            self.agent.deregister_memory(registered, backends=["POSIX"])
        os.close(self.fd)
        self.fd = -1


if __name__ == "__main__":
    serve(lambda: Driver(sys.argv[1]))
