"""What the other tests stand on, tried on vLLM alone and with its own ExampleConnector."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_TOKENS, VllmError, prompt
from vllm_server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

PROMPTS = [prompt(i, 200) for i in range(4)]


def test_alone_a_batch_and_a_cached_prefix_give_the_same_tokens(launch: Any, reference: Any) -> None:
    """Else equality with the reference would say nothing of a connector. And other prompts give other tokens."""
    expected = reference(*PROMPTS)
    assert len(set(expected)) == len(PROMPTS) and all(len(set(tokens)) > 4 for tokens in expected)
    with launch(None) as vllm:
        assert [each.tokens for each in vllm.generate(*PROMPTS)] == expected
        again = vllm.one_by_one(*PROMPTS)
        assert [each.tokens for each in again] == expected
        assert [each.cached for each in again] == [192] * 4
        vllm.forget()
        assert vllm.generate(PROMPTS[0])[0].cached == 0
        inside = vllm.look_inside()
        assert inside["held"] == [] and inside["free_blocks"] > 200


def test_other_weights_give_other_tokens(launch: Any, reference: Any, tmp_path: Path) -> None:
    from vllm_model import write_model

    with launch(None, model=write_model(tmp_path / "other", seed=1)) as vllm:
        assert vllm.generate(PROMPTS[0])[0].tokens != reference(PROMPTS[0])[0]


def test_an_abort_and_a_kill(launch: Any, reference: Any) -> None:
    with launch(None) as vllm:
        ended = vllm.ask("abort_midway", prompt=PROMPTS[0], steps=3, max_tokens=64)
        assert ended["before"] == ["RUNNING"] and ended["held"] == []
        for name, tokens in zip("ab", PROMPTS, strict=False):
            vllm.ask("add", name=name, prompt=tokens, max_tokens=16)
        done = {each["id"]: tuple(each["tokens"]) for each in vllm.ask("finish", deadline_s=20.0)}
        assert done == dict(zip("ab", reference(*PROMPTS), strict=False))
        with pytest.raises(VllmError, match="no_such_command"):
            vllm.ask("no_such_command")
        began = time.monotonic()
        with pytest.raises(VllmError, match=r"no answer within 0\.2 s"):
            vllm.ask("sleep", 0.2, seconds=60.0)
        assert time.monotonic() - began < 5.0
        with pytest.raises(ProcessLookupError):
            os.kill(vllm.pid, 0)
        with pytest.raises(VllmError, match="its process"):
            vllm.generate(PROMPTS[0])


def test_a_start_that_fails_says_why(launch: Any) -> None:
    with pytest.raises(VllmError, match="block_size"), launch(None, block_size=7):
        pass


@pytest.mark.slow
def test_several_processes(launch: Any, reference: Any) -> None:
    with launch(None, several=True) as vllm:
        assert [each.tokens for each in vllm.generate(*PROMPTS)] == reference(*PROMPTS)
        assert vllm.generate(PROMPTS[0])[0].cached == 192
        vllm.kill()


def test_a_connector_of_vllm_itself(launch: Any, reference: Any, tmp_path: Path) -> None:
    config = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "store")},
    }
    with launch(config, disable_hybrid_kv_cache_manager=True) as vllm:
        assert vllm.generate(PROMPTS[0])[0].tokens == reference(PROMPTS[0])[0]
        vllm.forget()
        again = vllm.generate(PROMPTS[0])[0]
        assert again.tokens == reference(PROMPTS[0])[0] and again.cached == 192
        assert vllm.loaded_tokens == 192 == 6 * BLOCK_TOKENS


@pytest.mark.slow
def test_two_ranks(launch: Any, reference: Any) -> None:
    expected = reference(*PROMPTS, ranks=2)
    with launch(None, tensor_parallel_size=2) as vllm:
        assert [each.tokens for each in vllm.generate(*PROMPTS)] == expected
        assert vllm.look_inside()["held"] == []
    assert vllm.shared and not any(path.exists() for path in vllm.shared)


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_a_server(model: Path, reference: Any, tmp_path: Path, engines: int) -> None:
    """Over HTTP; with several data-parallel engines each is asked."""
    flags = ("--data-parallel-size", "2") if engines == 2 else ()
    with Server(model, tmp_path / "log", None, *flags) as server:
        for rank in range(engines):
            for cached in (0, 192):
                outputs = [server.complete(tokens, rank=rank if engines > 1 else None) for tokens in PROMPTS]
                assert [each.tokens for each in outputs] == reference(*PROMPTS)
                assert [each.cached for each in outputs] == [cached] * 4
        assert server.terminate(30.0) < 30.0
