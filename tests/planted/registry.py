"""The planted faults, as data: each takes one protection out of the package.

The `*.toml` files beside this one hold them, in the order of the table in docs/testing.md.
"""

from __future__ import annotations

import ast
import builtins
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

__all__ = ["AREAS", "ROOT", "Fault", "broken", "load_faults", "table"]

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
"""Of the repository."""
AREAS = ("durability", "verification", "planner", "residency", "hints", "waiting", "ownership", "engines")
"""Names of the files, in the order of the table."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One protection, and the edit that removes it."""

    name: str
    guards: str
    """The protection, in one sentence."""
    file: str
    """From the root of the repository."""
    old: str
    """Occurs there exactly once."""
    new: str
    tests: tuple[str, ...]
    """Node ids of the tests that must fail with it; the cheapest there are."""
    shows: str
    """How it shows, in a few words."""
    area: str
    real: tuple[str, ...] = ()
    """Tests with a real vLLM that must fail with it, too."""

    def apply(self, root: Path) -> None:
        """Plant it in the tree at `root`. ValueError where the text is not there exactly once."""
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: its text occurs {text.count(self.old)} times in {self.file}")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


def load_faults(here: Path = HERE) -> list[Fault]:
    """All faults in order. ValueError for an entry with a field too many or too few."""
    texts = {area: (here / f"{area}.toml").read_text(encoding="utf-8") for area in AREAS}
    return [_fault(area, entry) for area, text in texts.items() for entry in tomllib.loads(text)["fault"]]


def _fault(area: str, entry: dict[str, Any]) -> Fault:
    entry = {"real": [], **entry}
    wanted = {field.name for field in fields(Fault)} - {"area"}
    if entry.keys() != wanted:
        raise ValueError(f"{area}: {entry.get('name')} differs in the fields {sorted(entry.keys() ^ wanted)}")
    return Fault(**{**entry, "tests": tuple(entry["tests"]), "real": tuple(entry["real"]), "area": area})


def broken(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """What keeps these from being planted in the tree at `root`: nothing in a sound registry."""
    wrong = []
    for fault in faults:
        text = (root / fault.file).read_text(encoding="utf-8") if (root / fault.file).is_file() else ""
        if text.count(fault.old) != 1:
            wrong.append(f"{fault.name}: its text occurs {text.count(fault.old)} times in {fault.file}")
            continue
        try:
            strange = _names(text.replace(fault.old, fault.new)) - _names(text) - set(dir(builtins))
        except SyntaxError as error:
            wrong.append(f"{fault.name}: {fault.file} is no Python with it ({error})")
            continue
        if strange:  # a NameError would pass for a test that fails
            wrong.append(f"{fault.name}: {fault.file} knows no {', '.join(sorted(strange))}")
        if fault.old == fault.new or not fault.tests:
            wrong.append(f"{fault.name}: it changes nothing, or names no test")
    names = [fault.name for fault in faults]
    return wrong + [f"{name}: the name is used twice" for name in sorted({n for n in names if names.count(n) > 1})]


def _names(source: str) -> set[str]:
    """Names that a module uses and does not bind, as far as one sees without looking at scopes."""
    used, bound = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    return used - bound


def table(faults: list[Fault]) -> str:
    """The table for docs/testing.md, in Markdown."""
    lines = ["| planted fault | the protection it removes | caught by | how it shows |", "|---|---|---|---|"]
    for fault in faults:
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in (*fault.tests, *fault.real))
        lines.append(f"| `{fault.name}` | {fault.guards} | {tests} | {fault.shows} |")
    return "\n".join(lines) + "\n"
