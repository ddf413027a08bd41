"""What a replay found, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PhaseReport", "ReplayReport", "TierReport"]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class TierReport:
    """One tier over the whole replay, both lives of a killed one."""

    name: str
    slots: int
    """Blocks it has room for."""
    hit_tokens: int = 0
    """Prompt tokens that loads accepted from this tier."""
    blocks_written: int = 0
    """Blocks copied into this tier: stored, demoted or promoted."""
    blocks_evicted: int = 0
    """Blocks that left this tier to make room, demoted or dropped."""
    blocks_demoted: int = 0
    """Blocks copied to the tier below."""
    bytes_read: int = 0
    """Payload copied out of this tier; a hit in DRAM is used in place, and copies nothing."""
    bytes_written: int = 0
    read_s: float = 0.0
    """Wall time during which at least one copy out of this tier ran: 0 without data."""
    write_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON object of this tier."""
        return {
            "slots": self.slots,
            "hit_tokens": self.hit_tokens,
            "blocks_written": self.blocks_written,
            "blocks_evicted": self.blocks_evicted,
            "blocks_demoted": self.blocks_demoted,
            "bytes": self.bytes_read + self.bytes_written,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "read_s": self.read_s,
            "write_s": self.write_s,
        }


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """The requests before, or after, the kill."""

    requests: int
    prompt_tokens: int
    hit_tokens: int
    hit_tokens_by_tier: dict[str, int]

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens / prompt tokens."""
        return _ratio(self.hit_tokens, self.prompt_tokens)

    def to_dict(self) -> dict[str, Any]:
        """JSON object of this phase."""
        return {
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "token_hit_ratio": self.token_hit_ratio,
            "hit_tokens_by_tier": self.hit_tokens_by_tier,
        }


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """A whole replay. Tokens of requests that were replayed again after a kill are counted once."""

    trace: str
    policy: str
    hints: str
    data: bool
    block_tokens: int
    block_nbytes: int
    requests: int
    unique_blocks: int
    prompt_tokens: int
    hit_tokens: int
    infinite_hit_ratio: float
    """What a cache without bounds would reach on this trace."""
    tiers: tuple[TierReport, ...]
    """From the fastest to the slowest."""
    wrong_bytes: int = 0
    verified_blocks: int = 0
    """Loaded blocks compared with what they must be."""
    failed_blocks: int = 0
    """Copies of blocks that failed (I/O trouble, damage): with them, decisions may differ from those without data."""
    skipped_lines: int = 0
    seconds: float = 0.0
    """Wall time of the replay."""
    before_kill: PhaseReport | None = None
    """None where there was no kill."""
    after_kill: PhaseReport | None = None
    reopen_s: float | None = None
    """Seconds that the new process took to open the cache on the directory that was left behind."""
    recovered_blocks: int | None = None
    """Blocks that it found there."""

    @property
    def token_hit_ratio(self) -> float:
        """Hit tokens / prompt tokens, cold start included."""
        return _ratio(self.hit_tokens, self.prompt_tokens)

    @property
    def warm_tokens(self) -> int:
        """Prompt tokens served from NVMe after the kill; 0 where there was none."""
        return self.after_kill.hit_tokens_by_tier.get("nvme", 0) if self.after_kill else 0

    @property
    def failure(self) -> str:
        """Why the replay counts as failed; "" where it went well."""
        if self.wrong_bytes:
            return f"{self.wrong_bytes} wrong bytes were served"
        if self.after_kill is not None and self.recovered_blocks == 0:
            return "nothing was warm after the kill: no block was found on NVMe"
        if self.after_kill is not None and self.warm_tokens == 0:
            return "nothing was warm after the kill: no hit was served from NVMe"
        return ""

    def to_dict(self) -> dict[str, Any]:
        """JSON object: numbers, strings, and per tier and phase one object; a phase that was not is null."""
        return {
            "trace": self.trace,
            "policy": self.policy,
            "hints": self.hints,
            "data": self.data,
            "block_tokens": self.block_tokens,
            "block_bytes": self.block_nbytes,
            "requests": self.requests,
            "unique_blocks": self.unique_blocks,
            "prompt_tokens": self.prompt_tokens,
            "hit_tokens": self.hit_tokens,
            "token_hit_ratio": self.token_hit_ratio,
            "infinite_hit_ratio": self.infinite_hit_ratio,
            "wrong_bytes": self.wrong_bytes,
            "verified_blocks": self.verified_blocks,
            "failed_blocks": self.failed_blocks,
            "skipped_lines": self.skipped_lines,
            "seconds": self.seconds,
            "tiers": {tier.name: tier.to_dict() for tier in self.tiers},
            "before_kill": self.before_kill.to_dict() if self.before_kill else None,
            "after_kill": self.after_kill.to_dict() if self.after_kill else None,
            "reopen_s": self.reopen_s,
            "recovered_blocks": self.recovered_blocks,
            "warm_tokens": self.warm_tokens,
            "failure": self.failure,
        }
