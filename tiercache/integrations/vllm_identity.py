"""What makes the KV of two vLLM engines interchangeable, and which engines can be served at all.

vLLM's block hashes cover tokens, adapters, images and salts. They do not cover the model, its weights, the dtype, the
layout of a page or the split over ranks: of another engine, the same hash names other bytes. So all that is in the
namespace of the files that a rank keeps.

Two halves. What an engine was told (`KVIdentity`) is the same text in its scheduler and in all its ranks, which
compute it each for itself: nothing in it may come from what a process made of its configuration later. What only a
rank knows (`rank_parts`: its place, layers, attention, layout) is added in the namespace of its files.

Works on vLLM's configuration objects by their attributes; imports vLLM only inside functions.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError
from tiercache.integrations.weights import NAME_IT, weights_fingerprint
from tiercache.layout import Namespace

__all__ = [
    "KVIdentity",
    "attention_backends",
    "engine_identity",
    "engine_parts",
    "layer_specs",
    "namespace_difference",
    "rank_parts",
    "vllm_ranks",
]

VERSION = 1
"""Of the parts below: another meaning of a part needs another number."""
LEGIBLE = 200
"""Characters of a part that are kept as they are; longer ones are replaced by their digest."""

LOAD_FORMATS = frozenset(
    {
        *("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "pt", "npcache"),
        *("bitsandbytes", "gguf", "sharded_state", "runai_streamer", "runai_streamer_sharded"),
    }
)
"""Those that take the weights from the model's own folder. Others have them from elsewhere."""
_DRAFTS_WITHOUT_MODEL = ("ngram", "suffix")
_PROVENANCE = ("_name_or_path", "transformers_version", "_commit_hash")
_MULTIMODAL = (
    "language_model_only",
    "media_io_kwargs",
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_hasher_algorithm",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
)
"""How pictures and sound become embeddings: block hashes have what they are, not what is made of them."""


@dataclass(frozen=True)
class KVIdentity:
    """What an engine was told that decides which KV it may use: the same in its scheduler and all its ranks."""

    parts: Mapping[str, str]
    """Named facts, as text."""

    @property
    def digest(self) -> bytes:
        """16 bytes that are the same for engines which may share KV, and in every process of one engine."""
        return self.namespace().digest

    def namespace(self, rank: Mapping[str, str] | None = None) -> Namespace:
        """The namespace of what one rank keeps, with its own parts (`rank_parts`), or that of the engine."""
        return Namespace.of(**{**self.parts, **{f"rank.{name}": text for name, text in (rank or {}).items()}})

    def difference(self, other: KVIdentity) -> list[str]:
        """What differs, as `name: theirs -> ours` with `other` as theirs; empty where the digests are equal."""
        return namespace_difference(other.namespace(), self.namespace())


def namespace_difference(old: Namespace | str, new: Namespace | str) -> list[str]:
    """Parts that differ between two namespaces, as `name: old -> new`; whole texts where they are no named parts."""
    sides = []
    for namespace in (old, new):
        try:
            value = json.loads(str(namespace))
        except ValueError:
            value = None
        sides.append(value if isinstance(value, dict) else {"namespace": str(namespace)})
    before, after = sides
    names = sorted(name for name in {*before, *after} if before.get(name) != after.get(name))
    return [f"{name}: {_short(before.get(name))} -> {_short(after.get(name))}" for name in names]


def engine_identity(vllm_config: Any, kv_cache_config: Any, *, named: str | None = None) -> KVIdentity:
    """`engine_parts` as an `KVIdentity`."""
    return KVIdentity(engine_parts(vllm_config, kv_cache_config, named=named))


def engine_parts(vllm_config: Any, kv_cache_config: Any, *, named: str | None = None) -> dict[str, str]:
    """What the engine was told: model, weights, dtypes, quantisation, hashing, split, draft model, vLLM's version.

    `named` is the operator's own name of model and weights, and replaces the fingerprint of the weights. Reads files
    of the model otherwise. ConfigError where they cannot be read.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    sizes = {
        short: getattr(parallel, f"{name}_size", 1)
        for short, name in (
            ("tp", "tensor_parallel"),
            ("pp", "pipeline_parallel"),
            ("dcp", "decode_context_parallel"),
            ("pcp", "prefill_context_parallel"),
        )
    }
    if sizes["dcp"] > 1 or sizes["pcp"] > 1:
        sizes["interleave"] = getattr(parallel, "cp_kv_cache_interleave_size", 1)
    facts = {
        "identity": VERSION,
        "vllm": vllm_version(),
        "weights": _weights_part(model, vllm_config.load_config, named),
        "dtype": model.dtype,
        "quantization": [getattr(model, "quantization", None), getattr(model, "quantization_config", None)],
        "kv_dtype": [cache.cache_dtype, sorted(getattr(cache, "kv_cache_dtype_skip_layers", None) or [])],
        "block_size": [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups],
        "hash": hash_probe(cache.prefix_caching_hash_algo),
        "parallel": sizes,
        "model_code": [
            getattr(model, name, None)
            for name in (
                "hf_overrides",
                "hf_config_path",
                "config_format",
                "model_impl",
                "model_class_overrides",
                "disable_sliding_window",
                "code_revision",
            )
        ],
        "rope": _rope_part(model),
        "speculative": _speculative_part(vllm_config, named),
        "multimodal": _fields(getattr(model, "multimodal_config", None), _MULTIMODAL),
    }
    return {name: _text(value) for name, value in facts.items()}


def rank_parts(
    vllm_config: Any,
    kv_cache_config: Any,
    *,
    ranks: Mapping[str, int],
    attention: Mapping[str, str] | None = None,
    kv_caches: Mapping[str, Any] | None = None,
) -> dict[str, str]:
    """What only a worker knows: its place, the model as it was built, layers, attention, page layout.

    `ranks` are its places ("tp", "pp": `vllm_ranks`), `attention` the class of each layer (the default is
    `attention_backends`), `kv_caches` the registered tensors, block axis first, if they are there yet: shape of a
    page, dtype and the order of axes in memory are added.
    """
    if attention is None:
        attention = attention_backends(vllm_config, kv_cache_config)
    specs = layer_specs(kv_cache_config)
    layout = getattr(kv_cache_config, "kv_cache_layout", None)
    facts: dict[str, Any] = {
        **{f"{name}_rank": rank for name, rank in ranks.items()},
        "model_config": _hf_config(vllm_config.model_config),
        "layers": {name: _canonical(spec) for name, spec in specs.items()},
        "attention": sorted(set(attention.values())),
        "attention_of_layers": dict(attention),
        "layout": layout or getattr(vllm_config.cache_config, "kv_cache_layout", None),
        "device": device_format(vllm_config, specs, attention),
    }
    if kv_caches is not None:
        facts["pages"] = {name: _page(view) for name, view in kv_caches.items()}
    return {name: _text(value) for name, value in facts.items()}


def _page(view: Any) -> list[Any]:
    """Of one layer's tensor what does not depend on the number of blocks."""
    strides = view.stride()
    return [list(view.shape[1:]), str(view.dtype), sorted(range(len(strides)), key=lambda axis: -strides[axis])]


def attention_backends(vllm_config: Any, kv_cache_config: Any) -> dict[str, str]:
    """The attention class of each layer with KV, in a worker; ConfigError where a layer does not tell."""
    known = vllm_config.compilation_config.static_forward_context
    found = {}
    for name in layer_specs(kv_cache_config):
        layer = known.get(name)
        if layer is None or not hasattr(layer, "get_attn_backend"):
            raise ConfigError(
                f"layers.{name}", layer, "its attention class is not known: ask in a worker, after loading"
            )
        backend = layer.get_attn_backend()
        found[name] = f"{backend.__module__}.{backend.__qualname__}"
    return found


def layer_specs(kv_cache_config: Any) -> dict[str, Any]:
    """The KV cache spec of each layer, uniform groups taken apart, in vLLM's order."""
    found: dict[str, Any] = {}
    for group in kv_cache_config.kv_cache_groups:
        inner = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            found[name] = inner.get(name, group.kv_cache_spec)
    return found


def vllm_ranks() -> dict[str, int]:
    """Where this worker stands among the ranks that hold one engine's KV: "tp", "pp", and "pcp" where vLLM has it."""
    from vllm.distributed import parallel_state

    ranks = {
        "tp": parallel_state.get_tp_group().rank_in_group,
        "pp": parallel_state.get_pp_group().rank_in_group,
    }
    if hasattr(parallel_state, "get_pcp_group"):
        ranks["pcp"] = parallel_state.get_pcp_group().rank_in_group
    return {name: int(rank) for name, rank in ranks.items()}


def vllm_version() -> str:
    """The version of the vLLM that runs here: page formats may change with it."""
    import vllm

    return str(vllm.__version__)


def hash_probe(algo: str) -> str:
    """The algorithm and the hash of a made-up block: covers the first parent, its seed, and how tokens are packed."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core import kv_cache_utils

    hashed: Callable[[Any], bytes] = get_hash_fn_by_name(algo)
    resolve = getattr(kv_cache_utils, "resolve_none_hash_seed", None)
    seed = resolve(hashed) if resolve else os.environ.get("PYTHONHASHSEED")
    return f"{algo}:{hashed((hashed(seed), (1, 2, 3), None)).hex()}"


def device_format(vllm_config: Any, specs: Mapping[str, Any], attention: Mapping[str, str]) -> list[str]:
    """The kind of device, its 8-bit float, and on a CPU the instruction sets that pages are packed for."""
    from vllm.platforms import current_platform

    found = [str(current_platform.device_type), str(current_platform.fp8_dtype())]
    if current_platform.device_type == "cpu":
        packing = {_cpu_packing(vllm_config, specs[name]) for name in attention}
        found += [platform.machine(), *sorted(packing)]
    return found


def _cpu_packing(vllm_config: Any, spec: Any) -> str:
    """The instruction set that vLLM packs a layer's pages for; the processor's flags where it does not tell."""
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa as choose

        dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
        return str(choose(dtype, spec.block_size, spec.head_size, cache_dtype))
    except (ImportError, TypeError):  # a private function: other versions have other arguments, or none
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "")
        return "flags:" + hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()


def _weights_part(model: Any, load: Any, named: str | None) -> str:
    """The weights of one model: as the operator names them, made up at start, or fingerprinted."""
    if named is not None:
        if not isinstance(named, str) or not named.strip():
            raise ConfigError("kv_connector_extra_config.namespace", named, "a text that names model and weights")
        return f"named:{named}"
    load_format = str(getattr(load, "load_format", "auto"))
    if load_format == "dummy":
        return f"dummy:seed {getattr(model, 'seed', None)}"
    elsewhere = str(getattr(model, "model_weights", "") or "")
    if load_format not in LOAD_FORMATS:
        raise ConfigError("load_format", load_format, f"weights do not come from the model's folder: {NAME_IT}")
    if elsewhere and elsewhere != model.model and not Path(elsewhere).exists():
        raise ConfigError("model", elsewhere, f"weights are streamed from elsewhere: {NAME_IT}")
    cache_dir = getattr(load, "download_dir", None)
    source = elsewhere if elsewhere and Path(elsewhere).exists() else model.model
    return weights_fingerprint(source, getattr(model, "revision", None), cache_dir=cache_dir)


def _rope_part(model: Any) -> list[int] | None:
    """Of "longrope" positions vLLM takes other factors when the longest context is long."""
    text = json.dumps(_hf_config(model), default=str)
    if "longrope" not in text and '"su"' not in text:
        return None
    return [int(model.max_model_len or 0), int(getattr(model, "original_max_model_len", None) or 0)]


def _speculative_part(vllm_config: Any, named: str | None) -> Any:
    """A draft model writes KV of its own into the same blocks; drafts without a model write none."""
    config = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(config, "method", None))
    draft = getattr(config, "draft_model_config", None)
    if config is None or draft is None or method.startswith(_DRAFTS_WITHOUT_MODEL):
        return None
    target = vllm_config.model_config
    load = getattr(config, "draft_load_config", None) or vllm_config.load_config
    if (draft.model, draft.revision) == (target.model, target.revision):
        weights = "as the model"
    elif named is not None:
        weights = f"named:{named}:{draft.model}@{draft.revision}"
    else:
        weights = _weights_part(draft, load, None)
    formats = [draft.dtype, getattr(draft, "quantization", None), getattr(config, "kv_cache_dtype", None)]
    return [method, weights, *formats]


def _hf_config(model: Any) -> dict[str, Any]:
    """The model's configuration after all overrides, without where it came from."""
    config: Any = model.hf_config
    fields = config.to_dict() if hasattr(config, "to_dict") else vars(config)
    return {key: value for key, value in fields.items() if key not in _PROVENANCE}


def _fields(config: Any, names: tuple[str, ...]) -> dict[str, Any] | None:
    return None if config is None else {name: getattr(config, name, None) for name in names}


def _canonical(value: Any) -> Any:
    """A value as JSON can hold it, the same in every process: nothing that prints an address."""
    if value is None or (isinstance(value, (bool, int, float, str)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"": type(value).__name__, **{name: _canonical(item) for name, item in fields.items()}}
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_canonical(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_canonical(item), sort_keys=True) for item in value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if hasattr(value, "to_dict"):
        return _canonical(value.to_dict())
    text = str(value)
    if " at 0x" in text:
        return {"": type(value).__name__, **_canonical(getattr(value, "__dict__", {}))}
    return text


def _text(value: Any) -> str:
    """One part: a string as it is, else canonical JSON; long ones as a digest."""
    text = value if isinstance(value, str) else json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"))
    if len(text) <= LEGIBLE:
        return text
    return f"sha256:{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()}"


def _short(text: Any) -> str:
    return "nothing" if text is None else str(text) if len(str(text)) <= 48 else f"{str(text)[:45]}..."
