"""Stand-ins for vLLM's configuration objects, with the attributes and class names that are looked at."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec:
    block_size: int = 16
    num_kv_heads: int = 2
    head_size: int = 32
    dtype: str = "torch.bfloat16"
    sliding_window: int | None = None

    @property
    def page_size_bytes(self) -> int:
        return self.block_size * self.num_kv_heads * self.head_size * 2 * 2


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    num_kv_heads: int = 1


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int | None = 64


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    rswa_window: int = 8


@dataclass(frozen=True, kw_only=True)
class MambaSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    block_size: int
    kv_cache_specs: dict[str, Any]


class Backend:
    """An attention class."""


class OtherBackend:
    """Another one."""


def layer(backend: type) -> SimpleNamespace:
    return SimpleNamespace(get_attn_backend=lambda: backend)


def group(spec: Any, names: tuple[str, ...] = ("layers.0", "layers.1"), **more: Any) -> SimpleNamespace:
    return SimpleNamespace(layer_names=list(names), kv_cache_spec=spec, **more)


def kv_config(*groups: Any, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        num_blocks=100, kv_cache_groups=list(groups or (group(FullAttentionSpec()),)), kv_cache_layout="LBHNC", **more
    )


def model_config(path: Path, **more: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "model": str(path),
        "model_weights": "",
        "revision": None,
        "code_revision": None,
        "seed": 0,
        "dtype": "torch.bfloat16",
        "quantization": None,
        "quantization_config": None,
        "hf_config": SimpleNamespace(architectures=["Tiny"], rope_theta=1e4, _name_or_path=str(path)),
        "hf_overrides": {},
        "hf_config_path": None,
        "config_format": "auto",
        "model_impl": "auto",
        "model_class_overrides": {},
        "disable_sliding_window": False,
        "max_model_len": 2048,
        "original_max_model_len": None,
        "is_encoder_decoder": False,
        "is_diffusion": False,
        "multimodal_config": None,
    }
    return SimpleNamespace(**{**fields, **more})


def vllm_config(path: Path) -> SimpleNamespace:
    return SimpleNamespace(
        model_config=model_config(path),
        cache_config=SimpleNamespace(
            cache_dtype="auto",
            kv_cache_dtype_skip_layers=[],
            enable_prefix_caching=True,
            prefix_caching_hash_algo="sha256",
            prefix_match_unit=None,
            gpu_memory_utilization=0.9,
            kv_cache_layout=None,
            num_gpu_blocks=100,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            cp_kv_cache_interleave_size=1,
            data_parallel_rank=0,
            rank=0,
            nnodes=1,
            distributed_executor_backend="mp",
            master_port=29501,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, disable_hybrid_kv_cache_manager=False),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        compilation_config=SimpleNamespace(
            static_forward_context={"layers.0": layer(Backend), "layers.1": layer(Backend)}
        ),
        speculative_config=None,
        lora_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, kv_port=14579, engine_id="a"),
        weight_transfer_config=None,
    )


def with_spec(**changes: Any) -> SimpleNamespace:
    return kv_config(group(replace(FullAttentionSpec(), **changes)))
