"""The `tiercache` command.

Exit status: 0 all is well; 1 a finding (a wrong byte, nothing warm after the kill, a damaged store); 2 the command
could not do its work; 130 interrupted. Tables and answers go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.metadata import version

from tiercache.cli_check import add_check
from tiercache.cli_demo import add_demo
from tiercache.cli_output import OutputClosedError
from tiercache.cli_plan import add_plan
from tiercache.cli_replay import add_replay
from tiercache.errors import TierCacheError

__all__ = ["main"]

_DESCRIPTION = """\
A tiered, persistent KV cache for LLM inference. Its use is from Python; here it is tried, measured and looked after.
"""

_EPILOG = """\
examples:
  tiercache demo
  tiercache replay example --dram 1GiB --nvme /tmp/kv:5GiB
  tiercache replay example --dram 5% --no-data --json
  tiercache check /mnt/kv --scrub
  tiercache plan --model config.json --context-tokens 32768 --concurrency 64

`tiercache COMMAND --help` says more on each.
"""


def build_parser() -> argparse.ArgumentParser:
    """The parser with all commands; `args.run(args)` runs the one that was asked for."""
    parser = argparse.ArgumentParser(
        prog="tiercache",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tiercache {version('tiercache')}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_demo(commands)
    add_replay(commands)
    add_check(commands)
    add_plan(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the process's own) and return the exit status.

    Raises SystemExit for --help, --version and arguments that argparse refuses (status 2); nothing for other trouble.
    """
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser().parse_args(argv)
    args.command = shlex.join(["tiercache", *argv])
    try:
        status: int = args.run(args)
    except TierCacheError as error:
        return _complain(str(error))
    except OSError as error:
        return _complain(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except OutputClosedError:
        return 141  # as a process that SIGPIPE ended: whoever read the output has gone
    except KeyboardInterrupt:
        print("tiercache: interrupted", file=sys.stderr)
        return 130
    return status


def _complain(message: str) -> int:
    print(f"tiercache: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
