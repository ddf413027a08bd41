"""A disk that fails, hangs or is full, and a pool of vLLM's that is too small: requests go on, with the same tokens."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_TOKENS, Vllm, VllmError, connector, nothing_left, prompt
from vllm_seams import DELAYS, calls, tell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

N = 200
FULL = N // BLOCK_TOKENS * BLOCK_TOKENS
READ_DEADLINE_S = 5.0


def small_memory(place: Path, **extra: Any) -> dict[str, Any]:
    """16 blocks of DRAM, so that most is on NVMe alone."""
    return connector("dram:256KiB", f"nvme:{place}:16MiB", **{"seams": True, "write_after_s": 0.1, **extra})


@pytest.fixture(scope="module")
def seams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seams")
    tell(folder, {})
    return folder


@pytest.fixture(scope="module")
def shared(model: Path, seams: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    place = tmp_path_factory.mktemp("cache")
    with Vllm(model, place, small_memory(place / "kv"), seams=seams) as vllm:
        yield vllm


@pytest.fixture
def vllm(shared: Vllm, seams: Path) -> Iterator[Vllm]:
    shared.forget()
    free = shared.look_inside()["free_blocks"]
    yield shared
    tell(seams, {})
    nothing_left(shared, free)


def push_to_disk(vllm: Vllm, *prompts: list[int], seed: int) -> None:
    """Compute them, and others after them until none of them is in DRAM any more."""
    for tokens in prompts:
        vllm.generate(tokens)
        vllm.settle(quiet_s=0.2)
    for i in range(5):
        vllm.generate(prompt(seed * 1000 + i, N))
        vllm.settle(quiet_s=0.2)
    vllm.forget()


def hit_from_disk(vllm: Vllm, seams: Path, tokens: list[int], expected: tuple[int, ...]) -> None:
    """A hit that the disk really gave: the twin of every failure here."""
    before = calls(seams, "read")
    (output,) = vllm.generate(tokens)
    assert (output.tokens, output.cached) == (expected, FULL)
    assert calls(seams, "read") > before
    vllm.forget()


@pytest.mark.parametrize("how", ["fail", "raise", "garble"])
def test_reads_that_fail(vllm: Vllm, reference: Any, seams: Path, how: str) -> None:
    """Every read, and only some of a prompt's."""
    seed = {"fail": 1, "raise": 2, "garble": 3}[how]
    prompts = [prompt(400 + 10 * seed + i, N) for i in range(3)]
    expected = reference(*prompts)
    push_to_disk(vllm, *prompts, seed=seed)
    hit_from_disk(vllm, seams, prompts[0], expected[0])
    before = calls(seams, "read")
    tell(seams, {"nvme": {"read": how, "after": 0}})
    began = time.monotonic()
    assert vllm.generate(prompts[1])[0].tokens == expected[1]
    assert calls(seams, "read") > before, "nothing was read, so nothing failed"
    assert time.monotonic() - began < READ_DEADLINE_S
    tell(seams, {})
    assert vllm.generate(prompts[2])[0].tokens == expected[2]


def test_reads_that_hang(vllm: Vllm, reference: Any, seams: Path) -> None:
    """A request waits no longer than the deadline of a read, and others do not wait at all."""
    stuck, other = prompt(450, N), prompt(451, N)
    expected = reference(stuck, other)
    push_to_disk(vllm, stuck, seed=4)
    tell(seams, {"nvme": {"read": "hang"}})
    vllm.ask("add", name="stuck", prompt=stuck, max_tokens=16)
    vllm.ask("step", times=20)
    vllm.ask("add", name="other", prompt=other, max_tokens=16)
    done = {each["id"]: each for each in vllm.ask("finish", deadline_s=3 * READ_DEADLINE_S)}
    assert [tuple(done[name]["tokens"]) for name in ("stuck", "other")] == expected
    assert done["other"]["seconds"] < 2.0 < done["stuck"]["seconds"] < 2 * READ_DEADLINE_S
    vllm.forget()
    (again,) = vllm.generate(stuck)
    assert again.tokens == expected[0]
    tell(seams, {})
    vllm.settle()


def test_writes_that_hang_and_a_disk_that_is_full(vllm: Vllm, reference: Any, seams: Path) -> None:
    prompts = [prompt(470 + i, N) for i in range(12)]
    expected = reference(*prompts)
    for order in ({"nvme": {"write": "hang"}}, {"nvme": {"write": "fail"}}, {"files": {"full": True}}):
        tell(seams, order)
        began = time.monotonic()
        assert [each.tokens for each in vllm.one_by_one(*prompts)] == expected
        assert time.monotonic() - began < 20.0
        tell(seams, {})
        vllm.forget()


def test_a_disk_too_small_is_told_at_the_start(launch: Any, tmp_path: Path) -> None:
    """And names what would be right."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]).returncode:
        pytest.skip("a small disk can be mounted by root only")
    try:
        tell(tmp_path / "seams", {})
        with pytest.raises(VllmError, match="free"), launch(small_memory(disk / "kv"), seams=tmp_path / "seams"):
            pass
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("late", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_preemption(launch: Any, reference: Any, tmp_path: Path, late: bool) -> None:
    """24 blocks for three requests of 13: vLLM takes blocks from one that runs, which later computes or loads them."""
    tell(tmp_path / "seams", DELAYS if late else {})
    prompts = reference.steady([prompt(500 + i, N) for i in range(8)], 3, max_tokens=200)
    expected = reference(*prompts, max_tokens=200)
    config = connector("dram:8MiB", f"nvme:{tmp_path / 'kv'}:16MiB", seams=True, write_after_s=0.2)
    with launch(config, seams=tmp_path / "seams", num_gpu_blocks_override=24, max_model_len=640) as vllm:
        free = vllm.look_inside()["free_blocks"]
        for _ in range(3):
            outputs = vllm.generate(*prompts, max_tokens=200)
            assert [each.tokens for each in outputs] == expected
            nothing_left(vllm, free)
            vllm.forget()
        assert vllm.metric("vllm:num_preemptions") > 0
        assert vllm.loaded_tokens > 0
        if late:  # copies out of blocks that vLLM had given to others meanwhile
            assert vllm.look_inside()["counters"]["fenced"] > 0
