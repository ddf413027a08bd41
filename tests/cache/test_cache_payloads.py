"""Bytes in and out: arrays and tensors of every kind, `out`, `start`, partial tails, `extra`, tiers."""

import numpy as np
import pytest
import torch
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    SLOT,
    WAIT_S,
    bits,
    blocks_of,
    is_clean,
    nvme,
    open_cache,
    prompt,
    read,
    store,
)

from tiercache import DRAM, HBM, KVLayout, LayoutError, TieredKVCache
from tiercache.assembly import Seams
from tiercache.testing import WrappedTier

TOKENS = prompt(1, 2, 3, 4, 5)
N = 5


def cache_of(layout=None, slots=32):
    return TieredKVCache([DRAM(slots * SLOT)], layout=layout, block_tokens=BLOCK_TOKENS)


def put(cache, blocks, tokens=TOKENS, start=0):
    ticket = cache.store(tokens, blocks, start)
    assert ticket.wait(WAIT_S)
    assert ticket.stored == len(blocks)
    return ticket


# -- what goes in -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bool", "uint8", "int8", "float16", "int32", "float32", "uint64", "float64"])
def test_numpy_arrays_of_every_dtype(dtype):
    blocks = np.random.default_rng(1).integers(0, 2, (N, 3, 5)).astype(dtype)
    with cache_of() as cache:
        put(cache, blocks)
        assert cache.layout == KVLayout((3, 5), dtype)
        with cache.load(cache.lookup(TOKENS)).result() as loaded:
            assert loaded.blocks.dtype == getattr(torch, dtype)
            assert bits(loaded.blocks) == blocks.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float16", "float32", "int64"])
def test_torch_tensors(dtype):
    blocks = torch.arange(N * 24, dtype=torch.float32).view(N, 4, 6).to(getattr(torch, dtype))
    with cache_of() as cache:
        put(cache, blocks)
        with cache.load(cache.lookup(TOKENS)).result() as loaded:
            assert loaded.blocks.dtype == blocks.dtype
            assert loaded.blocks.shape == blocks.shape
            assert bits(loaded.blocks) == bits(blocks)


def test_without_torch_bfloat16_is_shown_as_bytes(python):
    python(
        """
import numpy as np, sys
from tiercache import DRAM, KVLayout, TieredKVCache
assert "torch" not in sys.modules
blocks = np.arange(2 * 3 * 8, dtype=np.uint8).reshape(2, 3, 8)
with TieredKVCache([DRAM("1MiB")], layout=KVLayout((3, 4), "bfloat16"), block_tokens=2) as cache:
    assert cache.store([1, 2, 3, 4], blocks).wait(10)
    with cache.load(cache.lookup([1, 2, 3, 4])).result() as loaded:
        assert isinstance(loaded.blocks, np.ndarray)
        assert loaded.blocks.dtype == np.uint8
        assert np.array_equal(loaded.blocks, blocks)
        assert not loaded.blocks.flags.writeable
"""
    )


STRIDED = {
    "transposed": lambda a: a.transpose(0, 2, 1),
    "every second block": lambda a: np.repeat(a, 2, axis=0)[::2],
    "backwards": lambda a: a[::-1],
    "a column": lambda a: np.stack([a, a], axis=-1)[..., 0],
    "fortran": np.asfortranarray,
    "broadcast": lambda a: np.broadcast_to(a[:1], a.shape),
    "read-only": lambda a: np.frombuffer(a.tobytes(), dtype=a.dtype).reshape(a.shape),
}


@pytest.mark.parametrize("form", STRIDED)
def test_any_strides_go_in_in_c_order(form):
    blocks = STRIDED[form](np.random.default_rng(2).normal(size=(N, 4, 6)).astype(np.float32))
    with cache_of() as cache:
        put(cache, blocks)
        with cache.load(cache.lookup(TOKENS)).result() as loaded:
            assert bits(loaded.blocks) == np.ascontiguousarray(blocks).tobytes()


STRIDED_TENSORS = {
    "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "a column": lambda t: torch.stack([t, t], dim=-1)[..., 0],
    "every second block": lambda t: t.repeat_interleave(2, dim=0)[::2],
    "expanded": lambda t: t[:1].expand(N, -1, -1),
    "conjugate view": lambda t: torch.view_as_real(torch.complex(t, t).conj().resolve_conj())[..., 1],
    "negated view": lambda t: torch.complex(t, t).conj().imag,
    "needs a gradient": lambda t: t.clone().requires_grad_(),
}


@pytest.mark.parametrize("form", STRIDED_TENSORS)
def test_tensors_of_any_strides_go_in_in_c_order(form):
    blocks = STRIDED_TENSORS[form](torch.randn((N, 4, 6)))
    with cache_of() as cache:
        put(cache, blocks)
        with cache.load(cache.lookup(TOKENS)).result() as loaded:
            assert torch.equal(loaded.blocks, blocks.detach().resolve_neg().contiguous())


def test_the_layout_is_learnt_once_and_then_held_to():
    with cache_of() as cache:
        rows = np.zeros((N, 4, 6), dtype=np.float32)
        with pytest.raises(ValueError, match="3 blocks for 5"):
            cache.store(TOKENS, rows[:3])
        assert cache.layout is None, "a store that was refused fixed the layout"
        assert (cache.store([], rows[:0]).accepted, cache.layout) == (0, None)
        put(cache, rows)
        wrong = [
            rows.astype(np.float64),
            rows.view(np.int32),
            rows.reshape(N, 24),
            rows.reshape(N, 6, 4),
            torch.zeros((N, 4, 6), dtype=torch.int32),
            rows.astype(">f4"),
            rows.astype(object),
            np.zeros(N, dtype=[("k", "f4"), ("v", "f4")]),
            np.zeros((N, 0, 6), dtype=np.float32),
            rows.tolist(),
            None,
        ]
        for blocks in wrong:
            with pytest.raises(LayoutError):
                cache.store(TOKENS, blocks)
            if isinstance(blocks, np.ndarray):
                with pytest.raises(LayoutError):
                    cache.load(cache.lookup(TOKENS), out=blocks)
                with pytest.raises(LayoutError):
                    cache.load(cache.lookup([9] * 8), out=blocks)
        assert is_clean(cache)


@pytest.mark.parametrize("blocks", [np.zeros((2, 0)), np.zeros(2), np.zeros((2, 3), dtype=object), "ab", [[1], [2]]])
def test_a_first_store_of_what_is_no_payload(blocks):
    with cache_of() as cache:
        with pytest.raises(LayoutError):
            cache.store(TOKENS[:8], blocks)
        assert cache.layout is None


# -- start ------------------------------------------------------------------------------------------------------------


def test_store_from_a_block_on():
    with open_cache(None) as cache:
        first = store(cache, TOKENS[:8])
        assert (first.accepted, first.present) == (2, 0)
        rest = store(cache, TOKENS, start=2)
        assert (rest.accepted, rest.present, rest.reason) == (3, 0, "")
        overlap = store(cache, prompt(1, 2, 3, 4, 5, 6), start=1)
        assert (overlap.accepted, overlap.present) == (1, 4)
        assert (store(cache, TOKENS).accepted, store(cache, TOKENS).present) == (0, 5)
        nothing = cache.store(TOKENS, blocks_of(TOKENS)[:0], start=5)
        assert (nothing.accepted, nothing.present, nothing.reason, nothing.copied) == (0, 0, "", True)
        assert read(cache, prompt(1, 2, 3, 4, 5, 6)) == 6


def test_store_refuses_numbers_that_do_not_fit():
    blocks = blocks_of(TOKENS)
    with open_cache(None) as cache:
        for start, rows in ((-1, blocks), (6, blocks[:0]), (1, blocks), (0, blocks[:4])):
            with pytest.raises(ValueError, match="blocks for 5 full blocks"):
                cache.store(TOKENS, rows, start)
        missing = cache.store(TOKENS, blocks[2:], start=2)
        assert (missing.accepted, missing.present, missing.reason, missing.copied) == (0, 0, "parent_missing", True)
        assert cache.stats().totals["stores_cut"] == {"parent_missing": 1}
        assert cache.stats().blocks == 0


def test_a_store_that_finds_no_room_is_cut_and_says_so():
    with open_cache(None, dram_slots=3) as cache:
        ticket = store(cache, TOKENS)
        assert (ticket.accepted, ticket.stored, ticket.reason) == (3, 3, "no_room")
        assert read(cache, TOKENS) <= 3
        match = cache.lookup(TOKENS)
        assert (match.blocks, match.diverged_at) == (3, 12)
        assert "no_room" in repr(ticket)


def test_tokens_past_the_last_full_block_are_ignored():
    with open_cache(None) as cache:
        tokens = prompt(1, 2, tail=3)
        assert store(cache, tokens).accepted == 2
        assert cache.lookup(prompt(1, 2, 9)).blocks == 2


# -- out --------------------------------------------------------------------------------------------------------------

GUARD = 77.0


def outs():
    """Name -> (out, the rows of it that a load of N blocks fills)."""
    shape = LAYOUT.block_shape
    whole = np.full((N, *shape), GUARD, dtype=np.float32)
    longer = np.full((N + 2, *shape), GUARD, dtype=np.float32)
    shorter = np.full((2, *shape), GUARD, dtype=np.float32)
    every_second = np.full((2 * N, *shape), GUARD, dtype=np.float32)[::2]
    backwards = np.full((N, *shape), GUARD, dtype=np.float32)[::-1]
    transposed = np.full((N, shape[1], shape[0]), GUARD, dtype=np.float32).transpose(0, 2, 1)
    tensor = torch.full((N, *shape), GUARD)
    strided_tensor = torch.full((N, shape[1], shape[0], 2), GUARD)[..., 1].transpose(1, 2)
    return {
        "array": whole,
        "longer": longer,
        "shorter": shorter,
        "every second": every_second,
        "backwards": backwards,
        "transposed": transposed,
        "tensor": tensor,
        "strided tensor": strided_tensor,
        "no rows": whole[:0],
    }


@pytest.mark.parametrize("name", outs())
@pytest.mark.parametrize("source", ["dram", "nvme"])
def test_load_into_out(tmp_path, name, source):
    out = outs()[name]
    n = min(N, len(out))
    with open_cache(tmp_path, dram_slots=8, exclusive=False) as cache:
        store(cache, TOKENS)
        assert cache.flush(to="nvme")
        if source == "nvme":
            store(cache, prompt(*range(20, 28)))
            assert cache.lookup(TOKENS).by_tier["dram"] == 0
        loaded = cache.load(cache.lookup(TOKENS), out=out).result(WAIT_S)
        assert (loaded.block_count, loaded.tokens) == (n, n * BLOCK_TOKENS)
        assert bits(loaded.blocks) == bits(blocks_of(TOKENS)[:n])
        assert bits(out[:n]) == bits(blocks_of(TOKENS)[:n])
        assert (np.asarray(out[n:]) == GUARD).all()
        assert type(loaded.blocks) is type(out)
        assert [bits(part) for part in loaded.parts] == ([bits(out[:n])] if n else [])
        assert is_clean(cache), "a load into out holds something"
        loaded.release()
        del loaded


def test_out_that_cannot_be_written_is_refused():
    with open_cache(None) as cache:
        store(cache, TOKENS)
        match = cache.lookup(TOKENS)
        frozen = np.zeros((N, *LAYOUT.block_shape), dtype=np.float32)
        frozen.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            cache.load(match, out=frozen)
        with pytest.raises(ValueError, match="overlap"):
            cache.load(match, out=torch.zeros((1, *LAYOUT.block_shape)).expand(N, -1, -1))
        assert read(cache, TOKENS) == N
        assert is_clean(cache)


def test_an_nvme_hit_into_out_also_fills_dram_where_that_is_free(tmp_path):
    with open_cache(tmp_path, dram_slots=8) as cache:
        store(cache, TOKENS)
        assert cache.close()
    with open_cache(tmp_path, dram_slots=8, exclusive=False) as cache:
        out = np.empty((N, *LAYOUT.block_shape), dtype=np.float32)
        assert cache.load(cache.lookup(TOKENS), out=out).result(WAIT_S).block_count == N
        assert bits(out) == bits(blocks_of(TOKENS))
        assert cache.lookup(TOKENS).by_tier == {"dram": N, "nvme": 0}
        assert read(cache, TOKENS) == 4  # half of the level may be held


def test_a_load_larger_than_dram_goes_into_out(tmp_path):
    tokens = prompt(*range(1, 41))
    with open_cache(tmp_path, dram_slots=4, nvme_slots=64) as cache:
        for taken in range(0, 40, 2):
            assert store(cache, tokens[: (taken + 2) * BLOCK_TOKENS], start=taken).accepted == 2
            assert cache.flush(WAIT_S, to="nvme")
        out = np.empty((40, *LAYOUT.block_shape), dtype=np.float32)
        for _ in range(3):
            assert cache.load(cache.lookup(tokens), out=out).result(WAIT_S).block_count == 40
            assert bits(out) == bits(blocks_of(tokens))
            out[:] = 0
        with cache.load(cache.lookup(tokens)).result(WAIT_S) as loaded:
            assert loaded.block_count == 2
        assert is_clean(cache)


# -- what a Loaded shows ----------------------------------------------------------------------------------------------


def test_blocks_and_parts_of_neighbouring_and_of_scattered_slots():
    with open_cache(None, dram_slots=12) as cache:
        store(cache, TOKENS)
        with cache.load(cache.lookup(TOKENS)).result() as loaded:
            assert len(loaded.parts) == 1
            assert loaded.blocks.data_ptr() == loaded.parts[0].data_ptr(), "neighbours are shown without a copy"
            assert loaded.blocks is loaded.blocks
            assert loaded.parts[0].stride(0) * 4 == SLOT
        for part in (11, 12):
            store(cache, prompt(part))
        cache.invalidate(prompt(11))
        store(cache, prompt(12, 13, 14, 15, 16))
        tokens = prompt(12, 13, 14, 15, 16)
        with cache.load(cache.lookup(tokens)).result() as loaded:
            assert len(loaded.parts) > 1
            assert sum(len(part) for part in loaded.parts) == 5
            assert bits(loaded.blocks) == bits(blocks_of(tokens)) == b"".join(bits(part) for part in loaded.parts)


def test_scattered_slots_without_torch(no_torch):
    with open_cache(None, dram_slots=12) as cache:
        for part in (11, 12, 13):
            store(cache, prompt(part))
        cache.invalidate(prompt(11))
        cache.invalidate(prompt(13))
        store(cache, TOKENS)
        with cache.load(cache.lookup(TOKENS)).result() as loaded:
            assert len(loaded.parts) > 1
            assert isinstance(loaded.blocks, np.ndarray)
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))


def test_numpy_views_cannot_be_written_through(no_torch):
    with open_cache(None) as cache:
        store(cache, TOKENS)
        with cache.load(cache.lookup(TOKENS)).result() as loaded:
            assert isinstance(loaded.blocks, np.ndarray)
            with pytest.raises(ValueError, match="read-only"):
                loaded.blocks[0, 0, 0] = 1
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS))


def test_an_empty_loaded_has_empty_blocks():
    with open_cache(None) as cache:
        loaded = cache.load(cache.lookup(TOKENS)).result()
        assert (loaded.tokens, loaded.block_count, loaded.parts) == (0, 0, [])
        assert tuple(loaded.blocks.shape) == (0, *LAYOUT.block_shape)
        out = np.empty((3, *LAYOUT.block_shape), dtype=np.float32)
        loaded = cache.load(cache.lookup(TOKENS), out=out).result()
        assert loaded.blocks.shape == (0, *LAYOUT.block_shape)


def test_what_is_gone_since_the_lookup_makes_a_load_shorter():
    with open_cache(None) as cache:
        store(cache, TOKENS)
        match = cache.lookup(TOKENS)
        assert cache.invalidate(TOKENS[:16]) == 2
        with cache.load(match).result() as loaded:
            assert loaded.block_count == 3
            assert bits(loaded.blocks) == bits(blocks_of(TOKENS)[:3])


# -- partial tails, extra ---------------------------------------------------------------------------------------------


def test_a_partial_tail_matches_whole_only_and_is_never_written_down(tmp_path):
    tokens = prompt(1, 2, tail=3)
    rows = np.random.default_rng(3).normal(size=(3, *LAYOUT.block_shape)).astype(np.float32)
    with open_cache(tmp_path) as cache:
        ticket = cache.store(tokens, rows, partial_tail=True)
        assert (ticket.accepted, ticket.wait(WAIT_S)) == (3, True)
        match = cache.lookup(tokens, partial_tail=True)
        assert (match.blocks, match.tokens, match.diverged_at) == (3, 11, None)
        with cache.load(match).result() as loaded:
            assert (loaded.block_count, loaded.tokens) == (3, 11)
            assert bits(loaded.blocks) == rows.tobytes()
        assert cache.lookup(tokens).blocks == 2
        assert cache.lookup(tokens[:-1], partial_tail=True).blocks == 2
        assert cache.lookup(np.append(tokens, 9).astype(np.int32), partial_tail=True).blocks == 2
        assert cache.flush(to="nvme")
        assert cache.stats().tiers[1].held == 2
        assert cache.check() == []
    with open_cache(tmp_path) as cache:
        assert cache.lookup(tokens, partial_tail=True).blocks == 2


def test_tenants_never_share(tmp_path):
    extras = [None, "a", "b", b"a", "", ["a", None], [None, "a"], ["a", "a"]]
    tokens = prompt(1, 2)
    for _ in range(2):  # the second time from NVMe
        with open_cache(tmp_path) as cache:
            for i, extra in enumerate(extras):
                if cache.lookup(tokens, extra).blocks < 2:
                    rows = np.full((2, *LAYOUT.block_shape), i, dtype=np.float32)
                    cache.store(tokens, rows, extra=extra).wait(WAIT_S)
            for i, extra in enumerate(extras):
                expected = {7: 1}.get(i, i)  # one "a" per block is the same as "a" for all
                with cache.load(cache.lookup(tokens, extra)).result(WAIT_S) as loaded:
                    assert loaded.block_count == 2
                    assert (np.asarray(loaded.blocks)[1] == expected).all()
            assert cache.lookup(tokens, "c").blocks == 0
            assert cache.invalidate(tokens, extra="b") == 1
            assert cache.lookup(tokens, "b").blocks == 1
            assert cache.lookup(tokens, "a").blocks == 2
            cache.invalidate(tokens[:4], extra="b")
            rows = np.full((2, *LAYOUT.block_shape), 2, dtype=np.float32)
            cache.store(tokens, rows, extra="b").wait(WAIT_S)
            assert cache.check() == []


# -- tiers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["hbm dram", "hbm dram nvme", "hbm nvme", "hbm", "dram"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_stack_of_tiers_gives_back_what_it_took(tmp_path, shape, dtype):
    made = {"hbm": HBM(8 * SLOT, "cpu"), "dram": DRAM(16 * SLOT), "nvme": nvme(tmp_path, 64)}
    tiers = [made[name] for name in shape.split()]
    layout = KVLayout((3, 50), dtype)
    total = sum(tier.size_nbytes // SLOT for tier in tiers)
    rows = {}
    with TieredKVCache(tiers, namespace="m", block_tokens=BLOCK_TOKENS) as cache:
        for i in range(min(10, total // 4)):
            tokens = prompt(i, i + 100, i + 200)
            rows[i] = torch.randn((3, 3, 50)).to(getattr(torch, dtype))
            for _ in range(4):  # the first is cut where room must be made by copies; it makes room for the next
                there = cache.lookup(tokens).blocks
                assert cache.store(tokens, rows[i][there:], there).wait(WAIT_S)
                assert cache.flush(WAIT_S)
            assert cache.lookup(tokens).blocks == 3
        for _ in range(2):
            found = 0
            for i, expected in rows.items():
                tokens = prompt(i, i + 100, i + 200)
                with cache.load(cache.lookup(tokens)).result(WAIT_S) as loaded:
                    found += loaded.block_count
                    assert isinstance(loaded.blocks, torch.Tensor)
                    assert loaded.blocks.dtype == expected.dtype
                    assert bits(loaded.blocks) == bits(expected[: loaded.block_count])
            assert cache.flush(WAIT_S)
            assert is_clean(cache)
            if len(tiers) > 1:
                assert found > 8, "nothing came back from below"
        assert cache.layout == layout
    if "nvme" in shape:
        with TieredKVCache(tiers, namespace="m", block_tokens=BLOCK_TOKENS) as cache:
            for i, expected in rows.items():
                with cache.load(cache.lookup(prompt(i, i + 100, i + 200))).result(WAIT_S) as loaded:
                    assert loaded.block_count == 3
                    assert bits(loaded.blocks) == bits(expected)


class DeviceMemory(WrappedTier):
    """A tier whose memory the host cannot see, as a GPU's: no slab, slots shown as tensors."""

    def slots_view(self, begin, end):
        return self.inner.slots_view(begin, end)


@pytest.mark.parametrize("below", [True, False])
def test_level_0_that_the_host_cannot_see(tmp_path, below):
    tiers = [HBM(10 * SLOT, "cpu"), nvme(tmp_path, 64)] if below else [HBM(10 * SLOT, "cpu")]
    seams = Seams(wrap_tier=lambda tier: tier if tier.verifies else DeviceMemory(tier))
    layout = KVLayout((3, 50), "bfloat16")
    rows = torch.randn((N, 3, 50)).to(torch.bfloat16)
    with TieredKVCache(tiers, layout, "m", block_tokens=BLOCK_TOKENS, seams=seams) as cache:
        put(cache, rows)
        assert cache.flush(WAIT_S, to="nvme" if below else None)
        loaded = cache.load(cache.lookup(TOKENS)).result(WAIT_S)
        assert loaded.blocks.dtype == torch.bfloat16
        assert bits(loaded.blocks) == bits(rows)
        out = torch.zeros_like(rows)
        assert cache.load(cache.lookup(TOKENS), out=out).result(WAIT_S).block_count == N
        assert torch.equal(out, rows)
    assert bits(loaded.parts[0]) == bits(rows), "what is loaded outlives the tier"
    loaded.release()
    if below:
        with TieredKVCache(tiers, layout, "m", block_tokens=BLOCK_TOKENS, seams=seams) as cache:
            with cache.load(cache.lookup(TOKENS)).result(WAIT_S) as loaded:
                assert bits(loaded.blocks) == bits(rows)
            assert is_clean(cache)


def test_prefetch_brings_blocks_up_and_holds_none(tmp_path):
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
    with open_cache(tmp_path) as cache:
        match = cache.lookup(TOKENS)
        assert match.by_tier == {"dram": 0, "nvme": N}
        future = cache.prefetch(match)
        assert future.result(WAIT_S).block_count == N
        assert cache.lookup(TOKENS).by_tier == {"dram": N, "nvme": 0}
        assert is_clean(cache)


def test_any_number_of_requests_may_hold_one_prefix():
    with open_cache(None, dram_slots=8) as cache:
        store(cache, TOKENS[:12])
        store(cache, prompt(20, 21, 22))
        held = [cache.load(cache.lookup(TOKENS)).result(WAIT_S) for _ in range(6)]
        pins = [cache.pin(cache.lookup(TOKENS)) for _ in range(6)]
        assert [loaded.block_count for loaded in held] == [pin.blocks for pin in pins] == [3] * 6
        with cache.load(cache.lookup(prompt(20, 21, 22))).result(WAIT_S) as loaded:
            assert loaded.block_count == 1, "at most half of a tier is held"
        for each in held:
            assert bits(each.blocks) == bits(blocks_of(TOKENS)[:3])
            each.release()
        assert cache.check() == []
        for pin in pins:
            cache.unpin(pin)
        assert read(cache, prompt(20, 21, 22)) == 3
        assert is_clean(cache)


def test_pins_keep_blocks_where_they_are(tmp_path):
    with open_cache(None, dram_slots=8) as cache:
        store(cache, TOKENS[:12])
        pin = cache.pin(cache.lookup(TOKENS))
        assert (pin.blocks, "ended" in repr(pin)) == (3, False)
        for i in range(20, 40):
            store(cache, prompt(i, i + 50))
            assert cache.check() == []
        assert read(cache, TOKENS) in (1, 3)
        assert cache.lookup(TOKENS).blocks == 3
        other = next(part for part in range(39, 20, -1) if cache.lookup(prompt(part)).blocks)
        second = cache.pin(cache.lookup(prompt(other, other + 50)))
        assert second.blocks == 1, "at most half of a tier is held"
        cache.unpin(second)
        cache.unpin(pin)
        cache.unpin(pin)
        assert "ended" in repr(pin)
        for i in range(40, 60):
            store(cache, prompt(i, i + 50))
        assert cache.lookup(TOKENS).blocks <= 1
