"""Trouble of every kind at once around a key tier: it is switched, lost, full and late while the weights change, blocks
end or are invalidated under what waits, and the disk is full. Afterwards nothing is held, and all of it works again."""

import random

import pytest
from planner_kit import Bench, dram, hbm, nvme
from planner_steps import LIMITS
from remote_steps import RemoteSteps

from tiercache.planner.state import RemoteLimits

LEVELS = [(dram(8),), (dram(8), nvme(8)), (dram(12), nvme(14)), (hbm(4), dram(8), nvme(10))]
CALM = ["store", "share_and_load", "share_and_load", "lookup", "churn", "load", "answer", "deliver", "settle"]
TROUBLE = [
    *("flip", "flip", "new_epoch", "invalidate", "invalidate", "hang", "refuse", "full", "fail", "overdue"),
    *(
        "late",
        "late",
        "later",
        "take_back",
        "prioritize",
        "pin",
        "unpin",
        "release_load",
        "rot",
        "lost_claims",
        "drain",
    ),
]


class Storm(RemoteSteps):
    def __init__(self, rng):
        super().__init__(rng, "one")
        write = rng.choice(["prefill", "prefill", "eviction"])
        remote = RemoteLimits(
            quota=rng.choice([0.1, 0.5, 1.0]),
            hint_blocks=rng.choice([12, 1000]),
            pool_threads=rng.choice([2, 3, 8]),
            waiting_finds=rng.choice([1, 8]),
            write=write,
            write_threads=rng.choice([1, 2]),
            queued_writes=rng.choice([1, 256]),
            queued_write_blocks=rng.choice([3, 1000]),
            seed=rng.randrange(100),
        )
        levels = rng.choice(LEVELS)
        options = {"write_after_s": rng.choice([None, 0.0, 2.0])} if levels[-1].persistent else {}
        policy, limits = rng.choice(["lru", "reuse"]), rng.choice(LIMITS)
        self.bench = Bench(*levels, limits=limits, policy=policy, remote=remote, **options)
        self.hinted = True

    def step(self, rng, trouble=True):
        self.rng = rng
        getattr(self, rng.choice(rng.choice([CALM, TROUBLE] if trouble else [CALM])))()
        self.bench.take()
        self.ever |= self.bench.shared
        self.bench.scribble()
        self.bench.check()
        self.check_charge()

    def late(self):
        """What is under way at the key tier is overdue, and its threads return now or later."""
        bench = self.bench
        jobs = [r.job.id for r in bench.running.values() if r.job.symbols is not None and not r.overdue]
        for job in self.rng.sample(jobs, min(len(jobs), self.rng.randint(1, 3))):
            bench.overdue(job)
            if self.rng.choice([True, False]):
                bench.deliver(job, self.rng.choice([True, False]), "deadline")

    def later(self):
        """Back-offs, hints and blocks end."""
        self.bench.tend(self.rng.choice([0.05, 1.0, 6.0, 40.0]))

    def calms_down(self):
        """All threads return, all loads are released, and the switch is on."""
        bench = self.bench
        while bench.finds or bench.running:
            while bench.finds:
                bench.answer()
            while bench.running:
                bench.deliver(next(iter(bench.running)))
        for held in list(bench.pins):
            bench.unpin(held)
        for load, _ in list(bench.loads.values()):
            bench.release_load(load)
        bench.switch(True)
        bench.tend(100.0)
        bench.check()

    def works(self):
        """A store is written to the key tier, what others put there is found, and nothing is left behind."""
        bench, planner = self.bench, self.bench.planner
        self.calms_down()
        bench.invalidate("")
        bench.share("zyx")
        for _ in range(4):  # a probe, then the question
            found = bench.asked("zyx")
            bench.deliver_all()  # after failures a question waits for a write under way
            bench.now += 6.0
        assert found.remote == 3, (found, bench.state.key_breaker.state, bench.state.credits[-1])
        load = bench.load("zyx", None, True)
        bench.deliver_all()
        assert load.blocks == 3
        before = planner.finds.counters.written
        bench.stored("wv")
        self.calms_down()
        if bench.state.remote.write == "prefill":
            assert planner.finds.counters.written == before + 2, planner.finds.counters
        assert not (planner.finds.waiting or planner.finds.under_way or planner.loads.open)
        writes = planner.remote_writes
        assert not (writes.runs or writes.under_way or writes.waiting_blocks)
        credit = bench.state.credits[-1]
        assert not any((credit.jobs, credit.others, credit.queued, credit.lost_jobs)), credit
        assert all(not each.shared and not each.held for each in bench.state.credits)
        assert not any(table.pins.any() for table in bench.tables)


def walk(seed, steps):
    chance = random.Random(f"storm-{seed}")
    storm = Storm(chance)
    for _ in range(3):
        for _ in range(steps // 3):
            storm.step(chance)
        storm.works()
    storm.bench.finish()


@pytest.mark.parametrize("seed", range(6))
def test_storm(seed):
    walk(seed, 150)


def test_a_load_that_is_given_up_at_once():
    """What the storm found: blocks left the tree while the use of their path was noted."""
    walk(1173, 300)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_storm_long():
    for seed in range(1000, 1080):
        walk(seed, 450)
