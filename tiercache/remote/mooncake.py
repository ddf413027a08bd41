"""A key tier on Mooncake Store: `batch_is_exist`, `batch_get_into`, `batch_put_from`, `batch_remove`.

Names in the store are `tcblock1/<64 hex digits>`. A key that is there keeps its value when it is put again: keys are
content addresses, putting over would send every byte once more, and who reads meanwhile would get parts of both. So a
value of another width than asked for is removed when it is met, and the next put heals it.

Rows in registered memory are read and written in place; others go through bounce buffers of the tier's own.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np

from tiercache.remote.base import Values
from tiercache.remote.carried import Carried, count_bytes
from tiercache.remote.frame import FORMAT
from tiercache.remote.mooncake_bounce import BOUNCE_NBYTES, Bounces
from tiercache.remote.mooncake_client import MooncakeClient, load_library
from tiercache.remote.mooncake_codes import (
    COUNTS,
    INVALID,
    MISSING,
    NO_MASTER,
    NO_ROOM,
    NOT_TRIED,
    TIMED_OUT,
    TRANSFER_FAILED,
    Codes,
    is_trouble,
    said,
)
from tiercache.remote.mooncake_metrics import asked_share
from tiercache.remote.mooncake_options import MooncakeOptions
from tiercache.remote.mooncake_rehearsal import rehearse
from tiercache.types import Bools

__all__ = ["MooncakeOptions", "MooncakeTier"]

_PREFIX = FORMAT.decode() + "/"
_FIND_KEYS = 8192
"""Keys of one call."""
_BATCH_KEYS = 64
"""Values of one call, as many as a job has. To an owner that hangs a call takes 0.4 s a value: with twice as many it
would run into Mooncake's limit of 60 s."""
_HOPELESS = (TRANSFER_FAILED, NO_MASTER, TIMED_OUT)
"""Where a whole batch says so, the next would only take as long."""
_FIRST_PAUSE_S = 0.01
_LONGEST_PAUSE_S = 0.1
_LONGEST_RETRY_S = 1.0
"""For room in a full store, however long the deadline."""
_MEASURE_EVERY_S = 5.0
_LEAST_MEASURED = 1 << 16
_PRESSURE_S = 1.0
_CONNECT_S = 5.0


class MooncakeTier:
    """See the module, and `MooncakeOptions`. Connects in the first call that needs it. Safe to call from several
    threads. ConfigError where Mooncake cannot be loaded. `library`: what stands in for the module `mooncake.store`;
    `rehearse`: for opening it in another process first."""

    def __init__(
        self, options: MooncakeOptions, library: Any = None, rehearse: Callable[[Sequence[Any]], None] = rehearse
    ) -> None:
        self.options = options
        self.endpoint = options.endpoint
        self.name = f"mooncake {options.endpoint}"
        self.counts: Counter[str] = Counter()
        """Of values: `in_place`, `bounced`, `other_width`, `healed`, and those of `mooncake_codes.COUNTS`; `retries` of
        a put without room; `reopened` clients."""
        self._counting = threading.Lock()
        self.unsettled_s = 50.0
        """A transfer that failed after so long ran into Mooncake's limit of 60 s, and may still go on."""
        library = library or load_library()
        self._client = MooncakeClient(options, library, rehearse)
        self._bounces = Bounces(self._client)
        self._config = library.ReplicateConfig()
        self._config.replica_num = options.replicas
        self._carried: Carried | None = None
        self._measure_at = 0.0
        self._pressure: tuple[float, float | None] = (-_PRESSURE_S, None)

    def connect_soon(self) -> None:
        """See `ConnectsAhead`: a daemon thread that ends once it is connected, or could not."""
        with suppress(RuntimeError):  # no thread can be had: the first call connects
            threading.Thread(target=self._connect, name="mooncake-connect", daemon=True).start()

    def _connect(self) -> None:
        with suppress(OSError), self._client.using(_CONNECT_S):
            pass

    def find(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.find`. One call for up to 8,192 keys."""
        until = time.monotonic() + deadline_s
        found: list[int] = []
        with self._client.using(deadline_s) as store:
            for at in range(0, len(keys), _FIND_KEYS):
                if at and time.monotonic() >= until:
                    raise TimeoutError(f"{self.name}: {at} of {len(keys)} keys asked for in {deadline_s:g} s")
                found += store.batch_is_exist([_PREFIX + key.hex() for key in keys[at : at + _FIND_KEYS]])
        codes = np.fromiter(found, dtype=np.int64, count=len(found))
        if len(codes) and codes.min() < 0:
            self._judge("find", codes, codes >= 0)
        return np.asarray(codes == 1, dtype=np.bool_)

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.get`. When it returns, nothing writes to `rows` any more."""
        names, width = _names(keys), rows.shape[1]
        codes = np.full(len(keys), NOT_TRIED, dtype=np.int64)
        until = time.monotonic() + deadline_s
        with self._client.using(deadline_s) as store, self._measuring(codes, width):
            call = _Call(store.batch_get_into, names, rows, into=True)
            self._in_batches(call, codes, 0, len(keys), until)
            came: Bools = np.asarray(codes == width, dtype=np.bool_)
            if not came.all():
                self._judge("get", codes, came)
                other = np.flatnonzero(~came & ((codes > 0) | (codes == INVALID)))
                if other.size and not call.closed:
                    self._heal(store, [names[i] for i in other], width, until)
        return came

    def put(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.put`; a key that is there keeps its value, and is a True. Waits a little for room in a full
        store: half of the deadline, for a full store must not look like one that hangs."""
        codes = np.full(len(keys), NOT_TRIED, dtype=np.int64)
        began = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        with self._client.using(deadline_s) as store:
            until = time.monotonic() + min(deadline_s / 2, _LONGEST_RETRY_S)
            call = _Call(store.batch_put_from, _names(keys), rows, self._config)
            self._in_batches(call, codes, 0, len(keys), began + deadline_s)
            while (full := np.flatnonzero(codes == NO_ROOM)).size and time.monotonic() + pause_s < until:
                if call.closed:
                    break
                self._count("retries", 1)
                time.sleep(pause_s)
                pause_s = min(_LONGEST_PAUSE_S, pause_s * 2)
                # what was taken in between is put again, which changes nothing
                self._in_batches(call, codes, int(full[0]), int(full[-1]) + 1, until)
        taken: Bools = np.asarray(codes == 0, dtype=np.bool_)
        if not taken.all():
            self._judge("put", codes, taken)
        return taken

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.remove`. Also of what is leased to readers."""
        with self._client.using(deadline_s) as store:
            codes = np.array(store.batch_remove(_names(keys), True) if keys else [], dtype=np.int64)
        gone: Bools = np.asarray((codes == 0) | (codes == MISSING), dtype=np.bool_)
        if not gone.all():
            self._judge("remove", codes, gone)
        return gone

    def register(self, memory: Values) -> None:
        """Rows in this memory (uint8, C order) are read and written in place, until `unregister`."""
        self._client.register(memory)

    def unregister(self, memory: Values) -> None:
        """No call will name this memory again."""
        self._client.unregister(memory)

    def pressure(self, deadline_s: float) -> float | None:
        """Memory taken, of the store's: 0 to 1, at most a second old. None where the option `metrics` does not say
        whom to ask, or the store has no memory. OSError where nobody answers."""
        if not self.options.metrics:
            return None
        at, known = self._pressure
        now = time.monotonic()
        if now - at < _PRESSURE_S:
            return known
        self._pressure = (now, asked_share(self.options.metrics, deadline_s))
        return self._pressure[1]

    def transport(self) -> str:
        """What carried the values that came last: counted on sockets and RDMA ports, every few seconds."""
        return str(self._carried) if self._carried is not None else "unknown"

    def close(self) -> None:
        """See `KeyTier.close`. Waits up to a second for calls that run; the last of them closes the client then."""
        self._client.close()

    def _in_batches(self, call: _Call, codes: Codes, first: int, last: int, until: float) -> None:
        """Codes of the keys from `first` to before `last`, in place or bounced. Stops at the deadline, and at an owner
        or a master that fails."""
        at = first
        while at < last and (at == first or time.monotonic() < until):
            in_place = call.in_place(self._client)
            end = min(last, at + (_BATCH_KEYS if in_place else call.bounced_at_once))
            if in_place:
                codes[at:end] = self._settled(call, at, end, call.rows[at:end])
            else:
                with self._bounces.like(call.rows[at:end], max(0.0, until - time.monotonic())) as own:
                    codes[at:end] = self._bounced(call, at, end, own)
            self._count("in_place" if in_place else "bounced", end - at)
            if call.closed or all(code in _HOPELESS for code in codes[at:end].tolist()):
                return
            at = end

    def _bounced(self, call: _Call, at: int, end: int, own: Values) -> list[int]:
        if not call.into:
            own[:] = call.rows[at:end]
        return self._settled(call, at, end, own)

    def _settled(self, call: _Call, at: int, end: int, rows: Values) -> list[int]:
        """One call of Mooncake's, through `rows`. When it returns, nothing of it touches them any more."""
        began = time.monotonic()
        codes = call(at, end, rows)
        if call.into and rows.ctypes.data != call.rows[at:end].ctypes.data:
            call.rows[at:end] = rows  # before the client is closed: a bounce buffer may go with it
        if TRANSFER_FAILED in codes and time.monotonic() - began >= self.unsettled_s:
            self._count("reopened", 1)
            call.closed = True
            self._client.reopen()
        return codes

    @contextmanager
    def _measuring(self, codes: Codes, width: int) -> Iterator[None]:
        """Now and then, what carries the values that come meanwhile."""
        now = time.monotonic()
        if now < self._measure_at:
            yield
            return
        self._measure_at = now + _MEASURE_EVERY_S
        before = count_bytes()
        yield
        nbytes = int(np.count_nonzero(codes == width)) * width
        if nbytes >= _LEAST_MEASURED:
            self._carried = Carried.between(before, count_bytes(), nbytes)
        elif self._carried is None:
            self._measure_at = 0.0

    def _heal(self, store: Any, names: list[str], width: int, until: float) -> None:
        """Remove what is there with another width, as far as that is found out in time: each question has its own
        wait for the master. What cannot be asked (below 0) is left alone; it may be being written."""
        wrong: list[str] = []
        for name in names:
            if time.monotonic() >= until:
                break
            size = store.get_size(name)
            if size in (NO_MASTER, TIMED_OUT):
                break
            if size > 0 and size != width:
                wrong.append(name)
        if wrong:
            self._count("other_width", len(wrong))
            self._count("healed", sum(code == 0 for code in store.batch_remove(wrong, True)))

    def _count(self, name: str, n: int) -> None:
        with self._counting:
            self.counts[name] += n

    def _judge(self, op: str, codes: Codes, good: Bools) -> None:
        """Count what went wrong. OSError where it was the store's or an owner's fault, and nothing went well."""
        bad = codes[~good]
        values, times = np.unique(bad, return_counts=True)
        for code, n in zip(values.tolist(), times.tolist(), strict=True):
            if code < 0 and code != MISSING:
                self._count(COUNTS.get(code, "other_code"), n)
        if not good.any() and any(is_trouble(code) for code in values.tolist()):
            raise OSError(f"{self.name}: {op} of {len(codes)} keys: {said(bad)}")


class _Call:
    """A batch operation of Mooncake's over all keys of a call of ours."""

    def __init__(self, operation: Any, names: list[str], rows: Values, *more: Any, into: bool = False) -> None:
        self.rows = rows
        self.into = into
        self.closed = False
        """The client was closed under it."""
        self.bounced_at_once = max(1, min(_BATCH_KEYS, BOUNCE_NBYTES // max(1, rows.shape[1])))
        self._operation = operation
        self._names = names
        self._more = more
        self._width = rows.shape[1]

    def in_place(self, client: MooncakeClient) -> bool:
        """Whether the rows lie in memory that is registered with the client."""
        first = self.rows.ctypes.data
        last = first + (len(self.rows) - 1) * self.rows.strides[0]
        return client.covers(min(first, last), max(first, last) + self._width)

    def __call__(self, at: int, end: int, rows: Values) -> list[int]:
        """The codes of the keys from `at` to before `end`, whose values lie in `rows`."""
        first, stride, n = rows.ctypes.data, rows.strides[0], end - at
        addresses = list(range(first, first + n * stride, stride)) if stride else [first] * n
        codes: list[int] = self._operation(self._names[at:end], addresses, [self._width] * n, *self._more)
        return codes


def _names(keys: Sequence[bytes]) -> list[str]:
    return [_PREFIX + key.hex() for key in keys]
