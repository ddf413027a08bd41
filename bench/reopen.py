"""One start of a cache, or one scan by LMDB, in a process of its own.

python -m bench.reopen open|kill DIR BLOCKS | scan FILE

`open` closes in order afterwards, `kill` kills itself, so that the next start follows an unclean stop. The time runs
from the constructor to the verified bytes of a first prompt; imports are not in it. Garbage collection is as it is.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import lmdb
import numpy as np

from bench.payload import Payload
from bench.store_dir import open_store

BLOCK_NBYTES = 4096
DRAM_NBYTES = 16 << 20
RECORD_NBYTES = 88


def write_scan_file(path: Path, records: int) -> None:
    """An LMDB file with so many records of 88 bytes under keys of 8."""
    env = lmdb.open(str(path), subdir=False, map_size=1 << 30, lock=False)
    value = bytes(range(RECORD_NBYTES))
    with env.begin(write=True) as txn, txn.cursor() as cursor:
        cursor.putmulti(((i.to_bytes(8, "big"), value) for i in range(records)), append=True)
    env.close()


def scan(path: str) -> dict[str, float]:
    """Read every record of the file with a cursor."""
    began, cpu_began = time.perf_counter(), _cpu_s()
    env = lmdb.open(path, subdir=False, readonly=True, lock=False)
    records = nbytes = 0
    with env.begin() as txn:
        for _, value in txn.cursor():
            records += 1
            nbytes += len(value)
    seconds, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_began
    env.close()
    assert records and nbytes == records * RECORD_NBYTES
    return {"seconds": seconds, "cpu_s": cpu_s, "records": records}


def start(directory: str, blocks: int, killed: bool) -> None:
    """Open the directory, load one prompt, check its bytes; print the times."""
    place = Path(directory)
    ids, wanted = np.load(place.parent / f"{place.name}-prompt.npy"), np.load(place.parent / f"{place.name}-blocks.npy")
    payload = Payload(BLOCK_NBYTES)
    began, cpu_began = time.perf_counter(), _cpu_s()
    cache = open_store(place, blocks, payload, DRAM_NBYTES)
    opened_s = time.perf_counter() - began
    with cache.load(cache.lookup(ids)).result(60) as loaded:
        rows = loaded.blocks
        seconds, cpu_s = time.perf_counter() - began, _cpu_s() - cpu_began
        assert loaded.block_count == len(wanted)
        for row, block in zip(rows, wanted.tolist(), strict=True):
            payload.check(row[None], 0, block)
    stats = cache.stats()
    assert stats.blocks == blocks
    print(json.dumps({"seconds": seconds, "cpu_s": cpu_s, "opened_s": opened_s, "nodes": stats.nodes}), flush=True)
    if killed:
        os.kill(os.getpid(), signal.SIGKILL)
    assert cache.close()


def _cpu_s() -> float:
    """Processor seconds of all threads until now, and of the children that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def main(kind: str, path: str, blocks: str = "0") -> None:
    """Print one JSON object."""
    if kind == "scan":
        print(json.dumps(scan(path)))
    else:
        start(path, int(blocks), kind == "kill")


if __name__ == "__main__":
    main(*sys.argv[1:])
