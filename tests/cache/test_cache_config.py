"""Making a cache: settings, switches, the layout of a directory, and what is refused."""

import json
import logging
import threading

import numpy as np
import pytest
from cache_kit import (
    BLOCK_TOKENS,
    LAYOUT,
    SLOT,
    WAIT_S,
    blocks_of,
    is_clean,
    nvme,
    open_cache,
    prompt,
    read,
    store,
)

import tiercache.cache_life
from tiercache import DRAM, HBM, ConfigError, KVLayout, LayoutError, Namespace, NVMe, TieredKVCache

TOKENS = prompt(1, 2, 3)


# -- refused ----------------------------------------------------------------------------------------------------------


def test_dram_above_the_limit_says_what_fits():
    with pytest.raises(ConfigError, match=r"at most .*GiB fits \(85% of .*make DRAM smaller"):
        TieredKVCache(["dram:100TiB"])
    with pytest.raises(ConfigError, match="at most"):
        TieredKVCache(["hbm:cpu:50TiB", "dram:50TiB"])


def test_hbm_without_cuda_names_the_cpu(tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for tiers in ([HBM("1MiB"), DRAM("1MiB")], ["hbm:1MiB", f"nvme:{tmp_path}/kv:1MiB"]):
        with pytest.raises(ConfigError, match='device="cpu"'):
            TieredKVCache(tiers)
    assert not (tmp_path / "kv").exists(), "a refused start left a directory"


def test_hbm_without_torch_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(ConfigError, match=r"pip install tiercache\[hbm\]"):
        TieredKVCache(["hbm:cpu:1MiB"])


@pytest.mark.parametrize(
    ("tiers", "match"),
    [
        ([], "fastest first"),
        ("dram:8GiB", "fastest first"),
        (["dram:8G"], "ambiguous"),
        (["dram:1MiB", "hbm:cpu:1MiB"], "fast to slow"),
        (["dram:1MiB", "dram:1MiB"], "once"),
        (["drma:1MiB"], "did you mean dram"),
        (["dram:1MiB", "rdma://host:7"], "one of mooncake://, redis://"),
        ([DRAM("1MiB"), 7], "a tier object"),
    ],
)
def test_wrong_tiers(tiers, match):
    with pytest.raises(ConfigError, match=match):
        TieredKVCache(tiers)


def test_nvme_alone_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="add a tier in memory above NVMe"):
        TieredKVCache([nvme(tmp_path, 8)])
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("policy", "fifo"), ("block_tokens", 0), ("exclusive", "yes"), ("switch", "maybe"), ("epoch", b""), ("layout", 3)],
)
def test_wrong_settings_name_the_field(setting, value):
    with pytest.raises(ConfigError, match=setting):
        TieredKVCache([DRAM("1MiB")], **{setting: value})


def test_a_tier_that_holds_no_block(tmp_path):
    layout = KVLayout((5000,), "uint8")
    for tiers, name in (
        ([DRAM(SLOT)], "DRAM.size"),
        ([DRAM(8 * SLOT), NVMe(tmp_path / "kv", SLOT)], "NVMe.size"),
    ):
        with pytest.raises(ConfigError, match=f"{name}.*one block takes 8KiB"):
            TieredKVCache(tiers, layout=layout)
        with TieredKVCache(tiers, block_tokens=1) as cache:  # not known before the first store
            with pytest.raises(ConfigError, match=f"{name}.*one block takes 8KiB"):
                cache.store([1], np.zeros((1, 5000), dtype=np.uint8))
            ticket = cache.store([1], np.zeros((1, 4096), dtype=np.uint8))
            assert ticket.wait(WAIT_S)
            assert ticket.stored == 1


def test_a_refused_start_leaves_the_directory_free(tmp_path):
    with pytest.raises(ConfigError):
        open_cache(tmp_path, layout=KVLayout((1 << 20,), "uint8"))
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)


# -- the layout of a directory ----------------------------------------------------------------------------------------


def test_the_layout_is_learnt_from_the_directory(tmp_path):
    with open_cache(tmp_path, layout=None) as cache:
        assert cache.layout is None
        store(cache, TOKENS)
        assert cache.layout == LAYOUT
    with open_cache(tmp_path, layout=None) as cache:
        assert cache.layout == LAYOUT
        assert cache.lookup(TOKENS).blocks == 3
        with pytest.raises(LayoutError):
            cache.store(TOKENS, np.zeros((3, 7), dtype=np.float32))
        assert read(cache, TOKENS) == 3


def test_two_first_stores_of_different_shapes_race(tmp_path):
    for i in range(6):
        shapes = [(8,), (2, 4), (16,), (8,)]
        start = threading.Barrier(len(shapes))
        outcomes = [None] * len(shapes)
        with TieredKVCache([DRAM(16 * SLOT), nvme(tmp_path / str(i), 16)], block_tokens=1, namespace="m") as cache:

            def first(k, shapes=shapes, start=start, outcomes=outcomes, cache=cache):
                rows = np.full((2, *shapes[k]), k, dtype=np.uint8)
                start.wait()
                try:
                    outcomes[k] = cache.store([k, k], rows)
                except LayoutError as error:
                    outcomes[k] = error

            threads = [threading.Thread(target=first, args=(k,)) for k in range(len(shapes))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(WAIT_S)
            assert cache.layout is not None
            for k, (shape, outcome) in enumerate(zip(shapes, outcomes, strict=True)):
                if shape == cache.layout.block_shape:
                    assert outcome.wait(WAIT_S)
                    with cache.load(cache.lookup([k, k])).result(WAIT_S) as loaded:
                        assert loaded.block_count == 2
                        assert (np.asarray(loaded.blocks) == k).all()
                else:
                    assert isinstance(outcome, LayoutError), outcome
                    assert cache.lookup([k, k]).blocks == 0
            assert cache.check() == []


def test_a_new_epoch_during_the_first_store_is_not_missed(monkeypatch):
    building, go_on = threading.Event(), threading.Event()
    build = tiercache.cache_life.build_stack

    def slow_build(*args):
        building.set()
        assert go_on.wait(WAIT_S)
        return build(*args)

    monkeypatch.setattr(tiercache.cache_life, "build_stack", slow_build)
    with TieredKVCache([DRAM(16 * SLOT)], block_tokens=BLOCK_TOKENS, epoch="one") as cache:
        first = threading.Thread(target=store, args=(cache, TOKENS))
        first.start()
        assert building.wait(WAIT_S)
        bump = threading.Thread(target=cache.bump_epoch, args=("two",))
        bump.start()
        bump.join(0.05)
        go_on.set()
        first.join(WAIT_S)
        bump.join(WAIT_S)
        assert cache.epoch == cache.stack.planner.epoch == b"two"
        store(cache, TOKENS, version=1)
        assert read(cache, TOKENS, version=1) == 3 or read(cache, TOKENS) == 3


# -- ways to write it down --------------------------------------------------------------------------------------------


def test_from_config(tmp_path):
    values = {
        "tiers": [f"dram:{32 * SLOT}", {"kind": "nvme", "path": str(tmp_path / "kv"), "size": 64 * SLOT}],
        "layout": {"block_shape": [2, 32], "dtype": "float32"},
        "namespace": {"model": "m", "tp": 2},
        "block_tokens": BLOCK_TOKENS,
        "epoch": "weights-1",
    }
    (tmp_path / "cache.json").write_text(json.dumps(values))
    (tmp_path / "cache.toml").write_text(
        f'tiers = ["dram:{32 * SLOT}", "nvme:{tmp_path}/kv:{64 * SLOT}"]\n'
        f'block_tokens = {BLOCK_TOKENS}\nepoch = "weights-1"\nnamespace = {{ tp = 2, model = "m" }}\n'
    )
    with TieredKVCache.from_config(values) as cache:
        store(cache, TOKENS)
        assert cache.epoch == b"weights-1"
        assert cache.stats().namespace == str(Namespace.of(model="m", tp=2))
    for name in ("cache.json", "cache.toml"):
        with TieredKVCache.from_config(tmp_path / name) as cache:
            assert read(cache, TOKENS) == 3
            assert cache.layout == LAYOUT
    with pytest.raises(ConfigError, match="did you mean block_tokens"):
        TieredKVCache.from_config({**values, "block_token": 4})
    with pytest.raises(ConfigError, match="cannot be read"):
        TieredKVCache.from_config(tmp_path / "none.toml")


def test_without_a_namespace_the_directory_is_the_identity(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="tiercache"):
        with open_cache(tmp_path, namespace=None) as cache:
            assert cache.stats().namespace == ""
            store(cache, TOKENS)
        assert "use this directory for one model only" in caplog.text
    with open_cache(tmp_path, namespace=None) as cache:
        assert read(cache, TOKENS) == 3
    with open_cache(tmp_path, namespace="m") as cache:
        assert cache.lookup(TOKENS).blocks == 0
        assert cache.stats().directory["cold_reason"] == "namespace"


def test_repr_says_the_state(tmp_path):
    cache = open_cache(tmp_path, layout=None)
    assert repr(cache) == "TieredKVCache(DRAM, NVMe; open, layout not known yet)"
    store(cache, TOKENS)
    assert repr(cache) == "TieredKVCache(DRAM, NVMe; open)"
    assert "accepted 3" not in repr(store(cache, TOKENS))
    with cache.load(cache.lookup(TOKENS)).result() as loaded:
        assert repr(loaded) == "Loaded(3 blocks, 12 tokens, held)"
    assert "released" in repr(loaded)
    cache.close()
    assert repr(cache) == "TieredKVCache(DRAM, NVMe; closed)"


# -- the kill switch --------------------------------------------------------------------------------------------------

SWITCHES = {"on": (True, True), "off": (False, False), "loads-off": (False, True), "stores-off": (True, False)}


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("how", ["environment", "argument", "run time"])
def test_the_kill_switch(tmp_path, monkeypatch, switch, how):
    loads, stores = SWITCHES[switch]
    with open_cache(tmp_path) as cache:
        store(cache, TOKENS)
        old_match = None
    if how == "environment":
        monkeypatch.setenv("TIERCACHE", switch.upper())
    with open_cache(tmp_path, **({"switch": switch} if how == "argument" else {})) as cache:
        if how == "run time":
            old_match = cache.lookup(TOKENS)
            assert old_match.blocks == 3
            cache.switch = switch
        assert (cache.switch, cache.loads_enabled, cache.stores_enabled) == (switch, loads, stores)
        assert cache.stats().switch == switch
        match = cache.lookup(TOKENS)
        assert match.blocks == (3 if loads else 0)
        out = np.empty((3, *LAYOUT.block_shape), dtype=np.float32)
        for each in (match, old_match or match):
            with cache.load(each).result(WAIT_S) as loaded:
                assert loaded.block_count == (3 if loads else 0)
            assert cache.load(each, out=out).result(WAIT_S).block_count == (3 if loads else 0)
        other = prompt(7, 8)
        ticket = cache.store(other, blocks_of(other))
        assert ticket.wait(WAIT_S)
        assert (ticket.accepted, ticket.reason) == ((2, "") if stores else (0, "stores_off"))
        with pytest.raises(ValueError, match="blocks for"):
            cache.store(other, blocks_of(other)[:1])
        cache.switch = "on"
        assert cache.lookup(other).blocks == (2 if stores else 0)
        assert read(cache, TOKENS) == 3
        assert is_clean(cache)
        with pytest.raises(ConfigError, match="switch"):
            cache.switch = "halfway"


def test_a_wrong_switch_in_the_environment_is_told(monkeypatch):
    monkeypatch.setenv("TIERCACHE", "offf")
    with pytest.raises(ConfigError, match=r"TIERCACHE.*did you mean off"):
        TieredKVCache([DRAM("1MiB")])


def test_switched_off_no_memory_is_taken(monkeypatch):
    built = []
    monkeypatch.setattr(tiercache.cache_life, "build_stack", lambda *args: built.append(args))
    with TieredKVCache([DRAM("1MiB")], block_tokens=BLOCK_TOKENS, switch="off") as cache:
        assert cache.store(TOKENS, blocks_of(TOKENS)).reason == "stores_off"
        with pytest.raises(LayoutError):
            cache.store(TOKENS, "none")
        assert built == []
