"""What must not leave although it is the coldest: the path that room is made for, what others hang on, and bounds."""

from planner_kit import Bench, dram, hbm, nvme

from tiercache.planner.state import Limits


def on_nvme(bench, prompt, start=0):
    bench.stored(prompt, start)
    bench.drain()
    bench.deliver_all()
    assert prompt in bench.residents(bench.persistent)


def test_a_load_does_not_evict_the_part_of_its_path_that_is_there():
    bench = Bench(dram(8), nvme(40), exclusive=False)
    on_nvme(bench, "abcd")
    on_nvme(bench, "qrst")
    on_nvme(bench, "uvwx")
    bench.now += 1
    first = bench.load("a")
    bench.deliver_all()
    bench.release_load(first)
    bench.now += 1
    bench.touch("qrst")
    bench.touch("uvwx")
    assert "a" in bench.residents(0) and not bench.tables[0].free
    load = bench.load("abcd")
    bench.deliver_all()
    assert load.done and load.blocks == 4
    bench.check()
    bench.finish()


def test_a_store_does_not_evict_its_own_parent():
    bench = Bench(dram(4))
    bench.stored("ab")
    bench.now += 1
    bench.stored("xy")
    plan = bench.stored("abcd", 2)
    assert (plan.accepted, plan.reason) == (2, "")
    assert bench.residents(0) == {"a", "ab", "abc", "abcd"}
    bench.finish()


def test_exclusive_promotion_leaves_a_fork_below():
    bench = Bench(dram(4), nvme(12), exclusive=True)
    on_nvme(bench, "abx")
    on_nvme(bench, "aby", 2)
    on_nvme(bench, "qrst")
    assert bench.lookup("ab").by_level == (0, 2)
    bench.load("ab", out=True)
    bench.deliver(bench.job("load").id)
    assert bench.lookup("ab").by_level == (2, 0)
    assert bench.residents(1) >= {"a", "ab", "abx", "aby"}
    bench.finish()


def test_what_hangs_on_a_block_keeps_it_from_being_dropped_in_place():
    """NVMe is offline, so that DRAM can copy nothing down; HBM alone has the child of what DRAM alone has."""
    bench = Bench(hbm(2), dram(1), nvme(8))
    bench.stored("m")
    while bench.state.online(2):
        bench.drain()
        bench.deliver(bench.job("write").id, False, "io")
    bench.invalidate("m")
    bench.stored("ab")
    bench.deliver_all()
    bench.stored("abc", 2)
    assert [bench.levels_of(prompt) for prompt in ("a", "ab", "abc")] == [["hbm"], ["dram"], ["hbm"]]
    assert bench.stored("p").accepted == 1
    bench.check()
    assert bench.lookup("ab").by_level == (1, 1, 0)
    bench.finish()


def test_what_is_pinned_stays_although_nothing_else_is_left():
    """NVMe is offline, so that everything else is dropped in place for the store."""
    bench = Bench(dram(4), nvme(8))
    bench.stored("m")
    while bench.state.online(1):
        bench.drain()
        bench.deliver(bench.job("write").id, False, "io")
    bench.invalidate("m")
    bench.stored("ab")
    pin = bench.pin("a")
    assert bench.stored("cdef").accepted == 3
    bench.check()
    assert bench.residents(0) == {"a", "c", "cd", "cde"}
    bench.unpin(pin)
    bench.finish()


def test_jobs_of_a_level_are_bounded():
    bench = Bench(dram(8), limits=Limits(jobs=2))
    bench.stored("abcd")
    loads = [bench.load("a", out=True) for _ in range(5)]
    assert len(bench.jobs("load")) == 2
    bench.check()
    bench.deliver_all()
    assert all(load.done and load.blocks == 1 for load in loads)
    bench.finish()


def test_blocks_of_one_use_and_different_bonuses_leave_one_kind_at_a_time():
    bench = Bench(dram(8), policy="reuse")
    bench.stored("abcdef")
    node = bench.state.residency.index.root.children[bench.encode("a")[0]]
    node.marks["bonus"][:] = [0, 0, 0, -5, -5, -5]
    assert bench.planner.victims.coldest_run(0, node, 5, 6, True) == 3
    assert bench.planner.victims.coldest_run(0, node, 2, 6, True) == 0


def test_a_persistent_level_has_a_bonus_of_its_own():
    bench = Bench(dram(2), nvme(4), policy="reuse")
    for prompt in "abcdef":
        bench.now += 1
        bench.stored(prompt)
        bench.drain()
        bench.deliver_all()
    assert bench.residents(1) == set("cdef") and bench.residents(0) == set("ef")
    for prompt, bonus, below in (("c", -9, 0), ("d", 0, -9)):
        node = bench.state.residency.index.root.children[bench.encode(prompt)[0]]
        node.marks["bonus"], node.marks["below"] = bonus, below
        bench.state.residency.stale[node] = None
    bench.now += 1
    bench.stored("g")
    bench.drain()
    bench.deliver_all()
    assert bench.residents(1) == set("cefg"), "d goes first: what counts in memory counts for nothing here"
    bench.finish()
