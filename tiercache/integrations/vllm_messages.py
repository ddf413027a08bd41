"""What passes between the scheduler's process and the workers' with each engine step: plain values.

Scheduler to worker: one `StepOrders` a step, the same for all ranks. Worker to scheduler: one `StepReport` a step and
rank, put together by `aggregate`. At the start, and when asked, a rank introduces itself with a `Hello`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tiercache.types import LevelSpec, MoverMessage, PlannerMessage, Recovered, Slots

__all__ = ["SYMBOL_NBYTES", "Attach", "Hello", "LoadOrder", "StepOrders", "StepReport"]

SYMBOL_NBYTES = 32
"""A symbol is a block hash of vLLM's sha256 algorithms."""


@dataclass(frozen=True, slots=True, eq=False)
class Attach:
    """Engine blocks that jobs name by an endpoint: row i of the endpoint is the engine's block `block_ids[i]`."""

    endpoint: int
    block_ids: Slots
    once: bool
    """Only jobs of this very step use it (a store); else jobs of later steps do, too, until the load is `closed`."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadOrder:
    """A request waits for rows `[start, end)` of an endpoint; whatever does not come is to be reported as invalid."""

    endpoint: int
    request: str
    start: int
    end: int


@dataclass(slots=True, eq=False)
class StepOrders:
    """What a worker has to do in one step."""

    step: int
    attach: list[Attach] = field(default_factory=list)
    loads: list[LoadOrder] = field(default_factory=list)
    messages: list[MoverMessage] = field(default_factory=list)
    """For the mover, in order; after `attach` and `loads`."""
    closed: list[int] = field(default_factory=list)
    """Endpoints of loads that get no further jobs."""
    voided: list[int] = field(default_factory=list)
    """Endpoints of loads of which nothing is valid, whatever arrives (another epoch)."""
    fence: list[int] = field(default_factory=list)
    """Jobs (stores) that must be over, or called off, before the engine writes anything in this step."""
    wants_hello: bool = False
    drains: bool = False
    """No request runs in this step, and it may be the last one for a while."""
    echo: bool = False
    """The scheduler's half wants to hear of the end of this step, also where there is nothing else to say."""

    def is_empty(self) -> bool:
        """Is there nothing to do but to say that the step is over?"""
        return not (self.messages or self.loads or self.closed or self.voided or self.fence or self.wants_hello)


@dataclass(frozen=True, slots=True, eq=False)
class Hello:
    """What a rank opened with."""

    rank: int
    epoch: bytes
    """Of its directory, or a nonce that nothing else has."""
    identity: Mapping[str, str]
    """The engine-wide facts that make KV interchangeable; equal on all ranks."""
    specs: tuple[LevelSpec, ...]
    recovered: Recovered | None
    """None: nothing persists."""
    directory: str = ""
    """Where its files are; "": nowhere."""
    remarks: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class StepReport:
    """What ranks have to say after a step."""

    step: int
    messages: dict[int, list[PlannerMessage]] = field(default_factory=dict)
    """By rank, in order."""
    hellos: dict[int, Hello] = field(default_factory=dict)

    def aggregate(self, other: StepReport) -> StepReport:
        """Put another rank's report of the same step into this one."""
        self.step = min(self.step, other.step)
        for rank, messages in other.messages.items():
            self.messages.setdefault(rank, []).extend(messages)
        self.hellos.update(other.hellos)
        return self
