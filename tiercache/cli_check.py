"""`tiercache check`: is the store in this directory whole?"""

from __future__ import annotations

import argparse
from pathlib import Path

from tiercache.cli_output import progress_bar, write_json, write_text

__all__ = ["add_check"]

_DESCRIPTION = """\
Check the store in an NVMe directory, while no cache uses it.

Looked at are the catalog and the files: every block reachable from a root, its parents' idents right, its slot within
the files. With --scrub every payload is read too, and compared with its checksum.
"""

_EPILOG = """\
Damage is never served: a cache that opens the directory forgets what is not whole, and a payload that fails its
checksum is a miss. So a check is for knowing, and --fix for tidying up ahead of need.

examples:
  tiercache check /mnt/kv
  tiercache check /mnt/kv --scrub --fix

exit status: 0 clean; 1 damage found (with --fix too, where it was mended); 2 the directory cannot be checked: it is in
use, or holds no store.
"""


def add_check(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "check",
        help="say whether an NVMe directory is whole",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the directory of an NVMe tier")
    parser.add_argument("--fix", action="store_true", help="forget what is damaged")
    parser.add_argument("--scrub", action="store_true", help="read every payload and compare it with its checksum")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _run(args: argparse.Namespace) -> int:
    from tiercache.scrub import check_directory

    with progress_bar("check") as update:
        report = check_directory(args.directory, fix=args.fix, scrub=args.scrub, progress=update)
    if args.json:
        write_json(report.to_dict())
    else:
        write_text(str(report))
    return 0 if report.clean else 1
