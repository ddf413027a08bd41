"""KV events: which blocks became readable in which tier, and which went, for those who route requests.

Collected as plain values while the planner decides; only where the engine publishes events at all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tiercache.index import Node
from tiercache.types import JobResult, PlannerMessage

__all__ = ["BlockChange", "BlockEvents"]

AT_ONCE = 8192
"""Blocks told per step, unless four times as many wait: what a restart found comes bit by bit."""


@dataclass(frozen=True, slots=True)
class BlockChange:
    """Blocks that follow each other in a prompt became readable in one level, or went from it."""

    readable: bool
    level: int
    """-1: everything went from every level."""
    hashes: Sequence[bytes] = ()
    parent: bytes | None = None
    """Hash of the block before them, None: they begin a prompt."""
    tokens: list[int] = field(default_factory=list)
    """Of these blocks; empty where they are not known, as of what was demoted, promoted or found at the start."""
    lora: Any = None
    """The request's adapter, where the tokens are known."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a store's request knew of its blocks."""

    symbols: bytes
    begin: int
    tokens: list[int]
    """From block `begin` on."""
    lora: Any


class BlockEvents:
    """A `residency.Listener` that keeps what it heard until it is taken."""

    def __init__(self, width: int, block_tokens: int) -> None:
        """width: bytes of a block's hash."""
        self._width = width
        self._block_tokens = block_tokens
        self._changes: deque[tuple[bool, int, bytes, bytes | None, list[int], Any]] = deque()
        self._waiting = 0
        """Blocks in there."""
        self._stores: dict[int, _Stored] = {}
        """By job, not over yet."""
        self._over: _Stored | None = None
        """Of the store whose end is being taken over."""
        self._any = False

    # -- what the scheduler's half says -------------------------------------------------------------------------

    def stores(self, job: int, request: Any, symbols: bytes, begin: int, end: int) -> None:
        """A job stores blocks of `[begin, end)` of this request; symbols: of all its blocks."""
        tokens = list(request.all_token_ids[begin * self._block_tokens : end * self._block_tokens])
        self._stores[job] = _Stored(symbols, begin, tokens, getattr(request, "lora_request", None))

    def commits(self, message: PlannerMessage) -> None:
        """The planner is about to take this over."""
        self._over = self._stores.pop(message.job, None) if isinstance(message, JobResult) else None

    # -- what the residency says --------------------------------------------------------------------------------

    def changed(self, node: Node, begin: int, end: int, level: int, readable: bool) -> None:
        """See `residency.Listener`."""
        width = self._width
        symbols, parent, lora = node.run[begin * width : end * width], None, None
        tokens: list[int] = []
        if readable:
            parent = self._parent(node, begin)
            if self._over is not None and level == 0:
                tokens, lora = self._tokens(self._over, symbols)
        self._changes.append((readable, level, symbols, parent, tokens, lora))
        self._waiting += end - begin
        self._any = True

    def cleared(self) -> None:
        """See `residency.Listener`."""
        self._changes.clear()
        self._waiting = 0
        if self._any:
            self._changes.append((False, -1, b"", None, [], None))
        self._any = False

    def _parent(self, node: Node, begin: int) -> bytes | None:
        width = self._width
        if begin:
            return node.run[(begin - 1) * width : begin * width]
        above = node.parent
        if above is None or above.parent is None:
            return None
        return above.run[(above.n - 1) * width : above.n * width]

    def _tokens(self, stored: _Stored, symbols: bytes) -> tuple[list[int], Any]:
        at, rest = divmod(stored.symbols.find(symbols, stored.begin * self._width), self._width)
        if rest or at < stored.begin:
            return [], None
        first = (at - stored.begin) * self._block_tokens
        return stored.tokens[first : first + len(symbols) // self._width * self._block_tokens], stored.lora

    # -- what is told -------------------------------------------------------------------------------------------

    def take(self) -> list[BlockChange]:
        """What is to be told now, in order."""
        taken: list[BlockChange] = []
        room = max(AT_ONCE, self._waiting // 4)
        while self._changes and room > 0:
            readable, level, symbols, parent, tokens, lora = self._changes.popleft()
            width = self._width
            hashes = [symbols[i : i + width] for i in range(0, len(symbols), width)]
            taken.append(BlockChange(readable, level, hashes, parent, tokens, lora))
            self._waiting -= len(hashes)
            room -= len(hashes)
        return taken
