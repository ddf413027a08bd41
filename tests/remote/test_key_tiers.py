"""Every key tier of the package, and the testing wrappers without a fault, pass the shipped suite; what they add."""

import threading
import time

import numpy as np
import pytest

from tiercache.testing import FaultyKeyTier, HangingKeyTier, MemoryKeyTier, SlowKeyTier, WrappedKeyTier
from tiercache.testing.key_tier_suite import MOST, KeyTierSuite

KEYS = [bytes([i]) * 32 for i in range(6)]
ROWS = np.arange(6 * 10, dtype=np.uint8).reshape(6, 10)


class TestMemory(KeyTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda: MemoryKeyTier(MOST)


class TestMemoryThatRefuses(KeyTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda: MemoryKeyTier(MOST, refuses=True)


class TestWrapped(KeyTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda: WrappedKeyTier(MemoryKeyTier(MOST))


class TestSlow(KeyTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda: SlowKeyTier(MemoryKeyTier(MOST), 0.001)


class TestFaultyWithoutFault(KeyTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda: FaultyKeyTier(MemoryKeyTier(MOST))


class TestHangingWithoutHang(KeyTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda: HangingKeyTier(MemoryKeyTier(MOST))


def test_a_full_one_lets_go_of_what_was_used_longest_ago():
    tier = MemoryKeyTier(3)
    assert tier.put(KEYS[:3], ROWS[:3], 1).all()
    tier.get(KEYS[:1], ROWS[:1].copy(), 1)
    tier.find(KEYS[1:2], 1)
    assert tier.put(KEYS[3:4], ROWS[3:4], 1).all()
    assert tier.find(KEYS[:4], 1).tolist() == [True, False, True, True]
    assert len(tier) == 3


def test_a_full_one_refuses_what_is_new():
    tier = MemoryKeyTier(2, refuses=True)
    assert tier.put(KEYS[:3], ROWS[:3], 1).tolist() == [True, True, False]
    assert tier.put(KEYS[1:2], ROWS[5:6], 1).all()
    assert tier.find(KEYS[:3], 1).tolist() == [True, True, False]
    assert tier.value(KEYS[1]) == ROWS[5].tobytes()


def test_no_room_at_all_is_misuse():
    with pytest.raises(ValueError, match="capacity = 0"):
        MemoryKeyTier(0)


def test_slow_by_operation_and_within_a_deadline():
    tier = SlowKeyTier(MemoryKeyTier(8), lambda op, n: 0.3 * n if op == "get" else 0.0)
    tier.put(KEYS, ROWS, 1)
    began = time.monotonic()
    assert tier.get(KEYS[:2], ROWS[:2].copy(), 1).all()
    assert time.monotonic() - began >= 0.6
    tier.gives_up = True
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"longer than 0\.03 s"):
        tier.get(KEYS[:3], ROWS[:3].copy(), 0.03)
    assert 0.03 <= time.monotonic() - began < 0.5


def test_faults_as_told():
    tier = FaultyKeyTier(MemoryKeyTier(8))
    tier.put(KEYS, ROWS, 1)
    tier.gone.add(KEYS[1])
    tier.flips[KEYS[2]] = (4, 0x10)
    back = np.zeros_like(ROWS)
    assert tier.find(KEYS, 1).all()
    assert tier.get(KEYS, back, 1).tolist() == [True, False, True, True, True, True]
    assert np.flatnonzero((back != ROWS).any(axis=1)).tolist() == [1, 2]
    assert back[2, 4] == ROWS[2, 4] ^ 0x10
    tier.raises["find"] = OSError(111, "refused")
    with pytest.raises(OSError, match="refused"):
        tier.find(KEYS, 1)
    tier.heal()
    assert tier.find(KEYS, 1).all() and tier.get(KEYS, back, 1).all() and (back == ROWS).all()


def test_a_hang_until_woken():
    tier = HangingKeyTier(MemoryKeyTier(8))
    tier.put(KEYS, ROWS, 1)
    tier.hang("find")
    found = []
    thread = threading.Thread(target=lambda: found.append(tier.find(KEYS, 1)))
    thread.start()
    assert tier.wait_hung(1) and tier.hung == 1 and not found
    assert tier.get(KEYS, ROWS.copy(), 1).all()
    tier.wake()
    thread.join(5)
    assert found[0].all() and tier.hung == 0


def test_values_can_be_spoilt():
    tier = MemoryKeyTier(8)
    tier.put(KEYS, ROWS, 1)
    tier.spoil(KEYS[0], 9, 0x80)
    assert tier.value(KEYS[0]) == ROWS[0, :9].tobytes() + bytes([ROWS[0, 9] ^ 0x80])
    tier.replace(KEYS[1], b"short")
    assert tier.get(KEYS[:2], ROWS[:2].copy(), 1).tolist() == [True, False]
    assert tier.held()[-1] == KEYS[0]
