"""A tiny random Llama (426,624 parameters) and a tokenizer of words, made on the spot.

Embeddings are not tied and weights are large, else every greedy output would be the same and equality would prove
nothing. 32 is the smallest head that attention on a CPU takes. One block of 32 tokens takes 16 KiB.
"""

from __future__ import annotations

import json
from pathlib import Path

VOCABULARY = 512
BLOCK_TOKENS = 32
BLOCK_NBYTES = 16384
_HIDDEN, _INNER, _LAYERS, _HEADS, _KV_HEADS, _HEAD = 128, 256, 2, 4, 2, 32


def write_model(folder: Path, seed: int = 0) -> Path:
    """Write model and tokenizer into `folder`, over what is there. Other seeds, other weights."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    random = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=random) * 0.2
        for name, shape in _shapes().items()
    }
    weights = {name: each.to(torch.bfloat16).contiguous() for name, each in weights.items()}
    save_file(weights, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCABULARY, _HIDDEN),
        "lm_head.weight": (VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS):
        at = f"model.layers.{layer}."
        shapes |= {
            f"{at}input_layernorm.weight": (_HIDDEN,),
            f"{at}post_attention_layernorm.weight": (_HIDDEN,),
            f"{at}self_attn.q_proj.weight": (_HEADS * _HEAD, _HIDDEN),
            f"{at}self_attn.k_proj.weight": (_KV_HEADS * _HEAD, _HIDDEN),
            f"{at}self_attn.v_proj.weight": (_KV_HEADS * _HEAD, _HIDDEN),
            f"{at}self_attn.o_proj.weight": (_HIDDEN, _HEADS * _HEAD),
            f"{at}mlp.gate_proj.weight": (_INNER, _HIDDEN),
            f"{at}mlp.up_proj.weight": (_INNER, _HIDDEN),
            f"{at}mlp.down_proj.weight": (_HIDDEN, _INNER),
        }
    return shapes


def _write_tokenizer(folder: Path) -> None:
    """Token 17 is the word "w17": `vllm serve` wants a tokenizer even where prompts are token ids."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [{"id": i, "content": text, "special": True, **plain} for text, i in vocabulary.items() if i < 4]
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names}))
