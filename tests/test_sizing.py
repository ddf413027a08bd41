"""Sizing: bytes per token of known models, the formulas, and `tiercache plan`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache import cli
from tiercache.errors import ConfigError
from tiercache.sizing import Workload, plan
from tiercache.sizing_model import kv_of_model, kv_of_nbytes, read_model

# Excerpts: the fields that decide, as the models' config.json files have them.
LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "num_hidden_layers": 80, "num_attention_heads": 64, "hidden_size": 8192}
QWEN_7B = {
    **LLAMA_8B, "model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
    "hidden_size": 3584, "sliding_window": 131072, "use_sliding_window": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16",
}  # fmt: skip
GEMMA3_27B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128,
        "hidden_size": 5376, "sliding_window": 1024,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10 + ["sliding_attention"] * 2,
    },
}  # fmt: skip
QWEN3_NEXT = {
    "model_type": "qwen3_next", "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2,
    "head_dim": 256, "hidden_size": 2048, "full_attention_interval": 4, "torch_dtype": "bfloat16",
}  # fmt: skip
JAMBA = {
    "model_type": "jamba", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "attn_layer_period": 8, "attn_layer_offset": 4, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "nbytes"),
    [
        (LLAMA_8B, 131_072),
        (LLAMA_70B, 327_680),
        (QWEN_7B, 57_344),
        (DEEPSEEK_V3, 70_272),
        (GEMMA3_27B, 2 * 128 * 16 * 62 * 2),
        (QWEN3_NEXT, 2 * 256 * 2 * 12 * 2),
        (JAMBA, 2 * 128 * 8 * 4 * 2),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "dtype": "torch.float32"}, 2 * 64 * 12 * 12 * 4),
        ({**LLAMA_8B, "num_key_value_heads": None, "multi_query": True}, 2 * 128 * 32 * 2),
        ({**LLAMA_8B, "num_key_value_heads": [4] * 16 + [8] * 16}, 2 * 128 * (16 * 4 + 16 * 8) * 2),
        ({**LLAMA_8B, "head_dim": 192, "v_head_dim": 128}, (192 + 128) * 8 * 32 * 2),
        ({**LLAMA_8B, "num_kv_shared_layers": 10}, 2 * 128 * 8 * 22 * 2),
        ({**LLAMA_8B, "hybrid_override_pattern": "M-M*" * 8}, 2 * 128 * 8 * 8 * 2),
        ({**LLAMA_8B, "attn_layer_indices": [9, 18]}, 2 * 128 * 8 * 2 * 2),
    ],
)
def test_bytes_per_token_of_known_models(config: dict[str, Any], nbytes: int) -> None:
    assert kv_of_model(config).nbytes == nbytes
    half = 4 if "float32" in str(config.get("dtype")) else 2
    assert kv_of_model(config, "fp8").nbytes * half == nbytes


def test_what_was_counted_is_said() -> None:
    assert kv_of_model(LLAMA_8B).notes == () and kv_of_model(QWEN_7B).notes == ()
    assert "52 of 62 layers look back 1,024 tokens only" in kv_of_model(GEMMA3_27B).notes[0]
    assert "36 of 48 layers keep no KV" in kv_of_model(QWEN3_NEXT).notes[0]
    assert "some or all layers look back 4,096" in kv_of_model({**LLAMA_8B, "sliding_window": 4096}).notes[0]
    assert "indexer" in kv_of_model({**DEEPSEEK_V3, "index_head_dim": 128}).notes[0]


@pytest.mark.parametrize(
    ("config", "ranks", "rank_nbytes"),
    [
        (LLAMA_8B, 8, 131_072 // 8),
        (LLAMA_8B, 16, 131_072 // 8),
        (LLAMA_8B, 3, 131_072 * 3 // 8),
        (QWEN_7B, 8, 57_344 // 4),
        (DEEPSEEK_V3, 8, 70_272),
    ],
)
def test_ranks_share_heads_or_copy_them(config: dict[str, Any], ranks: int, rank_nbytes: int) -> None:
    kv = kv_of_model(config, ranks=ranks)
    assert (kv.rank_nbytes, kv.nbytes) == (rank_nbytes, rank_nbytes * ranks)
    assert bool(kv.notes) == (kv.nbytes > kv_of_model(config).nbytes), "copies are said"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "num_hidden_layers = None.*--bytes-per-token"),
        ({**LLAMA_8B, "num_hidden_layers": "32"}, "num_hidden_layers = '32'"),
        ({**LLAMA_8B, "num_key_value_heads": 0}, "num_key_value_heads = 0"),
        ({**LLAMA_8B, "num_key_value_heads": [8]}, "32 numbers"),
        ({**LLAMA_8B, "num_key_value_heads": True}, "num_key_value_heads = True"),
        ({**LLAMA_8B, "hidden_size": 4097}, "no multiple of 32"),
        ({**LLAMA_8B, "hidden_size": None}, "hidden_size = None"),
        ({**LLAMA_8B, "torch_dtype": "int4"}, "torch_dtype = 'int4'.*--kv-dtype"),
        ({**LLAMA_8B, "torch_dtype": None}, "--kv-dtype = None"),
        ({**LLAMA_8B, "model_type": "mamba2"}, "nothing to size"),
        ({**LLAMA_8B, "is_encoder_decoder": True}, "cross attention"),
        ({**LLAMA_8B, "layer_types": ["full_attention", "odd"] * 16}, "'odd'.*not known"),
        ({**LLAMA_8B, "layer_types": ["mamba"] * 32}, "no layer keeps KV"),
        ({**LLAMA_8B, "mamba_d_state": 16}, "which is not said"),
        ({**LLAMA_8B, "global_head_dim": 512}, "differ in width"),
        ({**DEEPSEEK_V3, "qk_rope_head_dim": None}, "qk_rope_head_dim"),
        ({"text_config": {"num_attention_heads": 4}}, "num_hidden_layers"),
    ],
)
def test_what_cannot_be_told_is_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        kv_of_model(config)


# --- the formulas ----------------------------------------------------------------------------------------------------

FULL = Workload(
    concurrency=64, context_tokens=32_768, latency_s=2.0, requests_per_s=2.0, hit_ratio=0.5,
    prefill_tokens_per_s=8192.0, dram=512 << 30, nvme=16 << 40, nvme_gbps=10.0, days=365.0,
)  # fmt: skip


def test_every_figure_by_hand() -> None:
    made = plan(kv_of_model(LLAMA_8B), FULL)
    context = 131_072 * 32_768
    rate = 2.0 * 32_768 * 0.5 * 131_072
    assert {each.name: each.value for each in made.figures} == pytest.approx(
        {
            "token_rank": 131_072,
            "block_rank": 2 << 20,
            "context": 4 << 30,
            "concurrent": 256 << 30,
            "hot_pool": 512 << 30,
            "load_bandwidth": context * 64 / 2.0,
            "break_even": 131_072 * 8192,
            "prefill_time": 4.0,
            "nvme_load_time": context / 10e9,
            "load_gain": 4.0 / (context / 10e9),
            "write_rate": rate,
            "drive_writes": rate * 86_400 / (16 << 40),
            "written": rate * 86_400 * 365,
            "dram_reach": (512 << 30) / rate,
            "nvme_reach": (16 << 40) / rate,
            "dram_contexts": 128,
            "nvme_contexts": 4096,
            "dram_of_hot_pool": 1.0,
        }
    )
    assert made.missing == [] and made.notes == []
    concurrent = next(each for each in made.figures if each.name == "concurrent")
    assert concurrent.formula == "131,072 B/token x 32,768 tokens x 64 requests" and concurrent.text == "256GiB"


def test_what_is_missing_is_named() -> None:
    made = plan(kv_of_nbytes(1000), Workload())
    assert [each.name for each in made.figures] == ["token_rank", "block_rank"]
    asked = {option for each in made.missing for option in each.give}
    assert asked == {
        "--context-tokens", "--concurrency", "--latency", "--prefill-tokens-per-s", "--nvme-gbps", "--requests-per-s",
    }  # fmt: skip
    busy = plan(kv_of_nbytes(1000), Workload(prefill_tokens_per_s=10.0, dram=10**6))
    assert busy.value("write_rate") == 10_000 and busy.value("dram_reach") == 100.0, "GPUs that never rest"


@given(st.integers(1, 10**7), st.integers(1, 10**6), st.integers(1, 1000), st.integers(1, 64), st.floats(0.01, 100))
def test_figures_are_linear(nbytes: int, tokens: int, many: int, ranks: int, latency: float) -> None:
    def values(nbytes: int, tokens: int, many: int, latency: float) -> dict[str, float]:
        work = Workload(context_tokens=tokens, concurrency=many, latency_s=latency, nvme=1 << 60, requests_per_s=1.0)
        return {each.name: each.value for each in plan(kv_of_nbytes(nbytes, ranks), work).figures}

    one = values(nbytes, tokens, many, latency)
    assert one["hot_pool"] == 2 * one["concurrent"] == 2 * nbytes * ranks * tokens * many
    assert one["load_bandwidth"] * latency == pytest.approx(one["concurrent"])
    longer, more = values(nbytes, 3 * tokens, many, latency), values(nbytes, tokens, 3 * many, latency)
    wider, later = values(3 * nbytes, tokens, many, latency), values(nbytes, tokens, many, 3 * latency)
    for name in ("concurrent", "hot_pool", "load_bandwidth"):
        assert longer[name] == pytest.approx(3 * one[name])
        assert more[name] == pytest.approx(3 * one[name])
        assert wider[name] == pytest.approx(3 * one[name])
    assert later["load_bandwidth"] == pytest.approx(one["load_bandwidth"] / 3)
    assert wider["write_rate"] == pytest.approx(3 * one["write_rate"])
    assert wider["nvme_reach"] == pytest.approx(one["nvme_reach"] / 3)


# --- the command -----------------------------------------------------------------------------------------------------


def _model(tmp_path: Path, config: Any = LLAMA_8B) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_the_command_prints_figures_formulas_and_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--context-tokens", "32768", "--concurrency", "64", "--tensor-parallel", "2"]
    assert cli.main(["plan", "--model", str(_model(tmp_path)), *options]) == 0
    out = capsys.readouterr().out
    assert "256GiB  = 131,072 B/token x 32,768 tokens x 64 requests" in out
    assert "512GiB  = 2 x 256GiB" in out and "65,536 B x 2 ranks" in out
    assert "give --latency to see: bandwidth" in out


def test_the_command_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-dtype", "fp8", "--ttft-target", "0.5", "--nvme", "1TB", "--dram", "64GiB", "--json"]
    assert cli.main(["plan", "--model", str(_model(tmp_path) / "config.json"), *options]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["figures"][0] == {
        "name": "token_rank", "what": "KV of a token, per rank", "value": 65_536, "unit": "B", "text": "65,536 B",
        "formula": "2 x 128 x 8 KV heads x 32 layers x 1 B (fp8)",
    }  # fmt: skip
    assert answer["inputs"]["nvme"] == 10**12 and answer["inputs"]["latency_s"] == 0.5
    assert answer["missing"][0]["give"] == ["--context-tokens"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--bytes-per-token", "0"], "--bytes-per-token = 0"),
        (["--bytes-per-token", "1", "--kv-dtype", "fp8"], "--kv-dtype"),
        (["--bytes-per-token", "1", "--tensor-parallel", "0"], "--tensor-parallel = 0"),
        (["--bytes-per-token", "1", "--concurrency", "-1"], "--concurrency = -1"),
        (["--bytes-per-token", "1", "--block-tokens", "0"], "--block-tokens = 0"),
        (["--bytes-per-token", "1", "--hit-ratio", "1.5"], "--hit-ratio = 1.5"),
        (["--bytes-per-token", "1", "--latency", "nan"], "--latency = nan"),
        (["--bytes-per-token", "1", "--prefill-tokens-per-s", "inf"], "--prefill-tokens-per-s = inf"),
        (["--bytes-per-token", "1", "--requests-per-s", "0"], "--requests-per-s = 0"),
        (["--bytes-per-token", "1", "--nvme", "15T"], "--nvme = '15T': ambiguous"),
        (["--bytes-per-token", "1", "--dram", "0"], "--dram = 0"),
        (["--model", "/nowhere/config.json"], "--model = '/nowhere/config.json': cannot be read"),
    ],
)
def test_wrong_options_end_in_status_2(options: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("tiercache: error: ") and says in captured.err


@pytest.mark.parametrize("text", ["{", "[1]", "\xff"])
def test_a_file_that_is_no_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match="--model"):
        read_model(tmp_path)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["plan", "--help"], ["plan"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == (0 if "--help" in arguments else 2)
    captured = capsys.readouterr()
    assert "hot pool >= 2 x concurrent KV" in captured.out and "--bytes-per-token" in captured.err


@pytest.mark.parametrize("value", [math.nan, True, "4"])
def test_a_workload_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="--concurrency"):
        Workload(concurrency=value)
