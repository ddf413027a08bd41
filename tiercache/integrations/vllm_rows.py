"""Engine blocks as rows of bytes: what one block holds over all layers, side by side, never interpreted.

Inside a block an engine packs KV as it likes; so pages are copied whole. A layer is `[num_blocks, page_nbytes]` with
any stride between blocks; a row is the pages of all layers of one block, in the order in which they were registered.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import LayoutError
from tiercache.types import Slots

__all__ = ["BlockRows", "HostPages", "Pages", "TorchPages", "pages_of"]

Rows = NDArray[np.uint8]


class Pages(Protocol):
    """All layers of an engine's KV memory, by blocks."""

    num_blocks: int
    block_nbytes: int

    def read(self, block_ids: Slots) -> Rows:
        """The bytes of these blocks, a fresh uint8 `[n, block_nbytes]`."""

    def write(self, block_ids: Slots, rows: Rows) -> None:
        """Overwrite these blocks with `rows[n, >= block_nbytes]`."""


class HostPages:
    """Layers in host memory. `layers` are uint8 `[num_blocks, page_nbytes]`, contiguous along axis 1."""

    def __init__(self, layers: Sequence[Rows]) -> None:
        self.num_blocks = len(layers[0])
        self.block_nbytes = sum(layer.shape[1] for layer in layers)
        self._groups = [_stacked(group) for group in _evenly_spaced(layers)]
        """Layers of one page size at even distances, as one view `[num_blocks, layers, page_nbytes]`."""

    def read(self, block_ids: Slots) -> Rows:
        """See `Pages.read`."""
        where = _index(block_ids)
        if len(self._groups) == 1:
            return np.ascontiguousarray(self._groups[0][where]).reshape(len(block_ids), self.block_nbytes)
        return np.concatenate([group[where].reshape(len(block_ids), -1) for group in self._groups], axis=1)

    def write(self, block_ids: Slots, rows: Rows) -> None:
        """See `Pages.write`."""
        where, at = _index(block_ids), 0
        for group in self._groups:
            _, layers, page = group.shape
            group[where] = rows[:, at : at + layers * page].reshape(len(block_ids), layers, page)
            at += layers * page


class TorchPages:
    """Layers as uint8 tensors `[num_blocks, page_nbytes]` on any device. Reads and writes have ended when they return.

    On a GPU they run in a stream of their own: whoever calls sees to it that no kernel uses these blocks meanwhile.
    """

    def __init__(self, layers: Sequence[Any]) -> None:
        self.num_blocks = len(layers[0])
        self.block_nbytes = sum(layer.shape[1] for layer in layers)
        self._layers = list(layers)
        import torch

        self._torch = torch
        self._device = layers[0].device

    def read(self, block_ids: Slots) -> Rows:
        """See `Pages.read`."""
        torch = self._torch
        with self._stream():
            ids = torch.from_numpy(block_ids.astype(np.int64)).to(self._device)
            rows = torch.cat([layer.index_select(0, ids) for layer in self._layers], dim=1).cpu()
        return np.asarray(rows.numpy())

    def write(self, block_ids: Slots, rows: Rows) -> None:
        """See `Pages.write`."""
        torch, at = self._torch, 0
        with self._stream() as stream:
            ids = torch.from_numpy(block_ids.astype(np.int64)).to(self._device)
            payload = torch.from_numpy(np.ascontiguousarray(rows[:, : self.block_nbytes])).to(self._device)
            for layer in self._layers:
                layer.index_copy_(0, ids, payload[:, at : at + layer.shape[1]])
                at += layer.shape[1]
            if stream is not None:  # pragma: no cover - a GPU
                stream.synchronize()

    def _stream(self) -> Any:
        cuda = self._torch.cuda
        return cuda.stream(cuda.Stream(self._device) if self._device.type == "cuda" else None)


class BlockRows:
    """Rows of some engine blocks, as jobs name them: row i is the block `block_ids[i]` (`mover.OutsideRows`)."""

    def __init__(self, pages: Pages, block_ids: Slots) -> None:
        self.pages = pages
        self.block_ids = block_ids

    def take(self, begin: int, end: int) -> Rows:
        """The bytes of rows `begin` to `end`, a copy. IndexError out of range."""
        return self.pages.read(self._ids(begin, end))

    def put(self, begin: int, rows: Rows) -> None:
        """Overwrite rows from `begin` on. IndexError out of range."""
        self.pages.write(self._ids(begin, begin + len(rows)), rows)

    def _ids(self, begin: int, end: int) -> Slots:
        ids = self.block_ids[begin:end]
        if not 0 <= begin <= end <= len(self.block_ids):
            raise IndexError(f"rows {begin} to {end} of {len(self.block_ids)}")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self.pages.num_blocks:
            raise IndexError(f"blocks {ids.min()} to {ids.max()} of {self.pages.num_blocks}")
        return ids


def pages_of(kv_caches: Mapping[str, Any], num_blocks: int, page_nbytes: Mapping[str, int]) -> Pages:
    """The pages of an engine's layers (tensors whose first axis is blocks, or equal parts of blocks).

    Layers that lie on the same bytes count once. LayoutError where a layer is not `num_blocks` whole pages.
    """
    layers: dict[tuple[int, int], Any] = {}
    for name, tensor in kv_caches.items():
        layer = _byte_pages(name, tensor, num_blocks, page_nbytes[name])
        layers.setdefault((layer.data_ptr(), layer.stride(0)), layer)
    tensors = list(layers.values())
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return HostPages([_host_view(tensor) for tensor in tensors])
    return TorchPages(tensors)


def _byte_pages(name: str, tensor: Any, num_blocks: int, page_nbytes: int) -> Any:
    """The layer as a uint8 tensor `[num_blocks, page_nbytes]` over the same memory."""
    import torch

    parts, rest = divmod(tensor.shape[0], num_blocks)
    itemsize = tensor.element_size()
    stride = tensor.stride(0) * itemsize * max(1, parts)
    inside = sum((size - 1) * abs(step) for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True))
    reach = (inside + 1 + (parts - 1) * tensor.stride(0)) * itemsize if parts else 0
    if rest or not parts or not 0 < reach <= page_nbytes <= stride:
        raise LayoutError(
            f"layer {name}: a tensor {tuple(tensor.shape)} with strides {tuple(tensor.stride())} of {itemsize}-byte "
            f"elements is not {num_blocks} pages of {page_nbytes} bytes each"
        )
    begin = tensor.storage_offset() * itemsize
    layer = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return layer.set_(tensor.untyped_storage(), begin, (num_blocks, page_nbytes), (stride, 1))


def _host_view(layer: Any) -> Rows:
    """The same memory as a numpy array; the storage must outlive it."""
    n, page = layer.shape
    stride = layer.stride(0)
    nbytes = (n - 1) * stride + page
    memory = (ctypes.c_uint8 * nbytes).from_address(layer.data_ptr())
    flat = np.frombuffer(memory, dtype=np.uint8)
    return np.lib.stride_tricks.as_strided(flat, (n, page), (stride, 1))


def _evenly_spaced(layers: Sequence[Rows]) -> list[list[Rows]]:
    """Neighbours of one shape and stride whose addresses are at one distance, together."""
    groups: list[list[Rows]] = []
    for layer in layers:
        group = groups[-1] if groups else []
        alike = group and (group[0].shape, group[0].strides) == (layer.shape, layer.strides)
        step = layer.ctypes.data - group[-1].ctypes.data if group else 0
        if alike and step > 0 and (len(group) == 1 or step == group[1].ctypes.data - group[0].ctypes.data):
            group.append(layer)
        else:
            groups.append([layer])
    return groups


def _stacked(group: Sequence[Rows]) -> Rows:
    first = group[0]
    step = group[1].ctypes.data - first.ctypes.data if len(group) > 1 else 0
    shape, strides = (len(first), len(group), first.shape[1]), (first.strides[0], step, 1)
    return np.lib.stride_tricks.as_strided(first, shape, strides)


def _index(block_ids: Slots) -> slice | NDArray[np.int64]:
    """A slice where the blocks lie side by side (then nothing is gathered), else their numbers."""
    n = len(block_ids)
    if n and int(block_ids[-1]) - int(block_ids[0]) == n - 1 and (n < 3 or bool((np.diff(block_ids) == 1).all())):
        return slice(int(block_ids[0]), int(block_ids[0]) + n)
    return block_ids.astype(np.int64)
