"""The example trace that ships with the package: 3,000 real requests of a chat service.

Its source and licence (Apache-2.0) are in NOTICE and LICENSE beside it.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

__all__ = ["FILE_NAME", "path"]

FILE_NAME = "mooncake_conversation_3000.jsonl.gz"


def path() -> Path:
    """Where the example trace lies (Mooncake JSONL, gzipped, blocks of 512 tokens)."""
    return Path(str(files(__name__) / FILE_NAME))
