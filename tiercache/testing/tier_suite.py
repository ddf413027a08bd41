"""The suite that every slot tier passes unchanged.

```python
class TestMyTier(TierSuite):
    @pytest.fixture
    def make_tier(self, tmp_path):
        return lambda capacity, block_nbytes: MyTier(tmp_path, capacity, block_nbytes)
```

A tier that has no fault of its own passes all of it: on healthy storage every block arrives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import numpy as np
import pytest

from tiercache.tiers.base import ALIGNMENT, Rows, SlotTier
from tiercache.types import Slots

__all__ = ["BLOCK_SIZES", "MakeTier", "TierSuite"]

MakeTier: TypeAlias = Callable[[int, int], SlotTier]
"""`make_tier(capacity, block_nbytes)`."""

BLOCK_SIZES = (1, 100, 4095, 4096, 4097, 262144 + 1)
_GUARD = 0xA5


def _slots(*numbers: int) -> Slots:
    return np.array(numbers, dtype=np.int32)


def _payload(n: int, nbytes: int, seed: int = 0) -> Rows:
    return np.random.default_rng(seed).integers(0, 256, (n, nbytes), dtype=np.uint8)


@contextmanager
def _closing(tier: SlotTier) -> Iterator[SlotTier]:
    try:
        yield tier
    finally:
        tier.close()


class TierSuite:
    """Subclass it, name the class Test..., and supply the fixture `make_tier`."""

    @pytest.fixture
    def make_tier(self) -> MakeTier:
        """`make_tier(capacity, block_nbytes)` returns a new, empty tier; one test may make several, one at a time."""
        raise NotImplementedError("subclasses supply the fixture make_tier")

    # -- what it says of itself -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("block_nbytes", BLOCK_SIZES)
    def test_shape(self, make_tier: MakeTier, block_nbytes: int) -> None:
        """Capacity and block size as asked for; the stride is the next multiple of ALIGNMENT."""
        with _closing(make_tier(3, block_nbytes)) as tier:
            assert isinstance(tier, SlotTier)
            assert (tier.capacity, tier.block_nbytes) == (3, block_nbytes)
            assert tier.stride % ALIGNMENT == 0
            assert 0 <= tier.stride - block_nbytes < ALIGNMENT
            assert tier.name

    def test_slab_is_the_slots(self, make_tier: MakeTier) -> None:
        """Where there is a slab, it shows what was written and starts aligned."""
        with _closing(make_tier(4, 100)) as tier:
            if tier.slab is None:
                return
            assert tier.slab.shape == (4, tier.stride)
            assert tier.slab.dtype == np.uint8
            assert tier.slab.ctypes.data % ALIGNMENT == 0
            rows = _payload(1, 100)
            assert tier.write(_slots(2), rows).all()
            assert (tier.slab[2, :100] == rows[0]).all()

    # -- bytes come back --------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("block_nbytes", BLOCK_SIZES)
    @pytest.mark.parametrize("full_stride", [False, True], ids=["block_nbytes", "stride"])
    @pytest.mark.parametrize(
        "numbers", [(0, 1, 2, 3, 4), (4, 2, 0, 3, 1), (1, 2, 4, 5, 0), (5,)], ids=["run", "scattered", "runs", "one"]
    )
    def test_round_trip(
        self, make_tier: MakeTier, block_nbytes: int, full_stride: bool, numbers: tuple[int, ...]
    ) -> None:
        """What was written is read, with rows as wide as a block or as a slot."""
        with _closing(make_tier(6, block_nbytes)) as tier:
            width = tier.stride if full_stride else block_nbytes
            rows = _payload(len(numbers), width)
            before = rows.copy()
            ok = tier.write(_slots(*numbers), rows)
            assert ok.dtype == np.bool_
            assert ok.shape == (len(numbers),)
            assert ok.all()
            assert (rows == before).all()
            back = np.full_like(rows, _GUARD)
            assert tier.read(_slots(*numbers), back).all()
            assert (back[:, :block_nbytes] == rows[:, :block_nbytes]).all()

    def test_read_in_another_order(self, make_tier: MakeTier) -> None:
        """Slots are told apart by number, not by the order in which they were written."""
        with _closing(make_tier(8, 5000)) as tier:
            rows = _payload(8, 5000)
            assert tier.write(_slots(*range(8)), rows).all()
            order = _slots(7, 0, 3, 4, 5, 1)
            back = np.zeros((6, 5000), dtype=np.uint8)
            assert tier.read(order, back).all()
            assert (back == rows[order]).all()

    def test_the_last_write_counts(self, make_tier: MakeTier) -> None:
        """A slot written again holds the new block."""
        with _closing(make_tier(2, 4097)) as tier:
            for seed in range(3):
                rows = _payload(2, 4097, seed)
                assert tier.write(_slots(1, 0), rows).all()
            back = np.zeros((2, 4097), dtype=np.uint8)
            assert tier.read(_slots(1, 0), back).all()
            assert (back == rows).all()

    @pytest.mark.parametrize("block_nbytes", [100, 4096, 4097])
    def test_rows_apart(self, make_tier: MakeTier, block_nbytes: int) -> None:
        """Rows need not touch each other: any stride on axis 0, also backwards."""
        with _closing(make_tier(6, block_nbytes)) as tier:
            wide = _payload(12, block_nbytes + 13)
            rows = wide[::2, 7 : 7 + block_nbytes]
            assert tier.write(_slots(0, 1, 2, 5, 4, 3), rows).all()
            space = np.full((6, block_nbytes + 64), _GUARD, dtype=np.uint8)
            back = space[::-1, 32 : 32 + block_nbytes]
            assert tier.read(_slots(0, 1, 2, 5, 4, 3), back).all()
            assert (back == rows).all()

    @pytest.mark.parametrize("full_stride", [False, True], ids=["block_nbytes", "stride"])
    def test_aligned_rows(self, make_tier: MakeTier, full_stride: bool) -> None:
        """Page-aligned rows, as a slab or staging has them."""
        with _closing(make_tier(4, 5000)) as tier:
            space = np.zeros(4 * tier.stride + ALIGNMENT, dtype=np.uint8)
            begin = -space.ctypes.data % ALIGNMENT
            aligned = space[begin : begin + 4 * tier.stride].reshape(4, tier.stride)
            aligned[:] = _payload(4, tier.stride)
            rows = aligned if full_stride else aligned[:, :5000]
            expected = rows[:, :5000].copy()
            assert tier.write(_slots(0, 1, 3, 2), rows).all()
            rows[:] = 0
            assert tier.read(_slots(0, 1, 3, 2), rows).all()
            assert (rows[:, :5000] == expected).all()

    # -- and nothing else changes -----------------------------------------------------------------------------------

    @pytest.mark.parametrize("block_nbytes", BLOCK_SIZES)
    def test_no_byte_outside_the_rows(self, make_tier: MakeTier, block_nbytes: int) -> None:
        """A read writes its rows, and not one byte around them."""
        with _closing(make_tier(4, block_nbytes)) as tier:
            rows = _payload(3, block_nbytes)
            assert tier.write(_slots(1, 2, 0), rows).all()
            space = np.full((5, block_nbytes + 128), _GUARD, dtype=np.uint8)
            assert tier.read(_slots(1, 2, 0), space[1:4, 64 : 64 + block_nbytes]).all()
            assert (space[1:4, 64 : 64 + block_nbytes] == rows).all()
            assert (space[1:4, :64] == _GUARD).all()
            assert (space[1:4, 64 + block_nbytes :] == _GUARD).all()
            assert (space[[0, 4]] == _GUARD).all()

    @pytest.mark.parametrize("full_stride", [False, True], ids=["block_nbytes", "stride"])
    def test_other_slots_stay(self, make_tier: MakeTier, full_stride: bool) -> None:
        """Writing some slots leaves all others as they were."""
        with _closing(make_tier(8, 5000)) as tier:
            width = tier.stride if full_stride else 5000
            rows = _payload(8, 5000)
            assert tier.write(_slots(*range(8)), rows).all()
            new = _payload(3, width, seed=1)
            assert tier.write(_slots(2, 3, 6), new).all()
            rows[[2, 3, 6]] = new[:, :5000]
            back = np.zeros_like(rows)
            assert tier.read(_slots(*range(8)), back).all()
            assert (back == rows).all()

    def test_no_slots(self, make_tier: MakeTier) -> None:
        """Nothing to do is done at once."""
        with _closing(make_tier(2, 100)) as tier:
            none = np.empty((0, 100), dtype=np.uint8)
            assert tier.write(_slots(), none).shape == (0,)
            assert tier.read(_slots(), none).shape == (0,)

    # -- misuse raises, before a byte moves -------------------------------------------------------------------------

    @pytest.mark.parametrize("numbers", [(0, 4), (-1, 0), (2**31 - 1, 0)])
    @pytest.mark.parametrize("op", ["read", "write"])
    def test_slots_outside(self, make_tier: MakeTier, op: str, numbers: tuple[int, int]) -> None:
        """Slots outside the tier are refused, and the others of the same call are not touched."""
        with _closing(make_tier(4, 100)) as tier:
            rows = _payload(4, 100)
            assert tier.write(_slots(0, 1, 2, 3), rows).all()
            with pytest.raises((IndexError, ValueError)):
                getattr(tier, op)(_slots(*numbers), np.zeros((2, 100), dtype=np.uint8))
            back = np.zeros_like(rows)
            assert tier.read(_slots(0, 1, 2, 3), back).all()
            assert (back == rows).all()

    @pytest.mark.parametrize("width", [0, 99, 101, 4095, 8192])
    @pytest.mark.parametrize("op", ["read", "write"])
    def test_wrong_width(self, make_tier: MakeTier, op: str, width: int) -> None:
        """A row is as wide as a block or as a slot."""
        with _closing(make_tier(4, 100)) as tier, pytest.raises(ValueError):
            getattr(tier, op)(_slots(0, 1), np.zeros((2, width), dtype=np.uint8))

    @pytest.mark.parametrize("op", ["read", "write"])
    def test_wrong_number_of_rows(self, make_tier: MakeTier, op: str) -> None:
        """One row per slot."""
        with _closing(make_tier(4, 100)) as tier, pytest.raises(ValueError):
            getattr(tier, op)(_slots(0, 1), np.zeros((3, 100), dtype=np.uint8))

    # -- threads and the end ----------------------------------------------------------------------------------------

    def test_threads_on_different_slots(self, make_tier: MakeTier) -> None:
        """Reads and writes of different slots at the same time do not disturb each other."""
        per_thread, n_threads, block_nbytes = 3, 4, 9000
        wrong: list[str] = []

        def work(tier: SlotTier, number: int) -> None:
            slots = np.arange(number, per_thread * n_threads, n_threads, dtype=np.int32)
            back = np.zeros((per_thread, block_nbytes), dtype=np.uint8)
            for round_ in range(15):
                rows = _payload(per_thread, block_nbytes, seed=number * 100 + round_)
                if not (tier.write(slots, rows).all() and tier.read(slots, back).all() and (back == rows).all()):
                    wrong.append(f"thread {number} in round {round_}")

        with _closing(make_tier(per_thread * n_threads, block_nbytes)) as tier:
            threads = [threading.Thread(target=work, args=(tier, number)) for number in range(n_threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not any(thread.is_alive() for thread in threads)
            assert wrong == []

    def test_sync(self, make_tier: MakeTier) -> None:
        """On healthy storage a sync succeeds, and changes nothing."""
        with _closing(make_tier(2, 100)) as tier:
            rows = _payload(2, 100)
            assert tier.write(_slots(0, 1), rows).all()
            assert tier.sync() is True
            back = np.zeros_like(rows)
            assert tier.read(_slots(0, 1), back).all()
            assert (back == rows).all()

    def test_close_twice(self, make_tier: MakeTier) -> None:
        """The second close does nothing."""
        tier = make_tier(2, 100)
        assert tier.write(_slots(0), _payload(1, 100)).all()
        tier.close()
        tier.close()
