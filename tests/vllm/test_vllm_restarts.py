"""What the next vLLM on the same directory finds, however the one before ended, and whatever befell the files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import (
    BLOCK_TOKENS,
    Vllm,
    VllmError,
    connector,
    flip_one_bit_per_block,
    nothing_left,
    overwrite,
    prompt,
    slot_files,
    stored_blocks,
    truncate,
)
from vllm_model import write_model
from vllm_seams import DELAYS, tell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

N = 200
FULL = N // BLOCK_TOKENS * BLOCK_TOKENS
PROMPTS = [prompt(200 + i, N) for i in range(3)]
IDLE_S = 5.0


def on_disk(place: Path, **extra: Any) -> dict[str, Any]:
    return connector("dram:2MiB", f"nvme:{place}:16MiB", **{"seams": True, "write_after_s": 0.2, **extra})


@pytest.fixture(params=["as it is", pytest.param("delays", marks=pytest.mark.slow)])
def seams(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of the faulty tiers: nothing is wrong with them, or each operation is late."""
    tell(tmp_path / "seams", DELAYS if request.param == "delays" else {})
    return tmp_path / "seams"


@pytest.fixture(scope="module")
def killed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache directory as SIGKILL left it, after five idle seconds."""
    place = tmp_path_factory.mktemp("killed")
    tell(place / "seams", {})
    with Vllm(model, place, on_disk(place / "kv"), seams=place / "seams") as vllm:
        vllm.generate(*PROMPTS)
        vllm.ask("sleep", seconds=IDLE_S)
        vllm.kill()
    assert stored_blocks(place / "kv") >= len(PROMPTS) * FULL // BLOCK_TOKENS
    return place / "kv"


@pytest.fixture
def left_behind(killed: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(killed, tmp_path / "kv"))


def test_after_sigkill_what_was_written_is_found(launch: Any, reference: Any, left_behind: Path, seams: Path) -> None:
    expected = reference(*PROMPTS)
    with launch(on_disk(left_behind), seams=seams) as vllm:
        outputs = vllm.one_by_one(*PROMPTS[1:])
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected[1:]]
        assert vllm.loaded_tokens == 2 * FULL
        nothing_left(vllm)
        tell(seams, {"nvme": {"read": "garble"}})  # what comes from there is verified
        assert vllm.generate(PROMPTS[0])[0].tokens == expected[0]
        nothing_left(vllm)


@pytest.mark.parametrize(
    "damage",
    [
        "a bit in each block",
        pytest.param("overwritten", marks=pytest.mark.slow),
        pytest.param("zeroed", marks=pytest.mark.slow),
        pytest.param("cut to half", marks=pytest.mark.slow),
        "cut to nothing",
        pytest.param("removed", marks=pytest.mark.slow),
    ],
)
def test_damaged_files_cost_hits_and_nothing_else(
    launch: Any, reference: Any, left_behind: Path, seams: Path, damage: str
) -> None:
    expected = reference(*PROMPTS)
    stored = stored_blocks(left_behind)
    match damage:
        case "a bit in each block":
            assert flip_one_bit_per_block(left_behind) == stored
        case "overwritten":
            assert overwrite(left_behind) == stored
        case "zeroed":
            assert overwrite(left_behind, 0) == stored
        case "cut to half":
            truncate(left_behind, 0.5)
        case "cut to nothing":
            truncate(left_behind)
        case "removed":
            for file in slot_files(left_behind):
                file.unlink()
    with launch(on_disk(left_behind), seams=seams) as vllm:
        assert [each.tokens for each in vllm.one_by_one(*PROMPTS)] == expected
        nothing_left(vllm)
        vllm.forget()  # computed again, stored again
        outputs = vllm.generate(*PROMPTS)
        assert [each.tokens for each in outputs] == expected
        assert [each.cached for each in outputs] == [FULL] * 3
        nothing_left(vllm)


def test_an_orderly_end_writes_what_only_memory_had(launch: Any, reference: Any, tmp_path: Path, seams: Path) -> None:
    expected = reference(*PROMPTS)
    config = on_disk(tmp_path / "kv", write_after_s=3600.0)
    with launch(config, seams=seams) as vllm:
        vllm.generate(*PROMPTS)
        vllm.settle()
        assert stored_blocks(tmp_path / "kv") == 0
    with launch(config, seams=seams) as vllm:
        outputs = vllm.one_by_one(*PROMPTS)
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected]
        nothing_left(vllm)


def test_a_reset_is_durable(launch: Any, reference: Any, left_behind: Path, tmp_path: Path) -> None:
    """SIGKILL right after a reset of everything: nothing from before it is found."""
    tell(tmp_path / "seams", {})
    expected = reference(*PROMPTS)
    with launch(on_disk(left_behind), seams=tmp_path / "seams") as vllm:
        assert vllm.generate(PROMPTS[0])[0].cached == FULL
        vllm.settle()
        assert vllm.ask("reset", reset_connector=True)
        vllm.kill()
    with launch(on_disk(left_behind), seams=tmp_path / "seams") as vllm:
        outputs = vllm.one_by_one(*PROMPTS)
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, 0) for tokens in expected]
        nothing_left(vllm)


def test_a_second_restart_with_a_small_disk(launch: Any, reference: Any, tmp_path: Path) -> None:
    """A disk of a few times the size of DRAM: what was loaded from it is there after the next SIGKILL, too."""
    tell(tmp_path / "seams", {})
    expected = reference(*PROMPTS)
    config = connector("dram:4MiB", f"nvme:{tmp_path / 'kv'}:16MiB", seams=True, write_after_s=0.2)
    for cached in (0, FULL, FULL):
        with launch(config, seams=tmp_path / "seams") as vllm:
            outputs = vllm.one_by_one(*PROMPTS)
            assert [(each.tokens, each.cached) for each in outputs] == [(tokens, cached) for tokens in expected]
            nothing_left(vllm)
            vllm.ask("sleep", seconds=IDLE_S)
            vllm.kill()


def test_a_second_one_on_the_same_directory_is_refused(launch: Any, reference: Any, tmp_path: Path) -> None:
    tell(tmp_path / "seams", {})
    expected = reference(*PROMPTS)
    with launch(on_disk(tmp_path / "kv"), seams=tmp_path / "seams") as first:
        assert [each.tokens for each in first.generate(*PROMPTS)] == expected
        with pytest.raises(VllmError) as refused, launch(on_disk(tmp_path / "kv"), seams=tmp_path / "seams"):
            pass
        assert "in use" in str(refused.value) and str(tmp_path / "kv") in str(refused.value)
        first.forget()
        outputs = first.generate(*PROMPTS)
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected]


def test_other_weights_under_the_same_path_find_nothing(launch: Any, tmp_path: Path) -> None:
    tell(tmp_path / "seams", {})
    place = write_model(tmp_path / "weights", seed=1)
    config = on_disk(tmp_path / "kv")
    with launch(config, model=place, seams=tmp_path / "seams") as vllm:
        old = vllm.one_by_one(*PROMPTS)
    write_model(place, seed=2)
    with launch(None, model=place) as alone:
        new = alone.one_by_one(*PROMPTS)
    assert not {each.tokens for each in old} & {each.tokens for each in new}
    with launch(config, model=place, seams=tmp_path / "seams") as vllm:
        outputs = vllm.one_by_one(*PROMPTS)
        assert [(each.tokens, each.cached) for each in outputs] == [(each.tokens, 0) for each in new]
        nothing_left(vllm)


def test_a_prefix_that_vllm_itself_kept_hot_survives_the_restart(
    launch: Any, reference: Any, tmp_path: Path, seams: Path
) -> None:
    """Its hits come from vLLM's own cache, so no load ever says that it is in use; others pass through DRAM and NVMe
    in numbers that push out whatever was not used."""
    system = prompt(300, 4 * BLOCK_TOKENS)
    others = [prompt(310 + i, N, shared=system) for i in range(12)]  # 2 blocks each of their own
    strangers = [prompt(340 + i, N) for i in range(12)]  # 6 blocks each
    last = prompt(399, N, shared=system)
    expected = reference(last)
    # 16 blocks of DRAM, 64 of NVMe; 4 + 24 + 72 are stored
    config = connector("dram:256KiB", f"nvme:{tmp_path / 'kv'}:1MiB", seams=True, write_after_s=0.2)
    with launch(config, seams=seams) as vllm:
        for i, (other, stranger) in enumerate(zip(others, strangers, strict=True)):
            (output,) = vllm.generate(other)
            assert output.cached == (len(system) if i else 0)
            vllm.generate(stranger)
            vllm.settle(quiet_s=0.05)
        assert vllm.loaded_tokens == 0  # all of those hits were vLLM's own
        nothing_left(vllm)
        vllm.ask("sleep", seconds=IDLE_S)
        vllm.kill()
    with launch(config, seams=seams) as vllm:
        (output,) = vllm.generate(last)
        assert output.tokens == expected[0] and output.cached >= len(system)
        nothing_left(vllm)
