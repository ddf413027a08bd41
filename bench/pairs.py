"""Interleaved pairs: work and reference in turn, in one process, so that whatever else the machine does hits both.

- Each pair runs the reference and the work once, in alternating order, and gives one ratio. The figure is the median
  of the ratios; their range and quartiles are kept.
- Warm-up pairs come first and are not counted. What a call needs (a fresh array, say) is made outside the clock, for
  both sides alike. Results are checked outside the clock.
- Garbage collection stays on, as it is for users; everything is collected once before the first pair.
- Processor seconds of all threads are kept beside those of the clock: on a busy machine their ratio is steadier.
- With several references (engines of fio) each runs in every pair; the one with the best median is the reference.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.rows import Row

__all__ = ["Figure", "Pairs", "Seconds", "Spread"]

Call = Callable[[Any], Any]


class Seconds(float):
    """What a call returns that has timed itself: a child process, or fio. `cpu_s`: its processor seconds, if known."""

    cpu_s: float | None

    def __new__(cls, seconds: float, cpu_s: float | None = None) -> Seconds:
        """Seconds of the clock."""
        made = super().__new__(cls, seconds)
        made.cpu_s = cpu_s
        return made


@dataclass(frozen=True)
class Spread:
    """Of one number over all pairs."""

    median: float
    low: float
    high: float
    q1: float
    q3: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        """At least one value."""
        q1, _, q3 = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
        return cls(statistics.median(values), min(values), max(values), q1, q3)


@dataclass
class Figure:
    """One measured row, ready for JSON."""

    row: Row
    value: Spread
    pairs: int
    work_s: Spread | None = None
    references_s: dict[str, Spread] = field(default_factory=dict)
    chosen: str = ""
    """Which of the references the value is against."""
    cpu_ratio: float | None = None
    """Processor seconds of the work / of the reference; None where they are not known (fio)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Sizes, and what else a reader should know."""
    verdict: str = ""
    """"reached", "not reached", "stated" (no target), or "not judged" (smoke)."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values; row and value side by side."""
        found = asdict(self)
        return {**found.pop("row"), **found}


class Pairs:
    """Measures one row, with pytest-benchmark's clock around the work. `done(figure)` takes the result."""

    def __init__(self, benchmark: Any, done: Callable[[Figure], None]) -> None:
        self._benchmark = benchmark
        self._done = done

    def run(
        self,
        row: Row,
        work: Call,
        references: Mapping[str, Call],
        *,
        pairs: int,
        warmup: int = 1,
        fresh: Callable[[], Any] = lambda: None,
        check: Callable[[Any], None] = lambda _: None,
        after: Callable[[], None] = lambda: None,
        **facts: Any,
    ) -> Figure:
        """Time `work(fresh())` against each `reference(fresh())`.

        check: given each result of `work`, outside the clock; raises where it is wrong. after: runs after each pair,
        outside the clock. A call that returns `Seconds` has timed itself. Facts go into the results as they are.
        """
        round_ = _Round(work, references, fresh, check, after)
        gc.collect()
        bench = self._benchmark
        bench.pedantic(
            round_.timed,
            setup=round_.before,
            teardown=lambda *_: round_.after(bench.stats.stats.data if bench.stats else []),
            rounds=pairs,
            warmup_rounds=warmup,
        )
        figure = round_.figure(row, pairs, facts)
        bench.extra_info.update(figure.as_dict())
        self._done(figure)
        return figure


class _Round:
    """State of the pairs of one row."""

    def __init__(
        self,
        work: Call,
        references: Mapping[str, Call],
        fresh: Callable[[], Any],
        check: Callable[[Any], None],
        after: Callable[[], None],
    ) -> None:
        self._work, self._references, self._fresh, self._check, self._after = work, references, fresh, check, after
        self._number = 0
        self._result: Any = None
        self._times: dict[str, list[float]] = {name: [] for name in ("", *references)}
        self._cpu: dict[str, list[float | None]] = {name: [] for name in self._times}
        self._cpu_began = 0.0

    def before(self) -> tuple[tuple[Any], dict[str, Any]]:
        """In even pairs the reference runs first."""
        if self._number % 2 == 0:
            self._run_references()
        argument = self._fresh()
        self._cpu_began = time.process_time()
        return (argument,), {}

    def timed(self, argument: Any) -> None:
        """What pytest-benchmark times."""
        self._result = self._work(argument)

    def after(self, seconds: list[float]) -> None:
        """In odd pairs the reference runs last. `seconds`: what was timed until now, warm-up left out."""
        cpu_s = time.process_time() - self._cpu_began
        result, self._result = self._result, None
        if seconds:
            self._note("", result, seconds[-1], cpu_s)
        self._check(result)
        del result
        if self._number % 2:
            self._run_references()
        self._after()
        self._number += 1

    def _run_references(self) -> None:
        for name, reference in self._references.items():
            argument = self._fresh()
            cpu_began = time.process_time()
            began = time.perf_counter()
            result = reference(argument)
            seconds = time.perf_counter() - began
            self._note(name, result, seconds, time.process_time() - cpu_began)

    def _note(self, name: str, result: Any, seconds: float, cpu_s: float | None) -> None:
        if isinstance(result, Seconds):
            seconds, cpu_s = float(result), result.cpu_s
        self._times[name].append(seconds)
        self._cpu[name].append(cpu_s)

    def figure(self, row: Row, pairs: int, facts: dict[str, Any]) -> Figure:
        work = self._times.pop("")
        assert len(work) == pairs
        references = {name: times[-pairs:] for name, times in self._times.items()}
        chosen = min(references, key=lambda name: statistics.median(references[name]))
        ratios = [a / b for a, b in zip(work, references[chosen], strict=True)]
        if row.measure == "share":
            ratios = [1 / each for each in ratios]
        cpu_ratio = _ratio_of_medians(self._cpu[""], self._cpu[chosen][-pairs:])
        spreads = {name: Spread.of(times) for name, times in references.items()}
        return Figure(row, Spread.of(ratios), pairs, Spread.of(work), spreads, chosen, cpu_ratio, facts)


def _ratio_of_medians(work: list[float | None], reference: list[float | None]) -> float | None:
    """None where one of them is not known, or too short to tell."""
    known = [each for each in work if each is not None], [each for each in reference if each is not None]
    if len(known[0]) < len(work) or len(known[1]) < len(reference) or not statistics.median(known[1]):
        return None
    return statistics.median(known[0]) / statistics.median(known[1])
