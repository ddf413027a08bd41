"""The fingerprint of weights: what changes it, what does not, and what it costs."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weights_kit import flip, write_model, write_safetensors

from tiercache.errors import ConfigError
from tiercache.integrations import weights
from tiercache.integrations.weights import PIECE_NBYTES, STRIDE_NBYTES, resolve_model, weights_fingerprint

MIB = 1 << 20


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def _one_tensor(root: Path, nbytes: int) -> tuple[Path, int]:
    """A model of one tensor, and where in its file that begins."""
    root.mkdir()
    path = root / "model.safetensors"
    write_safetensors(path, {"w": random.Random(1).randbytes(nbytes)})
    return path, path.stat().st_size - nbytes


def test_a_copy_elsewhere_and_later_is_the_same(model: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(model)
    copy = Path(shutil.copytree(model, tmp_path / "other" / "name"))
    os.utime(copy / "model-00000.safetensors", (1, 1))
    (copy / "generation_config.json").write_text('{"temperature": 0.1}')
    (copy / "tokenizer.json").write_text("{}")
    (copy / "training_args.bin").write_bytes(b"x")
    assert weights_fingerprint(copy) == before == weights_fingerprint(str(model))


def test_links_into_a_hub_cache_are_followed(model: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for path in model.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert weights_fingerprint(snapshot) == weights_fingerprint(model)


@pytest.mark.parametrize("at", [0, PIECE_NBYTES - 1, 2500, -PIECE_NBYTES, -1])
@pytest.mark.parametrize("tensor", range(3))
def test_one_bit_of_what_is_read_of_any_tensor_changes_it(model: Path, tensor: int, at: int) -> None:
    path, before = model / "model-00001.safetensors", weights_fingerprint(model)
    begin = path.stat().st_size - (3 - tensor) * 5000
    flip(path, begin + (at if at >= 0 else 5000 + at))
    assert weights_fingerprint(model) != before


def test_what_is_not_read_changes_only_the_full_one(model: Path) -> None:
    path = model / "model-00000.safetensors"
    sampled, full = weights_fingerprint(model), weights_fingerprint(model, full=True)
    flip(path, path.stat().st_size - 5000 + PIECE_NBYTES + 100)
    assert weights_fingerprint(model) == sampled
    assert weights_fingerprint(model, full=True) != full
    assert {sampled.partition(":")[0], full.partition(":")[0]} == {"sample-1", "full-1"}


@given(nbytes=st.integers(0, 4 * PIECE_NBYTES))
@settings(max_examples=40)
def test_small_tensors_are_read_whole(nbytes: int) -> None:
    pieces = list(weights._tensor_pieces([(8, 8 + nbytes)]))
    if nbytes <= 3 * PIECE_NBYTES:
        assert pieces == [(8, nbytes)]
    else:
        assert len(pieces) == 3 and {size for _, size in pieces} == {PIECE_NBYTES}


@given(nbytes=st.integers(3 * PIECE_NBYTES + 1, 40 * STRIDE_NBYTES))
def test_of_large_tensors_both_ends_are_read_and_a_piece_per_stride(nbytes: int) -> None:
    pieces = list(weights._tensor_pieces([(100, 100 + nbytes)]))
    begins = [begin for begin, _ in pieces]
    assert begins[0] == 100 and begins[-1] + PIECE_NBYTES == 100 + nbytes
    gaps = [after - before for before, after in pairwise(begins)]
    assert max(gaps) <= STRIDE_NBYTES and len(pieces) <= nbytes // STRIDE_NBYTES + 3
    assert all(size == PIECE_NBYTES for _, size in pieces)


def test_header_settings_and_code_count(model: Path) -> None:
    seen = {weights_fingerprint(model)}

    def changed() -> bool:
        before = len(seen)
        seen.add(weights_fingerprint(model))
        return len(seen) > before

    write_safetensors(model / "model-00000.safetensors", {"renamed": b"x" * 5000})
    assert changed()
    (model / "config.json").write_text('{"rope_theta": 1e6, "architectures": ["Tiny"]}')
    assert changed()
    (model / "preprocessor_config.json").write_text('{"size": 224}')
    assert changed()
    (model / "modeling_tiny.py").write_text("x = 1")
    assert changed()
    (model / "tower").mkdir()
    write_safetensors(model / "tower" / "model.safetensors", {"w": b"y" * 100})
    assert changed()


def test_order_white_space_and_provenance_of_settings_do_not_count(model: Path) -> None:
    before = weights_fingerprint(model)
    config = json.loads((model / "config.json").read_text())
    reordered = {key: config[key] for key in reversed(config)}
    text = json.dumps({"_name_or_path": "/home/me", "transformers_version": "9", **reordered}, indent=4)
    (model / "config.json").write_text(text)
    assert weights_fingerprint(model) == before


def test_folders_that_engines_do_not_load_do_not_count(model: Path) -> None:
    before = weights_fingerprint(model)
    for name in ("original", "checkpoint-500"):
        (model / name).mkdir()
        write_safetensors(model / name / "model.safetensors", {"w": b"z" * 100})
    assert weights_fingerprint(model) == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.gguf"])
@pytest.mark.parametrize("at", [0, MIB - 1, 2 * MIB, -MIB, -1])
def test_other_formats_are_read_at_both_ends_and_per_mib(tmp_path: Path, name: str, at: int) -> None:
    path = tmp_path / name
    path.write_bytes(random.Random(2).randbytes(4 * MIB + 17))
    before = weights_fingerprint(tmp_path), weights_fingerprint(path)
    flip(path, at)
    after = weights_fingerprint(tmp_path), weights_fingerprint(path)
    assert before[0] != after[0] and before[1] != after[1]
    path.write_bytes(path.read_bytes() + b"\0")
    assert weights_fingerprint(tmp_path) != after[0]


@pytest.mark.parametrize("nbytes", [0, 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 1])
def test_files_of_other_formats_are_covered_to_their_end(nbytes: int) -> None:
    covered = bytearray(nbytes)
    for begin, size in weights._opaque_pieces(nbytes):
        covered[begin : begin + size] = b"\1" * len(covered[begin : begin + size])
    assert all(covered[: 2 * MIB]) and len(covered) == nbytes


@pytest.mark.parametrize("raw", [b"", b"\1\2", (10**12).to_bytes(8, "little") + b"x" * 50, b"\2" + bytes(7) + b"[]xx"])
def test_a_broken_safetensors_file_is_hashed_like_any_other(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(raw)
    before = weights_fingerprint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(raw + b"y")
    assert weights_fingerprint(tmp_path) != before


def test_no_weights_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no file of weights") as caught:
        weights_fingerprint(tmp_path)
    assert caught.value.field == "model" and "kv_connector_extra_config" in caught.value.remedy


def test_weights_that_cannot_be_read_say_so(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(weights, "_sampled", refuse)
    with pytest.raises(ConfigError, match="cannot be read"):
        weights_fingerprint(model)


# --- names on a hub ---------------------------------------------------------------------------------------------------


def _hub(monkeypatch: pytest.MonkeyPatch, snapshot_download: object) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))


def test_a_name_is_looked_up_in_the_local_cache_only(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def snapshot_download(name: str, **how: object) -> str:
        asked.append((name, how))
        return str(model)

    _hub(monkeypatch, snapshot_download)
    assert weights_fingerprint("org/tiny", "v2", cache_dir="/hub") == weights_fingerprint(model)
    assert asked == [("org/tiny", {"revision": "v2", "cache_dir": "/hub", "local_files_only": True})]


@pytest.mark.parametrize("error", [FileNotFoundError("not cached"), ValueError("no repo id")])
def test_a_name_that_is_not_cached_says_what_to_do(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(name: str, **how: object) -> str:
        raise error

    _hub(monkeypatch, snapshot_download)
    with pytest.raises(ConfigError, match="neither a folder nor") as caught:
        resolve_model("s3://bucket/model")
    assert caught.value.value == "s3://bucket/model" and "namespace" in caught.value.remedy


def test_without_a_hub_client_a_name_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="no huggingface_hub"):
        resolve_model("org/tiny")


def test_it_reads_little(tmp_path: Path) -> None:
    """A tensor of 512 MiB, all holes, costs 34 pieces: a second would be a hundred times too much."""
    path, begin = _one_tensor(tmp_path / "big", 1)
    header = {"w": {"dtype": "U8", "shape": [512 * MIB], "data_offsets": [0, 512 * MIB]}}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw)
    os.truncate(path, 8 + len(raw) + 512 * MIB)
    start = time.perf_counter()
    weights_fingerprint(tmp_path / "big")
    assert begin > 0 and time.perf_counter() - start < 1.0
