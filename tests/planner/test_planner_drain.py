"""A drain that is cut short leaves the most reusable part on the persistent level, and all of it reachable."""

import random

import numpy as np
import pytest
from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.state import Limits


def keys_of(bench, level=-1):
    """Block -> its key in the order of the last level."""
    level %= len(bench.specs)
    names = {ident: prompt for ident, (_, prompt) in bench.tokens.items()}
    return {
        names[int(node.idents[at])]: bench.planner.victims.key(level, node, at)
        for node in bench.state.residency.index.walk_nodes()
        for at in range(node.n)
        if node.parent is not None
    }


def drained(bench, blocks):
    """Drain, and let jobs end one by one until so many blocks were written."""
    bench.drain()
    while bench.running and len(bench.residents(len(bench.specs) - 1)) < blocks:
        bench.deliver(next(iter(bench.running)))
    return bench.residents(len(bench.specs) - 1)


def filled(chance, *specs, **options):
    bench = Bench(*specs, policy="reuse", limits=Limits(job_blocks=2), **options)
    for _ in range(25):
        bench.now += chance.choice([1.0, 20.0])
        prompt = "".join(chance.choice("abcdefgh"[i : i + 3]) for i in range(chance.randint(1, 6)))
        bench.stored(prompt, bench.load(prompt, out=True).blocks)
        bench.deliver_all()
        if chance.random() < 0.2:
            bench.hint(prompt)
    for node in bench.state.residency.index.walk_nodes():
        if node.marks is not None:
            node.marks["below"] = -chance.choice([0, 30, 60]) * np.arange(1, node.n + 1) // 2
    return bench


@pytest.mark.parametrize("specs", [(dram(200), nvme(400)), (hbm(80), dram(200), nvme(400))], ids=["two", "three"])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_when_time_runs_out_is_what_the_level_would_keep_longest(seed, specs):
    bench = filled(random.Random(seed), *specs)
    keys = keys_of(bench)
    written = drained(bench, len(keys) // 3)
    left = keys.keys() - written
    assert len(written) >= 8 and len(left) >= 8
    assert all(prompt[:-1] in written for prompt in written if prompt[:-1]), "nothing that cannot be reached"
    wanted = {prompt: max(key for other, key in keys.items() if other.startswith(prompt)) for prompt in written}
    assert min(wanted.values()) >= max(keys[prompt] for prompt in left), "its own key, or that of what hangs on it"
    assert bench.planner.check() == []


def test_a_long_run_is_written_from_its_hot_end():
    bench = Bench(dram(64), nvme(64), limits=Limits(job_blocks=2))
    bench.stored("abcdefgh")
    bench.now += 1
    bench.stored("xy")
    bench.now += 1
    bench.touch("abc")
    bench.drain()
    order = [bench.tokens[ident][1] for job in bench.jobs("write") for ident in job.idents.tolist()]
    assert order == ["a", "ab", "abc", "x", "xy", "abcd", "abcde", "abcdef", "abcdefg", "abcdefgh"]


def test_what_was_released_comes_last():
    bench = Bench(dram(32), nvme(64), limits=Limits(job_blocks=2))
    for prompt in ("ab", "cd", "ef"):
        bench.now += 1
        bench.stored(prompt)
    bench.hint("ef")
    bench.drain()
    order = [bench.tokens[ident][1] for job in bench.jobs("write") for ident in job.idents.tolist()]
    assert order == ["c", "cd", "a", "ab", "e", "ef"]
