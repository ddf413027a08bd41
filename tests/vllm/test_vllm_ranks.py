"""Two tensor-parallel ranks: one planner, two movers that may differ in time and in what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_TOKENS, connector, flip_one_bit_per_block, nothing_left, prompt
from vllm_model import BLOCK_NBYTES
from vllm_seams import DELAYS, calls, tell

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(600)]

N = 200
FULL = N // BLOCK_TOKENS * BLOCK_TOKENS
PROMPTS = [prompt(700 + i, N) for i in range(4)]
MORE = [prompt(720 + i, N) for i in range(6)]
IDLE_S = 5.0


def tiers(place: Path) -> dict[str, Any]:
    """16 blocks of DRAM."""
    return connector("dram:256KiB", f"nvme:{place}:16MiB", seams=True, write_after_s=0.2)


@pytest.mark.parametrize("delays", [False, True])
def test_two_ranks(launch: Any, reference: Any, tmp_path: Path, delays: bool) -> None:
    usual = DELAYS if delays else {}
    seams = tmp_path / "seams"
    tell(seams, usual)
    answers = reference(*PROMPTS, *MORE, ranks=2)
    expected, others = answers[: len(PROMPTS)], answers[len(PROMPTS) :]
    with launch(tiers(tmp_path / "kv"), seams=seams, tensor_parallel_size=2) as vllm:
        free = vllm.look_inside()["free_blocks"]
        assert [each.tokens for each in vllm.generate(*PROMPTS)] == expected
        vllm.forget()
        outputs = vllm.generate(*PROMPTS[-2:])
        assert [each.tokens for each in outputs] == expected[-2:]
        if delays:  # slow writes to the disk keep DRAM full, so stores were cut
            assert vllm.loaded_tokens > 0
        else:
            assert [each.cached for each in outputs] == [FULL, FULL]
        nothing_left(vllm, free)
        # one rank alone fails: the block leaves that level on both, and is computed again on both
        vllm.ask("sleep", seconds=1.0)
        vllm.forget()
        before = [calls(seams, "read", rank=rank) for rank in (0, 1)]
        tell(seams, {**usual, "nvme": {**usual.get("nvme", {}), "read": "fail"}}, rank=1)
        assert [each.tokens for each in vllm.one_by_one(*PROMPTS)] == expected
        assert [calls(seams, "read", rank=rank) > before[rank] for rank in (0, 1)] == [True, True]
        nothing_left(vllm)
        tell(seams, usual, rank=1)
        # one rank alone cannot write
        tell(seams, {**usual, "nvme": {**usual.get("nvme", {}), "write": "fail"}}, rank=0)
        assert [each.tokens for each in vllm.one_by_one(*MORE)] == others
        vllm.ask("sleep", seconds=2.0)
        nothing_left(vllm)
        tell(seams, usual, rank=0)
        vllm.forget()
        assert [each.tokens for each in vllm.generate(*MORE)] == others
        nothing_left(vllm)


def test_a_restart_keeps_what_both_ranks_have(launch: Any, reference: Any, tmp_path: Path) -> None:
    seams, place = tmp_path / "seams", tmp_path / "kv"
    tell(seams, {})
    expected = reference(*PROMPTS, ranks=2)
    with launch(tiers(place), seams=seams, tensor_parallel_size=2) as vllm:
        vllm.generate(*PROMPTS)
        vllm.ask("sleep", seconds=IDLE_S)
        vllm.kill()
    with launch(tiers(place), seams=seams, tensor_parallel_size=2) as vllm:
        outputs = vllm.one_by_one(*PROMPTS)
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected]
        nothing_left(vllm)
        vllm.ask("sleep", seconds=IDLE_S)
        vllm.kill()
    assert flip_one_bit_per_block(next(place.rglob("rank1")), BLOCK_NBYTES // 2) >= 24
    with launch(tiers(place), seams=seams, tensor_parallel_size=2) as vllm:
        assert [each.tokens for each in vllm.one_by_one(*PROMPTS)] == expected
        nothing_left(vllm)
