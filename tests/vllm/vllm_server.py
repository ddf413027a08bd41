"""`vllm serve` as an operator starts it: several processes, requests over HTTP, ended by signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_child import ENVIRONMENT
from vllm_kit import (
    BLOCK_TOKENS,
    HERE,
    MAX_TOKENS,
    POOL_BLOCKS,
    ROOT,
    Output,
    VllmError,
    processes_of,
    shared_by,
    wait_gone,
)

START_S, REQUEST_S = 240.0, 60.0


class Server:
    """One `vllm serve`; a context manager. What is left of its processes at the end is killed."""

    def __init__(
        self,
        model: Path,
        log: Path,
        kv_transfer_config: dict[str, Any] | None,
        *flags: str,
        seams: Path | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.log = log
        self.port = _free_port()
        self._command = [
            *(sys.executable, str(HERE / "vllm_serve.py"), "serve", str(model)),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", "bfloat16", "--max-model-len", "1024"),
            *("--block-size", str(BLOCK_TOKENS), "--max-num-seqs", "8", "--seed", "0", "--enforce-eager"),
            *("--num-gpu-blocks-override", str(POOL_BLOCKS), "--enable-prompt-tokens-details"),
            *("--served-model-name", "tiny"),
            *(("--kv-transfer-config", json.dumps(kv_transfer_config)) if kv_transfer_config else ()),
            *flags,
        ]
        paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._environment = {
            **os.environ,
            **ENVIRONMENT,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            **({"TIERCACHE_SEAMS": str(seams)} if seams is not None else {}),
            **(environment or {}),
        }
        self._environment.pop("TIERCACHE_VLLM_NURSERY", None)
        self._process: subprocess.Popen[bytes] | None = None
        self._shared: set[Path] = set()

    def __enter__(self) -> Server:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        until = time.monotonic() + START_S
        try:
            while not self._healthy():
                if self._process.poll() is not None:
                    raise VllmError(f"vllm serve ended with {self._process.returncode}: {self._tail()}")
                if time.monotonic() > until:
                    raise VllmError(f"vllm serve is not up after {START_S} s: {self._tail()}")
                time.sleep(0.2)
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def complete(
        self,
        tokens: Sequence[int],
        max_tokens: int = MAX_TOKENS,
        rank: int | None = None,
        within_s: float = REQUEST_S,
    ) -> Output:
        """Greedy completion of a prompt; `rank`: by this data-parallel engine."""
        body = {
            "model": "tiny",
            "prompt": list(tokens),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        url = f"http://127.0.0.1:{self.port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=within_s) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            raise VllmError(f"{error}: {error.read().decode(errors='replace')}") from error
        details = answer["usage"].get("prompt_tokens_details") or {}
        choice = answer["choices"][0]
        return Output(tuple(choice["token_ids"]), details.get("cached_tokens") or 0, choice["finish_reason"])

    def terminate(self, deadline_s: float) -> float:
        """SIGTERM as from an operator; the seconds until all of its processes were gone."""
        assert self._process is not None
        self._shared |= shared_by(self._process.pid)
        began = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        while processes_of(self._process.pid):
            self._process.poll()
            if time.monotonic() - began > deadline_s:
                raise VllmError(f"vllm serve still runs {deadline_s} s after SIGTERM: {self._tail()}")
            time.sleep(0.02)
        return time.monotonic() - began

    def kill(self) -> None:
        """SIGKILL to everything that is left."""
        assert self._process is not None
        self._shared |= shared_by(self._process.pid)
        wait_gone(self._process.pid, 30.0)
        self._process.wait(30.0)
        for path in self._shared:
            path.unlink(missing_ok=True)

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2.0) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def _tail(self, n: int = 60) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-n:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
