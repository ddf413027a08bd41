"""Sizes, tiers, settings, files, memory limits: what is right works, what is wrong is explained."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.config import (
    DRAM,
    HBM,
    NVMe,
    Remote,
    Settings,
    format_size,
    load_config,
    parse_size,
    parse_tier,
    ram_nbytes,
)
from tiercache.config_memory import check_memory
from tiercache.errors import ConfigError, LayoutError
from tiercache.layout import KVLayout, Namespace
from tiercache.testing import MemoryKeyTier

GIB = 1 << 30
NO_GROUP: dict[str, str] = {}


# --- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("8GiB", 8 << 30),
        ("200GB", 200 * 10**9),
        ("4096B", 4096),
        ("4096", 4096),
        ("0", 0),
        (4096, 4096),
        ("1.5MiB", 3 << 19),
        ("0.1KB", 100),
        (" 2 TiB ", 2 << 40),
        ("3TB", 3 * 10**12),
        ("7kib", 7168),
        ("1MB", 10**6),
        ("1PiB", 1 << 50),
        ("0.3KiB", 307),
    ],
)
def test_sizes(text: int | str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1GiB",
        "1 2GiB",
        "8GiBs",
        "5%",
        "1,5GiB",
        "1e9",
        "0.5B",
        "٣GiB",
        "9" * 5000,
        1.5,
        None,
        True,
        b"8GiB",
        -1,
        1 << 63,
        "9000PiB",
    ],
)
def test_wrong_sizes(text: Any) -> None:
    with pytest.raises(ConfigError, match=r"dram = .*: ") as caught:
        parse_size(text, "dram")
    assert (caught.value.field, caught.value.value) == ("dram", text)


@pytest.mark.parametrize("text", ["8G", "8g", "1.5K", "2 T", "3M"])
def test_ambiguous_sizes_are_refused_with_both_readings(text: str) -> None:
    with pytest.raises(ConfigError, match=r'ambiguous: write "[0-9.]+[KMGT]iB" .* or "[0-9.]+[KMGT]B"'):
        parse_size(text)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0B"),
        (999, "999B"),
        (1024, "1KiB"),
        (8 << 30, "8GiB"),
        (3 << 19, "1.5MiB"),
        (10**9, "953.67MiB"),
        ((1 << 30) - 1, "1023.99MiB"),
        (1 << 60, "1024PiB"),
        (100 << 40, "100TiB"),
    ],
)
def test_format_size(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


@given(st.integers(0, (1 << 63) - 1))
def test_a_formatted_size_reads_back_at_most_a_hundredth_smaller(nbytes: int) -> None:
    again = parse_size(format_size(nbytes))
    assert nbytes * 0.99 - 1 <= again <= nbytes


# --- tiers -----------------------------------------------------------------------------------------------------------


def test_tiers_from_strings() -> None:
    assert parse_tier("dram:8GiB") == DRAM(8 * GIB)
    assert parse_tier("hbm:2GiB") == HBM("2GiB", device="cuda")
    assert parse_tier("hbm:cpu:2GiB") == HBM("2GiB", device="cpu")
    assert parse_tier("hbm:cuda:1:2GiB") == HBM("2GiB", device="cuda:1")
    assert parse_tier("nvme:/mnt/kv:200GiB") == NVMe("/mnt/kv", 200 * GIB)
    assert parse_tier("NVMe:/mnt/a:b:c:1GB") == NVMe("/mnt/a:b:c", 10**9)
    assert parse_tier(DRAM("1KiB")) == DRAM(1024)


def test_tiers_hold_bytes_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    nvme = NVMe("~/kv", "1GiB")
    assert (nvme.size_nbytes, nvme.directory, DRAM("1MB").size_nbytes, HBM("1MB").size_nbytes) == (
        GIB,
        Path("/home/me/kv"),
        10**6,
        10**6,
    )
    assert (nvme.write_after_s, nvme.durability, nvme.threads) == (2.0, "power", 8)
    assert (nvme.read_deadline_s, nvme.write_deadline_s) == (5.0, 30.0)
    assert NVMe("x", 1, write_after_s=None).write_after_s is None
    assert NVMe(Path("x"), 1, write_after_s=0).write_after_s == 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        nvme.size = 3  # type: ignore[misc]


def test_tiers_from_mappings() -> None:
    nvme = {"kind": "nvme", "path": "/mnt/kv", "size": "1GiB", "durability": "process", "threads": 2}
    assert parse_tier(nvme) == NVMe("/mnt/kv", GIB, durability="process", threads=2)
    assert nvme["kind"] == "nvme"  # not mutated
    assert parse_tier({"kind": "hbm", "size": 5, "device": "cpu"}) == HBM(5, "cpu")


@pytest.mark.parametrize(
    ("tier", "match"),
    [
        ("dram", "tier = 'dram': a size is needed at the end, such as dram:8GiB"),
        ("dram:", "such as dram:8GiB"),
        ("dram:8G", "ambiguous"),
        ("dram:x:8GiB", "only a size"),
        ("dram:0", "DRAM.size = 0: more than 0"),
        ("drm:8GiB", "did you mean dram?"),
        ("nvme:200GiB", "a directory and a size"),
        ("nvme::200GiB", "a directory and a size"),
        ("nvme:/mnt/kv", "a directory and a size"),
        ("hbm:gpu:1GiB", "HBM.device = 'gpu'"),
        ("", "before the colon"),
        (5, "a tier object"),
        (None, "a tier object"),
        ({"size": 5}, "tier.kind = None"),
        ({"kind": "nvmee", "size": 5}, "tier.kind = 'nvmee'.*did you mean nvme?"),
        ({"kind": ["nvme"]}, "tier.kind"),
        ({"kind": "nvme", "size": 5}, "tier.path = None: this setting is required"),
        (
            {"kind": "nvme", "path": "x", "size": 5, "durabilty": "power"},
            "tier.durabilty = 'power': .*did you mean durability?",
        ),
    ],
)
def test_wrong_tiers(tier: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match.replace("?", r"\?")):
        parse_tier(tier)


@pytest.mark.parametrize("tier", ["redis://h", " redis://h:7000/2?ttl_s=60", "rediss://h", "unix:///run/x.sock"])
def test_urls_are_remote_tiers(tier: str) -> None:
    assert parse_tier(tier) == parse_tier({"remote": tier}) == Remote(tier)
    assert parse_tier({"remote": tier, "quota": 0.5, "threads": 3}) == Remote(tier, 0.5, threads=3)


@pytest.mark.parametrize(
    ("tier", "match"),
    [
        ("rdma://10.0.0.1:7", "Remote.tier = 'rdma://10.0.0.1:7': one of mooncake://, redis://"),
        ("s3://user:secret@bucket", r"Remote.tier = 's3://user:\*\*\*@bucket': one of"),
        ("redi://h", r"did you mean redis\?"),
        ("redis:x", "a URL is needed, such as redis://10.0.0.5"),
        ({"remote": "redis://h", "qota": 1}, r"tier.qota = 1: no such setting; did you mean quota\?"),
        ({"remote": 5}, "a key tier with find, get, put, remove, close, or a URL"),
        ("redis://h?tll_s=4", r"option tll_s = '4': no such option; .*did you mean ttl_s\?"),
    ],
)
def test_wrong_remote_tiers(tier: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_tier(tier)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("path", ""),
        ("path", None),
        ("path", 5),
        ("size", "0B"),
        ("size", -4),
        ("write_after_s", -1),
        ("write_after_s", float("nan")),
        ("write_after_s", "2"),
        ("durability", "Power"),
        ("durability", None),
        ("durability", ["power"]),
        ("threads", 0),
        ("threads", 257),
        ("threads", 2.0),
        ("threads", True),
        ("max_writes_per_hit", 0.5),
        ("max_writes_per_hit", "6"),
        ("max_writes_per_hit", True),
        ("read_deadline_s", 0),
        ("read_deadline_s", float("inf")),
        ("write_deadline_s", True),
        ("write_deadline_s", None),
    ],
)
def test_wrong_nvme_fields(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        NVMe(**{"path": "x", "size": 1, field: value})
    assert caught.value.field == f"NVMe.{field}"
    assert repr(value) in str(caught.value)
    assert "needed" in caught.value.remedy


# --- settings --------------------------------------------------------------------------------------------------------


def _settings(tiers: Any = ("dram:8GiB",), **more: Any) -> Settings:
    return Settings(tiers=tiers, **more)


def test_tiers_alone_are_enough() -> None:
    settings = _settings(["dram:8GiB", NVMe("/mnt/kv", "200GiB")])
    assert settings.tiers == (DRAM("8GiB"), NVMe("/mnt/kv", "200GiB"))
    assert (settings.layout, settings.namespace, settings.epoch) == (None, None, None)
    assert (settings.block_tokens, settings.policy, settings.exclusive, settings.switch) == (16, "reuse", None, "on")


def test_a_limit_of_writes_needs_a_policy_that_learns() -> None:
    nvme = {"kind": "nvme", "path": "/mnt/kv", "size": "200GiB", "max_writes_per_hit": 6}
    assert cast(NVMe, _settings(["dram:8GiB", nvme]).tiers[1]).max_writes_per_hit == 6
    with pytest.raises(ConfigError, match=r"'lru' cannot tell.*use 'reuse'") as caught:
        _settings(["dram:8GiB", nvme], policy="lru")
    assert caught.value.field == "tiers[1].max_writes_per_hit"


def test_short_forms_become_objects() -> None:
    settings = _settings(
        layout={"block_shape": [2, 4], "dtype": "float16"}, namespace={"model": "m", "tp": 1}, epoch="v1"
    )
    assert settings.layout == KVLayout((2, 4), "float16")
    assert settings.namespace == Namespace.of(tp=1, model="m")
    assert settings.epoch == b"v1"
    assert _settings(namespace="m").namespace == Namespace("m")
    assert _settings(epoch=b"\xff").epoch == b"\xff"


@pytest.mark.parametrize(
    ("tiers", "field", "match"),
    [
        ([], "tiers", "a list of tiers"),
        ("dram:8GiB", "tiers", "a list of tiers"),
        (DRAM(5), "tiers", "a list of tiers"),
        (None, "tiers", "a list of tiers"),
        (["dram:8GiB", "hbm:1GiB"], "tiers[1]", "fast to slow: HBM, DRAM, NVMe"),
        (["nvme:/x:1GiB", "dram:8GiB"], "tiers[1]", "fast to slow"),
        (["dram:8GiB", "dram:9GiB"], "tiers[1]", "once"),
        (["hbm:1GiB", "dram:8GiB", "nvme:x:1GiB", "nvme:y:1GiB"], "tiers[3]", "once"),
        (["dram:8GiB", "redis:host"], "tiers[1]", "a URL is needed"),
        ("redis://:secret@host", "tiers", r"\*\*\*@host': a list of tiers"),
        (["dram:8GiB", "nvme:/x:1G"], "tiers[1]", "ambiguous"),
    ],
)
def test_wrong_lists_of_tiers(tiers: Any, field: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        _settings(tiers)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("layout", 5, "a KVLayout"),
        ("layout", {"block_shape": [2], "dtype": "f"}, "dtype = 'f': not one of"),
        ("namespace", "", "non-empty"),
        ("namespace", 5, "non-empty"),
        ("namespace", {}, "at least one part"),
        ("epoch", "", "1 to 255 bytes"),
        ("epoch", 5, "1 to 255 bytes"),
        ("epoch", b"x" * 256, "1 to 255 bytes"),
        ("block_tokens", 0, "an integer from 1"),
        ("block_tokens", "16", "an integer from 1"),
        ("block_tokens", True, "an integer from 1"),
        ("policy", "lrru", "did you mean lru"),
        ("policy", None, "one of lru"),
        ("exclusive", "yes", "automatic"),
        ("switch", "loads_off", "did you mean loads-off"),
        ("switch", None, "one of on, off"),
    ],
)
def test_wrong_settings(field: str, value: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        _settings(**{field: value})
    assert caught.value.field == field


def test_a_wrong_layout_object_cannot_be_made() -> None:
    with pytest.raises(LayoutError):
        _settings(layout=KVLayout((0,), "int8"))


@pytest.mark.parametrize(
    ("value", "loads", "stores"),
    [
        ("on", True, True),
        ("", True, True),
        (" OFF ", False, False),
        ("loads-off", False, True),
        ("stores-off", True, False),
    ],
)
def test_the_kill_switch_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, value: str, loads: bool, stores: bool
) -> None:
    monkeypatch.setenv("TIERCACHE", value)
    settings = _settings()
    assert (settings.loads_enabled, settings.stores_enabled) == (loads, stores)
    assert load_config({"tiers": ["dram:1GiB"]}).switch == settings.switch
    assert _settings(switch="on").switch == "on"  # said in code: wins


def test_a_wrong_kill_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERCACHE", "of")
    with pytest.raises(ConfigError, match=r"TIERCACHE \(environment\) = 'of': .*did you mean off\?"):
        _settings()


# --- files -----------------------------------------------------------------------------------------------------------

TOML = """
tiers = ["dram:8GiB", {kind = "nvme", path = "/mnt/kv", size = "200GiB", write_after_s = 0.5}]
block_tokens = 32
epoch = "v1"
[layout]
block_shape = [2, 4]
dtype = "bfloat16"
[namespace]
model = "m"
"""


def test_the_same_settings_from_a_dict_toml_and_json(tmp_path: Path) -> None:
    values = {
        "tiers": ["dram:8GiB", {"kind": "nvme", "path": "/mnt/kv", "size": "200GiB", "write_after_s": 0.5}],
        "block_tokens": 32,
        "epoch": "v1",
        "layout": {"block_shape": [2, 4], "dtype": "bfloat16"},
        "namespace": {"model": "m"},
    }
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / "a.json").write_text(json.dumps(values))
    want = Settings(
        tiers=(DRAM("8GiB"), NVMe("/mnt/kv", "200GiB", write_after_s=0.5)),
        block_tokens=32,
        epoch=b"v1",
        layout=KVLayout((2, 4), "bfloat16"),
        namespace=Namespace.of(model="m"),
    )
    assert load_config(values) == load_config(tmp_path / "a.toml") == load_config(str(tmp_path / "a.json")) == want


@pytest.mark.parametrize(
    ("values", "match"),
    [
        (
            {"tiers": ["dram:1GiB"], "block_token": 16},
            r"block_token = 16: no such setting; did you mean block_tokens\?",
        ),
        ({"tiers": ["dram:1GiB"], "xyzzy": 1}, "xyzzy = 1: no such setting$"),
        ({"tiers": ["dram:1GiB"], 5: 1}, "5 = 1: no such setting"),
        ({}, "tiers = None: this setting is required"),
        ({"tier": ["dram:1GiB"]}, r"did you mean tiers\?"),
        ({"tiers": [{"kind": "dram", "sise": "1GiB"}]}, r"tiers\[0\].sise = .*did you mean size\?"),
    ],
)
def test_unknown_and_missing_settings(values: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        load_config(values)


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    for name, text, match in [
        ("a.yaml", "x", r"ends in .toml or .json"),
        ("a.toml", "tiers = = 5", "cannot be parsed: .*line 1"),
        ("a.json", "{,}", "cannot be parsed: .*line 1"),
        ("b.json", "[1]", "one table"),
    ]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=match):
            load_config(tmp_path / name)
    (tmp_path / "c.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be parsed"):
        load_config(tmp_path / "c.toml")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="a mapping, or the path"):
        load_config(5)  # type: ignore[arg-type]


# --- memory ----------------------------------------------------------------------------------------------------------


def _machine(total_gib: int) -> dict[str, str]:
    return {"/proc/meminfo": f"MemTotal:       {total_gib << 20} kB\nMemFree:          1 kB\n"}


def _check(ram_bytes: int, files: dict[str, str]) -> int | None:
    return check_memory(ram_bytes, read=files.get)


def test_which_tiers_are_host_memory() -> None:
    tiers = [HBM(5, "cpu"), DRAM(7), NVMe("x", 11)]
    assert ram_nbytes(tiers) == 12
    assert ram_nbytes([HBM(5), DRAM(7)]) == 7


def test_physical_memory_is_the_limit() -> None:
    machine = _machine(100)
    assert _check(85 * GIB, machine) == 85 * GIB
    with pytest.raises(ConfigError, match=r"'85GiB'.*at most 85GiB fits \(85% of physical memory, 100GiB\)"):
        _check(85 * GIB + 1, machine)


V2 = "/proc/self/cgroup"


@pytest.mark.parametrize(
    "files",
    [
        {V2: "0::/\n", "/sys/fs/cgroup/memory.max": f"{10 * GIB}\n"},
        {V2: "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max": f"{10 * GIB}\n", "/sys/fs/cgroup/a/memory.max": "max\n"},
        {V2: "0::/a/b\n", "/sys/fs/cgroup/a/b/memory.max": "max\n", "/sys/fs/cgroup/a/memory.max": f"{10 * GIB}\n"},
        {V2: "0::/a/b\n", "/sys/fs/cgroup/memory.max": f"{10 * GIB}\n"},
        {V2: "0::/../x\n", "/sys/fs/cgroup/x/memory.max": f"{10 * GIB}\n"},
        {V2: "4:cpu,memory:/job\n0::/\n", "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{10 * GIB}\n"},
        {V2: "4:memory:/job\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": f"{10 * GIB}\n"},
    ],
    ids=[
        "v2 root",
        "v2 own",
        "v2 parent",
        "v2 in a container",
        "v2 outside the namespace",
        "v1 own",
        "v1 in a container",
    ],
)
def test_the_cgroup_is_the_limit(files: dict[str, str]) -> None:
    machine = {**_machine(100), **files}
    assert _check(8 * GIB, machine) == int(8.5 * GIB)
    with pytest.raises(
        ConfigError, match=r"at most 8.5GiB fits \(85% of the cgroup's memory limit, 10GiB\): make DRAM"
    ):
        _check(9 * GIB, machine)


@pytest.mark.parametrize(
    "files",
    [
        NO_GROUP,
        {V2: "0::/\n", "/sys/fs/cgroup/memory.max": "max\n"},
        {V2: "4:memory:/\n", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
        {V2: "4:cpu:/job\n", "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5\n"},
        {V2: "nonsense\n\n"},
        {V2: "0::/\n", "/sys/fs/cgroup/memory.max": f"{400 * GIB}\n"},
    ],
)
def test_no_cgroup_limit(files: dict[str, str]) -> None:
    assert _check(60 * GIB, {**_machine(100), **files}) == 85 * GIB


def test_an_unknown_machine_limits_nothing() -> None:
    assert _check(1 << 60, {}) is None


def test_the_real_machine() -> None:
    fits = check_memory(0)
    assert fits is not None
    assert check_memory(fits) == fits
    with pytest.raises(ConfigError, match="fits"):
        check_memory(fits + 1)


# --- the remote tier -------------------------------------------------------------------------------------------------

KEYS = MemoryKeyTier(1)


def test_a_remote_tier_is_no_slot_tier() -> None:
    settings = load_config(
        {"tiers": [HBM("1GiB"), "dram:8GiB", Remote(KEYS), NVMe("/mnt/kv", "9GiB")], "namespace": "m"}
    )
    assert [type(tier) for tier in settings.tiers] == [HBM, DRAM, NVMe]
    assert settings.remote == Remote(KEYS, quota=0.2)
    assert load_config({"tiers": ["dram:1GiB", Remote(KEYS, 0.5)], "namespace": "m"}).remote == Remote(KEYS, 0.5)
    assert load_config({"tiers": ["dram:1GiB"]}).remote is None


@pytest.mark.parametrize(
    ("tiers", "namespace", "field", "remedy"),
    [
        (["dram:1GiB", Remote(KEYS)], None, "namespace", "name model and weights"),
        ([Remote(KEYS)], "m", "tiers", "a tier in memory is needed"),
        ([Remote(KEYS), "nvme:/kv:1GiB"], "m", "tiers", "a tier in memory is needed"),
        ([Remote(KEYS), "dram:1GiB"], "m", "tiers[0]", "HBM, DRAM, Remote, NVMe"),
        (["dram:1GiB", "nvme:/kv:1GiB", Remote(KEYS)], "m", "tiers[2]", "HBM, DRAM, Remote, NVMe"),
        (["dram:1GiB", Remote(KEYS), Remote(KEYS)], "m", "tiers[2]", "allowed once"),
    ],
)
def test_a_remote_tier_out_of_place(tiers: list[Any], namespace: str | None, field: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(remedy)) as caught:
        load_config({"tiers": tiers, "namespace": namespace})
    assert caught.value.field == field


def test_a_remote_tier_beside_the_others() -> None:
    assert load_config({"tiers": ["dram:1GiB"], "remote": Remote(KEYS), "namespace": "m"}).remote == Remote(KEYS)
    with pytest.raises(ConfigError, match="a Remote, or nothing"):
        load_config({"tiers": ["dram:1GiB"], "remote": "redis://h", "namespace": "m"})


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"tier": object()}, "Remote.tier"),
        ({"tier": "redi://h"}, "Remote.tier"),
        ({"quota": 0}, "Remote.quota"),
        ({"quota": 1.1}, "Remote.quota"),
        ({"quota": True}, "Remote.quota"),
        ({"find_deadline_s": 0}, "Remote.find_deadline_s"),
        ({"read_deadline_s": float("nan")}, "Remote.read_deadline_s"),
        ({"hint_s": -1}, "Remote.hint_s"),
        ({"missing_s": "2"}, "Remote.missing_s"),
        ({"hint_blocks": 0}, "Remote.hint_blocks"),
        ({"threads": 1}, "Remote.threads"),
        ({"write": "always"}, "Remote.write"),
        ({"write_deadline_s": 0}, "Remote.write_deadline_s"),
        ({"min_prefix_tokens": -1}, "Remote.min_prefix_tokens"),
        ({"min_prefix_tokens": 1.5}, "Remote.min_prefix_tokens"),
        ({"max_block_position": 0}, "Remote.max_block_position"),
    ],
)
def test_wrong_values_of_a_remote_tier(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Remote(**{"tier": KEYS, **values})
    assert caught.value.field == field
