"""A planner on a bench: every job it asks for is run by hand, and a model knows what every slot holds.

A prompt is a string, one letter a block; an upper-case last letter is a partial tail. A block's identity, and so what
its bytes must be, is (epoch, the prompt up to it). The bench is a mover without bytes and a referee: it raises
AssertionError where a job reads a slot that holds something else than the job says, where two jobs meet in a slot of
which one writes, or where a persistent slot is written before its old life was forgotten.
"""

import itertools
import math
import struct
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from tiercache.keys import chain_idents, root_ident
from tiercache.planner.core import Planner
from tiercache.planner.state import Limits
from tiercache.policy import make_policy
from tiercache.slots import SlotState
from tiercache.types import (
    CALLER,
    ROOT,
    CopyJob,
    Expedite,
    Forget,
    JobOverdue,
    JobResult,
    LevelSpec,
    LostClaims,
    NewEpoch,
    NoteUse,
    Recovered,
)

WIDTH = 8
NBYTES = 4096
NAMESPACE = b"n" * 16
GARBAGE = ("garbage",)

Token = tuple[bytes, str]


def hbm(capacity):
    return LevelSpec("hbm", capacity, NBYTES)


def dram(capacity, pool_threads=2):
    return LevelSpec("dram", capacity, NBYTES, pool_threads=pool_threads)


def nvme(capacity, pool_threads=8):
    return LevelSpec("nvme", capacity, NBYTES, persistent=True, pool_threads=pool_threads)


def symbols_of(prompt: str, width: int = WIDTH) -> bytes:
    return b"".join(struct.pack("<i", ord(letter)) * (width // 4) for letter in prompt)


def recovered_of(last_use: dict[str, float], epoch: bytes = b"epoch-0", forgotten: int = 0) -> Recovered:
    """What a restart finds of these prompts' last blocks, in slots 0, 1, ...; shorter ones come first."""
    prompts = sorted(last_use, key=lambda prompt: (len(prompt), prompt))
    root = root_ident(NAMESPACE, epoch)
    return Recovered(
        np.arange(len(prompts), dtype=np.int32),
        np.array([prompts.index(prompt[:-1]) if prompt[:-1] else ROOT for prompt in prompts], dtype=np.int64),
        np.array([chain_idents(symbols_of(prompt), WIDTH, root)[-1] for prompt in prompts], dtype=np.uint64),
        b"".join(symbols_of(prompt[-1]) for prompt in prompts),
        np.array([last_use[prompt] for prompt in prompts], dtype=np.float64),
        np.ones(len(prompts), dtype=np.uint32),
        forgotten=forgotten,
    )


class Running:
    """A job that was submitted and not delivered."""

    def __init__(self, job: CopyJob, tokens: list[Token], source: list):
        self.job = job
        self.tokens = tokens
        self.source = source
        """What the source slots held when it was submitted."""
        self.forgotten: set[int] = set()
        """Destination slots that a Forget named since."""
        self.overdue = False
        self.expedited = False

    @property
    def shares(self):
        """Does it write to the key tier?"""
        return self.job.symbols is not None and self.job.kind == "write"

    @property
    def delayed(self):
        return self.job.start_after_s > 0 and not self.shares

    def ends(self):
        """(level, slots, is written) of every end that is a level."""
        job = self.job
        if self.shares:  # at its JobOverdue its thread has all it reads
            return [] if self.overdue else [(job.src_level, job.src_slots.tolist(), False)]
        found = [(job.dst_level, job.dst_slots.tolist(), True)]
        if job.symbols is None:
            found.append((job.src_level, job.src_slots.tolist(), False))
        if job.also_slots is not None:
            found.append((job.also_level, [slot for slot in job.also_slots.tolist() if slot >= 0], True))
        return [each for each in found if each[0] != CALLER]


class Bench:
    def __init__(self, *specs, limits=None, epoch=b"epoch-0", recovered=None, policy="lru", **options):
        self.specs = specs
        self.limits = limits or Limits()
        self.epoch = epoch
        self.planner = Planner(
            specs,
            WIDTH,
            make_policy(policy) if isinstance(policy, str) else policy,
            namespace_digest=NAMESPACE,
            epoch=epoch,
            limits=self.limits,
            **options,
        )
        if recovered is not None:
            self.planner.restore(recovered)
        self.now = 1000.0
        self.content = [[GARBAGE] * spec.capacity for spec in specs]
        self.claims: dict[int, Token] = {}
        """Slot of the persistent level -> what a restart would find there."""
        self.parents: dict[int, int] = {}
        self.running: dict[int, Running] = {}
        self.rows: dict[int, list] = {}
        """Caller rows by endpoint: what a store brings, or what a load has put there."""
        self.starts: dict[int, int] = {}
        """The first block that each load brings."""
        self.loads: dict[int, tuple] = {}
        """Loads that are not over: (load, tokens it was asked for)."""
        self.announced: set[int] = set()
        self.pins: list = []
        self.tokens: dict[int, Token] = {}
        self.shared: set[Token] = set()
        """What the key tier holds."""
        self.finds: dict[int, CopyJob] = {}
        """Finds that were sent and not answered."""
        self.messages: list = []
        self.ends: dict[str, float] = defaultdict(lambda: math.inf)
        """When blocks end, and their priorities, by the stores that named them."""
        self.priorities: dict[str, int] = defaultdict(int)
        self._endpoints = itertools.count(1)
        self._seen_jobs: set[int] = set()

    # -- names ------------------------------------------------------------------------------------------------------

    @property
    def state(self):
        return self.planner.state

    @property
    def tables(self):
        return self.state.residency.tables

    @property
    def persistent(self) -> int | None:
        return next((level for level, spec in enumerate(self.specs) if spec.persistent), None)

    def encode(self, prompt: str) -> tuple[bytes, int]:
        symbols = symbols_of(prompt)
        idents = chain_idents(symbols, WIDTH, root_ident(NAMESPACE, self.epoch))
        for i, ident in enumerate(idents.tolist()):
            self.tokens[ident] = (self.epoch, prompt[: i + 1])
        return symbols, len(prompt)

    def tokens_of(self, prompt: str) -> list[Token]:
        return [(self.epoch, prompt[: i + 1]) for i in range(len(prompt))]

    @classmethod
    def holding(cls, last_use: dict[str, float], *specs, **options):
        """A bench just opened, whose persistent level holds these prompts' last blocks (see `recovered_of`)."""
        bench = cls(*specs, recovered=recovered_of(last_use), **options)
        for slot, prompt in enumerate(sorted(last_use, key=lambda prompt: (len(prompt), prompt))):
            bench.encode(prompt)
            bench.claims[slot] = bench.content[bench.persistent][slot] = (bench.epoch, prompt)
        return bench

    # -- verbs ------------------------------------------------------------------------------------------------------

    def lookup(self, prompt, block_s=0.0):
        found = self.planner.lookup(*self.encode(prompt), self.now, block_s=block_s)
        self.take()
        return found

    def store(self, prompt, start=0, epoch=None, priority=0, ttl=math.inf):
        symbols, n = self.encode(prompt)
        endpoint = next(self._endpoints)
        self.rows[endpoint] = self.tokens_of(prompt)[start:]
        before = self.alive()
        plan = self.planner.plan_store(
            symbols, n, start, epoch or self.epoch, self.now, endpoint, prompt[-1:].isupper(), priority, self.now + ttl
        )
        for i in range(plan.end):
            key, old = prompt[: i + 1], prompt[: i + 1] in before
            self.ends[key] = max(self.ends[key], self.now + ttl) if old else self.now + ttl
            self.priorities[key] = max(self.priorities[key], priority) if old else priority
        self.take()
        if plan.job:
            assert self._endpoint_of(plan.job) == endpoint
        return plan

    def stored(self, prompt, start=0, **said):
        """A store whose copy is delivered at once."""
        plan = self.store(prompt, start, **said)
        if plan.job:
            self.deliver(plan.job)
        return plan

    def load(self, prompt, want=None, out=False, start=0):
        symbols, n = self.encode(prompt)
        want = n if want is None else want
        start = start if out else 0
        endpoint = next(self._endpoints) if out else 0
        self.rows[endpoint] = [GARBAGE] * want
        before = set(self.alive()) if self.planner.finds is not None else None
        load = self.planner.plan_load(symbols, want, self.epoch, self.now, endpoint, n, start)
        self.loads[load.id] = (load, self.tokens_of(prompt))
        self.starts[load.id] = start
        for key in set() if before is None else set(self.where()) - before:  # fetched: nothing was ever said of them
            self.ends.pop(key, None)
            self.priorities.pop(key, None)
        self._over([load] if load.done else [])
        self.take()
        return load

    def release_load(self, load):
        self.planner.release_load(load, self.now)
        self.take()
        if load.done:
            self.loads.pop(load.id, None)

    def touch(self, prompt):
        touched = self.planner.touch(*self.encode(prompt), self.epoch, self.now)
        self.take()
        return touched

    def hint(self, prompt):
        moved = self.planner.release(*self.encode(prompt), self.now)
        self.take()
        return moved

    def prioritize(self, prompt, priority):
        changed = self.planner.prioritize(*self.encode(prompt), priority, self.now)
        for i in range(len(prompt)):
            self.priorities[prompt[: i + 1]] = priority
        self.take()
        return changed

    def pin(self, prompt, ttl=math.inf):
        held = self.planner.pin(*self.encode(prompt), self.epoch, self.now, self.now + ttl)
        self.take()
        if held:
            self.pins.append(held)
        return held

    def unpin(self, held):
        ended = {id(slots) for _, slots in held}
        left = [[each for each in pin if id(each[1]) not in ended] for pin in self.pins]
        self.pins = [pin for pin in left if pin]
        self.planner.unpin(held, self.now)
        self.take()

    def invalidate(self, prompt):
        dropped = self.planner.invalidate(*self.encode(prompt), self.now)
        self.take()
        return dropped

    def new_epoch(self, epoch):
        self.epoch = epoch
        ended = self.planner.new_epoch(epoch, self.now)
        self._over(ended)
        self.take()
        return ended

    def tend(self, later_s=0.0):
        self.now += later_s
        self.planner.tend(self.now)
        self.take()

    def hasten(self):
        self.planner.demotion.expedite_all()
        self.planner.tend(self.now)
        self.take()

    def switch(self, enabled, stores=True):
        """The kill switch of the key tier."""
        self._over(self.planner.switch_remote(enabled, stores, self.now))
        self.take()

    def drain(self):
        queued = self.planner.drain(self.now)
        self.take()
        return queued

    # -- the mover's side -------------------------------------------------------------------------------------------

    def take(self):
        """Take what the planner asks for, as a referee."""
        for message in self.planner.take_messages():
            self.messages.append(message)
            if isinstance(message, CopyJob) and message.kind == "find":
                assert message.id not in self._seen_jobs and message.epoch == self.epoch
                self._seen_jobs.add(message.id)
                self.finds[message.id] = message
            elif isinstance(message, CopyJob):
                self._take_job(message)
            elif isinstance(message, Forget):
                self._forget(message.slots.tolist())
            elif isinstance(message, NewEpoch):
                assert message.epoch == self.epoch
                self._forget(range(self.specs[self.persistent].capacity if self.persistent is not None else 0))
            elif isinstance(message, Expedite):
                for job in message.jobs:
                    running = self.running[job]
                    assert running.delayed and not running.expedited and not running.overdue
                    running.expedited = True
            else:
                assert isinstance(message, NoteUse)
                assert len(message.slots) == len(message.uses) == len(message.last_use) > 0

    def _take_job(self, job):
        assert job.id not in self._seen_jobs and job.n > 0
        self._seen_jobs.add(job.id)
        assert job.epoch == self.epoch
        assert len(job.src_slots) == len(job.dst_slots) == job.n
        running = Running(job, [self.tokens[ident] for ident in job.idents.tolist()], [])
        self._check_meetings(running)
        running.source = self._source(job)
        for i, (got, token) in enumerate(zip(running.source, running.tokens, strict=True)):
            corrupt = got == GARBAGE and job.src_level == self.persistent
            assert got == token or corrupt, f"job {job.id} ({job.kind}) reads {got} for block {i}, {token}"
        persistent = job.dst_level != CALLER and not running.shares and self.specs[job.dst_level].persistent
        assert (job.claims is not None) == persistent
        if job.claims is not None:
            self._check_claims(running)
        for level, slots, written in running.ends():
            for slot in slots if written else ():
                self.content[level][slot] = GARBAGE
        self.running[job.id] = running

    def _source(self, job):
        if job.symbols is not None and job.kind != "write":
            return [self.tokens[ident] for ident in job.idents.tolist()]
        if job.src_level == CALLER:
            rows = self.rows[job.endpoint]
            return [rows[row] for row in job.src_slots.tolist()]
        return [self.content[job.src_level][slot] for slot in job.src_slots.tolist()]

    def _check_meetings(self, running):
        mine = {}
        for level, slots, written in running.ends():
            assert all(0 <= slot < self.specs[level].capacity for slot in slots)
            for slot in slots:
                assert (level, slot) not in mine, f"job {running.job.id} names slot {slot} of level {level} twice"
                mine[level, slot] = written
        for other in self.running.values():
            for level, slots, written in other.ends():
                for slot in slots:
                    if (level, slot) in mine:
                        assert not written and not mine[level, slot], f"{other.job} and {running.job} meet in {slot}"
        for load, _ in self.loads.values():
            if load.done:
                for slot in load.slots.tolist():
                    assert not mine.get((0, slot)), f"job {running.job.id} writes slot {slot} that a Loaded holds"

    def _check_claims(self, running):
        job, claims = running.job, running.job.claims
        assert claims.symbols == b"".join(symbols_of(prompt[-1]) for _, prompt in running.tokens)
        planned = self._planned()
        for i, slot in enumerate(job.dst_slots.tolist()):
            epoch, prompt = running.tokens[i]
            old = self.claims.get(slot)
            assert old is None or old == running.tokens[i], f"slot {slot} is written and still claimed by {old}"
            self.claims.pop(slot, None)
            parent = int(claims.parent_slots[i])
            if len(prompt) == 1:
                assert parent == ROOT and int(claims.parent_idents[i]) == root_ident(NAMESPACE, epoch)
            else:
                assert self.tokens[int(claims.parent_idents[i])] == (epoch, prompt[:-1])
                assert planned.get(parent) == (epoch, prompt[:-1]), (
                    f"parent slot {parent} of {prompt} is not its parent"
                )
            planned[slot] = running.tokens[i]
            self.parents[slot] = parent

    def _planned(self):
        """Slot of the persistent level -> what it holds, or will when its job has run."""
        planned = dict(self.claims)
        for running in self.running.values():
            if running.job.dst_level == self.persistent:
                slots = running.job.dst_slots.tolist()
                planned |= {
                    slot: token
                    for slot, token in zip(slots, running.tokens, strict=True)
                    if slot not in running.forgotten
                }
        return planned

    def _forget(self, slots: Iterable[int]):
        for slot in slots:
            self.claims.pop(slot, None)
            for running in self.running.values():
                if running.job.dst_level == self.persistent:
                    running.forgotten.add(slot)

    def deliver(self, job_id, ok=True, reason="", seconds=0.001):
        """A job's thread returned. `ok`: for all blocks, or one per block. Corrupt sources fail by themselves."""
        running = self.running.pop(job_id)
        job = running.job
        mask = np.full(job.n, ok) if isinstance(ok, bool) else np.array(ok, dtype=np.bool_)
        if not mask.all():
            assert reason, "a block that fails has a reason"
        now = running.source if running.shares and running.overdue else self._source(job)
        for i, (before, after) in enumerate(zip(running.source, now, strict=True)):
            if after == GARBAGE and job.src_level == self.persistent:
                mask[i], reason = False, reason or "checksum"
            else:
                assert before == after, f"the source of {running.tokens[i]} changed under job {job_id}"
        if job.symbols is not None:
            assert self._asked(job) == running.tokens, f"job {job_id} names blocks that its symbols do not"
        if job.symbols is not None and not running.shares:
            here = np.array([token in self.shared for token in running.tokens])
            mask, reason = mask & here, reason or ("" if here.all() else "missing")
        for i, token in enumerate(running.tokens):
            good = bool(mask[i]) and not running.overdue
            if running.shares:
                self.shared.update([token] * bool(mask[i]))
                continue
            if job.dst_level == CALLER:
                if good and job.kind != "probe":
                    self.rows[job.endpoint][int(job.dst_slots[i])] = token
            else:
                self._arrive(running, job.dst_level, int(job.dst_slots[i]), token if good else GARBAGE)
            if job.also_slots is not None and job.also_slots[i] >= 0:
                self._arrive(running, job.also_level, int(job.also_slots[i]), token if good else GARBAGE)
        result = JobResult(job_id, mask, int(mask.sum()) * NBYTES, seconds, reason=reason)
        outcome = self.planner.commit(result, self.now)
        assert outcome.job == job_id
        self._over(outcome.loads)
        self.take()
        return outcome

    def _asked(self, job) -> list[Token]:
        """The blocks that a job at the key tier is about, by its symbols."""
        letters = struct.unpack(f"<{len(job.symbols) // 4}i", job.symbols)[:: WIDTH // 4]
        prompt = "".join(map(chr, letters))
        return [(job.epoch, prompt[: at + 1]) for at in job.positions.tolist()]

    def share(self, prompt):
        """Another cache puts this prompt's blocks into the key tier."""
        self.shared.update(self.tokens_of(prompt))

    def answer(self, job_id=None, reason=""):
        """The key tier answers a find (None: the oldest), or fails to."""
        job = self.finds.pop(job_id or next(iter(self.finds)))
        ok = np.array([not reason and token in self.shared for token in self._asked(job)], dtype=np.bool_)
        outcome = self.planner.commit(JobResult(job.id, ok, 0, 0.001, reason=reason), self.now)
        self._over(outcome.loads)
        self.take()

    def hang_find(self, rng):
        """One of the finds under way passes its deadline; `answer` then stands for the return of its thread."""
        under_way = self.planner.finds.under_way
        jobs = [job for job in self.finds if not under_way[job].overdue]
        if jobs:
            self._over(self.planner.commit(JobOverdue(rng.choice(jobs)), self.now).loads)
            self.take()

    def asked(self, prompt):
        """What a lookup finds once everything it asked for is answered."""
        found = self.lookup(prompt)
        self.take()
        while self.finds:
            self.answer()
        return self.lookup(prompt) if found.pending else found

    def _arrive(self, running, level, slot, token):
        self.content[level][slot] = token
        if level == self.persistent and token != GARBAGE and slot not in running.forgotten:
            self.claims[slot] = token

    def overdue(self, job_id):
        running = self.running[job_id]
        assert not running.overdue
        running.overdue = True
        outcome = self.planner.commit(JobOverdue(job_id), self.now)
        assert outcome.job == job_id
        self._over(outcome.loads)
        self.take()
        return outcome

    def scribble(self):
        """The threads of overdue jobs are alive: they may write at any time."""
        for running in self.running.values():
            if running.overdue:
                for level, slots, written in running.ends():
                    for slot in slots if written else ():
                        self.content[level][slot] = GARBAGE

    def lose_claims(self, slots):
        for slot in slots:
            self.claims.pop(slot, None)
        outcome = self.planner.commit(LostClaims(np.array(slots, dtype=np.int32)), self.now)
        assert outcome.job == 0 and not outcome.loads
        self.take()

    def corrupt(self, slot):
        """What a slot of the persistent level holds is wrong from now on; reading it fails."""
        self.content[self.persistent][slot] = GARBAGE

    def deliver_all(self, limit=10_000):
        """Deliver every job, also those that come up meanwhile."""
        for _ in range(limit):
            if not self.running:
                return
            self.deliver(next(iter(self.running)))
        raise AssertionError("jobs without end")

    def jobs(self, kind=None):
        return [running.job for running in self.running.values() if kind in (None, running.job.kind)]

    def job(self, kind=None) -> CopyJob:
        """The only job of this kind."""
        (job,) = self.jobs(kind)
        return job

    def _endpoint_of(self, job_id):
        return self.running[job_id].job.endpoint

    def _over(self, loads: Sequence):
        for load in loads:
            assert load.done and load.id not in self.announced, f"load {load.id} ended twice, or is not done"
            self.announced.add(load.id)

    # -- the model --------------------------------------------------------------------------------------------------

    def where(self) -> dict[str, list]:
        """Prompt of every block in the tree -> (slot, state) per level, None where it has none."""
        found = {}
        for prompt, node, i in self._blocks():
            found[prompt] = [
                None if slot < 0 else (int(slot), SlotState(int(self.tables[level].state[slot])))
                for level, slot in enumerate(node.slots[i])
            ]
            assert self.tokens[int(node.idents[i])] == (self.epoch, prompt)
        return found

    def _blocks(self):
        """Every block in the tree: its prompt, its node, and its position there."""
        stack = [(child, "") for child in self.state.residency.index.root.children.values()]
        while stack:
            node, prompt = stack.pop()
            letters = struct.unpack(f"<{node.n * WIDTH // 4}i", node.run[: node.n * WIDTH])[:: WIDTH // 4]
            for i, letter in enumerate(letters):
                prompt += chr(letter)
                yield prompt, node, i
            stack += [(child, prompt) for child in node.children.values()]

    def alive(self) -> dict[str, list]:
        """`where`, without what has ended by now."""
        where = self.where()
        return {
            prompt: places
            for prompt, places in where.items()
            if all(self.ends[prompt[: i + 1]] > self.now for i in range(len(prompt)))
        }

    def levels_of(self, prompt) -> list[str]:
        """Names of the levels where the last block of this prompt is readable."""
        places = self.where().get(prompt, [])
        return [
            spec.name
            for spec, place in zip(self.specs, places, strict=False)
            if place and place[1] == SlotState.RESIDENT
        ]

    def residents(self, level) -> set[str]:
        """Prompts whose last block is readable in a level."""
        return {
            prompt
            for prompt, places in self.where().items()
            if places[level] and places[level][1] == SlotState.RESIDENT
        }

    def states(self, level) -> dict[str, int]:
        """How many slots of a level are in each state (those that occur)."""
        return {
            state.name: count for state in SlotState if (count := int((self.tables[level].state == state).sum())) > 0
        }

    def check(self):
        """Everything that must hold after every step."""
        assert self.planner.check() == []
        mine = {id(slots) for _, slots in self.state.pinned}
        self.pins = [pin for pin in self.pins if any(id(slots) in mine for _, slots in pin)]
        where = self.where()
        self._check_hints()
        self._check_content(where)
        self._check_loads()
        self._check_bounds()
        self._check_all_claims(where)

    def _check_hints(self):
        """What the tree says of each block is what was said of it."""
        for prompt, node, i in self._blocks():
            said = (0, math.inf) if node.hints is None else tuple(node.hints[i].tolist())
            assert said == (self.priorities[prompt], self.ends[prompt]), f"{prompt}: {said}"

    def _check_content(self, where):
        written = {(level, slot) for r in self.running.values() for level, slots, w in r.ends() if w for slot in slots}
        seen = set()
        for prompt, places in where.items():
            for level, place in enumerate(places):
                if place is None:
                    continue
                slot, state = place
                assert (level, slot) not in seen, f"slot {slot} of level {level} belongs to two blocks"
                seen.add((level, slot))
                if state == SlotState.RESIDENT:
                    got = self.content[level][slot]
                    assert got == (self.epoch, prompt) or (got == GARBAGE and level == self.persistent), (
                        f"{prompt!r} is readable in slot {slot} of level {level}, which holds {got}"
                    )
                    assert (level, slot) not in written, f"{prompt!r} is readable while a job writes it"

    def _check_loads(self):
        for load, tokens in self.loads.values():
            if not load.done:
                continue
            assert load.id in self.announced, f"load {load.id} is done and nobody was told"
            got = self.rows[load.endpoint] if load.endpoint else [self.content[0][slot] for slot in load.slots.tolist()]
            assert load.endpoint or len(load.slots) == load.blocks
            start = self.starts[load.id]
            assert got[start : load.blocks] == tokens[start : load.blocks], (
                f"load {load.id} holds {got}, asked for {tokens}"
            )
            assert all(each is GARBAGE for each in got[: min(start, load.blocks)]), (
                f"load {load.id} wrote before {start}"
            )

    def _check_bounds(self):
        limits, levels = self.limits, range(len(self.specs))
        inbound, loaded, written_out, delayed = [[0 for _ in levels] for _ in range(4)]
        jobs = [0 for _ in range(len(self.specs) + 1)]
        shared = [0 for _ in levels]
        for running in self.running.values():
            job = running.job
            if running.overdue:
                continue
            if running.delayed:
                delayed[job.src_level] += job.n
                continue
            jobs[max(job.src_level, job.dst_level)] += 1
            for level, slots, written in running.ends():
                if running.shares:
                    shared[level] += len(slots)
                    continue
                outbound = written_out if job.kind == "write" else loaded
                (inbound if written else outbound)[level] += len(slots)
        for level, spec in enumerate(self.specs):
            bound = limits.in_flight_blocks(spec.capacity)
            assert shared[level] <= max(1, bound // 2), f"{spec.name}: {shared[level]} blocks on their way to be shared"
            assert inbound[level] <= bound, f"{spec.name}: {inbound[level]} blocks inbound, bound {bound}"
            assert loaded[level] <= bound, f"{spec.name}: {loaded[level]} blocks outbound by loads, bound {bound}"
            assert written_out[level] <= bound, f"{spec.name}: {written_out[level]} blocks written out, bound {bound}"
            assert jobs[level] <= limits.jobs, f"{spec.name}: {jobs[level]} jobs"
            assert delayed[level] <= spec.capacity // 2, f"{spec.name}: {delayed[level]} blocks delayed"
        held: list[set[int]] = [set() for _ in levels]
        for load, _ in self.loads.values():
            held[0].update(load.slots.tolist())
        for level, slots in itertools.chain.from_iterable(self.pins):
            held[level].update(slots.tolist())
        for level, spec in enumerate(self.specs):
            total = len(held[level])
            assert total <= limits.held_blocks(spec.capacity), f"{spec.name}: {total} blocks held"
        assert len(self.planner.loads._queue) <= limits.queued_loads

    def _check_all_claims(self, where):
        """What a restart would find is what the planner thinks is there: no more, no less."""
        if self.persistent is None:
            return
        held = {}
        for prompt, places in where.items():
            place = places[self.persistent]
            if place is not None and place[1] in (SlotState.RESIDENT, SlotState.BAD):
                held[place[0]] = (self.epoch, prompt)
        assert self.claims == held, f"claimed {self.claims}, resident {held}"

    def finish(self):
        """Let everything end; nothing may be left over."""
        self.take()
        while self.finds:
            self.answer()
        for _ in range(1000):
            for held in list(self.pins):
                self.unpin(held)
            for load, _ in list(self.loads.values()):
                if load.done:
                    self.release_load(load)
                    self.loads.pop(load.id, None)
            if not self.running:
                break
            self.deliver(next(iter(self.running)))
        self.check()
        assert not self.running, "jobs without end"
        assert not self.loads, f"loads {list(self.loads)} never end"
        self.tend(later_s=1000.0)
        self.deliver_all()
        self.check()
        assert not self.state.unwritten, "blocks wait to be written, and nothing is in flight"
        for level, table in enumerate(self.tables):
            assert not table.pins.any()
            assert set(self.states(level)) <= {"FREE", "RESIDENT", "BAD"}
            credit = self.state.credits[level]
            assert (credit.jobs, credit.inbound, credit.outbound, credit.outbound_writes) == (0, 0, 0, 0)
            assert (credit.held, credit.delayed, credit.lost_jobs, credit.shared) == (0, 0, 0, 0)
        if self.planner.remote_writes is not None:
            assert self.planner.remote_writes.is_idle and not self.planner.remote_writes.under_way
        assert not self.planner.loads.open and not self.planner.loads._queue

    def recovered(self) -> Recovered:
        """What a restart would find: claims that are reached from a root, in slot-table form."""
        slots, parents, index = [], [], {}
        for slot in sorted(self.claims, key=lambda each: (len(self.claims[each][1]), each)):
            above = self.parents[slot]
            if above != ROOT and above not in index:
                continue
            index[slot] = len(slots)
            slots.append(slot)
            parents.append(ROOT if above == ROOT else index[above])
        prompts = [self.claims[slot][1] for slot in slots]
        idents = {token: ident for ident, token in self.tokens.items()}
        return Recovered(
            np.array(slots, dtype=np.int32),
            np.array(parents, dtype=np.int64),
            np.array([idents[self.claims[slot]] for slot in slots], dtype=np.uint64),
            b"".join(symbols_of(prompt[-1]) for prompt in prompts),
            np.array([self.last_use(prompt) for prompt in prompts]),
            np.ones(len(slots), dtype=np.uint32),
        )

    def last_use(self, prompt) -> float:
        """When the last block of a prompt was used last."""
        path = self.state.residency.index.walk(*self.encode(prompt)).path
        node, take = path.end
        return float(node.last_use[take - 1])
