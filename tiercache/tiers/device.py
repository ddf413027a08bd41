"""Where a tier's tensor lives: a small face of torch with a CPU twin."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any, Protocol, TypeAlias

from tiercache.errors import ConfigError
from tiercache.tiers.base import Rows
from tiercache.tiers.dram import copy_in, copy_out, map_rows
from tiercache.types import Slots

__all__ = ["CPUDevice", "Device", "Tensor", "open_device"]

Tensor: TypeAlias = Any
"""A torch.Tensor; torch is optional and imported by `open_device` only."""


class Device(Protocol):
    """Allocates one tensor and moves rows between it and host memory."""

    name: str

    def allocate(self, capacity: int, stride: int) -> Tensor:
        """A uint8 tensor `[capacity, stride]` on the device. Raises the device's own out-of-memory error."""

    def host_view(self, tensor: Tensor) -> Rows | None:
        """The tensor's memory as a numpy array where host and device share it, else None."""

    def upload(self, tensor: Tensor, slots: Slots, rows: Rows) -> None:
        """Copy host rows `[n, width]` into n rows of the tensor; done when this returns."""

    def download(self, tensor: Tensor, slots: Slots, rows: Rows) -> None:
        """Copy n rows of the tensor into host rows `[n, width]`; done when this returns."""

    def synchronize(self) -> None:
        """Return when all copies issued so far by this process have ended."""


class CPUDevice:
    """The device whose memory is host memory: same tensor, same calls, copies by numpy."""

    name = "cpu"

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch

    def allocate(self, capacity: int, stride: int) -> Tensor:
        """A zeroed uint8 tensor `[capacity, stride]` over page-aligned host memory."""
        return self._torch.from_numpy(map_rows(capacity, stride))

    def host_view(self, tensor: Tensor) -> Rows | None:
        """The tensor as a numpy array that shares its memory."""
        view: Rows = tensor.numpy()
        return view

    def upload(self, tensor: Tensor, slots: Slots, rows: Rows) -> None:
        """See `Device.upload`."""
        copy_in(tensor.numpy(), slots, rows)

    def download(self, tensor: Tensor, slots: Slots, rows: Rows) -> None:
        """See `Device.download`."""
        copy_out(tensor.numpy(), slots, rows)

    def synchronize(self) -> None:
        """Copies of host memory have ended when they return."""


def open_device(device: str) -> Device:
    """The device called `device`.

    Raises ConfigError where torch is not installed, where there is no CUDA, and for every device but the CPU.
    """
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise ConfigError("device", device, "an HBM tier needs torch: pip install tiercache[hbm]") from error
    if device == "cpu":
        return CPUDevice(torch)
    if device.split(":")[0] == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", device, 'torch finds no CUDA here; device="cpu" keeps the tier in RAM')
    raise ConfigError("device", device, 'not a device of this version; device="cpu" keeps the tier in RAM')
