"""What is measured, and what it must reach. One `Row` per figure, in the order of the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ROWS", "Row", "row"]

Measure = Literal["times", "share", "bytes a block", "us a call"]
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
COMMIT = "lookup + plan_load + commit of 8,192 blocks, path of 64 nodes"
EVICT = "the same with 10,000 resident"
SIZES = {64 << 10: "64 KiB", 256 << 10: "256 KiB", 1 << 20: "1 MiB", 2 << 20: "2 MiB"}


def _lookup() -> list[Row]:
    rows = [
        Row(
            f"lookup/{nodes}",
            "lookup",
            f"whole hit, path of {nodes:,} node{'s' if nodes > 1 else ''}",
            EQUAL,
            "times",
            limit,
            "hit",
            nodes,
        )
        for nodes, limit in ((1, 5.0), (64, 6.0), (512, 15.0), (8192, 250.0))
    ]
    absent = Row("lookup/absent", "lookup", "absent prompt", EQUAL, "times", 1.0, "absent", 1)
    what = "whole hit after a restart: path of 64 nodes, all blocks on NVMe"
    return [*rows, absent, Row("lookup/restart", "lookup", what, EQUAL, "times", None, "hit on NVMe", 64)]


def _commit() -> list[Row]:
    copy = "memcpy of 8,192 blocks of 256 KiB"
    return [
        Row(
            "commit/promote",
            "commit",
            f"{COMMIT}: from NVMe to DRAM, evicting as many (their bytes come from a disk, not by memcpy)",
            copy,
            "times",
            None,
            "NVMe to DRAM",
        ),
        Row(
            "commit/out",
            "commit",
            f"{COMMIT}: from DRAM into the caller's rows",
            copy,
            "times",
            0.02,
            "DRAM to own rows",
        ),
    ]


def _eviction() -> list[Row]:
    kinds = {"evict": "evicting one block", "store": "a store of one block into a full level"}
    rows = [
        Row(f"eviction/{kind}/{n}", "eviction", f"{what}, {n:,} resident", EVICT, "times", 2.0, kind, n)
        for kind, what in kinds.items()
        for n in (100_000, 1_000_000)
    ]
    tiered = "a store of one block into full DRAM over NVMe, which copies one down"
    more = Row(
        "eviction/tiered/100000",
        "eviction",
        f"{tiered}, 100,000 resident",
        EVICT,
        "times",
        2.0,
        "store, over NVMe",
        100_000,
    )
    return [*rows, more]


def _memory() -> list[Row]:
    trace = "index and slot tables: conversation trace, each id 32 blocks of 16 tokens"
    return [
        Row("memory/trace", "memory", trace, "-", "bytes a block", 250.0, "conversation trace"),
        Row(
            "memory/single",
            "memory",
            "index and slot tables: all runs of length 1",
            "-",
            "bytes a block",
            None,
            "runs of length 1",
        ),
    ]


def _dram() -> list[Row]:
    copy, least = "memcpy of the same bytes by one thread", {256 << 10: 0.85, 2 << 20: 0.90}
    rows = [
        Row(
            f"dram/{verb}/{nbytes}",
            "dram",
            f"DRAM {what}, blocks of {name}, 256 or more a call",
            copy,
            "share",
            least.get(nbytes),
            verb,
            nbytes,
        )
        for verb, what in (("store", "store"), ("load", "load into the caller's rows"))
        for nbytes, name in SIZES.items()
    ]
    latency = [
        Row(
            f"dram/latency/{verb}/{pause}",
            "latency",
            f"DRAM {verb} of one block of 256 KiB, {how}",
            copy,
            "times",
            series=f"{verb}, {how}",
        )
        for verb in ("store", "load")
        for pause, how in (("busy", "one after the other"), ("idle", "after 1 ms of rest"))
    ]
    return [*rows, *latency]


def _nvme() -> list[Row]:
    fio = "fio, the better of psync jobs and io_uring, O_DIRECT, same depth and syncs"
    return [
        Row(
            f"nvme/{verb}/{nbytes}/{depth}",
            "nvme",
            f"NVMe {what}, blocks of {SIZES[nbytes]}, {depth} deep",
            fio,
            "share",
            0.80 if depth == 16 else None,
            f"{what}, {SIZES[nbytes]}",
            depth,
        )
        for verb, what in (("read", "verified read"), ("write", "durable write"))
        for nbytes in (256 << 10, 2 << 20)
        for depth in (4, 16)
    ]


def _reopen() -> list[Row]:
    scan = "LMDB cursor scan of 1,000,000 records of 88 bytes"
    rows = [
        Row(
            f"reopen/{blocks}/{stop}",
            "reopen",
            f"start to first bytes, {blocks:,} blocks in runs of 16, after {article} {stop} stop",
            scan,
            "times",
            6.0 if stop == "clean" else None,
            f"after {article} {stop} stop",
            blocks,
        )
        for stop, article in (("clean", "a"), ("unclean", "an"))
        for blocks in (100_000, 1_000_000)
    ]
    linear = Row("reopen/linear", "linear", "start to first bytes, 1,000,000 blocks", "100,000 blocks", "times", 12.0)
    return [*rows, linear]


def _threads() -> list[Row]:
    what = {"lookup": "lookups of 8,192 tokens", "load": "loads of 1 MiB into own rows", "store": "stores of 1 MiB"}
    return [
        Row(
            f"threads/{verb}/{threads}",
            "threads",
            f"{threads} threads, {what[verb]}, DRAM",
            "as many of them by 1 thread",
            "share",
            0.9 if threads == 8 else None,
            verb,
            threads,
        )
        for verb in what
        for threads in (2, 4, 8)
    ]


def _hardening() -> list[Row]:
    raw = "the same slots read by as many threads through the tier alone, nothing verified"
    process = "the same with durability=process (no data sync)"
    return [
        Row(
            "hardening/verify", "hardening", "NVMe verified read, 256 KiB, 16 deep", raw, "times", None, "verified read"
        ),
        Row(
            "hardening/checksum",
            "hardening",
            "checksums of 1,024 blocks of 256 KiB",
            "memcpy of them",
            "times",
            None,
            "checksum",
        ),
        Row(
            "hardening/power",
            "hardening",
            "NVMe write, 256 KiB, 16 deep, durability=power",
            process,
            "times",
            None,
            "power",
        ),
    ]


def _hooks() -> list[Row]:
    def one(name: str, what: str, target: float | None = None) -> Row:
        return Row(f"hooks/{name}", "hooks", what, "-", "us a call", target, what.partition(":")[0])

    asked = "get_num_new_matched_tokens: 8,192 hashes, all cached"
    return [
        one("step", "all hooks of one step, both halves: 64 decodes, nothing to do", 20.0),
        one("meta", "build_connector_meta in such a step"),
        one("scheduler", "the scheduler's other hooks: update_connector_output, stats, events, has_pending_push_work"),
        one("rank", "a rank's hooks: handle_preemptions, get_finished, stats, build_connector_worker_meta"),
        one("older", "all hooks, where the engine does not count its tokens in flight (0.28)", 20.0),
        one("first/1", f"{asked}, asked first, path of 1 node", 1000.0),
        one("first/64", f"{asked}, asked first, path of 64 nodes", 1000.0),
        one("again", f"{asked}, asked again while the planner is as it was", 20.0),
    ]


def _remote() -> list[Row]:
    plain = "the same without a key tier"
    half = "the planner's lookup, half of the prompt in DRAM"
    frames = "memcpy of the blocks"
    return [
        Row("remote/off", "remote", f"{half}, key tier switched off", plain, "times", 1.05, "off"),
        Row("remote/open", "remote", f"{half}, key tier's breaker open", plain, "times", 1.05, "breaker open"),
        Row("remote/there", "remote", f"{half}, the rest known to be on the key tier", plain, "times", None, "there"),
        Row("remote/seal", "remote", "seal_rows of 256 blocks of 256 KiB", frames, "times", None, "seal_rows"),
        Row("remote/verified", "remote", "verified of 256 frames of 256 KiB", frames, "times", None, "verified"),
    ]


ROWS: tuple[Row, ...] = (
    *_lookup(),
    *_commit(),
    *_dram(),
    *_nvme(),
    *_reopen(),
    *_memory(),
    *_eviction(),
    *_threads(),
    *_hardening(),
    *_hooks(),
    *_remote(),
)
_BY_ID = {each.id: each for each in ROWS}


def row(row_id: str) -> Row:
    """The row of that name. KeyError."""
    return _BY_ID[row_id]
