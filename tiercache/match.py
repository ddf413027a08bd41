"""What a lookup and a store answer: plain values and the ticket of a copy under way."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tiercache.config_remote import REMOTE_NAME
from tiercache.errors import WorkerThreadError
from tiercache.keys import Prompt
from tiercache.mover.threads import is_worker_thread
from tiercache.planner import Found
from tiercache.types import LevelSpec, Slots

__all__ = ["Match", "Pin", "Ticket", "diverged_at", "match_of", "no_match"]


@dataclass(slots=True, eq=False)
class Match:
    """What the cache holds of a prompt. It pins nothing: a load shortens it by what is gone until then.

    Not to be changed. Valid for `load`, `touch`, `pin` and `prefetch` of the cache that made it, until the epoch
    changes (then empty).
    """

    tokens: int
    """Leading tokens of the prompt that can be loaded, and are worth it."""
    blocks: int
    """The same in blocks."""
    by_tier: Mapping[str, int]
    """Of `blocks`, how many each tier would supply (the fastest that has them); "remote" only where that is not 0."""
    pending: int
    """Blocks after those that may be loadable soon: their only copy is in flight (a store under them is accepted), or
    a key tier is being asked for them."""
    diverged_at: int | None
    """First token that no cached path continues with; None where the whole prompt lies on one. With hashed symbols
    (`extra`) a multiple of the block size."""
    estimated_load_s: float
    """Seconds until `blocks` would have come, from measured latency, rate and queue of each tier (they work side by
    side); of one never measured, from a low guess. As if copied: what is loaded in place takes none."""
    symbols: bytes = field(repr=False)
    """Of the matched blocks, and maybe of more; for the cache."""
    block_tokens: int = field(repr=False)
    prompt_blocks: int = field(repr=False)
    """Of the whole prompt."""
    epoch: bytes = field(repr=False)
    once: list[bool] = field(default_factory=lambda: [False], repr=False)
    """Whether its recency was counted already (it is, once per match)."""
    withheld: int = 0
    """Blocks after `blocks` that are held but not offered: a recompute was expected to be faster."""


class Ticket:
    """A store under way. Completed by a worker thread, also where the copy failed or is overdue."""

    __slots__ = ("_done", "accepted", "present", "reason", "stored")

    def __init__(self, accepted: int, present: int, reason: str, done: bool) -> None:
        self.accepted = accepted
        """Blocks newly taken."""
        self.present = present
        """Blocks that were there, or on the way, already."""
        self.reason = reason
        """Why not all were taken: "" | parent_missing | no_room | quota | queue_full | offline | stale_epoch |
        stores_off."""
        self.stored = 0
        """Of `accepted`, the blocks whose bytes arrived; final once `copied`."""
        self._done = threading.Event()
        if done:
            self._done.set()

    def __repr__(self) -> str:
        state = f"stored {self.stored}" if self.copied else "copying"
        why = f", {self.reason}" if self.reason else ""
        return f"Ticket(accepted {self.accepted}, present {self.present}, {state}{why})"

    @property
    def copied(self) -> bool:
        """True once the caller may reuse `blocks`."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until `copied`, at most `timeout` seconds; every job has a deadline of its own. Returns `copied`.

        WorkerThreadError on one of the cache's own threads.
        """
        if not self.copied and is_worker_thread():
            raise WorkerThreadError("Ticket.wait() would wait for the thread that called it")
        return self._done.wait(timeout)

    def complete(self, stored: int) -> None:
        """For the cache: the copy is over."""
        self.stored = stored
        self._done.set()


class Pin:
    """A hold made by `TieredKVCache.pin`, ended by `unpin`."""

    __slots__ = ("_held", "blocks")

    def __init__(self, blocks: int, held: list[tuple[int, Slots]]) -> None:
        self.blocks = blocks
        """How many blocks are held; fewer than asked where the bounds say so."""
        self._held = held

    def __repr__(self) -> str:
        return f"Pin({self.blocks} blocks{'' if self._held else ', ended'})"

    def take(self) -> list[tuple[int, Slots]]:
        """For the cache: what is held, once."""
        held, self._held = self._held, []
        return held


def no_match(prompt: Prompt, epoch: bytes) -> Match:
    """Nothing is cached, or nobody may say so."""
    return Match(0, 0, {}, 0, 0 if prompt.token_count else None, 0.0, b"", prompt.block_tokens, prompt.n, epoch)


def match_of(found: Found, prompt: Prompt, symbols: bytes, specs: Sequence[LevelSpec], epoch: bytes) -> Match:
    """What the planner found of a prompt, in the caller's terms. ValueError where an id could have passed for another
    kind of symbol."""
    by_tier = {spec.name: count for spec, count in zip(specs, found.by_level, strict=True)}
    if not found.plain:
        prompt.check_ids()
        if found.remote:
            by_tier[REMOTE_NAME] = found.remote
    tokens, diverged = min(found.blocks * prompt.block_tokens, prompt.tokens), diverged_at(prompt, found.words)
    size = prompt.block_tokens
    pending, load_s = found.pending, found.load_s
    told = tokens, found.blocks, by_tier, pending, diverged, load_s
    return Match(*told, symbols, size, prompt.n, epoch, withheld=found.withheld)


def diverged_at(prompt: Prompt, words: int) -> int | None:
    """The first token off every cached path, from the int32 words that lie on one; None where all tokens do."""
    width = prompt.symbol_nbytes // 4
    blocks, rest = divmod(words, width)
    token = min(blocks, prompt.n) * prompt.block_tokens
    if prompt.raw:
        token += min(rest, prompt.block_tokens)
        if blocks >= prompt.n and not prompt.partial:
            token = prompt.n * prompt.block_tokens + (words - prompt.n * width)
    return None if token >= prompt.token_count else token
