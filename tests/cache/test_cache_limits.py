"""Full disks, failing disks, many threads: accounting stays exact, and every byte is right."""

import errno
import random
import threading
import time

import numpy as np
import pytest
from cache_kit import (
    LAYOUT,
    SLOT,
    WAIT_S,
    bits,
    blocks_of,
    crash_image,
    eventually,
    is_clean,
    open_cache,
    prompt,
    read,
    store,
)

from tiercache import ConfigError
from tiercache.assembly import Seams
from tiercache.tiers.fileio import OsFiles


class BrokenFiles(OsFiles):
    """File operations that fail with an errno, by name, while the test says so."""

    def __init__(self):
        self.broken = {}
        self.free = None

    def _check(self, name):
        number = self.broken.get(name)
        if number is not None:
            raise OSError(number, "injected")

    def pwritev(self, fd, buffers, offset):
        self._check("pwritev")
        return super().pwritev(fd, buffers, offset)

    def preadv(self, fd, buffers, offset):
        self._check("preadv")
        return super().preadv(fd, buffers, offset)

    def fdatasync(self, fd):
        self._check("fdatasync")
        super().fdatasync(fd)

    def fallocate(self, fd, nbytes):
        self._check("fallocate")
        super().fallocate(fd, nbytes)

    def free_nbytes(self, path):
        return super().free_nbytes(path) if self.free is None else self.free


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead


@pytest.mark.parametrize(
    ("op", "number"), [("pwritev", errno.ENOSPC), ("pwritev", errno.EIO), ("fdatasync", errno.EIO)]
)
def test_a_disk_that_takes_no_more_and_then_does(tmp_path, op, number):
    files, clock = BrokenFiles(), Clock()
    prompts = [prompt(part, part + 100) for part in range(1, 41)]
    with open_cache(tmp_path, dram_slots=16, nvme_slots=128, clock=clock, seams=Seams(file_ops=files)) as cache:
        store(cache, prompts[0])
        assert cache.flush(WAIT_S, to="nvme")
        files.broken[op] = number
        for tokens in prompts[1:20]:
            ticket = store(cache, tokens)
            assert ticket.accepted + ticket.present <= 2
            assert cache.check() == []
        assert cache.flush(0.5, to="nvme") is False
        assert store(cache, prompt(500)).accepted == 1, "stores go on without the disk"
        read(cache, prompts[0])
        stats = cache.stats()
        assert all(tier.free + tier.held + tier.lost == tier.capacity for tier in stats.tiers)
        if op == "pwritev":
            assert stats.tiers[1].failed_writes > 0
            assert stats.tiers[1].held == 2, "what could not be written takes no slot"
        else:
            assert stats.mover["commit_failures"] > 0
            assert stats.directory["catalog_healthy"] is False
        files.broken.clear()
        clock.ahead += 60
        for tokens in prompts[20:]:
            there = cache.lookup(tokens).blocks
            while there < 2:
                store(cache, tokens, start=there)
                assert cache.flush(WAIT_S)
                there = cache.lookup(tokens).blocks
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)
        stats = cache.stats()
        assert stats.tiers[1].held == stats.blocks
        assert stats.directory["catalog_healthy"] is True
        image = crash_image(tmp_path, tmp_path / "crashed")
        expected = {i: cache.lookup(tokens).blocks for i, tokens in enumerate(prompts)}
        assert all(expected[i] == 2 for i in range(20, 40))
    for place in (tmp_path, image):
        with open_cache(place, dram_slots=16, nvme_slots=128) as cache:
            assert {i: read(cache, tokens) for i, tokens in enumerate(prompts)} == expected
            assert is_clean(cache)


def test_too_little_space_at_the_start_says_what_is_free(tmp_path):
    files = BrokenFiles()
    files.free = 10 * SLOT
    with pytest.raises(ConfigError, match=r"bytes are needed .* are free"):
        open_cache(tmp_path, nvme_slots=100_000, seams=Seams(file_ops=files))
    files.free = None
    files.broken["fallocate"] = errno.ENOSPC
    with pytest.raises(ConfigError, match=r"the catalog needs .* are free"):
        open_cache(tmp_path, seams=Seams(file_ops=files))
    with open_cache(tmp_path) as cache:
        store(cache, prompt(1))
        assert cache.flush(WAIT_S, to="nvme")


def test_where_fallocate_is_refused_it_works_with_a_remark(tmp_path):
    files = BrokenFiles()
    files.broken["fallocate"] = errno.EOPNOTSUPP
    with open_cache(tmp_path, seams=Seams(file_ops=files)) as cache:
        store(cache, prompt(1, 2))
        assert cache.flush(WAIT_S, to="nvme")
        assert any("preallocate" in remark for remark in cache.stats().directory["remarks"])
    with open_cache(tmp_path) as cache:
        assert read(cache, prompt(1, 2)) == 2


def test_reads_that_fail_are_misses(tmp_path):
    files = BrokenFiles()
    with open_cache(tmp_path) as cache:
        store(cache, prompt(1, 2))
    with open_cache(tmp_path, seams=Seams(file_ops=files)) as cache:
        files.broken["preadv"] = errno.EIO
        assert read(cache, prompt(1, 2)) == 0
        assert cache.stats().tiers[1].io_errors == 2
        assert "read" in cache.stats().directory["last_error"]
        files.broken.clear()
        store(cache, prompt(1, 2))
        assert read(cache, prompt(1, 2)) == 2
        assert cache.flush(WAIT_S, to="nvme")
        assert is_clean(cache)


@pytest.mark.parametrize("seed", range(8))
def test_when_nvme_is_smaller_than_dram_nothing_is_written_over_and_over(tmp_path, seed):
    chosen = random.Random(seed)
    fields = {"write_after_s": 0.003, "durability": "process"}
    with open_cache(tmp_path, dram_slots=8, nvme_slots=6, exclusive=False, nvme=fields) as cache:
        for _ in range(15):
            tokens = prompt(*(chosen.choice([1, 1, 1, 2, 2, 3]) for _ in range(chosen.randint(1, 7))))
            what = chosen.random()
            if what < 0.6:
                store(cache, tokens, start=cache.lookup(tokens).blocks if what < 0.3 else 0)
            elif what < 0.8:
                cache.prefetch(cache.lookup(tokens)).result(WAIT_S)
            else:
                cache.release(tokens)
        quiet = eventually(lambda: not any(tier.jobs or tier.pinned for tier in cache.stats().tiers), 2.0)
        assert quiet, "blocks go round in circles"
        assert cache.stats().tiers[1].written <= 100
        assert is_clean(cache)


def test_a_directory_that_grows_and_shrinks(tmp_path):
    prompts = [prompt(part, part + 100) for part in range(1, 17)]
    with open_cache(tmp_path, dram_slots=64, nvme_slots=48) as cache:
        for tokens in prompts:
            store(cache, tokens)
    for slots, kept in ((96, 32), (20, 20), (64, 20), (48, 20)):
        with open_cache(tmp_path, dram_slots=64, nvme_slots=slots) as cache:
            assert cache.stats().blocks == kept
            assert sum(read(cache, tokens) for tokens in prompts) == kept
            assert is_clean(cache)


# -- threads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["dram nvme", "hbm dram nvme", "dram"])
def test_eight_threads(tmp_path, shape):
    run_threads(tmp_path, shape, seconds=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["dram nvme", "hbm dram nvme", "dram"])
def test_eight_threads_for_longer(tmp_path, shape):
    run_threads(tmp_path, shape, seconds=20.0)


def run_threads(tmp_path, shape, seconds):
    settings = {
        "dram nvme": {"path": tmp_path, "dram_slots": 24, "nvme_slots": 96},
        "hbm dram nvme": {"path": tmp_path, "hbm_slots": 16, "dram_slots": 24, "nvme_slots": 96},
        "dram": {"path": None, "dram_slots": 24},
    }[shape]
    fields = {"write_after_s": 0.01, "durability": "process"}
    cache = open_cache(**settings, **({"nvme": fields} if settings["path"] else {}))
    prompts = [prompt(a, b, c, d) for a in (1, 2) for b in (1, 2, 3) for c in (1, 2, 3) for d in (1, 2, 3, 4)]
    payloads = [bits(blocks_of(tokens)) for tokens in prompts]
    size = LAYOUT.block_nbytes
    stop, problems = time.monotonic() + seconds, []
    counts = [0] * 8

    def work(k):
        random_of = random.Random(k)
        out = np.empty((4, *LAYOUT.block_shape), dtype=np.float32)
        held = []
        try:
            while time.monotonic() < stop:
                i = random_of.randrange(len(prompts))
                tokens, payload = prompts[i], payloads[i]
                what = random_of.random()
                match = cache.lookup(tokens)
                if what < 0.35:
                    rows = blocks_of(tokens, match.blocks)
                    ticket = cache.store(tokens, rows, start=match.blocks)
                    if what < 0.2:
                        assert ticket.wait(WAIT_S)
                    else:
                        held.append((ticket, rows))
                elif what < 0.65:
                    with cache.load(match).result(WAIT_S) as loaded:
                        got = bits(loaded.blocks)
                        assert got == payload[: loaded.block_count * size], "a wrong byte"
                        counts[k] += loaded.block_count
                        time.sleep(random_of.random() * 0.002)
                        assert bits(loaded.blocks) == got, "a block changed while it was held"
                elif what < 0.85:
                    loaded = cache.load(match, out=out).result(WAIT_S)
                    assert bits(out[: loaded.block_count]) == payload[: loaded.block_count * size], "a wrong byte"
                    counts[k] += loaded.block_count
                elif what < 0.9:
                    future = cache.load(match)
                    if not future.cancel():
                        future.result(WAIT_S).release()
                elif what < 0.95:
                    cache.release(tokens)
                elif what < 0.97:
                    pin = cache.pin(match)
                    cache.unpin(pin)
                elif what < 0.98:
                    cache.invalidate(tokens)
                elif what < 0.985 and k == 0:
                    assert cache.check() == []
                held = [each for each in held if not each[0].copied]
            for ticket, _ in held:
                assert ticket.wait(WAIT_S)
        except BaseException as error:
            problems.append(error)
            raise

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + WAIT_S)
        assert not thread.is_alive(), "a call hangs"
    assert problems == []
    assert min(counts) > 0
    assert cache.flush(WAIT_S)
    assert is_clean(cache)
    stats = cache.stats()
    assert stats.mover["unexpected_errors"] == stats.mover["delivery_errors"] == 0
    assert all(tier.checksum_failures == tier.io_errors == 0 for tier in stats.tiers)
    cache.close()
    if settings["path"]:
        with open_cache(**settings) as cache:
            assert cache.check() == []
            assert sum(read(cache, tokens) for tokens in prompts) > 0
            assert cache.stats().tiers[-1].checksum_failures == 0
