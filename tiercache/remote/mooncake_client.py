"""A process's one client of a Mooncake Store: opened by the call that needs it, never closed under a call.

What Mooncake's client does and does not, all seen with 0.3.13: it connects again by itself when its master returns. Its
calls release the GIL and may run on several threads, all but its opening and its closing (`mooncake_rehearsal`; a close
takes a second or two). A call after or during its close ends the process, a call in a
forked child hangs, and a thread inside a call when the interpreter ends aborts it. Opening one where no master answers
takes 90 s. Closing one whose masters etcd elects takes up to 30 s. A transfer that it gave up after 60 s may still
write to its destination. All of that is kept from happening here.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import ConfigError
from tiercache.remote.mooncake_options import MooncakeOptions, split_address
from tiercache.remote.mooncake_rehearsal import rehearse

__all__ = ["MooncakeClient", "load_library"]

_log = logging.getLogger("tiercache")

_ENVIRONMENT = {
    "MC_TCP_STATUS_TIMEOUT_SEC": "1",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "1",
    "MC_RPC_TIMEOUT_MS": "3000",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "GLOG_minloglevel": "3",
}
"""Unless they are set. A transfer without progress is given up, its connection closed, after 1 s: Mooncake's own 30 let
it run into the limit of 60, and a transfer that ran into that may write later. A master that hangs is given up after
3 s instead of 60. Mooncake logs several lines per key that fails: none, for what fails is counted here."""
_SHARED_NBYTES = 80 << 20
"""Of memory shared with a client in another process: room for four bounce buffers."""
_PROBE_S = 1.0
"""For the connection that shows whether a master answers."""
_ATTENDED_S = 3.0
"""How long a call waits for another that connects, within its deadline."""
_FIRST_BACKOFF_S = 0.1
_LONGEST_BACKOFF_S = 5.0
_CLOSE_S = 1.0
"""How long `close` waits for calls that run."""
_EXIT_S = 6.0
"""How long the end of the interpreter does; a call that asks a dead master takes 4.5 s."""

_open: weakref.WeakSet[MooncakeClient] = weakref.WeakSet()


def load_library() -> Any:
    """The module `mooncake.store`. ConfigError where it is not there, or cannot be loaded."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store")
    except ModuleNotFoundError:
        remedy = "Mooncake is not installed: pip install tiercache[mooncake]"
        raise ConfigError("tiers", "mooncake://", remedy) from None
    except ImportError as error:
        remedy = f"Mooncake cannot be loaded ({error}): it needs libibverbs1, libnuma1 and libcurl4 (Debian's names)"
        raise ConfigError("tiers", "mooncake://", remedy) from error


class MooncakeClient:
    """See the module. Safe to call from several threads. `library`: `mooncake.store`, or what stands in for it.
    `rehearse(settings)` raises OSError where a client should not be opened with these now."""

    def __init__(
        self, options: MooncakeOptions, library: Any, rehearse: Callable[[Sequence[Any]], None] = rehearse
    ) -> None:
        self.options = options
        self._rehearse = rehearse
        self.setups = 0
        """How often a client was opened."""
        self.failed_setups = 0
        self.left_open = 0
        """Closes that did not wait for the calls that ran; the last of these closes the client."""
        self._library = library
        self._store: Any = None
        self._pid = os.getpid()
        self._state = threading.Condition()
        self._running = 0
        self._idle = 0  # of these: wait for the client to be closed, do nothing with it
        self._connecting = self._draining = self._closed = False
        self._next_try = 0.0
        self._backoff_s = _FIRST_BACKOFF_S
        self._why = ""
        self._memory: list[NDArray[np.uint8]] = []
        self._ranges: tuple[tuple[int, int], ...] = ()
        _open.add(self)

    @contextmanager
    def using(self, deadline_s: float) -> Iterator[Any]:
        """The open client, for calls that end within the block. OSError where there is none now."""
        if os.getpid() != self._pid:
            raise OSError("a Mooncake client does not live in a forked child")
        store = self._enter(min(deadline_s, _ATTENDED_S))
        try:
            yield self._connect(deadline_s) if store is None else store
        finally:
            self._leave()

    def register(self, memory: NDArray[np.uint8]) -> None:
        """Values may be got into and put from this memory without a copy, until `unregister`. Keeps it alive. OSError
        where Mooncake refuses it."""
        if os.getpid() != self._pid:
            raise OSError("a Mooncake client does not live in a forked child")
        if self.options.client:
            raise OSError("a client in another process reads and writes its shared memory only")
        with self._state:
            if any(_range(each) == _range(memory) for each in self._memory):
                return
            if self._store is not None and not _register(self._store, memory):
                raise OSError(f"Mooncake does not take {memory.nbytes} bytes of memory for itself")
            self._memory.append(memory)
            if self._store is not None:
                self._ranges = (*self._ranges, _range(memory))

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """No call will name this memory again; nothing where it was not registered."""
        if os.getpid() != self._pid:
            return
        with self._state:
            kept = [each for each in self._memory if _range(each) != _range(memory)]
            if len(kept) == len(self._memory):
                return
            self._memory = kept
            if _range(memory) in self._ranges:
                self._ranges = tuple(each for each in self._ranges if each != _range(memory))
                if self._store is not None:
                    self._store.unregister_buffer(_range(memory)[0])

    def bounce(self, nbytes: int) -> NDArray[np.uint8]:
        """New memory for `register`ed use, to be called within `using`: our own, or of the memory that is shared with a
        client in another process, which goes when ours is closed (`setups` tells). OSError where there is none."""
        store = self._store
        if self.options.client:
            address = store.alloc_from_mem_pool(nbytes)
            if not address or store.register_buffer(address, nbytes):
                raise OSError(f"no {nbytes} bytes of shared memory are left")
            memory = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))
            with self._state:
                self._ranges = (*self._ranges, _range(memory))
            return memory
        try:
            memory = np.empty(nbytes, dtype=np.uint8)
        except MemoryError as error:
            raise OSError("no memory for a bounce buffer") from error
        with suppress(OSError):  # over TCP it works without
            self.register(memory)
        return memory

    def covers(self, low: int, high: int) -> bool:
        """Whether the bytes at these addresses lie in registered memory."""
        return any(first <= low and high <= last for first, last in self._ranges)

    def reopen(self) -> None:
        """Close the client, so that nothing of a transfer that it gave up can arrive any more; the next call opens
        another. To be called within `using`, and nothing of it used afterwards. Returns when it is closed, which waits
        for all other calls; they are refused meanwhile."""
        with self._state:
            self._draining = True
            self._idle += 1
            self._state.notify_all()
            self._state.wait_for(lambda: not self._draining or self._idle == self._running)
            store = self._taken()
        try:
            if store is not None:
                store.close()
        finally:
            with self._state:
                if store is not None:
                    self._draining = False
                    self._state.notify_all()
                self._state.wait_for(lambda: not self._draining)
                self._idle -= 1

    def close(self, within_s: float = _CLOSE_S) -> None:
        """No further call. Waits a moment for those that run; where they do not end, the last of them closes the
        client when it does."""
        if os.getpid() != self._pid:
            return
        with self._state:
            self._closed = True
            if not self._state.wait_for(lambda: not self._running, within_s):
                self.left_open += 1
                _log.warning("Mooncake at %s: closed under %d calls", self.options.endpoint, self._running)
                return
            store = self._taken()
        _open.discard(self)
        if store is not None:
            self._end(store)

    def _enter(self, within_s: float) -> Any:
        with self._state:
            self._state.wait_for(lambda: not self._connecting, within_s)
            if self._closed:
                raise OSError("the Mooncake client is closed")
            if self._draining:
                raise OSError("the Mooncake client is being opened anew")
            if self._store is None:
                if self._connecting:
                    raise OSError(f"Mooncake at {self.options.endpoint} is being connected to")
                if time.monotonic() < self._next_try:
                    raise OSError(f"Mooncake at {self.options.endpoint}: {self._why}; tried again in a moment")
                self._connecting = True
            self._running += 1
            return self._store

    def _leave(self) -> None:
        with self._state:
            self._running -= 1
            store = self._taken() if self._closed and not self._running else None
            self._state.notify_all()
        if store is not None:
            self._end(store)

    def _connect(self, deadline_s: float) -> Any:
        """One thread at a time; the others get an OSError when it takes long."""
        store = None
        try:
            store = self._open(deadline_s)
        except OSError as error:
            self._why = str(error)
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # what the library's own exceptions become
            self._why = f"Mooncake's setup raised {type(error).__name__}: {error}"
            raise OSError(f"Mooncake at {self.options.endpoint}: {self._why}") from error
        finally:
            with self._state:
                self._connecting = False
                self._state.notify_all()
                if store is None:
                    self.failed_setups += 1
                    self._next_try = time.monotonic() + self._backoff_s
                    self._backoff_s = min(_LONGEST_BACKOFF_S, self._backoff_s * 2)
                else:
                    self.setups += 1
                    self._backoff_s = _FIRST_BACKOFF_S
                    self._store = store
                    self._ranges = tuple(_range(each) for each in self._memory if _register(store, each))
        return store

    def _open(self, deadline_s: float) -> Any:
        options = self.options
        asked = (options.client,) if options.client else options.masters
        local = _answers(asked, min(_PROBE_S, deadline_s))
        settings: tuple[Any, ...] = (
            options.local or local,
            options.metadata,
            options.segment_nbytes,
            options.buffer_nbytes,
            options.protocol,
            options.device,
            options.master_address,
        )
        if options.client:
            settings = (max(_SHARED_NBYTES, options.buffer_nbytes), options.buffer_nbytes, options.client)
        self._rehearse(settings)
        if self._closed:  # meanwhile: nobody would use it, and its opening and closing hold up the process
            raise OSError("the Mooncake client is closed")
        store = self._library.MooncakeDistributedStore()
        code = store.setup_dummy(*settings) if options.client else store.setup(*settings)
        if code:
            raise OSError(f"Mooncake's setup at {options.endpoint} said {code}")
        return store

    def _taken(self) -> Any:
        """The open client, now the caller's to close: no call runs. With the lock held."""
        store, self._store, self._ranges = self._store, None, ()
        return store

    def _end(self, store: Any) -> None:
        """Close it. One that has its masters elected would wait until its watch of the leader ends by itself, up to
        30 s, and keep the GIL: that one is left open, without memory of ours, until the process ends."""
        if not self.options.ha or self.options.client:
            store.close()
            return
        with self._state:
            memory, self._memory = self._memory, []
        for each in memory:
            store.unregister_buffer(_range(each)[0])
        _left.append(store)

    def _abandon(self) -> None:
        """In a forked child: never touch it, not even to destroy it."""
        _inherited.append(self._store)


def _answers(addresses: tuple[str, ...], within_s: float) -> str:
    """Connect to the first of these that answers, and hang up. Our own address towards it. OSError where none does."""
    trouble: OSError | None = None
    for address in addresses:
        try:
            with socket.create_connection(split_address(address), max(0.05, within_s)) as probe:
                return str(probe.getsockname()[0])
        except OSError as error:
            trouble = error
    raise OSError(f"{', '.join(addresses)} does not answer: {trouble}")


def _range(memory: NDArray[np.uint8]) -> tuple[int, int]:
    return memory.ctypes.data, memory.ctypes.data + memory.nbytes


def _register(store: Any, memory: NDArray[np.uint8]) -> bool:
    return memory.nbytes > 0 and store.register_buffer(memory.ctypes.data, memory.nbytes) == 0


_inherited: list[Any] = []
_left: list[Any] = []
"""Open clients that nobody uses any more."""


def _after_fork_in_child() -> None:
    for client in list(_open):
        client._abandon()


def _at_exit() -> None:
    """A thread that is inside a call when the interpreter ends would abort the process: wait for it."""
    until = time.monotonic() + _EXIT_S
    for client in list(_open):
        with suppress(RuntimeError):
            client.close(max(0.0, until - time.monotonic()))


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
