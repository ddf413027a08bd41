"""What a prompt token costs to prefill: the one formula that turns hit tokens into GPU time."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tiercache.errors import ConfigError

__all__ = ["GPU_TFLOPS", "PrefillCost", "parse_params"]

GPU_TFLOPS = {"a100": 312.0, "h100": 989.0, "h200": 989.0, "b200": 2250.0, "l40s": 362.0, "mi300x": 1307.0}
"""Dense bf16 TFLOP/s by name, from the makers' data sheets (SXM or OAM boards; no sparsity)."""

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}


def parse_params(text: str, field: str) -> float:
    """Parameters of a model: `8B`, `1.5B`, `8e9`, `70000000000`. Raises ConfigError that names `field`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]{1,2})?)([KMBT]?)", text.strip(), re.ASCII | re.IGNORECASE)
    params = float(found[1]) * _UNITS[found[2].upper()] if found else 0.0
    if not 1e3 <= params <= 1e15:
        raise ConfigError(field, text, "parameters of the model, like 8B, 70B or 8e9")
    return params


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """How fast one GPU prefills. ConfigError for what cannot be.

    Without a measured rate it is `tflops * 1e12 * mfu / (2 * params)` tokens a second: a multiply and an add per weight
    and token. Attention is left out, so long prompts cost more than this says.
    """

    params: float = 8e9
    """Weights that a token passes through (of a mixture of experts, the active ones)."""
    gpu: str = "H100"
    """Only a label where `tflops` was given."""
    tflops: float = GPU_TFLOPS["h100"]
    """What the GPU could do at most, dense."""
    mfu: float = 0.5
    """The share of it that prefill reaches."""
    measured_tokens_per_s: float | None = None
    """Tokens a second and GPU, measured; then all else is not used."""

    def __post_init__(self) -> None:
        if not 1e3 <= self.params <= 1e15:
            raise ConfigError("model_params", self.params, "parameters of the model, like 8e9")
        if not 0 < self.tflops <= 1e6:
            raise ConfigError("gpu_tflops", self.tflops, "TFLOP/s of one GPU, above 0, like 989")
        if not 0 < self.mfu <= 1:
            raise ConfigError("mfu", self.mfu, "the share of its FLOP/s that prefill reaches, above 0 and up to 1")
        if self.measured_tokens_per_s is not None and not 0 < self.measured_tokens_per_s <= 1e12:
            raise ConfigError("prefill_tokens_per_s", self.measured_tokens_per_s, "tokens a second and GPU, above 0")

    @property
    def tokens_per_s(self) -> float:
        """Prompt tokens that one GPU prefills in a second."""
        return self.measured_tokens_per_s or self.tflops * 1e12 * self.mfu / (2 * self.params)

    def gpu_seconds(self, tokens: float) -> float:
        """GPU seconds that the prefill of `tokens` takes."""
        return tokens / self.tokens_per_s
