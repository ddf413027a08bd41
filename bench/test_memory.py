"""Bytes of memory that the index takes per block."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench.child import run_child
from bench.machine import ROOT
from bench.pairs import Figure, Spread
from bench.rows import row
from bench.scale import Scale
from tiercache.sim import example

_WHOLE = ROOT.parent / "shared" / "traces" / "mooncake_conversation.jsonl.gz"


@pytest.fixture
def trace(pytestconfig: pytest.Config) -> tuple[Path, str]:
    """The conversation trace, or the slice of it that the package ships; and which of them it is."""
    given = pytestconfig.option.bench_trace or os.environ.get("TIERCACHE_TRACE")
    if given:
        return Path(given), f"given: {Path(given).name}"
    if _WHOLE.exists():
        return _WHOLE, "whole conversation trace"
    return example.path(), "the slice of the conversation trace that the package ships"


def test_trace(trace: tuple[Path, str], done: Callable[[Figure], None], scale: Scale) -> None:
    path, what = trace
    requests = scale.pick([], [3_000], [100])
    weighed = run_child("index_memory", "trace", path, *requests)
    done(_figure("memory/trace", weighed, trace=what))


def test_single(done: Callable[[Figure], None], scale: Scale) -> None:
    done(_figure("memory/single", run_child("index_memory", "single", scale.pick(30_000, 10_000, 1_000))))


def _figure(name: str, weighed: dict[str, Any], **facts: Any) -> Figure:
    """One run is enough: the same objects are allocated every time."""
    bytes_per_block = weighed.pop("bytes_per_block")
    assert weighed["blocks"] > 0
    return Figure(row(name), Spread.of([bytes_per_block]), 1, facts={**weighed, **facts})
