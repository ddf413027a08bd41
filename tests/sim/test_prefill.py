"""What a token costs to prefill."""

from __future__ import annotations

from typing import Any

import pytest

from tiercache.errors import ConfigError
from tiercache.sim.prefill import GPU_TFLOPS, PrefillCost, parse_params


def test_the_formula() -> None:
    """989e12 * 0.5 FLOP/s over 16e9 FLOP a token."""
    usual = PrefillCost()
    assert usual.tokens_per_s == pytest.approx(30906.25)
    assert usual.gpu_seconds(30906.25 * 3600) == pytest.approx(3600)
    assert PrefillCost(params=70e9, gpu="a100", tflops=GPU_TFLOPS["a100"], mfu=0.4).tokens_per_s == pytest.approx(
        891.43, 1e-4
    )


def test_a_measured_rate_is_taken_as_it_is() -> None:
    assert PrefillCost(params=70e9, measured_tokens_per_s=5000.0).gpu_seconds(10_000) == 2.0


@pytest.mark.parametrize(
    ("text", "params"),
    [("8B", 8e9), ("8b", 8e9), ("8e9", 8e9), ("1.5B", 1.5e9), (" 350M ", 3.5e8), ("1T", 1e12), ("7000000000", 7e9)],
)
def test_parameters_as_people_write_them(text: str, params: float) -> None:
    assert parse_params(text, "--model-params") == params


@pytest.mark.parametrize("text", ["", "8GB", "-8B", "B", "0", "nan", "inf", "1e99", "8 B x", "٨B"])
def test_what_is_no_number_of_parameters(text: str) -> None:
    with pytest.raises(ConfigError, match="--model-params"):
        parse_params(text, "--model-params")


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"params": 0.0}, "model_params"),
        ({"tflops": 0.0}, "gpu_tflops"),
        ({"tflops": float("nan")}, "gpu_tflops"),
        ({"mfu": 0.0}, "mfu"),
        ({"mfu": 1.1}, "mfu"),
        ({"measured_tokens_per_s": 0.0}, "prefill_tokens_per_s"),
        ({"measured_tokens_per_s": float("inf")}, "prefill_tokens_per_s"),
    ],
)
def test_what_cannot_be(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        PrefillCost(**wrong)
