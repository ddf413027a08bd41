"""The metrics of real engines say what the engines did, and a reader of their KV events knows what is cached."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_kit import BLOCK_TOKENS, Vllm, connector, prompt
from vllm_model import BLOCK_NBYTES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]

N = 200
BLOCKS = N // BLOCK_TOKENS
FULL = BLOCKS * BLOCK_TOKENS
OURS = "vllm:tiercache_"
READ = """
result = {}
for each in llm.get_metrics():
    own = [value for name, value in each.labels.items() if name in ("tier", "reason", "result", "source")]
    key = "|".join([each.name, *own])
    result[key] = result.get(key, 0) + (each.value if hasattr(each, "value") else each.count)
"""
LISTEN = """
client = llm.llm_engine.engine_core
core, asked = client.engine_core, []
step, get_output = core.step_fn, client.get_output
def get_output_asked():
    asked.append(True)
    try:
        return get_output()
    finally:
        asked.pop()
def step_told():
    outputs, executed = step()
    for each in () if asked else (outputs or {}).values():  # a core in its own process sends these, too
        if each.scheduler_stats is not None:
            llm.llm_engine.logger_manager.record(scheduler_stats=each.scheduler_stats, iteration_stats=None)
    return outputs, executed
client.get_output, core.step_fn = get_output_asked, step_told
publisher = scheduler.kv_event_publisher
publish, scheduler.told = publisher.publish, []
def listened(batch):
    scheduler.told.extend(batch.events)
    publish(batch)
publisher.publish = listened
"""
REPLAY = """
from tiercache.slots import RESIDENT
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
held, tokens, gpu, cleared = set(), {}, {}, 0
for event in scheduler.told:
    kind = type(event).__name__
    if kind == "AllBlocksCleared":  # vLLM tells so too, of its own cache alone, and in the same words
        cleared += 1
        if cleared > FORGOTTEN:
            held.clear()
        continue
    for i, each in enumerate(event.block_hashes):
        where = event.medium, each
        assert (where in held) == (kind == "BlockRemoved") or event.medium == "GPU", where
        if event.medium != "GPU":
            held ^= {where}
        if kind == "BlockStored" and event.token_ids:
            parent = event.block_hashes[i - 1] if i else event.parent_block_hash
            size = event.block_size
            known = (parent, tuple(event.token_ids[i * size : (i + 1) * size]), event.group_idx)
            (gpu if event.medium == "GPU" else tokens)[each] = known
planner, there = side.planner, set()
for node in planner.state.residency.index.walk_nodes():
    for level, medium in enumerate(("CPU", "STORAGE")):
        for i in range(node.n):
            slot = int(node.slots[i, level])
            if slot >= 0 and planner.state.residency.tables[level].state[slot] == RESIDENT:
                there.add((medium, maybe_convert_block_hash(node.run[i * 32 : (i + 1) * 32])))
result = {
    "equal": held == there,
    "cpu": sum(medium == "CPU" for medium, _ in held),
    "disk": sum(medium == "STORAGE" for medium, _ in held),
    "described": len(tokens),
    "as vLLM describes them": all(gpu[each] == known for each, known in tokens.items()),
    "cleared": cleared,
}
"""


def from_tier(told: dict[str, float], source: str) -> float:
    """What vLLM's own metrics say came from there; 0.28 does not say."""
    assert any("_by_source" in key for key in told)
    return told.get(f"vllm:prompt_tokens_cached_by_source|{source}", told["loaded_tokens"])


def read(vllm: Vllm) -> dict[str, float]:
    """Every metric of this vLLM, by name without our prefix and own label."""
    return {key.removeprefix(OURS): value for key, value in vllm.ask("run", code=READ).items()}


def replay(vllm: Vllm, forgotten: int) -> dict[str, Any]:
    """What a reader of the events knows. forgotten: how often vLLM's own cache was emptied before ours was."""
    return vllm.ask("run", code=REPLAY.replace("FORGOTTEN", str(forgotten)))


def test_one_engine(launch: Any, tmp_path: Path) -> None:
    config = connector("dram:1MiB", f"nvme:{tmp_path / 'kv'}:16MiB", write_after_s=0.1)
    first = prompt(1, N)
    longer = prompt(2, N + 3 * BLOCK_TOKENS, shared=first)
    with launch(config, kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}) as vllm:
        vllm.ask("run", code=LISTEN)
        vllm.generate(first)
        vllm.forget()
        vllm.generate(first)
        vllm.generate(longer)
        vllm.forget()
        vllm.generate(longer[:-1])
        vllm.generate(prompt(3, 20), max_tokens=2)
        vllm.settle(quiet_s=1.2)
        vllm.generate(prompt(4, 20), max_tokens=2)  # a step, to hear what the disk did meanwhile
        told, counters = read(vllm), vllm.look_inside()["counters"]
        ttft = {name: told.get(f"ttft_seconds|{name}", 0) for name in ("hit", "partial", "miss", "none")}
        assert ttft == {"hit": 2, "partial": 0, "miss": 2, "none": 2}
        assert told["promised_tokens"] == told["loaded_tokens"] == told["vllm:external_prefix_cache_hits"] > 2 * FULL
        assert told["tier_hit_tokens|dram"] == from_tier(told, "host") == told["loaded_tokens"]
        assert told["tier_hit_tokens|nvme"] == told["failed_tokens"] == told["unexpected_errors"] == 0
        for ours, name in (("asked", "lookup_tokens"), ("stored", "stored_tokens"), ("loads", "loads")):
            assert told[name] == counters[ours] > 0
        blocks = told["stored_tokens"] // BLOCK_TOKENS
        for tier in ("dram", "nvme"):
            assert told[f"tier_written_bytes|{tier}"] == blocks * BLOCK_NBYTES
            assert told[f"tier_blocks|{tier}"] == told[f"tier_written_blocks|{tier}"] == blocks
            assert told[f"tier_breaker|{tier}"] == 0
        assert (
            told["tier_read_bytes|dram"] == blocks * BLOCK_NBYTES + told["loaded_tokens"] * BLOCK_NBYTES // BLOCK_TOKENS
        )
        assert (told["cold_start|new"], told["recovered_blocks"]) == (1, 0)
        known = replay(vllm, 2)
        assert known.pop("described") == blocks
        assert known == {"equal": True, "cpu": blocks, "disk": blocks, "as vLLM describes them": True, "cleared": 2}
        assert vllm.ask("reset", reset_connector=True)
        vllm.generate(first)
        vllm.settle(quiet_s=1.2)
        vllm.generate(prompt(5, 20), max_tokens=2)
        known = replay(vllm, 2)
        assert known["equal"] and known["cpu"] == known["disk"] == BLOCKS and known["cleared"] == 4
        assert read(vllm)["resets"] == 1
    with launch(config, kv_events_config={"enable_kv_cache_events": True, "publisher": "null"}) as vllm:
        vllm.ask("run", code=LISTEN)
        vllm.generate(first)
        vllm.generate(prompt(6, 20), max_tokens=2)
        told = read(vllm)
        assert told["recovered_blocks"] == BLOCKS and not any(key.startswith("cold_start") for key in told)
        assert told["tier_hit_tokens|nvme"] == from_tier(told, "disk") == FULL
        assert told["tier_read_bytes|nvme"] == BLOCKS * BLOCK_NBYTES
        assert told["ttft_seconds|hit"] == 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_processes_of_their_own_beside_another_connector(launch: Any, tmp_path: Path, ranks: int) -> None:
    """Bytes are sums over ranks, blocks and tokens are not; under vLLM's MultiConnector each keeps its own."""
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    config = connector("dram:2MiB", f"nvme:{tmp_path / 'kv'}:16MiB", write_after_s=0.1, multi=[example])
    arguments = {"several": True, "tensor_parallel_size": ranks, "disable_hybrid_kv_cache_manager": True}
    with launch(config, **arguments) as vllm:
        vllm.generate(prompt(1, N))
        vllm.settle(quiet_s=1.5)
        assert vllm.ask("reset", reset_connector=False)
        vllm.generate(prompt(1, N))
        vllm.settle(quiet_s=1.5)
        vllm.generate(prompt(2, 20), max_tokens=2)
        told = read(vllm)
    assert told["stored_tokens"] == told["loaded_tokens"] == told["tier_hit_tokens|dram"] == FULL
    assert told["tier_written_blocks|dram"] == told["tier_written_blocks|nvme"] == BLOCKS
    assert told["tier_written_bytes|dram"] == told["tier_written_bytes|nvme"] == BLOCKS * BLOCK_NBYTES
    assert (told["ttft_seconds|miss"], told["ttft_seconds|hit"], told["ttft_seconds|none"]) == (1, 1, 1)
    assert from_tier(told, "host") == FULL
