"""The steps that random tests take on a bench, each with what must come of it."""

import math
from random import Random

from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.state import Limits
from tiercache.slots import SlotState
from tiercache.types import COLD

LIMITS = (Limits(jobs=4, job_blocks=3, queued_loads=3), Limits(jobs=8, job_blocks=8), Limits())
LEVELS = {
    "one": [(dram(6),), (dram(13),)],
    "memory": [(hbm(4), dram(8)), (hbm(3), dram(20))],
    "dram-nvme": [
        (dram(6), nvme(10)),
        (dram(12), nvme(40)),
        (dram(4), nvme(8)),
        (dram(8), nvme(20, pool_threads=2)),
        (dram(12), nvme(14)),
    ],
    "three": [(hbm(4), dram(8), nvme(24)), (hbm(3), dram(4), nvme(40)), (hbm(6), dram(12), nvme(16))],
}
OPTIONS = {
    "one": [{}],
    "memory": [{}, {"exclusive": True}],
    "dram-nvme": [{}, {"write_after_s": 2.0}, {"exclusive": True}, {"exclusive": False}, {"write_after_s": 0.0}],
    "three": [{}, {"write_after_s": 2.0}, {"exclusive": True}, {"exclusive": False}],
}

PRIORITIES = (0, 0, 0, 1, 100, -1, COLD)
TTLS = (math.inf, math.inf, math.inf, 0.5, 3.0, 20.0)

OFTEN = ["store", "request", "request", "churn", "lookup", "load", "deliver", "settle", "settle"]
SELDOM = [
    "prioritize",
    "release_load",
    "touch",
    "hint",
    "pin",
    "unpin",
    "unpin",
    "drain",
    "invalidate",
    "tend",
    "hasten",
    "fail",
]
RARE = ["fail", "overdue", "lost_claims", "rot", "new_epoch"]


class Steps:
    """A bench and what was done to it. All chance comes from `rng`."""

    def __init__(self, rng: Random, kind: str):
        self.rng = rng
        levels = rng.choice(LEVELS[kind])
        limits, options = rng.choice(LIMITS), rng.choice(OPTIONS[kind])
        self.bench = Bench(*levels, limits=limits, policy=rng.choice(["lru", "reuse"]), **options)
        self.hinted = rng.choice([True, False])
        """Do callers say anything of their blocks?"""
        self.prompts = ["a"]
        self.epochs = 0

    def step(self, rng: Random, trouble=True):
        """One step of any kind, and everything checked."""
        self.rng = rng
        kinds = rng.choice([OFTEN, OFTEN, SELDOM, RARE] if trouble else [OFTEN, OFTEN, SELDOM[:-1]])
        getattr(self, rng.choice(kinds))()
        self.bench.scribble()
        self.bench.check()

    # -- choices ----------------------------------------------------------------------------------------------------

    def new_prompt(self):
        body = "".join(self.rng.choice("abc") for _ in range(self.rng.randint(1, 9)))
        return body + self.rng.choice(["", "", "", "", "A"])

    def any_prompt(self):
        """Mostly one that was seen, or a beginning or continuation of it."""
        how = self.rng.choice(["new", "seen", "seen", "cut", "longer"])
        if how == "new":
            return self.new_prompt()
        prompt = self.rng.choice(self.prompts)
        if how == "cut":
            return prompt[: self.rng.randint(1, len(prompt))]
        if how == "longer" and prompt.islower() and len(prompt) < 16:
            return prompt + self.new_prompt()
        return prompt

    # -- the engine's verbs -----------------------------------------------------------------------------------------

    def store(self):
        prompt = self.any_prompt()
        found = self.bench.lookup(prompt)
        ahead = self.rng.choice([0, 0, -1, 1])
        start = self.rng.choice([0, min(max(0, found.blocks + found.pending + ahead), len(prompt))])
        plan = self.check_store(prompt, start)
        if plan.job and self.rng.choice([True, False]):
            self.bench.deliver(plan.job)

    def check_store(self, prompt, start):
        bench = self.bench
        bench.lookup(prompt)  # the planner knows what time it is
        usable = self.usable(bench.alive(), prompt)
        lacking = [i for i in range(start, len(prompt)) if not usable[i]]
        said = {"priority": self.rng.choice(PRIORITIES), "ttl": self.rng.choice(TTLS)} if self.hinted else {}
        plan = bench.store(prompt, start, **said)
        self.prompts = [*self.prompts[-20:], prompt]
        assert 0 <= plan.accepted <= len(lacking) and plan.present >= 0
        assert plan.end >= start or plan.reason in ("parent_missing", "offline")
        if plan.reason == "":
            assert plan.accepted == len(lacking) and plan.present == len(prompt) - start - len(lacking)
        if not all(usable[:start]):
            assert plan.accepted == 0 and plan.reason in ("parent_missing", "offline")
        if plan.accepted:
            where = bench.where()
            taken = lacking[: plan.accepted]
            assert all(where[prompt[: i + 1]][0][1] == SlotState.WRITING for i in taken)
            assert plan.accepted + plan.present == plan.end - start
        assert (plan.job > 0) == (plan.accepted > 0)
        return plan

    def usable(self, where, prompt):
        online = self.bench.state.online_levels()
        states = (SlotState.RESIDENT, SlotState.WRITING)
        return [
            any(
                up and place is not None and place[1] in states
                for up, place in zip(online, where.get(prompt[: i + 1], ()), strict=False)
            )
            for i in range(len(prompt))
        ]

    def request(self):
        """What an engine does: load what is there, store the rest. Jobs and loads of earlier requests end well."""
        bench, in_flight = self.bench, self.rng.randint(0, 6)
        prompt = self.any_prompt()
        bench.now += 0.25
        load = bench.load(prompt, None, self.rng.choice([True, False]), self.rng.choice([0, 0, 1]))
        self.check_store(prompt, load.blocks)
        bench.tend()
        self.deliver_but(in_flight)
        done = [load for load, _ in bench.loads.values() if load.done]
        for each in done[: max(0, len(done) - in_flight)]:
            bench.release_load(each)

    def churn(self):
        """Prompts that nobody asks for again push others out."""
        for _ in range(self.rng.randint(1, 5)):
            self.bench.now += 0.25
            plan = self.check_store(self.new_prompt(), 0)
            if plan.job:
                self.bench.deliver(plan.job)
            self.deliver_but(self.rng.randint(0, 4))

    def lookup(self):
        prompt = self.any_prompt()
        found = self.bench.lookup(prompt)
        where, online = self.bench.alive(), self.bench.state.online_levels()
        best = []
        for i in range(len(prompt)):
            places = where.get(prompt[: i + 1], [])
            readable = [
                level
                for level, place in enumerate(places)
                if online[level] and place is not None and place[1] == SlotState.RESIDENT
            ]
            if not readable:
                break
            best.append(readable[0])
        assert found.blocks == len(best)
        assert list(found.by_level) == [best.count(level) for level in range(len(online))]
        pending = 0
        for i in range(found.blocks, len(prompt)):
            places = where.get(prompt[: i + 1], [])
            if not any(place is not None and place[1] == SlotState.WRITING for place in places):
                break
            pending += 1
        assert found.pending == pending
        common = max((_shared(prompt, other) for other in where), default=0)
        assert found.words == common * 2

    def load(self):
        prompt = self.any_prompt()
        found = self.bench.lookup(prompt)
        ended = len(self.bench.alive()) < len(self.bench.where())
        want = max(0, len(prompt) - self.rng.choice([0, 0, 0, 1, 3]))
        load = self.bench.load(prompt, want, self.rng.choice([True, False]), self.rng.choice([0, 0, want // 2]))
        # what has ended is out of the way of a load, which then may find the same at a key tier; and a load joins what
        # still comes from one that was given up or switched off, of which a lookup offers nothing
        remote = self.bench.planner.finds is not None
        free = remote and (ended or not self.bench.state.online(len(self.bench.specs)))
        # where a prompt takes no part in the key tier, what another one fetches is pending, and a load joins that
        limits = self.bench.state.remote
        apart = limits is not None and (limits.min_blocks > 0 or limits.max_position is not None)
        most = found.blocks + (found.pending if apart else 0)
        assert load.blocks <= (want if free else min(most, want))

    def release_load(self):
        if self.bench.loads:
            self.bench.release_load(self.rng.choice([load for load, _ in self.bench.loads.values()]))

    def touch(self):
        self.bench.touch(self.any_prompt())

    def hint(self):
        self.bench.hint(self.any_prompt())

    def pin(self):
        self.bench.pin(self.any_prompt(), self.rng.choice(TTLS) if self.hinted else math.inf)

    def prioritize(self):
        if self.hinted:
            self.bench.prioritize(self.any_prompt(), self.rng.choice(PRIORITIES))

    def unpin(self):
        if self.bench.pins:
            self.bench.unpin(self.rng.choice(self.bench.pins))

    def drain(self):
        self.bench.drain()
        assert all(r.expedited or r.overdue for r in self.bench.running.values() if r.delayed)

    def hasten(self):
        self.bench.hasten()
        assert all(r.expedited or r.overdue for r in self.bench.running.values() if r.delayed)

    def invalidate(self):
        prompt = self.rng.choice(["", self.any_prompt(), self.any_prompt(), self.any_prompt()])
        before = self.bench.alive()
        dropped = self.bench.invalidate(prompt)
        where = self.bench.where()
        assert where == {each: places for each, places in before.items() if not each.startswith(prompt)}
        assert dropped == len(before) - len(where)

    def tend(self):
        self.bench.tend(self.rng.choice([0.0, 0.1, 1.0, 5.0, 50.0]))
        assert self.bench.where() == self.bench.alive()

    # -- the mover --------------------------------------------------------------------------------------------------

    def deliver(self):
        if self.bench.running:
            self.bench.deliver(self.rng.choice(list(self.bench.running)))

    def settle(self):
        """The oldest jobs come back well."""
        self.bench.now += 0.5
        self.deliver_but(self.rng.randint(0, 5))

    def deliver_but(self, in_flight):
        running = self.bench.running
        for job in list(running)[: max(0, len(running) - in_flight)]:
            if job in running and not running[job].overdue:
                self.bench.deliver(job)

    def fail(self):
        if not self.bench.running:
            return
        job = self.bench.running[self.rng.choice(list(self.bench.running))].job
        reason = self.rng.choice(["io", "checksum", "deadline", "cancelled"])
        some = self.rng.choice([True, False])
        ok = [some and self.rng.choice([True, False]) for _ in range(job.n)]
        self.bench.deliver(job.id, ok, "" if all(ok) else reason)

    def overdue(self):
        jobs = [r.job.id for r in self.bench.running.values() if not r.overdue and r.job.deadline_s is not None]
        if jobs:
            self.bench.overdue(self.rng.choice(jobs))

    def lost_claims(self):
        if self.bench.claims:
            self.bench.lose_claims([self.rng.choice(sorted(self.bench.claims))])

    def rot(self):
        if self.bench.claims:
            self.bench.corrupt(self.rng.choice(sorted(self.bench.claims)))

    def new_epoch(self):
        if self.rng.choice([True, False]):
            self.epochs += 1
            self.bench.new_epoch(f"epoch-{self.epochs}".encode())
            assert self.bench.where() == {}


def _shared(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
