"""Never a wrong byte: payload files and catalogs damaged, swapped, put back; against the real files."""

import os
import shutil

import numpy as np
import pytest
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    SLOT,
    WAIT_S,
    bits,
    blocks_of,
    is_clean,
    open_cache,
    prompt,
    read,
    store,
)

from tiercache import KVLayout

TOKENS = prompt(1, 2, 3, 4, 5, 6)
N = 6


def warm(path, tokens=TOKENS, **settings):
    """A closed directory that holds these blocks, in the slots of their numbers."""
    with open_cache(path, **settings) as cache:
        store(cache, tokens)
        assert cache.flush(WAIT_S, to="nvme")
        slots = cache.stack.planner.state.residency.index.root.children
        assert next(iter(slots.values())).slots[:, 1].tolist() == list(range(len(tokens) // BLOCK_TOKENS))


def payload(path):
    return path / "kv" / "slots-00.dat"


def overwrite(path, offset, data):
    with payload(path).open("r+b") as file:
        file.seek(offset)
        file.write(data)
        os.fsync(file.fileno())


def slot_bytes(path, slot):
    with payload(path).open("rb") as file:
        file.seek(slot * SLOT)
        return file.read(SLOT)


def flip(path, slot, byte, bit=0):
    old = slot_bytes(path, slot)[byte]
    overwrite(path, slot * SLOT + byte, bytes([old ^ 1 << bit]))


def heal_and_check(path, cache, good, tokens=TOKENS):
    """A load brings the blocks before the damage; a store fills the hole; it is right then, and after a restart."""
    match = cache.lookup(tokens)
    with cache.load(match).result(WAIT_S) as loaded:
        assert loaded.block_count == good
        assert bits(loaded.blocks) == bits(blocks_of(tokens)[:good])
    n = len(tokens) // BLOCK_TOKENS
    again = cache.lookup(tokens)
    assert (again.blocks, again.pending) == (good, 0)
    assert cache.check() == []
    if good < n:
        assert cache.stats().tiers[1].checksum_failures + cache.stats().tiers[1].io_errors > 0
        ticket = cache.store(tokens, blocks_of(tokens, good), start=good)
        assert ticket.wait(WAIT_S)
        assert ticket.accepted >= 1
        assert ticket.accepted + ticket.present == n - good
    found = read(cache, tokens)
    while found < n:  # a second wrong block behind the first is found when it is reached
        store(cache, tokens, start=found)
        assert read(cache, tokens) > found
        found = read(cache, tokens)
    assert cache.flush(WAIT_S, to="nvme")
    assert is_clean(cache)
    cache.close()
    with open_cache(path) as cache:
        assert read(cache, tokens) == n
        assert is_clean(cache)
        assert cache.stats().tiers[1].checksum_failures == 0


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "while open"])
@pytest.mark.parametrize(
    ("slot", "byte", "bit"),
    [(0, 0, 0), (3, 0, 7), (3, 255, 0), (3, 128, 3), (5, 17, 5), (5, 254, 6)],
)
def test_a_flipped_bit_is_a_miss_and_heals(tmp_path, opened, slot, byte, bit):
    warm(tmp_path)
    if not opened:
        flip(tmp_path, slot, byte, bit)
    with open_cache(tmp_path) as cache:
        assert cache.lookup(TOKENS).blocks == N
        if opened:
            flip(tmp_path, slot, byte, bit)
        heal_and_check(tmp_path, cache, slot)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_bit_of_a_slot(tmp_path):
    tokens = prompt(1)
    warm(tmp_path, tokens)
    for bit in range(LAYOUT.block_nbytes * 8):
        with open_cache(tmp_path, nvme={"durability": "process"}) as cache:
            flip(tmp_path, 0, bit // 8, bit % 8)
            assert read(cache, tokens) == 0
            assert cache.stats().tiers[1].checksum_failures == 1
            flip(tmp_path, 0, bit // 8, bit % 8)


def test_a_flip_in_the_padding_of_a_slot_changes_nothing(tmp_path):
    warm(tmp_path)
    for byte in (LAYOUT.block_nbytes, SLOT - 1):
        flip(tmp_path, 2, byte)
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == N
        assert cache.stats().tiers[1].checksum_failures == 0


def test_a_flip_seen_by_a_load_into_out(tmp_path):
    warm(tmp_path)
    flip(tmp_path, 2, 9)
    with open_cache(tmp_path) as cache:
        out = np.zeros((N, *LAYOUT.block_shape), dtype=np.float32)
        loaded = cache.load(cache.lookup(TOKENS), out=out).result(WAIT_S)
        assert loaded.block_count == 2
        assert bits(loaded.blocks) == bits(blocks_of(TOKENS)[:2])
        assert cache.lookup(TOKENS).blocks == 2
        assert cache.check(fix=True) == []
        assert cache.lookup(TOKENS).diverged_at == 2 * BLOCK_TOKENS, "with fix the hole and what is behind it go"
        assert store(cache, TOKENS, start=2).accepted == 4
        assert read(cache, TOKENS) == N


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "while open"])
@pytest.mark.parametrize("kept", [0, 3 * SLOT, 3 * SLOT + 100, 5 * SLOT])
def test_a_truncated_payload_file(tmp_path, opened, kept):
    warm(tmp_path)
    if not opened:
        os.truncate(payload(tmp_path), kept)
    with open_cache(tmp_path) as cache:
        if opened:
            os.truncate(payload(tmp_path), kept)
        heal_and_check(tmp_path, cache, kept // SLOT)


def test_a_payload_file_that_is_gone(tmp_path):
    warm(tmp_path)
    payload(tmp_path).unlink()
    with open_cache(tmp_path) as cache:
        heal_and_check(tmp_path, cache, 0)


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "while open"])
@pytest.mark.parametrize(("a", "b"), [(0, 1), (2, 5)])
def test_swapped_slots(tmp_path, opened, a, b):
    warm(tmp_path)
    old = slot_bytes(tmp_path, a), slot_bytes(tmp_path, b)

    def swap():
        overwrite(tmp_path, a * SLOT, old[1])
        overwrite(tmp_path, b * SLOT, old[0])

    if not opened:
        swap()
    with open_cache(tmp_path) as cache:
        if opened:
            swap()
        heal_and_check(tmp_path, cache, a)


@pytest.mark.parametrize("opened", [False, True], ids=["closed", "while open"])
def test_a_slot_of_an_earlier_life(tmp_path, opened):
    """The very bytes that this slot held before, of a block that was cached then, come back."""
    warm(tmp_path, prompt(11, 12, 13, 14, 15, 16))
    old = [slot_bytes(tmp_path, slot) for slot in range(N)]
    with open_cache(tmp_path) as cache:
        cache.invalidate([])
    warm(tmp_path)
    if not opened:
        overwrite(tmp_path, 3 * SLOT, old[3])
    with open_cache(tmp_path) as cache:
        if opened:
            overwrite(tmp_path, 3 * SLOT, old[3])
        assert cache.lookup(prompt(11, 12, 13, 14)).blocks == 0
        heal_and_check(tmp_path, cache, 3)


def test_the_same_block_of_an_earlier_epoch(tmp_path):
    """The same tokens and the same payload size, under other weights: same slot, other bytes."""
    warm(tmp_path, epoch="one")
    old = [slot_bytes(tmp_path, slot) for slot in range(N)]
    with open_cache(tmp_path, epoch="two") as cache:
        assert cache.lookup(TOKENS).blocks == 0
        store(cache, TOKENS, version=1)
        assert cache.flush(WAIT_S, to="nvme")
    for slot in range(N):
        overwrite(tmp_path, slot * SLOT, old[slot])
    with open_cache(tmp_path, epoch="two") as cache:
        assert cache.lookup(TOKENS).blocks == N
        assert read(cache, TOKENS, version=1) == 0
        assert cache.check() == []


def test_an_older_catalog_is_put_back(tmp_path):
    warm(tmp_path, prompt(11, 12, 13, 14, 15, 16))
    files = ["catalog/data.mdb", "clean", "epoch"]
    old = {name: (tmp_path / "kv" / name).read_bytes() for name in files if (tmp_path / "kv" / name).exists()}
    with open_cache(tmp_path) as cache:
        cache.invalidate([])
    warm(tmp_path)
    for name, data in old.items():
        (tmp_path / "kv" / name).write_bytes(data)
    with open_cache(tmp_path) as cache:
        assert cache.check() == []
        tokens = prompt(11, 12, 13, 14, 15, 16)
        assert cache.lookup(TOKENS).blocks == 0
        assert read(cache, tokens) == 0, "bytes of other prompts were served"
        store(cache, tokens)
        assert read(cache, tokens) == N
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
    with open_cache(tmp_path) as cache:
        assert read(cache, tokens) == N


def test_an_older_catalog_of_an_earlier_epoch_is_put_back(tmp_path):
    warm(tmp_path)
    old = (tmp_path / "kv/catalog/data.mdb").read_bytes()
    with open_cache(tmp_path) as cache:
        cache.bump_epoch()
        store(cache, TOKENS, version=1)
        assert cache.flush(WAIT_S, to="nvme")
    (tmp_path / "kv/catalog/data.mdb").write_bytes(old)
    with open_cache(tmp_path) as cache:
        assert cache.stats().directory["cold_reason"] == "epoch"
        assert read(cache, TOKENS) == 0


@pytest.mark.parametrize("damage", ["garbage", "empty", "half", "flips"])
def test_a_damaged_catalog_is_set_aside(tmp_path, damage):
    warm(tmp_path)
    file = tmp_path / "kv/catalog/data.mdb"
    data = bytearray(file.read_bytes())
    if damage == "garbage":
        data = bytearray(os.urandom(len(data)))
    elif damage == "empty":
        data = bytearray()
    elif damage == "half":
        data = data[: len(data) // 2]
    else:
        for at in range(0, 12 * SLOT, 61):
            data[at] ^= 0x10
    file.write_bytes(bytes(data))
    with open_cache(tmp_path) as cache:
        assert cache.check() == []
        read(cache, TOKENS)
        store(cache, TOKENS)
        assert read(cache, TOKENS) == N
        assert cache.flush(WAIT_S, to="nvme")
    with open_cache(tmp_path) as cache:
        assert read(cache, TOKENS) == N


@pytest.mark.parametrize("what", ["namespace", "layout", "block_tokens"])
def test_what_was_stored_as_something_else(tmp_path, what):
    """Another model, another dtype of the same size, another block size: no hit, and no byte of it."""
    warm(tmp_path)
    other = {
        "namespace": {"namespace": "another"},
        "layout": {"layout": KVLayout((2, 32), "int32")},
        "block_tokens": {"block_tokens": 2 * BLOCK_TOKENS},
    }[what]
    with open_cache(tmp_path, **other) as cache:
        assert cache.lookup(TOKENS).blocks == 0
        assert cache.stats().directory["cold_reason"] in (what, "layout")
        assert cache.check() == []
        assert cache.stats().blocks == 0


@pytest.mark.parametrize("what", ["namespace", "layout"])
def test_payload_of_a_twin_directory(tmp_path, what):
    """The payload file of a directory that differs in one thing only, with the same tokens in the same slots."""
    other = {"namespace": {"namespace": "another"}, "layout": {"layout": KVLayout((2, 32), "int32")}}[what]
    warm(tmp_path / "a", epoch="weights")
    with open_cache(tmp_path / "b", epoch="weights", **other) as cache:
        rows = blocks_of(TOKENS, version=1)
        cache.store(TOKENS, np.asarray(rows).view(np.int32) if what == "layout" else rows).wait(WAIT_S)
        assert cache.flush(WAIT_S, to="nvme")
    shutil.copy(payload(tmp_path / "b"), payload(tmp_path / "a"))
    with open_cache(tmp_path / "a", epoch="weights") as cache:
        assert cache.lookup(TOKENS).blocks == N
        assert read(cache, TOKENS) == 0
        assert cache.check() == []


def test_files_are_for_the_owner_only(tmp_path):
    old = os.umask(0)
    try:
        warm(tmp_path)
    finally:
        os.umask(old)
    for path in (tmp_path / "kv").rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700


def test_reopened_five_times(tmp_path):
    """What was stored is there each time, and the files do not grow."""
    used = set()
    for life in range(5):
        with open_cache(tmp_path, dram_slots=64) as cache:
            for part in range(life):
                assert read(cache, prompt(part + 1, part + 101)) == 2
            store(cache, prompt(life + 1, life + 101))
        used.add(sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").rglob("*")))
    assert max(used) - min(used) <= SLOT
    assert payload(tmp_path).stat().st_size == 64 * SLOT
