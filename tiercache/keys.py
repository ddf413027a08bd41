"""Tokens to symbols, symbols to idents and keys.

A symbol is the fixed-width bytes that stand for one block in the index. Its width in words of 4 bytes is
`max(block_tokens, 9)`, and it comes in two kinds:

- raw: the block's token ids, little-endian int32, then words of INT32_MIN up to the width;
- hashed, where the block has `extra` (LoRA, salt, image): one word of INT32_MIN, then SHAKE-256 of the extra and the
  token bytes, filling the rest (at least 32 bytes).

INT32_MIN is refused as a token id, and a raw symbol begins with a token id (a block has at least one). So the first
word tells the kinds apart: no choice of tokens makes a raw symbol that equals a hashed one. Raw symbols among
themselves are equal only for equal tokens, since padding is no token; hashed ones are as collision-free as SHAKE-256,
whose input is length-prefixed and typed, so that no bytes can move between extra and tokens.

Nothing here depends on the process: never the builtin hash.
"""

from __future__ import annotations

import hashlib
import operator
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from tiercache.types import Idents

__all__ = [
    "INT32_MAX",
    "INT32_MIN",
    "MIN_SYMBOL_WORDS",
    "Extra",
    "Prompt",
    "Tokens",
    "chain_idents",
    "chain_keys",
    "encode_prompt",
    "root_ident",
    "symbol_nbytes",
]

INT32_MIN = -(2**31)
"""Never a token id: pads symbols and marks hashed ones."""
INT32_MAX = 2**31 - 1
MIN_SYMBOL_WORDS = 9
"""One marker word and 32 bytes of hash."""

Tokens: TypeAlias = Sequence[int] | NDArray[Any] | Any
"""Token ids, 1-D: a list, tuple or range, a numpy array of any integer dtype, or a torch tensor."""
Extra: TypeAlias = str | bytes | Sequence[str | bytes | None]
"""What else decides a block's KV: one value for all blocks, or one (or None) per block."""

_MARKER = struct.pack("<i", INT32_MIN)
_WORD = np.dtype("<i4")


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt as symbols, which are made when they are first asked for."""

    n: int
    """Number of symbols."""
    tokens: int
    """Tokens that the symbols stand for; the rest is `tail`."""
    tail: bytes
    """Ids of the tokens past the last symbol, little-endian int32; empty with `partial`."""
    partial: bool
    """The last symbol stands for fewer than `block_tokens` tokens."""
    block_tokens: int
    symbol_nbytes: int
    """Width of one symbol."""
    raw: bool
    """No symbol is hashed."""
    _ids: NDArray[np.int32] = field(repr=False)
    """All tokens, maybe the caller's own array."""
    _symbols: bytes | None = field(default=None, repr=False)

    @property
    def symbols(self) -> bytes:
        """n symbols of `symbol_nbytes` each, side by side. The caller's array must not change before the first call.

        `check_ids` comes before any use in which an id INT32_MIN could pass for part of another kind of symbol.
        """
        if self._symbols is None:
            self._symbols = _raw_symbols(self._ids[: self.tokens], self.n, self.block_tokens, self.symbol_nbytes)
        return self._symbols

    def check_ids(self) -> Prompt:
        """ValueError where an id is INT32_MIN, which only an int32 array can still have here. Returns the prompt."""
        if len(self._ids) and self._ids.min() == INT32_MIN:
            raise ValueError(_outside(int(self._ids.argmin()), INT32_MIN))
        return self

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Prompt):
            return NotImplemented
        mine = (self.block_tokens, self.tokens, self.tail, self.raw, self.symbols)
        return mine == (other.block_tokens, other.tokens, other.tail, other.raw, other.symbols)

    @property
    def first(self) -> bytes:
        """The first symbol, without making or checking any; empty where there is none."""
        if self._symbols is not None or self.n == 0:
            return (self._symbols or b"")[: self.symbol_nbytes]
        ids = self._ids[: min(self.tokens, self.block_tokens)]
        return _raw_symbols(ids, 1, self.block_tokens, self.symbol_nbytes)

    @property
    def token_count(self) -> int:
        """All tokens of the prompt, those of the tail included."""
        return self.tokens + len(self.tail) // 4


def symbol_nbytes(block_tokens: int) -> int:
    """Bytes per symbol. ValueError where `block_tokens` is below 1."""
    if block_tokens < 1:
        raise ValueError(f"block_tokens = {block_tokens}: at least 1 is needed")
    return 4 * max(block_tokens, MIN_SYMBOL_WORDS)


def encode_prompt(tokens: Tokens, block_tokens: int, extra: Extra | None = None, partial_tail: bool = False) -> Prompt:
    """Turn a prompt into symbols: one per full block, with `partial_tail` also one for a last partial block.

    `extra`: one value for every block, or a sequence with one value per symbol, None leaving that block raw. A str and
    the bytes of the same text are different values, and the empty ones are values too.

    ValueError: tokens that are not 1-D, an id outside int32 or equal to INT32_MIN (in an int32 array without extra: see
    `Prompt.check_ids`), a sequence of the wrong length.
    TypeError: tokens or extra of another type, bools and floats included. Both name the offending index and value.
    Nothing is mutated. An int32 array with `block_tokens` of at least 9 costs nothing here, and one copy when its
    symbols are asked for.
    """
    width = symbol_nbytes(block_tokens)
    ids = _token_ids(tokens)
    count = len(ids)
    rest = count % block_tokens
    covered = count if partial_tail else count - rest
    n = -(-covered // block_tokens)
    tail = b"" if covered == count else ids[covered:].tobytes()
    extras = _extras(extra, n)
    raw = extras is None or all(value is None for value in extras)
    prompt = Prompt(n, covered, tail, covered % block_tokens != 0, block_tokens, width, raw, ids)
    if extras is not None and not raw:
        prompt._symbols = _hash_symbols(prompt.check_ids().symbols, width, extras)
    return prompt


def root_ident(namespace_digest: bytes, epoch: bytes) -> int:
    """The ident above a prompt's first block: 64 bits of the namespace and the epoch."""
    return xxhash.xxh3_64_intdigest(b"tiercache.ident.1" + _prefixed(namespace_digest) + _prefixed(epoch))


def chain_idents(symbols: bytes | memoryview, width: int, parent_ident: int) -> Idents:
    """Idents of successive blocks under a parent: `xxh3_64(symbol, seed=ident of the block before)`; uint64 `[n]`.

    ValueError where `symbols` is not a whole number of symbols of `width` bytes.
    """
    n = _symbol_count(symbols, width)
    digest = xxhash.xxh3_64_intdigest
    ident = int(parent_ident)
    view = memoryview(symbols)
    idents = []
    for begin in range(0, n * width, width):
        ident = digest(view[begin : begin + width], ident)
        idents.append(ident)
    return np.array(idents, dtype=np.uint64)


def chain_keys(symbols: bytes | memoryview, width: int, namespace_digest: bytes, epoch: bytes) -> list[bytes]:
    """Keys (32 bytes each) of a prompt's blocks from its first: `SHA-256(key of the block before || symbol)`.

    The chain starts at the SHA-256 of namespace and epoch. ValueError as `chain_idents`.
    """
    n = _symbol_count(symbols, width)
    key = hashlib.sha256(b"tiercache.key.1" + _prefixed(namespace_digest) + _prefixed(epoch)).digest()
    view = memoryview(symbols)
    keys = []
    for begin in range(0, n * width, width):
        step = hashlib.sha256(key)
        step.update(view[begin : begin + width])
        key = step.digest()
        keys.append(key)
    return keys


def _symbol_count(symbols: bytes | memoryview, width: int) -> int:
    if width < 1 or len(symbols) % width:
        raise ValueError(f"{len(symbols)} bytes of symbols are not a whole number of symbols of {width} bytes")
    return len(symbols) // width


def _prefixed(value: bytes) -> bytes:
    """`value` after its length, so that adjacent values cannot trade bytes."""
    return struct.pack("<Q", len(value)) + value


def _raw_symbols(ids: NDArray[np.int32], n: int, block_tokens: int, width: int) -> bytes:
    """n raw symbols of `ids`, the last one possibly partial."""
    words = width // 4
    if words == block_tokens:
        return ids.tobytes() + _MARKER * (n * words - len(ids))
    table = np.full((n, words), INT32_MIN, dtype=_WORD)
    full = len(ids) // block_tokens
    table[:full, :block_tokens] = ids[: full * block_tokens].reshape(full, block_tokens)
    if full < n:
        table[full, : len(ids) - full * block_tokens] = ids[full * block_tokens :]
    return table.tobytes()


def _extras(extra: Extra | None, n: int) -> list[str | bytes | None] | None:
    """One extra per symbol, checked; None where there is none at all."""
    if extra is None:
        return None
    if isinstance(extra, (str, bytes)):
        return [extra] * n
    if isinstance(extra, (bytearray, memoryview)) or not isinstance(extra, Sequence):
        raise TypeError(f"extra is a {type(extra).__name__}: a str, bytes, or a sequence of these (or None) is needed")
    if len(extra) != n:
        raise ValueError(f"extra has {len(extra)} entries for {n} blocks: one per block is needed")
    values: list[str | bytes | None] = [*extra]
    for i, value in enumerate(values):
        if value is not None and not isinstance(value, (str, bytes)):
            raise TypeError(f"extra[{i}] = {value!r}: a str, bytes or None is needed")
    return values


def _hash_symbols(symbols: bytes, width: int, extras: list[str | bytes | None]) -> bytes:
    """Replace the raw symbol of every block that has an extra."""
    parts = []
    for i, value in enumerate(extras):
        raw = symbols[i * width : (i + 1) * width]
        if value is None:
            parts.append(raw)
            continue
        typed = b"s" + value.encode() if isinstance(value, str) else b"b" + value
        state = hashlib.shake_256(b"tiercache.symbol.1" + _prefixed(typed) + _prefixed(raw))
        parts.append(_MARKER + state.digest(width - len(_MARKER)))
    return b"".join(parts)


def _token_ids(tokens: Tokens) -> NDArray[np.int32]:
    """Checked ids as a little-endian int32 array `[count]`; a view of the caller's where it is one already."""
    if isinstance(tokens, np.ndarray):
        plain = tokens.dtype == _WORD and tokens.ndim == 1 and tokens.flags.c_contiguous
        return tokens if plain else _from_array(tokens)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tokens, torch.Tensor):
        if tokens.is_floating_point() or tokens.is_complex():
            raise TypeError(f"tokens are {tokens.dtype}{_first_of(tokens.flatten().tolist())}: integer ids are needed")
        return _from_array(tokens.detach().cpu().numpy())
    if isinstance(tokens, range):
        return _from_range(tokens)
    if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, Sequence):
        raise TypeError(f"tokens are a {type(tokens).__name__}: a list, tuple, range, array or tensor of ids is needed")
    return _from_list(tokens)


def _from_array(tokens: NDArray[Any]) -> NDArray[np.int32]:
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"tokens are {tokens.dtype}{_first_of(tokens.flatten().tolist())}: integer ids are needed")
    if tokens.ndim != 1:
        raise ValueError(f"tokens have shape {tokens.shape}: one axis is needed")
    narrow = np.can_cast(tokens.dtype, _WORD)  # then only INT32_MIN can be wrong, which `check_ids` looks for
    if not narrow and len(tokens) and (int(tokens.min()) <= INT32_MIN or int(tokens.max()) > INT32_MAX):
        wide = tokens.astype(object)
        i = next(i for i, value in enumerate(wide) if not INT32_MIN < value <= INT32_MAX)
        raise ValueError(_outside(i, wide[i]))
    return np.ascontiguousarray(tokens, dtype=_WORD)


def _from_range(tokens: range) -> NDArray[np.int32]:
    for i in (0, len(tokens) - 1) if tokens else ():
        _check_id(i, tokens[i])
    if len(tokens) < 2:
        return np.array(list(tokens), dtype=_WORD)
    end = tokens[-1] + (1 if tokens.step > 0 else -1)
    return np.arange(tokens[0], end, tokens.step, dtype=np.int64).astype(_WORD)


def _from_list(tokens: Sequence[Any]) -> NDArray[np.int32]:
    """array('i') refuses floats and what does not fit; bools pass it as 0 and 1, so only those are looked at again."""
    try:
        ids = np.frombuffer(array("i", tokens), dtype=np.int32)
    except (TypeError, OverflowError):
        for i, value in enumerate(tokens):
            _check_id(i, value)
        raise
    for i in np.flatnonzero((ids == 0) | (ids == 1)).tolist():
        _check_id(i, tokens[i])
    if len(ids) and ids.min() == INT32_MIN:
        i = int(np.argmin(ids))
        raise ValueError(_outside(i, tokens[i]))
    return ids.astype(_WORD, copy=False)


def _check_id(i: int, value: Any) -> None:
    """TypeError or ValueError where one element of a sequence is no token id."""
    is_bool = isinstance(value, bool) or "bool" in str(getattr(value, "dtype", ""))
    try:
        number = None if is_bool else operator.index(value)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"tokens[{i}] = {value!r}: an integer id is needed")
    if not INT32_MIN < number <= INT32_MAX:
        raise ValueError(_outside(i, number))


def _first_of(values: list[Any]) -> str:
    return f" (tokens[0] = {values[0]!r})" if values else ""


def _outside(i: int, value: int) -> str:
    return f"tokens[{i}] = {value}: ids must be above {INT32_MIN} and at most {INT32_MAX}"
