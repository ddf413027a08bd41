"""A random Llama large enough that computing a prompt takes longer than loading it, and a tokenizer of bytes for it.

Weights are made on the spot, the same for the same seed. Embeddings are not tied, else every greedy output would be
the same and equal outputs would prove nothing. The tokenizer has a token for each byte, so any text will do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

__all__ = ["BENCH", "DEMO", "FIRST_BYTE", "VOCABULARY", "Shape", "write_model"]

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
FIRST_BYTE = len(SPECIAL)
"""Token of the first byte; the others follow."""
VOCABULARY = 320
_CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Of a Llama."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int = 64
    spread: float = 0.05
    """Standard deviation of its weights."""

    @property
    def kv_nbytes_per_token(self) -> int:
        """In bfloat16."""
        return 2 * self.kv_heads * self.head * self.layers * 2


DEMO = Shape(hidden=512, inner=1536, layers=8, heads=8, kv_heads=4)
BENCH = Shape(hidden=1024, inner=2816, layers=12, heads=16, kv_heads=8)


def write_model(folder: Path, shape: Shape, seed: int = 0) -> int:
    """Write config, weights, tokenizer and chat template into `folder`. Returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
        dtype="bfloat16",
        initializer_range=shape.spread,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(str(folder), safe_serialization=True)
    _write_tokenizer(folder)
    return sum(each.numel() for each in model.parameters())


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIAL, *alphabet]
    words += [f"<{i}>" for i in range(len(words), VOCABULARY)]
    bytes_only = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>"))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = decoders.ByteLevel()
    bytes_only.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _CHAT, **names})
    )
