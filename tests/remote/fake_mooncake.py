"""What stands in for the module `mooncake.store`: a dict, codes that are told, and calls that wait."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable


class ReplicateConfig:
    replica_num = 1


class FakeLibrary:
    """`MooncakeDistributedStore()` opens a client of the one store; each client of it is in `clients`."""

    ReplicateConfig = ReplicateConfig

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.codes: dict[str, int] = {}
        """Name -> what every operation but exist says of it."""
        self.says: dict[str, int] = {}
        """Operation -> what it says of every key."""
        self.setup_says = 0
        self.before: Callable[[str], None] = lambda _: None
        """Called with the operation before each."""
        self.clients: list[FakeStore] = []

    def MooncakeDistributedStore(self) -> FakeStore:  # noqa: N802 - Mooncake's name
        self.clients.append(FakeStore(self))
        return self.clients[-1]


class FakeStore:
    def __init__(self, library: FakeLibrary) -> None:
        self._library = library
        self._lock = threading.Lock()
        self.setup_with: tuple[object, ...] = ()
        self.running = 0
        self.closed = 0
        self.crashes: list[str] = []
        self.registered: dict[int, int] = {}
        self.batches: list[tuple[str, int]] = []
        self.shared: list[ctypes.Array[ctypes.c_char]] = []
        self.sizes_asked = 0

    def setup(self, *arguments: object) -> int:
        self._library.before("setup")
        self.setup_with = arguments
        return self._library.setup_says

    def close(self) -> int:
        if self.running or self.closed:
            self.crashes.append(f"closed {self.closed} times before, {self.running} calls running")
        self.closed += 1
        for each in self.shared:  # as good as unmapped
            ctypes.memset(each, 0xEE, len(each))
        return 0

    def setup_dummy(self, *arguments: object) -> int:
        return self.setup(*arguments)

    def alloc_from_mem_pool(self, nbytes: int) -> int:
        self.shared.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(self.shared[-1])

    def register_buffer(self, address: int, nbytes: int) -> int:
        if self._library.says.get("register"):
            return self._library.says["register"]
        self.registered[address] = nbytes
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0 if self.registered.pop(address, None) else -600

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return self._each("exist", names, lambda name, _: int(name in self._library.values))

    def batch_get_into(self, names: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        def get(name: str, i: int) -> int:
            value = self._library.values.get(name)
            if value is None:
                return -704
            if len(value) > sizes[i]:
                return -600
            ctypes.memmove(addresses[i], value, len(value))
            return len(value)

        return self._each("get", names, get)

    def batch_put_from(self, names: list[str], addresses: list[int], sizes: list[int], config: object) -> list[int]:
        def put(name: str, i: int) -> int:
            self._library.values.setdefault(name, ctypes.string_at(addresses[i], sizes[i]))
            return 0

        return self._each("put", names, put)

    def batch_remove(self, names: list[str], force: bool) -> list[int]:
        return self._each("remove", names, lambda name, _: 0 if self._library.values.pop(name, None) else -704)

    def get_size(self, name: str) -> int:
        if self.closed:
            self.crashes.append("get_size after close")
        self._library.before("size")
        self.sizes_asked += 1
        if "size" in self._library.says:
            return self._library.says["size"]
        value = self._library.values.get(name)
        return -704 if value is None else len(value)

    def _each(self, op: str, names: list[str], what: Callable[[str, int], int]) -> list[int]:
        with self._lock:
            if self.closed:
                self.crashes.append(f"{op} after close")
            self.running += 1
            self.batches.append((op, len(names)))
        try:
            self._library.before(op)
            said = self._library.says.get(op)
            if said is not None:
                return [said] * len(names)
            codes = self._library.codes if op != "exist" else {}
            return [codes.get(name, what(name, i) if name not in codes else 0) for i, name in enumerate(names)]
        finally:
            with self._lock:
                self.running -= 1
