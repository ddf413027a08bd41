"""The steps of `planner_steps` with a key tier below, which others fill and empty, and which answers when it likes."""

from planner_kit import Bench, dram, hbm, nvme
from planner_steps import LIMITS, OFTEN, RARE, SELDOM, Steps

from tiercache.planner.state import RemoteLimits
from tiercache.slots import SlotState

LEVELS = {
    "one": [((dram(8),), {}), ((dram(24),), {})],
    "memory": [((hbm(6), dram(12)), {}), ((hbm(4), dram(24)), {"exclusive": True})],
    "dram-nvme": [
        ((dram(12), nvme(40)), {}),
        ((dram(10), nvme(14)), {"write_after_s": 2.0}),
        ((dram(16), nvme(40)), {"write_after_s": 0.0}),
    ],
    "three": [((hbm(4), dram(12), nvme(40)), {"write_after_s": 2.0}), ((hbm(6), dram(12), nvme(20)), {})],
}
ASKING = ["share", "share", "share_and_load", "share_and_load", "share_and_load", "answer", "answer", "take_back"]


class RemoteSteps(Steps):
    """Also a model of the charge: see `check_charge`."""

    def __init__(self, rng, kind):
        super().__init__(rng, "one")
        levels, options = rng.choice(LEVELS[kind])
        remote = RemoteLimits(
            quota=rng.choice([0.2, 0.3, 0.5]),
            hint_blocks=rng.choice([20, 1000]),
            pool_threads=rng.choice([2, 8]),
            waiting_finds=rng.choice([1, 8]),
            write=(write := rng.choice(["prefill", "prefill", "eviction", "never"])),
            write_threads=0 if write == "never" else rng.choice([1, 2]),
            queued_writes=rng.choice([2, 256]),
            queued_write_blocks=rng.choice([5, 1000]),
            min_blocks=rng.choice([0, 0, 3]),
            max_position=rng.choice([None, None, 6]),
            seed=rng.randrange(100),
        )
        self.bench = Bench(
            *levels, limits=rng.choice(LIMITS), policy=rng.choice(["lru", "reuse"]), remote=remote, **options
        )
        self.ever = set()
        """All that the key tier ever held."""

    def step(self, rng, trouble=True):
        self.rng = rng
        kinds = rng.choice(
            [OFTEN, ASKING, ASKING, SELDOM, [*RARE, "refuse", "hang", "full", "flip"]] if trouble else [OFTEN, ASKING]
        )
        getattr(self, rng.choice(kinds))()
        self.bench.take()
        self.ever |= self.bench.shared
        self.bench.scribble()
        self.bench.check()
        self.check_charge()

    def check_charge(self):
        """In no level more than the quota, and nothing of it in one that is written to disk."""
        bench, residency = self.bench, self.bench.state.residency
        for level, spec in enumerate(bench.specs):
            slots = [
                slot
                for node in residency.index.nodes.values()
                if node.charge
                for slot in node.slots[: node.n, level]
                if slot >= 0
            ]
            most = 0 if spec.persistent else max(1, int(spec.capacity * bench.state.remote.quota))
            assert len(slots) <= most, f"{spec.name}: {len(slots)} charged, {most} may be"

    # -- the key tier -----------------------------------------------------------------------------------------------

    def share(self):
        prompt = self.any_prompt().lower()
        self.bench.share(prompt)
        self.ever.update(self.bench.tokens_of(prompt))
        self.prompts = [*self.prompts[-20:], prompt]

    def share_and_load(self):
        self.share()
        bench = self.bench
        prompt = self.prompts[-1] + self.rng.choice(["", "", "ab"])
        bench.now += self.rng.choice([0.1, 3.0])
        bench.asked(prompt)
        load = bench.load(prompt, None, self.rng.choice([False, False, True]), self.rng.choice([0, 0, 1, 2]))
        if self.rng.choice([True, False]):
            self.check_store(prompt, load.blocks)
        if self.rng.choice([True, True, False]):
            self.deliver_but(0)
        if load.done and load.id in bench.loads and self.rng.choice([True, False]):
            bench.release_load(load)

    def take_back(self):
        """Somebody removes something."""
        for token in sorted(self.bench.shared):
            if self.rng.random() < 0.3:
                self.bench.shared.discard(token)

    def answer(self):
        if self.bench.finds:
            self.bench.answer(self.rng.choice(list(self.bench.finds)))

    def refuse(self):
        if self.bench.finds:
            self.bench.answer(self.rng.choice(list(self.bench.finds)), self.rng.choice(["io", "deadline", "cancelled"]))

    def full(self):
        """A write under way is refused in part."""
        writes = [job for job, running in self.bench.running.items() if running.shares]
        if writes:
            job = self.bench.running[self.rng.choice(writes)].job
            ok = [self.rng.choice([True, False]) for _ in range(job.n)]
            self.bench.deliver(job.id, ok, "" if all(ok) else "refused")

    def flip(self):
        """Somebody turns the key tier off, or on again."""
        self.bench.switch(self.rng.choice([True, True, False]), self.rng.choice([True, True, False]))

    def hang(self):
        self.bench.hang_find(self.rng)

    # -- what differs -----------------------------------------------------------------------------------------------

    def lookup(self):
        prompt = self.any_prompt()
        found = self.bench.lookup(prompt)
        where, online = self.bench.alive(), self.bench.state.online_levels()
        local = 0
        for i in range(len(prompt)):
            places = where.get(prompt[: i + 1], [])
            if not any(
                up and place and place[1] == SlotState.RESIDENT for up, place in zip(online, places, strict=False)
            ):
                break
            local += 1
        assert local <= found.blocks == sum(found.by_level) + found.remote
        assert found.blocks + found.pending <= len(prompt)
        for i in range(local, found.blocks):
            places = where.get(prompt[: i + 1], [])
            here = any(place and place[1] in (SlotState.WRITING, SlotState.RESIDENT) for place in places)
            assert here or (self.bench.epoch, prompt[: i + 1]) in self.ever, f"nobody ever had {prompt[: i + 1]}"

    def new_epoch(self):
        super().new_epoch()
        assert self.bench.where() or self.bench.state.residency.charged == [0] * len(self.bench.specs)
