"""The tests of faults share the tiny caches of tests/cache."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent / "cache"))
