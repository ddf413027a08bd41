"""Several ranks as one: what all of them found, and jobs that are over when all have said so."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import ConfigError
from tiercache.integrations.vllm_messages import Hello
from tiercache.integrations.vllm_ranks import RankResults, agree
from tiercache.types import ROOT, JobOverdue, JobResult, LevelSpec, LostClaims, Recovered

EPOCH = b"epoch"


def recovered(slots, parents, idents):
    n = len(slots)
    symbols = b"".join(bytes([ident]) * 4 for ident in idents)
    return Recovered(
        np.array(slots, dtype=np.int32),
        np.array(parents, dtype=np.int64),
        np.array(idents, dtype=np.uint64),
        symbols,
        np.arange(n, dtype=np.float64),
        np.ones(n, dtype=np.uint32),
    )


def hello(rank, found, epoch=EPOCH, capacity=16, **identity):
    specs = (LevelSpec("dram", 8, 64), LevelSpec("nvme", capacity, 64, persistent=True))
    return Hello(rank, epoch, {"model": "m", **identity}, specs, found)


def agreed(*founds, epoch=EPOCH):
    return agree({rank: hello(rank, found) for rank, found in enumerate(founds)}, epoch)


def test_what_only_some_ranks_have_is_forgotten_with_what_hangs_on_it():
    mine = recovered([0, 1, 2, 5], [ROOT, 0, 1, ROOT], [10, 11, 12, 15])
    other = recovered([0, 2, 5, 7], [ROOT, ROOT, ROOT, ROOT], [10, 12, 15, 17])
    both = agreed(mine, other)
    assert both.recovered.idents.tolist() == [10, 15] and both.recovered.parents.tolist() == [ROOT, ROOT]
    assert both.recovered.symbols == b"\x0a" * 4 + b"\x0f" * 4
    assert both.lacking.tolist() == [1, 2, 7]
    assert both.recovered.forgotten == 2


def test_one_slot_with_two_blocks_is_nobodys():
    both = agreed(recovered([3], [ROOT], [1]), recovered([3], [ROOT], [2]))
    assert len(both.recovered.slots) == 0 and both.lacking.tolist() == [3]


@pytest.mark.parametrize("file", [None, EPOCH, b"other"])
@pytest.mark.parametrize("second", [EPOCH, b"other"])
def test_ranks_and_file_must_be_of_one_epoch(file, second):
    found = recovered([0], [ROOT], [1])
    result = agree({0: hello(0, found), 1: hello(1, found, second)}, file)
    same = second == EPOCH and file in (None, EPOCH)
    assert (result.epoch, result.recovered is None) == ((EPOCH, False) if same else (None, True))


def test_a_level_is_as_large_as_on_its_smallest_rank():
    found = recovered([0, 9], [ROOT, ROOT], [1, 2])
    result = agree({0: hello(0, found), 1: hello(1, found, capacity=4)}, EPOCH)
    assert [spec.capacity for spec in result.specs] == [8, 4]
    assert result.recovered.slots.tolist() == [0] and result.lacking.tolist() == [9]


def test_ranks_of_two_models_are_refused():
    with pytest.raises(ConfigError, match=r"rank 1: model.*rank 0 has 'm'"):
        agree({0: hello(0, None), 1: hello(1, None, model="n")}, None)


@given(st.data())
def test_what_is_left_is_what_all_have_and_closed(data):
    n = data.draw(st.integers(1, 12))
    parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
    whole = recovered(range(n), parents, range(1, n + 1))
    have = [np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n))) for _ in range(2)]
    founds = []
    for kept in have:
        rows = np.flatnonzero(kept)
        founds.append(
            Recovered(
                whole.slots[rows],
                np.full(len(rows), ROOT, dtype=np.int64) if len(rows) < n else whole.parents,
                whole.idents[rows],
                b"".join(bytes([i + 1]) * 4 for i in rows),
                whole.last_use[rows],
                whole.uses[rows],
            )
        )
    result = agreed(whole, *founds)
    common = have[0] & have[1]
    for i in range(n):
        common[i] &= parents[i] == ROOT or common[parents[i]]
    assert result.recovered.idents.tolist() == (np.flatnonzero(common) + 1).tolist()
    assert result.lacking.tolist() == np.flatnonzero(~common).tolist()
    for i, parent in enumerate(result.recovered.parents.tolist()):
        mine = int(result.recovered.idents[i]) - 1
        assert parent == ROOT if parents[mine] == ROOT else result.recovered.idents[parent] == parents[mine] + 1


def result(ok, reason="", bad=None, seconds=0.1):
    bad = None if bad is None else np.array(bad)
    return JobResult(7, np.array(ok), 64, seconds, reason=reason, bad=bad)


def test_a_job_is_over_when_all_ranks_have_said_so():
    ranks = RankResults(2)
    assert ranks.take({0: [result([True, True])]}) == []
    (both,) = ranks.take({1: [result([True, False], "checksum", [False, True], 0.3)]})
    assert both.ok.tolist() == [True, False] and (both.nbytes, both.seconds, both.reason) == (128, 0.3, "checksum")
    assert ranks.take({0: [result([True, True])]}) == []  # the number was used again: nothing is left of the first


def test_what_is_bad_on_one_rank_is_bad():
    ranks = RankResults(2)
    ranks.take({1: [result([True, False], "io", [False, True])]})
    (both,) = ranks.take({0: [result([True, True], bad=[False, False])]})
    assert both.bad.tolist() == [False, True]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize(("grave", "other"), [("deadline", "missing"), ("io", "refused"), ("io", "cancelled")])
def test_the_gravest_reason_counts(order, grave, other):
    """A rank whose store is dead is not excused by one whose store lacks the block."""
    ranks, both = RankResults(2), []
    for rank in order:
        both += ranks.take({rank: [result([False], (grave, other)[rank])]})
    assert [each.reason for each in both] == [grave]


def test_overdue_is_told_once_no_rank_touches_its_memory_any_more():
    """A write to a key tier gives its source free when it is overdue: also where another rank was about to read it."""
    ranks = RankResults(2)
    assert ranks.take({1: [JobOverdue(7)]}) == []
    assert ranks.take({0: [JobOverdue(7), result([False])]}) == [JobOverdue(7)]
    assert len(ranks.take({1: [result([False])]})) == 1
    assert ranks.take({0: [result([True])]}) == []
    assert ranks.take({1: [JobOverdue(7)]}) == [JobOverdue(7)], "over on the other"
    assert len(ranks.take({1: [result([False])]})) == 1


def test_an_overdue_job_that_ended_before_the_other_rank_said_anything_is_both():
    ranks = RankResults(2)
    assert ranks.take({0: [JobOverdue(7), result([False])]}) == []
    overdue, over = ranks.take({1: [result([True])]})
    assert overdue == JobOverdue(7) and over.ok.tolist() == [False]


def test_lost_claims_of_any_rank_are_told():
    lost = LostClaims(np.array([1], dtype=np.int32))
    assert RankResults(2).take({1: [lost]}) == [lost]


def test_one_rank_needs_no_putting_together():
    mine = replace(result([True]), rank=0)
    assert RankResults(1).take({0: [mine]}) == [mine]
