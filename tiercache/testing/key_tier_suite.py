"""The suite that every key tier passes unchanged.

```python
class TestMyKeyTier(KeyTierSuite):
    @pytest.fixture
    def make_tier(self):
        return lambda: MyKeyTier(...)
```

A tier that has no fault of its own, and room for MOST values of up to 256 KiB, passes all of it.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeAlias

import numpy as np
import pytest

from tiercache.remote.base import KEY_NBYTES, KeyTier, Values

__all__ = ["MOST", "VALUE_SIZES", "KeyTierSuite", "MakeKeyTier"]

MakeKeyTier: TypeAlias = Callable[[], KeyTier]
VALUE_SIZES = (1, 100, 4096, 262144 + 33)
MOST = 64
"""Values that a test puts at most."""
_DEADLINE_S = 5.0
_GUARD = 0xA5


def _keys(n: int, seed: int = 0) -> list[bytes]:
    return [hashlib.sha256(b"%d-%d" % (seed, i)).digest() for i in range(n)]


def _payload(n: int, nbytes: int, seed: int = 0) -> Values:
    return np.random.default_rng(seed).integers(0, 256, (n, nbytes), dtype=np.uint8)


@contextmanager
def _closing(tier: KeyTier) -> Iterator[KeyTier]:
    try:
        yield tier
    finally:
        tier.close()


class KeyTierSuite:
    """Subclass it, name the class Test..., and supply the fixture `make_tier`."""

    replaces = True
    """Whether a key put again holds the new value; else it keeps the old one until that is removed."""

    @pytest.fixture
    def make_tier(self) -> MakeKeyTier:
        """`make_tier()` returns a new tier that holds nothing under the keys of this suite; one at a time."""
        raise NotImplementedError("subclasses supply the fixture make_tier")

    def test_it_is_a_key_tier(self, make_tier: MakeKeyTier) -> None:
        """It has the methods, and a name."""
        with _closing(make_tier()) as tier:
            assert isinstance(tier, KeyTier)
            assert tier.name

    @pytest.mark.parametrize("nbytes", VALUE_SIZES)
    def test_round_trip(self, make_tier: MakeKeyTier, nbytes: int) -> None:
        """What was put is found and comes back, bit for bit; the rows put are only read."""
        keys, rows = _keys(5), _payload(5, nbytes)
        before = rows.copy()
        with _closing(make_tier()) as tier:
            for answer in (tier.put(keys, rows, _DEADLINE_S), tier.find(keys, _DEADLINE_S)):
                assert answer.dtype == np.bool_
                assert answer.shape == (5,)
                assert answer.all()
            assert (rows == before).all()
            back = np.full_like(rows, _GUARD)
            assert tier.get(keys, back, _DEADLINE_S).all()
            assert (back == rows).all()

    def test_answers_are_per_key_and_in_order(self, make_tier: MakeKeyTier) -> None:
        """Of a batch of which half is there, that half is found and comes, in the order asked for."""
        keys, rows = _keys(8), _payload(8, 500)
        with _closing(make_tier()) as tier:
            assert tier.put(keys[::2], rows[::2], _DEADLINE_S).all()
            assert tier.find(keys, _DEADLINE_S).tolist() == [True, False] * 4
            back = np.zeros_like(rows)
            assert tier.get(keys[::-1], back, _DEADLINE_S).tolist() == [False, True] * 4
            assert (back[1::2] == rows[::-1][1::2]).all()

    def test_nothing_is_there_at_first(self, make_tier: MakeKeyTier) -> None:
        """A key that nobody put is not found, and does not come."""
        with _closing(make_tier()) as tier:
            assert not tier.find(_keys(3), _DEADLINE_S).any()
            assert not tier.get(_keys(3), _payload(3, 100), _DEADLINE_S).any()

    def test_no_keys(self, make_tier: MakeKeyTier) -> None:
        """A batch of none is answered with none."""
        with _closing(make_tier()) as tier:
            rows = _payload(0, 100)
            assert tier.put([], rows, _DEADLINE_S).shape == tier.get([], rows, _DEADLINE_S).shape == (0,)
            assert tier.find([], _DEADLINE_S).shape == tier.remove([], _DEADLINE_S).shape == (0,)

    def test_the_last_put_counts(self, make_tier: MakeKeyTier) -> None:
        """A key put again holds the new value, also of another width; where the tier does not replace, once the old one
        was removed."""
        keys = _keys(2)
        with _closing(make_tier()) as tier:
            for turn, nbytes in enumerate((300, 300, 700)):
                if not self.replaces:
                    assert tier.remove(keys, _DEADLINE_S).all()
                rows = _payload(2, nbytes, seed=turn)
                assert tier.put(keys, rows, _DEADLINE_S).all()
                back = np.zeros_like(rows)
                assert tier.get(keys, back, _DEADLINE_S).all()
                assert (back == rows).all()

    def test_a_key_put_again_holds_a_whole_value(self, make_tier: MakeKeyTier) -> None:
        """Of the same width it is one of the two; of another width it is had once it was put after a miss."""
        keys = _keys(2)
        with _closing(make_tier()) as tier:
            old, new = _payload(2, 300, seed=1), _payload(2, 300, seed=2)
            assert tier.put(keys, old, _DEADLINE_S).all()
            assert tier.put(keys, new, _DEADLINE_S).all()
            back = np.zeros_like(old)
            assert tier.get(keys, back, _DEADLINE_S).all()
            assert (back == new).all() if self.replaces else (back == old).all()
            wider = _payload(2, 700, seed=3)
            back = np.zeros_like(wider)
            assert tier.put(keys, wider, _DEADLINE_S).all()
            if not tier.get(keys, back, _DEADLINE_S).all():
                assert not self.replaces
                assert tier.put(keys, wider, _DEADLINE_S).all()
                assert tier.get(keys, back, _DEADLINE_S).all()
            assert (back == wider).all()

    @pytest.mark.parametrize("width", [99, 101, 4096])
    def test_a_value_of_another_width_is_a_miss(self, make_tier: MakeKeyTier, width: int) -> None:
        """Never a part of a value, never a row that is only begun."""
        with _closing(make_tier()) as tier:
            assert tier.put(_keys(1), _payload(1, 100), _DEADLINE_S).all()
            assert not tier.get(_keys(1), np.zeros((1, width), dtype=np.uint8), _DEADLINE_S).any()

    def test_rows_with_any_stride(self, make_tier: MakeKeyTier) -> None:
        """Rows may lie apart; what lies between them is not touched."""
        wide, back = _payload(4, 1000), np.full((4, 1000), _GUARD, dtype=np.uint8)
        with _closing(make_tier()) as tier:
            assert tier.put(_keys(4), wide[:, :600], _DEADLINE_S).all()
            assert tier.get(_keys(4), back[:, :600], _DEADLINE_S).all()
        assert (back[:, :600] == wide[:, :600]).all()
        assert (back[:, 600:] == _GUARD).all()

    def test_a_row_may_be_reused_after_put(self, make_tier: MakeKeyTier) -> None:
        """The tier has its own copy."""
        rows = _payload(3, 400)
        before = rows.copy()
        with _closing(make_tier()) as tier:
            assert tier.put(_keys(3), rows, _DEADLINE_S).all()
            rows[:] = 0
            assert tier.get(_keys(3), rows, _DEADLINE_S).all()
        assert (rows == before).all()

    def test_remove(self, make_tier: MakeKeyTier) -> None:
        """What was removed is gone; removing what is not there is no failure."""
        keys = _keys(4)
        with _closing(make_tier()) as tier:
            assert tier.put(keys, _payload(4, 100), _DEADLINE_S).all()
            assert tier.remove([keys[1], _keys(1, seed=9)[0]], _DEADLINE_S).all()
            assert tier.find(keys, _DEADLINE_S).tolist() == [True, False, True, True]

    def test_keys_that_differ_in_one_bit(self, make_tier: MakeKeyTier) -> None:
        """Keys are bytes, all 32 of them: zeros, line ends and what is no text included."""
        first = bytes(KEY_NBYTES)
        keys = [first, b"\r\n" + first[2:], first[:-1] + b"\x01", b"\xff" * KEY_NBYTES]
        rows = _payload(4, 64)
        with _closing(make_tier()) as tier:
            assert tier.put(keys, rows, _DEADLINE_S).all()
            back = np.zeros_like(rows)
            assert tier.get(keys, back, _DEADLINE_S).all()
            assert (back == rows).all()

    def test_a_large_batch(self, make_tier: MakeKeyTier) -> None:
        """As many as a job has."""
        keys, rows = _keys(MOST), _payload(MOST, 5000)
        with _closing(make_tier()) as tier:
            assert tier.put(keys, rows, _DEADLINE_S).all()
            back = np.zeros_like(rows)
            assert tier.get(keys, back, _DEADLINE_S).all()
            assert (back == rows).all()

    def test_several_threads(self, make_tier: MakeKeyTier) -> None:
        """Each reads what it put, whatever the others do."""
        wrong: list[str] = []

        def work(seed: int) -> None:
            for turn in range(8):
                keys, rows = _keys(4, seed), _payload(4, 2000, seed * 100 + turn)
                back = np.zeros_like(rows)
                if not self.replaces:
                    tier.remove(keys, _DEADLINE_S)
                if not tier.put(keys, rows, _DEADLINE_S).all() or not tier.get(keys, back, _DEADLINE_S).all():
                    wrong.append(f"{seed}: missing in turn {turn}")
                elif (back != rows).any():
                    wrong.append(f"{seed}: other bytes in turn {turn}")

        with _closing(make_tier()) as tier:
            tier.find(_keys(1), _DEADLINE_S)  # one that connects at its first call may refuse others meanwhile
            threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        assert wrong == []

    def test_after_close(self, make_tier: MakeKeyTier) -> None:
        """Closing twice is no error, and afterwards nothing comes: a miss or an OSError."""
        tier = make_tier()
        assert tier.put(_keys(1), _payload(1, 100), _DEADLINE_S).all()
        tier.close()
        tier.close()
        with suppress(OSError):
            assert not tier.get(_keys(1), _payload(1, 100), _DEADLINE_S).any()
