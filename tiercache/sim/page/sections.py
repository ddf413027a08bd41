"""The sections of a page on the cache: what was replayed, capacities, sizes, time, prefill. Pictures beside tables."""

from __future__ import annotations

from tiercache.sim.page.answer import drive_writes_per_day, prefill_words, saved_gpu_hours, writes_per_day
from tiercache.sim.page.facts import Facts
from tiercache.sim.page.figures import amount, duration, percent, rate, size, tokens
from tiercache.sim.page.markup import Markup, paragraph, picture, section, table, tag
from tiercache.sim.page.words import policy_name, tier_name, token_fates

__all__ = ["capacity", "over_time", "prefill", "replayed", "sizing", "where_tokens_went", "writes"]

Pictures = dict[str, bytes]


def replayed(facts: Facts, pictures: Pictures) -> Markup:
    """What went in, and whether its bytes were right."""
    report, options = facts.report, facts.options
    per_token = report.block_nbytes / report.block_tokens
    rows = [
        ["trace", report.trace],
        ["requests", f"{report.requests:,}"],
        ["from the first to the last", duration(facts.span_s) if facts.span_s else "the trace has no times"],
        ["prompt tokens", f"{facts.prompt_tokens:,}"],
        ["block", f"{report.block_tokens} tokens, {size(report.block_nbytes)} ({rate(per_token)} bytes a token)"],
        ["different blocks", f"{report.unique_blocks:,}, {size(facts.footprint_nbytes)}"],
        ["policy", report.policy + (", told when conversations end" if report.hints == "perfect" else "")],
        ["requests in flight", str(options.in_flight)],
    ]
    rows += [
        [f"{tier_name(name)}", f"{slots:,} blocks, {size(facts.nbytes(slots))}"] for name, slots in facts.settings.tiers
    ]
    if report.skipped_lines:
        rows.append(["malformed lines left out", f"{report.skipped_lines:,}"])
    if report.data:
        rows.append(
            ["wrong bytes", f"{report.wrong_bytes:,} in {report.verified_blocks:,} loaded blocks, all compared"]
        )
    else:
        rows.append(["wrong bytes", "no payload was moved"])
    if report.after_kill is not None and report.before_kill is not None:
        ratios = (
            f"{percent(report.before_kill.token_hit_ratio)} before, {percent(report.after_kill.token_hit_ratio)} after"
        )
        rows.append(["killed on the way", f"hit ratio {ratios}; the figures on this page are without the kill"])
    return section("replay", "What was replayed", table("The replay", ["what", "value"], rows))


def where_tokens_went(facts: Facts, pictures: Pictures) -> Markup:
    """Found, let go, new."""
    fates = token_fates(facts)
    alt = "A bar of all prompt tokens: " + ", ".join(f"{name} {percent(facts.ratio(n))}" for name, n in fates) + "."
    return section(
        "tokens",
        "What became of every prompt token",
        paragraph(
            "What was seen before and is not there any more is what more room or a better order of eviction can "
            "bring; what "
            "is new must be prefilled whatever the cache."
        ),
        picture(pictures["where"], alt, "All prompt tokens of the replay with your sizes."),
        table(
            "Prompt tokens by what became of them",
            ["what", "tokens", "share"],
            [[name, f"{count:,}", percent(facts.ratio(count))] for name, count in fates],
        ),
    )


def capacity(facts: Facts, pictures: Pictures) -> Markup:
    """Policies over capacity."""
    unique = facts.report.unique_blocks
    infinite = facts.ratio(facts.infinite_tokens)
    policies = list(facts.sweep)
    rows = [
        [
            f"{100 * slots / unique:.2g}\u00a0%",
            size(facts.nbytes(slots)),
            *(percent(facts.ratio(facts.sweep[name][number])) for name in policies),
        ]
        for number, slots in enumerate(facts.capacities)
    ]
    if facts.capacities[-1] < unique:
        rows.append(["100\u00a0%", size(facts.footprint_nbytes), *(percent(infinite) for _ in policies)])
    middle = len(facts.capacities) // 2
    at = f"{100 * facts.capacities[middle] / unique:.2g} % of the blocks"
    told = ", ".join(f"{policy_name(name)} {percent(facts.ratio(facts.sweep[name][middle]))}" for name in policies)
    first = policies[0]
    ends = f"{percent(facts.ratio(facts.sweep[first][0]))} to {percent(facts.ratio(facts.sweep[first][-1]))}"
    alt = (
        f"Lines of the share of prompt tokens found over the capacity of one tier. {first} goes from {ends}. At "
        f"{at}: {told}. "
        f"A cache without bounds finds {percent(infinite)}."
    )
    simulated = ", ".join(policy_name(name) for name in policies if name in facts.simulated)
    return section(
        "capacity",
        "Hit ratio over capacity",
        paragraph(
            "One tier, requests one after another, no hints. ",
            " and ".join(policy_name(name) for name in policies if name not in facts.simulated),
            f" are the cache's own planner. {simulated} are simulated block by block, to compare with. MIN knows the "
            f"future: no "
            "policy finds more blocks. At 100 % every block has room, and all policies find what a cache without "
            "bounds finds.",
        ),
        picture(pictures["capacity"], alt, "Share of prompt tokens found, by policy and capacity of one tier."),
        table("Share of prompt tokens found", ["capacity", "size", *map(policy_name, policies)], rows),
    )


def sizing(facts: Facts, pictures: Pictures) -> Markup:
    """DRAM times NVMe."""
    own = (facts.settings.dram_slots, facts.settings.nvme_slots)
    rows, mine = [], []
    per = "a day" if facts.per_day else "in all"
    for number, each in enumerate(facts.grid):
        if (each.dram_slots, each.nvme_slots) == own:
            mine.append(number)
        found, nvme = each.found, each.nvme_slots
        daily, drives = writes_per_day(facts, found.nvme_writes), drive_writes_per_day(facts, found.nvme_writes, nvme)
        written = amount(daily if daily is not None else facts.nbytes(found.nvme_writes)) if nvme else "-"
        rows.append(
            [
                size(facts.nbytes(each.dram_slots)),
                size(facts.nbytes(nvme)) if nvme else "none",
                percent(facts.ratio(found.hit_tokens)),
                percent(facts.ratio(found.dram_tokens)),
                percent(facts.ratio(found.hit_tokens - found.dram_tokens)) if nvme else "-",
                rate(saved_gpu_hours(facts, found.hit_tokens)),
                written,
                "-" if drives is None else rate(drives),
            ]
        )
    columns = ["DRAM", "NVMe", "found", "in DRAM", "on NVMe", f"GPU-hours saved {per}", f"written {per}", "DWPD"]
    return section(
        "sizing",
        "Sizing table",
        paragraph(
            f"Your sizes and sizes around them, each replayed whole with the policy {facts.report.policy} and "
            f"{facts.options.in_flight} requests in flight. DWPD: drive writes per day, what is written a day "
            f"divided by the "
            "size of NVMe.",
            " The trace is long, so fewer sizes were tried than for a short one." if facts.long_trace else "",
        ),
        picture(pictures["sizes"], _sizing_alt(facts), "Share of prompt tokens found; a line for each size of DRAM."),
        _matrix(facts),
        table("DRAM and NVMe, and what they bring (yours in bold, framed)", columns, rows, mine),
    )


def _sizing_alt(facts: Facts) -> str:
    low = min(facts.grid, key=lambda each: each.found.hit_tokens)
    high = max(facts.grid, key=lambda each: each.found.hit_tokens)
    own = percent(facts.ratio(facts.own.hit_tokens))
    ends = f"from {percent(facts.ratio(low.found.hit_tokens))} to {percent(facts.ratio(high.found.hit_tokens))}"
    return f"Lines of the share of prompt tokens found over the size of NVMe, one per size of DRAM: {ends}; own {own}."


def _matrix(facts: Facts) -> Markup:
    drams = list(dict.fromkeys(each.dram_slots for each in facts.grid))
    slow = list(dict.fromkeys(each.nvme_slots for each in facts.grid))
    rows = []
    for dram in drams:
        shares = [facts.sized(dram, nvme) for nvme in slow]
        rows.append(
            [
                f"DRAM {size(facts.nbytes(dram))}",
                *(percent(facts.ratio(each.found.hit_tokens)) if each else "-" for each in shares),
            ]
        )
    columns = ["found", *(f"NVMe {size(facts.nbytes(nvme))}" if nvme else "no NVMe" for nvme in slow)]
    settings = facts.settings
    own = drams.index(settings.dram_slots), slow.index(settings.nvme_slots) + 1
    return table("Share of prompt tokens found (yours in bold, framed)", columns, rows, [own[0]], own[1])


def prefill(facts: Facts, pictures: Pictures) -> Markup:
    """The formula with its inputs, and what it gives."""
    how, page = facts.page.prefill, facts.page
    if how.measured_tokens_per_s is None:
        formula = (
            f"FLOP/s of the GPU * MFU / (2 * parameters) = {rate(how.tflops)}e12 * {how.mfu:g} / (2 * "
            f"{how.params / 1e9:g}e9) = "
            f"{rate(how.tokens_per_s)} prompt tokens a second on one GPU"
        )
        source = "given." if page.prefill_given else "assumed. Say yours with --model-params, --gpu and --mfu."
        what = f"{prefill_words(facts)}, MFU (the share of its FLOP/s that prefill reaches) {how.mfu:g}: {source}"
    else:
        formula, what = f"{rate(how.tokens_per_s)} prompt tokens a second on one GPU", "Measured, and given."
    rows = []
    for name, count in [
        ("saved with your sizes", facts.own.hit_tokens),
        ("still to prefill", facts.prompt_tokens - facts.own.hit_tokens),
        ("saved by a cache without bounds", facts.infinite_tokens),
        ("all, without a cache", facts.prompt_tokens),
    ]:
        seconds = how.gpu_seconds(count)
        row = [name, tokens(count), f"{rate(seconds)}", rate(seconds / 3600)]
        rows.append([*row, rate(saved_gpu_hours(facts, count))] if facts.per_day else row)
    return section(
        "prefill",
        "Prefill saved",
        paragraph(what),
        paragraph(tag("code", formula)),
        paragraph(
            "A multiply and an add per weight and token. Attention is left out: it grows with the length of the "
            "prompt, so that "
            "long prompts save more than this says. Reading what is found is not counted against it. With several "
            "GPUs, GPU "
            "time is the same, shared.",
            class_="note",
        ),
        table(
            "Prefill in GPU time",
            ["what", "tokens", "GPU seconds", "GPU-hours", *(["GPU-hours a day"] if facts.per_day else [])],
            rows,
        ),
    )


def over_time(facts: Facts, pictures: Pictures) -> Markup:
    """What each tier gave, and in the table also what was written."""
    line = facts.timeline
    names = [tier_name(name) for name, _ in facts.settings.tiers]
    unit = duration(line.width) if line.timed else f"{line.width:.0f} requests"
    totals = [sum(hits) for hits in line.hit_tokens]
    told = ", ".join(f"{percent(facts.ratio(n))} from {name}" for name, n in zip(names, totals, strict=True))
    rows = []
    for each in range(line.bins):
        every = line.prompt_tokens[each]
        start = each * line.width
        row = [
            duration(start) if line.timed else f"{start:,.0f}",
            f"{line.requests[each]:,}",
            tokens(every),
            *(percent(hits[each] / every) if every else "-" for hits in line.hit_tokens),
        ]
        rows.append(row + ([amount(facts.nbytes(line.nvme_writes[each]))] if len(names) > 1 else []))
    columns = ["from", "requests", "prompt tokens", *(f"from {name}" for name in names)]
    columns += ["written to NVMe"] if len(names) > 1 else []
    return section(
        "time",
        "Tiers over time",
        paragraph(f"Requests by when they arrived, a bar per {unit}. The replay starts with an empty cache."),
        picture(
            pictures["tiers"],
            f"Bars over time of the share of prompt tokens found, stacked by tier. Over the whole trace: {told}.",
            "Share of prompt tokens found, by tier.",
        ),
        tag("details", tag("summary", "The same as a table"), table(f"Per {unit}", columns, rows)),
    )


def writes(facts: Facts, pictures: Pictures) -> Markup:
    """What NVMe has to bear."""
    line, nvme = facts.timeline, facts.settings.nvme_slots
    if nvme is None:
        return section(
            "writes", "Writes to NVMe", paragraph("There is no NVMe tier in this replay: add one with --nvme.")
        )
    half = line.bins // 2
    parts = [("the whole trace", 0, line.bins)]
    if half:
        parts.append(("its second half, warm", half, line.bins))
    rows = []
    for name, first, last in parts:
        blocks = sum(line.nvme_writes[first:last])
        row = [name, f"{blocks:,}", amount(facts.nbytes(blocks))]
        if facts.per_day:
            span = min(facts.span_s, last * line.width) - first * line.width
            daily = facts.nbytes(blocks) / span * 86400 if span > 0 else 0.0
            row += [amount(daily), rate(daily / facts.nbytes(nvme))]
        rows.append(row)
    columns = ["of", "blocks", "written", *(["a day", "drive writes per day"] if facts.per_day else [])]
    peak = max(line.nvme_writes)
    unit = duration(line.width) if line.timed else f"{line.width:.0f} requests"
    alt = (
        f"Bars over time of what is written to NVMe: {amount(facts.nbytes(sum(line.nvme_writes)))} in all, at most "
        f"{amount(facts.nbytes(peak))} in {unit}."
    )
    return section(
        "writes",
        "Writes to NVMe",
        paragraph(
            "Payload only; a drive's own write amplification comes on top. Drive writes per day are of the size of "
            "the tier: "
            "a drive that is twice as large bears half of them. ",
            "Makers promise 1 (read-intensive) to 3 (mixed use) a day over five years. To write less, see ",
            tag("code", "--max-writes-per-hit"),
            ".",
        ),
        picture(pictures["writes"], alt, f"Written to NVMe per {unit}."),
        table("Written to NVMe", columns, rows),
    )
