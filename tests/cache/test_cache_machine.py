"""Random sequences of calls on a real cache with real threads and files, against the dict model."""

from __future__ import annotations

import gc
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from cache_kit import BLOCK_TOKENS, LAYOUT, WAIT_S, bits, crash_image, is_clean, open_cache
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tiercache.testing.model import CacheModel, payload_of

PARTS = st.lists(st.sampled_from([1, 1, 1, 2, 2, 3]), min_size=1, max_size=7)
DURABILITY = "process"
"""No data sync: it takes most of the time, and no power cut is tried here."""
TAILS = st.integers(0, BLOCK_TOKENS - 1)


def tokens_of(parts, tail=0):
    return np.array([part for part in parts for _ in range(BLOCK_TOKENS)] + [1] * tail, dtype=np.int32)


class CacheMachine(RuleBasedStateMachine):
    """See the module."""

    crashes = False
    """Whether it also goes on from copies of the directory, which costs a process each time."""

    futures = Bundle("futures")
    loadeds = Bundle("loadeds")
    matches = Bundle("matches")
    pins = Bundle("pins")

    @initialize(
        hbm=st.sampled_from([0, 0, 2, 5]),
        dram=st.sampled_from([3, 4, 8]),
        nvme=st.sampled_from([0, 6, 12, 48]),
        exclusive=st.sampled_from([None, True, False]),
        write_after=st.sampled_from([None, 0.0, 0.003]),
    )
    def start(self, hbm, dram, nvme, exclusive, write_after):
        self.lives = [Path(tempfile.mkdtemp(prefix="tiercache-machine-"))]
        self.config = {
            "path": self.lives[0] if nvme else None,
            "hbm_slots": hbm,
            "dram_slots": dram,
            "nvme_slots": nvme,
            "exclusive": exclusive,
            "nvme": {"write_after_s": write_after, "durability": DURABILITY} if nvme else {},
        }
        self.cache = open_cache(**self.config)
        self.model = CacheModel(BLOCK_TOKENS)
        self.tickets = []
        self.open_futures = []
        self.held = []
        self.pinned = []

    # -- bytes in ---------------------------------------------------------------------------------------------------

    @rule(parts=PARTS, tail=TAILS, version=st.sampled_from([0, 0, 0, 1]), wait=st.booleans(), suffix=st.booleans())
    def store_another(self, parts, tail, version, wait, suffix):
        self.store(parts, tail, version, wait, suffix)

    @rule(parts=PARTS, tail=TAILS, version=st.sampled_from([0, 0, 0, 1]), wait=st.booleans(), suffix=st.booleans())
    def store(self, parts, tail, version, wait, suffix):
        tokens = tokens_of(parts, tail)
        start = min(self.cache.lookup(tokens).blocks, len(parts)) if suffix else 0
        blocks = payload_of(tokens, LAYOUT, BLOCK_TOKENS, start, version=version)
        self.model.store(tokens, blocks, start)
        ticket = self.cache.store(tokens, blocks, start)
        assert ticket.accepted + ticket.present <= len(blocks)
        assert (ticket.accepted + ticket.present == len(blocks)) == (ticket.reason == "")
        self.tickets.append((ticket, blocks))
        if wait:
            assert ticket.wait(WAIT_S)
            assert ticket.stored <= ticket.accepted

    @rule(parts=PARTS, start=st.integers(1, 7))
    def store_under_nothing(self, parts, start):
        tokens = tokens_of(parts)
        start = min(start, len(parts))
        blocks = payload_of(tokens, LAYOUT, BLOCK_TOKENS, start)
        match = self.cache.lookup(tokens)
        ticket = self.cache.store(tokens, blocks, start)
        if ticket.accepted or ticket.present:
            self.model.store(tokens, blocks, start)
            assert start <= self.model.longest(tokens)
        elif len(blocks) and start > match.blocks + match.pending:
            assert ticket.reason in ("parent_missing", "no_room", "queue_full", "offline")
        self.tickets.append((ticket, blocks))

    # -- asking -----------------------------------------------------------------------------------------------------

    @rule(target=matches, parts=PARTS, tail=TAILS, deadline=st.sampled_from([0.0, 0.0, 0.05]))
    def lookup(self, parts, tail, deadline):
        tokens = tokens_of(parts, tail)
        match = self.cache.lookup(tokens, deadline_s=deadline)
        assert match.blocks + match.pending <= self.model.longest(tokens)
        assert match.tokens == match.blocks * BLOCK_TOKENS
        assert sum(match.by_tier.values()) == match.blocks
        self.cache.explain(tokens)
        return match, tokens

    # -- bytes out --------------------------------------------------------------------------------------------------

    @rule(target=futures, parts=PARTS, prefetched=st.booleans())
    def load(self, parts, prefetched):
        tokens = tokens_of(parts)
        match = self.cache.lookup(tokens)
        if prefetched:
            self.cache.prefetch(match)
        return self._expect(self.cache.load(match), tokens, None)

    @rule(target=futures, match=matches)
    def load_an_old_match(self, match):
        found, tokens = match
        return self._expect(self.cache.load(found), tokens, None)

    def _expect(self, future, tokens, out):
        entry = (future, tokens, self.model, out)
        self.open_futures.append(entry)
        return entry

    @rule(target=futures, parts=PARTS, rows=st.integers(0, 8), step=st.sampled_from([1, 2, -1]))
    def load_out(self, parts, rows, step):
        tokens = tokens_of(parts)
        backing = np.full((rows * 2 + 1, *LAYOUT.block_shape), 7, dtype=np.float32)
        out = backing[::step][:rows]
        return self._expect(self.cache.load(self.cache.lookup(tokens), out=out), tokens, out)

    @rule(target=loadeds, entry=futures)
    def result(self, entry):
        if entry not in self.open_futures:
            return multiple()
        self.open_futures.remove(entry)
        future, tokens, model, out = entry
        loaded = future.result(WAIT_S)
        assert model.wrong(tokens, loaded.blocks) == []
        assert loaded.tokens == loaded.block_count * BLOCK_TOKENS
        if out is not None:
            return multiple()
        held = (loaded, bits(loaded.blocks))
        self.held.append(held)
        return held

    @rule(entry=futures)
    def cancel(self, entry):
        if entry in self.open_futures and entry[0].cancel():
            self.open_futures.remove(entry)

    @rule(held=loadeds)
    def release_loaded(self, held):
        if held in self.held:
            self.held.remove(held)
            loaded, before = held
            assert bits(loaded.blocks) == before, "a block changed while it was held"
            loaded.release()
            loaded.release()

    # -- hints, removal ---------------------------------------------------------------------------------------------

    @rule(match=matches)
    def touch(self, match):
        self.cache.touch(match[0])

    @rule(parts=PARTS)
    def release(self, parts):
        self.cache.release(tokens_of(parts))

    @rule(target=pins, parts=PARTS)
    def pin(self, parts):
        match = self.cache.lookup(tokens_of(parts))
        pin = self.cache.pin(match)
        assert pin.blocks <= match.blocks
        self.pinned.append(pin)
        return pin

    @rule(pin=pins)
    def unpin(self, pin):
        self.cache.unpin(pin)
        self.pinned = [each for each in self.pinned if each is not pin]

    @rule(parts=st.lists(st.integers(1, 3), max_size=4), tail=st.sampled_from([0, 0, 1]))
    def invalidate(self, parts, tail):
        tokens = tokens_of(parts, tail)
        before = len(self.model)
        self.model = self._copy_of_model()
        self.model.invalidate(tokens)
        assert self.cache.invalidate(tokens) <= before
        assert self.cache.lookup(tokens).blocks <= self.model.longest(tokens)

    def _copy_of_model(self):
        """Loads under way are judged by what held when they began."""
        copy = CacheModel(BLOCK_TOKENS)
        copy._stored = dict(self.model._stored)
        return copy

    # -- ends -------------------------------------------------------------------------------------------------------

    @rule(
        what=st.sampled_from(["flush", "flush", "flush_nvme", "flush_nvme", "reopen", "collect", "bump_epoch", "crash"])
    )
    def rarely(self, what):
        getattr(self, f"_{what}")()

    def _flush(self):
        assert self.cache.flush(WAIT_S)
        assert all(ticket.copied for ticket, _ in self.tickets)
        self.tickets.clear()

    def _flush_nvme(self):
        if self.config["path"] is not None and self.cache.flush(WAIT_S, to="nvme"):
            stats = self.cache.stats()
            assert stats.tiers[-1].held >= stats.blocks

    def _collect(self):
        gc.collect()

    def _reopen(self):
        self._let_go()
        self.cache.close()
        if self.config["path"] is None:
            self.model = CacheModel(BLOCK_TOKENS)
        self.cache = open_cache(**self.config)
        for tokens in self.model.prompts():
            assert self.cache.lookup(tokens).blocks <= self.model.longest(tokens)

    def _crash(self):
        """As after a kill, the directory as it is at this moment: all that was acknowledged is there, nothing else."""
        if not self.crashes or self.config["path"] is None:
            return
        self._let_go()
        acknowledged = self.cache.flush(WAIT_S, to="nvme")
        self.lives.append(crash_image(self.config["path"], Path(tempfile.mkdtemp(prefix="tiercache-machine-"))))
        prompts = list(self.model.prompts())
        before = [self.cache.lookup(tokens).blocks for tokens in prompts]
        self.cache.close()
        self.config["path"] = self.lives[-1]
        self.cache = open_cache(**self.config)
        after = [self.cache.lookup(tokens).blocks for tokens in prompts]
        assert after == before if acknowledged else all(a <= b for a, b in zip(after, before, strict=True))
        self.tickets.clear()

    def _bump_epoch(self):
        self.model = CacheModel(BLOCK_TOKENS)
        self.cache.bump_epoch()
        assert self.cache.stats().blocks == 0

    def _let_go(self):
        for future, *_ in self.open_futures:
            future.result(WAIT_S).release()
        for loaded, before in self.held:
            assert bits(loaded.blocks) == before
            loaded.release()
        for pin in self.pinned:
            self.cache.unpin(pin)
        self.open_futures, self.held, self.pinned = [], [], []

    @invariant()
    def clean(self):
        if hasattr(self, "cache"):
            assert self.cache.check() == []

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        try:
            self._let_go()
            assert self.cache.flush(WAIT_S)
            assert is_clean(self.cache)
            for tokens in list(self.model.prompts()):
                with self.cache.load(self.cache.lookup(tokens)).result(WAIT_S) as loaded:
                    assert self.model.wrong(tokens, loaded.blocks) == []
            stats = self.cache.stats()
            assert stats.mover["unexpected_errors"] == stats.mover["delivery_errors"] == 0
            assert all(tier.checksum_failures == tier.io_errors == 0 for tier in stats.tiers)
        finally:
            self.cache.close()
            for place in self.lives:
                shutil.rmtree(place)


class CrashingMachine(CacheMachine):
    """The same, with kills."""

    crashes = True


QUICK = settings(
    max_examples=25,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
LONG = settings(QUICK, max_examples=300, stateful_step_count=60)


class TestCacheMachine(CacheMachine.TestCase):
    settings = QUICK


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestCacheMachineLong(CrashingMachine.TestCase):
    settings = LONG
