"""Key tiers for tests: one in memory, and wrappers around any key tier that delay, hang, fail, forget or lie."""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from tiercache.keys import Extra, chain_idents, chain_keys, encode_prompt, root_ident
from tiercache.layout import KVLayout, Namespace
from tiercache.remote.base import KeyTier, Values
from tiercache.remote.frame import seal
from tiercache.testing.gate import Gate
from tiercache.types import Bools

__all__ = [
    "FaultyKeyTier",
    "HangingKeyTier",
    "KeyOp",
    "MemoryKeyTier",
    "SlowKeyTier",
    "WrappedKeyTier",
    "put_blocks",
]

_OPTIONAL = ("register", "unregister", "pressure", "transport", "endpoint")

KeyOp: TypeAlias = Literal["find", "get", "put", "remove"]


def put_blocks(
    tier: KeyTier,
    tokens: Any,
    blocks: Any,
    *,
    namespace: Namespace | str,
    epoch: bytes | str,
    block_tokens: int = 16,
    extra: Extra | None = None,
    deadline_s: float = 10.0,
) -> list[bytes]:
    """Put a prompt's blocks (array or tensor `[n, *block_shape]`, its first n) where a cache of this namespace and
    epoch finds them. Returns their keys; OSError where one was not taken."""
    prompt = encode_prompt(tokens, block_tokens, extra).check_ids()
    digest = (Namespace(namespace) if isinstance(namespace, str) else namespace).digest
    tag = epoch.encode() if isinstance(epoch, str) else epoch
    rows = KVLayout.of(blocks).rows(blocks)
    symbols = prompt.symbols[: rows.n * prompt.symbol_nbytes]
    idents = chain_idents(symbols, prompt.symbol_nbytes, root_ident(digest, tag))
    keys = chain_keys(symbols, prompt.symbol_nbytes, digest, tag)
    payload = rows.take(0, rows.n)
    if not tier.put(keys, seal(payload, payload.shape[1], idents), deadline_s).all():
        raise OSError(f"{tier.name} did not take all of {rows.n} blocks")
    return keys


class MemoryKeyTier:
    """At most `capacity` values in a dict. Full, it lets go of what was used longest ago, or refuses (`refuses`).

    `calls[op]` counts calls, `keys[op]` the keys of them.
    """

    def __init__(self, capacity: int, *, refuses: bool = False, name: str = "memory-keys") -> None:
        if capacity < 1:
            raise ValueError(f"capacity = {capacity}: at least 1 is needed")
        self.name = name
        self.capacity = capacity
        self.refuses = refuses
        self.calls: Counter[str] = Counter()
        self.keys: Counter[str] = Counter()
        self._values: OrderedDict[bytes, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._closed = False

    def __len__(self) -> int:
        with self._lock:
            return len(self._values)

    def find(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.find`. Does not count as a use."""
        with self._lock:
            self._enter("find", keys)
            return np.array([key in self._values for key in keys], dtype=np.bool_)

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.get`."""
        ok = np.zeros(len(keys), dtype=np.bool_)
        with self._lock:
            self._enter("get", keys)
            for i, key in enumerate(keys):
                value = self._values.get(key)
                if value is not None and len(value) == rows.shape[1]:
                    rows[i] = np.frombuffer(value, dtype=np.uint8)
                    self._values.move_to_end(key)
                    ok[i] = True
        return ok

    def put(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.put`."""
        ok = np.ones(len(keys), dtype=np.bool_)
        with self._lock:
            self._enter("put", keys)
            for i, key in enumerate(keys):
                if key not in self._values and len(self._values) >= self.capacity:
                    if self.refuses:
                        ok[i] = False
                        continue
                    self._values.popitem(last=False)
                self._values[key] = rows[i].tobytes()
                self._values.move_to_end(key)
        return ok

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.remove`."""
        with self._lock:
            self._enter("remove", keys)
            for key in keys:
                self._values.pop(key, None)
        return np.ones(len(keys), dtype=np.bool_)

    def close(self) -> None:
        """See `KeyTier.close`; what it held is gone."""
        with self._lock:
            self._closed = True
            self._values.clear()

    @property
    def endpoint(self) -> str:
        """See `HasEndpoint`."""
        return self.name

    def pressure(self, deadline_s: float) -> float | None:
        """See `TellsPressure`: the share of its capacity that is taken."""
        with self._lock:
            return len(self._values) / self.capacity

    def transport(self) -> str:
        """See `MeasuresTransport`."""
        return "memory"

    def held(self) -> list[bytes]:
        """The keys, those used longest ago first."""
        with self._lock:
            return list(self._values)

    def spoil(self, key: bytes, byte: int, mask: int = 1) -> None:
        """Flip bits of one byte of a value, as somebody else's mistake would. KeyError where there is none."""
        with self._lock:
            value = bytearray(self._values[key])
            value[byte] ^= mask
            self._values[key] = bytes(value)

    def replace(self, key: bytes, value: bytes) -> None:
        """Put other bytes, of any length, under a key."""
        with self._lock:
            self._values[key] = value

    def value(self, key: bytes) -> bytes:
        """The bytes under a key. KeyError where there are none."""
        with self._lock:
            return self._values[key]

    def _enter(self, op: KeyOp, keys: Sequence[bytes]) -> None:
        self.calls[op] += 1
        self.keys[op] += len(keys)
        if self._closed:
            raise OSError(f"{self.name} is closed")


class WrappedKeyTier:
    """Passes everything to `inner`, also what is optional; subclasses come before each operation in `_before`."""

    def __init__(self, inner: KeyTier) -> None:
        self.inner = inner
        self.name = inner.name

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONAL:
            return getattr(self.inner, name)
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def find(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.find`."""
        self._before("find", keys, deadline_s)
        return self.inner.find(keys, deadline_s)

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.get`."""
        self._before("get", keys, deadline_s)
        return self.inner.get(keys, rows, deadline_s)

    def put(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.put`."""
        self._before("put", keys, deadline_s)
        return self.inner.put(keys, rows, deadline_s)

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.remove`."""
        self._before("remove", keys, deadline_s)
        return self.inner.remove(keys, deadline_s)

    def close(self) -> None:
        """See `KeyTier.close`."""
        self.inner.close()

    def _before(self, op: KeyOp, keys: Sequence[bytes], deadline_s: float) -> None:
        """Called before each operation; what it raises comes out."""


class SlowKeyTier(WrappedKeyTier):
    """Sleeps before each operation: `seconds`, or what `seconds(op, n)` says of an operation on n keys.

    With `gives_up`, it keeps the caller's deadline: it sleeps no longer than that, and raises TimeoutError then.
    """

    def __init__(
        self, inner: KeyTier, seconds: float | Callable[[KeyOp, int], float], *, gives_up: bool = False
    ) -> None:
        super().__init__(inner)
        self.seconds = seconds
        self.gives_up = gives_up

    def _before(self, op: KeyOp, keys: Sequence[bytes], deadline_s: float) -> None:
        seconds = self.seconds(op, len(keys)) if callable(self.seconds) else self.seconds
        late = self.gives_up and seconds > deadline_s
        time.sleep(deadline_s if late else seconds)
        if late:
            raise TimeoutError(f"{op} of {len(keys)} keys took longer than {deadline_s:g} s")


class FaultyKeyTier(WrappedKeyTier):
    """Fails as told: operations that raise, keys that are found and cannot be had, values that are not what they were.

    Without any fault set it is `inner`. May be changed at any time from any thread.
    """

    def __init__(self, inner: KeyTier) -> None:
        super().__init__(inner)
        self.raises: dict[KeyOp, Exception] = {}
        """Every operation of this kind raises this."""
        self.gone: set[bytes] = set()
        """Keys that `get` misses, whatever `find` says."""
        self.flips: dict[bytes, tuple[int, int]] = {}
        """Key -> (byte, mask) flipped in what `get` brings."""

    def heal(self) -> None:
        """Forget every fault."""
        self.raises.clear()
        self.gone.clear()
        self.flips.clear()

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.get`."""
        ok = super().get(keys, rows, deadline_s)
        for i, key in enumerate(keys):
            if key in self.gone:
                ok[i] = False
                rows[i] = 0
            elif key in self.flips:
                byte, mask = self.flips[key]
                rows[i, byte] ^= mask
        return ok

    def _before(self, op: KeyOp, keys: Sequence[bytes], deadline_s: float) -> None:
        error = self.raises.get(op)
        if error is not None:
            raise error


class HangingKeyTier(WrappedKeyTier, Gate):
    """Operations block from `hang(op, ...)` until `wake()`, then go on as if nothing had been (see `Gate`)."""

    def __init__(self, inner: KeyTier, *, max_s: float = 30.0) -> None:
        WrappedKeyTier.__init__(self, inner)
        Gate.__init__(self, max_s)

    def _before(self, op: KeyOp, keys: Sequence[bytes], deadline_s: float) -> None:
        self.pass_through(op)
