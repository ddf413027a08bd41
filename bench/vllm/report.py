"""docs/vllm-benchmarks.md from the newest results."""

from pathlib import Path


def write(results: Path) -> Path:
    raise NotImplementedError
