"""The one interface of all key tiers.

A key tier is shared: other machines put and remove what they like, and what was there a moment ago may be gone. It
knows nothing of prompts, slots or blocks, only of values under keys. What it says is a hint, what it brings is
verified by the reader (`frame`), and whatever it does wrong costs hits and nothing else.

What a tier can do beside that it offers by members of its own: `RegistersMemory`, `TellsPressure`,
`MeasuresTransport`, `HasEndpoint`. Each is optional, and found by its name.

Keys are KEY_NBYTES bytes: namespace, epoch and the chained SHA-256 of a block with its prefix (`keys.chain_keys`).
Values are rows of bytes, all of one width per cache (`frame.frame_nbytes`).

Every operation takes a batch and answers per key, in order. It may be called from several threads at once.
`deadline_s` says how long the caller waits; a tier that can give up by itself does so within it. One that cannot may
return later: the caller has ended the waiting by then, and looks at neither answer nor rows.

Trouble that concerns the whole batch (no connection, a time-out) is an OSError, TimeoutError included; an adapter
turns its client's exceptions into these. Everything smaller is a False for its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from tiercache.types import Bools

__all__ = [
    "KEY_NBYTES",
    "ConnectsAhead",
    "HasEndpoint",
    "KeyTier",
    "MeasuresTransport",
    "RegistersMemory",
    "TellsPressure",
    "Values",
]

KEY_NBYTES = 32
"""Bytes of a key."""

Values: TypeAlias = NDArray[np.uint8]
"""uint8 `[n, width]`, one value a row, rows contiguous along axis 1 (any stride on axis 0)."""


@runtime_checkable
class KeyTier(Protocol):
    """Values under keys, shared with others. See the module."""

    name: str

    def find(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """Per key whether there is a value now. Moves no value, and promises nothing of later."""

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """Copy values into `rows[n, width]`. Per key whether a value of exactly that width came; the other rows are
        undefined."""

    def put(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """Store `rows[n, width]` under these keys, over what is there. Per key whether it was taken: a full tier may
        refuse, or let go of something else. `rows` is only read, and may be reused when this returns."""

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """Forget values. Per key whether it holds none now; one that held none is a True."""

    def close(self) -> None:
        """Give connections back; calls under way end soon, with False or OSError. May be called twice."""


@runtime_checkable
class RegistersMemory(Protocol):
    """Optional: takes note of staging from which values are put and into which they are got, for zero copy."""

    def register(self, memory: NDArray[np.uint8]) -> None:
        """`get` and `put` will be called with rows that lie in this memory (uint8, C order), until `unregister`.
        OSError where that is not possible; the tier then copies."""

    def unregister(self, memory: NDArray[np.uint8]) -> None:
        """No call will name this memory again. Of memory that was not registered: nothing."""


@runtime_checkable
class ConnectsAhead(Protocol):
    """Optional: takes long to connect, and better does so before the first call."""

    def connect_soon(self) -> None:
        """Begin to connect in the background, and return at once. Trouble is for the calls that follow to tell."""


@runtime_checkable
class TellsPressure(Protocol):
    """Optional: knows how full the store is."""

    def pressure(self, deadline_s: float) -> float | None:
        """The store's own load: 0 empty, 1 full, None unknown. Cheap; may be a second old. OSError: unknown."""


@runtime_checkable
class MeasuresTransport(Protocol):
    """Optional: knows what carries its bytes."""

    def transport(self) -> str:
        """What was measured to carry the bytes of late ("tcp", "rdma", "memory", "unknown"), with figures where they
        are known; never the name that was configured. Asks nobody, does not wait."""


@runtime_checkable
class HasEndpoint(Protocol):
    """Optional: has an address."""

    endpoint: str
    """host:port, as people are shown it: without a password."""
