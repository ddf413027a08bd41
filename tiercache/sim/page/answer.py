"""The answer in a few sentences, with which the page begins; and the figures that it shares with the tables below."""

from __future__ import annotations

from tiercache.sim.page.facts import DAY_S, Facts, Sized
from tiercache.sim.page.figures import amount, duration, percent, rate, size, tokens
from tiercache.sim.page.markup import Markup, paragraph, tag

__all__ = ["answer", "drive_writes_per_day", "gpu_time", "saved_gpu_hours", "sizes_text", "writes_per_day"]


def sizes_text(facts: Facts, dram_slots: int, nvme_slots: int | None) -> str:
    """ "DRAM 1 GiB and NVMe 5 GiB"."""
    dram = f"DRAM {size(facts.nbytes(dram_slots))}"
    return dram if nvme_slots is None else f"{dram} and NVMe {size(facts.nbytes(nvme_slots))}"


def writes_per_day(facts: Facts, blocks: int) -> float | None:
    """Bytes a day, if the load of the trace goes on; None where it has no times."""
    return None if facts.per_day is None else facts.nbytes(blocks) * facts.per_day


def drive_writes_per_day(facts: Facts, blocks: int, nvme_slots: int | None) -> float | None:
    """The same in units of the whole NVMe tier."""
    daily = writes_per_day(facts, blocks)
    return None if daily is None or not nvme_slots else daily / facts.nbytes(nvme_slots)


def saved_gpu_hours(facts: Facts, hit_tokens: int) -> float:
    """GPU hours of prefill that these hits save: a day where the trace has times, else over the whole trace."""
    return facts.page.prefill.gpu_seconds(hit_tokens) / 3600 * (facts.per_day or 1.0)


def gpu_time(facts: Facts, hit_tokens: int) -> str:
    """The same in words."""
    return f"{rate(saved_gpu_hours(facts, hit_tokens))} GPU-hours" + (" a day" if facts.per_day else "")


def answer(facts: Facts) -> Markup:
    """What the user's sizes bring on the user's trace, and what others would."""
    report, settings, own = facts.report, facts.settings, facts.own
    share = facts.ratio(own.hit_tokens)
    best = (
        f" ({percent(own.hit_tokens / facts.infinite_tokens)} of what a cache without bounds finds)"
        if own.hit_tokens
        else ""
    )
    first = [
        f"With {sizes_text(facts, settings.dram_slots, settings.nvme_slots)}, ",
        tag("strong", f"{percent(share)} of the {tokens(facts.prompt_tokens)} prompt tokens need no prefill"),
        f"{best}. ",
    ]
    seconds = facts.page.prefill.gpu_seconds(own.hit_tokens)
    while_ = f" in {duration(facts.span_s)} of requests" if facts.span_s else ""
    first.append(f"That saves {duration(seconds)} of one GPU's prefill{while_}")
    first.append(f", {gpu_time(facts, own.hit_tokens)} at this load. " if facts.per_day else ". ")
    if not facts.page.prefill_given:
        first.append(f"(Model and GPU are assumed: {prefill_words(facts)}.)")
    parts = [paragraph(*first), paragraph(*_more(facts))]
    if settings.nvme_slots is not None:
        parts.append(paragraph(_writes(facts)))
    if not facts.page.block_bytes_given:
        per_token = report.block_nbytes / report.block_tokens
        parts.append(
            paragraph(
                tag("strong", "Sizes are not yet yours: "),
                f"a block of {report.block_tokens} tokens was taken as {size(report.block_nbytes)}, {rate(per_token)} "
                "bytes a token, the default. Give ",
                tag("code", "--block-bytes"),
                " of your model: ",
                tag("code", "tokens per block * 2 * layers * KV heads * head size * bytes per value"),
                " (131,072 bytes a token for Llama 3 8B in bf16).",
                class_="warning",
            )
        )
    if report.failure:
        parts.insert(0, paragraph(tag("strong", f"The replay failed: {report.failure}."), class_="warning"))
    return tag("div", *parts, class_="answer")


def prefill_words(facts: Facts) -> str:
    """Model and GPU."""
    prefill = facts.page.prefill
    if prefill.measured_tokens_per_s is not None:
        return f"{rate(prefill.measured_tokens_per_s)} prompt tokens a second and GPU"
    return f"{rate(prefill.params / 1e9)} B parameters on one {prefill.gpu}"


def _more(facts: Facts) -> list[str]:
    """What larger sizes would bring."""
    dram, nvme = facts.settings.dram_slots, facts.settings.nvme_slots
    own = facts.ratio(facts.own.hit_tokens)
    most = f"A cache without bounds finds {percent(facts.ratio(facts.infinite_tokens))} on this trace"
    if dram + (nvme or 0) >= facts.report.unique_blocks:
        return [f"The whole trace ({size(facts.footprint_nbytes)}) has room in it: nothing larger finds more. {most}."]
    doubled = (
        [("Twice the DRAM", facts.sized(2 * dram, nvme))]
        if nvme is None
        else [("Twice the NVMe", facts.sized(dram, 2 * nvme)), ("twice the DRAM", facts.sized(2 * dram, nvme))]
    )
    told = [
        f"{name} ({_sizes(facts, other, name)}) would bring {_gain(facts, other, own)}"
        for name, other in doubled
        if other
    ]
    if nvme is None and (bigger := [each for each in facts.grid if each.dram_slots == dram and each.nvme_slots]):
        told.append(f"an NVMe tier of {size(facts.nbytes(bigger[0].nvme_slots or 0))} {_gain(facts, bigger[0], own)}")
    return [f"{', '.join(told)}. " if told else "", f"{most}; it takes {size(facts.footprint_nbytes)}."]


def _sizes(facts: Facts, sized: Sized, name: str) -> str:
    return size(facts.nbytes((sized.nvme_slots or 0) if "NVMe" in name else sized.dram_slots))


def _gain(facts: Facts, sized: Sized, own: float) -> str:
    points = 100 * (facts.ratio(sized.found.hit_tokens) - own)
    more = sized.found.hit_tokens - facts.own.hit_tokens
    text = f"{percent(facts.ratio(sized.found.hit_tokens))} ({points:+.1f} points"
    return text + (f", {gpu_time(facts, more)} more)" if more > 0 else ")")


def _writes(facts: Facts) -> str:
    blocks, nvme = facts.own.nvme_writes, facts.settings.nvme_slots
    daily, drives = writes_per_day(facts, blocks), drive_writes_per_day(facts, blocks, nvme)
    text = f"{amount(facts.nbytes(blocks))} is written to NVMe"
    if daily is None or drives is None:
        return f"{text}; the trace has no times, so not said per day."
    text += (
        f", {amount(daily)} a day at this load: {rate(drives)} drive writes per day of {size(facts.nbytes(nvme or 0))}."
    )
    if facts.span_s < DAY_S / 2:
        text += f" (A day is taken as {rate(DAY_S / facts.span_s)} times these {duration(facts.span_s)}.)"
    return text
