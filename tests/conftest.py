"""Shared by all tests."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

# What tests share says why it fails, as the tests themselves do.
pytest.register_assert_rewrite("cache_kit", "catalog_rig", "mover_kit", "planner_kit", "planner_steps", "sim_kit")

# "ci" (default): the same examples every time, so that a red run is about the change. "nightly": new ones.
settings.register_profile("ci", derandomize=True, database=None, print_blob=False)
settings.register_profile("nightly", derandomize=False, max_examples=500, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
else:
    torch.set_num_threads(1)  # more threads make copies slower on a contended machine


@pytest.fixture(autouse=True)
def _no_kill_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment of whoever runs the tests must not turn the cache off."""
    monkeypatch.delenv("TIERCACHE", raising=False)


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has not imported torch."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def python() -> Callable[..., str]:
    """Run code in a fresh interpreter with warnings as errors; its stdout."""

    def run(code: str, **env: str) -> str:
        command = [sys.executable, "-W", "error", "-c", code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={**_clean_env(), **env})
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def _clean_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("TIERCACHE", "PYTHONHASHSEED")}
