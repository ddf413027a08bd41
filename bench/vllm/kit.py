"""What the tests of the connector have and the scripts here use: a vLLM in a process of its own, `vllm serve`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [each for each in (str(ROOT), str(ROOT / "tests" / "vllm")) if each not in sys.path]

from vllm_kit import Vllm, VllmError, connector, prompt  # noqa: E402
from vllm_server import Server  # noqa: E402

__all__ = ["ROOT", "Server", "Vllm", "VllmError", "connector", "prompt", "tell"]


def tell(*what: Any) -> None:
    """Progress, to standard error."""
    print(*what, file=sys.stderr, flush=True)
