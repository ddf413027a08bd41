"""Faults that random runs found, each by itself and in the order that shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crash_world import BLOCK, Shape, bytes_of, ids_of, open_cache, right, tokens_of


def test_a_load_that_is_over_before_load_returns_is_completed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker may have completed the future by the time `load` looks whether it is done already."""
    with open_cache(tmp_path / "kv", Shape()) as cache:
        ids = ids_of("0.0", cache.epoch.hex(), {})
        cache.store(tokens_of("0.0"), bytes_of(ids))
        assert cache.flush(20.0)
        match, planning = cache.lookup(tokens_of("0.0")), cache._link.planning

        @contextmanager
        def lingering() -> Iterator[Any]:
            with planning() as stack:
                yield stack
            until = time.monotonic() + 10.0
            while any(tier.jobs for tier in cache.stats().tiers) and time.monotonic() < until:
                time.sleep(0.001)
            time.sleep(0.02)  # the future is completed after the job's end is known

        out = np.zeros((len(ids), BLOCK), dtype=np.uint8)
        with monkeypatch.context() as patch:
            patch.setattr(cache._link, "planning", lingering)
            future = cache.load(match, out=out)
        assert future.result(10.0).block_count == len(ids) and right(ids, out).all()
        assert cache.stats().mover["delivery_errors"] == 0
