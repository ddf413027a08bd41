"""`tiercache demo`: see it work, on this machine, in under two minutes."""

from __future__ import annotations

import argparse
from pathlib import Path

from tiercache.cli_output import require_rich
from tiercache.cli_replay import replay_and_print

__all__ = ["add_demo"]

_DESCRIPTION = """\
Replay 3,000 real requests of a chat service through the cache, with real bytes: blocks of 256 KiB, 1 GiB of DRAM and
5 GiB on NVMe, 4 requests in flight. Half way, the process that holds the cache is killed (SIGKILL, nothing flushed),
and a new one opens the same directory and goes on. Every loaded block is compared with what it must be.
"""

_EPILOG = """\
It takes 1 to 2 minutes on 2 cores, about 1.5 GiB of memory and 6 GiB of disk, and says so where they are not free. What
it wrote is removed at the end.

examples:
  tiercache demo
  tiercache demo --dir /mnt/nvme
  tiercache replay --help     (your own trace, your own sizes)

exit status: 0; 1 a byte was wrong, or nothing was warm after the kill; 2 it could not be run.
"""


def add_demo(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "demo",
        help="see it work: a real trace, real bytes, a kill midway",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument(
        "--dir",
        metavar="DIR",
        type=Path,
        help="where to put the NVMe tier (default: the system's directory for temporary files)",
    )
    parser.add_argument("--requests", metavar="N", type=int, help="only the first N requests")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _run(args: argparse.Namespace) -> int:
    if not args.json:
        require_rich()
    from tiercache.sim.demo import check_room, demo_options, demo_place

    place = args.dir or demo_place()
    check_room(place)
    return replay_and_print(demo_options(place, requests=args.requests), "demo", as_json=args.json)
