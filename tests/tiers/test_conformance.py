"""Every tier of the package, and the testing wrappers without a fault, pass the shipped suite."""

import pytest

from tiercache.testing import DelayingTier, FaultyTier, HangingTier
from tiercache.testing.tier_suite import TierSuite
from tiercache.tiers.dram import DRAMTier
from tiercache.tiers.hbm import HBMTier
from tiercache.tiers.nvme import NVMeTier


class TestDRAM(TierSuite):
    @pytest.fixture
    def make_tier(self):
        return DRAMTier


class TestHBMOnCPU(TierSuite):
    @pytest.fixture
    def make_tier(self):
        pytest.importorskip("torch")
        return lambda capacity, block_nbytes: HBMTier(capacity, block_nbytes, device="cpu")


class TestNVMe(TierSuite):
    @pytest.fixture
    def make_tier(self, tmp_path):
        return lambda capacity, block_nbytes: NVMeTier(tmp_path, block_nbytes, capacity)


class TestNVMeThroughThePageCache(TierSuite):
    @pytest.fixture
    def make_tier(self, tmp_path):
        return lambda capacity, block_nbytes: NVMeTier(tmp_path, block_nbytes, capacity, direct=False)


class TestFaultyWithoutFault(TierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity, block_nbytes: FaultyTier(DRAMTier(capacity, block_nbytes))


class TestDelaying(TierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity, block_nbytes: DelayingTier(DRAMTier(capacity, block_nbytes), 0.0005)


class TestHangingAwake(TierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda capacity, block_nbytes: HangingTier(DRAMTier(capacity, block_nbytes))
