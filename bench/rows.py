"""What is measured, and what it must reach. One `Row` per figure, in the order of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ROWS", "Row", "row"]

Measure = Literal["times", "share", "bytes a block"]
"""times: work's seconds / reference's, at most the target. share: reference's / work's, at least the target."""


@dataclass(frozen=True)
class Row:
    """One figure."""

    id: str
    family: str
    """Its section and picture."""
    what: str
    reference: str
    measure: Measure
    target: float | None = None
    """None: stated, not judged."""
    series: str = ""
    """Its line in the picture."""
    x: float = 0.0
    """Its place on the picture's axis."""

    def reached(self, value: float) -> bool | None:
        """Does a figure meet the target? None where there is none."""
        if self.target is None:
            return None
        return value >= self.target if self.measure == "share" else value <= self.target


EQUAL = "`np.array_equal` of two such arrays"
PROMPT = "lookup of 131,072 int32 tokens (8,192 blocks), a fresh array each call, 2,000 other prompts in the tree"
COMMIT = "lookup + plan_load + commit of 8,192 blocks, path of 64 nodes"
EVICT = "the same with 10,000 resident"
KIB = {64 << 10: "64 KiB", 256 << 10: "256 KiB", 1 << 20: "1 MiB", 2 << 20: "2 MiB"}


def _lookup() -> list[Row]:
    rows = [
        Row(
            f"lookup/{nodes}",
            "lookup",
            f"{PROMPT}: whole hit, path of {nodes:,} nodes",
            EQUAL,
            "times",
            limit,
            "hit",
            nodes,
        )
        for nodes, limit in ((1, 5.0), (64, 6.0), (512, 15.0), (8192, 250.0))
    ]
    absent = Row("lookup/absent", "lookup", f"{PROMPT}: absent", EQUAL, "times", 1.0, "absent", 1)
    return [*rows, absent]


def _commit() -> list[Row]:
    copy = "memcpy of 8,192 blocks of 256 KiB"
    return [
        Row("commit/promote", "commit", f"{COMMIT}: from NVMe to DRAM, evicting as many", copy, "times", 0.02),
        Row("commit/out", "commit", f"{COMMIT}: from DRAM into the caller's rows", copy, "times", 0.02),
    ]


def _eviction() -> list[Row]:
    kinds = {"evict": "evicting one block", "store": "a store of one block into a full level"}
    return [
        Row(f"eviction/{kind}/{n}", "eviction", f"{what}, {n:,} resident", EVICT, "times", 2.0, what, n)
        for kind, what in kinds.items()
        for n in (100_000, 1_000_000)
    ]


def _memory() -> list[Row]:
    trace = "index and slot tables: conversation trace, each id 32 blocks of 16 tokens"
    return [
        Row("memory/trace", "memory", trace, "-", "bytes a block", 250.0, "conversation trace"),
        Row(
            "memory/single", "memory", "the same: all runs of length 1", "-", "bytes a block", None, "runs of length 1"
        ),
    ]


ROWS: tuple[Row, ...] = (*_lookup(), *_commit(), *_eviction(), *_memory())
_BY_ID = {each.id: each for each in ROWS}


def row(row_id: str) -> Row:
    """The row of that name. KeyError."""
    return _BY_ID[row_id]
