"""Rehearsal: opens a client of a Mooncake Store in another process first, to see that it can be had.

`setup` of Mooncake's client keeps the GIL: against a master that takes connections and never answers, the whole process
stands still for seconds (seen: 3.2 s with MC_RPC_TIMEOUT_MS=3000, 4.4 s against a closed port, 0.1 s against a master
that is well). So a fresh interpreter tries it first, and only what worked there is done here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["LIMIT_S", "rehearse"]

LIMIT_S = 10.0
"""How long the other process may take; one that meets a silent master ends after 4 s or so."""
_BUFFER_NBYTES = 16 << 20


def rehearse(settings: Sequence[Any], limit_s: float = LIMIT_S) -> None:
    """settings: of `MooncakeDistributedStore.setup`, or three of `setup_dummy`. OSError where it fails there, or takes
    too long. Where no other process can be started, nothing is said against it."""
    if not sys.executable:
        return
    # -P and the path: the child finds what this process finds, and nothing in the current directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-P", "-m", "tiercache.remote.mooncake_rehearsal", json.dumps(settings)]
    quiet = subprocess.DEVNULL
    try:
        child = subprocess.Popen(command, env=environment, stdin=quiet, stdout=quiet, stderr=quiet)
    except (OSError, ValueError):
        return
    try:
        code = child.wait(limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        raise OSError(f"Mooncake's setup did not end within {limit_s:g} s in another process") from None
    if code:
        raise OSError(f"Mooncake's setup failed in another process (status {code})")


def main() -> None:
    """In the other process: 0 where a client could be opened. It gives no memory, and is not closed: that is slow."""
    from mooncake.store import MooncakeDistributedStore

    settings = json.loads(sys.argv[1])
    store = MooncakeDistributedStore()
    if len(settings) == 3:
        shared, _, client = settings
        code = store.setup_dummy(min(shared, _BUFFER_NBYTES), _BUFFER_NBYTES, client)
    else:
        local, metadata, _, _, *rest = settings
        code = store.setup(local, metadata, 0, _BUFFER_NBYTES, *rest)
    os._exit(1 if code else 0)


if __name__ == "__main__":
    main()
