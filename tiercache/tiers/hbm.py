"""HBM: one device tensor."""

from __future__ import annotations

import numpy as np

from tiercache.errors import CacheClosedError
from tiercache.tiers.base import Rows, slot_stride
from tiercache.tiers.device import Device, Tensor, open_device
from tiercache.tiers.dram import check_transfer
from tiercache.types import Bools, Slots

__all__ = ["HBMTier"]


class HBMTier:
    """`capacity` blocks in one torch uint8 tensor `[capacity, stride]` on a device.

    On the device "cpu" `slab` is the tensor's memory, elsewhere None.
    """

    verifies = False

    def __init__(self, capacity: int, block_nbytes: int, device: str | Device = "cuda", name: str = "hbm") -> None:
        """Allocate the tensor.

        Raises ConfigError where torch or the device is missing, ValueError for sizes below 1.
        """
        if capacity < 1 or block_nbytes < 1:
            raise ValueError(f"capacity {capacity} and block_nbytes {block_nbytes} must be at least 1")
        self.name = name
        self.capacity = capacity
        self.block_nbytes = block_nbytes
        self.stride = slot_stride(block_nbytes)
        self.device: Device = open_device(device) if isinstance(device, str) else device
        tensor = self.device.allocate(capacity, self.stride)
        self._tensor: Tensor | None = tensor
        self.slab: Rows | None = self.device.host_view(tensor)

    def __repr__(self) -> str:
        state = "closed" if self._tensor is None else "open"
        return f"HBMTier({self.name!r}, {self.capacity} x {self.block_nbytes} bytes on {self.device.name}, {state})"

    def _memory(self) -> Tensor:
        tensor = self._tensor
        if tensor is None:
            raise CacheClosedError(f"tier {self.name!r} is closed")
        return tensor

    def read(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.read`. Raises ValueError, IndexError for misuse, CacheClosedError after close."""
        tensor = self._memory()
        check_transfer(slots, rows, self.capacity, self.block_nbytes, self.stride)
        self.device.download(tensor, slots, rows)
        return np.ones(len(slots), dtype=np.bool_)

    def write(self, slots: Slots, rows: Rows) -> Bools:
        """See `SlotTier.write`. Raises ValueError, IndexError for misuse, CacheClosedError after close."""
        tensor = self._memory()
        check_transfer(slots, rows, self.capacity, self.block_nbytes, self.stride)
        self.device.upload(tensor, slots, rows)
        return np.ones(len(slots), dtype=np.bool_)

    def slots_view(self, begin: int, end: int) -> Tensor:
        """The payload of slots `begin` to `end` as a uint8 tensor view `[end - begin, block_nbytes]` on the device.

        Valid as long as something holds it; what it shows changes when a slot is written again.
        Raises IndexError for slots outside the tier, CacheClosedError after close.
        """
        if not 0 <= begin <= end <= self.capacity:
            raise IndexError(f"slots {begin}..{end} outside 0..{self.capacity}")
        return self._memory()[begin:end, : self.block_nbytes]

    def sync(self) -> bool:
        """Wait for the device's copies; True: memory has nothing to make durable."""
        self.device.synchronize()
        return True

    def close(self) -> None:
        """Let go of the tensor, whose memory is given back once no view of it is left."""
        self._tensor = None
        self.slab = None
