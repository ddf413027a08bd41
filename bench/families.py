"""The sections of the report, in order, and the axes of their pictures."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAMILIES", "Family"]


@dataclass(frozen=True)
class Family:
    """A section."""

    name: str
    title: str
    text: str
    picture: str = ""
    """"lines" over `x`, "bars" per row, "": none."""
    x_label: str = ""
    y_label: str = ""
    log_y: bool = False
    ticks: tuple[tuple[float, str], ...] = ()


_SHARE = "share of the reference's speed"
_TIMES = "times the reference's time"

FAMILIES: tuple[Family, ...] = (
    Family(
        "lookup",
        "Lookup",
        "A prompt of 131,072 int32 tokens (8,192 blocks of 16), a new array each call, among 2,000 other "
        "prompts, against a compare of two new arrays like it: tokens to symbols, walk of the tree, gathered "
        "slots, states of all blocks. The path has so many nodes since other prompts branch off it.",
        "lines",
        "nodes on the path",
        _TIMES,
        True,
        ((1, "1"), (64, "64"), (512, "512"), (8192, "8,192")),
    ),
    Family(
        "commit",
        "Deciding a load",
        "Everything the planner does for one load of a 128K-token prompt, all of its jobs' results included, "
        "against the bare copy of its bytes. The holds' end is not in it.",
        "bars",
        "",
        _TIMES,
    ),
    Family(
        "dram",
        "Bytes through DRAM",
        "Stores end when the caller may reuse its blocks, and evict as many as they bring. Every page of both "
        "sides was touched before.",
        "lines",
        "bytes of a block",
        _SHARE,
        False,
        ((64 << 10, "64 KiB"), (256 << 10, "256 KiB"), (1 << 20, "1 MiB"), (2 << 20, "2 MiB")),
    ),
    Family(
        "latency",
        "One block through DRAM",
        "What the hop to a pool thread and back costs where only one block moves.",
        "bars",
        "",
        _TIMES,
    ),
    Family(
        "nvme",
        "Bytes to and from NVMe",
        "2 GiB in one load into the caller's rows, every block verified, its slots scattered over the file; "
        "and 2 GiB flushed from DRAM, where nothing was written before, until they are synced and claimed. "
        "Depth is the number of I/O threads. fio reads the very same file in random order, and writes one of "
        "the same size that was written before, in order, with as many fdatasyncs as the flush had commits. "
        "fio's start is not counted. The cache writes neighbouring blocks in pieces of up to 1 MiB, fio block "
        "by block.",
        "lines",
        "depth",
        _SHARE,
        False,
        ((4, "4"), (16, "16")),
    ),
    Family(
        "reopen",
        "Warm after a restart",
        "From the constructor in a fresh process to the verified bytes of a first prompt (imports not "
        "counted, files in the page cache, blocks of 4 KiB). An unclean stop is a SIGKILL: the catalog is "
        "copied and checked by a subprocess.",
        "lines",
        "blocks",
        "times LMDB's scan of 1,000,000 records",
        False,
        ((100_000, "100,000"), (1_000_000, "1,000,000")),
    ),
    Family("linear", "Restart, ten times the blocks", "Linear is at most ten; the limit leaves room for noise."),
    Family(
        "memory",
        "Memory of the index",
        "All that a full planner has allocated (tracemalloc, in a process of its own): tree, slot tables of "
        "DRAM and NVMe with room for every block, eviction order. Payload is not in it.",
        "bars",
        "",
        "bytes a block",
    ),
    Family(
        "eviction",
        "Eviction",
        "64 blocks one by one out of a full level whose blocks lie in runs of 16, in the planner; and 64 "
        "stores of one block each, every one of which evicts one.",
        "lines",
        "resident blocks",
        "times the same with 10,000 resident",
        False,
        ((100_000, "100,000"), (1_000_000, "1,000,000")),
    ),
    Family(
        "threads",
        "Threads",
        "The same number of operations by one thread and by several, on one cache over DRAM.",
        "lines",
        "threads",
        "share of one thread's throughput",
        False,
        ((2, "2"), (4, "4"), (8, "8")),
    ),
    Family(
        "hardening",
        "What hardening costs",
        "Verification and durability against the same without.",
        "bars",
        "",
        _TIMES,
    ),
    Family(
        "hooks",
        "vLLM's hooks",
        "What the connector adds to an engine step where there is nothing to do: both halves in one process, called as "
        "vLLM calls them, without vLLM. Microseconds, unlike the rest, for a step's own length is what they add to: "
        "the median over rounds of 30 calls. 64 requests decode in the middle of a block. A prompt that is asked for "
        "the first time has its hashes put side by side, too; asked again, nothing is looked up.",
    ),
    Family(
        "remote",
        "Key tiers",
        "What a key tier that is off, or given up, costs a lookup: the prompt of above, of which 4,096 blocks are "
        "held on a path of 64 nodes, 20 lookups a round; it is not asked anything meanwhile. And what "
        "frames cost on their way to and from it.",
    ),
)
