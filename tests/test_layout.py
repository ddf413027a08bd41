"""Layouts, the caller's rows, namespaces."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from tiercache.errors import ConfigError, LayoutError
from tiercache.layout import DTYPES, SLOT_ALIGNMENT, CallerRows, KVLayout, Namespace
from tiercache.tiers.base import ALIGNMENT, slot_stride

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
NUMPY_DTYPES = [name for name in DTYPES if hasattr(np, name)]
BYTE_DTYPES = [name for name in DTYPES if not hasattr(np, name)]
TORCH_DTYPES = [name for name in DTYPES if torch is not None and hasattr(torch, name)]


def _bytes(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def _bits(dtype: str, *shape: int) -> np.ndarray:
    """Bytes of any value, NaNs included; for bool 0 and 1, since torch's own copies make that of all others."""
    return _bytes(*shape) & (1 if dtype == "bool" else 255)


def _blocks(n: int, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return _bits(dtype, n, *shape[:-1], shape[-1] * DTYPES[dtype]).view(dtype)


def _tensor(n: int, shape: tuple[int, ...], dtype: str) -> Any:
    data = torch.from_numpy(_bits(dtype, n, *shape[:-1], shape[-1] * DTYPES[dtype]))
    return data.view(getattr(torch, dtype))


# --- KVLayout --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DTYPES)
def test_sizes(name: str) -> None:
    layout = KVLayout((2, 3, 5), name)
    assert layout.itemsize == (np.dtype(name).itemsize if name in NUMPY_DTYPES else 2 if name == "bfloat16" else 1)
    assert layout.block_nbytes == 30 * layout.itemsize
    assert KVLayout.from_dict(json.loads(json.dumps(layout.to_dict()))) == layout


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 262_144])
def test_stride_is_the_tiers_stride(nbytes: int) -> None:
    assert KVLayout((nbytes,), "uint8").stride == slot_stride(nbytes)
    assert SLOT_ALIGNMENT == ALIGNMENT


def test_is_frozen_and_plain() -> None:
    layout = KVLayout([np.int64(2), 3], "int8")  # type: ignore[arg-type, list-item]
    assert layout == KVLayout((2, 3), "int8")
    assert [type(axis) for axis in layout.block_shape] == [int, int]
    assert len({layout, KVLayout((2, 3), "int8")}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        layout.dtype = "uint8"  # type: ignore[misc]


@pytest.mark.parametrize("shape", [(), (0,), (2, -1), (2, 1.5), (True, 2), "22", 4, None, ("2",)])
def test_wrong_shapes(shape: Any) -> None:
    with pytest.raises(LayoutError, match="block_shape"):
        KVLayout(shape, "int8")


@pytest.mark.parametrize("dtype", ["", "half", "O", "complex64", "<f4", None, np.float32, 4])
def test_wrong_dtypes(dtype: Any) -> None:
    with pytest.raises(LayoutError, match="dtype"):
        KVLayout((2,), dtype)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"block_shape": [2]},
        {"block_shape": [2], "dtype": "int8", "more": 1},
        [2],
        None,
        {"block_shape": 2, "dtype": "int8"},
    ],
)
def test_nonsense_dicts(values: Any) -> None:
    with pytest.raises(LayoutError):
        KVLayout.from_dict(values)


@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_learns_from_arrays(name: str) -> None:
    assert KVLayout.of(np.zeros((3, 4, 5), name)) == KVLayout((4, 5), name)
    assert KVLayout.of(np.zeros((0, 4), name)) == KVLayout((4,), name)


@needs_torch
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_learns_from_tensors(name: str) -> None:
    assert KVLayout.of(torch.empty((3, 4, 5), dtype=getattr(torch, name))) == KVLayout((4, 5), name)


STRUCT = np.dtype([("k", "f4"), ("v", "f4")])


@pytest.mark.parametrize(
    ("blocks", "match"),
    [
        (np.zeros((2, 2), object), "dtype object"),
        (np.zeros((2, 2), STRUCT), "dtype .*'k'"),
        (np.zeros((2, 2), ">f4"), "byte-swapped"),
        (np.zeros((2, 2), ">u8"), "byte-swapped"),
        (np.zeros((2, 2), "V8"), "dtype void64"),
        (np.zeros((2, 2), "U3"), "dtype str96"),
        (np.zeros((2, 2), "c8"), "dtype complex64"),
        (np.zeros((2, 2), "M8[s]"), "dtype datetime64"),
        (np.zeros((2, 0), "f4"), "at least one element"),
        (np.zeros((2, 3, 0), "f4"), "at least one element"),
        (np.zeros((), "f4"), "at least one block axis"),
        (np.zeros(4, "f4"), "at least one block axis"),
        ([[1, 2]], "blocks are a list"),
        (None, "blocks are a NoneType"),
        (np.float32(1), "blocks are a float32"),
    ],
)
def test_refuses_to_learn(blocks: Any, match: str) -> None:
    with pytest.raises(LayoutError, match=match):
        KVLayout.of(blocks)


@needs_torch
def test_refuses_to_learn_from_odd_tensors() -> None:
    for blocks, match in [
        (torch.zeros(4), "block axis"),
        (torch.zeros(2, 0), "at least one element"),
        (torch.zeros(2, 2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2, 2).to_sparse(), "dense"),
        (torch.zeros(2, 2, device="meta"), "dense"),
    ]:
        with pytest.raises(LayoutError, match=match):
            KVLayout.of(blocks)


def test_check_names_both_sides() -> None:
    layout = KVLayout((2, 3), "float16")
    assert layout.check(np.zeros((5, 2, 3), np.float16)) == 5
    with pytest.raises(LayoutError, match=r"\[5, 3, 2\] of float16, this cache holds \[n, 2, 3\] of float16"):
        layout.check(np.zeros((5, 3, 2), np.float16))
    for other in (np.int16, np.uint16):  # of the same size
        with pytest.raises(LayoutError, match=r"of u?int16, this cache holds \[n, 2, 3\] of float16"):
            layout.check(np.zeros((5, 2, 3), other))
    with pytest.raises(LayoutError, match="uint8"):  # only what numpy has not may come as bytes
        layout.check(np.zeros((5, 2, 6), np.uint8))


@pytest.mark.parametrize("name", BYTE_DTYPES)
def test_what_numpy_has_not_may_come_as_bytes(name: str) -> None:
    layout = KVLayout((2, 3), name)
    assert layout.check(np.zeros((4, 2, 3 * layout.itemsize), np.uint8)) == 4
    for wrong in (np.zeros((4, 2, 3 * layout.itemsize), np.int8), np.zeros((4, 2 * layout.itemsize, 4), np.uint8)):
        with pytest.raises(LayoutError, match=name):
            layout.check(wrong)


@needs_torch
def test_check_of_tensors() -> None:
    layout = KVLayout((2, 3), "bfloat16")
    assert layout.check(torch.zeros(4, 2, 3, dtype=torch.bfloat16)) == 4
    assert layout.check(torch.zeros(4, 2, 6, dtype=torch.uint8)) == 4
    with pytest.raises(LayoutError, match=r"float16, this cache holds .* of bfloat16"):
        layout.check(torch.zeros(4, 2, 3, dtype=torch.float16))


# --- view ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("name", NUMPY_DTYPES)
def test_view_as_numpy(name: str) -> None:
    layout = KVLayout((2, 3), name)
    rows = _bytes(4, 64)
    seen = layout.view(rows)
    assert (seen.shape, seen.dtype, seen.strides[0]) == ((4, 2, 3), np.dtype(name), 64)
    assert seen[2].tobytes() == rows[2, : layout.block_nbytes].tobytes()
    rows[1] = 1
    assert seen[1].tobytes() == b"\1" * layout.block_nbytes  # the same memory
    assert layout.view(rows[:0]).shape == (0, 2, 3)
    assert layout.view(rows[::-1])[0].tobytes() == rows[3, : layout.block_nbytes].tobytes()


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("name", BYTE_DTYPES)
def test_view_as_bytes_without_torch(name: str) -> None:
    layout = KVLayout((2, 3), name)
    rows = _bytes(4, 64)
    seen = layout.view(rows)
    assert (seen.shape, seen.dtype) == ((4, 2, 3 * layout.itemsize), np.uint8)
    assert np.shares_memory(seen, rows)
    assert layout.check(seen) == 4


@needs_torch
@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_view_as_tensor(name: str) -> None:
    layout = KVLayout((2, 3), name)
    rows = _bytes(4, 64)
    seen = layout.view(rows)
    assert (tuple(seen.shape), seen.dtype) == ((4, 2, 3), getattr(torch, name))
    assert seen.data_ptr() == rows.ctypes.data
    assert seen[2].contiguous().view(torch.uint8).numpy().tobytes() == rows[2, : layout.block_nbytes].tobytes()
    assert layout.check(seen) == 4
    assert tuple(layout.view(rows[:0]).shape) == (0, 2, 3)


@needs_torch
def test_view_of_read_only_rows_keeps_them_alive() -> None:
    rows = np.arange(4096, dtype=np.int32).reshape(4, 1024).view(np.uint8)
    rows.flags.writeable = False
    seen = KVLayout((1024,), "int32").view(rows)  # torch would warn, and warnings are errors
    assert seen.data_ptr() == rows.ctypes.data
    del rows
    np.full(4096, 7, dtype=np.int32)  # would take the memory, were it free
    assert seen.flatten().tolist() == list(range(4096))


def test_view_refuses_other_rows() -> None:
    layout = KVLayout((4,), "int32")
    wide = np.zeros((3, 64), np.uint8)
    for rows in (np.zeros((3, 15), np.uint8), np.zeros((3, 16), np.int8), np.zeros(16, np.uint8), wide[:, ::2]):
        with pytest.raises(ValueError, match="rows"):
            layout.view(rows)
    with pytest.raises(ValueError, match="stride"):
        layout.view(np.zeros((3, 17), np.uint8)[:, :16])


# --- CallerRows ------------------------------------------------------------------------------------------------------

SHAPE = (3, 4, 2)


def _arrangements(blocks: Any) -> dict[str, Any]:
    """The same blocks `[6, *SHAPE]` in memory that is arranged differently (numpy or torch)."""
    lib: Any = np if isinstance(blocks, np.ndarray) else torch
    copy = (lambda x: x.copy()) if lib is np else (lambda x: x.clone())
    empty = (lambda *s: np.zeros(s, blocks.dtype)) if lib is np else (lambda *s: torch.zeros(s, dtype=blocks.dtype))
    padded, inner, moved = empty(12, *SHAPE), empty(6, 3, 8, 2), empty(*SHAPE, 6)
    padded[1::2], inner[:, :, 1::2], moved[...] = (
        blocks,
        blocks,
        blocks.transpose(1, 2, 3, 0) if lib is np else blocks.permute(1, 2, 3, 0),
    )
    return {
        "contiguous": copy(blocks),
        "every other row": padded[1::2],
        "inner axis strided": inner[:, :, 1::2],
        "axes moved": moved.transpose(3, 0, 1, 2) if lib is np else moved.permute(3, 0, 1, 2),
    }


ARRANGED = ["contiguous", "every other row", "inner axis strided", "axes moved"]


def _raw(blocks: Any) -> bytes:
    if isinstance(blocks, np.ndarray):
        return blocks.tobytes()
    return bytes(blocks.contiguous().view(torch.uint8).numpy().tobytes())


def _exercise(blocks: Any, name: str, layout: KVLayout) -> None:
    """take and put of one arrangement."""
    source, nbytes = _arrangements(blocks)[name], layout.block_nbytes
    rows = CallerRows(source, layout)
    assert (rows.n, rows.zero_copy) == (6, name in ("contiguous", "every other row"))
    assert rows.take(0, 6).tobytes() == _raw(blocks)
    taken = rows.take(2, 5)
    assert (taken.shape, taken.dtype, taken.strides[1]) == ((3, nbytes), np.uint8, 1)
    assert taken.tobytes() == _raw(blocks)[2 * nbytes : 5 * nbytes]
    assert rows.take(6, 6).shape == (0, nbytes)

    out, want = _arrangements(blocks)[name], _arrangements(blocks)["contiguous"]
    new = _bits(layout.dtype, 2, nbytes + 7)
    CallerRows(out, layout, writable=True).put(3, new)
    expected = bytearray(_raw(want))
    expected[3 * nbytes : 5 * nbytes] = new[:, :nbytes].tobytes()
    assert _raw(out) == bytes(expected)


@pytest.mark.parametrize("name", ARRANGED)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_rows_of_arrays(dtype: str, name: str) -> None:
    _exercise(_blocks(6, SHAPE, dtype), name, KVLayout(SHAPE, dtype))


@needs_torch
@pytest.mark.parametrize("name", ARRANGED)
@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_rows_of_tensors(dtype: str, name: str) -> None:
    _exercise(_tensor(6, SHAPE, dtype), name, KVLayout(SHAPE, dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e5m2"])
def test_rows_of_dtypes_that_come_as_bytes(dtype: str) -> None:
    layout = KVLayout(SHAPE, dtype)
    blocks = _bytes(6, 3, 4, 2 * layout.itemsize)
    assert CallerRows(blocks, layout).take(1, 3).tobytes() == blocks[1:3].tobytes()
    CallerRows(blocks, layout, writable=True).put(0, np.full((1, 4096), 9, np.uint8))
    assert (blocks[0] == 9).all()
    assert not (blocks[1] == 9).all()


def test_take_is_the_callers_memory() -> None:
    blocks = np.zeros((4, 8), np.int32)
    taken = KVLayout((8,), "int32").rows(blocks).take(0, 4)
    blocks[2] = 5
    assert taken[2].tobytes() == blocks[2].tobytes()
    assert np.shares_memory(taken, blocks)


@needs_torch
def test_take_of_a_bfloat16_tensor_is_its_memory() -> None:
    blocks = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert KVLayout((8,), "bfloat16").rows(blocks).take(0, 4).ctypes.data == blocks.data_ptr()


@pytest.mark.parametrize("reverse", [False, True])
def test_unusual_sources(reverse: bool) -> None:
    blocks = np.arange(24, dtype=np.int16).reshape(4, 6)[:: -1 if reverse else 1]
    layout = KVLayout((6,), "int16")
    blocks.flags.writeable = False
    rows = CallerRows(blocks, layout)
    assert rows.zero_copy
    assert rows.take(1, 3).tobytes() == blocks[1:3].tobytes()
    wide = np.broadcast_to(blocks[:1], (5, 6))
    assert CallerRows(wide, layout).take(0, 5).tobytes() == blocks[:1].tobytes() * 5
    inner = np.broadcast_to(blocks[:, :1], (4, 6))
    assert CallerRows(inner, layout).take(0, 4).tobytes() == inner.tobytes()
    assert CallerRows(blocks[:0], layout).take(0, 0).shape == (0, 12)


def test_one_element_axes_may_have_any_stride() -> None:
    blocks = np.zeros((4, 10, 10), np.int64)[:, 3:4, 3:9]
    layout = KVLayout((1, 6), "int64")
    rows = CallerRows(blocks, layout, writable=True)
    assert rows.zero_copy
    rows.put(0, _bytes(4, 48))
    assert blocks.tobytes() == _bytes(4, 48).tobytes()


@needs_torch
def test_tensors_that_need_gradients_are_detached() -> None:
    blocks = torch.ones(3, 4, requires_grad=True)
    layout = KVLayout((4,), "float32")
    assert CallerRows(blocks, layout).take(0, 3).tobytes() == np.ones(12, np.float32).tobytes()
    CallerRows(blocks, layout, writable=True).put(0, np.zeros((3, 16), np.uint8))
    assert blocks.sum().item() == 0


@needs_torch
def test_lazily_negated_tensors() -> None:
    blocks = (torch.ones(3, 4, dtype=torch.complex64) * 2j).conj().imag
    assert blocks.is_neg()
    layout = KVLayout((4,), "float32")
    assert CallerRows(blocks, layout).take(0, 3).view(np.float32).tolist() == [[-2.0] * 4] * 3
    with pytest.raises(ValueError, match="negated"):
        CallerRows(blocks, layout, writable=True)


@needs_torch
def test_tensors_on_another_device_go_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here: host tensors are taken down the path that other devices take."""
    monkeypatch.setattr("tiercache.layout._in_host_memory", lambda tensor: False)
    for dtype in ("bfloat16", "float32", "uint8", "bool"):
        layout, blocks = KVLayout(SHAPE, dtype), _tensor(6, SHAPE, dtype)
        source = blocks.permute(0, 2, 1, 3).contiguous().permute(0, 2, 1, 3)
        rows = CallerRows(source, layout, writable=True)
        assert not rows.zero_copy
        assert rows.take(1, 4).tobytes() == _raw(blocks[1:4])
        assert rows.take(2, 2).shape == (0, layout.block_nbytes)
        new = _bits(dtype, 2, layout.block_nbytes + 3)
        rows.put(4, new)
        assert _raw(source) == _raw(blocks[:4]) + new[:, : layout.block_nbytes].tobytes()
        with pytest.raises(ValueError, match="overlap"):
            CallerRows(blocks[:1].expand(6, *SHAPE), layout, writable=True)


def test_out_must_be_writable_and_must_not_overlap() -> None:
    layout = KVLayout((6,), "int16")
    fixed = np.zeros((4, 6), np.int16)
    fixed.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        CallerRows(fixed, layout, writable=True)
    wide = np.lib.stride_tricks.as_strided(np.zeros(6, np.int16), (4, 6), (0, 2))
    sliding = np.lib.stride_tricks.as_strided(np.zeros(9, np.int16), (4, 6), (2, 2))
    for overlapping in (wide, sliding):
        with pytest.raises(ValueError, match="overlap"):
            CallerRows(overlapping, layout, writable=True)
    CallerRows(wide[:1], layout, writable=True).put(0, np.zeros((1, 12), np.uint8))
    CallerRows(wide[:0], layout, writable=True)


@needs_torch
def test_expanded_tensors() -> None:
    layout = KVLayout((3, 2), "float32")
    blocks = torch.arange(6.0).view(1, 3, 2).expand(4, 3, 2)
    assert CallerRows(blocks, layout).take(0, 4).tobytes() == np.arange(6, dtype=np.float32).tobytes() * 4
    with pytest.raises(ValueError, match="overlap"):
        CallerRows(blocks, layout, writable=True)
    with pytest.raises(ValueError, match="overlap"):
        CallerRows(torch.zeros(4, 1, 2).expand(4, 3, 2), layout, writable=True)


def test_wrong_use_of_rows() -> None:
    layout, blocks = KVLayout((6,), "int16"), np.zeros((4, 6), np.int16)
    source, out = CallerRows(blocks, layout), CallerRows(blocks, layout, writable=True)
    with pytest.raises(ValueError, match="never written"):
        source.put(0, np.zeros((1, 12), np.uint8))
    for i, j in ((-1, 2), (3, 2), (0, 5)):
        with pytest.raises(IndexError, match="of 4"):
            source.take(i, j)
    with pytest.raises(IndexError, match="3 to 5 of 4"):
        out.put(3, np.zeros((2, 12), np.uint8))
    for rows in (np.zeros((1, 11), np.uint8), np.zeros((1, 12), np.int8), np.zeros(12, np.uint8)):
        with pytest.raises(ValueError, match="rows"):
            out.put(0, rows)
    with pytest.raises(LayoutError, match="this cache holds"):
        CallerRows(np.zeros((4, 6), np.uint16), layout)


# --- Namespace -------------------------------------------------------------------------------------------------------


def test_namespace_is_its_text() -> None:
    name = Namespace("llama-3 fp16")
    assert (str(name), len(name.digest)) == ("llama-3 fp16", 16)
    assert name == Namespace("llama-3 fp16")
    assert name.digest != Namespace("llama-3 fp1").digest
    assert name.digest.hex() == "6b1adc6b9b447d05ac06f812f78c428c"


def test_namespace_of_parts_is_canonical() -> None:
    one = Namespace.of(model="m", tp=2, shape=(2, 3), more={"b": None, "a": True})
    same = Namespace.of(more={"a": True, "b": None}, shape=[2, 3], tp=2, model="m")
    assert one == same
    assert one.digest == same.digest == Namespace(str(one)).digest
    assert str(one) == '{"model":"m","more":{"a":true,"b":null},"shape":[2,3],"tp":2}'
    digests = {
        Namespace.of(**parts).digest
        for parts in (
            {"tp": 2},
            {"tp": 3},
            {"tp": "2"},
            {"tp": 2.5},
            {"tp": None},
            {"pp": 2},
            {"tp": [2]},
            {"tp": True},
        )
    }
    assert len(digests) == 8


@pytest.mark.parametrize("value", ["", None, 5, b"m", "\ud800"])
def test_wrong_namespaces(value: Any) -> None:
    with pytest.raises(ConfigError, match="namespace = "):
        Namespace(value)


@pytest.mark.parametrize(
    ("part", "field"),
    [
        (b"m", "namespace.part"),
        (float("nan"), "namespace.part"),
        ({1: 2}, "namespace.part"),
        ({"a": [1, {2}]}, r"namespace.part.a\[1\]"),
        (np.float32(1), "namespace.part"),
    ],
)
def test_parts_without_a_canonical_form(part: Any, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} = "):
        Namespace.of(part=part)
    with pytest.raises(ConfigError, match="at least one part"):
        Namespace.of()
