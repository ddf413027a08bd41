"""Engine blocks as rows of bytes: over evenly spaced layers, packed ones, several page sizes, and split blocks."""

import numpy as np
import pytest
import torch

from tiercache.errors import LayoutError
from tiercache.integrations.vllm_rows import BlockRows, HostPages, TorchPages, _byte_pages, pages_of

BLOCKS, PAGE = 10, 64


def memory(nbytes):
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8))


def apart():
    """Layer after layer, as vLLM has it on CPUs."""
    storage = memory(3 * BLOCKS * PAGE)
    return {f"l{i}": storage[i * BLOCKS * PAGE : (i + 1) * BLOCKS * PAGE].view(BLOCKS, 2, 4, 8) for i in range(3)}


def together():
    """All layers of a block side by side."""
    storage = memory(3 * BLOCKS * PAGE).view(BLOCKS, 3, PAGE)
    return {f"l{i}": storage[:, i] for i in range(3)}


def uneven():
    return {"a": memory(BLOCKS * 64).view(BLOCKS, 64), "b": memory(BLOCKS * 32).view(BLOCKS, 32)}


def split():
    """Each block in two kernel blocks, of 2-byte elements."""
    return {"a": memory(BLOCKS * PAGE).view(torch.bfloat16).view(2 * BLOCKS, PAGE // 4)}


KINDS = [apart, together, uneven, split]


def bytes_of(layers, block):
    parts = [layer.reshape(BLOCKS, -1)[block].contiguous().view(torch.uint8).numpy() for layer in layers.values()]
    return np.concatenate(parts)


def page_nbytes(layers):
    return {name: layer.reshape(BLOCKS, -1).shape[1] * layer.element_size() for name, layer in layers.items()}


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def layers(request):
    return request.param()


@pytest.fixture(params=["numpy", "torch"])
def pages(request, layers):
    sizes = page_nbytes(layers)
    if request.param == "numpy":
        return pages_of(layers, BLOCKS, sizes)
    return TorchPages([_byte_pages(name, layer, BLOCKS, sizes[name]) for name, layer in layers.items()])


@pytest.mark.parametrize("ids", [[3], [3, 4, 5], [7, 2, 9], [0, 1], [9, 8]])
def test_blocks_come_and_go_as_bytes(layers, pages, ids):
    ids = np.array(ids, dtype=np.int32)
    assert pages.num_blocks == BLOCKS
    rows = pages.read(ids)
    assert rows.shape == (len(ids), pages.block_nbytes)
    for row, block in zip(rows, ids, strict=True):
        assert np.array_equal(row, bytes_of(layers, block))
    others = [block for block in range(BLOCKS) if block not in ids]
    kept = [bytes_of(layers, block) for block in others]
    new = np.random.default_rng(1).integers(0, 256, (len(ids), pages.block_nbytes + 5), dtype=np.uint8)
    pages.write(ids, new)
    assert np.array_equal(pages.read(ids), new[:, : pages.block_nbytes])
    for block, before in zip(others, kept, strict=True):
        assert np.array_equal(bytes_of(layers, block), before)


def test_evenly_spaced_layers_are_one_view():
    for kind in (apart, together):
        pages = pages_of(kind(), BLOCKS, dict.fromkeys(("l0", "l1", "l2"), PAGE))
        assert isinstance(pages, HostPages) and [group.shape for group in pages._groups] == [(BLOCKS, 3, PAGE)]


def test_layers_on_the_same_bytes_count_once():
    layers = apart()
    layers["again"] = layers["l0"]
    assert pages_of(layers, BLOCKS, dict.fromkeys(layers, PAGE)).block_nbytes == 3 * PAGE


@pytest.mark.parametrize("num_blocks, page", [(BLOCKS, PAGE + 1), (BLOCKS + 1, PAGE), (BLOCKS, PAGE - 1)])
def test_what_is_no_page_is_refused(num_blocks, page):
    with pytest.raises(LayoutError, match=r"layer l0.*pages of"):
        pages_of({"l0": apart()["l0"]}, num_blocks, {"l0": page})


def test_rows_are_named_by_position():
    layers = apart()
    pages = pages_of(layers, BLOCKS, dict.fromkeys(layers, PAGE))
    rows = BlockRows(pages, np.array([7, 2, 9], dtype=np.int32))
    assert np.array_equal(rows.take(1, 3)[0], bytes_of(layers, 2))
    rows.put(2, np.ones((1, pages.block_nbytes), dtype=np.uint8))
    assert bytes_of(layers, 9).all() and (bytes_of(layers, 9) == 1).all()
    with pytest.raises(IndexError, match="rows 2 to 4 of 3"):
        rows.take(2, 4)
    with pytest.raises(IndexError, match="blocks 10 to 10"):
        BlockRows(pages, np.array([10], dtype=np.int32)).take(0, 1)
