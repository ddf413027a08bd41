"""tiercache and its peers in one run: python bench/peers/run.py [--quick] [--only GROUP ...] [--build-only]

Builds what is missing of the peers' environments, runs every group, and prints the tables. A whole run writes
bench/peers/results/*.json and docs/peers.md too. A peer that cannot be installed or run is told in the table, and the
run still ends with status 0.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[2])]

import contestants as who
import report
from measure import FULL, QUICK, Race
from restarts import restarts

from bench.machine import ROOT, commit, facts

RESULTS = who.HERE / "results"
GROUPS = {"lookup": Race.lookups, "memory": Race.memory, "disk": Race.disk, "restart": restarts}


def main(arguments: list[str] | None = None) -> int:
    """Build, measure, write. Returns 0 also where peers are absent or fail; 1 where tiercache itself failed."""
    args = _parse(arguments)
    began = time.monotonic()

    def say(text: str) -> None:
        if not args.quiet:
            print(f"[{time.monotonic() - began:4.0f} s] {text}", file=sys.stderr, flush=True)

    def step(text: str) -> None:
        done[0] += 1
        say(f"{done[0]}/{sum(map(race.steps, groups))} {text}")

    groups, done = args.only or list(GROUPS), [0]
    named = {who.OWN, *(args.peers or [one.name for one in who.ALL])}
    taking_part = [one for one in who.ALL if one.name in named and set(one.groups) & set(groups)]
    needed = dict.fromkeys(one.venv for one in taking_part if one.venv)
    venvs = {name: who.prepare(name, args.folder, say) for name in needed}
    for name, venv in venvs.items():
        say(f"{name}: {venv.status} {venv.why or f'({venv.nbytes / 1e9:.2f} GB in {args.folder / name})'}")
    if args.build_only:
        return 0
    log = Path(tempfile.gettempdir()) / f"tiercache-bench-peers-{os.getpid()}.log"
    say(f"what the children print goes to {log}, which is kept where one of them fails")
    machine = facts(args.scratch)
    race = Race(
        plan=QUICK if args.quick else FULL,
        contestants=[one for one in taking_part if not one.venv or venvs[one.venv].status == "ready"],
        folder=args.folder,
        scratch=args.scratch,
        say=step,
        log=log,
    )
    for group in groups:
        GROUPS[group](race)
    results = {
        "schema": 1,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - began),
        "command": "python bench/peers/run.py",
        "commit": commit(),
        "machine": machine,
        "plan": {name: list(value) if isinstance(value, tuple) else value for name, value in vars(race.plan).items()},
        "venvs": {name: vars(venv) for name, venv in venvs.items()},
        "contestants": {one.name: {"venv": one.venv, **race.hellos.get(one.name, {})} for one in taking_part},
        "records": race.records,
    }
    if not (args.quick or args.only or args.peers or args.no_write):
        path = _write(results, args)
        say(f"wrote {path.relative_to(ROOT)} and {report.PAGE.relative_to(ROOT)}")
    print(report.tables(results))
    failed = [one["contestant"] for one in race.records if one["status"] != "ok"]
    if not failed:
        log.unlink(missing_ok=True)
    return 1 if who.OWN in failed else 0


def _write(results: dict[str, Any], args: argparse.Namespace) -> Path:
    """The results, without paths of this machine, and the page that is made of them."""
    text = json.dumps(results, indent=1)
    for path, name in ((args.folder, "FOLDER"), (args.scratch, "SCRATCH"), (ROOT, "CHECKOUT"), (Path.home(), "HOME")):
        text = text.replace(str(path), name)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{results['date'][:16].replace(':', '')}-{results['commit']['id']}.json"
    path.write_text(text + "\n", encoding="utf-8")
    report.write()
    return path


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, a look at whether it runs; figures mean nothing"
    )
    parser.add_argument("--only", nargs="+", choices=list(GROUPS), help="these groups (default: all)")
    names = [one.name for one in who.ALL if one.name != who.OWN]
    parser.add_argument("--peers", nargs="*", choices=names, help="these peers (default: all)")
    parser.add_argument("--build-only", action="store_true", help="build the environments and stop")
    parser.add_argument(
        "--folder", type=Path, default=who.default_folder(), help="where the environments are kept (%(default)s)"
    )
    parser.add_argument(
        "--scratch",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="a folder on the disk to measure (%(default)s)",
    )
    parser.add_argument("--no-write", action="store_true", help="write no file after a whole run either")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
