"""The life of a cache: how it is opened and built, its switches, what is seen of it, and how it ends."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from tiercache.assembly import (
    Seams,
    Stack,
    build_stack,
    check_devices,
    known_layout,
    nvme_of,
    obtaining,
)
from tiercache.cache_remote import RemoteSwitch
from tiercache.config import Settings, Switch, ram_nbytes
from tiercache.config_memory import check_memory
from tiercache.config_remote import remote_enabled
from tiercache.delivery import Delivery
from tiercache.directory import StoreDirectory
from tiercache.ending import end_writes, flush, stop
from tiercache.errors import CacheClosedError, ConfigError, NotDurableError
from tiercache.layout import KVLayout
from tiercache.lifetime import forget_forks, watch_forks
from tiercache.link import Link
from tiercache.prefill import Prefill
from tiercache.stats import CacheStats, collect

__all__ = ["CacheLife"]

_log = logging.getLogger("tiercache")


class CacheLife:
    """What a `TieredKVCache` is from its start to its end; the verbs of an engine are there."""

    def _start(self, settings: Settings, clock: Callable[[], float], delivery: Delivery, seams: Seams) -> None:
        check_memory(ram_nbytes(settings.tiers))
        nvme = nvme_of(settings)
        if nvme is not None and len(settings.tiers) == 1:
            raise ConfigError("tiers", [str(nvme.path)], "add a tier in memory above NVMe, such as dram:8GiB")
        check_devices(settings.tiers)
        self.settings = settings
        self._seams = seams
        self._link = Link(clock, delivery)
        self._building = threading.Lock()
        self._switch: Switch = settings.switch
        self._remote = RemoteSwitch(settings.remote is not None, remote_enabled(), self._switch_remote)
        self._prefill = Prefill(settings.prefill_tokens_per_s)
        self._directory: StoreDirectory | None = None
        with obtaining(settings), ExitStack() as undo:
            if nvme is not None:
                self._directory = StoreDirectory.open(nvme.directory)
                undo.callback(self._directory.close)
            layout, self._epoch = known_layout(settings, self._directory)
            if layout is not None:
                self._link.stack = self._build(layout)
            undo.pop_all()
        self._switch_remote()  # with it goes what the start has to say to the mover
        if nvme is not None and settings.namespace is None:
            _log.warning("%s: no namespace: use this directory for one model only", nvme.path)
        watch_forks(self)

    def _learn(self, layout: KVLayout) -> Stack:
        """Build everything for blocks of this layout, unless another first store was faster."""
        with self._building:
            if self._link.stack is None:
                self._link.check_open()
                with obtaining(self.settings):
                    stack = self._build(layout)
                with self._link.lock:
                    self._link.stack = stack
                self._switch_remote()
            return self._link.stack

    def _build(self, layout: KVLayout) -> Stack:
        arrived = self._link.delivery.arrived
        return build_stack(self.settings, layout, self._epoch, self._directory, arrived, self._seams)

    def _sync_or_raise(self, stack: Stack, timeout: float, what: str) -> None:
        if not stack.mover.sync(timeout):
            raise NotDurableError(f"{what}: not durable after {timeout:g} s; retry it, or look at stats()")

    # -- switches -----------------------------------------------------------------------------------------------

    @property
    def switch(self) -> Switch:
        """The kill switch; assign "on", "off", "loads-off" or "stores-off" at run time."""
        return self._switch

    @switch.setter
    def switch(self, value: Switch) -> None:
        if value not in ("on", "off", "loads-off", "stores-off"):
            raise ConfigError("switch", value, "one of on, off, loads-off, stores-off is needed")
        self._switch = value
        if self.settings.remote is not None:
            self._switch_remote()

    @property
    def remote(self) -> RemoteSwitch:
        """The kill switch of the key tier."""
        return self._remote

    def _switch_remote(self) -> None:
        """Tell the planner whether the key tier takes part, and is written to."""
        with self._link.planning() as stack:
            if stack is None or self.settings.remote is None:
                return
            ended = stack.planner.switch_remote(self._remote.enabled, self.stores_enabled, self._link.clock())
            finished = self._link.finish(ended)
        for each in finished:
            self._link.complete(*each)

    @property
    def loads_enabled(self) -> bool:
        """Lookups and loads find what is there."""
        return self._switch in ("on", "stores-off")

    @property
    def stores_enabled(self) -> bool:
        """Stores are taken."""
        return self._switch in ("on", "loads-off")

    # -- looking inside -----------------------------------------------------------------------------------------

    @property
    def layout(self) -> KVLayout | None:
        """Shape and dtype of a block; None until it is known."""
        return self._link.stack.layout if self._link.stack is not None else None

    @property
    def epoch(self) -> bytes:
        """Which weights the cached blocks belong to."""
        return self._epoch

    @property
    def stack(self) -> Stack | None:
        """Planner, mover and tiers below this API, for replay and tests; None until the layout is known.

        To be called only by one who knows that nothing else uses the cache meanwhile: it takes no lock.
        """
        return self._link.stack

    def stats(self) -> CacheStats:
        """A snapshot of everything counted."""
        self._link.check_open()
        with self._link.lock:
            return collect(self.settings, self._switch, self._link.stack, self._directory)

    def check(self, fix: bool = False) -> list[str]:
        """Verify every internal rule; returns what is broken, in words (empty: all is well). O(everything cached).

        With `fix`, blocks whose only copy was found wrong are dropped, with all that continues them.
        """
        with self._link.planning() as stack:
            if stack is None:
                return []
            if fix:
                stack.planner.drop_bad(self._link.clock())
            return stack.planner.check()

    # -- ending -------------------------------------------------------------------------------------------------

    def flush(self, timeout: float | None = None, to: str | None = None) -> bool:
        """Wait for the copies in flight. With `to="nvme"`, also write what lives only above, and commit it.

        True when all that was there at the call is where it was asked to be; False at the timeout, or where blocks
        could not be written (stats say why). Partial blocks are never written. WorkerThreadError on own threads.
        """
        self._link.refuse_worker("flush")
        if to is not None and (to != "nvme" or nvme_of(self.settings) is None):
            raise ConfigError("to", to, 'only "nvme" persists, and these tiers must have it')
        return flush(self._link, timeout, to)

    def close(self, timeout: float = 30.0) -> bool:
        """Write what lives only in memory to NVMe, most reusable first, then stop; at most `timeout` seconds.

        True when everything is on NVMe (or nothing persists) and nothing was lost. A second call does nothing. What
        waits to be written to a key tier gets half a second, where that much is left, and is dropped then. Futures
        still open end with what they have. Loaded blocks stay readable until they are released.
        """
        began = time.monotonic()
        persists = nvme_of(self.settings) is not None
        try:
            self._link.refuse_worker("close")
            complete = self.flush(timeout * 0.8, to="nvme" if persists and self.stores_enabled else None)
        except CacheClosedError:  # before, or by another thread meanwhile; or in the parent of this process
            return True
        end_writes(self._link, timeout - (time.monotonic() - began))
        with self._building:
            if not self._link.shut():
                return True
        complete = stop(self._link, self._directory, timeout - (time.monotonic() - began)) and complete
        forget_forks(self)
        return complete

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        tiers = ", ".join(type(tier).__name__ for tier in (*self.settings.tiers, self.settings.remote) if tier)
        known = "open" if self._link.stack is not None else "open, layout not known yet"
        state = "closed" if self._link.closed else known
        return f"TieredKVCache({tiers}; {state})"

    def abandon(self) -> None:
        """In a forked child: close lock and data descriptors, touch neither memory nor catalog."""
        self._link.abandon()
        if self._directory is not None:
            self._directory.abandon()
