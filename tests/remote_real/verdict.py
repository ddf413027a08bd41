"""Verdict: what must hold of every ordeal, and the table of them in the documentation.

`python tests/remote_real/verdict.py ROWS.jsonl` writes the table in docs/remote.md from what the tests noted there
(`TIERCACHE_REMOTE_ROWS=ROWS.jsonl make test-remote`).
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path

from ordeal import PATIENCE_S, PHASES, Ordeal

__all__ = ["Row", "endure", "judge", "note"]

_ENOUGH = 100
"""Calls that a 99th percentile is of."""
LONGEST_S = 1.0
"""That no call at all may be late, on a machine that does other things too."""
THRESHOLD = 3
"""Jobs that are given up until the breaker opens."""
ROWS = "TIERCACHE_REMOTE_ROWS"
_BEGIN, _END = "<!-- failures: begin -->", "<!-- failures: end -->"
_PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "remote.md"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    store: str
    fault: str
    calls: int
    """That callers made while it lasted."""
    wrong: int
    raised: int
    late_ms: float
    """The 99th percentile of how much longer than its deadlines a call took, the worst verb; below 0: none was late."""
    machine_ms: float
    """The same of a sleep in another process meanwhile."""
    time_outs: int
    """Loads and questions that ran into their deadlines, over the whole of it."""
    story: str
    """What the breaker did."""
    hits: str
    """Blocks from the store before, during and after."""
    back_s: float | None
    """Seconds from the end of the fault until hits came again; None: it is no fault that ends."""


def endure(
    ordeal: Ordeal,
    begin: Callable[[], object],
    end: Callable[[], object] | None,
    *,
    fault_s: float = 4.0,
    back_within_s: float = 30.0,
) -> float | None:
    """Calm, the fault, its end, and hits again. Returns the seconds that the last took."""
    with ordeal.phase("before"):
        ordeal.flows()
        del ordeal.story[:-1]  # what failed while it connected, which takes a second or more on a busy machine
        ordeal.rest(0.5)
    with ordeal.phase("fault"):
        begin()
        ordeal.rest(fault_s)
    if end is None:
        return None
    end()
    with ordeal.phase("after"):
        back_s = ordeal.flows(within_s=back_within_s)
        ordeal.rest(0.5)
    return back_s


def judge(ordeal: Ordeal, *, opens: bool) -> None:
    """No wrong byte, nothing raised, nothing late, and the breaker opened (and closed again), or did not."""
    ordeal.calm()
    assert sum(seen.calls["lookup"] for seen in ordeal.seen.values()) > 50
    allowed_ms = PATIENCE_S * 1000 + 2 * _machine_ms(ordeal)
    for name, late_ms in {"over the whole": _late_ms(ordeal, PHASES), "fault": _late_ms(ordeal, ("fault",))}.items():
        assert max(late_ms.values()) <= allowed_ms, f"{name}: late by {late_ms} ms at p99, {allowed_ms:.0f} allowed"
    longest_s = max(max(late) for seen in ordeal.seen.values() for late in seen.late_s.values())
    assert longest_s <= LONGEST_S, f"one call was {longest_s:.2f} s late"
    for name, seen in ordeal.seen.items():
        assert seen.wrong == 0, f"{name}: {seen.wrong} loads brought wrong bytes"
        assert not seen.raised, f"{name}: {seen.raised[:3]}"
    states = ordeal.states()
    assert ("open" in states) == opens, ordeal.story
    openings = sum(pair == ("closed", "open") for pair in pairwise(states))
    probes = states.count("half-open")
    paid = _paid(ordeal)
    assert paid <= THRESHOLD * (openings + 1) + probes, f"{paid} time-outs: {ordeal.story}"
    assert ordeal.cache.check() == []


def _late_ms(ordeal: Ordeal, phases: Sequence[str]) -> dict[str, float]:
    """By verb, how late the latest call was, but for one in a hundred (three of fewer than three hundred), of verbs
    called often enough to say so."""
    late: dict[str, list[float]] = defaultdict(list)
    for name in phases:
        for verb, seconds in ordeal.seen[name].late_s.items():
            late[verb] += seconds
    enough = {verb: sorted(seconds) for verb, seconds in late.items() if len(seconds) >= _ENOUGH}
    return {verb: round(each[-1 - max(3, len(each) // 100)] * 1000, 1) for verb, each in enough.items()} or {"": 0.0}


def _paid(ordeal: Ordeal) -> int:
    """Loads and questions that ran into their deadlines: somebody may have waited for them."""
    stats = ordeal.stats()
    return int(stats["timeouts"]) - int(stats["write_timeouts"])


def _machine_ms(ordeal: Ordeal) -> float:
    return (ordeal.machine_late_s or 0.0) * 1000


def note(ordeal: Ordeal, store: str, fault: str, back_s: float | None) -> Row:
    """Put a row down, where it is asked for."""
    phases = [ordeal.seen[name] for name in ("before", "fault", "after")]
    row = Row(
        store=store,
        fault=fault,
        calls=sum(phases[1].calls.values()),
        wrong=sum(seen.wrong for seen in ordeal.seen.values()),
        raised=sum(len(seen.raised) for seen in ordeal.seen.values()),
        late_ms=max(_late_ms(ordeal, PHASES).values()),
        machine_ms=round(_machine_ms(ordeal), 1),
        time_outs=_paid(ordeal),
        story=_told(ordeal.states()),
        hits=" / ".join(str(seen.remote_blocks) for seen in phases),
        back_s=None if back_s is None else round(back_s, 1),
    )
    if path := os.environ.get(ROWS):
        with Path(path).open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
    return row


def _told(states: list[str]) -> str:
    """closed, open (4 probes), closed."""
    words: list[str] = []
    for is_closed, run in groupby(states, key=lambda state: state == "closed"):
        probes = list(run).count("half-open")
        words.append("closed" if is_closed else f"open, {probes} probe{'s' * (probes != 1)}")
    return ", ".join(words)


def table(rows: list[Row]) -> str:
    """In Markdown."""
    lines = [
        "| store | what happens | calls meanwhile | wrong bytes | exceptions | late at p99, ms (a sleep elsewhere) "
        "| time-outs | breaker | blocks from the store before / meanwhile / after | hits again after, s |",
        "|" + "---|" * 10,
    ]
    for row in sorted(rows, key=lambda each: each.store):
        late = f"{max(0.0, row.late_ms):.1f} ({row.machine_ms:.1f})"
        back = "-" if row.back_s is None else f"{row.back_s:.1f}"
        cells = (row.store, row.fault, row.calls, row.wrong, row.raised, late, row.time_outs, row.story, row.hits, back)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    rows = [Row(**json.loads(line)) for line in Path(sys.argv[1]).read_text().splitlines()]
    latest = {(row.store, row.fault): row for row in rows}
    text = _PAGE.read_text()
    head, rest = text.split(_BEGIN)
    _, tail = rest.split(_END)
    _PAGE.write_text(f"{head}{_BEGIN}\n{table(list(latest.values()))}\n{_END}{tail}")
    print(f"{len(latest)} rows in {_PAGE.name}")


if __name__ == "__main__":
    main()
