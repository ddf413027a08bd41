"""TieredKVCache: planner and mover in one process, the embeddable API."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from tiercache.assembly import (
    Seams,
    Stack,
    steady_wall_clock,
)
from tiercache.cache_life import CacheLife
from tiercache.config import PrefillSpeed, Switch, Tier, load_config
from tiercache.delivery import AtOnce, Delivery
from tiercache.errors import ConfigError, NotDurableError
from tiercache.hints import check_priority, check_ttl
from tiercache.keys import Extra, Prompt, Tokens, encode_prompt
from tiercache.layout import CallerRows, KVLayout, Namespace
from tiercache.loaded import Loaded, LoadFuture, release_result
from tiercache.match import Match, Pin, Ticket, diverged_at, match_of, no_match
from tiercache.planner import Explanation
from tiercache.types import Slots

__all__ = ["TieredKVCache"]


class TieredKVCache(CacheLife):
    """KV blocks in HBM, DRAM and on NVMe under one prefix index. Safe to call from several threads.

    tiers: fastest first, objects or strings ("hbm:2GiB", "dram:8GiB", "nvme:/mnt/kv:200GiB"). layout: shape and dtype
    of a block; learnt from the first store, or from the directory, where it is not given. namespace: what makes KV
    interchangeable (without one, use one directory per model). epoch: which weights. block_tokens: tokens per block.
    policy: order of eviction. exclusive: whether a promoted block leaves the slow tier (None: by size). switch: "on",
    "off", "loads-off", "stores-off" (None: the environment variable TIERCACHE, else "on"). ttl_s: see `store`.
    prefill_tokens_per_s: how fast the engine recomputes, or "learnt" (from `note_prefill`): lookups then offer only
    what is loaded sooner. clock: wall-clock seconds, never going back. delivery: when the mover's messages take effect.
    seams: where tests put faulty parts.

    Raises ConfigError (names the field, its value and the remedy), DirectoryInUseError, FormatVersionError.
    I/O trouble later is a counted miss; after `close`, and in a forked child, every verb raises CacheClosedError.
    """

    def __init__(
        self,
        tiers: Sequence[Tier | str | Mapping[str, Any]],
        layout: KVLayout | None = None,
        namespace: Namespace | str | None = None,
        epoch: bytes | str | None = None,
        block_tokens: int = 16,
        policy: str = "reuse",
        exclusive: bool | None = None,
        switch: Switch | None = None,
        *,
        ttl_s: float | None = None,
        prefill_tokens_per_s: PrefillSpeed = None,
        clock: Callable[[], float] | None = None,
        delivery: Delivery | None = None,
        seams: Seams | None = None,
    ) -> None:
        values = {
            "tiers": tiers,
            "layout": layout,
            "namespace": namespace,
            "epoch": epoch,
            "block_tokens": block_tokens,
            "policy": policy,
            "exclusive": exclusive,
            "ttl_s": ttl_s,
            "prefill_tokens_per_s": prefill_tokens_per_s,
        }
        if switch is not None:
            values["switch"] = switch
        self._start(load_config(values), clock or steady_wall_clock(), delivery or AtOnce(), seams or Seams())

    @classmethod
    def from_config(cls, source: Mapping[str, Any] | str | os.PathLike[str]) -> TieredKVCache:
        """A cache from a mapping, or from a `.toml` or `.json` file. ConfigError names what is wrong in it."""
        cache = cls.__new__(cls)
        cache._start(load_config(source), steady_wall_clock(), AtOnce(), Seams())
        return cache

    # -- asking -------------------------------------------------------------------------------------------------

    def lookup(
        self,
        tokens: Tokens,
        extra: Extra | None = None,
        deadline_s: float = 0.0,
        *,
        partial_tail: bool = False,
        prefill_tokens_per_s: PrefillSpeed | Literal["default"] = "default",
    ) -> Match:
        """How much of a prompt is held. Waits for no data; with `deadline_s`, up to that long for blocks in flight, and
        for what a remote tier has to say.

        tokens: ids, 1-D (list, array or tensor; int32 arrays are fastest). extra: what else decides the KV (LoRA,
        salt, image), one value or one per block. partial_tail: also a last partial block (matches whole only).
        prefill_tokens_per_s: offer only as many leading blocks as gain the most time against a recompute at this speed
        (`Match.withheld`: the others); "learnt": that of `note_prefill`; None: offer all that is found; default: as the
        cache was told. Prefill is slower the longer the context: give the speed at lengths where it matters.
        ValueError or TypeError for ids that are none (INT32_MIN in an int32 array may pass where nothing cached could
        be taken for it); leaves no trace but statistics.
        """
        prompt = encode_prompt(tokens, self.settings.block_tokens, extra, partial_tail)
        link = self._link
        if deadline_s > 0:
            link.refuse_worker("lookup(deadline_s=)")
        until = time.monotonic() + deadline_s
        is_asked = prefill_tokens_per_s != "default" or self._prefill.default is not None
        block_s = self._prefill.block_s(prefill_tokens_per_s, prompt.block_tokens) if is_asked else 0.0
        stack = link.ask()
        try:
            match = self._lookup(stack, prompt, block_s)
            while match.pending and (left := until - time.monotonic()) > 0:
                link.wait_changed(left)
                match = self._lookup(stack, prompt, block_s, again=True)
            if block_s:
                link.answered(stack)
            return match
        finally:
            link.lock.release()

    def _lookup(self, stack: Stack | None, prompt: Prompt, block_s: float, again: bool = False) -> Match:
        """Under the planner's lock. `again`: the same lookup after a wait, counted once."""
        if stack is None or not self.loads_enabled:
            return no_match(prompt, self._epoch)
        planner, tail = stack.planner, prompt.tail if prompt.raw else b""
        symbols = prompt.first
        if planner.begins(symbols):  # else it need not be encoded to the end to be told so
            symbols = prompt.symbols
        found = planner.lookup(symbols, prompt.n, self._link.clock(), tail, again, block_s)
        if planner.state.outbox:  # the key tier is asked
            self._link.answered(stack)
        return match_of(found, prompt, symbols, stack.specs, planner.epoch)

    async def alookup(self, tokens: Tokens, extra: Extra | None = None, **options: Any) -> Match:
        """`lookup` for callers in an event loop (it takes microseconds and never waits)."""
        return self.lookup(tokens, extra, **options)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens in so long: what `prefill_tokens_per_s="learnt"` goes by. ValueError."""
        self._prefill.note(tokens, seconds)

    def explain(self, tokens: Tokens, extra: Extra | None = None) -> Explanation:
        """Where the blocks of a prompt are, and where prompts leave the cached path. For people; mutates nothing."""
        prompt = encode_prompt(tokens, self.settings.block_tokens, extra).check_ids()
        with self._link.planning() as stack:
            if stack is None:
                return Explanation(prompt.n, 0, 0 if prompt.token_count else None, ())
            stretches = stack.planner.explain(prompt.symbols, prompt.n, self._link.clock())
            words = stack.planner.words_shared(prompt.symbols, prompt.n, prompt.tail if prompt.raw else b"")
        found = stretches[-1].end if stretches else 0
        return Explanation(prompt.n, found, diverged_at(prompt, words), stretches)

    # -- bytes out ----------------------------------------------------------------------------------------------

    def load(self, match: Match, out: Any = None) -> LoadFuture:
        """Bring a match's blocks to the fastest tier and hold them there, or copy them into `out`.

        out: a writable array or tensor `[m, *block_shape]` of the layout's dtype; at most m blocks are loaded, it may
        be reused once the future is done, and its rows past the loaded blocks are undefined. Counts as a use of the
        match (once). The result may have fewer blocks than the match: what is gone, found wrong, late or over a bound
        is a miss. LayoutError or ValueError for a wrong `out`.
        """
        future = LoadFuture()
        with self._link.planning() as stack:
            rows = CallerRows(out, stack.layout, writable=True) if stack is not None and out is not None else None
            if stack is None or not self.loads_enabled or match.blocks == 0:
                load = None
            else:
                endpoint, want = 0, match.blocks
                if rows is not None:
                    endpoint, want = self._link.attach(stack, rows), min(want, rows.n)
                total, match.once[0] = None if match.once[0] else match.prompt_blocks, True
                load = stack.planner.plan_load(match.symbols, want, match.epoch, self._link.clock(), endpoint, total)
                expected = self._link.expect(future, load, match, out)
        if load is None:
            memory = stack.memory if stack is not None else None
            future.set_result(Loaded(0, 0, memory=memory, out=out))
        elif not expected:
            self._link.complete(future, load, match, out)
        return future

    async def aload(self, match: Match, out: Any = None) -> Loaded:
        """`load` for callers in an event loop."""
        import asyncio  # here: a third of what the package would cost to import

        future = self.load(match, out)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.cancel()
            future.add_done_callback(release_result)  # where it was done already, and nobody took it
            raise

    def prefetch(self, match: Match) -> LoadFuture:
        """Bring a match's blocks to the fastest tier without holding them; the future's Loaded is released already."""
        future = self.load(match)
        future.add_done_callback(release_result)
        return future

    # -- bytes in -----------------------------------------------------------------------------------------------

    def store(
        self,
        tokens: Tokens,
        blocks: Any,
        start: int = 0,
        extra: Extra | None = None,
        *,
        partial_tail: bool = False,
        priority: int = 0,
        ttl_s: float | None = None,
    ) -> Ticket:
        """Take the blocks of a prompt from block `start` on; returns at once.

        blocks: array or tensor `[n, *block_shape]`, any strides, n equal to the full blocks of `tokens` past `start`
        (with `partial_tail` also the partial one), else ValueError. It must not change until the ticket is `copied`.
        The first store fixes the layout; another shape or dtype later is a LayoutError. What finds no room is cut
        short and told by the ticket, never waited for.

        priority: -99 to 100; blocks of a higher one leave each tier after all of a lower one. COLD: they leave the fast
        tiers first, are written to NVMe at once, and are not brought up beside a load into `out`. ttl_s: seconds after
        which they end, and what continues them; use does not put that off, another store does (math.inf: for ever;
        None: the cache's `ttl_s`). Blocks that were there keep the higher priority and the later end.
        """
        priority, ends_in = (
            check_priority(priority),
            self.settings.ttl_s if ttl_s is None else check_ttl("ttl_s", ttl_s),
        )
        prompt = encode_prompt(tokens, self.settings.block_tokens, extra, partial_tail).check_ids()
        symbols = prompt.symbols
        self._link.check_open()
        layout = self.layout or KVLayout.of(blocks)
        rows = CallerRows(blocks, layout)
        if start < 0 or start > prompt.n or rows.n != prompt.n - start:
            raise ValueError(f"{rows.n} blocks for {prompt.n} full blocks of tokens from block {start} on")
        if rows.n == 0 or not self.stores_enabled:
            return Ticket(0, 0, "" if self.stores_enabled else "stores_off", True)
        stack = self._link.stack or self._learn(layout)
        stack.layout.check(blocks)
        with self._link.planning():
            endpoint = self._link.attach(stack, rows)
            now = self._link.clock()
            expires = math.inf if ends_in is None else now + ends_in
            plan = stack.planner.plan_store(
                symbols, prompt.n, start, stack.planner.epoch, now, endpoint, prompt.partial, priority, expires
            )
            return self._link.ticket(stack, plan, endpoint)

    # -- hints and removal --------------------------------------------------------------------------------------

    def touch(self, match: Match) -> None:
        """The match was used without a load (an engine's own HBM hit). Once per match; `load` and `store` do it too."""
        with self._link.planning() as stack:
            if stack is not None and not match.once[0]:
                match.once[0] = True
                planner, now = stack.planner, self._link.clock()
                planner.touch(match.symbols, match.blocks, match.epoch, now, match.prompt_blocks)

    def release(self, tokens: Tokens, extra: Extra | None = None) -> int:
        """Hint: this conversation ended. What only its path uses leaves first. Returns how many blocks that is."""
        prompt = encode_prompt(tokens, self.settings.block_tokens, extra).check_ids()
        with self._link.planning() as stack:
            return 0 if stack is None else stack.planner.release(prompt.symbols, prompt.n, self._link.clock())

    def prioritize(self, tokens: Tokens, priority: int, extra: Extra | None = None) -> int:
        """Give the cached blocks of a prompt this priority, higher or lower (see `store`; COLD: what only memory has is
        written to NVMe at once). Returns how many blocks had another."""
        priority = check_priority(priority)
        prompt = encode_prompt(tokens, self.settings.block_tokens, extra).check_ids()
        with self._link.planning() as stack:
            if stack is None:
                return 0
            return stack.planner.prioritize(prompt.symbols, prompt.n, priority, self._link.clock())

    def pin(self, match: Match, ttl_s: float = math.inf) -> Pin:
        """Keep a match's blocks where they are until `unpin`, or for `ttl_s` seconds; at most half of a tier can be
        held. A pin keeps no block whose own time is over."""
        ttl_s = check_ttl("ttl_s", ttl_s)
        with self._link.planning() as stack:
            held: list[tuple[int, Slots]] = []
            if stack is not None:
                now = self._link.clock()
                held = stack.planner.pin(match.symbols, match.blocks, match.epoch, now, now + ttl_s)
            return Pin(sum(len(slots) for _, slots in held), held)

    def unpin(self, pin: Pin) -> None:
        """End a pin. A second call does nothing."""
        with self._link.planning() as stack:
            held = pin.take()
            if stack is not None and held:
                stack.planner.unpin(held, self._link.clock())

    def invalidate(self, prefix: Tokens, extra: Extra | None = None, timeout: float = 30.0) -> int:
        """Drop the last full block of `prefix` and all that continues it, on every tier. No tokens: everything; some
        tokens, but no full block: nothing.

        Returns the blocks dropped, once no crash can bring them back; NotDurableError where that took longer than
        `timeout` seconds (they are gone in this process then). WorkerThreadError on the cache's own threads.
        """
        prompt = encode_prompt(prefix, self.settings.block_tokens, extra).check_ids()
        self._link.refuse_worker("invalidate")
        with self._link.planning() as stack:
            if stack is None or (prompt.n == 0 and prompt.token_count):
                return 0
            dropped = stack.planner.invalidate(prompt.symbols, prompt.n, self._link.clock())
        self._sync_or_raise(stack, timeout, "invalidate")
        return dropped

    def bump_epoch(self, tag: bytes | str | None = None, timeout: float = 30.0) -> bytes:
        """The weights changed: nothing cached so far is ever found again, on any tier. Returns the new epoch.

        tag: the new epoch, where instances share one; None: a random nonce. A key tier keeps what lies there under the
        old one: a later start that gives the old one as its `epoch` setting finds it again. Returns once it is durable;
        NotDurableError where that took longer than `timeout` seconds. Loads under way end empty.
        """
        epoch = tag.encode("utf-8", "surrogatepass") if isinstance(tag, str) else os.urandom(16) if tag is None else tag
        if not isinstance(epoch, bytes) or not 0 < len(epoch) <= 255:
            raise ConfigError("tag", tag, "1 to 255 bytes, as bytes or str, are needed")
        self._link.refuse_worker("bump_epoch")
        with self._building, self._link.planning() as stack:  # no first store may go on building for the old epoch
            self._epoch = epoch
            ended = stack.planner.new_epoch(epoch, self._link.clock()) if stack is not None else []
            finished = self._link.finish(ended)
        for each in finished:
            self._link.complete(*each)
        if stack is not None:
            self._sync_or_raise(stack, timeout, "bump_epoch")
        elif self._directory is not None:
            try:
                self._directory.write_epoch(epoch)
            except OSError as error:
                raise NotDurableError(f"bump_epoch: the epoch file cannot be written ({error.strerror})") from error
        return epoch
