"""vLLM in several processes: the core in one of its own, `vllm serve` ended by signals, data parallel, and a second
connector beside ours."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_TOKENS, Output, connector, nothing_left, prompt, stored_blocks
from vllm_seams import DELAYS, tell
from vllm_server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

N = 200
FULL = N // BLOCK_TOKENS * BLOCK_TOKENS
PROMPTS = [prompt(600 + i, N) for i in range(3)]
IDLE_S = 5.0


def tiers(place: Path, **extra: Any) -> dict[str, Any]:
    return connector("dram:4MiB", f"nvme:{place}:64MiB", **{"write_after_s": 0.2, **extra})


def hits(outputs: list[Output], expected: list[tuple[int, ...]], cached: int = FULL) -> None:
    assert [(each.tokens, each.cached) for each in outputs] == [(tokens, cached) for tokens in expected]


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_core_in_a_process_of_its_own(launch: Any, reference: Any, tmp_path: Path, late: bool) -> None:
    """Hits from DRAM; an idle core writes to the disk by itself; then SIGKILL."""
    tell(tmp_path / "seams", DELAYS if late else {})
    expected = reference(*PROMPTS)
    with launch(tiers(tmp_path / "kv", seams=True), seams=tmp_path / "seams", several=True) as vllm:
        hits(vllm.generate(*PROMPTS), expected, cached=0)
        vllm.settle(quiet_s=4.0 if late else 1.0)
        assert vllm.ask("reset", reset_connector=False)
        hits(vllm.generate(*PROMPTS), expected)
        vllm.ask("sleep", seconds=IDLE_S / 2)
        before = vllm.cpu_seconds()
        vllm.ask("sleep", seconds=IDLE_S / 2)
        assert vllm.cpu_seconds() - before < IDLE_S / 4, "the idle core steps on and on"
        vllm.kill()
    assert stored_blocks(tmp_path / "kv") >= len(PROMPTS) * FULL // BLOCK_TOKENS
    with launch(tiers(tmp_path / "kv", seams=True), seams=tmp_path / "seams") as vllm:
        hits(vllm.one_by_one(*PROMPTS), expected)
        nothing_left(vllm)


@pytest.mark.slow
@pytest.mark.parametrize("timeout_s", [0, 30])
def test_sigterm(model: Path, reference: Any, tmp_path: Path, timeout_s: int) -> None:
    """With 0 vLLM's processes are killed at once: what was written before is found. With 30 there is time to write."""
    expected = reference(*PROMPTS)
    write_after_s = 0.2 if timeout_s == 0 else 3600.0
    config = tiers(tmp_path / "kv", write_after_s=write_after_s)
    flags = ("--shutdown-timeout", str(timeout_s))
    with Server(model, tmp_path / "first.log", config, *flags) as server:
        hits([server.complete(tokens) for tokens in PROMPTS], expected, cached=0)
        time.sleep(IDLE_S if timeout_s == 0 else 1.0)
        server.terminate(timeout_s + 20.0)
    with Server(model, tmp_path / "second.log", config, *flags) as server:
        hits([server.complete(tokens) for tokens in PROMPTS], expected)
        late = _complete_beside(server, prompt(650, N), max_tokens=300)
        time.sleep(0.2)
        server.terminate(timeout_s + 20.0)  # while a request runs
        late.join(60.0)
        assert not late.is_alive()
    with Server(model, tmp_path / "third.log", config, *flags) as server:
        hits([server.complete(tokens) for tokens in PROMPTS], expected)


def _complete_beside(server: Server, tokens: list[int], max_tokens: int) -> threading.Thread:
    def ask() -> None:
        try:
            server.complete(tokens, max_tokens)
        except Exception:  # noqa: BLE001 - the server is ended meanwhile
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_data_parallel_on_one_directory(model: Path, reference: Any, tmp_path: Path) -> None:
    """Each engine has its own part of the directory; none answers with another's blocks, and both come back warm."""
    expected = reference(*PROMPTS)
    config = tiers(tmp_path / "kv", engines=2)
    flags = ("--data-parallel-size", "2")
    for cached in (0, FULL):
        with Server(model, tmp_path / f"{cached}.log", config, *flags) as server:
            for rank in (0, 1):
                hits([server.complete(tokens, rank=rank) for tokens in PROMPTS], expected, cached)
            time.sleep(IDLE_S)


@pytest.fixture(params=["as it is", pytest.param("delays", marks=pytest.mark.slow)])
def seams(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    tell(tmp_path / "seams", DELAYS if request.param == "delays" else {})
    yield tmp_path / "seams"


def test_beside_another_connector(launch: Any, reference: Any, tmp_path: Path, seams: Path) -> None:
    """Under vLLM's MultiConnector, which asks each in turn, and has all of them store."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    expected = reference(*PROMPTS)
    config = connector("dram:4MiB", f"nvme:{tmp_path / 'kv'}:16MiB", seams=True, write_after_s=0.2, multi=[example])
    for start in range(2):
        with launch(config, seams=seams, disable_hybrid_kv_cache_manager=True) as vllm:
            if start == 0:
                hits(vllm.generate(*PROMPTS), expected, cached=0)
            vllm.forget()
            hits(vllm.generate(*PROMPTS), expected)
            assert vllm.loaded_tokens == len(PROMPTS) * FULL
            nothing_left(vllm)
