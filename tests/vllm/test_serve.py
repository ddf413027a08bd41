"""`vllm serve`, asked through the OpenAI client, over a stop and a kill: what `make demo-vllm` shows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import ROOT

from bench.vllm.demo import Row, explanation, table

START_S = 400.0

real = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(START_S + 30.0)]


def run_demo(work: Path, **environment: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and what it printed for machines. Its folder has a long name: vLLM's sockets must not lie there."""
    work = work / ("long-" * 24)
    done = subprocess.run(
        [sys.executable, "-m", "bench.vllm.demo", "--json", "--keep", str(work)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert done.returncode in (0, 1), done.stderr[-4000:]
    return done.returncode, json.loads(done.stdout)


class TestDemo:
    pytestmark = real

    def test_chats_are_warm_and_equal_after_a_stop_and_after_a_kill(self, tmp_path: Path) -> None:
        status, told = run_demo(tmp_path)
        assert (status, told["failed"]) == (0, [])
        rows = [(each["server"], each["chat"], each["warm"], each["equal"]) for each in told["rows"]]
        assert rows == [
            (1, "A", False, None),
            (2, "A", True, True),
            (2, "B", False, None),
            (3, "A", True, True),
            (3, "B", True, True),
        ]
        assert all(each["cached_tokens"] == 0 for each in told["rows"] if each["equal"] is None)

    def test_a_second_start_that_is_not_warm_fails_it(self, tmp_path: Path) -> None:
        status, told = run_demo(tmp_path, TIERCACHE="loads-off")
        assert status == 1
        assert told["failed"] == ["server 2, chat A: not warm"]


def test_the_table_is_readable() -> None:
    rows = [
        Row(1, "A", 1410, 0, 0.57, None),
        Row(2, "A", 1410, 1408, 0.05, True),
        Row(3, "A", 1410, 1376, 0.05, False),
    ]
    assert [each.warm for each in rows] == [False, True, True]
    lines = table(rows).splitlines()
    assert lines[0].split() == ["server", "chat", "cached", "/", "prompt", "tokens", "first", "token", "answer"]
    assert lines[2].split()[-7:] == ["A", "1,408", "/", "1,410", "50", "ms", "equal"]
    assert lines[3].endswith("DIFFERENT")
    assert "11.4 times sooner" in explanation(rows)
    assert not Row(2, "A", 1410, 1000, 0.05, True).warm
