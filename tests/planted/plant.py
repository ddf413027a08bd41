"""Plants each fault in a copy of the tree and runs the tests that must turn red: `make planted-faults`.

Exit status 0: every fault was caught. A fault is caught when one of its tests fails in its own body: an error while
importing, collecting or setting up proves nothing, nor does a run past the limit. A test that hangs counts where a
deadline of its own ended it. `--real-vllm`, with a Python that has vLLM: the tests with a real vLLM must turn red, too,
for the most telling faults; with `--all` for each that has one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from queue import SimpleQueue

import pytest
from registry import HERE, ROOT, Fault, broken, load_faults, table

LIMIT_S, REAL_LIMIT_S = 60.0, 150.0
"""For the tests of one fault; with a real vLLM, whose tests have deadlines below that."""
TELLING = ("fence-removed", "no-frontier", "failed-block-offered-again", "engine-epoch-not-written")
"""Of the faults with a test on a real vLLM: one of each kind of wrong token."""
JOBS, REAL_JOBS = 4, 2
"""Faults at a time: a test that its fault makes wait mostly sleeps, while an engine's start takes a core."""
BEGIN, END = "<!-- planted faults: begin -->\n", "<!-- planted faults: end -->"
"""Around the table in docs/testing.md."""
_WARM = multiprocessing.get_context("forkserver")
"""Children start from a process that has imported what is slow to import, and nothing of the package."""
_PRELOADED = ["pytest", "numpy", "hypothesis", "hypothesis.stateful", "lmdb", "xxhash", "sortedcontainers", "torch"]
_WARM.set_forkserver_preload(_PRELOADED)
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "dist", "*.egg-info", "results")


@dataclass(slots=True)
class Verdict:
    """What the tests made of one fault."""

    name: str
    caught: bool = False
    why: str = ""
    """How it showed, or why it does not count."""
    by: list[str] = field(default_factory=list)
    """Tests that failed."""
    passed: list[str] = field(default_factory=list)
    """Named tests that passed although the fault was there."""
    seconds: float = 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="plant.py", description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="this fault (may be given several times)")
    parser.add_argument("--jobs", type=int, help=f"faults at a time ({JOBS}; with --real-vllm {REAL_JOBS})")
    parser.add_argument("--limit", type=float, help="seconds for the tests of one fault")
    parser.add_argument("--real-vllm", action="store_true", help="the tests with a real vLLM, which this Python has")
    parser.add_argument("--all", action="store_true", help="with --real-vllm: all that have such a test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there")
    parser.add_argument("--write-docs", action="store_true", help="only write the table into docs/testing.md")
    options = parser.parse_args(arguments)
    faults = load_faults()
    if options.write_docs:
        write_docs(faults)
        return 0
    unknown = set(options.only or ()) - {fault.name for fault in faults}
    if unknown:
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    faults = [fault for fault in faults if not options.only or fault.name in options.only]
    if options.real_vllm:
        some = faults if options.all or options.only else [fault for fault in faults if fault.name in TELLING]
        faults = [replace(fault, tests=fault.real) for fault in some if fault.real]
        warm_up_vllm()
    if wrong := broken(faults):
        print("\n".join(wrong))
        return 2
    started_at = time.monotonic()
    jobs = options.jobs or (REAL_JOBS if options.real_vllm else JOBS)
    verdicts = run_all(faults, jobs, options.limit or (REAL_LIMIT_S if options.real_vllm else LIMIT_S))
    report(faults, verdicts, time.monotonic() - started_at)
    if options.json:
        values = [asdict(verdicts[fault.name]) for fault in faults]
        options.json.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    return int(not all(each.caught for each in verdicts.values()))


def warm_up_vllm() -> None:
    """Have the warm process import vLLM as well: what the tests start is forked from it, too."""
    os.environ |= {"PYTHONPATH": str(ROOT / "tests" / "vllm"), "TIERCACHE_VLLM_NURSERY": "1"}
    _WARM.set_forkserver_preload([*_PRELOADED, "vllm_child"])


def write_docs(faults: Sequence[Fault]) -> None:
    """Put the table of all faults into docs/testing.md."""
    path = ROOT / "docs" / "testing.md"
    head, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    path.write_text(head + begin + table(faults) + END + rest.partition(END)[2], encoding="utf-8")


def run_all(faults: Sequence[Fault], jobs: int, limit_s: float = LIMIT_S) -> dict[str, Verdict]:
    """Try the faults, `jobs` at a time, each in a copy of the tree of its own; says on stdout how far it is."""
    found: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="tiercache-planted-") as scratch, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(jobs):
            trees.put(Path(shutil.copytree(ROOT, Path(scratch) / f"tree{i}", ignore=_LEFT_OUT)))
        futures = [pool.submit(_in_one_of, trees, fault, limit_s) for fault in faults]
        for n, future in enumerate(as_completed(futures), 1):
            verdict = future.result()
            found[verdict.name] = verdict
            what = "caught" if verdict.caught else "NOT CAUGHT"
            print(f"[{n}/{len(faults)}] {what}: {verdict.name} ({verdict.seconds:.1f} s)", flush=True)
    return found


def _in_one_of(trees: SimpleQueue[Path], fault: Fault, limit_s: float) -> Verdict:
    tree = trees.get()
    try:
        return try_fault(fault, tree, limit_s)
    finally:
        trees.put(tree)


def try_fault(fault: Fault, tree: Path, limit_s: float = LIMIT_S) -> Verdict:
    """Plant a fault in `tree`, run its tests there, take it out again."""
    started_at = time.monotonic()
    with planted(fault, tree):
        status, facts, output = run_tests(fault.tests, tree, limit_s)
    verdict = judge(fault, status, facts, output, tree)
    verdict.seconds = round(time.monotonic() - started_at, 2)
    return verdict


@contextmanager
def planted(fault: Fault, tree: Path) -> Iterator[None]:
    """The fault is in the tree meanwhile. Its file gets another time, so that no compiled one is taken for it."""
    path = tree / fault.file
    before, times = path.read_bytes(), path.stat()
    fault.apply(tree)
    os.utime(path, (times.st_atime, times.st_mtime + 2.0))
    try:
        yield
    finally:
        path.write_bytes(before)
        os.utime(path, (times.st_atime, times.st_mtime))


def run_tests(tests: Sequence[str], tree: Path, limit_s: float) -> tuple[int | None, list[dict], str]:
    """Run tests of `tree` in a process of their own: its exit status (None: past the limit, and killed with all that
    it started), the plugin's lines, the end of its output."""
    with tempfile.TemporaryDirectory(prefix="tiercache-verdicts-") as scratch:
        child = _WARM.Process(target=_child, args=(tests, tree, Path(scratch)))
        child.start()
        child.join(limit_s)
        status = child.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        verdicts, output = Path(scratch) / "verdicts", Path(scratch) / "output"
        lines = verdicts.read_text(encoding="utf-8").splitlines() if verdicts.exists() else []
        text = output.read_text(encoding="utf-8", errors="replace")[-2000:] if output.exists() else ""
    return status, [json.loads(line) for line in lines], text


def _child(tests: Sequence[str], tree: Path, scratch: Path) -> None:
    """In a process forked from the warm one, which has not imported the package: pytest over `tree`."""
    os.setsid()
    fd = os.open(scratch / "output", os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(fd, stream)
    places = [str(tree), str(HERE)]
    os.environ |= {"PYTHONPATH": os.pathsep.join(places), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(scratch)}
    os.environ["PLANTED_VERDICTS"] = str(scratch / "verdicts")
    sys.path[:] = [*places, *(entry for entry in sys.path if entry != str(HERE))]
    sys.dont_write_bytecode = True
    os.chdir(tree)
    sys.exit(
        pytest.main(
            [
                "-p",
                "verdicts",
                "-p",
                "no:cacheprovider",
                "-W",
                "ignore::pytest.PytestAssertRewriteWarning",
                "-q",
                "--no-header",
                "--tb=short",
                "-m",
                "",
                *tests,
            ]
        )
    )


def judge(fault: Fault, status: int | None, facts: list[dict], output: str, tree: Path) -> Verdict:
    """Was it caught, and how?"""
    verdict = Verdict(fault.name)
    head = next((each for each in facts if "package" in each), None)
    if head is None:
        verdict.why = f"the tests were not collected (status {status}): {output[-400:]}"
        return verdict
    if not Path(head["package"]).is_relative_to(tree):
        verdict.why = f"the tests ran against {head['package']}, not against the copy"
        return verdict
    reasons = []
    for each in facts:
        if each.get("when") == "call" and each["outcome"] == "passed":
            verdict.passed.append(each["test"])
        elif each.get("outcome") == "failed":
            reasons.append(_how_it_failed(each, head["own_deadline"]))
            if reasons[-1][0]:
                verdict.by.append(each["test"])
    verdict.caught = bool(verdict.by)
    if reasons:
        verdict.why = next((why for counts, why in reasons if counts), reasons[0][1])
    elif status is None:
        verdict.why = "still running at the limit: no deadline of the tests ended it"
    elif status < 0:
        verdict.why = f"the test process died of signal {-status}"
    else:
        verdict.why = "its tests pass"
    return verdict


def _how_it_failed(facts: dict, own_deadline: list[str]) -> tuple[bool, str]:
    """Does this failure count, and what does it say?"""
    text = " ".join(facts["text"].split())[:160]
    if facts["when"] != "call":
        return False, f"an error in {facts['when']}: {text}"
    if text.startswith("Failed: Timeout"):
        own = facts["test"] in own_deadline
        return own, f"hung until {'its own deadline' if own else 'the deadline of all tests'}: {text}"
    return True, text


def report(faults: Sequence[Fault], verdicts: dict[str, Verdict], seconds: float) -> None:
    """The final table."""
    width = max((len(fault.name) for fault in faults), default=0)
    print()
    for fault in faults:
        verdict = verdicts[fault.name]
        print(f"{'caught' if verdict.caught else 'MISSED'}  {fault.name:<{width}}  {', '.join(verdict.by) or '-'}")
        print(f"        {'':<{width}}  {verdict.why}")
        for test in verdict.passed:
            print(f"        {'':<{width}}  (passes all the same: {test})")
    caught = sum(verdict.caught for verdict in verdicts.values())
    print(f"\n{caught} of {len(faults)} planted faults caught in {seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
