"""The benchmarks measure what they say: pairs alternate, warm-up does not count, wrong or stale bytes are found."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from bench.pairs import Figure, Pairs, Seconds, Spread
from bench.payload import Payload
from bench.report import markdown, newest
from bench.rows import ROWS, Row, row
from bench.scale import Scale
from bench.session import Session, command_line


class Stopwatch:
    """pytest-benchmark's `pedantic`, as far as pairs use it; each round takes a made-up time."""

    def __init__(self, seconds: list[float]) -> None:
        self.stats = None
        self.extra_info: dict[str, object] = {}
        self._seconds = iter(seconds)

    def pedantic(self, target, setup, teardown, rounds, warmup_rounds):
        self.stats = SimpleNamespace(stats=SimpleNamespace(data=[]))
        for i in range(warmup_rounds + rounds):
            args, kwargs = setup()
            target(*args, **kwargs)
            if i >= warmup_rounds:
                self.stats.stats.data.append(next(self._seconds))
            teardown(*args, **kwargs)


def a_row(measure="times", target=2.0):
    return Row("a/row", "a", "work", "reference", measure, target)


def run(seconds, references, measure="times", warmup=1, **options):
    figures = []
    pairs = Pairs(Stopwatch(seconds), figures.append)
    pairs.run(a_row(measure), lambda _: None, references, pairs=len(seconds), warmup=warmup, **options)
    return figures[0]


def test_reference_is_first_in_every_other_pair_and_everything_gets_a_fresh_argument():
    calls = []
    arguments = iter(range(100))
    Pairs(Stopwatch([1.0] * 3), lambda _: None).run(
        a_row(),
        lambda argument: calls.append(("work", argument)),
        {"one": lambda argument: calls.append(("one", argument))},
        pairs=3,
        warmup=1,
        fresh=lambda: next(arguments),
        after=lambda: calls.append("after"),
    )
    names = ["one", "work", "work", "one", "one", "work", "work", "one"]
    assert [call[0] for call in calls if call != "after"] == names
    assert [call[1] for call in calls if call != "after"] == list(range(8))
    assert calls[2::3] == ["after"] * 4


def test_ratio_is_the_median_of_pairs_without_the_warm_up():
    reference = iter([Seconds(1000.0), Seconds(1.0), Seconds(2.0), Seconds(4.0)])
    figure = run([3.0, 4.0, 4.0], {"one": lambda _: next(reference)})
    assert figure.value == Spread(2.0, 1.0, 3.0, 1.5, 2.5)
    assert figure.work_s.median == 4.0 and figure.references_s["one"].median == 2.0


def test_share_is_the_other_way_round():
    assert run([4.0, 4.0], {"one": lambda _: Seconds(1.0)}, "share").value.median == 0.25


def test_reference_is_the_one_with_the_better_median():
    first = iter([9.0, 1.0, 9.0])
    figure = run([6.0] * 3, {"a": lambda _: Seconds(next(first)), "b": lambda _: Seconds(3.0)}, warmup=0)
    assert figure.chosen == "b" and figure.value.median == 2.0 and set(figure.references_s) == {"a", "b"}


def test_processor_time_is_told_where_it_is_known():
    assert run([1.0], {"one": lambda _: Seconds(1.0)}).cpu_ratio is None
    figures = []
    Pairs(Stopwatch([9.0] * 3), figures.append).run(
        a_row(), lambda _: Seconds(2.0, 6.0), {"one": lambda _: Seconds(1.0, 2.0)}, pairs=3
    )
    assert figures[0].cpu_ratio == 3.0 and figures[0].value.median == 2.0
    assert run([1.0], {"one": lambda _: sum(range(100_000))}).cpu_ratio is not None


def test_wrong_result_ends_the_row():
    def check(result):
        raise AssertionError("wrong")

    with pytest.raises(AssertionError, match="wrong"):
        run([1.0], {"one": lambda _: None}, check=check)


@pytest.mark.parametrize(
    ("measure", "value", "verdict"),
    [
        ("times", 2.0, "reached"),
        ("times", 2.1, "not reached"),
        ("share", 2.0, "reached"),
        ("share", 1.9, "not reached"),
    ],
)
def test_verdict(tmp_path, measure, value, verdict):
    session = Session(Scale("full"), tmp_path, "command")
    figure = Figure(a_row(measure), Spread.of([value]), 1)
    session.add(figure)
    assert figure.verdict == verdict
    assert session.as_dict()["verdict"]["not_reached"] == (["a/row"] if verdict == "not reached" else [])


def test_no_verdict_without_a_target_nor_on_a_smoke_run(tmp_path):
    stated, smoke = Figure(a_row(target=None), Spread.of([9.0]), 1), Figure(a_row(), Spread.of([9.0]), 1)
    Session(Scale("full"), tmp_path, "").add(stated)
    Session(Scale("smoke"), tmp_path, "").add(smoke)
    assert (stated.verdict, smoke.verdict) == ("stated", "not judged")


def test_results_carry_no_path_of_a_machine():
    given = ["-q", "bench", "--bench-dir=/mnt/x y", "--bench-trace", "/home/me/t.gz", "-k", "nvme or reopen"]
    wanted = "python -m pytest -q bench --bench-dir=PATH --bench-trace PATH -k 'nvme or reopen'"
    assert command_line(given) == wanted


def test_payload_tells_rounds_blocks_and_pages_apart():
    payload = Payload(8192)
    rows = payload.rows(3, round_=5, first=7)
    payload.check(rows, 5, 7)
    for round_, first in ((4, 7), (5, 8)):
        with pytest.raises(AssertionError):
            payload.check(rows, round_, first)
    swapped = rows.copy()
    swapped[0, :4096], swapped[0, 4096:] = rows[0, 4096:], rows[0, :4096]
    flipped = rows.copy()
    flipped[2, 5000] ^= 1
    for wrong in (swapped, flipped):
        with pytest.raises(AssertionError):
            payload.check(wrong, 5, 7)
    payload.stamp(rows, 6, 7)
    payload.check(rows, 6, 7)


def test_rows_have_names_of_their_own_and_limits_as_asked():
    assert len({each.id for each in ROWS}) == len(ROWS)
    limits = {each.id: each.target for each in ROWS if each.target is not None}
    assert limits["lookup/1"] == 5 and limits["lookup/8192"] == 250 and limits["lookup/absent"] == 1
    assert limits["commit/out"] == 0.02 and limits["memory/trace"] == 250
    assert limits["dram/store/262144"] == 0.85 and limits["dram/load/2097152"] == 0.9
    assert limits["nvme/read/262144/16"] == limits["nvme/write/2097152/16"] == 0.8
    assert row("reopen/1000000/clean").target == 6 and row("threads/store/8").target == 0.9
    assert row("eviction/evict/1000000").target == 2
    assert limits["remote/off"] == limits["remote/open"] == 1.05


def test_page_is_never_that_of_a_part(tmp_path):
    for name in ("20260101T000000Z-a.json", "20260102T000000Z-a-part.json", "20260103T000000Z-a-quick.json"):
        (tmp_path / name).write_text("{}")
    assert newest(tmp_path).name == "20260101T000000Z-a.json"


def test_partial_and_small_runs_are_named_so(tmp_path):
    names = [
        Session(Scale("full"), tmp_path, "").write(tmp_path).stem,
        Session(Scale("full"), tmp_path, "", partial=True).write(tmp_path).stem,
        Session(Scale("quick"), tmp_path, "").write(tmp_path).stem,
    ]
    assert [name.rpartition("-")[2] for name in names][1:] == ["part", "quick"]
    assert newest(tmp_path).stem == names[0]


def test_page_tells_what_is_missing(tmp_path):
    session = Session(Scale("full"), tmp_path, "make bench")
    session.skipped["test_nvme"] = "fio is missing"
    session.failed.append("test_dram")
    facts = {"blocks": 1, "nodes": 1, "slot_tables_per_block": 60.0}
    session.add(Figure(row("memory/trace"), Spread.of([249.0]), 1, facts=facts))
    page = markdown(session.as_dict(), "x.json")
    assert "- test_nvme: fio is missing" in page and "- test_dram: failed" in page
    assert "| at most 250 | **249** bytes a block |" in page and "| reached |" in page
