"""The options of `tiercache replay` that make a page of it, and the making."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tiercache.cli_output import progress_bar
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.sim.options import ReplayOptions
    from tiercache.sim.page.facts import PageOptions
    from tiercache.sim.prefill import PrefillCost
    from tiercache.sim.report import ReplayReport

__all__ = ["PAGE_TEXT", "add_page_options", "check_page_options", "make_page"]

PAGE_TEXT = """\
--report writes one HTML file that needs nothing else, to be read in any browser, printed or sent: hit ratios of
several policies over capacity with the offline optimum, a table of what DRAM and NVMe sizes around yours bring,
writes to NVMe and drive writes per day, prefill saved, what prompts share and where they leave the cached path. For
it the trace is replayed some 60 times without data, on all cores: a minute for 100,000 blocks on two. Prefill is
taken as 2 * parameters FLOPs a token, at the FLOP/s of the GPU times --mfu: an 8B model on an H100 at 0.5 is 30,906
tokens a second and GPU. docs/replay-page.md says how to read it.
"""

_NEEDS_REPORT = ("model_params", "gpu", "gpu_tflops", "mfu", "prefill_tokens_per_s")


def add_page_options(parser: argparse.ArgumentParser) -> None:
    """Add the group to the parser of `replay`."""
    group = parser.add_argument_group("a page to size hardware with")
    group.add_argument("--report", metavar="FILE", type=Path, help="write an HTML page on the trace and these sizes")
    group.add_argument(
        "--model-params", metavar="N", help="parameters that a token passes through, like 70B (default: 8B)"
    )
    group.add_argument(
        "--gpu", metavar="NAME", help="a100, h100, h200, b200, l40s or mi300x: its dense bf16 FLOP/s (default: h100)"
    )
    group.add_argument("--gpu-tflops", metavar="N", type=float, help="TFLOP/s of one GPU, for any other")
    group.add_argument(
        "--mfu", metavar="SHARE", type=float, help="share of its FLOP/s that prefill reaches (default: 0.5)"
    )
    group.add_argument(
        "--prefill-tokens-per-s", metavar="N", type=float, help="measured, per GPU: instead of all of the above"
    )


def check_page_options(args: argparse.Namespace) -> PageOptions | None:
    """What the page is made with; None where none is asked for.

    Raises ConfigError, and TierCacheError where the page could not be written in the end, before anything takes long.
    """
    given = [name for name in _NEEDS_REPORT if getattr(args, name) is not None]
    if args.report is None:
        if given:
            raise ConfigError(f"--{given[0].replace('_', '-')}", getattr(args, given[0]), "together with --report FILE")
        return None
    from tiercache.sim.page.facts import PageOptions
    from tiercache.sim.page.write import check_page

    page = PageOptions(_prefill(args), bool(given), args.block_bytes is not None, args.command, version("tiercache"))
    check_page(args.report)
    return page


def _prefill(args: argparse.Namespace) -> PrefillCost:
    from tiercache.sim.prefill import GPU_TFLOPS, PrefillCost, parse_params

    name = "h100" if args.gpu is None else args.gpu.lower()
    if args.prefill_tokens_per_s is not None and any(
        getattr(args, other) is not None for other in _NEEDS_REPORT if other != "prefill_tokens_per_s"
    ):
        raise ConfigError(
            "--prefill-tokens-per-s", args.prefill_tokens_per_s, "without --model-params, --gpu, --gpu-tflops and --mfu"
        )
    if args.gpu_tflops is None and name not in GPU_TFLOPS:
        raise ConfigError("--gpu", args.gpu, f"one of {', '.join(GPU_TFLOPS)}, or any with --gpu-tflops")
    if args.gpu is None and args.gpu_tflops is not None:
        name = f"GPU of {args.gpu_tflops:g} TFLOP/s"
    usual = PrefillCost()
    return PrefillCost(
        params=usual.params if args.model_params is None else parse_params(args.model_params, "--model-params"),
        gpu=name.upper() if name in GPU_TFLOPS else args.gpu or name,
        tflops=GPU_TFLOPS[name] if args.gpu_tflops is None else args.gpu_tflops,
        mfu=usual.mfu if args.mfu is None else args.mfu,
        measured_tokens_per_s=args.prefill_tokens_per_s,
    )


def make_page(options: ReplayOptions, report: ReplayReport, page: PageOptions, path: Path) -> None:
    """Measure with a progress bar, write the page, and say so on stderr."""
    from tiercache.sim.page.facts import gather
    from tiercache.sim.page.write import write_page

    with progress_bar("report") as update:
        facts = gather(options, report, page, update)
    write_page(facts, path)
    print(f"tiercache: wrote {path}", file=sys.stderr)
