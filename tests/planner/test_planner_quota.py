"""The quota: what came from a key tier, and what was computed under it, takes no more than its share."""

import random

import numpy as np
import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.keys import symbol_nbytes
from tiercache.planner import Planner, RemoteLimits
from tiercache.policy import make_policy
from tiercache.types import JobResult, LevelSpec

REMOTE = RemoteLimits(quota=0.25)


def bench(*specs, quota=0.25, **options):
    return Bench(*specs, remote=RemoteLimits(quota=quota), **options)


def charged(each, level=0):
    each.check()
    return each.planner.quota.charged(level)


def fetched(each, prompt, out=False):
    """Load what the key tier has of a prompt; how many blocks came."""
    each.share(prompt)
    each.now += 1
    assert each.asked(prompt).blocks == len(prompt)
    load = each.load(prompt, out=out)
    each.deliver_all()
    each.release_load(load)
    return load.blocks


def requested(each, prompt, there):
    """Of a prompt, the key tier has the first `there` blocks: load them, and store the rest."""
    each.share(prompt[:there])
    each.now += 1
    assert each.asked(prompt).blocks == there
    load = each.load(prompt)
    each.deliver_all()
    plan = each.stored(prompt, start=load.blocks)
    each.release_load(load)
    return plan


def used(each, prompt):
    each.now += 1
    each.touch(prompt)


# --- the bound -------------------------------------------------------------------------------------------------------


def test_the_coldest_charged_blocks_go_first_leaf_first():
    each = bench(dram(16))
    assert fetched(each, "abc") == 3
    assert charged(each) == 3
    assert fetched(each, "xyz") == 3
    assert charged(each) == 4
    assert each.residents(0) == {"a", "x", "xy", "xyz"}
    assert each.planner.quota.evicted == 2
    each.finish()


def test_a_prompt_longer_than_the_quota_is_cut():
    each = bench(dram(16))
    assert fetched(each, "abcdefgh") == 4
    assert charged(each) == 4
    assert each.planner.quota.refused == 4
    each.finish()


def test_into_rows_it_comes_whole_and_a_part_stays():
    each = bench(dram(16))
    assert fetched(each, "abcdefgh", out=True) == 8
    assert charged(each) == 4 and each.residents(0) == {"a", "ab", "abc", "abcd"}
    assert fetched(each, "xyz", out=True) == 3
    assert charged(each) == 4 and each.residents(0) == {"a", "x", "xy", "xyz"}
    each.finish()


def test_at_least_one_block():
    each = bench(dram(3), quota=0.01)
    assert fetched(each, "ab") == 1
    assert charged(each) == 1
    each.finish()


def test_held_blocks_are_not_evicted_for_others():
    each = bench(dram(16))
    for prompt in ("abc", "xyz"):
        each.share(prompt)
        each.asked(prompt)
    held = each.load("abc")
    each.deliver_all()
    load = each.load("xyz")
    each.deliver_all()
    assert load.blocks == 1 and held.blocks == 3
    assert charged(each) == 4
    each.finish()


def test_ordinary_blocks_leave_for_the_quota_only():
    """A full level gives the key tier's blocks its share of slots, by the order of eviction, and not one more."""
    each = bench(dram(16))
    for letter in "abcdefghijklmnop":
        each.now += 1
        each.stored(letter)
    for prompt in ("qrst", "uvwx", "yzqr"):
        fetched(each, prompt)
    assert charged(each) == 4
    assert set("efghijklmnop") <= each.residents(0)
    each.finish()


# --- what is charged -------------------------------------------------------------------------------------------------


def test_blocks_stored_under_a_charged_prefix_are_charged_with_it():
    each = bench(dram(16))
    plan = requested(each, "abcdef", 2)
    assert (plan.accepted, plan.reason) == (2, "quota")
    assert charged(each) == 4
    assert fetched(each, "xy") == 2
    assert each.residents(0) == {"a", "ab", "x", "xy"}, "the deepest of the coldest path first"
    each.finish()


def test_a_store_takes_the_place_of_colder_charged_blocks():
    each = bench(dram(16))
    fetched(each, "ab")
    fetched(each, "xy")
    each.now += 1
    assert each.stored("xyz", start=2).accepted == 1
    assert each.residents(0) == {"a", "x", "xy", "xyz"} and charged(each) == 4
    each.finish()


def test_a_remote_suffix_of_a_local_prefix():
    """The local part stays ordinary, also where its run would have grown."""
    each = bench(dram(16))
    each.stored("ab")
    assert fetched(each, "abcd") == 4
    assert charged(each) == 2
    assert each.stored("abx", start=2).accepted == 1
    assert charged(each) == 2
    each.finish()


def test_a_branch_inside_a_charged_run():
    each = bench(dram(16))
    fetched(each, "abc")
    assert each.stored("abx", start=2).accepted == 1
    assert charged(each) == 4
    each.finish()


# --- becoming ordinary -----------------------------------------------------------------------------------------------


def test_used_twice_more_the_whole_path_is_ordinary():
    each = bench(dram(16))
    requested(each, "abc", 2)
    used(each, "abc")
    assert charged(each) == 3
    used(each, "abc")
    assert charged(each) == 0
    assert fetched(each, "wxyz") == 4 and charged(each) == 4
    assert each.planner.quota.ordinary == 3
    each.finish()


def test_only_what_was_used_becomes_ordinary():
    each = bench(dram(32))
    fetched(each, "abcdef")
    used(each, "abc")
    used(each, "abcd")
    assert charged(each) == 3
    used(each, "abcdef")
    assert charged(each) == 2
    used(each, "abcdef")
    assert charged(each) == 0
    each.finish()


def test_a_load_and_the_store_after_it_are_one_use():
    each = bench(dram(32))
    fetched(each, "ab")
    for more, left in (("c", 3), ("d", 0)):
        prompt = "ab" + "cd"[: "cd".index(more) + 1]
        each.now += 1
        load = each.load(prompt)
        each.deliver_all()
        each.store(prompt, start=load.blocks)
        each.deliver_all()
        each.release_load(load)
        assert charged(each) == left
    each.finish()


def test_under_an_ordinary_path_what_is_fetched_is_charged_anew():
    each = bench(dram(32))
    fetched(each, "ab")
    used(each, "ab"), used(each, "ab")
    assert charged(each) == 0
    assert fetched(each, "abcd") == 4
    assert charged(each) == 2
    each.finish()


def test_evicted_and_fetched_again_it_starts_anew():
    each = bench(dram(16))
    fetched(each, "ab")
    used(each, "ab")
    fetched(each, "wxyz")
    assert each.residents(0) == {"w", "wx", "wxy", "wxyz"}
    fetched(each, "ab")
    used(each, "ab")
    assert charged(each) == 4
    used(each, "ab")
    assert charged(each) == 2
    each.finish()


# --- below -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write_after_s", [None, 0.0, 1.0])
def test_charged_blocks_are_not_written_until_they_are_ordinary(write_after_s):
    each = bench(dram(16), nvme(64), write_after_s=write_after_s)
    requested(each, "abc", 2)
    each.tend(10)
    each.deliver_all()
    assert each.drain() == 0
    assert each.planner.lacking(each.now) == 0
    assert not each.residents(1)
    used(each, "abc"), used(each, "abc")
    each.take()
    each.hasten()
    each.deliver_all()
    assert each.residents(1) == (set() if write_after_s is None else {"a", "ab", "abc"})
    each.drain()
    each.deliver_all()
    assert each.residents(1) == {"a", "ab", "abc"}
    each.finish()


def test_under_pressure_they_are_dropped_and_not_copied():
    each = bench(dram(16), nvme(64))
    fetched(each, "abcd")
    for letter in "efghijklmnopqrst":
        each.now += 1
        each.stored(letter)
        each.deliver_all()
    assert charged(each) == 0 and not {"a", "ab"} & each.residents(1)
    each.finish()


def test_no_charge_moves_down_between_memories():
    each = bench(hbm(8), dram(16))
    fetched(each, "ab")
    for letter in "efghijklm":
        each.now += 1
        each.stored(letter)
        each.tend()
        each.deliver_all()
    assert (charged(each, 0), charged(each, 1)) == (0, 0)
    each.finish()


# --- the check sees --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda each: each.state.residency.charged.__setitem__(0, 3), "3 slots are charged, 4 should be"),
        (lambda each: setattr(each.planner.quota, "share", 0.1), "4 slots are charged, 1 may be"),
        (lambda each: setattr(next(iter(each.state.residency.index.root.children.values())), "charge", 0), "charged"),
    ],
)
def test_check_sees(harm, said):
    each = bench(dram(16))
    fetched(each, "abcd")
    assert each.planner.check() == []
    harm(each)
    assert any(said in broken for broken in each.planner.check())


# --- many prompts, and a hot set that stays --------------------------------------------------------------------------

WIDTH = symbol_nbytes(16)


class Quick:
    """A planner whose every job is done at once: symbols in, blocks found out."""

    def __init__(self, capacity, quota, policy="lru"):
        spec = LevelSpec("dram", capacity, 4096)
        remote = RemoteLimits(quota=quota, hint_blocks=1 << 20)
        self.planner = Planner([spec], WIDTH, make_policy(policy), remote=remote)
        self.now = 0.0

    def settle(self):
        while messages := self.planner.take_messages():
            for job in messages:
                self.planner.commit(JobResult(job.id, np.ones(job.n, dtype=np.bool_), job.n * 4096, 0.001), self.now)

    def request(self, symbols, there):
        """Ask, load, store the rest; the blocks found. there: whether the key tier has it all."""
        n = len(symbols) // WIDTH
        self.now += 1.0
        found = self.planner.lookup(symbols, n, self.now)
        for job in self.planner.take_messages():
            ok = np.full(job.n, there)
            self.planner.commit(JobResult(job.id, ok, 0, 0.001), self.now)
        found = self.planner.lookup(symbols, n, self.now, again=True)
        load = self.planner.plan_load(symbols, found.blocks, b"", self.now, 0, n)
        self.settle()
        self.planner.release_load(load, self.now)
        at = load.blocks
        while at < n:
            plan = self.planner.plan_store(symbols, n, at, b"", self.now, 1)
            self.settle()
            if plan.accepted == 0:
                break
            at = plan.end
        return load.blocks - (load.by_level[1] if there else 0)


def symbols_for(number, blocks):
    rows = np.zeros((blocks, WIDTH // 4), dtype=np.int32)
    rows[:, 0], rows[:, 1] = number, np.arange(blocks)
    return rows.tobytes()


def hot_set_share(quota, queued, policy="lru", capacity=51_200, prompts=160, blocks=256, rounds=3):
    """Of a local hot set that takes 80 % of the level, what share of its blocks is found, while `queued` prompts of
    64K tokens that all hit the key tier come in between; the most slots that were ever charged."""
    quick, rng = Quick(capacity, quota, policy), random.Random(1)
    hot = [symbols_for(number, blocks) for number in range(prompts)]
    for symbols in hot:
        quick.request(symbols, False)
    order = [each for _ in range(rounds) for each in rng.sample(hot, len(hot))]
    every = max(1, len(order) // max(1, queued))
    asked = found = most = came = 0
    for i, symbols in enumerate(order):
        if came < queued and i % every == 0:
            quick.request(symbols_for(1_000_000 + came, 4096), True)
            came += 1
            most = max(most, quick.planner.quota.charged(0))
        found += quick.request(symbols, False)
        asked += blocks
    assert came == queued
    assert quick.planner.check() == []
    return found / asked, most


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_fifty_prompts_of_64k_tokens_do_not_push_the_hot_set_out(policy):
    """DRAM is a quarter of what they need: 50 x 4,096 blocks."""
    alone, _ = hot_set_share(0.2, 0, policy)
    share, most = hot_set_share(0.2, 50, policy)
    without, all_of_it = hot_set_share(1.0, 50, policy)
    print(f"\n{policy}: hot set found {alone:.4f} alone, {share:.4f} with the quota, {without:.4f} without it")
    assert share > alone - 0.01
    assert 0 < most <= 51_200 // 5
    assert without < alone - 0.05, "without the quota the hot set suffers, or the test shows nothing"
    assert all_of_it > 51_200 // 4


def test_blocks_that_are_charged_end_in_time_also_where_a_use_cut_their_run():
    each = bench(dram(16), quota=0.5)
    fetched(each, "ab")
    plan = each.stored("abcdef", 2, ttl=50.0)
    assert plan.accepted == 4
    used(each, "abcd")
    each.check()
    each.now += 60.0
    assert each.lookup("abcdef").blocks == 2
    each.tend()
    assert each.residents(0) == {"a", "ab"}
    each.finish()
