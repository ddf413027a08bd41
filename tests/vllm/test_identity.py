"""The identity of real engines: equal where KV may be shared, different where it may not, in every process.

Each engine is a process of its own. Run with `-m vllm` by a Python that has vLLM; skipped elsewhere.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
HAS_VLLM = importlib.util.find_spec("vllm") is not None and importlib.util.find_spec("vllm.version") is not None

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed in this Python"),
]


def _run(what: str, *, processes: bool = False, fails: bool = False, **arguments: Any) -> str:
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes)),
        "VLLM_CPU_OMP_THREADS_BIND": "0|1" if processes else "nobind",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    done = subprocess.run(
        [sys.executable, str(HERE / "identity_scripts.py"), what, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**environment, **settings},
    )
    assert (done.returncode != 0) == fails, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    _run("make", root=str(root))
    return root


def _start(model: Path, out: Path, *, processes: bool = False, fails: bool = False, **changes: Any) -> list[Any]:
    """What scheduler and workers found, the scheduler first."""
    out.mkdir()
    try:
        _run("start", processes=processes, fails=fails, model=str(model), out=str(out), changes=changes)
    finally:  # ranks that share a CPU may leave their shared memory behind
        for path in out.glob("*.shm"):
            for left in Path("/dev/shm").glob(f"{path.read_text()}-*"):
                left.unlink(missing_ok=True)
    return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


def _differing(one: dict[str, str], other: dict[str, str]) -> set[str]:
    return {name for name in {*one, *other} if one.get(name) != other.get(name)}


@pytest.fixture(scope="module")
def base(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    scheduler, worker = _start(models / "a", tmp_path_factory.mktemp("base") / "out")
    return scheduler, worker


def test_scheduler_and_worker_of_one_engine_agree(base: tuple[Any, Any]) -> None:
    scheduler, worker = base
    assert (scheduler["role"], worker["role"]) == ("SCHEDULER", "WORKER")
    assert scheduler["parts"] == worker["parts"] and scheduler["digest"] == worker["digest"]
    assert scheduler["warnings"] == worker["warnings"] == []
    assert worker["namespace"] != worker["digest"]
    assert _differing(worker["rank"], worker["with_pages"]) == {"pages"}
    assert '"cpu"' in worker["rank"]["device"] and "CPUAttentionBackend" in worker["rank"]["attention"]
    assert "flags:" not in worker["rank"]["device"]
    assert worker["rank"]["layout"] == "LBHNC"


def test_a_second_start_elsewhere_with_other_limits_is_the_same(
    base: tuple[Any, Any], models: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(models / "a", tmp_path / "copy")
    limits = {"max_num_seqs": 4, "max_model_len": 256, "gpu_memory_utilization": 0.5}
    assert _start(copy, tmp_path / "out", **limits) == list(base)


def test_a_model_under_the_same_path_and_blocks_of_64_differ(
    base: tuple[Any, Any], models: Path, tmp_path: Path
) -> None:
    copy = shutil.copytree(models / "b", tmp_path / "copy")
    scheduler, worker = _start(copy, tmp_path / "out", block_size=64)
    assert _differing(scheduler["parts"], base[0]["parts"]) == {"weights", "block_size"}
    assert _differing(worker["with_pages"], base[1]["with_pages"]) == {"layers", "pages"}


def test_both_ranks_and_the_scheduler_of_tp_2_agree(base: tuple[Any, Any], models: Path, tmp_path: Path) -> None:
    scheduler, *workers = _start(models / "a", tmp_path / "out", processes=True, tensor_parallel_size=2)
    assert len(workers) == 2
    assert scheduler["digest"] == workers[0]["digest"] == workers[1]["digest"]
    assert _differing(scheduler["parts"], base[0]["parts"]) == {"parallel"}
    assert _differing(workers[0]["rank"], workers[1]["rank"]) == {"tp_rank"}
    assert workers[0]["namespace"] != workers[1]["namespace"]


def test_a_hybrid_model_is_refused_with_the_flag(models: Path, tmp_path: Path) -> None:
    found = _start(models / "hybrid", tmp_path / "out", fails=True, disable_hybrid_kv_cache_manager=False)
    assert "--disable-hybrid-kv-cache-manager" in found[0]["refused"]


def test_the_flag_makes_a_hybrid_model_one_that_is_served(models: Path, tmp_path: Path) -> None:
    found = _start(models / "hybrid", tmp_path / "out", disable_hybrid_kv_cache_manager=True)
    assert [one["role"] for one in found] == ["SCHEDULER", "WORKER"] and found[0]["digest"] == found[1]["digest"]


def test_settings_that_count_and_that_do_not(base: tuple[Any, Any], models: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "base": {},
        "limits": {"max_num_seqs": 3, "seed": 5, "served_model_name": "x", "max_model_len": 128},
        "dtype": {"dtype": "float32"},
        "parallel": {"tensor_parallel_size": 2},
        "model_code": {"hf_overrides": {"rope_theta": 1e6}},
        "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
        "block_size": {"block_size": 64},
    }
    stdout = _run("configs", model=str(models / "a"), variants=variants)
    (line,) = [line for line in stdout.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["base"]["digest"] == found["limits"]["digest"] == base[0]["digest"]
    for name in variants.keys() - {"base", "limits"}:
        assert _differing(found[name]["parts"], found["base"]["parts"]) == {name}


def test_a_name_on_a_hub_is_found_in_the_local_cache(models: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--tiny" / "snapshots" / ("0" * 40)
    shutil.copytree(models / "a", snapshot)
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    code = (
        "from tiercache.integrations.weights import weights_fingerprint as w\n"
        "print(w('org/tiny') == w(MODEL) == w('org/tiny', 'main'))\n"
        "try: w('org/other')\nexcept ValueError as error: print(error)"
    ).replace("MODEL", repr(str(models / "a")))
    settings = {"HF_HUB_CACHE": str(tmp_path / "hub"), "PYTHONPATH": str(HERE.parents[1])}
    run = {"capture_output": True, "text": True, "timeout": 60, "check": True, "env": {**os.environ, **settings}}
    lines = subprocess.run([sys.executable, "-c", code], **run).stdout.splitlines()
    assert lines[0] == "True" and "org/other" in lines[1] and "namespace" in lines[1]
