"""docs/vllm-benchmarks.md from the newest results: python -m bench.vllm.run --report"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["PAGE", "page", "write"]

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "vllm-benchmarks.md"
LEVEL = 0.05
"""A median ratio this close to 1 is called level; so is one above, where a quartile is below 1. Lower is behind."""
HOOKS_MOST = 0.02
NAMES = {
    "tiercache": "tiercache (every byte from the disk verified)",
    "example": "vLLM's ExampleConnector (safetensors files; verifies nothing)",
    "native": "vLLM's own tiering, DRAM over its fs tier (verifies nothing)",
}
KINDS = {
    "cold": "Computing with the connector on (nothing is cached, the prompt is stored)",
    "dram": "Hit in the same process (ExampleConnector has no DRAM tier: its files, in the page cache)",
    "disk": "Hit after a restart, page cache dropped before each",
    "disk in page cache": "Hit after a restart, files in the page cache (tiercache and the fs tier: O_DIRECT)",
}

Results = dict[str, Any]


def write(results: Path) -> Path:
    """Write the page; returns its path."""
    newest = max(results.glob("*.json"), key=lambda path: str(json.loads(path.read_text(encoding="utf-8"))["date"]))
    PAGE.write_text(page(json.loads(newest.read_text(encoding="utf-8")), newest.name), encoding="utf-8")
    return PAGE


def page(results: Results, name: str) -> str:
    """The whole page."""
    parts = [
        "# vLLM benchmarks",
        f"Written by `python -m bench.vllm.run --report` from `bench/results/vllm/{name}`. Do not edit.",
        "```\nmake bench-vllm                       # about 15 minutes, 8 GiB of disk, 12 GiB of memory\n"
        'make bench-vllm ARGS="--pairs 3"      # fewer rounds\nmake bench-vllm ARGS=--report         # this page\n```',
        _how(results),
        _machine(results),
        *(_kind(results, kind) for kind in KINDS),
        _ahead(results),
        _hooks(results),
    ]
    return "\n\n".join(parts) + "\n"


def _how(results: Results) -> str:
    model, tokens = results["model"], results["prompt_tokens"]
    per_token, blocks = model["kv_nbytes_per_token"], tokens // 32
    nbytes = f"{per_token * blocks * 32 / 2**20:.0f} MiB of KV in {blocks} blocks"
    return _fill(
        f"One random Llama of {model['parameters']:,} parameters ({per_token:,} bytes of KV a token), prompts of "
        f"{tokens:,} tokens ({nbytes}), one request at a time, an engine for each system, vLLM {results['vllm']} on "
        "CPUs. The first token's time is from `add_request` to the step that returns it, with vLLM's own prefix cache "
        "emptied before.",
        f"**How to read it.** {results['pairs']} rounds; in each everything is asked once, in an order that turns. "
        "*times sooner* is the time of the engine without a connector, computing a prompt of the same length in the "
        "same round, over this time: above 1 is sooner than computing. *of tiercache's* is this time over tiercache's "
        "in the same round: above 1, tiercache is ahead; *cpu* is the same of processor seconds (all "
        "threads), which a busy machine disturbs less. Medians of the rounds' ratios, with range. Absolute times say "
        "little about another machine. What was cached, and the answers (8 greedy tokens), were compared in every "
        "round: with those of vLLM alone, for hits out of its own cache (computing four tokens rounds in another way "
        "than computing all). Writes to the disk were over before the next thing was measured.",
    )


def _fill(*paragraphs: str) -> str:
    return "\n\n".join(textwrap.fill(each, 128, break_long_words=False, break_on_hyphens=False) for each in paragraphs)


def _machine(results: Results) -> str:
    machine, commit = results["machine"], results["commit"]
    rows = [
        ("when, how long", f"{results['date']}, {results['seconds'] / 60:.0f} min"),
        ("commit", commit["id"] + (" with changes" if commit["dirty"] else "")),
        ("command", f"`{results['command'].strip()}`"),
        (
            "machine",
            f"{machine['cpu']}, {machine['cores']} cores{' (virtual)' if machine['virtual'] else ''}, "
            f"{machine['memory_gib']} GiB, **shared with other work**: load {machine['load_before']} before, "
            f"{results['load_after']} after",
        ),
        ("system", f"Linux {machine['kernel']}, {machine['filesystem']}, Python {machine['python']}"),
        ("software", f"vLLM {results['vllm']}, torch {results['torch']}, numpy {machine['packages']['numpy']}"),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in rows)])


def _kind(results: Results, kind: str) -> str:
    lines = [
        f"## {KINDS[kind]}",
        "",
        "| | times sooner than computing | range | of tiercache's | range | cpu | first token | cached | equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in _of(results, kind):
        sooner, over = each["sooner"], each["over_tiercache"]
        ours, cpu = each["system"] == "tiercache", each["cpu_over_tiercache"]["median"]
        equal = f"{each['equal']} of {each['compared']}" if each["compared"] else "-"
        lines.append(
            f"| {NAMES[each['system']]} | **{sooner['median']:.3g}** | {sooner['low']:.3g} to {sooner['high']:.3g} | "
            + ("1 | " if ours else f"**{over['median']:.3g}** | ")
            + ("| | " if ours else f"{over['low']:.3g} to {over['high']:.3g} | {cpu:.3g} | ")
            + f"{each['seconds']['median'] * 1000:.0f} ms | {', '.join(str(n) for n in each['cached'])} | {equal} |"
        )
    if kind == "dram":
        own = statistics.median(each["alone/dram"]["first_s"] for each in results["rounds"])
        lines += ["", f"Out of vLLM's own prefix cache, nothing loaded, the same prompts took {own * 1000:.0f} ms."]
    return "\n".join(lines)


def _of(results: Results, kind: str) -> list[dict[str, Any]]:
    return [each for each in results["figures"] if each["kind"] == kind]


def _ahead(results: Results) -> str:
    lines = ["## Who is ahead", ""]
    for kind, title in KINDS.items():
        said = []
        for each in _of(results, kind):
            if each["system"] == "tiercache":
                continue
            ratio = each["over_tiercache"]["median"]
            over = each["over_tiercache"]
            ahead = ratio > 1 + LEVEL and over["q1"] > 1
            word = "BEHIND" if ratio < 1 - LEVEL else "ahead of" if ahead else "level with"
            said.append(f"{word} {each['system']} ({ratio:.2f})")
        lines.append(f"- {title.partition(' (')[0].partition(',')[0]}{_which(kind)}: tiercache is {', '.join(said)}.")
    return "\n".join([*lines, "", _WHY])


def _which(kind: str) -> str:
    return {"disk": ", page cache dropped", "disk in page cache": ", files in the page cache"}.get(kind, "")


_WHY = _fill(
    "The peers verify nothing: a block of the fs tier that was overwritten on the disk was loaded without complaint, "
    "and the answer became zeros. tiercache checks every byte it reads from the disk, and syncs what it wrote before "
    "it says so.",
    "Where files are still in the page cache, ExampleConnector copies memory, while tiercache reads the disk: it goes "
    "past the page cache, for its own DRAM is the cache, and does not count on a machine that was not rebooted.",
    "ExampleConnector is vLLM's reference, not made for speed: it finds only whole prompts, and writes in the forward "
    "pass. The fs tier needs a stand-in for its GPU copies here (`bench/vllm/native.py`), which run in the step; "
    "tiercache's run in threads beside it.",
)


def _hooks(results: Results) -> str:
    lines = [
        "## Time inside the hooks, nothing cached",
        "",
        _fill(
            f"Share of the steps' time; must be at most {HOOKS_MOST:.0%}. Medians of {len(results['hooks'])} runs. "
            "Copies run in threads of their own and are not in it (see *Computing with the connector on*)."
        ),
        "",
        "| | share of the steps' time | a step | in hooks, median | longest | |",
        "|---|---|---|---|---|---|",
    ]
    for load in ("one request", "eight requests"):
        for phase in ("prefill", "decode"):
            runs: Sequence[dict[str, Any]] = [each[load][phase] for each in results["hooks"]]
            share = statistics.median(each["share"] for each in runs)
            lines.append(
                f"| {load}, {phase} ({runs[0]['steps'] - (phase == 'prefill')} steps) | **{share:.2%}** | "
                f"{statistics.median(each['step_s'] for each in runs) * 1000:.1f} ms | "
                f"{statistics.median(each['hooks_s'] for each in runs) * 1e6:.0f} us | "
                f"{max(each['longest_hooks_s'] for each in runs) * 1000:.2f} ms | "
                f"{'reached' if share <= HOOKS_MOST else 'not reached'} |"
            )
    return "\n".join(lines)
