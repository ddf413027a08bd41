"""Tokens to symbols, idents and keys."""

from __future__ import annotations

import hashlib
import json
import struct
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tiercache.keys import (
    INT32_MAX,
    INT32_MIN,
    chain_idents,
    chain_keys,
    encode_prompt,
    root_ident,
    symbol_nbytes,
)

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")
ROOT_KNOWN = 9557993768270512497
IDENTS_KNOWN = [11377413059661737197, 16456565855368134498]
KEYS_KNOWN = ["c822a29a1af02063", "9c96201f5b56ca55"]
SALTED_KNOWN = "f011ef889b6a560e"
ids = st.integers(INT32_MIN + 1, INT32_MAX)


def _words(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def test_symbol_width() -> None:
    assert [symbol_nbytes(n) for n in (1, 8, 9, 10, 16)] == [36, 36, 36, 40, 64]
    for bad in (0, -1):
        with pytest.raises(ValueError, match="block_tokens"):
            symbol_nbytes(bad)


def test_full_blocks_are_the_token_bytes() -> None:
    prompt = encode_prompt(list(range(35)), 16)
    assert prompt.symbols == _words(*range(32))
    assert (prompt.n, prompt.tokens, prompt.token_count, prompt.tail) == (2, 32, 35, _words(32, 33, 34))
    assert (prompt.partial, prompt.raw, prompt.block_tokens, prompt.symbol_nbytes) == (False, True, 16, 64)


def test_short_blocks_are_padded() -> None:
    prompt = encode_prompt([1, 2, 3, 4, 5], 2)
    pad = (INT32_MIN,) * 7
    assert prompt.symbols == _words(1, 2, *pad, 3, 4, *pad)
    assert (prompt.n, prompt.tokens, prompt.tail, prompt.partial) == (2, 4, _words(5), False)


@pytest.mark.parametrize(("block_tokens", "width"), [(4, 9), (12, 12)])
def test_a_partial_tail_is_one_more_padded_symbol(block_tokens: int, width: int) -> None:
    tokens = list(range(10, 10 + block_tokens + 3))
    prompt = encode_prompt(tokens, block_tokens, partial_tail=True)
    first, last = tokens[:block_tokens], tokens[block_tokens:]
    words = [*first, *[INT32_MIN] * (width - block_tokens), *last, *[INT32_MIN] * (width - 3)]
    assert prompt.symbols == _words(*words)
    assert (prompt.n, prompt.tokens, prompt.tail, prompt.partial) == (2, len(tokens), b"", True)
    whole = encode_prompt(first, block_tokens, partial_tail=True)
    assert (whole.n, whole.partial) == (1, False)


def test_nothing_to_encode() -> None:
    for tokens in ([], (), range(0), np.zeros(0, np.int64)):
        for partial in (False, True):
            prompt = encode_prompt(tokens, 16, partial_tail=partial)
            assert (prompt.symbols, prompt.n, prompt.tail, prompt.partial) == (b"", 0, b"", False)
    assert encode_prompt([7], 16).n == 0 and encode_prompt([7], 16).first == b""
    assert encode_prompt([7], 16, partial_tail=True).n == 1


@given(st.lists(ids, max_size=40), st.integers(1, 12), st.booleans())
def test_symbols_hold_exactly_the_tokens(tokens: list[int], block_tokens: int, partial_tail: bool) -> None:
    prompt = encode_prompt(tokens, block_tokens, partial_tail=partial_tail)
    words = np.frombuffer(prompt.symbols, "<i4").reshape(prompt.n, prompt.symbol_nbytes // 4)
    read = [word for row in words.tolist() for word in row if word != INT32_MIN]
    assert read + np.frombuffer(prompt.tail, "<i4").tolist() == tokens
    assert prompt.n == len(tokens) // block_tokens + prompt.partial
    assert prompt.tokens == len(read)
    if partial_tail:
        assert prompt.tail == b""


def test_symbols_are_made_when_they_are_asked_for_and_then_are_the_prompts_own():
    for block_tokens, extra in ((16, None), (2, None), (16, "tenant"), (16, ["a", None, b"c"])):
        tokens = np.arange(3 * block_tokens + 1, dtype=np.int32)
        whole, prompt = (encode_prompt(tokens.copy(), block_tokens, extra) for _ in range(2))
        width = prompt.symbol_nbytes
        assert prompt.first == whole.symbols[:width] and len(whole.symbols) == 3 * width
        assert prompt.symbols == whole.symbols and prompt.first == whole.symbols[:width]
        late = encode_prompt(tokens, block_tokens, extra)
        early = late.symbols
        tokens[:] = 0
        assert late.symbols is early and late == whole


@given(st.lists(ids, max_size=40), st.integers(1, 12))
def test_every_kind_of_sequence_gives_the_same(tokens: list[int], block_tokens: int) -> None:
    want = encode_prompt(tokens, block_tokens)
    kinds: list[Any] = [tuple(tokens), array("q", tokens)]
    kinds += [np.array(tokens, dtype=dtype) for dtype in ("i4", "i8", ">i4", ">i8")]
    kinds += [np.repeat(np.array(tokens, "i4"), 2)[::2], [np.int64(token) for token in tokens]]
    if torch is not None:
        kinds += [torch.tensor(tokens, dtype=torch.int32), torch.tensor(tokens, dtype=torch.int64)]
    for same in kinds:
        assert encode_prompt(same, block_tokens) == want


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "u8"])
def test_narrow_and_unsigned_arrays(dtype: str) -> None:
    assert encode_prompt(np.arange(20).astype(dtype), 10) == encode_prompt(range(20), 10)


@pytest.mark.parametrize(
    "tokens", [range(5, 50, 7), range(9, -60, -4), range(INT32_MAX - 2, INT32_MAX + 1), range(5, 2**80, 2**79)]
)
def test_ranges(tokens: range) -> None:
    kept = tokens if len(tokens) > 2 else tokens[:1]
    assert encode_prompt(kept, 3) == encode_prompt(list(kept), 3)


OUTSIDE = [INT32_MIN, INT32_MIN - 1, INT32_MAX + 1, 2**63 - 1]


@pytest.mark.parametrize("bad", OUTSIDE)
def test_ids_outside_int32_are_refused_by_index_and_value(bad: int) -> None:
    tokens = [0, 5, 9, bad, 3, bad]
    kinds: list[Any] = [tokens, tuple(tokens), np.array(tokens, dtype=np.int64), np.array(tokens, dtype=">i8")]
    if torch is not None:
        kinds.append(torch.tensor(tokens))
    if bad == INT32_MIN:
        kinds.append(np.array(tokens, dtype=np.int32))
    for kind in kinds:
        with pytest.raises(ValueError, match=rf"tokens\[3\] = {bad}:"):
            encode_prompt(kind, 2).check_ids()


def test_more_ids_outside_int32() -> None:
    with pytest.raises(ValueError, match=rf"tokens\[1\] = {2**64 - 1}:"):
        encode_prompt(np.array([1, 2**64 - 1], dtype=np.uint64), 2)
    with pytest.raises(ValueError, match=rf"tokens\[1\] = {10**30}:"):
        encode_prompt([1, 10**30], 2)
    with pytest.raises(ValueError, match=rf"tokens\[4\] = {INT32_MAX + 1}:"):
        encode_prompt(range(INT32_MAX - 3, INT32_MAX + 2), 2)
    with pytest.raises(ValueError, match=rf"tokens\[0\] = {INT32_MIN}:"):
        encode_prompt(range(INT32_MIN, 0, 2**30), 2)


@pytest.mark.parametrize("bad", [True, False, 1.0, 2.5, "3", None, np.bool_(True), np.float64(1), [1]], ids=repr)
def test_elements_that_are_no_ints_are_refused(bad: object) -> None:
    with pytest.raises(TypeError, match=r"tokens\[2\] = "):
        encode_prompt([1, 0, bad, 7], 2)  # type: ignore[list-item]


@pytest.mark.parametrize(
    "tokens",
    [
        np.array([True, False]),
        np.array([1.0, 2.0]),
        np.array([1, 2], dtype=object),
        np.array(["a"]),
        "12",
        b"12",
        bytearray(b"12"),
        memoryview(b"12"),
        {1, 2},
        5,
        None,
        iter([1]),
    ],
    ids=lambda tokens: type(tokens).__name__ + getattr(getattr(tokens, "dtype", None), "kind", ""),
)
def test_other_types_are_refused(tokens: Any) -> None:
    with pytest.raises(TypeError, match="tokens are"):
        encode_prompt(tokens, 1)


def test_array_dtypes_are_refused_with_the_first_value() -> None:
    with pytest.raises(TypeError, match=r"tokens\[0\] = 1.5"):
        encode_prompt(np.array([1.5, 2]), 1)
    with pytest.raises(TypeError, match=r"tokens\[0\] = True"):
        encode_prompt(np.array([True]), 1)


@pytest.mark.parametrize("tokens", [np.zeros((2, 2), np.int32), np.array(3, np.int32)])
def test_only_one_axis(tokens: Any) -> None:
    with pytest.raises(ValueError, match="one axis"):
        encode_prompt(tokens, 1)


@needs_torch
def test_tensors_that_are_refused() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        with pytest.raises(TypeError, match=r"tokens\[0\] = "):
            encode_prompt(torch.ones(4, dtype=dtype), 2)
    with pytest.raises(ValueError, match="one axis"):
        encode_prompt(torch.ones(2, 2, dtype=torch.int32), 2)


# --- extra -----------------------------------------------------------------------------------------------------------


def test_extra_marks_and_hashes_every_block() -> None:
    plain, salted = encode_prompt(range(40), 20), encode_prompt(range(40), 20, extra="tenant")
    assert (salted.n, salted.tokens, salted.raw, len(salted.symbols)) == (2, 40, False, 160)
    for begin in (0, 80):
        assert salted.symbols[begin : begin + 4] == _words(INT32_MIN)
        raw = plain.symbols[begin : begin + 80]
        typed = b"stenant"
        text = b"tiercache.symbol.1" + struct.pack("<Q", len(typed)) + typed + struct.pack("<Q", 80) + raw
        assert salted.symbols[begin + 4 : begin + 80] == hashlib.shake_256(text).digest(76)


def test_extra_per_block_leaves_none_raw() -> None:
    plain = encode_prompt(range(6), 2)
    mixed = encode_prompt(range(6), 2, extra=[None, b"image", None])
    assert mixed.symbols[:36] == plain.symbols[:36]
    assert mixed.symbols[36:72] != plain.symbols[36:72]
    assert mixed.symbols[72:] == plain.symbols[72:]
    assert not mixed.raw
    assert encode_prompt(range(6), 2, extra=[None] * 3) == plain
    assert encode_prompt(range(6), 2, extra=["a"] * 3) == encode_prompt(range(6), 2, extra="a")


def test_different_extras_never_share() -> None:
    extras: list[Any] = [None, "", b"", "a", b"a", "ab", "a\0", "A", "s", "é", "e\u0301"]
    for partial in (False, True):
        symbols = [encode_prompt([1, 2, 3], 3, extra=extra, partial_tail=partial).symbols for extra in extras]
        assert len(set(symbols)) == len(extras)
    blocks = encode_prompt([1, 2, 3, 1, 2, 4], 3, extra="a")
    assert blocks.symbols[:36] != blocks.symbols[36:]


def test_bytes_cannot_move_between_extra_and_tokens() -> None:
    a = encode_prompt([1] + [2] * 9, 10, extra=b"x" + _words(1))
    b = encode_prompt([1] * 2 + [2] * 8, 10, extra=b"x")
    assert a.symbols != b.symbols


def test_a_partial_block_is_hashed_as_well() -> None:
    salted = encode_prompt(range(3), 2, extra="a", partial_tail=True)
    assert salted.partial
    assert salted.symbols[36:40] == _words(INT32_MIN)
    assert salted.symbols != encode_prompt(range(3), 2, extra="b", partial_tail=True).symbols
    with pytest.raises(ValueError, match="1 entries for 2 blocks"):
        encode_prompt(range(3), 2, extra=["a"], partial_tail=True)


@given(st.lists(ids, min_size=9, max_size=9), st.binary(max_size=4))
def test_no_raw_symbol_begins_like_a_hashed_one(tokens: list[int], extra: bytes) -> None:
    raw, hashed = encode_prompt(tokens, 9).symbols, encode_prompt(tokens, 9, extra=extra).symbols
    assert raw[:4] != _words(INT32_MIN) == hashed[:4]


@pytest.mark.parametrize(
    ("extra", "error", "match"),
    [
        (["a"], ValueError, "1 entries for 2 blocks"),
        (["a", "b", "c"], ValueError, "3 entries"),
        (["a", 5], TypeError, r"extra\[1\] = 5"),
        (5, TypeError, "extra is a int"),
        ({"a": 1, "b": 2}, TypeError, "extra is a dict"),
        (bytearray(b"ab"), TypeError, "extra is a bytearray"),
    ],
)
def test_wrong_extras_are_refused(extra: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        encode_prompt(range(4), 2, extra=extra)


# --- idents and keys -------------------------------------------------------------------------------------------------


def test_idents_are_chained() -> None:
    prompt = encode_prompt(range(48), 16)
    root = root_ident(b"n" * 16, b"epoch")
    idents = chain_idents(prompt.symbols, 64, root)
    assert idents.dtype == np.uint64
    seed = root
    for i in range(3):
        seed = xxhash.xxh3_64(prompt.symbols[64 * i : 64 * i + 64], seed=seed).intdigest()
        assert int(idents[i]) == seed
    rest = chain_idents(memoryview(prompt.symbols)[64:], 64, idents[0])  # type: ignore[arg-type]
    assert rest.tolist() == idents[1:].tolist()
    assert chain_idents(b"", 64, root).tolist() == []


def test_keys_are_chained() -> None:
    prompt = encode_prompt(range(48), 16)
    keys = chain_keys(prompt.symbols, 64, b"n" * 16, b"epoch")
    key = hashlib.sha256(
        b"tiercache.key.1" + struct.pack("<Q", 16) + b"n" * 16 + struct.pack("<Q", 5) + b"epoch"
    ).digest()
    for i in range(3):
        key = hashlib.sha256(key + prompt.symbols[64 * i : 64 * i + 64]).digest()
        assert keys[i] == key


def test_namespace_epoch_and_prefix_change_every_ident_and_key() -> None:
    symbols = encode_prompt(range(48), 16).symbols
    others = [(b"n", b"e"), (b"m", b"e"), (b"n", b"f"), (b"ne", b""), (b"", b"ne")]
    roots = [root_ident(*other) for other in others]
    assert len(set(roots)) == len(others)
    assert len({value for root in roots for value in chain_idents(symbols, 64, root).tolist()}) == 3 * len(others)
    assert len({key for other in others for key in chain_keys(symbols, 64, *other)}) == 3 * len(others)
    changed = encode_prompt([99, *range(1, 48)], 16).symbols
    assert not set(chain_keys(symbols, 64, b"n", b"e")) & set(chain_keys(changed, 64, b"n", b"e"))


def test_broken_symbols_are_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        chain_idents(b"x" * 65, 64, 0)
    with pytest.raises(ValueError, match="whole number"):
        chain_keys(b"x" * 63, 64, b"", b"")
    with pytest.raises(ValueError, match="whole number"):
        chain_idents(b"x", 0, 0)


IN_A_PROCESS = """
import json
from tiercache.keys import chain_idents, chain_keys, encode_prompt, root_ident
from tiercache.layout import Namespace
space = Namespace.of(model="m", rank=0, shape=[2, 3], tags={"b": 1, "a": None}).digest
prompt = encode_prompt(range(100, 140), 8, extra=["lora", b"salt", None, "", "image"])
print(json.dumps({
    "symbols": prompt.symbols.hex(),
    "idents": [int(v) for v in chain_idents(prompt.symbols, 36, root_ident(space, b"epoch"))],
    "keys": [key.hex() for key in chain_keys(prompt.symbols, 36, space, b"epoch")],
}))
"""


def test_equal_in_every_process_whatever_its_hash_seed(python: Callable[..., str]) -> None:
    answers = [python(IN_A_PROCESS, PYTHONHASHSEED=seed) for seed in ("0", "1", "4711", "random")]
    assert len(set(answers)) == 1
    assert len(json.loads(answers[0])["keys"]) == 5


def test_known_answers() -> None:
    """Pinned: a change here makes every cache on disk cold."""
    prompt = encode_prompt(range(32), 16)
    root = root_ident(bytes(range(16)), b"epoch-1")
    assert root == ROOT_KNOWN
    assert chain_idents(prompt.symbols, 64, root).tolist() == IDENTS_KNOWN
    assert [key.hex()[:16] for key in chain_keys(prompt.symbols, 64, bytes(range(16)), b"epoch-1")] == KEYS_KNOWN
    salted = encode_prompt(range(16), 16, extra="salt").symbols
    assert hashlib.sha256(salted).hexdigest()[:16] == SALTED_KNOWN


def test_an_int32_array_is_converted_at_memory_speed() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 17, 131_072, dtype=np.int32)
    best = min(_seconds(lambda: encode_prompt(tokens, 16).symbols) for _ in range(50))
    print(f"131,072 ids: {best * 1e6:.0f} us")
    assert best < 100e-6


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
