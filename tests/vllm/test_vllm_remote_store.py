"""Real engines that share a store: what one computed is a hit of another; a store that fails costs hits, no more."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from file_key_tier import OPTIONS, STORE, FileKeyTier
from vllm_kit import BLOCK_TOKENS, Vllm, connector, nothing_left, prompt
from vllm_seams import calls, tell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

N = 200
BLOCKS = N // BLOCK_TOKENS
FULL = BLOCKS * BLOCK_TOKENS
OURS = "vllm:tiercache_"


class Fleet:
    """Engines over one folder of values, each told on its own how the store behaves to it."""

    def __init__(self, launch: Any, place: Path) -> None:
        self._launch, self._place = launch, place
        self.store = FileKeyTier(place / "store")
        self._engines = 0

    def __call__(
        self, *, role: str = "kv_both", options: dict[str, Any] | None = None, epoch: str | None = "v1", **more: Any
    ) -> Vllm:
        self._engines += 1
        extra = {"epoch": epoch} if epoch is not None else {}
        extra |= more.pop("extra", {})
        config = connector("dram:1MiB", remote="file_key_tier:shared", **extra) | {"kv_role": role}
        environment = {
            STORE: str(self.store.folder),
            OPTIONS: json.dumps({"quota": 1.0, "missing_s": 0.2, **(options or {})}),
            **more.pop("environment", {}),
        }
        seams = more.pop("seams", self._place / f"seams{self._engines}")
        tell(seams, more.pop("told", {}))
        return self._launch(config, environment=environment, seams=seams, **more)

    def written(self) -> int:
        """Values that the store holds."""
        return len(self.store.held())


@pytest.fixture
def fleet(launch: Any, tmp_path: Path) -> Fleet:
    return Fleet(launch, tmp_path)


@pytest.fixture(scope="module")
def filled(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an engine that is gone has put into a store: prompts 950 to 957."""
    place = tmp_path_factory.mktemp("filled")
    fleet = Fleet(lambda config, **more: Vllm(model, place, config, **more), place)
    with fleet() as vllm:
        vllm.generate(*(prompt(950 + i, N) for i in range(8)))
        nothing_left(vllm)
    assert fleet.written() == 8 * BLOCKS
    return fleet.store.folder


@pytest.fixture
def later(fleet: Fleet, filled: Path) -> Fleet:
    """Engines over a store that holds those; each test has its own copy."""
    shutil.copytree(filled, fleet.store.folder, dirs_exist_ok=True)
    return fleet


def told(vllm: Vllm, name: str) -> float:
    return vllm.metric(OURS + name)


def test_what_one_engine_computed_is_a_hit_of_another(fleet: Fleet, reference: Any) -> None:
    """Also where the second continues it, and after the first is gone."""
    prompts = [prompt(900 + i, N) for i in range(3)]
    longer = prompt(910, N + 2 * BLOCK_TOKENS, shared=prompts[0])
    expected, (more,) = reference(*prompts), reference(longer)
    with fleet() as first:
        assert [each.tokens for each in first.generate(*prompts)] == expected
        nothing_left(first)
        assert fleet.written() == 3 * BLOCKS
    with fleet(max_num_seqs=4, num_gpu_blocks_override=64) as second:
        free = second.look_inside()["free_blocks"]
        outputs = second.generate(*prompts)
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected]
        (output,) = second.generate(longer)
        assert (output.tokens, output.cached) == (more, FULL)
        second.forget()
        before = told(second, "tier_hit_tokens[remote]")
        assert [each.cached for each in second.generate(*prompts)] == [FULL] * 3
        second.settle(quiet_s=1.2)
        second.generate(prompt(911, 20), max_tokens=2)
        assert told(second, "tier_hit_tokens[remote]") == before == 3 * FULL, "from DRAM"
        assert told(second, "remote_wrong_blocks") == told(second, "failed_tokens") == 0
        nothing_left(second, free)


def test_two_engines_side_by_side(fleet: Fleet, reference: Any) -> None:
    """Each finds what the other computes while both run; under delays that outlast steps."""
    delays = {"remote": {"delay_s": [0.02, 0.3]}, "engine": {"delay_s": [0.0, 0.1]}}
    prompts = [prompt(920 + i, N) for i in range(6)]
    expected = reference(*prompts)
    options = {"find_deadline_s": 5.0, "read_deadline_s": 5.0, "write_deadline_s": 5.0}
    with (
        fleet(told=delays, options=options, extra={"seams": "vllm_seams:controlled"}) as a,
        fleet(told=delays, options=options, extra={"seams": "vllm_seams:controlled"}) as b,
    ):
        assert [each.tokens for each in a.generate(*prompts[:3])] == expected[:3]
        a.settle(quiet_s=0.5)
        assert [each.tokens for each in b.generate(*prompts)] == expected
        assert b.loaded_tokens == 3 * FULL
        b.settle(quiet_s=0.5)
        outputs = a.generate(*prompts[3:])
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected[3:]]
        for each in (a, b):
            nothing_left(each)


def test_a_producer_and_a_consumer(fleet: Fleet, reference: Any) -> None:
    """Prefill there, decode here. Each role does its half alone."""
    prompts = [prompt(930 + i, N) for i in range(3)]
    expected = reference(*prompts)
    with fleet(role="kv_producer") as prefill, fleet(role="kv_consumer") as decode:
        for tokens, answer in zip(prompts[:2], expected, strict=False):
            assert prefill.generate(tokens, max_tokens=1)[0].tokens == answer[:1]
            prefill.settle()
            (output,) = decode.generate(tokens)
            assert (output.tokens, output.cached) == (answer, FULL)
        assert fleet.written() == 2 * BLOCKS
        assert decode.generate(prompts[2])[0].tokens == expected[2]
        decode.settle()
        assert fleet.written() == 2 * BLOCKS, "a consumer writes nothing"
        prefill.forget()
        assert prefill.generate(prompts[0])[0].cached == 0, "a producer loads nothing"


def test_the_kill_switch(later: Fleet, reference: Any, tmp_path: Path) -> None:
    (expected,) = reference(prompt(950, N))
    seams = tmp_path / "off"
    with later(environment={"TIERCACHE_REMOTE": "off"}, seams=seams) as vllm:
        assert vllm.said("TIERCACHE_REMOTE=off")
        for seed in (950, 941):
            (output,) = vllm.generate(prompt(seed, N))
            assert output.cached == 0 and (output.tokens == expected or seed != 950)
        vllm.settle()
    assert later.written() == 8 * BLOCKS and not [each for each in seams.iterdir() if "remote" in each.name]


@pytest.mark.parametrize("how", ["hang", "raise", "fail", "garble"])
def test_a_store_that_fails(later: Fleet, reference: Any, tmp_path: Path, how: str) -> None:
    """Hits are lost, nothing else: same tokens, no request waits longer than the deadlines, and it comes back."""
    prompts = [prompt(950 + i, N) for i in range(8)]
    expected = reference(*prompts)
    options = {"find_deadline_s": 0.3, "read_deadline_s": 0.3}
    seams = tmp_path / "seams"
    with later(options=options, seams=seams) as vllm:
        free = vllm.look_inside()["free_blocks"]
        assert vllm.generate(prompts[0])[0].cached == FULL
        ops = ("find", "get", "put") if how in ("hang", "raise") else ("get",)
        tell(seams, {"remote": dict.fromkeys(ops, how)})
        took = []
        for tokens, answer in zip(prompts[1:6], expected[1:6], strict=True):
            began = time.monotonic()
            (output,) = vllm.generate(tokens)
            took.append(time.monotonic() - began)
            assert (output.tokens, output.cached) == (answer, 0)
        assert calls(seams, "find", "remote") > 1
        assert max(took) < 5.0, took
        tell(seams, {})
        vllm.forget()
        until = time.monotonic() + 30
        cached = 0
        while not cached:
            assert time.monotonic() < until, "it does not come back"
            vllm.ask("sleep", seconds=0.3)
            vllm.generate(prompt(int(time.monotonic() * 1000), 40), max_tokens=1)
            (output,) = vllm.generate(prompts[7])
            assert output.tokens == expected[7]
            cached = output.cached
            vllm.forget()
            vllm.ask("run", code="side.planner.invalidate(b'', 0, side._clock())")
        assert cached == FULL
        nothing_left(vllm, free)


def test_a_reset_leaves_the_epoch_that_engines_share(later: Fleet, reference: Any) -> None:
    tokens = prompt(950, N)
    (expected,) = reference(tokens)
    with later() as second:
        second.settle()
        assert second.ask("reset", reset_connector=True)
        assert second.said("finds nothing of others")
        for _ in range(2):
            (output,) = second.generate(tokens)
            assert (output.tokens, output.cached) == (expected, 0)
            second.settle()
            assert second.ask("reset", reset_connector=True)
    with later(epoch="v2") as third:
        assert third.generate(tokens)[0].cached == 0


@pytest.mark.slow
def test_two_ranks(fleet: Fleet, reference: Any) -> None:
    """Each rank puts its own part of a block; one that is missing on one rank is no hit."""
    prompts = [prompt(970 + i, N) for i in range(3)]
    expected = reference(*prompts, ranks=2)
    arguments: dict[str, Any] = {"several": True, "tensor_parallel_size": 2}
    with fleet(**arguments) as first:
        assert [each.tokens for each in first.generate(*prompts)] == expected
        first.settle(quiet_s=1.5)
    assert fleet.written() == 2 * 3 * BLOCKS
    with fleet(**arguments) as second:
        outputs = second.generate(*prompts)
        assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected]
    for each in fleet.store.held()[::7]:
        each.unlink()
    with fleet(**arguments) as third:
        outputs = third.generate(*prompts)
        assert [each.tokens for each in outputs] == expected
        assert 0 < sum(each.cached for each in outputs) < 3 * FULL
