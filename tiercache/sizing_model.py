"""Bytes of KV per token, from a model's config.json (Hugging Face). What cannot be told is refused, with the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiercache.errors import ConfigError

__all__ = ["DTYPE_NBYTES", "TokenKV", "kv_of_model", "kv_of_nbytes", "read_model"]

DTYPE_NBYTES = {
    "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "half": 2, "fp32": 4, "float32": 4, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip
_GIVE_BYTES = "give --bytes-per-token instead of --model"
_NESTED = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_SAME = {
    "num_hidden_layers": ("n_layer", "num_layers", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv"),
    "hidden_size": ("n_embd", "d_model"),
    "dtype": ("torch_dtype",),
}
_FULL = ("full_attention", "attention", "global_attention", "full")
_WINDOW = ("sliding_attention", "chunked_attention", "local_attention", "sliding_window")
_NO_KV = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe", "mlp")
_STATE_MODELS = ("mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm")


@dataclass(frozen=True, slots=True)
class TokenKV:
    """KV of one token, all layers."""

    rank_nbytes: int
    """On each rank."""
    ranks: int
    formula: str
    """Of `rank_nbytes`."""
    notes: tuple[str, ...] = ()
    """What was counted how, where that is not plain."""

    @property
    def nbytes(self) -> int:
        """On all ranks together, copies included."""
        return self.rank_nbytes * self.ranks


def kv_of_nbytes(nbytes: int, ranks: int = 1) -> TokenKV:
    """KV of `nbytes` a token and rank, as told by the user. ConfigError below 1."""
    _check_count("--bytes-per-token", nbytes)
    _check_count("--tensor-parallel", ranks)
    return TokenKV(nbytes, ranks, f"given: {nbytes:,} B")


def read_model(path: Path) -> dict[str, Any]:
    """The config.json at this path, or in this directory. ConfigError where it cannot be read, or is none."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("--model", str(file), f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError("--model", str(file), f"is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError("--model", str(file), "an object is needed, as in a model's config.json")
    return config


def kv_of_model(config: Mapping[str, Any], kv_dtype: str | None = None, ranks: int = 1) -> TokenKV:
    """KV of one token of this model (the contents of its config.json), on each of `ranks` tensor-parallel ranks.

    kv_dtype: of the KV; None: that of the weights' config. ConfigError names the field that is missing or not known.
    """
    _check_count("--tensor-parallel", ranks)
    text = _text_model(config)
    if config.get("is_encoder_decoder"):
        raise ConfigError("is_encoder_decoder", True, f"cross attention is not known here: {_GIVE_BYTES}")
    if text.get("model_type") in _STATE_MODELS:
        raise ConfigError("model_type", text["model_type"], "it keeps a state and no KV per token: nothing to size")
    name, size = _dtype(kv_dtype, text, config)
    layers, notes = _kv_layers(text)
    if _field(text, "kv_lora_rank") is not None:
        return _latent(text, layers, name, size, ranks, notes)
    if text.get("global_head_dim") is not None or text.get("num_global_key_value_heads") is not None:
        raise ConfigError("global_head_dim", text.get("global_head_dim"), f"layers differ in width: {_GIVE_BYTES}")
    width, width_text = _head_widths(text)
    heads = _kv_heads(text, layers)
    shares = [-(-each // ranks) for each in heads]
    if len(set(heads)) == 1:
        formula = f"{width_text} x {shares[0]} KV heads x {layers} layers x {size} B ({name})"
    else:
        formula = f"{width_text} x {sum(shares)} KV heads in {layers} layers x {size} B ({name})"
    copies = sum(shares) * ranks - sum(heads)
    if copies:
        whole = f"{heads[0]} KV heads" if len(set(heads)) == 1 else "KV heads"
        notes.append(
            f"{whole} do not divide by {ranks} ranks: {copies} more head x layers than the model has are counted"
        )
    return TokenKV(width * sum(shares) * size, ranks, formula, tuple(notes))


def _latent(text: Mapping[str, Any], layers: int, name: str, size: int, ranks: int, notes: list[str]) -> TokenKV:
    """Multi-head latent attention: one latent vector and one rotary key per layer, on every rank whole."""
    latent, rope = _count(text, "kv_lora_rank"), _count(text, "qk_rope_head_dim")
    if ranks > 1:
        notes.append(f"the latent vector has no heads to share out: each of the {ranks} ranks holds all of it")
    if text.get("index_head_dim") is not None:
        notes.append(f"keys of the sparse-attention indexer (index_head_dim {text['index_head_dim']}) are not counted")
    formula = f"({latent} latent + {rope} rotary) x {layers} layers x {size} B ({name})"
    return TokenKV((latent + rope) * layers * size, ranks, formula, tuple(notes))


def _text_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model."""
    inner: Mapping[str, Any] = config
    for _ in range(3):
        if _field(inner, "num_hidden_layers") is not None:
            return inner
        nested = next((inner[name] for name in _NESTED if isinstance(inner.get(name), Mapping)), None)
        if nested is None:
            break
        inner = nested
    raise ConfigError("num_hidden_layers", None, f"the config has none, nor a text_config that has: {_GIVE_BYTES}")


def _field(config: Mapping[str, Any], name: str) -> Any:
    return next((config[each] for each in (name, *_SAME.get(name, ())) if config.get(each) is not None), None)


def _count(config: Mapping[str, Any], name: str) -> int:
    value = _field(config, name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(name, value, f"a whole number of at least 1 is needed in the config; or {_GIVE_BYTES}")
    return value


def _check_count(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(name, value, "a whole number of at least 1 is needed")


def _dtype(kv_dtype: str | None, text: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, int]:
    name = kv_dtype or _field(text, "dtype") or _field(config, "dtype")
    plain = str(name).lower().removeprefix("torch.")
    if plain not in DTYPE_NBYTES:
        where = "--kv-dtype" if kv_dtype or name is None else "torch_dtype"
        raise ConfigError(where, name, f"one of {', '.join(DTYPE_NBYTES)} is needed: give --kv-dtype")
    return plain, DTYPE_NBYTES[plain]


def _head_widths(text: Mapping[str, Any]) -> tuple[int, str]:
    """Numbers per token and KV head, key and value together."""
    if text.get("head_dim") is not None:
        key = _count(text, "head_dim")
    else:
        hidden, heads = _count(text, "hidden_size"), _count(text, "num_attention_heads")
        if hidden % heads:
            raise ConfigError("hidden_size", hidden, f"no multiple of {heads} heads, and no head_dim: {_GIVE_BYTES}")
        key = hidden // heads
    value = _count(text, "v_head_dim") if text.get("v_head_dim") is not None else key
    return key + value, f"2 x {key}" if key == value else f"({key} + {value})"


def _kv_heads(text: Mapping[str, Any], layers: int) -> list[int]:
    """KV heads of each layer that has KV."""
    heads = _field(text, "num_key_value_heads")
    if isinstance(heads, list):
        whole = all(isinstance(each, int) and not isinstance(each, bool) and each >= 1 for each in heads)
        if not whole or len(heads) != layers:
            raise ConfigError(
                "num_key_value_heads", heads, f"{layers} numbers, one per layer, are needed: {_GIVE_BYTES}"
            )
        return heads
    if heads is None and text.get("multi_query") is True:
        return [1] * layers
    return [_count(text, "num_attention_heads" if heads is None else "num_key_value_heads")] * layers


def _kv_layers(text: Mapping[str, Any]) -> tuple[int, list[str]]:
    """How many layers keep KV per token, and remarks on the others."""
    layers, notes = _count(text, "num_hidden_layers"), []
    kinds = _layer_kinds(text, layers)
    full = sum(kind in _FULL for kind in kinds)
    window = sum(kind in _WINDOW for kind in kinds)
    size = text.get("sliding_window") or text.get("attention_chunk_size")
    in_full = "counted in full, since a block holds all layers; engines that drop the rest need less"
    if not window and size and text.get("use_sliding_window", True) and text.get("layer_types") is None:
        notes.append(f"some or all layers look back {size:,} tokens only: {in_full}")
    if window:
        which = f"{window} of {layers} layers look back {f'{size:,} tokens' if size else 'a window'} only"
        notes.append(f"{which}: {in_full}")
    if full + window < layers:
        notes.append(
            f"{layers - full - window} of {layers} layers keep no KV per token (state, if any, is not counted)"
        )
    shared = text.get("num_kv_shared_layers") or 0
    if shared:
        notes.append(f"the last {shared} layers use the KV of earlier ones")
    if full + window <= shared:
        raise ConfigError("layer_types", sorted(set(kinds)), f"no layer keeps KV per token: {_GIVE_BYTES}")
    return full + window - shared, notes


def _layer_kinds(text: Mapping[str, Any], layers: int) -> list[str]:
    """What each layer is: a name of _FULL, _WINDOW or _NO_KV."""
    named = text.get("layer_types") or text.get("layers_block_type") or text.get("block_types")
    pattern, indices = text.get("hybrid_override_pattern"), text.get("attn_layer_indices")
    interval, period = text.get("full_attention_interval"), text.get("attn_layer_period")
    if isinstance(named, list):
        unknown = sorted({str(kind) for kind in named} - {*_FULL, *_WINDOW, *_NO_KV})
        if unknown or len(named) > layers:
            raise ConfigError("layer_types", unknown or len(named), f"not known here: {_GIVE_BYTES}")
        return (named * layers)[:layers]
    if isinstance(pattern, str):
        return ["attention" if letter == "*" else "mamba" for letter in pattern]
    if isinstance(indices, list):
        return ["attention" if i in indices else "mamba" for i in range(layers)]
    if isinstance(interval, int) and interval > 0:
        return ["attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
    if isinstance(period, int) and period > 0:
        offset = text.get("attn_layer_offset") or 0
        return ["attention" if i % period == offset else "mamba" for i in range(layers)]
    if any(text.get(name) is not None for name in ("ssm_cfg", "mamba_d_state", "ssm_state_size", "mamba_d_ssm")):
        raise ConfigError("layer_types", None, f"the model has state layers, and which is not said: {_GIVE_BYTES}")
    return ["full_attention"] * layers
