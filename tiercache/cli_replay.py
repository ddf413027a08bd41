"""`tiercache replay`: a trace through the real cache, and what came of it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tiercache.cli_output import progress_bar, require_rich, table_text, write_json, write_text
from tiercache.cli_page import PAGE_TEXT, add_page_options, check_page_options, make_page
from tiercache.config import format_size, parse_size
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.sim.options import ReplayOptions, Size
    from tiercache.sim.page.facts import PageOptions
    from tiercache.sim.report import PhaseReport, ReplayReport

__all__ = ["add_replay", "replay_and_print", "replay_text"]

_DESCRIPTION = """\
Replay a trace of requests through the cache: look each prompt up, load what is there, store what is missing.

Every stored block's bytes are derived from the block's id, and every loaded block is compared with what it must be.
The replay is deterministic: time is the trace's own, and results arrive in the order of their jobs.
"""

_EPILOG = f"""\
FILE is a Mooncake JSONL trace (gzipped or not): one request a line, with timestamp (ms), input_length,
output_length and hash_ids (one per block of 512 tokens, the last may be partial); or an npz file with timestamp_s
and leaf per request, parent and tokens per block, and block_size. `example` is the trace that ships with tiercache:
3,000 requests of a chat service, 55,287 different blocks.

SIZE is bytes (2GiB, 500MB), or a share of the trace's unique blocks (5%).

{PAGE_TEXT}
examples:
  see it work, with real bytes in DRAM and on a disk:
    tiercache replay example --dram 1GiB --nvme /tmp/kv:5GiB
  the same, with the process killed half way and the directory opened again:
    tiercache replay example --dram 1GiB --nvme /tmp/kv:5GiB --kill-at 0.5
  what would 20 TB of NVMe bring on my own trace? (no payload is moved, so it needs no disk)
    tiercache replay my.jsonl.gz --dram 512GiB --nvme 20TiB --block-bytes 40MiB --no-data
  which sizes should I buy? (64MiB is 512 tokens of Llama 3 8B in bf16)
    tiercache replay my.jsonl.gz --dram 512GiB --nvme 4TiB --block-bytes 64MiB --no-data \\
      --report sizing.html --model-params 8B --gpu h100
  figures for a script:
    tiercache replay my.jsonl.gz --dram 5% --no-data --json | jq .token_hit_ratio

exit status: 0; 1 a byte was wrong, or nothing was warm after the kill; 2 the replay could not be run.
"""

_EXCLUSIVE = {"auto": None, "yes": True, "no": False}


def add_replay(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "replay",
        help="run a trace of requests through the cache",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=_run)
    parser.add_argument("trace", metavar="FILE", help="a trace file, or `example`")
    tiers = parser.add_argument_group("the cache")
    tiers.add_argument("--dram", metavar="SIZE", default="1GiB", help="DRAM tier (default: 1GiB)")
    tiers.add_argument("--nvme", metavar="DIR:SIZE", help="NVMe tier in DIR; with --no-data, SIZE alone will do")
    tiers.add_argument("--block-bytes", metavar="BYTES", help="payload of a block (default: 256KiB)")
    tiers.add_argument("--policy", metavar="NAME", default="reuse", help="reuse (default) or lru: what leaves first")
    tiers.add_argument(
        "--write-after",
        metavar="SECONDS",
        default="off",
        help="write a block to NVMe at this age in trace seconds; off: only when DRAM evicts it (default: off)",
    )
    tiers.add_argument(
        "--max-writes-per-hit",
        metavar="N",
        default="off",
        help="write a block to NVMe only where N such writes bring a hit, as far as the policy can tell (default: off)",
    )
    tiers.add_argument(
        "--exclusive",
        choices=list(_EXCLUSIVE),
        default="auto",
        help="does a block that is brought up leave NVMe? auto: where NVMe is under five times DRAM (default: auto)",
    )
    replay = parser.add_argument_group("the replay")
    replay.add_argument("--in-flight", metavar="N", type=int, default=4, help="requests in flight (default: 4)")
    replay.add_argument(
        "--hints",
        choices=["none", "perfect"],
        default="none",
        help="perfect: release each conversation after its last request, as the trace knows (default: none)",
    )
    replay.add_argument("--requests", metavar="N", type=int, help="only the first N requests")
    replay.add_argument(
        "--block-tokens", metavar="N", type=int, help="tokens per block of a JSONL trace (default: 512)"
    )
    replay.add_argument("--full-blocks", action="store_true", help="leave partial last blocks out")
    replay.add_argument("--skip-bad", action="store_true", help="count malformed lines of the trace and go on")
    replay.add_argument("--no-data", action="store_true", help="same decisions without payload: for large traces")
    replay.add_argument(
        "--kill-at",
        metavar="SHARE",
        type=float,
        help="kill the process that holds the cache (SIGKILL, no flush) after this share of the requests, and go on",
    )
    replay.add_argument(
        "--keep", action="store_true", help="leave the store in DIR (default: what was made is removed)"
    )
    replay.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    add_page_options(parser)


def options_of(args: argparse.Namespace) -> ReplayOptions:
    """Options from parsed arguments. Raises ConfigError."""
    from tiercache.sim.options import ReplayOptions, parse_share_or_size

    nvme_path, nvme = (None, None) if args.nvme is None else _parse_nvme(args.nvme, args.no_data)
    return ReplayOptions(
        trace=args.trace,
        dram=parse_share_or_size(args.dram, "--dram"),
        nvme_path=nvme_path,
        nvme=nvme,
        block_nbytes=parse_size(args.block_bytes or "256KiB", "--block-bytes"),
        block_tokens=args.block_tokens,
        policy=args.policy,
        exclusive=_EXCLUSIVE[args.exclusive],
        hints=args.hints,
        in_flight=args.in_flight,
        write_after_s=_parse_number_or_off("--write-after", args.write_after, "seconds, like 2"),
        max_writes_per_hit=_parse_number_or_off("--max-writes-per-hit", args.max_writes_per_hit, "a number, like 6"),
        no_data=args.no_data,
        full_blocks=args.full_blocks,
        skip_bad=args.skip_bad,
        requests=args.requests,
        kill_at=args.kill_at,
        keep=args.keep,
    )


def _parse_nvme(text: str, no_data: bool) -> tuple[Path | None, Size]:
    from tiercache.sim.options import parse_share_or_size

    directory, colon, size = text.rpartition(":")
    if not directory and (colon or not no_data):
        raise ConfigError("--nvme", text, "DIR:SIZE, like /mnt/kv:20GiB or /mnt/kv:50%")
    return (Path(directory) if directory else None), parse_share_or_size(size, "--nvme")


def _parse_number_or_off(field: str, text: str, like: str) -> float | None:
    if text == "off":
        return None
    try:
        return float(text)
    except ValueError as error:
        raise ConfigError(field, text, f"{like}, or 'off'") from error


def _run(args: argparse.Namespace) -> int:
    options, page = options_of(args), check_page_options(args)
    if not args.json:
        require_rich()
    return replay_and_print(options, "replay", as_json=args.json, page=page, page_path=args.report)


def replay_and_print(
    options: ReplayOptions,
    title: str,
    *,
    as_json: bool,
    page: PageOptions | None = None,
    page_path: Path | None = None,
) -> int:
    """Replay with a progress bar, write the page where one is asked for, print the report, return the exit status."""
    from tiercache.sim.replay import run_replay

    with progress_bar(title) as update:
        report = run_replay(options, update)
    if page is not None and page_path is not None:
        make_page(options, report, page, page_path)
    if as_json:
        write_json(report.to_dict() | ({} if page_path is None else {"page": str(page_path)}))
    else:
        write_text(replay_text(report))
    return 1 if report.failure else 0


def replay_text(report: ReplayReport) -> str:
    """The report as tables. Needs rich."""
    phases = _phase_rows(report)
    tiers = table_text(
        "tiers",
        ["tier", "blocks", "hit tokens", "written", "evicted", "demoted", "read", "GB/s", "write", "GB/s"],
        [
            [
                tier.name,
                f"{tier.slots:,}",
                f"{tier.hit_tokens:,}",
                f"{tier.blocks_written:,}",
                f"{tier.blocks_evicted:,}",
                f"{tier.blocks_demoted:,}",
                _gigabytes(tier.bytes_read),
                _rate(tier.bytes_read, tier.read_s),
                _gigabytes(tier.bytes_written),
                _rate(tier.bytes_written, tier.write_s),
            ]
            for tier in report.tiers
        ],
        _notes(report),
    )
    columns = ["requests", "count", "prompt tokens", "hit ratio", *[f"from {tier.name}" for tier in report.tiers]]
    told = ", told of every end" if report.hints == "perfect" else ""
    title = f"{report.trace}: {report.policy}{told}, blocks of {report.block_tokens} tokens{_block_size(report)}"
    verdict = f"FAILED: {report.failure}" if report.failure else "all is well"
    return "\n".join([table_text(title, columns, phases), tiers, verdict])


def _block_size(report: ReplayReport) -> str:
    return f" and {format_size(report.block_nbytes)}" if report.data else ", no payload"


def _phase_rows(report: ReplayReport) -> list[list[str]]:
    names = [tier.name for tier in report.tiers]

    def row(label: str, phase: PhaseReport) -> list[str]:
        shares = [_share(phase.hit_tokens_by_tier.get(name, 0), phase.prompt_tokens) for name in names]
        ratio = _share(phase.hit_tokens, phase.prompt_tokens)
        return [label, f"{phase.requests:,}", f"{phase.prompt_tokens:,}", ratio, *shares]

    rows = []
    if report.before_kill and report.after_kill:
        rows = [row("before the kill", report.before_kill), row("after the kill", report.after_kill)]
    shares = [_share(tier.hit_tokens, report.prompt_tokens) for tier in report.tiers]
    ratio = _share(report.hit_tokens, report.prompt_tokens)
    return [*rows, ["all", f"{report.requests:,}", f"{report.prompt_tokens:,}", ratio, *shares]]


def _notes(report: ReplayReport) -> list[tuple[str, str]]:
    notes = [("hit ratio of a cache without bounds", f"{report.infinite_hit_ratio:.4f}")]
    if report.data:
        notes.append(("wrong bytes", f"{report.wrong_bytes:,} (in {report.verified_blocks:,} loaded blocks)"))
    else:
        notes.append(("wrong bytes", "no payload was moved"))
    if report.after_kill is not None:
        notes.append(("tokens served from NVMe after the kill", f"{report.warm_tokens:,}"))
    if report.reopen_s is not None:
        found = "" if report.recovered_blocks is None else f" ({report.recovered_blocks:,} blocks found there)"
        notes.append(("time to reopen", f"{report.reopen_s * 1000:.0f} ms{found}"))
    if report.failed_blocks:
        notes.append(("copies of blocks that failed", f"{report.failed_blocks:,}"))
    if report.skipped_lines:
        notes.append(("malformed lines skipped", f"{report.skipped_lines:,}"))
    if report.data:
        notes.append(("GB/s", "bytes over the time in which at least one copy in that direction ran"))
    return [*notes, ("wall time", f"{report.seconds:.1f} s")]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.4f}" if whole else "-"


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB"


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / 1e9 / seconds:.2f}" if seconds > 0 else "-"
