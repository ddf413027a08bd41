"""Real engines over a real Valkey/Redis and a real Mooncake Store, whose server is killed under load.

In a network of its own, for Mooncake listens on every address: `make test-remote-vllm`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rig_mooncake import Rig, private_network
from rig_redis import RedisServer
from vllm_kit import BLOCK_TOKENS, connector, nothing_left, prompt

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.remote,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not private_network(), reason="not in a network of its own: make test-remote-vllm"),
]

N = 200
FULL = N // BLOCK_TOKENS * BLOCK_TOKENS
AT_MOST_S = 15.0
"""A request of a tiny model on a busy machine, with all that a dead store may cost: two deadlines of 1 s."""

Store = tuple[str, Callable[[], None]]
"""URL, and what kills its server."""


@pytest.fixture(params=["redis", "mooncake"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "redis":
        with RedisServer(tmp_path / "redis", password="secret") as server:
            yield server.url, server.kill
        return
    with Rig(tmp_path) as rig:
        master = rig.master()
        rig.owner(master)
        yield f"mooncake://{master.address}", master.kill


def test_two_engines_over_one_store_that_dies(launch: Any, reference: Any, store: Store, tmp_path: Path) -> None:
    """What one computed is a hit of the other; then the server is killed, and every request ends with its tokens. The
    settings are in a file: vLLM logs its arguments, passwords and all."""
    url, kill = store
    prompts = [prompt(1200 + i, N) for i in range(10)]
    expected = reference(*prompts)
    (tmp_path / "kv.json").write_text(json.dumps({"tiers": ["dram:1MiB", url], "epoch": "v1"}))
    config = connector() | {"kv_connector_extra_config": {"config": str(tmp_path / "kv.json")}}
    with launch(config) as first:
        assert [each.tokens for each in first.generate(*prompts[:8])] == expected[:8]
        nothing_left(first)
        assert not first.said("secret")
        with launch(config) as second:
            free = second.look_inside()["free_blocks"]
            outputs = second.one_by_one(*prompts[:2])
            assert [(each.tokens, each.cached) for each in outputs] == [(tokens, FULL) for tokens in expected[:2]]
            added = {second.ask("add", name=str(i), prompt=prompts[i], max_tokens=16): i for i in range(2, 6)}
            second.ask("step", times=2)
            kill()
            began = time.monotonic()
            done = {each["id"].partition("-")[0]: each for each in second.ask("finish", deadline_s=50.0)}
            assert time.monotonic() - began < AT_MOST_S
            assert [tuple(done[str(i)]["tokens"]) for i in added.values()] == expected[2:6]
            for engine in (second, first):
                for i in (6, 7, 8, 9):
                    began = time.monotonic()
                    assert engine.generate(prompts[i])[0].tokens == expected[i]
                    assert time.monotonic() - began < AT_MOST_S
            assert second.metric("vllm:tiercache_remote_wrong_blocks") == 0
            nothing_left(second, free)
            nothing_left(first)
