"""How late this process itself is: a thread that sleeps and looks how long it slept, beside what is measured."""

from __future__ import annotations

import threading
import time
from types import TracebackType

import numpy as np

__all__ = ["Lateness"]

_NAP_S = 0.01


class Lateness:
    """While it is entered, measures by how much a sleep is too long: the machine is busy, or the interpreter is."""

    def __init__(self) -> None:
        self._over: list[float] = [0.0]
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def p99(self) -> float:
        """Seconds that one sleep in a hundred was too long."""
        return float(np.quantile(self._over, 0.99))

    def most(self) -> float:
        """Seconds that the longest sleep was too long."""
        return max(self._over)

    def _work(self) -> None:
        while not self._ended.is_set():
            began = time.monotonic()
            time.sleep(_NAP_S)
            self._over.append(time.monotonic() - began - _NAP_S)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join(5)
