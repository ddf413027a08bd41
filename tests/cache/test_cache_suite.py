"""The shipped suite, over every stack of tiers and on two file systems."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from cache_kit import SLOT

from tiercache import DRAM, HBM, NVMe, TieredKVCache
from tiercache.testing.cache_suite import CacheSuite


def maker(*tiers):
    return lambda **settings: TieredKVCache(tiers, namespace="suite", **settings)


class TestDram(CacheSuite):
    @pytest.fixture
    def make_cache(self):
        return maker(DRAM(24 * SLOT))


class TestDramNvme(CacheSuite):
    @pytest.fixture
    def make_cache(self, tmp_path):
        return maker(DRAM(24 * SLOT), NVMe(tmp_path / "kv", 150 * SLOT, write_after_s=None))


class TestDramSmallNvme(CacheSuite):
    """Promotion is exclusive, everything is written at once."""

    @pytest.fixture
    def make_cache(self, tmp_path):
        return maker(DRAM(16 * SLOT), NVMe(tmp_path / "kv", 24 * SLOT, write_after_s=0.0))


class TestHbmDram(CacheSuite):
    @pytest.fixture
    def make_cache(self):
        return maker(HBM(16 * SLOT, "cpu"), DRAM(32 * SLOT))


class TestHbmDramNvme(CacheSuite):
    @pytest.fixture
    def make_cache(self, tmp_path):
        return maker(HBM(16 * SLOT, "cpu"), DRAM(32 * SLOT), NVMe(tmp_path / "kv", 100 * SLOT, write_after_s=0.05))


class TestSharedMemory(CacheSuite):
    """No O_DIRECT, no data sync worth the name."""

    @pytest.fixture
    def make_cache(self):
        if not os.access("/dev/shm", os.W_OK):
            pytest.skip("no /dev/shm here")
        folder = Path(tempfile.mkdtemp(dir="/dev/shm"))
        yield maker(DRAM(24 * SLOT), NVMe(folder / "kv", 64 * SLOT, durability="process"))
        shutil.rmtree(folder)
