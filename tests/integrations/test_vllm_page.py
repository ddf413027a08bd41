"""What docs/vllm.md says can be written, can be; what it says is refused, is; its alerts name metrics that exist."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercache.errors import ConfigError
from tiercache.integrations.vllm_config import read_settings
from tiercache.integrations.vllm_counts import METRICS

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "vllm.md").read_text(encoding="utf-8")
TIERS = ["dram:1MiB", "nvme:/mnt/kv:8MiB"]
VALUES = {
    "tiers": TIERS,
    "namespace": "llama-3/2026-01",
    "engines": 2,
    "lora": "immutable",
    "policy": "lru",
    "exclusive": False,
    "switch": "loads-off",
}
OF_NVME = {
    "write_after_s": None,
    "max_writes_per_hit": 6,
    "durability": "process",
    "threads": 4,
    "read_deadline_s": 1.0,
    "write_deadline_s": 1.0,
}
REFUSED = {
    "layout": {"block_shape": [8], "dtype": "uint8"},
    "block_tokens": 32,
    "ttl_s": 60,
    "prefill_tokens_per_s": 1000,
}


def vllm_config(extra, role="kv_both"):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra, kv_role=role, kv_load_failure_policy="recompute"
        ),
        parallel_config=SimpleNamespace(world_size=2, data_parallel_size=1, data_parallel_index=0),
        scheduler_config=SimpleNamespace(async_scheduling=False),
        cache_config=SimpleNamespace(block_size=32),
    )


def options(title):
    """First column of the table whose head begins so."""
    lines = PAGE.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"| {title} |")) + 2
    found = []
    while lines[at].startswith("|"):
        found += re.findall(r"`(\w+)`", lines[at].split("|")[1])
        at += 1
    return found


def test_the_page_has_every_option():
    assert options("option") == ["tiers", "config", *list(VALUES)[1:]]
    assert options("of `nvme`") == list(OF_NVME)
    for name in REFUSED:
        assert f"`{name}`" in PAGE


def test_every_option_is_taken(tmp_path):
    table = {"kind": "nvme", "path": "/mnt/kv", "size": "8MiB", **OF_NVME}
    plain = {name: value for name, value in VALUES.items() if name != "policy"}
    taken = read_settings(vllm_config(plain | {"tiers": [TIERS[0], table], "policy": "reuse"}))
    assert (taken.named, taken.loads, taken.stores) == (VALUES["namespace"], False, True)
    assert taken.settings.tiers[0].size_nbytes == 2**20 // 4, "two engines of two ranks"
    assert taken.settings.exclusive is False and taken.settings.tiers[1].threads == 4
    assert taken.of_rank(1).tiers[1].directory == Path("/mnt/kv/dp0/rank1")
    (tmp_path / "kv.json").write_text(json.dumps({"tiers": TIERS}))
    assert read_settings(vllm_config({"config": str(tmp_path / "kv.json")})).settings.tiers[1].size_nbytes == 2**22


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_ignored_is_refused(name, tmp_path):
    with pytest.raises(ConfigError, match=name):
        read_settings(vllm_config({"tiers": TIERS, name: REFUSED[name]}))
    (tmp_path / "kv.json").write_text(json.dumps({"tiers": TIERS, name: REFUSED[name]}))
    with pytest.raises(ConfigError, match=f"{name}.*leave it out"):
        read_settings(vllm_config({"config": str(tmp_path / "kv.json")}))


def test_alerts_and_advice_name_metrics_that_exist():
    known = {each.name for each in METRICS}
    named = {re.sub("_total$", "", each) for each in re.findall(r"vllm:tiercache_(\w+)", PAGE)}
    assert len(named) > 10
    assert named <= known
    rules = PAGE.partition("```yaml")[2].partition("```")[0]
    for each in METRICS:
        for counted in re.findall(rf"vllm:tiercache_{each.name}(_total)?\b", rules):
            assert (counted == "_total") is (each.kind == "counter"), each.name


def test_roles():
    for role, loads, stores in (("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False)):
        taken = read_settings(vllm_config({"tiers": TIERS}, role))
        assert (taken.loads, taken.stores) == (loads, stores)
