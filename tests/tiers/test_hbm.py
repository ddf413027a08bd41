"""What the shared suite does not ask of HBM: the device, its tensor, and what is said where there is none."""

import sys

import numpy as np
import pytest

from tiercache.errors import CacheClosedError, ConfigError
from tiercache.tiers.device import CPUDevice, open_device
from tiercache.tiers.hbm import HBMTier


def slots(*numbers):
    return np.array(numbers, dtype=np.int32)


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_without_torch_the_install_line_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install tiercache\[hbm\]"):
        HBMTier(2, 100, device="cpu")


def test_without_cuda_the_cpu_is_named(torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match='device="cpu"') as caught:
            HBMTier(2, 100, device=device)
        assert (caught.value.field, caught.value.value) == ("device", device)


@pytest.mark.parametrize("device", ["tpu", "cudaX", ""])
def test_an_unknown_device(torch, device):
    with pytest.raises(ConfigError, match='device="cpu"'):
        open_device(device)


def test_cuda_is_the_default_and_never_quietly_the_cpu(torch, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError):
        HBMTier(2, 100)


def test_the_module_does_not_import_torch(python):
    python(
        "import sys, tiercache.tiers.hbm, tiercache.tiers.device, tiercache.mover; assert 'torch' not in sys.modules"
    )


def test_the_tensor_is_the_slots(torch):
    tier = HBMTier(4, 5000, device="cpu")
    rows = np.random.default_rng(0).integers(0, 256, (4, 5000), dtype=np.uint8)
    assert tier.write(slots(0, 1, 2, 3), rows).all()
    view = tier.slots_view(1, 3)
    assert isinstance(view, torch.Tensor)
    assert (view.dtype, tuple(view.shape), view.stride()) == (torch.uint8, (2, 5000), (8192, 1))
    assert (view.numpy() == rows[1:3]).all()
    view[0, 0] = 77
    assert tier.slab[1, 0] == 77
    for begin, end in [(-1, 1), (2, 5), (3, 2)]:
        with pytest.raises(IndexError):
            tier.slots_view(begin, end)
    tier.close()


def test_read_only_rows_can_be_written(torch):
    """torch warns of arrays that it may not write."""
    tier = HBMTier(2, 100, device="cpu")
    rows = np.full((2, 100), 3, dtype=np.uint8)
    rows.flags.writeable = False
    assert tier.write(slots(1, 0), rows).all()
    assert (tier.slab[:, :100] == 3).all()
    tier.close()


def test_memory_stays_as_long_as_someone_reads_it(torch):
    tier = HBMTier(2, 100, device="cpu")
    tier.write(slots(0), np.full((1, 100), 9, dtype=np.uint8))
    view = tier.slots_view(0, 1)
    tier.close()
    assert (view == 9).all()
    assert tier.slab is None
    with pytest.raises(CacheClosedError):
        tier.read(slots(0), np.zeros((1, 100), dtype=np.uint8))
    with pytest.raises(CacheClosedError):
        tier.slots_view(0, 1)


class HiddenDevice(CPUDevice):
    """A device whose memory the host does not see, as CUDA's."""

    name = "hidden"

    def __init__(self, torch):
        super().__init__(torch)
        self.synchronized = 0

    def host_view(self, tensor):
        return None

    def synchronize(self):
        self.synchronized += 1


def test_a_device_that_shows_no_memory(torch):
    device = HiddenDevice(torch)
    tier = HBMTier(4, 5000, device=device)
    assert tier.slab is None
    rows = np.random.default_rng(0).integers(0, 256, (3, 5000), dtype=np.uint8)
    assert tier.write(slots(3, 0, 1), rows).all()
    back = np.zeros_like(rows)
    assert tier.read(slots(3, 0, 1), back).all()
    assert (back == rows).all()
    assert tier.sync() is True
    assert device.synchronized == 1
    assert repr(tier) == "HBMTier('hbm', 4 x 5000 bytes on hidden, open)"
    tier.close()


@pytest.mark.parametrize("sizes", [(0, 100), (1, 0)])
def test_sizes_below_one(torch, sizes):
    with pytest.raises(ValueError):
        HBMTier(*sizes, device="cpu")
