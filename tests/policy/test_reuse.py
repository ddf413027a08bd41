"""Reuse, by runs of blocks, against the same rules block by block."""

import math
import random

import pytest
from planner_kit import Bench, dram, nvme

from tiercache.policy.reuse import (
    FADE,
    FADE_EVERY,
    GAP_FADE,
    LONGEST_GAP,
    PRIOR,
    STRENGTH,
    WINDOW,
    WINDOW_BELOW,
    _Window,
)


class Window:
    """What is used again before `length` slots were given out, told block by block. A block is the prompt that ends
    with it."""

    def __init__(self, length):
        self.length = length
        self.seen, self.again, self.mean = [0.0] * 48, [0.0] * 48, 0.5
        self.gap_sum = self.gap_count = self.gap = 0.0
        self.last = {}
        """Block -> (time, class, slots given out before that request), of all that is not forgotten."""

    def expire(self, given_out):
        for block, (_, kind, before) in list(self.last.items()):
            if before < given_out - self.length:
                self.seen[kind] += 1
                del self.last[block]

    def fade(self):
        self.seen = [each * FADE for each in self.seen]
        self.again = [each * FADE for each in self.again]
        self.mean = (sum(self.again) + 1) / (sum(self.seen) + 2)

    def share(self, kind):
        return (self.again[kind] + PRIOR * self.mean) / (self.seen[kind] + PRIOR)

    def came_back(self, block, now):
        last = self.last.get(block)
        if last is None:
            return
        time, kind, _ = last
        self.seen[kind] += 1
        self.again[kind] += 1
        gap = min(now - time, LONGEST_GAP * self.gap) if self.gap else now - time
        self.gap_sum = self.gap_sum * GAP_FADE + gap
        self.gap_count = self.gap_count * GAP_FADE + 1


class Blocks:
    """The rules of the policy, told block by block."""

    def __init__(self, capacity, below=0):
        first = WINDOW * capacity
        self.soon, self.held = Window(first), Window(max(first, below))
        self.below = Window(max(first, WINDOW_BELOW * below))
        self.windows, self.requests = [self.soon, self.held, self.below], 0
        self.uses, self.bonus, self.given_out = {}, {}, {}

    def stage(self, prompt, begin, end, now, given_out, size, goes_on, new=False):
        """A request uses blocks `[begin, end)` of its prompt: what it loads, or what it stores."""
        self.requests += not goes_on
        for window in self.windows:
            window.expire(given_out)
            if not goes_on and self.requests % FADE_EVERY == 0:
                window.fade()
            window.gap = window.gap_sum / window.gap_count if window.gap_count >= PRIOR else 0.0
        given_out, bonuses = self.given_out.setdefault(now, given_out), {}
        for i in range(begin if goes_on else 0):  # used by this request before, only later than it seemed
            for window in self.windows:
                window.last[prompt[: i + 1]] = (now, window.last[prompt[: i + 1]][1], given_out)
        for i in range(begin, end):
            if new and prompt[: i + 1] not in self.below.last:  # neither there nor remembered: it begins anew
                self.uses.pop(prompt[: i + 1], None)
            for window in self.windows:
                window.came_back(prompt[: i + 1], now)
        for i in range(begin, end):
            block = prompt[: i + 1]
            partial = block[-1].isupper()
            kind = (size * 3 + min(self.uses.get(block, 0), 2)) * 2 + partial
            if kind not in bonuses:
                pair = (self.soon, self.below)
                bonuses[kind] = tuple(STRENGTH * each.gap * math.log(each.share(kind)) for each in pair)
            for window in self.windows:
                window.last[block] = (now, kind, given_out)
            self.uses[block] = self.uses.get(block, 0) + 1
            self.bonus[block] = bonuses[kind]

    def request(self, prompt, found, there, loaded, stored):
        """`found` blocks were there before it, `there` after it. loaded, stored: time, and slots given out."""
        if found:
            self.stage(prompt, 0, found, *loaded, min(7, (len(prompt) - found).bit_length()), False)
        if found < len(prompt) and there:
            self.stage(prompt, found, there, *stored, min(7, (there - found).bit_length()), found > 0, new=True)


def serve(bench, prompt, later=0.0):
    """One request: lookup, load, and `later` the store of the rest. Returns blocks found, and blocks there after it."""
    return serve_and_count(bench, prompt, later)[:2]


def serve_and_count(bench, prompt, later):
    """Also how many slots were given out when the load was planned."""
    load = bench.load(prompt, out=True)
    given_out = bench.tables[0].taken
    bench.now += later
    plan = bench.stored(prompt, load.blocks) if load.blocks < len(prompt) else None
    bench.deliver_all()
    return load.blocks, load.blocks + (plan.accepted if plan else 0), given_out


def prompts(chance, n):
    """Conversations that grow, and prompts that come once; some with a partial tail."""
    talks = ["s", "s", "t", ""]
    for _ in range(n):
        if chance.random() < 0.4:
            yield chance.choice(["s", ""]) + "".join(chance.choice("abcdefgh") for _ in range(chance.randint(1, 9)))
            continue
        which = chance.randrange(len(talks))
        if len(talks[which]) > 20:
            talks[which] = chance.choice("stuv")
        talks[which] += "".join(chance.choice("mnop") for _ in range(chance.randint(0, 4)))
        yield talks[which] + (chance.choice("XYZ") if chance.random() < 0.3 or not talks[which] else "")


def marks_of(bench):
    """Block -> (last use, uses, bonuses) of all that is in the tree."""
    found = {}
    by_ident = {ident: prompt for ident, (_, prompt) in bench.tokens.items()}
    for node in bench.state.residency.index.walk_nodes():
        for i in range(node.n):
            mark = node.marks[i] if node.marks is not None else {"bonus": 0.0, "below": 0.0}
            bonuses = (float(mark["bonus"]), float(mark["below"]))
            found[by_ident[int(node.idents[i])]] = (float(node.last_use[i]), int(node.uses[i]), bonuses)
    return found


@pytest.mark.parametrize("later", [0.0, 3.0])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("capacity", "below"), [(6, 0), (24, 0), (70, 0), (6, 40), (12, 60), (10, 25)])
def test_counts_and_bonuses_are_those_of_the_rules_block_by_block(capacity, below, seed, later):
    chance = random.Random(seed * 1000 + capacity)
    specs = (dram(capacity), nvme(below)) if below else (dram(capacity),)
    bench, rules = Bench(*specs, policy="reuse"), Blocks(capacity, below)
    policy = bench.state.policy
    came_back = 0
    for prompt in prompts(chance, 250):
        bench.now += chance.choice([0.5, 1.0, 7.0])
        began = bench.now
        found, there, given_out = serve_and_count(bench, prompt, later)
        came_back += found
        rules.request(prompt, found, there, (began, given_out), (bench.now, bench.tables[0].taken))
        pairs = ((policy._soon, rules.soon), (policy._held, rules.held), (policy._below, rules.below))
        for window, rule in pairs:
            assert (window.length, window.seen) == (rule.length, pytest.approx(rule.seen)), prompt
            assert window.again == pytest.approx(rule.again), prompt
        for block, (last_use, uses, bonuses) in marks_of(bench).items():
            last = rules.below.last
            assert (last_use, uses) == (last[block][0] if block in last else last_use, rules.uses[block])
            assert bonuses == pytest.approx(rules.bonus[block], rel=1e-5), block
    assert came_back > 100
    for rule in rules.windows:
        assert sum(rule.again) > 20 and sum(rule.seen) > sum(rule.again) + (20 if rule is rules.soon else 0)
    assert len({id(window) for window in policy._windows}) == len({rule.length for rule in rules.windows})
    assert bench.planner.check() == []


def waiting_of(bench):
    """Per instant that is remembered, the blocks that wait there: by its counts, and by the blocks and ghosts."""
    policy = bench.state.policy
    counted = {each.time: sum(each.waiting.values()) for window in policy._windows for each in window.instants}
    there = dict.fromkeys(counted, 0)
    for node in bench.state.residency.index.walk_nodes():
        for time in node.last_use.tolist():
            if time in there and node.marks is not None:
                there[time] += 1
    for ghost in policy._ghosts.values():
        there[ghost.instant.time] += len(ghost.idents)
    return counted, there


def test_what_comes_back_late_counts_for_the_next_level_only():
    bench = Bench(dram(2), nvme(200), policy="reuse")
    policy = bench.state.policy
    serve(bench, "a")
    for letter in "bcdefghijklmnop":
        bench.now += 1
        serve(bench, letter)
    bench.now += 1
    assert serve(bench, "a") == (1, 1), "from the level below"
    kind = 2 * 3 * 1  # one new block, never used before, no tail
    assert policy._soon.again[kind] == 0 and policy._soon.seen[kind] >= 7
    for window in (policy._held, policy._below):
        assert window.again[kind] == 1 and window.seen[kind] == 1, "of the others it is not known yet"
    node = bench.state.residency.index.root.children[bench.encode("p")[0]]
    assert policy.worth(node, 0) == 1.0, "too little is known"
    policy._held.observed, policy._held.again[kind], policy._held.seen[kind] = 100, 20.0, 90.0
    assert policy.worth(node, 0) == pytest.approx((20 + 30 * 0.5) / (90 + 30))


def test_a_quiet_night_changes_little_of_what_a_gap_is():
    """12 hours between two uses of everything there is: recency must not drown in it."""
    bench, chance = Bench(dram(60), policy="reuse"), random.Random(5)
    policy = bench.state.policy
    for prompt in prompts(chance, 200):
        bench.now += 2
        serve(bench, prompt)
    before = policy._soon.gap_sum / policy._soon.gap_count
    bench.now += 12 * 3600
    for prompt in prompts(chance, 30):
        bench.now += 2
        serve(bench, prompt)
    assert policy._soon.gap_sum / policy._soon.gap_count < 2 * before


def test_less_than_nothing_counts_as_nothing():
    """A clock that stood still while its instant was given up makes such numbers; a share below 0 has no logarithm."""
    shares = _Window()
    shares.count([(3, -50), (4, 2)], again=True)
    assert (shares.seen[3], shares.again[3], shares.seen[4], shares.observed) == (0, 0, 2, 2)


def test_a_clock_that_stands_still_costs_nothing_but_what_is_learnt():
    bench, chance = Bench(dram(8), policy="reuse"), random.Random(2)
    for prompt in prompts(chance, 3000):
        serve(bench, prompt)
    policy = bench.state.policy
    assert min(policy._soon.seen) >= 0 and bench.planner.check() == []


@pytest.mark.parametrize("start", ["found", "beginning"])
def test_a_request_that_stores_all_of_its_prompt_is_one_use_too(start):
    bench = Bench(dram(20), policy="reuse")
    bench.stored("ab")
    bench.now += 1
    load = bench.load("abcd", out=True)
    bench.deliver_all()
    bench.now += 1
    bench.stored("abcd", load.blocks if start == "found" else 0)
    uses = {block: uses for block, (_, uses, _) in marks_of(bench).items()}
    assert uses == {"a": 2, "ab": 2, "abc": 1, "abcd": 1}


def test_hits_alone_remember_a_bounded_number_of_instants():
    bench = Bench(dram(8), policy="reuse")
    bench.stored("ab")
    for _ in range(1500):
        bench.now += 1
        bench.touch("ab")
    assert len(bench.state.policy._soon.instants) <= 1025 and len(bench.state.policy._instants) <= 2050


def test_a_request_that_stores_when_its_load_is_long_forgotten():
    bench = Bench(dram(8), policy="reuse")
    bench.stored("ab")
    bench.now += 1
    bench.load("abcd", 2)
    for i in range(10):
        bench.now += 1
        bench.stored("vwxyz"[i % 5] * 6)
        bench.load("ab", 2, out=True)
        bench.deliver_all()
    bench.now += 1
    bench.stored("abcd", 2)
    bench.now += 1
    assert bench.load("abcd", out=True).blocks == 4
    counted, there = waiting_of(bench)
    assert counted == there and min(counted.values()) >= 0


@pytest.mark.parametrize("seed", range(6))
def test_every_block_waits_at_its_instant_whatever_happens(seed):
    """Loads, stores, invalidation, a lower level, several requests at once, credits that run out."""
    chance = random.Random(seed)
    bench = Bench(dram(20), nvme(40), policy="reuse")
    served = []
    for prompt in prompts(chance, 300):
        bench.now += chance.choice([0.0, 1.0])
        action = chance.random()
        if action < 0.55:
            served.append((prompt, bench.load(prompt, out=True).blocks))
        elif action < 0.65:
            bench.touch(prompt)
        elif action < 0.7:
            bench.planner.invalidate(*bench.encode(prompt[:3]), bench.now)
            bench.take()
        if served and chance.random() < 0.6:
            earlier, blocks = served.pop(chance.randrange(len(served)))
            bench.store(earlier, blocks)
        if chance.random() < 0.4:
            bench.deliver_all()
        counted, there = waiting_of(bench)
        assert {k: v for k, v in counted.items() if v} == {k: v for k, v in there.items() if v}
        assert bench.planner.check() == []
