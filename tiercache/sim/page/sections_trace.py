"""The sections of a page on the trace itself: what prompts share, when it comes back, where they part."""

from __future__ import annotations

from tiercache.sim.page.facts import Facts
from tiercache.sim.page.figures import duration, percent, tokens
from tiercache.sim.page.leaving import KINDS
from tiercache.sim.page.markup import Markup, paragraph, picture, section, table, tag
from tiercache.sim.page.words import KIND_WORDS, gap_labels, length_labels, use_labels

__all__ = ["coming_back", "leaving", "shared"]

Pictures = dict[str, bytes]
_PERCENTILES = ("10 %", "25 %", "50 %", "75 %", "90 %", "longest")


def shared(facts: Facts, pictures: Pictures) -> Markup:
    """How many requests have a token, how long shared beginnings are, and which save most."""
    sharing = facts.sharing
    uses = [
        [
            label,
            tokens(every),
            percent(facts.ratio(every)),
            tokens(once),
            tokens(every - once),
            percent(facts.ratio(every - once)),
        ]
        for label, every, once in zip(use_labels(), sharing.tokens_by_uses, sharing.unique_tokens_by_uses, strict=True)
    ]
    alone = percent(facts.ratio(sharing.tokens_by_uses[0]))
    often = percent(facts.ratio(sum(sharing.tokens_by_uses[4:])))
    requests = max(1, sum(sharing.requests_by_prefix))
    lengths = [
        [label, f"{count:,}", percent(count / requests)]
        for label, count in zip(length_labels(sharing.prefix_edges), sharing.requests_by_prefix, strict=True)
    ]
    quantiles = [f"{value:,}" for value in sharing.prefix_quantiles]
    return section(
        "shared",
        "What prompts share",
        picture(
            pictures["uses"],
            f"Bars of all prompt tokens by how many requests have them: {alone} are in one request only, {often} in "
            f"nine or more.",
            "All prompt tokens, by how many requests have the block they are in.",
        ),
        table(
            "Prompt tokens by how many requests have them. To hold: each block once. To save: all but the first time",
            ["requests", "tokens", "share", "to hold", "to save", "share"],
            uses,
        ),
        tag("h3", "Shared beginnings"),
        picture(
            pictures["prefixes"],
            f"Bars of requests by the tokens they share with another request; half share {quantiles[2]} or fewer, "
            f"the longest "
            f"shared beginning has {quantiles[5]}.",
            "Requests by the longest beginning that any other request, earlier or later, has too.",
        ),
        table("Length of the shared beginning, in tokens", ["of all requests", *_PERCENTILES], [["up to", *quantiles]]),
        table("Requests by the length of their shared beginning", ["tokens, up to", "requests", "share"], lengths),
        tag("h3", "What saves most"),
        paragraph(
            "Stretches of blocks that the same requests have, from one fork of the prefix tree to the next. What "
            "they save adds "
            "up: over all stretches it is what a cache without bounds finds. The first request is the line of the "
            "trace, from 1."
        ),
        table(
            "The ten shared stretches that save most",
            ["tokens of the prompt", "requests", "saves", "share", "first request"],
            [
                [
                    f"{each.begin:,} to {each.end:,}",
                    f"{each.requests:,}",
                    tokens(each.saved_tokens),
                    percent(facts.ratio(each.saved_tokens)),
                    f"{each.first_request + 1:,}",
                ]
                for each in sharing.top
            ],
        ),
    )


def coming_back(facts: Facts, pictures: Pictures) -> Markup:
    """How long a block has to be kept."""
    sharing = facts.sharing
    every = sum(sharing.tokens_by_gap)
    if not every or not facts.span_s:
        why = "No block is used twice." if not every else "The trace has no times."
        return section("gaps", "When blocks come back", paragraph(why))
    values = [duration(each) for each in sharing.gap_quantiles_s]
    below, rows = 0, []
    for label, count in zip(gap_labels(), sharing.tokens_by_gap, strict=True):
        below += count
        rows.append([label, tokens(count), percent(count / every), percent(below / every)])
    return section(
        "gaps",
        "When blocks come back",
        paragraph(
            f"Of the tokens that come again, half do within {values[1]}, nine of ten within {values[3]}, all within "
            f"{values[4]}. "
            "A tier helps with those whose time it spans: its size divided by what passes through it."
        ),
        picture(
            pictures["gaps"],
            f"Bars of the tokens that come again by the time since their block was used last: half within "
            f"{values[1]}, 90 % "
            f"within {values[3]}.",
            "Prompt tokens that come again, by the time since their block was used last.",
        ),
        table("Time since the last use", ["time", "tokens", "share", "up to here"], rows),
    )


def leaving(facts: Facts, pictures: Pictures) -> Markup:
    """Where prompts part from what earlier ones left."""
    found = facts.leaving
    requests = max(1, sum(found.requests))
    kinds = [
        [
            KIND_WORDS[kind],
            f"{found.requests[number]:,}",
            percent(found.requests[number] / requests),
            tokens(found.found_tokens[number]),
            tokens(found.new_tokens[number]),
        ]
        for number, kind in enumerate(KINDS)
    ]
    fork = percent(found.requests[KINDS.index("fork")] / requests)
    deepest = [sum(counts) for counts in zip(*found.requests_by_depth, strict=True)]
    where = max(range(len(deepest)), key=deepest.__getitem__)
    depth = length_labels(found.edges)[where]
    return section(
        "leaving",
        "Where prompts leave the cached path",
        paragraph(
            "A prompt is compared with all earlier ones, as a cache without bounds would hold them. Its blocks are "
            "known up to "
            f"some place, and new from there on. Places are exact to a block of {facts.report.block_tokens} tokens; "
            f"the trace "
            "does not say more. On the running cache, ",
            tag("code", "explain(tokens)"),
            " gives the token.",
        ),
        picture(
            pictures["exits"],
            f"Bars of requests by how deep they leave the known path, stacked by how: {fork} leave where earlier "
            f"prompts went on. "
            f"Most leave after up to {depth} tokens ({percent(deepest[where] / requests)}).",
            "Requests by the depth at which they leave the known path, and how.",
        ),
        table("How prompts end what they share with earlier ones", ["how", "requests", "share", "known", "new"], kinds),
        tag("details", tag("summary", "By depth"), _depths(facts)),
        tag("h3", "The forks that cost most"),
        paragraph(
            "Where many requests leave and nearly every way on is used once, something differs in every prompt. "
            "After a system "
            "prompt that is the conversation itself. Before the end of what should be the same, it is a time stamp, "
            "a name or "
            "a list in changing order: move it behind what all have in common, and the rest is found."
        ),
        table(
            "Forks by the tokens that are new behind them",
            ["tokens before it", "came", "left", "new tokens", "share", "ways on", "used once", "first request"],
            [
                [
                    f"{each.tokens:,}",
                    f"{each.passed:,}",
                    f"{each.left:,}",
                    tokens(each.new_tokens),
                    percent(facts.ratio(each.new_tokens)),
                    f"{each.ways:,}",
                    f"{each.ways_used_once:,}",
                    f"{each.first_request + 1:,}",
                ]
                for each in found.top
            ],
        ),
    )


def _depths(facts: Facts) -> Markup:
    found = facts.leaving
    names = {"whole": "whole prompt", "onward": "goes on", "fork": "leaves a fork", "new": "all new"}
    rows = [
        [label, *(f"{counts[at]:,}" for counts in found.requests_by_depth)]
        for at, label in enumerate(length_labels(found.edges))
    ]
    return table("Requests by depth in tokens and kind", ["up to", *(names[kind] for kind in KINDS)], rows)
