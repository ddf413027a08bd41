"""Small scripts for the tests of the crash tools."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import numpy as np

from tiercache.testing.crash import Report, Trap, die
from tiercache.tiers.dram import DRAMTier


def echo(report: Report, argument: Any) -> None:
    report(argument)
    report({"threads": threading.active_count(), "big": "x" * 200_000})


def fail(report: Report, argument: Any) -> None:
    report("before")
    raise ValueError(argument)


def trapped(report: Report, argument: Any) -> None:
    """Write to a DRAM tier five times, in a process that dies at the third time after it is armed."""
    trap = Trap(argument["point"])
    tier = DRAMTier(4, 100)
    rows = np.zeros((1, 100), dtype=np.uint8)
    for i in range(8):
        if i == 2:
            trap.arm(argument["nth"])
        tier.write(np.array([0], dtype=np.int32), rows)
        report([i, trap.passed])
    tier.close()


def tear(report: Report, argument: Any) -> None:
    """Die in the middle of a write of 3,000 bytes."""
    from tiercache.tiers.fileio import OsFiles

    trap = Trap("nvme-write-torn")
    trap.arm()
    files = OsFiles()
    fd = files.open(argument, os.O_RDWR | os.O_CREAT, 0o600)
    files.pwritev(fd, [memoryview(b"a" * 1000), memoryview(b"b" * 2000)], 0)
    report("written whole")


def now(report: Report, _argument: Any) -> None:
    report(json.loads("[1]"))
    die()


def sleep(report: Report, argument: float) -> None:
    report("asleep")
    time.sleep(argument)
