"""Runs one of the benchmark's own programs in a process of its own, and reads the JSON object that it prints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from bench.machine import ROOT

__all__ = ["run_child"]


def run_child(module: str, *arguments: object, timeout_s: float = 600.0, ends: int = 0) -> dict[str, Any]:
    """`python -m bench.module arguments...`; the last line of its output. AssertionError unless it ends with `ends`."""
    command = [sys.executable, "-m", f"bench.{module}", *map(str, arguments)]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == ends, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
