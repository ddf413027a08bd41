"""What is found again, and what must not be: one vLLM with a cache of DRAM and NVMe, asked many things.

Everything twice: with memory and disk as they are, and with each of their operations late by 50 to 500 ms.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_TOKENS, Vllm, connector, nothing_left, prompt
from vllm_seams import DELAYS, tell

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

N = 200
FULL = N // BLOCK_TOKENS * BLOCK_TOKENS
STEPS = 12


@pytest.fixture(scope="module", params=["as it is", pytest.param("delays", marks=pytest.mark.slow)])
def orders(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What the tiers are told while nothing else is wanted of them."""
    return DELAYS if request.param == "delays" else {}


@pytest.fixture(scope="module")
def seams(orders: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seams")
    tell(folder, orders)
    return folder


@pytest.fixture(scope="module")
def shared(model: Path, seams: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    """The one vLLM of this module; every test has prompts of its own."""
    place = tmp_path_factory.mktemp("cache")
    config = connector("dram:8MiB", f"nvme:{place / 'kv'}:32MiB", seams=True, write_after_s=0.2)
    with Vllm(model, place, config, seams=seams) as vllm:
        yield vllm


@pytest.fixture
def vllm(shared: Vllm, seams: Path, orders: dict[str, Any]) -> Iterator[Vllm]:
    """The one vLLM; after each test nothing may be held, and the planner's own check finds nothing."""
    shared.forget()
    free = shared.look_inside()["free_blocks"]
    yield shared
    tell(seams, orders)
    nothing_left(shared, free)


def test_cold_then_from_dram(vllm: Vllm, reference: Any) -> None:
    tokens = prompt(1, N)
    (expected,) = reference(tokens)
    before = vllm.loaded_tokens
    (cold,) = vllm.generate(tokens)
    assert (cold.tokens, cold.cached) == (expected, 0)
    assert vllm.loaded_tokens == before
    vllm.forget()
    (warm,) = vllm.generate(tokens)
    assert (warm.tokens, warm.cached) == (expected, FULL)
    assert vllm.loaded_tokens == before + FULL
    (hot,) = vllm.generate(tokens)
    assert (hot.tokens, hot.cached) == (expected, FULL)
    assert vllm.loaded_tokens == before + FULL  # from vLLM's own cache


def test_what_was_loaded_is_what_the_model_reads(
    vllm: Vllm, reference: Any, seams: Path, orders: dict[str, Any]
) -> None:
    """The twin of the test above: bytes changed on the way give other tokens, so equal ones prove something."""
    tokens = prompt(2, N)
    (expected,) = reference(tokens)
    assert vllm.generate(tokens)[0].tokens == expected
    vllm.forget()
    tell(seams, {"dram": {**orders.get("dram", {}), "read": "garble"}})
    (garbled,) = vllm.generate(tokens)
    assert garbled.cached == FULL and garbled.tokens != expected
    tell(seams, orders)
    vllm.forget()
    (warm,) = vllm.generate(tokens)
    assert (warm.tokens, warm.cached) == (expected, FULL)


@pytest.mark.parametrize("common", [32, 96, 100, 191])
def test_a_part_of_the_prompt(vllm: Vllm, reference: Any, common: int) -> None:
    """Only full blocks count."""
    first = prompt(common, N)
    second = prompt(1000 + common, N + 40, shared=first[:common])
    expected = reference(first, second)
    assert vllm.generate(first)[0].tokens == expected[0]
    vllm.forget()
    (part,) = vllm.generate(second)
    assert (part.tokens, part.cached) == (expected[1], common // BLOCK_TOKENS * BLOCK_TOKENS)
    vllm.forget()
    assert [each.cached for each in vllm.one_by_one(first, second)] == [FULL, 224]


def test_a_longer_conversation_builds_on_the_shorter(vllm: Vllm, reference: Any) -> None:
    """The answer belongs to the next prompt; its blocks were computed while it was generated."""
    first = prompt(3, N)
    (answer,) = reference(first, max_tokens=80)
    longer = [*first, *answer, *prompt(4, 20)]
    (expected,) = reference(longer)
    assert vllm.generate(first, max_tokens=80)[0].tokens == answer
    vllm.forget()
    (warm,) = vllm.generate(longer)
    assert warm.tokens == expected
    assert warm.cached == (N + 79) // BLOCK_TOKENS * BLOCK_TOKENS  # the last token that was sampled was not run


def test_a_whole_prompt_of_full_blocks(vllm: Vllm, reference: Any) -> None:
    """The last token must be computed, for there is nothing to sample from otherwise."""
    tokens = prompt(5, 4 * BLOCK_TOKENS)
    (expected,) = reference(tokens)
    assert vllm.generate(tokens)[0].tokens == expected
    vllm.forget()
    (warm,) = vllm.generate(tokens)
    assert warm.tokens == expected and 3 * BLOCK_TOKENS <= warm.cached <= 4 * BLOCK_TOKENS


def test_a_batch_that_shares_prefixes(vllm: Vllm, reference: Any) -> None:
    """Loads of the same blocks at once, and of blocks that a neighbour has just put into vLLM's own cache."""
    system = prompt(6, 128)
    batch = [prompt(60 + i, N, shared=system) for i in range(5)] + [prompt(70, N), [*system, *prompt(71, 9)]]
    expected = reference(*batch)
    for _ in range(2):
        assert [each.tokens for each in vllm.generate(*batch)] == expected
        vllm.forget()
    before = vllm.loaded_tokens
    outputs = vllm.generate(*batch)
    assert [each.tokens for each in outputs] == expected
    assert all(each.cached >= 128 for each in outputs)
    assert vllm.loaded_tokens >= before + FULL + 128


def test_loads_beside_requests_that_run(vllm: Vllm, reference: Any) -> None:
    """A load must not touch the blocks of requests that compute meanwhile, nor wait for them."""
    warm, cold = [prompt(80 + i, N) for i in range(3)], [prompt(90 + i, N) for i in range(4)]
    expected = reference(*warm), reference(*cold)
    vllm.generate(*warm)
    vllm.forget()
    mixed = [cold[0], warm[0], cold[1], warm[1], cold[2], warm[2], cold[3]]
    outputs = vllm.generate(*mixed)
    assert [each.tokens for each in outputs[1::2]] == expected[0]
    assert [each.tokens for each in outputs[0::2]] == expected[1]
    assert [each.cached for each in outputs[1::2]] == [FULL] * 3


def test_two_salts_share_nothing(vllm: Vllm, reference: Any) -> None:
    tokens = prompt(7, N)
    (expected,) = reference(tokens)
    asked: list[tuple[str | None, int]] = [("a", 0), ("b", 0), (None, 0), ("a", FULL), ("b", FULL), (None, FULL)]
    for salt, cached in asked:
        (output,) = vllm.generate(tokens, salts=[salt])
        assert (output.tokens, output.cached) == (expected, cached), salt
        vllm.forget()


@pytest.mark.parametrize("when", ["while it loads", "before its first step"])
def test_an_abort(vllm: Vllm, reference: Any, seams: Path, orders: dict[str, Any], when: str) -> None:
    """Blocks that a load still writes to are given back only when it has ended."""
    tokens, other = prompt(8, N), prompt(9, 900)
    expected = reference(tokens, other)
    vllm.generate(tokens)
    vllm.forget()
    free = vllm.look_inside()["free_blocks"]
    tell(seams, {"dram": {"read": "hang"}})
    request = vllm.ask("add", name=when, prompt=tokens, max_tokens=16)
    if when == "while it loads":
        vllm.ask("step", times=STEPS)
        assert vllm.look_inside()["free_blocks"] < free
    vllm.ask("abort", request=request)
    vllm.ask("step", times=STEPS)
    if when == "while it loads":
        assert vllm.look_inside()["free_blocks"] < free, "blocks were given back under a load that still runs"
    tell(seams, orders)
    vllm.settle()
    assert vllm.look_inside()["free_blocks"] == free
    assert [each.tokens for each in vllm.one_by_one(other, tokens)] == expected[::-1]


def test_a_reset_of_everything_forgets(vllm: Vllm, reference: Any) -> None:
    tokens = prompt(10, N)
    (expected,) = reference(tokens)
    vllm.generate(tokens)
    vllm.settle()
    assert vllm.ask("reset", reset_connector=True)
    (cold,) = vllm.generate(tokens)
    assert (cold.tokens, cold.cached) == (expected, 0)
    vllm.forget()
    (warm,) = vllm.generate(tokens)
    assert (warm.tokens, warm.cached) == (expected, FULL)
