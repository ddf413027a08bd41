"""What is in the identity of an engine's KV and what is not, on stand-ins for vLLM's configuration."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm_fakes import (
    Backend,
    FullAttentionSpec,
    OtherBackend,
    UniformTypeKVCacheSpecs,
    group,
    kv_config,
    layer,
    with_spec,
)
from vllm_fakes import model_config as draft_config
from vllm_fakes import vllm_config as whole_config
from weights_kit import flip, write_model

from tiercache.errors import ConfigError
from tiercache.integrations import vllm_identity
from tiercache.integrations.vllm_identity import (
    KVIdentity,
    attention_backends,
    device_format,
    engine_identity,
    hash_probe,
    layer_specs,
    namespace_difference,
    rank_parts,
)
from tiercache.layout import Namespace

RANKS = {"tp": 0, "pp": 0}


@pytest.fixture(autouse=True)
def _no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of vLLM itself has fixed answers."""
    monkeypatch.setattr(vllm_identity, "vllm_version", lambda: "0.0")
    monkeypatch.setattr(vllm_identity, "hash_probe", lambda algo: f"{algo}:00")
    monkeypatch.setattr(vllm_identity, "device_format", lambda *_: ["cpu", "vec"])


@pytest.fixture
def config(tmp_path: Path) -> SimpleNamespace:
    return whole_config(write_model(tmp_path / "model"))


def _set(path: str, value: Any) -> Callable[[SimpleNamespace], None]:
    def apply(config: SimpleNamespace) -> None:
        *way, last = path.split(".")
        for name in way:
            config = getattr(config, name)
        assert hasattr(config, last)
        setattr(config, last, value)

    return apply


def _speculate(method: str, **draft: Any) -> Callable[[SimpleNamespace], None]:
    def apply(config: SimpleNamespace) -> None:
        model = draft_config(Path(draft.pop("path", config.model_config.model)), **draft)
        config.speculative_config = SimpleNamespace(
            method=method, draft_model_config=model, draft_load_config=None, kv_cache_dtype=None
        )

    return apply


def _longrope(longest: int, original: int | None = None) -> Callable[[SimpleNamespace], None]:
    def apply(config: SimpleNamespace) -> None:
        config.model_config.hf_config.rope_parameters = {"rope_type": "longrope"}
        config.model_config.max_model_len = longest
        config.model_config.original_max_model_len = original

    return apply


PARALLEL = "parallel_config."
MODEL = "model_config."
TOLD: dict[str, tuple[str, list[Callable[[SimpleNamespace], None]]]] = {
    "dtype": ("dtype", [_set(MODEL + "dtype", "torch.float16")]),
    "quantization": ("quantization", [_set(MODEL + "quantization", "fp8")]),
    "quantization config": ("quantization", [_set(MODEL + "quantization_config", {"linear": "fp8"})]),
    "kv dtype": ("kv_dtype", [_set("cache_config.cache_dtype", "fp8")]),
    "kv dtype of layers": ("kv_dtype", [_set("cache_config.kv_cache_dtype_skip_layers", ["0"])]),
    "hash": ("hash", [_set("cache_config.prefix_caching_hash_algo", "sha256_cbor")]),
    "tp": ("parallel", [_set(PARALLEL + "tensor_parallel_size", 2)]),
    "pp": ("parallel", [_set(PARALLEL + "pipeline_parallel_size", 2)]),
    "dcp": ("parallel", [_set(PARALLEL + "decode_context_parallel_size", 2)]),
    "pcp": ("parallel", [_set(PARALLEL + "prefill_context_parallel_size", 2)]),
    "overrides": ("model_code", [_set(MODEL + "hf_overrides", {"rope_theta": 1e6})]),
    "implementation": ("model_code", [_set(MODEL + "model_impl", "transformers")]),
    "other class": ("model_code", [_set(MODEL + "model_class_overrides", {"Tiny": "mine:Tiny"})]),
    "window off": ("model_code", [_set(MODEL + "disable_sliding_window", True)]),
    "dummy": ("weights", [_set("load_config.load_format", "dummy")]),
    "eagle": ("speculative", [_speculate("eagle")]),
    "pictures": (
        "multimodal",
        [_set(MODEL + "multimodal_config", SimpleNamespace(mm_processor_kwargs={"max_pixels": 9}))],
    ),
}


@pytest.mark.parametrize("name", TOLD)
def test_each_part_alone_changes_the_identity(config: SimpleNamespace, name: str) -> None:
    part, changes = TOLD[name]
    before = engine_identity(config, kv_config())
    for change in changes:
        change(config)
    after = engine_identity(config, kv_config())
    assert after.digest != before.digest
    assert [line.partition(":")[0] for line in after.difference(before)] == [part]


def test_block_size_and_versions_change_the_identity(config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_identity(config, kv_config())
    assert engine_identity(config, with_spec(block_size=32)).difference(before) == ["block_size: [16] -> [32]"]
    monkeypatch.setattr(vllm_identity, "vllm_version", lambda: "0.1")
    assert engine_identity(config, kv_config()).difference(before) == ["vllm: 0.0 -> 0.1"]


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("cache_config.gpu_memory_utilization", 0.5),
        ("cache_config.num_gpu_blocks", 7),
        ("scheduler_config.max_num_seqs", 1),
        ("parallel_config.rank", 1),
        ("parallel_config.data_parallel_rank", 1),
        ("parallel_config.master_port", 1),
        ("parallel_config.cp_kv_cache_interleave_size", 16),
        ("model_config.max_model_len", 512),
        ("model_config.seed", 5),
        ("kv_transfer_config.kv_port", 1),
        ("kv_transfer_config.engine_id", "b"),
    ],
)
def test_what_does_not_decide_the_kv_changes_nothing(config: SimpleNamespace, path: str, value: object) -> None:
    kv, rank = kv_config(), {"ranks": RANKS}
    before = engine_identity(config, kv), rank_parts(config, kv, **rank)
    _set(path, value)(config)
    kv.num_blocks = 5
    assert (engine_identity(config, kv), rank_parts(config, kv, **rank)) == before


def test_another_place_of_the_model_changes_nothing(config: SimpleNamespace, tmp_path: Path) -> None:
    shutil.copytree(config.model_config.model, tmp_path / "copy")
    other = whole_config(tmp_path / "copy")
    assert engine_identity(other, kv_config()).digest == engine_identity(config, kv_config()).digest
    assert rank_parts(other, kv_config(), ranks=RANKS) == rank_parts(config, kv_config(), ranks=RANKS)


def test_other_weights_under_the_same_path_are_another_model(config: SimpleNamespace) -> None:
    before = engine_identity(config, kv_config())
    flip(Path(config.model_config.model) / "model-00000.safetensors", -1)
    (line,) = engine_identity(config, kv_config()).difference(before)
    assert re.fullmatch(r"weights: sample-1:\w+\.\.\. -> sample-1:\w+\.\.\.", line)


def test_the_interleave_of_context_parallel_ranks_counts_where_there_are_such(config: SimpleNamespace) -> None:
    config.parallel_config.decode_context_parallel_size = 2
    before = engine_identity(config, kv_config())
    config.parallel_config.cp_kv_cache_interleave_size = 16
    assert engine_identity(config, kv_config()).digest != before.digest


def test_the_longest_context_counts_for_longrope_only(config: SimpleNamespace) -> None:
    digests = set()
    for change in (_longrope(2048), _longrope(8192), _longrope(2048, -1)):
        change(config)
        digests.add(engine_identity(config, kv_config()).digest)
    assert len(digests) == 3


# --- weights, named and made up ---------------------------------------------------------------------------------------


def test_a_name_replaces_the_fingerprint_and_reads_nothing(config: SimpleNamespace) -> None:
    shutil.rmtree(config.model_config.model)
    a, b = (engine_identity(config, kv_config(), named=name) for name in ("tiny-v1", "tiny-v2"))
    assert a.parts["weights"] == "named:tiny-v1" and a.difference(b) == ["weights: named:tiny-v2 -> named:tiny-v1"]


def test_made_up_weights_are_named_with_their_seed(config: SimpleNamespace) -> None:
    shutil.rmtree(config.model_config.model)
    config.load_config.load_format = "dummy"
    assert engine_identity(config, kv_config()).parts["weights"] == "dummy:seed 0"
    config.model_config.seed = 3
    assert engine_identity(config, kv_config()).parts["weights"] == "dummy:seed 3"


@pytest.mark.parametrize("name", ["", "  ", 7])
def test_a_name_must_say_something(config: SimpleNamespace, name: Any) -> None:
    with pytest.raises(ConfigError, match="names model and weights") as caught:
        engine_identity(config, kv_config(), named=name)
    assert caught.value.field == "kv_connector_extra_config.namespace"


@pytest.mark.parametrize("load_format", ["tensorizer", "ipc_cache", "modelexpress", "a_plugin"])
def test_loaders_with_weights_from_elsewhere_need_a_name(config: SimpleNamespace, load_format: str) -> None:
    config.load_config.load_format = load_format
    with pytest.raises(ConfigError, match="namespace") as caught:
        engine_identity(config, kv_config())
    assert (caught.value.field, caught.value.value) == ("load_format", load_format)
    assert engine_identity(config, kv_config(), named="x").parts["weights"] == "named:x"


def test_weights_in_an_object_store_need_a_name(config: SimpleNamespace) -> None:
    config.load_config.load_format = "runai_streamer"
    assert engine_identity(config, kv_config()).parts["weights"].startswith("sample-1:")
    config.model_config.model_weights = "s3://bucket/tiny"
    with pytest.raises(ConfigError, match="streamed from elsewhere") as caught:
        engine_identity(config, kv_config())
    assert caught.value.value == "s3://bucket/tiny"


def test_no_weights_need_a_name(config: SimpleNamespace) -> None:
    for path in Path(config.model_config.model).glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ConfigError, match="no file of weights"):
        engine_identity(config, kv_config())


# --- draft models -----------------------------------------------------------------------------------------------------


def test_a_draft_model_counts_with_its_weights(config: SimpleNamespace, tmp_path: Path) -> None:
    draft = write_model(tmp_path / "draft", seed=7)
    seen = {engine_identity(config, kv_config()).digest}
    for change in (
        _speculate("draft_model", path=draft),
        _speculate("eagle3", path=draft),
        _speculate("eagle3", path=draft, dtype="torch.float32"),
    ):
        change(config)
        seen.add(engine_identity(config, kv_config()).digest)
    flip(draft / "model-00000.safetensors", -1)
    seen.add(engine_identity(config, kv_config()).digest)
    seen.add(engine_identity(config, kv_config(), named="x").digest)
    assert len(seen) == 6


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafts_without_a_model_count_for_nothing(config: SimpleNamespace, method: str) -> None:
    before = engine_identity(config, kv_config())
    _speculate(method)(config)
    assert engine_identity(config, kv_config()) == before


# --- what a rank knows ------------------------------------------------------------------------------------------------


def _views(*shape: int, dtype: str = "torch.bfloat16", strides: tuple[int, ...] = (9, 3, 2, 1)) -> dict[str, Any]:
    return {"layers.0": SimpleNamespace(shape=(100, *shape), dtype=dtype, stride=lambda: strides)}


def test_each_part_of_a_rank_changes_its_namespace(config: SimpleNamespace) -> None:
    identity = engine_identity(config, kv_config())
    layout = kv_config()
    layout.kv_cache_layout = "BLHNC"
    one = {"ranks": RANKS, "kv_caches": _views(2, 16, 64)}
    parts = [
        rank_parts(config, kv_config(), ranks=RANKS),
        rank_parts(config, kv_config(), ranks={"tp": 1, "pp": 0}),
        rank_parts(config, kv_config(), ranks={"tp": 0, "pp": 1}),
        rank_parts(config, layout, ranks=RANKS),
        rank_parts(config, with_spec(num_kv_heads=4), ranks=RANKS),
        rank_parts(config, with_spec(dtype="torch.uint8"), ranks=RANKS),
        rank_parts(config, with_spec(sliding_window=64), ranks=RANKS),
        rank_parts(config, kv_config(group(FullAttentionSpec(), ("layers.0",))), ranks=RANKS),
        rank_parts(config, kv_config(), ranks=RANKS, attention={"layers.0": "a", "layers.1": "b"}),
        rank_parts(config, kv_config(), ranks=RANKS, attention={"layers.0": "b", "layers.1": "a"}),
        rank_parts(config, kv_config(), **one),
        rank_parts(config, kv_config(), **{**one, "kv_caches": _views(16, 2, 64)}),
        rank_parts(config, kv_config(), **{**one, "kv_caches": _views(2, 16, 64, dtype="torch.uint8")}),
        rank_parts(config, kv_config(), **{**one, "kv_caches": _views(2, 16, 64, strides=(9, 2, 3, 1))}),
    ]
    config.model_config.hf_config.rope_theta = 1e6
    parts.append(rank_parts(config, kv_config(), ranks=RANKS))
    namespaces = [identity.namespace(rank) for rank in parts]
    assert len({namespace.digest for namespace in namespaces}) == len(parts)
    assert all(namespace.digest != identity.digest for namespace in namespaces)
    assert identity.namespace(parts[0]) == identity.namespace(dict(reversed(parts[0].items())))


def test_the_page_packing_of_the_processor_counts(config: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rank_parts(config, kv_config(), ranks=RANKS)
    monkeypatch.setattr(vllm_identity, "device_format", lambda *_: ["cpu", "amx"])
    assert rank_parts(config, kv_config(), ranks=RANKS) != before


def test_specs_of_uniform_groups_are_those_of_their_layers(config: SimpleNamespace) -> None:
    inner = {"layers.0": FullAttentionSpec(), "layers.1": FullAttentionSpec(head_size=64)}
    kv = kv_config(group(UniformTypeKVCacheSpecs(16, inner)))
    assert layer_specs(kv) == inner
    assert rank_parts(config, kv, ranks=RANKS) != rank_parts(config, kv_config(), ranks=RANKS)


def test_attention_classes_are_asked_of_the_layers(config: SimpleNamespace) -> None:
    context = config.compilation_config.static_forward_context
    context["layers.1"] = layer(OtherBackend)
    found = attention_backends(config, kv_config())
    assert found == {"layers.0": f"{Backend.__module__}.Backend", "layers.1": f"{Backend.__module__}.OtherBackend"}
    del context["layers.0"]
    with pytest.raises(ConfigError, match=r"layers\.0"):
        attention_backends(config, kv_config())


# --- texts ------------------------------------------------------------------------------------------------------------


def test_parts_are_text_and_survive_a_manifest(config: SimpleNamespace) -> None:
    identity = engine_identity(config, kv_config())
    namespace = identity.namespace(rank_parts(config, kv_config(), ranks=RANKS))
    parts = json.loads(str(namespace))
    assert all(isinstance(text, str) and len(text) <= vllm_identity.LEGIBLE for text in parts.values())
    assert "0x" not in str(namespace).replace(":0x", "") and len(str(namespace)) < 4096
    assert Namespace(str(namespace)).digest == namespace.digest


def test_what_an_override_prints_of_its_address_does_not_count(config: SimpleNamespace) -> None:
    class Odd:
        def __init__(self) -> None:
            self.size = 3

    digests = set()
    for value in (Odd(), Odd(), {"f": Odd()}, {"f": Odd()}):
        config.model_config.hf_overrides = value
        digests.add(engine_identity(config, kv_config()).digest)
    assert len(digests) == 2


def test_differences_between_texts_of_other_kinds() -> None:
    assert namespace_difference("mine", "mine") == []
    assert namespace_difference("mine", "yours") == ["namespace: mine -> yours"]
    assert namespace_difference("mine", KVIdentity({"a": "1"}).namespace()) == [
        "a: nothing -> 1",
        "namespace: mine -> nothing",
    ]
    assert namespace_difference(Namespace.of(a="1" * 60), Namespace.of(a="2")) == [f"a: {'1' * 45}... -> 2"]


# --- what is asked of vLLM itself, of an imitation --------------------------------------------------------------------


def _imitate(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    """Modules of vLLM, named with __ for dots, with these attributes."""
    for name in modules:
        dotted = name.replace("__", ".")
        while dotted:
            monkeypatch.setitem(sys.modules, dotted, ModuleType(dotted))
            dotted = dotted.rpartition(".")[0]
    for name, attributes in modules.items():
        parent, _, last = name.replace("__", ".").rpartition(".")
        monkeypatch.setattr(sys.modules[parent], last, sys.modules[f"{parent}.{last}"], raising=False)
        for attribute, value in attributes.items():
            monkeypatch.setattr(sys.modules[f"{parent}.{last}"], attribute, value, raising=False)


def _hash(value: Any) -> bytes:
    return hashlib.sha256(repr(value).encode()).digest()


def test_the_seed_of_the_first_hash_counts_in_versions_old_and_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashing = {"get_hash_fn_by_name": lambda name: _hash}
    seen = []
    for attributes in ({}, {"resolve_none_hash_seed": lambda hashed: "fixed"}):
        _imitate(monkeypatch, vllm__utils__hashing=hashing, vllm__v1__core__kv_cache_utils=attributes)
        for seed in ("1", "2"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            seen.append(hash_probe("sha256"))
    assert len(set(seen)) == 3 and seen[2] == seen[3] == f"sha256:{_hash((_hash('fixed'), (1, 2, 3), None)).hex()}"


@pytest.mark.parametrize("choose", [lambda dtype, size, head, cache: f"isa{head}", lambda: "", None])
def test_the_packing_is_asked_for_or_guessed_from_the_processor(
    config: SimpleNamespace, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    attention = {} if choose is None else {"_get_attn_isa": choose}
    device = SimpleNamespace(device_type="cpu", fp8_dtype=lambda: "e4m3fn")
    _imitate(
        monkeypatch,
        vllm__platforms={"current_platform": device},
        vllm__v1__attention__backends__cpu_attn=attention,
    )
    specs = {"a": FullAttentionSpec(), "b": FullAttentionSpec(head_size=64)}
    found = device_format(config, specs, {"a": "cpu", "b": "cpu"})
    if choose is not None and choose.__code__.co_argcount:
        assert found[3:] == ["isa32", "isa64"]
    else:
        assert len(found) == 4 and found[3].startswith("flags:")
    device.device_type = "cuda"
    assert device_format(config, specs, {"a": "gpu"}) == ["cuda", "e4m3fn"]


def test_importing_needs_no_engine(python: Callable[..., str]) -> None:
    heavy = "{'vllm', 'torch', 'transformers', 'huggingface_hub'}"
    code = f"import sys, tiercache.integrations.vllm_support\nprint({heavy} & set(sys.modules))"
    assert python(code).strip() == "set()"
