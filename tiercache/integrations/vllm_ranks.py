"""One planner over several ranks: what ranks found at the start, and what they report of jobs, as if they were one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tiercache.errors import ConfigError
from tiercache.integrations.vllm_messages import Hello
from tiercache.types import ROOT, JobOverdue, JobResult, LevelSpec, PlannerMessage, Recovered, Slots

__all__ = ["Agreement", "RankResults", "agree"]


_GRAVEST = ("deadline", "io", "checksum", "refused", "missing")
"""Reasons of a job that failed, for what they tell of a tier; of several ranks' the first of these counts."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks have in common."""

    specs: tuple[LevelSpec, ...]
    epoch: bytes | None
    """None: they do not agree on one; what any of them holds is worth nothing."""
    recovered: Recovered | None
    """What all of them hold in the same slot."""
    lacking: Slots
    """Slots in which some rank holds what not all do: to be forgotten."""
    reason: str = ""
    """Why some rank found nothing that it may use; "": each did, or nothing persists."""


def agree(hellos: Mapping[int, Hello], epoch: bytes | None) -> Agreement:
    """Put together how ranks introduced themselves. epoch: the engine's, as its file has it; None: there is no file.

    ConfigError where the ranks are not of one engine.
    """
    told = [hellos[rank] for rank in sorted(hellos)]
    for each in told[1:]:
        for name in {*told[0].identity, *each.identity}:
            if told[0].identity.get(name) != each.identity.get(name):
                raise ConfigError(
                    f"rank {each.rank}: {name}",
                    each.identity.get(name),
                    f"all ranks must run the same: rank {told[0].rank} has {told[0].identity.get(name)!r}",
                )
    specs = tuple(
        replace(levels[0], capacity=min(level.capacity for level in levels))
        for levels in zip(*(each.specs for each in told), strict=True)
    )
    epochs = {each.epoch for each in told} | ({epoch} if epoch is not None else set())
    held = [each.recovered for each in told if each.recovered is not None]
    nothing = np.empty(0, dtype=np.int32)
    reason = next((each.reason for each in held if each.reason), "")
    if len(epochs) != 1 or len(held) < len(told):
        return Agreement(specs, epochs.pop() if len(epochs) == 1 else None, None, nothing, reason)
    common = functools.reduce(np.bitwise_and, (_kept(held[0], other, specs[-1].capacity) for other in held))
    common = _closed(common, held[0].parents)
    all_slots = np.unique(np.concatenate([each.slots for each in held]))
    lacking = np.setdiff1d(all_slots, held[0].slots[common]).astype(np.int32)
    return Agreement(specs, epochs.pop(), _part(held[0], common, specs[-1].capacity), lacking, reason)


def _kept(mine: Recovered, other: Recovered, capacity: int) -> np.ndarray:
    """Per block of `mine`: does the other have the same one in the same slot?"""
    size = int(max(capacity, *(each.slots.max(initial=-1) + 1 for each in (mine, other))))
    idents = np.zeros(size, dtype=np.uint64)
    there = np.zeros(size, dtype=np.bool_)
    idents[other.slots], there[other.slots] = other.idents, True
    return np.asarray(there[mine.slots] & (idents[mine.slots] == mine.idents) & (mine.slots < capacity))


def _closed(kept: np.ndarray, parents: np.ndarray) -> np.ndarray:
    """Without the blocks of which an ancestor is not kept."""
    while True:
        further = kept & ((parents == ROOT) | kept[np.maximum(parents, 0)])
        if (further == kept).all():
            return kept
        kept = further


def _part(recovered: Recovered, kept: np.ndarray, capacity: int) -> Recovered:
    """Only these blocks; all their parents are among them."""
    if kept.all():
        return recovered
    at = np.cumsum(kept) - 1
    parents = recovered.parents[kept]
    width = len(recovered.symbols) // max(1, len(kept))
    symbols = np.frombuffer(recovered.symbols, dtype=np.uint8).reshape(len(kept), width)[kept].tobytes()
    return Recovered(
        recovered.slots[kept],
        np.where(parents == ROOT, ROOT, at[np.maximum(parents, 0)]).astype(np.int64),
        recovered.idents[kept],
        symbols,
        recovered.last_use[kept],
        recovered.uses[kept],
        None if recovered.hints is None else recovered.hints[kept],
        recovered.forgotten + int((~kept).sum()),
        recovered.reason,
    )


class RankResults:
    """Messages of several ranks, one job each, become messages of one mover: a job is over when all ranks reported it;
    a block is there when it is there on all of them, and bad where it is bad on one. A job is overdue when it is on one
    rank, and no other touches its memory any more: on each it is over, or overdue."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._results: dict[int, list[JobResult]] = {}
        self._late: dict[int, set[int]] = {}
        """Ranks on which it is, or was, overdue, by job."""
        self._told: set[int] = set()
        """Jobs of which the planner knows that."""
        self._ended: dict[int, set[int]] = {}
        """Ranks that have sent their result, by job."""

    def take(self, messages: Mapping[int, Sequence[PlannerMessage]]) -> list[PlannerMessage]:
        """What the planner must hear of these messages (by rank, each rank's in order)."""
        if self.ranks == 1:
            return [message for each in messages.values() for message in each]
        heard: list[PlannerMessage] = []
        for rank in sorted(messages):
            for message in messages[rank]:
                heard.extend(self._one(rank, message))
        return heard

    def _one(self, rank: int, message: PlannerMessage) -> list[PlannerMessage]:
        if not isinstance(message, JobOverdue | JobResult):
            return [message]
        told: list[PlannerMessage] = []
        ended = self._ended.setdefault(message.job, set())
        if isinstance(message, JobOverdue):
            self._late.setdefault(message.job, set()).add(rank)
        else:
            ended.add(rank)
            self._results.setdefault(message.job, []).append(message)
        late = self._late.get(message.job)
        if late is not None and message.job not in self._told and len(late | ended) == self.ranks:
            self._told.add(message.job)
            told.append(JobOverdue(message.job))
        if len(ended) == self.ranks:
            del self._ended[message.job]
            self._late.pop(message.job, None)
            self._told.discard(message.job)
            told.append(_merged(self._results.pop(message.job)))
        return told


def _gravity(reason: str) -> int:
    return _GRAVEST.index(reason) if reason in _GRAVEST else len(_GRAVEST)


def _merged(results: Sequence[JobResult]) -> JobResult:
    bad = [each.bad for each in results if each.bad is not None]
    return JobResult(
        results[0].job,
        np.logical_and.reduce([each.ok for each in results]),
        sum(each.nbytes for each in results),
        max(each.seconds for each in results),
        reason=min((each.reason for each in results if each.reason), key=_gravity, default=""),
        bad=np.logical_or.reduce(bad) if len(bad) == len(results) else None,
        waited_s=max(each.waited_s for each in results),
        pressure=max((each.pressure for each in results if each.pressure is not None), default=None),
    )
