"""What an operator writes for the connector: shares of sizes, folders, roles, and what is refused with which remedy."""

import json
from types import SimpleNamespace

import pytest

from tiercache.assembly import Seams
from tiercache.config import Remote
from tiercache.errors import ConfigError
from tiercache.integrations.vllm_config import read_settings
from tiercache.testing import MemoryKeyTier

MIB = 1 << 20


def vllm_config(extra, role="kv_both", policy="recompute", ranks=1, engines=1, engine=0, overlaps=False):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config=extra, kv_role=role, kv_load_failure_policy=policy, engine_id="e"
        ),
        parallel_config=SimpleNamespace(world_size=ranks, data_parallel_size=engines, data_parallel_index=engine),
        cache_config=SimpleNamespace(block_size=32),
        scheduler_config=SimpleNamespace(async_scheduling=overlaps),
    )


def tiers(tmp_path, **more):
    return {"tiers": ["dram:64MiB", f"nvme:{tmp_path}/kv:256MiB"], **more}


def test_sizes_are_shared_by_ranks_and_engines_and_each_has_its_folder(tmp_path):
    read = read_settings(vllm_config(tiers(tmp_path), ranks=2, engines=2, engine=1))
    assert (read.ranks, read.engine, read.settings.block_tokens) == (2, 1, 32)
    dram, nvme = read.of_rank(1).tiers
    assert (dram.size_nbytes, nvme.size_nbytes) == (16 * MIB, 64 * MIB)
    assert nvme.path == tmp_path / "kv" / "dp1" / "rank1"


def test_an_engine_of_a_dense_model_must_be_told_how_many_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"engines.*at least 3"):
        read_settings(vllm_config(tiers(tmp_path), engine=2))
    told = read_settings(vllm_config(tiers(tmp_path, engines=4), engine=2))
    assert told.settings.tiers[0].size_nbytes == 16 * MIB


@pytest.mark.parametrize("engines", [0, -1, True, "2", 1.5])
def test_engines_are_a_number(tmp_path, engines):
    with pytest.raises(ConfigError, match="engines"):
        read_settings(vllm_config(tiers(tmp_path, engines=engines)))


@pytest.mark.parametrize(
    "role, loads, stores", [("kv_both", True, True), ("kv_producer", False, True), ("kv_consumer", True, False)]
)
def test_roles(tmp_path, role, loads, stores):
    read = read_settings(vllm_config(tiers(tmp_path), role))
    assert (read.loads, read.stores) == (loads, stores)


@pytest.mark.parametrize(
    "switch, loads, stores", [("off", False, False), ("loads-off", False, True), ("stores-off", True, False)]
)
def test_the_kill_switch(tmp_path, monkeypatch, switch, loads, stores):
    monkeypatch.setenv("TIERCACHE", switch)
    read = read_settings(vllm_config(tiers(tmp_path)))
    assert (read.loads, read.stores) == (loads, stores)


def test_what_is_loaded_stays_on_the_disk_unless_asked_otherwise(tmp_path):
    assert read_settings(vllm_config(tiers(tmp_path))).settings.exclusive is False
    assert read_settings(vllm_config(tiers(tmp_path, exclusive=True))).settings.exclusive is True


def test_settings_from_a_file(tmp_path):
    file = tmp_path / "tiercache.json"
    file.write_text(json.dumps({"tiers": ["dram:8MiB"], "policy": "lru"}))
    read = read_settings(vllm_config({"config": str(file), "namespace": "mine"}))
    assert (read.settings.policy, read.named, read.directory) == ("lru", "mine", None)
    with pytest.raises(ConfigError, match=r"policy.*into the file"):
        read_settings(vllm_config({"config": str(file), "policy": "lru"}))
    file.write_text(json.dumps({"tiers": ["dram:8MiB"], "namespace": "mine"}))
    with pytest.raises(ConfigError, match=r"namespace.*beside `config`"):
        read_settings(vllm_config({"config": str(file)}))


@pytest.mark.parametrize(
    "extra, field, remedy",
    [
        ({}, "tiers", "dram:64GiB"),
        ({"tiers": ["nvme:/mnt/kv:1GiB"]}, "tiers", "DRAM tier"),
        ({"tiers": ["hbm:cpu:1MiB", "dram:1MiB"]}, "tiers", "leave out hbm"),
        ({"tiers": ["dram:1MiB"], "block_tokens": 16}, "block_tokens", "--block-size"),
        ({"tiers": ["dram:1MiB"], "epoch": "v1"}, "epoch", "leave it out"),
        ({"tiers": ["dram:1MiB"], "remote": "nothing:there"}, "remote", "module:function"),
        ({"tiers": ["dram:1MiB"], "remote": "os:getcwd"}, "remote", "Remote"),
        ({"tiers": ["dram:1MiB"], "find_patience_s": -1}, "find_patience_s", "seconds"),
        ({"tiers": ["dram:1MiB"], "find_patience_s": True}, "find_patience_s", "seconds"),
        ({"tiers": ["dram:1MiB"], "polcy": "lru"}, "polcy", "policy"),
        ({"tiers": ["dram:1MiB"], "namespace": 3}, "namespace", "a text"),
        ({"tiers": ["dram:1MiB"], "seams": "nothing:there"}, "seams", "module:function"),
        ({"tiers": ["dram:1MiB"], "seams": "os:getcwd"}, "seams", "Seams"),
        ({"tiers": ["dram:4B"]}, "DRAM.size", "larger"),
        ({"tiers": ["dram:8G"]}, "tiers", "8GiB"),
    ],
)
def test_what_is_wrong_is_named_with_its_remedy(extra, field, remedy):
    with pytest.raises(ConfigError) as caught:
        read_settings(vllm_config(extra, ranks=8))
    assert field in str(caught.value) and remedy in str(caught.value)


def test_more_memory_than_the_machine_has_is_refused_over_all_ranks():
    with pytest.raises(ConfigError, match="make DRAM smaller"):
        read_settings(vllm_config({"tiers": ["dram:900TiB"]}, ranks=1000))


def test_failing_requests_that_could_be_recomputed_is_warned_of(tmp_path, caplog):
    read_settings(vllm_config(tiers(tmp_path), policy="fail"))
    assert "FAILS ITS REQUEST" in caplog.text and '"kv_load_failure_policy": "recompute"' in caplog.text
    caplog.clear()
    read_settings(vllm_config(tiers(tmp_path)))
    assert not caplog.text


def some_seams():
    return Seams()


def test_steps_that_overlap_and_seams(tmp_path):
    read = read_settings(vllm_config(tiers(tmp_path, seams=f"{__name__}:some_seams"), overlaps=True))
    assert read.overlaps and read.seams == Seams()


def some_remote():
    return Remote(MemoryKeyTier(8), find_deadline_s=0.25)


def remote(**more):
    return vllm_config({"tiers": ["dram:8MiB"], "remote": f"{__name__}:some_remote", **more})


def test_a_remote_tier_and_the_epoch_that_engines_share(caplog):
    read = read_settings(remote(epoch="v1"))
    assert (read.tag, read.settings.epoch, read.patience_s) == (b"v1", None, 0.25)
    assert read.settings.remote.find_deadline_s == 0.25 and not caplog.text
    assert read_settings(remote(epoch="v1", find_patience_s=0)).patience_s == 0
    read_settings(remote())
    assert "one tag" in caplog.text


def test_the_kill_switch_of_remote_tiers(monkeypatch, caplog):
    monkeypatch.setenv("TIERCACHE_REMOTE", "off")
    read = read_settings(remote(epoch="v1"))
    assert (read.settings.remote, read.tag, read.patience_s) == (None, b"v1", 0.0)
    assert "TIERCACHE_REMOTE=off" in caplog.text
    monkeypatch.setenv("TIERCACHE_REMOTE", "maybe")
    with pytest.raises(ConfigError, match=r"TIERCACHE_REMOTE.*on or off"):
        read_settings(remote(epoch="v1"))
