"""One process to fork from, for all crash tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tiercache.testing.crash import Zygote


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote(["crash_scripts"], [str(Path(__file__).parent)]) as process:
        yield process
