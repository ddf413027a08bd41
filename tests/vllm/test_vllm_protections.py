"""What each protection of the connector is for, brought about in a real vLLM.

`make planted-faults-vllm` takes these protections out one at a time (`real` in tests/planted/engines.toml): then the
cases here, and others named there, fail. So each shows that what it guards against would have happened.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_TOKENS, connector, nothing_left, prompt
from vllm_seams import calls, tell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

N = 200
FULL = N // BLOCK_TOKENS * BLOCK_TOKENS
SOON_S = 10.0
LATE = {"delay_s": [0.3, 0.5]}
"""Longer than a step waits for a copy, and than many steps take."""


@pytest.fixture
def seams(tmp_path: Path) -> Path:
    tell(tmp_path / "seams", {})
    return tmp_path / "seams"


def test_blocks_that_are_handed_on_while_they_are_copied(launch: Any, reference: Any, seams: Path) -> None:
    """A pool of two prompts: the third prompt computes in the blocks of the first, which is still being stored."""
    prompts = [prompt(800 + i, N) for i in range(4)]
    expected = reference(*prompts)
    config = connector("dram:8MiB", seams=True)
    with launch(config, seams=seams, num_gpu_blocks_override=16, max_model_len=320) as vllm:
        free = vllm.look_inside()["free_blocks"]
        tell(seams, {"engine": LATE})
        for tokens, answer in zip(prompts, expected, strict=True):
            assert vllm.generate(tokens)[0].tokens == answer
        assert vllm.look_inside()["counters"]["fenced"] > 0
        nothing_left(vllm, free)
        tell(seams, {})
        vllm.forget()
        again = vllm.one_by_one(*prompts)
        assert [each.tokens for each in again] == expected
        assert again[-1].cached == FULL  # nobody took its blocks
        assert vllm.loaded_tokens >= FULL


def test_what_a_step_has_yet_to_compute_is_not_stored(launch: Any, reference: Any, seams: Path) -> None:
    """Blocks hold what earlier prompts left there until the step is over; copies are not late here."""
    prompts = [prompt(810 + i, N) for i in range(4)]
    expected = reference(*prompts)
    with launch(connector("dram:8MiB", seams=True), seams=seams, num_gpu_blocks_override=16, max_model_len=320) as vllm:
        assert [each.tokens for each in vllm.one_by_one(*prompts)] == expected
        vllm.forget()
        again = vllm.one_by_one(*prompts)
        assert [(each.tokens, each.cached) for each in again] == [(tokens, FULL) for tokens in expected]


def test_a_load_that_is_late(launch: Any, reference: Any, seams: Path) -> None:
    """It is over when its bytes are there, and told once: the request waits for them, and others do not."""
    late, other = prompt(820, N), prompt(821, N)
    expected = reference(late, other)
    with launch(connector("dram:8MiB", seams=True), seams=seams) as vllm:
        assert vllm.generate(late)[0].tokens == expected[0]
        vllm.forget()
        free = vllm.look_inside()["free_blocks"]
        tell(seams, {"engine": LATE, "dram": LATE})
        vllm.ask("add", name="late", prompt=late, max_tokens=16)
        vllm.ask("step", times=2)
        vllm.ask("add", name="other", prompt=other, max_tokens=16)
        done = {each["id"]: each for each in vllm.ask("finish", SOON_S + 5.0, deadline_s=SOON_S)}
        assert [tuple(done[name]["tokens"]) for name in ("late", "other")] == expected
        assert (done["late"]["cached"], done["other"]["cached"]) == (FULL, 0)
        assert done["late"]["seconds"] > LATE["delay_s"][0]
        nothing_left(vllm, free)


@pytest.mark.parametrize("how", ["the blocks take nothing", "memory gives nothing"])
def test_a_load_that_fails(launch: Any, reference: Any, seams: Path, how: str) -> None:
    """The blocks that did not come are computed."""
    tokens = prompt(830, N)
    (expected,) = reference(tokens)
    with launch(connector("dram:8MiB", seams=True), seams=seams) as vllm:
        assert vllm.generate(tokens)[0].tokens == expected
        vllm.forget()
        free = vllm.look_inside()["free_blocks"]
        before = calls(seams, "write", "engine"), calls(seams, "read", "dram")
        tell(seams, {"engine": {"write": "raise"}} if how.startswith("the blocks") else {"dram": {"read": "fail"}})
        vllm.ask("add", name="it", prompt=tokens, max_tokens=16)
        (done,) = vllm.ask("finish", SOON_S + 5.0, deadline_s=SOON_S)
        assert tuple(done["tokens"]) == expected
        assert (calls(seams, "write", "engine"), calls(seams, "read", "dram")) > before, "nothing failed"
        assert vllm.look_inside()["counters"]["failed"] > 0
        nothing_left(vllm, free)


def test_a_load_that_did_not_come_is_not_tried_again(launch: Any, reference: Any, seams: Path, tmp_path: Path) -> None:
    """A read that passed its deadline says nothing of the blocks: they are still there, and others may be offered them,
    but not the request that waited already."""
    prompts = [prompt(840 + i, N) for i in range(3)]
    (expected,) = reference(prompts[0])
    config = connector("dram:128KiB", f"nvme:{tmp_path / 'kv'}:4MiB", seams=True, write_after_s=0.0)
    config["kv_connector_extra_config"]["tiers"][1]["read_deadline_s"] = 0.5
    with launch(config, seams=seams) as vllm:
        free = vllm.look_inside()["free_blocks"]
        for each in prompts:  # 8 blocks of DRAM: the first prompt is on the disk alone then
            vllm.generate(each)
            vllm.settle(quiet_s=0.2)
        vllm.forget()
        tell(seams, {"nvme": {"read": "hang"}})
        before = vllm.look_inside()["counters"]["loads"], calls(seams, "read", "nvme")
        vllm.ask("add", name="it", prompt=prompts[0], max_tokens=16)
        (done,) = vllm.ask("finish", SOON_S + 5.0, deadline_s=SOON_S)
        assert tuple(done["tokens"]) == expected
        assert vllm.look_inside()["counters"]["loads"] == before[0] + 1
        assert calls(seams, "read", "nvme") > before[1], "nothing was read, so nothing hung"
        tell(seams, {})
        nothing_left(vllm, free)
