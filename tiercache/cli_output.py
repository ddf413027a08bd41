"""How commands write: whole texts to stdout, a progress bar to stderr, tables through rich where it is installed."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from shutil import get_terminal_size
from typing import Any

from tiercache.errors import TierCacheError

__all__ = [
    "RICH_INSTALL",
    "OutputClosedError",
    "have_rich",
    "progress_bar",
    "require_rich",
    "table_text",
    "write_json",
    "write_text",
]

RICH_INSTALL = "pip install 'tiercache[cli]'"


class OutputClosedError(Exception):
    """Whoever read our stdout has gone (`| head`)."""


def have_rich() -> bool:
    """Whether rich (the extra `cli`) is installed."""
    return find_spec("rich") is not None


def require_rich() -> None:
    """Raise TierCacheError with the install line where rich is missing."""
    if not have_rich():
        raise TierCacheError(f"the table needs rich: {RICH_INSTALL}; or use --json, which goes without")


def write_text(text: str) -> None:
    """Write a text and a line end to stdout, and flush. Raises OutputClosedError."""
    try:
        print(text, flush=True)
    except BrokenPipeError as error:
        # what is still buffered must not be written at exit, where it would fail again, loudly
        with open(os.devnull, "w") as nowhere:  # noqa: PTH123
            os.dup2(nowhere.fileno(), sys.stdout.fileno())
        raise OutputClosedError from error


def write_json(value: Mapping[str, Any]) -> None:
    """Write one JSON object on one line to stdout."""
    write_text(json.dumps(value, allow_nan=False))


def table_text(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[tuple[str, str]] = ()
) -> str:
    """A table of right-aligned figures (the first column left), and under it `name  value` lines. Needs rich."""
    from rich.console import Console
    from rich.table import Table

    target = io.StringIO()
    on_terminal = sys.stdout.isatty()
    width = get_terminal_size().columns if on_terminal else 120
    console = Console(file=target, force_terminal=on_terminal, width=width, highlight=False, emoji=False, markup=False)
    table = Table(title=title, title_justify="left", title_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    grid = Table.grid(padding=(0, 2))
    for name, value in notes:
        grid.add_row(name, value)
    console.print(grid)
    return target.getvalue().rstrip("\n")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr; yields `update(done, total, note)`. Without rich, `update` does nothing."""
    if not have_rich():
        yield lambda done, total, note: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None, note="")

        def update(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done, total=total, note=note)

        yield update
