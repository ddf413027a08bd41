"""The trace readers: what they make of good files, and what they say of bad ones."""

from __future__ import annotations

import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiercache.errors import ConfigError, TierCacheError
from tiercache.sim import example
from tiercache.sim.expand import ID_SYMBOL_NBYTES, check_expandable, expand, no_data_symbols
from tiercache.sim.readers import read_trace
from tiercache.sim.trace import Trace, TraceError, full_blocks

SHARED = Path(__file__).resolve().parents[3] / "shared" / "traces"


def line(timestamp: Any, length: Any, hashes: Any, **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": length, "output_length": 1, "hash_ids": hashes, **more}


GOOD = [
    line(0, 10, [70, 71, 72]),
    line(1500, 8, [70, 71]),
    line(1500, 11, [70, 75, 76]),
    line(2000, 3, [90]),
    line(3000, 10, [70, 71, 72]),
]
"""Blocks of 4 tokens; 72, 76 and 90 are partial."""


def jsonl(*records: Any) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)


def write(tmp_path: Path, data: bytes, name: str = "t.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


def npz(tmp_path: Path, **changes: Any) -> Path:
    """The requests of GOOD as an npz file, its blocks in another order, one of them used by no request."""
    fields: dict[str, Any] = {
        "timestamp_s": np.array([0, 1.5, 1.5, 2, 3]),
        "leaf": np.array([0, 4, 2, 5, 0], np.int32),
        "parent": np.array([4, 6, 1, -1, 6, -1, -1], np.int32),
        "tokens": np.array([2, 4, 3, 4, 4, 3, 4], np.int16),
        "block_size": np.int32(4),
    }
    fields.update(changes)
    path = tmp_path / "trace"
    with path.open("wb") as file:
        np.savez_compressed(file, **{name: value for name, value in fields.items() if value is not None})
    return path


def assert_is_good(trace: Trace) -> None:
    assert trace.requests == 5
    assert trace.unique_blocks == 6
    assert [trace.path(r).tolist() for r in range(5)] == [[0, 1, 2], [0, 1], [0, 3, 4], [5], [0, 1, 2]]
    assert trace.tokens.tolist() == [4, 4, 2, 4, 3, 3]
    assert trace.parent.tolist() == [-1, 0, 1, 0, 3, -1]
    assert trace.times_s.tolist() == [0, 1.5, 1.5, 2, 3]
    assert [trace.prompt_tokens(r) for r in range(5)] == [10, 8, 11, 3, 10]
    assert trace.total_prompt_tokens == 42
    assert trace.infinite_hit_ratio() == pytest.approx((8 + 4 + 10) / 42)


def test_jsonl(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, jsonl(*GOOD)), block_tokens=4)
    assert_is_good(trace)
    assert trace.skipped_lines == 0
    assert trace.name == "t.jsonl"


def test_gzip_is_told_by_its_first_bytes(tmp_path: Path) -> None:
    assert_is_good(read_trace(write(tmp_path, gzip.compress(jsonl(*GOOD)), "plain.npz"), block_tokens=4))
    assert_is_good(read_trace(write(tmp_path, jsonl(*GOOD), "plain.gz"), block_tokens=4))


def test_npz(tmp_path: Path) -> None:
    assert_is_good(read_trace(npz(tmp_path)))
    assert_is_good(read_trace(npz(tmp_path), block_tokens=4))


def test_blank_lines_and_a_missing_last_line_end_are_fine(tmp_path: Path) -> None:
    data = b"\n" + jsonl(*GOOD[:2]) + b"  \r\n\n" + jsonl(*GOOD[2:]).rstrip()
    assert_is_good(read_trace(write(tmp_path, data), block_tokens=4))


def test_fields_of_no_use_may_be_there_or_missing(tmp_path: Path) -> None:
    records = [dict(r, user="x") for r in GOOD]
    for record in records:
        del record["output_length"]
    assert_is_good(read_trace(write(tmp_path, jsonl(*records)), block_tokens=4))


def test_a_request_without_tokens_is_a_request(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, jsonl(line(0, 0, []), line(1, 4, [3]))), block_tokens=4)
    assert trace.requests == 2
    assert trace.path(0).tolist() == []
    assert trace.infinite_hit_ratio() == 0
    assert trace.slice(1).infinite_hit_ratio() == 0
    assert trace.slice(1).unique_blocks == 0


BAD_LINES: list[tuple[Any, str]] = [
    (b"{", "bad JSON"),
    (b"\xff\xfe{}", "bad JSON"),
    (b"[" * 100_000, "bad JSON"),
    (b'{"timestamp": ' + b"9" * 5000 + b"}", "bad JSON"),
    ([], "a JSON object is needed, not list"),
    ({"timestamp": 5000, "input_length": 4}, "'hash_ids' is missing"),
    ({"timestamp": 5000, "hash_ids": []}, "'input_length' is missing"),
    ({"input_length": 5000, "hash_ids": []}, "'timestamp' is missing"),
    (line("5000", 4, [1]), "timestamp must be a number"),
    (line(True, 4, [1]), "timestamp must be a number"),
    (line(-1, 4, [1]), "negative"),
    (line(float("nan"), 4, [1]), "out of range"),
    (line(float("inf"), 4, [1]), "out of range"),
    (line(10**30, 4, [1]), "out of range"),
    (line(2999, 4, [1]), "in order of time"),
    (line(5000, 4.0, [1]), "input_length must be a whole number, not float"),
    (line(5000, True, [1]), "input_length must be a whole number, not bool"),
    (line(5000, -4, []), "input_length is negative"),
    (line(5000, 10**100, []), "input_length is out of range"),
    (line(5000, 4, [1], output_length=-1), "output_length is negative"),
    (line(5000, 4, [1], output_length="1"), "output_length must be"),
    (line(5000, 4, 1), "hash_ids must be a list"),
    (line(5000, 4, {"1": 1}), "hash_ids must be a list"),
    (line(5000, 4, ["1"]), "hash_ids must be a list of whole"),
    (line(5000, 4, [1.0]), "hash_ids must be a list of whole"),
    (line(5000, 4, [True]), "hash_ids must be a list of whole"),
    (line(5000, 4, [-1]), "negative"),
    (line(5000, 4, [1 << 64]), "more than 64 bits"),
    (line(5000, 4, []), "0 hash_ids, but input_length 4 makes 1 blocks of 4"),
    (line(5000, 5, [1]), "1 hash_ids, but input_length 5 makes 2 blocks"),
    (line(5000, 4, [1, 2]), "2 hash_ids, but input_length 4 makes 1 blocks"),
    (line(5000, 8, [1, 1]), "one id twice"),
    (line(5000, 8, [70, 70]), "one id twice"),
    (line(5000, 4, [71]), "hash id 71 (place 0) was seen before, after another id"),
    (line(5000, 8, [71, 70]), "hash id 71 (place 0)"),
    (line(5000, 8, [5, 70]), "hash id 70 (place 1) was seen before"),
    (line(5000, 12, [70, 5, 72]), "hash id 72 (place 2) was seen before"),
    (line(5000, 12, [70, 71, 72]), "hash id 72 (place 2) has 4 tokens here and had 2 before"),
    (line(5000, 3, [70]), "hash id 70 (place 0) has 3 tokens here and had 4 before"),
    (line(5000, 16, [70, 71, 72, 73]), "has 4 tokens here and had 2"),
]


@pytest.mark.parametrize(
    ("bad", "reason"), BAD_LINES, ids=[f"{i}-{reason[:20]}" for i, (_, reason) in enumerate(BAD_LINES)]
)
def test_a_bad_line_is_named(tmp_path: Path, bad: Any, reason: str) -> None:
    path = write(tmp_path, jsonl(*GOOD, bad, GOOD[4]))
    with pytest.raises(TraceError) as caught:
        read_trace(path, block_tokens=4)
    assert str(caught.value).startswith(f"{path}:6: ")
    assert reason in str(caught.value)
    assert caught.value.line == 6


def test_skip_bad_counts_and_nothing_of_a_bad_line_stays(tmp_path: Path) -> None:
    """Bad lines after the first good one: their later timestamps and new ids must not count for those below."""
    bad_lines = [bad for bad, reason in BAD_LINES if not any(word in reason for word in ("before", "order", "place"))]
    records = [GOOD[0], *bad_lines[:10], GOOD[1], GOOD[2], *bad_lines[10:], GOOD[3], GOOD[4], *bad_lines[:3]]
    trace = read_trace(write(tmp_path, jsonl(*records)), block_tokens=4, skip_bad=True)
    assert_is_good(trace)
    assert len(bad_lines) > 25
    assert trace.skipped_lines == len(bad_lines) + 3
    assert trace.slice(2).skipped_lines == trace.skipped_lines


def test_a_rejected_line_leaves_no_ids_behind(tmp_path: Path) -> None:
    records = [line(0, 8, [1, 2]), line(0, 12, [1, 9, 2]), line(0, 4, [9])]
    trace = read_trace(write(tmp_path, jsonl(*records)), block_tokens=4, skip_bad=True)
    assert trace.skipped_lines == 1
    assert trace.unique_blocks == 3
    assert trace.parent.tolist() == [-1, 0, -1]


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_file_without_requests_is_refused(tmp_path: Path, skip_bad: bool) -> None:
    with pytest.raises(TraceError, match="holds no requests"):
        read_trace(write(tmp_path, b"\n\n"), skip_bad=skip_bad)


def test_a_file_of_another_kind_says_so_even_with_skip_bad(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"holds no requests \(2 lines skipped; line 2: bad JSON"):
        read_trace(write(tmp_path, b"hello\nworld\n"), skip_bad=True)


@pytest.mark.parametrize("keep", [5, 40, -9, -3])
def test_a_gzip_file_cut_short(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path, gzip.compress(jsonl(*GOOD))[:keep])
    with pytest.raises(TraceError, match="damaged or cut short") as caught:
        read_trace(path, block_tokens=4, skip_bad=True)
    assert caught.value.line is not None


def test_a_damaged_gzip_file(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(jsonl(GOOD[0]) * 50))
    data[-6] ^= 1  # its checksum
    with pytest.raises(TraceError, match="damaged or cut short"):
        read_trace(write(tmp_path, bytes(data)), block_tokens=4)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"nowhere: cannot be read: No such file"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


@pytest.mark.parametrize("block_tokens", [0, -1, 1 << 21])
def test_block_tokens_out_of_range(tmp_path: Path, block_tokens: int) -> None:
    with pytest.raises(ConfigError, match="block_tokens"):
        read_trace(npz(tmp_path), block_tokens=block_tokens)


I32 = np.int32
BAD_NPZ: list[tuple[dict[str, Any], str, str]] = [
    ({"leaf": None}, "leaf", "is missing"),
    ({"block_size": None}, "block_size", "is missing"),
    ({"block_size": np.int32(0)}, "block_size", "not a number of tokens"),
    ({"block_size": np.array([4])}, "block_size", "dimensions"),
    ({"block_size": np.int32(3)}, "tokens[1]", "not between 1 and block_size 3"),
    ({"leaf": np.array([0, 4, 2, 5], I32)}, "timestamp_s", "5 values for 4 requests"),
    ({"leaf": np.array([], I32), "timestamp_s": np.array([])}, "leaf", "holds no requests"),
    ({"leaf": np.array([0, 4, 2, 7, 0], I32)}, "leaf[3]", "7 is no block"),
    ({"leaf": np.array([0, 4, -1, 5, 0], I32)}, "leaf[2]", "-1 is no block"),
    ({"leaf": np.array([0, 4, 2, 5, 0.0])}, "leaf", "whole numbers"),
    ({"leaf": np.zeros((5, 1), I32)}, "leaf", "dimensions"),
    ({"leaf": np.array([0, 4, 2, 5, 2**64 - 7], np.uint64)}, "leaf[4]", "no block"),
    ({"parent": np.array([4, 6, 1, -1, 6, -1, -2], I32)}, "parent[6]", "-2 is no block"),
    ({"parent": np.array([4, 7, 1, -1, 6, -1, -1], I32)}, "parent[1]", "7 is no block"),
    ({"parent": np.array([4, 6, 1, -1, 6, -1, 6], I32)}, "parent[0]", "circle"),
    ({"parent": np.array([4, 6, 1, -1, 6, -1, 4], I32)}, "parent[0]", "circle"),
    ({"parent": np.array([4, 6, 1, 3, 6, -1, -1], I32)}, "parent[3]", "circle"),
    ({"tokens": np.array([2, 4, 3, 4, 4, 3], np.int16)}, "tokens", "6 values for 7 blocks"),
    ({"tokens": np.array([2, 4, 3, 4, 4, 0, 4], np.int16)}, "tokens[5]", "not between"),
    ({"tokens": np.array([2, 4, 3, 4, 4, 5, 4], np.int16)}, "tokens[5]", "not between"),
    ({"tokens": np.array([2, 3, 3, 4, 4, 3, 4], np.int16)}, "tokens[1]", "others follow it"),
    ({"timestamp_s": np.array([0, 1.5, 1.4, 2, 3])}, "timestamp_s[2]", "in order of time"),
    ({"timestamp_s": np.array([-1, 1.5, 1.5, 2, 3])}, "timestamp_s[0]", "not a time"),
    ({"timestamp_s": np.array([0, 1.5, np.nan, 2, 3])}, "timestamp_s[2]", "not a time"),
    ({"timestamp_s": np.array(list("01123"))}, "timestamp_s", "needed are numbers"),
    ({"tokens": np.array([None] * 7, object)}, "tokens", "cannot be read"),
]


@pytest.mark.parametrize(("changes", "field", "reason"), BAD_NPZ, ids=[f"{i}-{c[1]}" for i, c in enumerate(BAD_NPZ)])
def test_a_bad_npz_is_named(tmp_path: Path, changes: dict[str, Any], field: str, reason: str) -> None:
    path = npz(tmp_path, **changes)
    with pytest.raises(TraceError) as caught:
        read_trace(path, skip_bad=True)
    assert str(caught.value).startswith(f"{path}: {field}: ")
    assert reason in str(caught.value)
    assert caught.value.field == field


def test_npz_of_another_block_size_than_asked_for(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="block_size: is 4, but block_tokens 16 was asked for"):
        read_trace(npz(tmp_path), block_tokens=16)


def test_npz_whose_paths_would_fill_the_memory(tmp_path: Path) -> None:
    n = 20_000
    path = npz(
        tmp_path,
        timestamp_s=np.zeros(n),
        leaf=np.full(n, n - 1, I32),
        parent=np.arange(-1, n - 1, dtype=I32),
        tokens=np.full(n, 4, np.int16),
    )
    with pytest.raises(TraceError, match="the paths have 400000000 blocks in all"):
        read_trace(path)


def test_a_zip_that_is_no_npz(tmp_path: Path) -> None:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr("leaf", "text")
        archive.writestr("block_size", "4")
        archive.writestr("timestamp_s", "4")
    with pytest.raises(TraceError, match="timestamp_s: not an array"):
        read_trace(write(tmp_path, target.getvalue()))
    with pytest.raises(TraceError, match="damaged npz"):
        read_trace(write(tmp_path, b"PK\x03\x04 and then nothing"))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_in_a_file_is_a_trace_error_or_nothing_else(tmp_path: Path, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["npz", "jsonl", "gz"]))
    if kind == "npz":
        content = bytearray(npz(tmp_path).read_bytes())
    else:
        content = bytearray(jsonl(*GOOD) if kind == "jsonl" else gzip.compress(jsonl(*GOOD), mtime=0))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        trace = read_trace(write(tmp_path, bytes(content[: data.draw(st.integers(1, len(content)))])), block_tokens=4)
    except TraceError:
        return
    assert (trace.parent < np.arange(trace.unique_blocks)).all()
    assert trace.requests >= 1


def test_arrays_are_read_only_and_requests_bounded(tmp_path: Path) -> None:
    trace = read_trace(npz(tmp_path))
    with pytest.raises(ValueError, match="read-only"):
        trace.path(0)[0] = 9
    for request in (-1, 5):
        with pytest.raises(IndexError):
            trace.path(request)


def test_slice_is_what_reading_only_so_many_lines_gives(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, jsonl(*GOOD)), block_tokens=4)
    for n in range(1, 5):
        part = trace.slice(n)
        alone = read_trace(write(tmp_path, jsonl(*GOOD[:n])), block_tokens=4)
        for field in ("times_s", "starts", "ids", "tokens", "parent"):
            assert getattr(part, field).tolist() == getattr(alone, field).tolist(), field
    assert trace.slice(99) is trace
    with pytest.raises(ValueError, match="at least 1"):
        trace.slice(0)


def test_full_blocks_leaves_partial_last_blocks_out(tmp_path: Path) -> None:
    trace = full_blocks(read_trace(npz(tmp_path)))
    assert [trace.path(r).tolist() for r in range(5)] == [[0, 1], [0, 1], [0, 2], [], [0, 1]]
    assert trace.tokens.tolist() == [4, 4, 4]
    assert trace.parent.tolist() == [-1, 0, 0]
    assert trace.total_prompt_tokens == 32
    again = full_blocks(trace)
    assert again.ids.tolist() == trace.ids.tolist()


def test_expansion(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, jsonl(*GOOD)), block_tokens=4)
    assert expand(trace, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15, 16, 17, 18]
    assert expand(trace, 2).dtype == np.int32
    assert expand(trace, 3).tolist() == [20, 21, 22]
    assert all(len(expand(trace, r)) == trace.prompt_tokens(r) for r in range(5))
    symbols = np.frombuffer(no_data_symbols(trace, 2), "<i4").reshape(-1, 2)
    assert symbols.tolist() == [[0, 4], [3, 4], [4, 3]]
    assert len(no_data_symbols(trace, 2)) == 3 * ID_SYMBOL_NBYTES


def synthetic(unique: int, block_tokens: int) -> Trace:
    """A trace that says it has so many blocks, without the memory for them."""
    return Trace(
        name="big",
        block_tokens=block_tokens,
        times_s=np.zeros(1),
        starts=np.array([0, 1]),
        ids=np.array([unique - 1]),
        tokens=np.broadcast_to(np.int32(block_tokens), unique),
        parent=np.broadcast_to(np.int64(-1), unique),
    )


def test_token_ids_go_as_far_as_int32() -> None:
    tokens = expand(synthetic(1 << 22, 512), 0)
    assert tokens[-1] == 2**31 - 1
    assert tokens[0] == 2**31 - 512
    with pytest.raises(TierCacheError, match="has 4194305 unique blocks of 512 tokens"):
        expand(synthetic((1 << 22) + 1, 512), 0)
    with pytest.raises(TierCacheError, match="allow 715827882"):
        check_expandable(synthetic(715_827_883, 3))


def test_the_example() -> None:
    trace = read_trace(example.path())
    assert (trace.requests, trace.unique_blocks, trace.block_tokens) == (3000, 55287, 512)
    assert trace.total_prompt_tokens == 40_550_180
    assert trace.infinite_hit_ratio() == pytest.approx(0.3197239, abs=1e-7)
    directory = example.path().parent
    assert "Apache License" in (directory / "LICENSE").read_text()
    assert "kvcache-ai/Mooncake" in (directory / "NOTICE").read_text()
    check_expandable(trace)


def brute_force_hit_ratio(trace: Trace) -> float:
    seen: set[int] = set()
    hit = total = 0
    for request in range(trace.requests):
        path = trace.path(request).tolist()
        hit += sum(int(trace.tokens[b]) for b in path if b in seen)
        total += trace.prompt_tokens(request)
        seen.update(path)
    return hit / total


def test_the_ends_of_conversations_by_brute_force() -> None:
    trace = read_trace(example.path()).slice(400)
    ends = trace.ends()
    later: set[int] = set()
    for request in reversed(range(trace.requests)):
        path = trace.path(request).tolist()
        full = [block for block in path if trace.tokens[block] == trace.block_tokens]
        assert ends[request] == (bool(full) and full[-1] not in later), request
        later.update(full)
    assert 100 < ends.sum() < 400


def test_infinite_hit_ratio_by_brute_force() -> None:
    trace = read_trace(example.path()).slice(400)
    assert trace.infinite_hit_ratio() == pytest.approx(brute_force_hit_ratio(trace), abs=1e-12)


REAL: list[tuple[str, int, int, float, Callable[[Trace], bool]]] = [
    ("mooncake_conversation.jsonl.gz", 12_031, 182_790, 0.3736, lambda t: t.total_prompt_tokens == 144_793_823),
    ("mooncake_synthetic.jsonl.gz", 3_993, 43_924, 0.6512, lambda t: t.total_prompt_tokens == 61_194_628),
    # its file has no partial blocks; counting the tails that were left out of it too, the ratio would be 0.9621
    ("claude_code_24h.npz", 48_532, 422_436, 0.9638, lambda t: bool((t.tokens == 512).all())),
]


@pytest.mark.parametrize(("name", "requests", "unique", "ratio", "fits"), REAL, ids=[real[0] for real in REAL])
def test_the_whole_traces(name: str, requests: int, unique: int, ratio: float, fits: Callable[[Trace], bool]) -> None:
    if not (SHARED / name).exists():
        pytest.skip(f"the whole trace {name} is not on this machine; the shipped example is tested above")
    trace = read_trace(SHARED / name)
    assert (trace.requests, trace.unique_blocks) == (requests, unique)
    assert trace.infinite_hit_ratio() == pytest.approx(ratio, abs=5e-5)
    assert (trace.parent < np.arange(unique)).all()
    assert fits(trace)
