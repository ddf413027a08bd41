"""Engines that are refused, each with what to do, and what is warned of."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    RSWASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    group,
    kv_config,
    vllm_config,
)

from tiercache.errors import ConfigError
from tiercache.integrations.vllm_support import check_supported

FULL, WINDOW, MAMBA = FullAttentionSpec(), SlidingWindowSpec(), MambaSpec()


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    return vllm_config(tmp_path)


def _refused(config: SimpleNamespace, kv: Any) -> tuple[str, Any, str]:
    with pytest.raises(ConfigError) as caught:
        check_supported(config, kv)
    return caught.value.field, caught.value.value, caught.value.remedy


@pytest.mark.parametrize(
    "kv",
    [
        kv_config(),
        kv_config(group(MLAAttentionSpec())),
        kv_config(group(UniformTypeKVCacheSpecs(16, {"layers.0": FULL, "layers.1": MLAAttentionSpec()}))),
        kv_config(group(FULL), hash_block_size=16, kv_tp_replicas=1),
        kv_config(group(FULL, host_resident=False, enable_kv_transfer=True)),
    ],
)
def test_plain_attention_is_served_without_a_word(config: SimpleNamespace, kv: Any) -> None:
    assert check_supported(config, kv) == []


def test_without_prefix_caching_there_are_no_hashes(config: SimpleNamespace) -> None:
    config.cache_config.enable_prefix_caching = False
    field, value, remedy = _refused(config, kv_config())
    assert (field, value) == ("enable_prefix_caching", False) and "--enable-prefix-caching" in remedy


@pytest.mark.parametrize("algo", ["xxhash", "xxhash_cbor", "builtin"])
def test_hashes_of_one_process_only(config: SimpleNamespace, algo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config.cache_config.prefix_caching_hash_algo = algo
    field, value, remedy = _refused(config, kv_config())
    assert (field, value) == ("prefix_caching_hash_algo", algo) and "--prefix-caching-hash-algo sha256" in remedy
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    if algo == "builtin":
        assert _refused(config, kv_config())[0] == "prefix_caching_hash_algo"
    else:
        assert check_supported(config, kv_config()) == []


def test_versions_that_draw_every_seed_need_one_that_is_set(
    config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = ModuleType("vllm.v1.core")
    core.kv_cache_utils = ModuleType("kv_cache_utils")  # type: ignore[attr-defined]
    for name, module in (("vllm", ModuleType("vllm")), ("vllm.v1", ModuleType("vllm.v1")), ("vllm.v1.core", core)):
        monkeypatch.setitem(sys.modules, name, module)
    remedy = _refused(config, kv_config())[2]
    assert "PYTHONHASHSEED" in remedy and "--prefix-caching-hash-algo" not in remedy  # it is that already
    core.kv_cache_utils.DEFAULT_NONE_HASH_SEED = "fixed"
    assert check_supported(config, kv_config()) == []


def test_scales_of_one_start_only(config: SimpleNamespace) -> None:
    config.cache_config.calculate_kv_scales = True
    assert _refused(config, kv_config())[0] == "calculate_kv_scales"


@pytest.mark.parametrize("field", ["is_encoder_decoder", "is_diffusion"])
def test_models_whose_kv_is_no_function_of_the_prefix(config: SimpleNamespace, field: str) -> None:
    setattr(config.model_config, field, True)
    assert _refused(config, kv_config())[0] == "model"


def test_more_than_one_machine(config: SimpleNamespace) -> None:
    config.parallel_config.nnodes = 2
    assert _refused(config, kv_config())[:2] == ("nnodes", 2)


def test_adapters_only_where_they_never_change(config: SimpleNamespace) -> None:
    config.lora_config = SimpleNamespace()
    field, _, remedy = _refused(config, kv_config())
    assert field == "enable_lora" and '{"lora": "immutable"}' in remedy
    config.kv_transfer_config.kv_connector_extra_config = {"lora": "immutable"}
    (warning,) = check_supported(config, kv_config())
    assert "another name" in warning


def test_several_groups_of_windows_name_the_flag(config: SimpleNamespace) -> None:
    kv = kv_config(group(FULL, ("a",)), group(WINDOW, ("b",)))
    field, value, remedy = _refused(config, kv)
    assert (field, value) == ("kv_cache_groups", 2)
    assert "--disable-hybrid-kv-cache-manager" in remedy and "SlidingWindowSpec" in remedy
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    assert "--disable-hybrid" not in _refused(config, kv)[2]


@pytest.mark.parametrize(
    ("kv", "kind", "remedy"),
    [
        (kv_config(group(WINDOW)), "SlidingWindowSpec", "--disable-sliding-window"),
        (kv_config(group(MAMBA)), "MambaSpec", "without the connector"),
        (kv_config(group(RSWASpec())), "RSWASpec", "without the connector"),
        (
            kv_config(group(UniformTypeKVCacheSpecs(16, {"layers.0": FULL, "layers.1": WINDOW}))),
            "SlidingWindowSpec",
            "--disable-hybrid-kv-cache-manager",
        ),
    ],
)
def test_blocks_that_do_not_keep_their_tokens(config: SimpleNamespace, kv: Any, kind: str, remedy: str) -> None:
    field, value, text = _refused(config, kv)
    assert field.startswith("kv_cache_spec of layers.") and value == kind and remedy in text


def test_states_are_not_helped_by_the_flag(config: SimpleNamespace) -> None:
    remedy = _refused(config, kv_config(group(FULL, ("a",)), group(MAMBA, ("b",))))[2]
    assert "--disable" not in remedy and "without the connector" in remedy


@pytest.mark.parametrize("more", [{"host_resident": True}, {"enable_kv_transfer": False}])
def test_groups_in_host_memory(config: SimpleNamespace, more: dict[str, bool]) -> None:
    assert _refused(config, kv_config(group(FULL, **more)))[0] == "hisparse_config"


def test_no_attention_at_all(config: SimpleNamespace) -> None:
    kv = kv_config()
    kv.kv_cache_groups = []
    assert "no attention" in _refused(config, kv)[2]


def test_hashes_finer_than_blocks(config: SimpleNamespace) -> None:
    assert _refused(config, kv_config(group(FULL), hash_block_size=8))[:2] == ("prefix_match_unit", 8)
    config.cache_config.prefix_match_unit = 4
    assert _refused(config, kv_config())[:2] == ("prefix_match_unit", 4)
    config.parallel_config.decode_context_parallel_size = 2
    assert check_supported(config, kv_config(group(FULL), hash_block_size=32)) == []


@pytest.mark.parametrize(("replicas", "ranks"), [(None, 4), (4, 4), (2, 4), (8, 8)])
def test_copies_over_ranks_are_counted(config: SimpleNamespace, replicas: int | None, ranks: int) -> None:
    config.parallel_config.tensor_parallel_size = ranks
    more = {} if replicas is None else {"kv_tp_replicas": replicas}
    (warning,) = check_supported(config, kv_config(group(MLAAttentionSpec()), **more))
    per_token = 2 * MLAAttentionSpec().page_size_bytes // 16
    copies = per_token * (ranks - ranks // (replicas or ranks))
    assert [int(number) for number in re.findall(r"\d+", warning)] == [
        replicas or ranks,
        ranks,
        per_token * ranks,
        copies,
    ]


def test_no_copies_where_heads_are_split(config: SimpleNamespace) -> None:
    config.parallel_config.tensor_parallel_size = 2
    assert check_supported(config, kv_config()) == []


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("load_config.load_format", "dummy", "seed 0"),
        ("parallel_config.distributed_executor_backend", "ray", "the scheduler's machine"),
        ("weight_transfer_config", SimpleNamespace(), "bump the epoch"),
    ],
)
def test_what_is_warned_of(config: SimpleNamespace, path: str, value: Any, words: str) -> None:
    target: Any = config
    *way, last = path.split(".")
    for name in way:
        target = getattr(target, name)
    setattr(target, last, value)
    (warning,) = check_supported(config, kv_config())
    assert words in warning
