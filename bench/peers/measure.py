"""The measurements: rounds of all contestants, interleaved, so that the machine's noise hits all of them alike.

In every round each contestant does the operation once, in an order that turns from round to round; a ratio is taken
within its round, to tiercache and to the memcpy that each child did of the same bytes right after.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from child import Child
from contestants import OWN, Contestant

__all__ = ["FULL", "QUICK", "RESTART_CASES", "Answer", "Plan", "Race", "spread", "summary"]

Answer = dict[str, Any]
RESTART_CASES = ("clean stop", "kill -9", "bit flipped", "torn")


@dataclass(frozen=True)
class Plan:
    """Sizes of one run."""

    rounds: int = 7
    lookup_blocks: int = 8192
    lookup_nodes: tuple[int, ...] = (1, 64, 512, 8192)
    lookup_others: int = 2000
    memory: tuple[tuple[int, int], ...] = ((256, 256 << 10), (64, 2 << 20))
    """Blocks, and bytes of each."""
    disk: tuple[tuple[int, int], ...] = ((512, 256 << 10), (64, 2 << 20))
    restart: tuple[int, int] = (64, 256 << 10)
    prompts: int = 4
    damaged: int = 8
    kills: tuple[float, ...] = (0.2, 0.5, 0.8)
    """When to kill, as a part of the time that one store takes."""


FULL = Plan()
QUICK = Plan(
    rounds=5,
    lookup_blocks=64,
    lookup_nodes=(1, 8),
    lookup_others=20,
    memory=((8, 64 << 10),),
    disk=((8, 64 << 10),),
    restart=(16, 64 << 10),
    prompts=2,
    damaged=4,
    kills=(0.5,),
)


@dataclass
class Race:
    """All groups of one run. `records` grows as they are measured: one per case and contestant."""

    plan: Plan
    contestants: Sequence[Contestant]
    folder: Path
    """Where the environments are."""
    scratch: Path
    """Where the disk that is measured is mounted."""
    say: Callable[[str], None]
    log: Path
    records: list[Answer] = field(default_factory=list)
    hellos: dict[str, Answer] = field(default_factory=dict)

    def steps(self, group: str) -> int:
        """How often `say` will be called for that group."""
        plan = self.plan
        if group == "restart":
            return len(RESTART_CASES) * sum(group in one.groups for one in self.contestants)
        return {"lookup": len(plan.lookup_nodes), "memory": len(plan.memory), "disk": 2 * len(plan.disk)}[group]

    def lookups(self) -> None:
        """A whole hit on paths of several depths, and a miss."""
        plan = self.plan
        with self._children("lookup") as children:
            for nodes in plan.lookup_nodes:
                self.say(f"lookup: {plan.lookup_blocks} blocks on a path of {nodes} nodes")
                ready = self._setup(
                    children, f"hit, path of {nodes}", "lookup",
                    "lookup_setup", blocks=plan.lookup_blocks, nodes=nodes, other=plan.lookup_others,
                )  # fmt: skip
                self._rounds(
                    ready, "lookup", f"hit, path of {nodes}", "lookup", {"blocks": plan.lookup_blocks}, hit=True
                )
                if nodes == plan.lookup_nodes[-2]:
                    self._rounds(ready, "lookup", "miss", "lookup", {"blocks": 0}, hit=False)

    def memory(self) -> None:
        """Store into and load out of DRAM."""
        with self._children("memory") as children:
            for n, nbytes in self.plan.memory:
                self.say(f"DRAM: {n} blocks of {nbytes >> 10} KiB")
                ready = self._setup(
                    children, f"store, {nbytes >> 10} KiB", "memory", "memory_setup", n=n, block_nbytes=nbytes
                )
                self._rounds(ready, "memory", f"store, {nbytes >> 10} KiB", "memory_store", {})
                self._rounds(ready, "memory", f"load, {nbytes >> 10} KiB", "memory_load", _all_right(n))

    def disk(self) -> None:
        """Store to disk without and with a sync; read it warm and cold, bytes checked."""
        with self._children("disk") as children:
            for n, nbytes in self.plan.disk:
                size = f"{nbytes >> 10} KiB"
                for durable in (False, True):
                    self.say(f"disk: {n} blocks of {size}, {'with' if durable else 'without'} durability")
                    with self._directories(children) as directories:
                        case = f"store{', durable' if durable else ''}, {size}"
                        ready = self._setup(
                            children, case, "disk", "disk_setup", directories,
                            n=n, block_nbytes=nbytes, durable=durable,
                        )  # fmt: skip
                        self._rounds(ready, "disk", case, "disk_store", {})
                        for cold in (False, True) if durable else ():
                            case = f"read {'cold' if cold else 'warm'}, {size}"
                            self._rounds(ready, "disk", case, "disk_read", _all_right(n), cold=cold)

    # -- rounds -------------------------------------------------------------------------------------------------

    def _setup(
        self,
        children: dict[str, Child],
        case: str,
        group: str,
        op: str,
        directories: dict[str, str] | None = None,
        **arguments: Any,
    ) -> dict[str, Child]:
        """Those whose set-up went well. The others are recorded under the first case that they miss."""
        ready = {}
        for name, child in children.items():
            own = {"directory": directories[name]} if directories is not None else {}
            answer = child.ask(op, **arguments, **own)
            if "failed" in answer:
                self.records.append(_failed(group, case, name, f"set-up: {answer['failed']}"))
            else:
                ready[name] = child
        return ready

    def _rounds(
        self, children: dict[str, Child], group: str, case: str, op: str, expected: Answer, **arguments: Any
    ) -> None:
        """One warm-up round, then `plan.rounds`. An answer unlike `expected` is a failure of that contestant."""
        running = dict(children)
        answers: dict[str, list[Answer]] = {name: [] for name in children}
        for turn in range(self.plan.rounds + 1):
            names = list(running)
            for name in names[turn % len(names) :] + names[: turn % len(names)] if names else []:
                answer = running[name].ask(op, **arguments)
                off = {key: answer.get(key) for key, value in expected.items() if answer.get(key) != value}
                if "failed" in answer or off:
                    why = answer.get("failed") or f"answered {off}, expected {expected}"
                    self.records.append(_failed(group, case, name, why))
                    del running[name]
                elif turn:
                    answers[name].append(answer)
        for name in running:
            self.records.append(summary(group, case, name, answers[name], answers.get(OWN) if OWN in running else None))

    # -- children -----------------------------------------------------------------------------------------------

    def start(self, contestant: Contestant) -> Child:
        """A new process of that contestant."""
        return Child(contestant.command(self.folder), contestant.environment(), self.log)

    @contextmanager
    def _children(self, group: str) -> Iterator[dict[str, Child]]:
        children: dict[str, Child] = {}
        try:
            for contestant in self.contestants:
                if group in contestant.groups:
                    child = self.start(contestant)
                    children[contestant.name] = child
                    hello = child.ask("hello")
                    self.hellos.setdefault(contestant.name, hello)
                    if "failed" in hello:
                        self.records.append(_failed(group, "start", contestant.name, hello["failed"]))
                        children.pop(contestant.name).kill()
            yield children
        finally:
            for child in children.values():
                child.end()

    @contextmanager
    def _directories(self, children: dict[str, Child]) -> Iterator[dict[str, str]]:
        made = {name: tempfile.mkdtemp(prefix=f"tiercache-peers-{name}-", dir=self.scratch) for name in children}
        try:
            yield made
        finally:
            for path in made.values():
                shutil.rmtree(path, ignore_errors=True)


def summary(group: str, case: str, name: str, answers: Sequence[Answer], own: Sequence[Answer] | None) -> Answer:
    """Median and spread of one contestant's rounds; `over_own` is its time by tiercache's, round by round."""
    times = [answer["s"] for answer in answers]
    record = {
        "group": group,
        "case": case,
        "contestant": name,
        "status": "ok",
        "rounds": len(times),
        "s": spread(times),
    }
    if all("memcpy_s" in answer for answer in answers):
        record["of_memcpy"] = spread([answer["memcpy_s"] / answer["s"] for answer in answers])
    if own is not None:
        record["over_own"] = spread([a["s"] / b["s"] for a, b in zip(answers, own, strict=True)])
    return record


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, smallest, largest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _failed(group: str, case: str, name: str, why: str) -> Answer:
    return {"group": group, "case": case, "contestant": name, "status": "failed", "why": why}


def _all_right(n: int) -> Answer:
    return {"right": n, "wrong": 0, "missed": 0}
