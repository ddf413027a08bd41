"""Names of classes, kinds and policies, the same in pictures, tables and texts."""

from __future__ import annotations

from collections.abc import Sequence

from tiercache.sim.page.facts import Facts
from tiercache.sim.page.figures import duration
from tiercache.sim.page.leaving import KINDS
from tiercache.sim.page.sharing import GAP_EDGES_S, USE_EDGES

__all__ = ["KIND_WORDS", "gap_labels", "length_labels", "policy_name", "tier_name", "token_fates", "use_labels"]

KIND_WORDS = {
    "whole": "nothing left: the whole prompt was there",
    "onward": "goes on where every earlier prompt ended",
    "fork": "leaves where earlier prompts went on",
    "new": "not even the first block was there",
}
"""How a prompt ends what it has in common with earlier ones, in the order of `leaving.KINDS`."""

_POLICIES = {"arc": "ARC", "s3fifo": "S3-FIFO", "lru2": "LRU-2", "min": "MIN", "lru": "LRU"}


def policy_name(policy: str, *, long: bool = False) -> str:
    """As it is written in tables; long: in legends, where it must say what it is."""
    return _POLICIES.get(policy, policy) + (" (knows the future)" if long and policy == "min" else "")


def tier_name(tier: str) -> str:
    """As it is written in text."""
    return {"dram": "DRAM", "nvme": "NVMe"}.get(tier, tier)


def token_fates(facts: Facts) -> list[tuple[str, int]]:
    """What became of every prompt token of the replay with the user's sizes, in words; the counts add up."""
    own, leaving = facts.own, facts.leaving
    rows = [("found in DRAM", own.dram_tokens)]
    if facts.settings.nvme_slots is not None:
        rows.append(("found on NVMe", own.hit_tokens - own.dram_tokens))
    rows.append(("seen before, not there any more", leaving.evicted_tokens))
    new = dict(zip(KINDS, leaving.new_tokens, strict=True))
    rows.append(("new, after a known beginning", new["onward"] + new["fork"]))
    return [*rows, ("new from the first block on", new["new"])]


def use_labels() -> list[str]:
    """Of the classes of USE_EDGES: "1", "2", "3-4", ..., "65+"."""
    ends = [edge - 1 for edge in USE_EDGES[1:]]
    spans = [str(low) if low == high else f"{low}-{high}" for low, high in zip(USE_EDGES, ends, strict=False)]
    return [*spans, f"{USE_EDGES[-1]}+"]


def gap_labels() -> list[str]:
    """Of the classes of GAP_EDGES_S: the upper end of each."""
    return [*(f"< {duration(edge)}" for edge in GAP_EDGES_S[1:]), "more"]


def length_labels(edges: Sequence[int]) -> list[str]:
    """Upper bounds in tokens: "0", "512", "1K", ... in powers of two where they are."""
    return [_length(edge) for edge in edges]


def _length(edge: int) -> str:
    for unit, name in ((1 << 20, "M"), (1 << 10, "K")):
        if edge >= unit and edge % unit == 0:
            return f"{edge // unit}{name}"
    return f"{edge:,}"
