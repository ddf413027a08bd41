"""What a block is made of (`KVLayout`), where a caller's blocks lie (`CallerRows`), and whose KV it is (`Namespace`).

torch is never imported here: a tensor can only exist where the caller has imported it.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tiercache.errors import ConfigError, LayoutError
from tiercache.rows import copy_rows

__all__ = ["DTYPES", "SLOT_ALIGNMENT", "Blocks", "CallerRows", "KVLayout", "Namespace"]

Blocks: TypeAlias = Any
"""A numpy array or a torch tensor, `[n, *block_shape]`, any strides."""

SLOT_ALIGNMENT = 4096
"""Bytes; slots start at multiples of it in every tier."""

_NUMPY_DTYPES: dict[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
}
_BYTE_DTYPES: dict[str, int] = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
}
"""Known to torch (and to ml_dtypes), not to numpy: without torch they are shown as uint8."""

DTYPES: dict[str, int] = _NUMPY_DTYPES | _BYTE_DTYPES
"""Every dtype name that a layout may have, and its bytes per element."""

_NUMPY_CARRIERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TORCH_CARRIERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64"}


@dataclass(frozen=True)
class KVLayout:
    """Shape and dtype of one block: `block_shape` elements of `dtype` (a name of `DTYPES`), in C order.

    LayoutError for a shape without axes, an axis below 1, or a dtype that is not in `DTYPES`.
    """

    block_shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Check both fields; the shape becomes a tuple of plain ints."""
        if isinstance(self.block_shape, (str, bytes)) or not isinstance(self.block_shape, Sequence):
            raise LayoutError(f"block_shape = {self.block_shape!r}: a tuple of positive integers is needed")
        for axis in self.block_shape:
            if isinstance(axis, (bool, np.bool_)) or not hasattr(axis, "__index__") or operator.index(axis) < 1:
                raise LayoutError(f"block_shape = {self.block_shape!r}: every axis must be an integer of at least 1")
        if not self.block_shape:
            raise LayoutError("block_shape = (): a block needs at least one axis")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise LayoutError(f"dtype = {self.dtype!r}: not one of {', '.join(DTYPES)}")
        object.__setattr__(self, "block_shape", tuple(operator.index(axis) for axis in self.block_shape))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype]

    @property
    def block_nbytes(self) -> int:
        """Payload bytes of one block."""
        return math.prod(self.block_shape) * self.itemsize

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next: `block_nbytes` rounded up to SLOT_ALIGNMENT."""
        return -(-self.block_nbytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        return {"block_shape": list(self.block_shape), "dtype": self.dtype}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> KVLayout:
        """The inverse of `to_dict`. LayoutError for a missing, an unknown or a wrong field."""
        if not isinstance(values, Mapping) or set(values) != {"block_shape", "dtype"}:
            raise LayoutError(f"layout = {values!r}: exactly the fields block_shape and dtype are needed")
        return cls(values["block_shape"], values["dtype"])

    @classmethod
    def of(cls, blocks: Blocks) -> KVLayout:
        """Learn the layout from `blocks`, an array or tensor `[n, *block_shape]` (n may be 0).

        LayoutError for what is no array, has no block axis or an empty one, or has an object, structured,
        byte-swapped or otherwise unsupported dtype.
        """
        shape, dtype = _describe(blocks)
        if 0 in shape[1:]:
            raise LayoutError(f"blocks have shape {shape}: a block must hold at least one element")
        return cls(shape[1:], dtype)

    def check(self, blocks: Blocks) -> int:
        """Number of blocks in `blocks`; LayoutError where they are not of this layout.

        The dtype must be the same, not only its size. A dtype that numpy has not (bfloat16, float8) may also come as
        uint8 with the last axis multiplied by the itemsize.
        """
        shape, dtype = _describe(blocks)
        if (shape[1:], dtype) == (self.block_shape, self.dtype):
            return shape[0]
        if self.dtype in _BYTE_DTYPES and (shape[1:], dtype) == (self._byte_shape, "uint8"):
            return shape[0]
        want = f"[n, {', '.join(map(str, self.block_shape))}] of {self.dtype}"
        raise LayoutError(f"blocks are [{', '.join(map(str, shape))}] of {dtype}, this cache holds {want}")

    def rows(self, blocks: Blocks, writable: bool = False) -> CallerRows:
        """`CallerRows(blocks, self, writable)`."""
        return CallerRows(blocks, self, writable)

    def view(self, rows: NDArray[np.uint8]) -> Blocks:
        """Show `rows` (uint8 `[n, width]`, `width >= block_nbytes`) as `[n, *block_shape]`, without a copy.

        Axis 0 keeps the stride of `rows`. A torch tensor where torch is imported and knows the dtype, else a numpy
        array (a dtype that numpy has not: uint8, last axis multiplied by the itemsize). Valid as long as the memory
        of `rows` is; torch has no read-only tensors, so never write to one made from read-only rows.
        ValueError where `rows` is not such an array.
        """
        payload = _payload(rows, self.block_nbytes)
        n = len(payload)
        if n > 1 and payload.strides[0] % self.itemsize:
            raise ValueError(f"rows have a stride of {payload.strides[0]} bytes, no multiple of {self.itemsize}")
        torch = sys.modules.get("torch")
        dtype = getattr(torch, self.dtype, None)
        if torch is not None and isinstance(dtype, torch.dtype):
            if n == 0:  # numpy gives an empty array strides that torch cannot view
                return torch.empty((0, *self.block_shape), dtype=dtype)
            tensor = torch.from_numpy(payload if payload.flags.writeable else np.asarray(_Unlocked(payload)))
            return tensor.view(dtype).view(n, *self.block_shape)
        if self.dtype in _BYTE_DTYPES:
            return payload.reshape(n, *self._byte_shape)
        if n == 0:
            return np.empty((0, *self.block_shape), dtype=self.dtype)
        return payload.view(self.dtype).reshape(n, *self.block_shape)

    @property
    def _byte_shape(self) -> tuple[int, ...]:
        return (*self.block_shape[:-1], self.block_shape[-1] * self.itemsize)


class CallerRows:
    """The caller's blocks as byte rows: the source of a store, or the destination of a load into `out`.

    `blocks` is an array or tensor `[n, *block_shape]` with any strides, on any device; it is kept alive, and nothing
    is copied here. Safe to use from several threads on different rows. LayoutError where `blocks` are not of `layout`;
    with `writable`, ValueError where they are read-only or where two elements may share memory (an expanded tensor).
    """

    def __init__(self, blocks: Blocks, layout: KVLayout, writable: bool = False) -> None:
        self.n = layout.check(blocks)
        """Number of blocks."""
        self.block_nbytes = layout.block_nbytes
        self.writable = writable
        self._array, self._device = _carry(blocks, writable)
        carried = self._array
        itemsize, strides = _strides(carried)
        self._bytes: NDArray[np.uint8] | None = None
        if not self._device and _c_rows(carried.shape, strides, itemsize):
            self._bytes = _byte_rows(carried, layout.block_nbytes // itemsize, strides[0], itemsize)
        if writable and not self._device and not carried.flags.writeable:
            raise ValueError("out is read-only: pass a writable array or tensor")
        if writable and _may_overlap(carried.shape, strides, itemsize):
            raise ValueError(f"out has strides {strides} (bytes) at shape {tuple(carried.shape)}: its elements overlap")

    @property
    def zero_copy(self) -> bool:
        """True where `take` returns views of the caller's memory: every block is contiguous there, in host memory."""
        return self._bytes is not None

    def take(self, i: int, j: int) -> NDArray[np.uint8]:
        """Blocks i to j (exclusive) as uint8 `[j - i, block_nbytes]`, each in C order; only to be read.

        A view of the caller's memory where `zero_copy`, else a contiguous copy. IndexError out of range.
        """
        self._check_range(i, j)
        if self._bytes is not None:
            return self._bytes[i:j]
        part = self._array[i:j]
        if self._device:
            part = part.cpu().contiguous().numpy()
        count = self.block_nbytes // part.itemsize
        return np.ascontiguousarray(part).reshape(j - i, count).view(np.uint8)

    def put(self, i: int, rows: NDArray[np.uint8]) -> None:
        """Write `rows` (uint8 `[m, width]`, `width >= block_nbytes`) into the caller's blocks i to i + m, in C order.

        Only the first `block_nbytes` of a row are used. ValueError where this is not writable or `rows` is no such
        array; IndexError out of range.
        """
        if not self.writable:
            raise ValueError("these rows were registered as the source of a store: they are never written")
        payload = _payload(rows, self.block_nbytes)
        j = i + len(payload)
        self._check_range(i, j)
        if self._bytes is not None:
            copy_rows(self._bytes[i:j], payload)
            return
        target = self._array[i:j]
        if self._device:
            torch = sys.modules["torch"]
            host = torch.from_numpy(np.array(payload, order="C"))
            target.copy_(host.view(target.dtype).view(target.shape))
        else:
            target[...] = np.ascontiguousarray(payload).view(target.dtype).reshape(target.shape)

    def _check_range(self, i: int, j: int) -> None:
        if not 0 <= i <= j <= self.n:
            raise IndexError(f"rows {i} to {j} of {self.n}")


@dataclass(frozen=True)
class Namespace:
    """Fingerprint of all that makes KV interchangeable: model and weights, dtype, layout, block size, TP/PP rank.

    Two caches share blocks only where their fingerprints are equal. ConfigError for an empty one, and for text that
    UTF-8 cannot hold.
    """

    fingerprint: str
    """The text form, as manifests keep it."""

    def __post_init__(self) -> None:
        """Check the text."""
        if not isinstance(self.fingerprint, str) or not self.fingerprint:
            raise ConfigError(
                "namespace", self.fingerprint, "a non-empty string that names model and weights is needed"
            )
        try:
            self.fingerprint.encode()
        except UnicodeEncodeError:
            raise ConfigError("namespace", self.fingerprint, "lone surrogates cannot be written as UTF-8") from None

    @classmethod
    def of(cls, **parts: Any) -> Namespace:
        """The namespace of named parts: strings, ints, floats, bools, None, and lists, tuples and dicts of these.

        Order does not matter; lists and tuples are the same. The text form is canonical JSON, so a manifest says what
        it was made for. ConfigError names a part that has no canonical form.
        """
        if not parts:
            raise ConfigError("namespace", parts, 'at least one part is needed, such as model="..."')
        for name, value in parts.items():
            _check_part(f"namespace.{name}", value)
        return cls(json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True))

    @property
    def digest(self) -> bytes:
        """16 bytes that stand for the fingerprint in keys and idents (SHA-256, truncated)."""
        return hashlib.sha256(b"tiercache.namespace.1\0" + self.fingerprint.encode()).digest()[:16]

    def __str__(self) -> str:
        return self.fingerprint


def _check_part(field: str, value: Any) -> None:
    """ConfigError where `value` has no canonical JSON form."""
    if value is None or isinstance(value, (str, int)):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(field, value, "a finite number is needed")
        return
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_part(f"{field}[{i}]", item)
        return
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, item in value.items():
            _check_part(f"{field}.{key}", item)
        return
    raise ConfigError(field, value, "a string, number, bool, None, or a list or a dict with string keys is needed")


class _Unlocked:
    """Shows read-only memory as writable: `torch.from_numpy` warns otherwise. Keeps the array alive."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def _describe(blocks: Blocks) -> tuple[tuple[int, ...], str]:
    """Shape `[n, *block_shape]` and dtype name of an array or tensor, or LayoutError."""
    if isinstance(blocks, np.ndarray):
        dtype = blocks.dtype
        if not dtype.isnative:
            raise LayoutError(f"blocks have the byte-swapped dtype {dtype.str}: convert them to native order")
        name = dtype.name if dtype.names is None else str(dtype)
    else:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(blocks, torch.Tensor):
            raise LayoutError(f"blocks are a {type(blocks).__name__}: a numpy array or a torch tensor is needed")
        if blocks.layout != torch.strided or blocks.device.type == "meta":
            raise LayoutError(f"blocks are a {blocks.layout} tensor on {blocks.device}: a dense one is needed")
        name = str(blocks.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise LayoutError(f"blocks have dtype {name}: not one of {', '.join(DTYPES)}")
    shape = tuple(int(axis) for axis in blocks.shape)
    if len(shape) < 2:
        raise LayoutError(f"blocks have shape {shape}: [n, *block_shape] with at least one block axis is needed")
    return shape, name


def _carry(blocks: Blocks, writable: bool) -> tuple[Any, bool]:
    """The same memory, shape and strides under an unsigned dtype of `blocks`' own element size.

    Copies of unsigned numbers keep every bit, and numpy has them for dtypes it does not know. Host memory gives a
    numpy array and False, other devices a tensor and True.
    """
    if isinstance(blocks, np.ndarray):
        return blocks.view(_NUMPY_CARRIERS[blocks.itemsize], np.ndarray), False
    torch = sys.modules["torch"]
    tensor = blocks.detach()
    if tensor.is_neg():  # a lazily negated view: its memory holds other bits than its values
        if writable:
            raise ValueError("out is a lazily negated view: pass a plain tensor")
        tensor = tensor.resolve_neg()
    tensor = tensor.view(getattr(torch, _TORCH_CARRIERS[tensor.element_size()]))
    if not _in_host_memory(tensor):
        return tensor, True
    array = tensor.numpy()
    return array.view(_NUMPY_CARRIERS[array.itemsize]), False


def _in_host_memory(tensor: Any) -> bool:
    return bool(tensor.device.type == "cpu")


def _strides(carried: Any) -> tuple[int, tuple[int, ...]]:
    """Bytes per element, and strides in bytes."""
    if isinstance(carried, np.ndarray):
        return carried.itemsize, carried.strides
    size = carried.element_size()
    return size, tuple(stride * size for stride in carried.stride())


def _c_rows(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """True where each block is contiguous and in C order, whatever the stride of axis 0."""
    expected = itemsize
    for axis in range(len(shape) - 1, 0, -1):
        if shape[axis] != 1 and strides[axis] != expected:
            return False
        expected *= shape[axis]
    return True


def _byte_rows(array: NDArray[Any], count: int, row_stride: int, itemsize: int) -> NDArray[np.uint8]:
    """`[n, nbytes]` over the memory of an array whose rows are contiguous."""
    shape, strides = (len(array), count), (row_stride, itemsize)
    rows = np.lib.stride_tricks.as_strided(array, shape, strides, writeable=bool(array.flags.writeable))
    return rows.view(np.uint8)


def _may_overlap(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """True unless the strides prove that no two elements share a byte."""
    if 0 in shape:
        return False
    reach = itemsize
    for stride, size in sorted((abs(stride), size) for stride, size in zip(strides, shape, strict=True) if size > 1):
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def _payload(rows: NDArray[np.uint8], nbytes: int) -> NDArray[np.uint8]:
    """The first `nbytes` of each row, as a view; ValueError where `rows` is no uint8 `[n, >= nbytes]` array."""
    if not isinstance(rows, np.ndarray) or rows.dtype != np.uint8 or rows.ndim != 2:
        raise ValueError(f"rows must be a 2-D uint8 array, not {getattr(rows, 'dtype', type(rows).__name__)}")
    if rows.shape[1] < nbytes or (rows.size and rows.shape[1] > 1 and rows.strides[1] != 1):
        raise ValueError(f"rows are {rows.shape[1]} wide, stride {rows.strides[1]}: {nbytes} contiguous are needed")
    return rows[:, :nbytes]
