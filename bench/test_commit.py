"""What deciding a load of a 128K-token prompt costs, against moving its bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from bench.fill import BLOCK_TOKENS, LONG_BLOCKS, Ids, PlannerRig, random_ids
from bench.pairs import Pairs
from bench.rows import row
from bench.scale import Scale
from tiercache.keys import encode_prompt
from tiercache.planner import Load

_BLOCK_NBYTES = 256 << 10
_NODES = 64
_PROMPTS = 8


@pytest.fixture(scope="module")
def copy(scale: Scale) -> tuple[object, int]:
    """A copy of the blocks' bytes: 2,048 of them, so often that it is as many as the prompt has."""
    blocks = scale.pick(2_048, 2_048, 64)
    source = np.random.default_rng(0).integers(0, 256, (blocks, _BLOCK_NBYTES), dtype=np.uint8)
    target = np.ones_like(source)
    times = scale.pick(LONG_BLOCKS, LONG_BLOCKS, blocks) // blocks

    def run(_: object) -> None:
        for _ in range(times):
            np.copyto(target, source)

    return run, blocks * times


def prompts(rig: PlannerRig, count: int, blocks: int) -> list[Ids]:
    """Long prompts, each on a path of 64 nodes, written to the last level."""
    rng = np.random.default_rng(1)
    made = []
    for _ in range(count):
        ids = random_ids(rng, blocks)
        made.append(ids)
        _store(rig, ids, 0)
        for at in range(blocks - blocks // _NODES, 0, -(blocks // _NODES)):
            _store(rig, np.concatenate([ids[: at * BLOCK_TOKENS], random_ids(rng, 1)]), at)
        rig.drain()
    return made


def _store(rig: PlannerRig, ids: Ids, start: int) -> None:
    prompt = encode_prompt(ids, BLOCK_TOKENS)
    while start < prompt.n:
        start += rig.store(prompt, start)


@pytest.mark.parametrize("kind", ["promote", "out"])
def test_commit(kind: str, copy: tuple[object, int], pairs: Pairs, scale: Scale) -> None:
    run_copy, blocks = copy
    held = 2 * (blocks + _NODES) + 512 if kind == "promote" else 5 * blocks
    count = _PROMPTS if kind == "promote" else 1
    rig = PlannerRig(held, (count + 1) * (blocks + _NODES) + 5 * held)
    turn = itertools.cycle(prompts(rig, count, blocks))
    levels = (0, blocks) if kind == "promote" else (blocks, 0)

    def check(load: Load) -> None:
        assert load.done and load.blocks == blocks, load
        assert load.by_level == levels or not scale.judged, load.by_level
        rig.release(load)

    pairs.run(
        row(f"commit/{kind}"),
        lambda ids: rig.load(ids, 0 if kind == "promote" else 1),
        {"memcpy": run_copy},
        fresh=lambda: next(turn).copy(),
        check=check,
        pairs=scale.pick(15, 9, 2),
        warmup=2,
        blocks=blocks,
    )
    assert rig.planner.check() == []
