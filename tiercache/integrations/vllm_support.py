"""Which vLLM engines a cache can serve: refuses the others at start, and warns of what will disappoint."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from tiercache.errors import ConfigError
from tiercache.integrations.vllm_identity import layer_specs

__all__ = ["LORA_IMMUTABLE", "check_supported"]

PLAIN_SPECS = ("FullAttentionSpec", "MLAAttentionSpec")
"""Kinds of layers of which each block has one page that holds all its tokens and stays as it is. By exact name: kinds
derived from these (sinks, reference windows, hidden states) do something else with their blocks."""
WINDOW_SPECS = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")
"""Kinds that vLLM can keep whole instead."""
LORA_IMMUTABLE = "immutable"
"""Value of kv_connector_extra_config "lora" by which the operator says that an adapter's files never change."""
NO_HYBRID = "--disable-hybrid-kv-cache-manager"
_REMOVE = "run this model without the connector"


def check_supported(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Warnings, one sentence each, for an engine whose KV can be cached; ConfigError for one whose KV cannot.

    Needs no more than the two configurations, so scheduler and workers may both ask. Reads PYTHONHASHSEED.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    _check_hashing(vllm_config.cache_config)
    _check_model(vllm_config)
    nodes = int(getattr(parallel, "nnodes", 1) or 1)
    if nodes > 1:
        raise ConfigError("nnodes", nodes, "the scheduler and all ranks of an engine must run on one machine")
    _check_groups(vllm_config, kv_cache_config)
    return [
        *_replication(parallel, kv_cache_config),
        *_changing_weights(vllm_config),
        *(
            [f"load_format is dummy: its weights are made up at start and the same only for seed {model.seed}"]
            if str(getattr(vllm_config.load_config, "load_format", "")) == "dummy"
            else []
        ),
        *(
            ["distributed_executor_backend is ray: all ranks must be placed on the scheduler's machine"]
            if str(getattr(parallel, "distributed_executor_backend", "")) == "ray"
            else []
        ),
    ]


def _check_hashing(cache: Any) -> None:
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "enable_prefix_caching",
            cache.enable_prefix_caching,
            "blocks have hashes only with prefix caching: start with --enable-prefix-caching",
        )
    algo = str(cache.prefix_caching_hash_algo)
    if algo == "builtin":
        raise ConfigError("prefix_caching_hash_algo", algo, "too weak to keep: --prefix-caching-hash-algo sha256")
    if _random_root(algo):
        other = "" if algo.startswith("sha256") else "--prefix-caching-hash-algo sha256, or "
        raise ConfigError(
            "prefix_caching_hash_algo",
            algo,
            f"hashes differ in each process, so nothing is found after a restart: {other}"
            "set PYTHONHASHSEED to the same number at every start",
        )
    if getattr(cache, "calculate_kv_scales", False):
        raise ConfigError(
            "calculate_kv_scales", True, "scales differ from start to start: take them from the checkpoint"
        )


def _random_root(algo: str) -> bool:
    """Whether the first parent's hash is drawn anew in each process."""
    if os.environ.get("PYTHONHASHSEED") is not None:
        return False
    if not algo.startswith("sha256"):
        return True
    try:
        from vllm.v1.core import kv_cache_utils
    except ImportError:
        return False
    return not hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")  # older versions draw it for every algorithm


def _check_model(vllm_config: Any) -> None:
    model = vllm_config.model_config
    for field, what in (("is_encoder_decoder", "encoder-decoder models"), ("is_diffusion", "diffusion models")):
        if getattr(model, field, False):
            raise ConfigError("model", model.model, f"KV of {what} is not a function of the tokens before: {_REMOVE}")
    if getattr(vllm_config, "lora_config", None) is not None and _lora(vllm_config) != LORA_IMMUTABLE:
        raise ConfigError(
            "enable_lora",
            True,
            "block hashes carry an adapter's name and path, not its weights: if the files of an adapter never change "
            f'under their name, say so with kv_connector_extra_config {{"lora": "{LORA_IMMUTABLE}"}}',
        )


def _lora(vllm_config: Any) -> Any:
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    return (getattr(transfer, "kv_connector_extra_config", None) or {}).get("lora")


def _check_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("model", vllm_config.model_config.model, f"it has no attention, so no KV: {_REMOVE}")
    specs = layer_specs(kv_cache_config)
    kinds = sorted({type(spec).__name__ for spec in specs.values()})
    remedy = _group_remedy(vllm_config, kinds)
    if len(groups) > 1:
        raise ConfigError("kv_cache_groups", len(groups), f"layers of {', '.join(kinds)} do not share blocks: {remedy}")
    for name, spec in specs.items():
        if type(spec).__name__ not in PLAIN_SPECS:
            raise ConfigError(
                f"kv_cache_spec of {name}", type(spec).__name__, f"its blocks do not keep all their tokens: {remedy}"
            )
    group = groups[0]
    if getattr(group, "host_resident", False) or not getattr(group, "enable_kv_transfer", True):
        raise ConfigError("hisparse_config", True, "KV that vLLM keeps in host memory itself: switch HiSparse off")
    _check_hash_unit(vllm_config, kv_cache_config, group.kv_cache_spec.block_size)


def _group_remedy(vllm_config: Any, kinds: list[str]) -> str:
    if not {*kinds} <= {*PLAIN_SPECS, *WINDOW_SPECS}:
        return f"states are not blocks of tokens, {_REMOVE}"
    if {*kinds} <= {*WINDOW_SPECS}:  # vLLM keeps windows whole only beside full attention
        return f"--disable-sliding-window, or {_REMOVE}"
    if getattr(vllm_config.scheduler_config, "disable_hybrid_kv_cache_manager", False):
        return _REMOVE
    return f"start with {NO_HYBRID}"


def _check_hash_unit(vllm_config: Any, kv_cache_config: Any, block_size: int) -> None:
    """One hash per block is needed."""
    parallel = vllm_config.parallel_config
    tokens = block_size * getattr(parallel, "decode_context_parallel_size", 1)
    unit = getattr(kv_cache_config, "hash_block_size", None)
    unit = unit or getattr(vllm_config.cache_config, "prefix_match_unit", None) or tokens
    if unit != tokens and getattr(parallel, "prefill_context_parallel_size", 1) == 1:
        raise ConfigError("prefix_match_unit", unit, f"a hash per block is needed: {tokens}, or leave it out")


def _replication(parallel: Any, kv_cache_config: Any) -> Iterator[str]:
    """Ranks that hold the same KV keep it each for itself."""
    specs = layer_specs(kv_cache_config)
    ranks = int(parallel.tensor_parallel_size)
    context = int(getattr(parallel, "decode_context_parallel_size", 1))
    replicas = getattr(kv_cache_config, "kv_tp_replicas", None)
    if replicas is None:
        latent = all(type(spec).__name__ == "MLAAttentionSpec" for spec in specs.values())
        replicas = ranks // context if latent else 1
    if replicas <= 1:
        return
    per_token = sum(spec.page_size_bytes / (spec.block_size * context) for spec in specs.values())
    wasted = per_token * (ranks - ranks / replicas)
    yield (
        f"{replicas} of {ranks} tensor parallel ranks hold the same KV and keep it each for itself: of "
        f"{per_token * ranks:.0f} bytes per token {wasted:.0f} are copies"
    )


def _changing_weights(vllm_config: Any) -> Iterator[str]:
    if getattr(vllm_config, "lora_config", None) is not None:
        yield "adapters are known by name and path: one that is trained on must get another name"
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        yield "weights may be replaced while the engine runs, and no connector is told: bump the epoch when they are"
