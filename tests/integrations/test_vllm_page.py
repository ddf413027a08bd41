"""What docs/vllm.md says can be written, can be; what it says is refused, is; its alerts name metrics that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tiercache.errors import ConfigError
from tiercache.integrations.vllm_config import read_settings
from tiercache.integrations.vllm_counts import METRICS

HERE = Path(__file__).resolve().parent
DOCS = HERE.parent.parent / "docs"
PAGE = (DOCS / "vllm.md").read_text(encoding="utf-8")
RULES = (DOCS / "alerts.yml").read_text(encoding="utf-8")
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
    kinds = {each.name: each for each in METRICS}
    for text, at_least in ((PAGE, 2), (RULES, 12)):
        named = set(re.findall(r"vllm:tiercache_(\w+)", text))
        assert len(named) >= at_least
        for each in named:
            metric = kinds[each.removesuffix("_total")]
            assert each.endswith("_total") is (metric.kind == "counter"), each


def test_alerts_use_labels_that_exist():
    own = {each.name: each.label for each in METRICS}
    selectors = re.findall(r"vllm:tiercache_(\w+?)(?:_total)?\{(\w+)=", RULES)
    assert selectors and all(own[name] == label for name, label in selectors)
    by = set(re.findall(r"\w+", re.findall(r"by \(([^)]*)\)", RULES)[0]))
    assert by <= {"job", "instance", "engine", "tier"}


def test_the_page_and_the_tests_of_the_alerts_have_every_alert():
    alerts = re.findall(r"- alert: (\w+)", RULES)
    tried = (HERE / "alerts_test.yml").read_text(encoding="utf-8")
    assert len(alerts) >= 10 and len(set(alerts)) == len(alerts)
    for each in alerts:
        assert f"`{each}`" in PAGE and f"alertname: {each}" in tried
    assert set(re.findall(r"`(TierCache\w+)`", PAGE)) - {"TierCacheConnector"} == set(alerts)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_alerts_on_series_that_were_made_up():
    run = ["promtool", "test", "rules", str(HERE / "alerts_test.yml")]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_roles():
    for role, loads, stores in (("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False)):
        taken = read_settings(vllm_config({"tiers": TIERS}, role))
        assert (taken.loads, taken.stores) == (loads, stores)
