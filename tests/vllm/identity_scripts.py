"""Run as `python identity_scripts.py make|configs|start ARGUMENTS_AS_JSON` in an environment with vLLM."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ENGINE = {
    "skip_tokenizer_init": True,
    "dtype": "bfloat16",
    "max_model_len": 512,
    "block_size": 32,
    "enforce_eager": True,
    "max_num_seqs": 8,
}


def make(root: str) -> None:
    """Models of random weights: `a`, `b` (other weights, same shape), `hybrid` (windows beside full attention)."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    small: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "head_dim": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        LlamaForCausalLM(LlamaConfig(dtype="bfloat16", **small)).to(torch.bfloat16).save_pretrained(Path(root, name))
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    hybrid = Gemma3ForCausalLM(Gemma3TextConfig(query_pre_attn_scalar=32, **windows, **small))
    hybrid.to(torch.bfloat16).save_pretrained(Path(root, "hybrid"))


def configs(model: str, variants: dict[str, dict[str, Any]]) -> None:
    """Print the engine's parts of each variant of the configuration; starts nothing."""
    from vllm.engine.arg_utils import EngineArgs

    from tiercache.integrations.vllm_identity import engine_identity

    found = {}
    for name, changes in variants.items():
        config = EngineArgs(**{"model": model, **ENGINE, **changes}).create_engine_config()
        spec = SimpleNamespace(block_size=config.cache_config.block_size)
        kv = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["a"], kv_cache_spec=spec)])
        identity = engine_identity(config, kv)
        found[name] = {"parts": dict(identity.parts), "digest": identity.digest.hex()}
    print("FOUND", json.dumps(found))


def start(model: str, out: str, changes: dict[str, Any]) -> None:
    """Start an engine with the connector that writes its identity to `out`, and let it answer once."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(
        kv_connector="IdentityConnector",
        kv_connector_module_path="identity_connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"out": out},
    )
    engine = LLM(model=model, **{**ENGINE, "kv_transfer_config": transfer, **changes})
    few = SamplingParams(temperature=0.0, max_tokens=2, detokenize=False, ignore_eos=True)
    engine.generate([{"prompt_token_ids": [*range(4, 100)]}], few, use_tqdm=False)


if __name__ == "__main__":
    {"make": make, "configs": configs, "start": start}[sys.argv[1]](**json.loads(sys.argv[2]))
