"""`tiercache plan`: how much memory, disk and bandwidth a workload asks for, with the formulas."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tiercache.cli_output import write_json, write_text
from tiercache.config import parse_size
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.sizing import Plan
    from tiercache.sizing_model import TokenKV

__all__ = ["add_plan", "plan_text"]

_DESCRIPTION = """\
Size a cache: bytes of KV per token from a model's config.json, and what follows from them for memory, disk and links.

Everything but the model is optional. What can be computed is printed, each figure with its formula and the numbers in
it; what is missing is named with the option to give.
"""

_EPILOG = """\
The field's rules of thumb that it computes:
  bandwidth = bytes x concurrency / latency         to have the contexts loaded in time
  hot pool >= 2 x concurrent KV                     the fast tier: what runs, and what comes next
  break-even bandwidth = bytes/token x prefill speed    below it a recompute is faster than a load
  reach = size / write rate                         how long ago a prefix may have been used and still be there

SIZE is bytes (512GiB, 20TB). Sizes and rates are of all ranks of one replica together.

examples:
  how large is the KV of this model?
    tiercache plan --model ~/models/Llama-3.1-8B
  64 requests of 32K tokens, the first token after a second:
    tiercache plan --model config.json --context-tokens 32768 --concurrency 64 --latency 1
  does NVMe pay, and for how long does it last?
    tiercache plan --model config.json --tensor-parallel 8 --kv-dtype fp8 --context-tokens 20000 --requests-per-s 2 \\
        --hit-ratio 0.4 --prefill-tokens-per-s 12000 --dram 512GiB --nvme 15TB --nvme-gbps 12 --days 1825
  another kind of model:
    tiercache plan --bytes-per-token 70272 --context-tokens 100000 --json | jq '.figures[] | {name, value, unit}'

exit status: 0; 2 the model or an option is not understood (the message names the field and the remedy).
"""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "plan",
        help="size memory, disk and bandwidth for a model and a load",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    model = parser.add_argument_group("the model (one of these)").add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="PATH", type=Path, help="a config.json, or the directory that has it")
    model.add_argument("--bytes-per-token", metavar="N", type=int, help="KV of a token on each rank, all layers")
    kv = parser.add_argument_group("its KV")
    kv.add_argument("--kv-dtype", metavar="DTYPE", help="bf16, fp8, ...: by default that of the config")
    kv.add_argument("--tensor-parallel", metavar="N", type=int, default=1, help="ranks that share the KV heads (1)")
    kv.add_argument("--block-tokens", metavar="N", type=int, default=16, help="tokens of a block (16)")
    load = parser.add_argument_group("the load")
    load.add_argument("--context-tokens", metavar="N", type=int, help="tokens of one request")
    load.add_argument("--concurrency", metavar="N", type=int, help="requests at a time")
    load.add_argument(
        "--latency", "--ttft-target", metavar="SECONDS", type=float, help="that loading may take until the first token"
    )
    load.add_argument("--requests-per-s", metavar="X", type=float, help="requests that arrive")
    load.add_argument("--hit-ratio", metavar="X", type=float, help="share of their tokens that is a hit, 0 to 1 (0)")
    load.add_argument("--prefill-tokens-per-s", metavar="X", type=float, help="speed of a recompute")
    load.add_argument("--days", metavar="X", type=float, help="to add up what is written")
    tiers = parser.add_argument_group("the tiers")
    tiers.add_argument("--dram", metavar="SIZE", help="memory for KV")
    tiers.add_argument("--nvme", metavar="SIZE", help="disk for KV")
    tiers.add_argument("--nvme-gbps", metavar="X", type=float, help="what it reads, in GB/s (10^9)")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")


def _run(args: argparse.Namespace) -> int:
    from tiercache.sizing import Workload, plan
    from tiercache.sizing_model import kv_of_model, kv_of_nbytes, read_model

    if args.model is None:
        if args.kv_dtype is not None:
            raise ConfigError("--kv-dtype", args.kv_dtype, "bytes per token say it already: leave one of the two out")
        kv = kv_of_nbytes(args.bytes_per_token, args.tensor_parallel)
    else:
        kv = kv_of_model(read_model(args.model), args.kv_dtype, args.tensor_parallel)
    work = Workload(
        block_tokens=args.block_tokens,
        concurrency=args.concurrency,
        context_tokens=args.context_tokens,
        latency_s=args.latency,
        requests_per_s=args.requests_per_s,
        hit_ratio=args.hit_ratio,
        prefill_tokens_per_s=args.prefill_tokens_per_s,
        dram=None if args.dram is None else parse_size(args.dram, "--dram"),
        nvme=None if args.nvme is None else parse_size(args.nvme, "--nvme"),
        nvme_gbps=args.nvme_gbps,
        days=args.days,
    )
    made = plan(kv, work)
    if args.json:
        write_json({"model": str(args.model) if args.model else None, "inputs": asdict(work), **made.to_dict()})
    else:
        write_text(plan_text(made, kv))
    return 0


def plan_text(made: Plan, kv: TokenKV) -> str:
    """Figures in three columns (what, value, formula), then remarks and what is missing."""
    wide = max(len(each.what) for each in made.figures)
    long = max(len(each.text) for each in made.figures)
    lines = [f"{each.what:<{wide}}  {each.text:>{long}}  = {each.formula}" for each in made.figures]
    lines += [f"note: {note}" for note in made.notes]
    lines += [f"give {' '.join(each.give)} to see: {each.what}" for each in made.missing]
    return "\n".join(lines)
