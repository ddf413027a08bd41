"""The rules of the tree: who may import whom, sizes, names, broad excepts, and what `import tiercache` costs.

Every rule is a function from the root of a package to a list of violations; each is also tried on a package that breaks
it, for a rule that finds nothing may only be blind.
"""

from __future__ import annotations

import ast
import fnmatch
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "tiercache"

ARROWS: list[list[str]] = [
    ["types", "errors", "rows", "arrays", "patience", "values", "words"],
    ["layout", "keys", "checksum", "config*", "hints", "remote", "sizing*"],
    ["policy", "expiry", "index", "slots", "residency"],
    ["tiers", "catalog*", "directory", "scrub"],
    ["planner", "mover"],
    ["cache*", "assembly", "delivery", "ending", "lifetime", "link", "loaded", "match", "prefill", "stats", "__init__"],
    ["integrations", "observe", "testing"],
    ["sim"],
    ["cli*", "__main__"],
]
"""A module imports from its own row (without cycles) and from the rows above. A new module must be placed here."""
STRANGERS = {"planner", "mover"}
"""In one row, but neither imports the other."""
CORE_ROWS = 6
"""The rows that `import tiercache` may load."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 70
VAGUE = ("Manager", "Engine", "Handler", "Helper", "Util")
THIRD_PARTY = {"numpy", "lmdb", "sortedcontainers", "xxhash"}
OPTIONAL = {"remote.valkey_wire"}
"""Modules that need an extra; imported when a tier that needs them is made."""
IMPORT_S = 0.3


def modules(root: Path) -> dict[str, Path]:
    """Dotted names below the package ("mover.job"; a package stands for its `__init__`), and their files."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def row_of(module: str) -> int | None:
    top = module.partition(".")[0]
    return next((i for i, row in enumerate(ARROWS) if any(fnmatch.fnmatchcase(top, name) for name in row)), None)


def imports(root: Path, module: str, known: dict[str, Path]) -> Iterator[tuple[str, int]]:
    """Modules of the package that `module` imports anywhere (functions and TYPE_CHECKING too), with the line."""
    inside = known[module].name == "__init__.py"
    package = ([] if module == "__init__" else module.split(".")) if inside else module.split(".")[:-1]
    for node in ast.walk(tree_of(known[module])):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = [root.name, *package[: len(package) - node.level + 1]] if node.level else []
            names = [".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names]
        else:
            continue
        for name in names:
            top, _, rest = name.partition(".")
            if top == root.name:
                yield _nearest_module(rest, known), node.lineno


def _nearest_module(name: str, known: dict[str, Path]) -> str:
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or "__init__"


def unplaced(root: Path) -> list[str]:
    return [module for module in modules(root) if row_of(module) is None]


def wrong_arrows(root: Path) -> list[str]:
    known = modules(root)
    wrong = []
    for module in known:
        for target, line in imports(root, module, known):
            here, there = row_of(module), row_of(target)
            tops = {module.partition(".")[0], target.partition(".")[0]}
            if (here is not None and there is not None and there > here) or tops == STRANGERS:
                wrong.append(f"{module}:{line} imports {target}")
    return wrong


def cycles(root: Path) -> list[str]:
    known = modules(root)
    graph = {module: {target for target, _ in imports(root, module, known)} - {module} for module in known}
    found, done = [], set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())
    return found


def _docstring_lines(tree: ast.AST) -> set[int]:
    """Lines of strings that stand alone: docstrings of modules, classes, functions and attributes."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def long_files(root: Path) -> list[str]:
    long = []
    for module, path in modules(root).items():
        count = len(path.read_text(encoding="utf-8").splitlines()) - len(_docstring_lines(tree_of(path)))
        if count > MAX_FILE_LINES:
            long.append(f"{module}: {count} lines")
    return long


def long_functions(root: Path) -> list[str]:
    long = []
    for module, path in modules(root).items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                count = (node.end_lineno or node.lineno) - node.lineno + 1 - len(_docstring_lines(node))
                if count > MAX_FUNCTION_LINES:
                    long.append(f"{module}.{node.name}: {count} lines")
    return long


def vague_classes(root: Path) -> list[str]:
    return [
        f"{module}.{node.name}"
        for module, path in modules(root).items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and any(word in node.name for word in VAGUE)
    ]


def _is_broad(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_is_broad(item) for item in node.elts)
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
    return node is None or name in ("Exception", "BaseException")


def broad_excepts(root: Path) -> list[str]:
    """Bare, Exception or BaseException, or suppressing these, without "# ... outermost frame" on the line.

    Clean-up that ends in a bare `raise` hides nothing and may catch BaseException.
    """
    found = []
    for module, path in modules(root).items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                last = node.body[-1]
                reraises = (
                    isinstance(last, ast.Raise) and last.exc is None and "BaseException" in ast.dump(node.type or last)
                )
                broad = _is_broad(node.type) and not reraises
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
                broad = any(_is_broad(argument) for argument in node.args)
            else:
                continue
            if broad and "outermost frame" not in lines[node.lineno - 1].partition("#")[2]:
                found.append(f"{module}:{node.lineno}")
    return found


@pytest.mark.parametrize(
    "rule", [unplaced, wrong_arrows, cycles, long_files, long_functions, vague_classes, broad_excepts]
)
def test_the_tree_keeps_the_rule(rule: Callable[[Path], list[str]]) -> None:
    assert rule(ROOT) == []


# --- each rule on a package that breaks it ---------------------------------------------------------------------------


def _package(tmp_path: Path, files: dict[str, str]) -> Path:
    root = tmp_path / "tiercache"
    for name, text in {"__init__.py": "", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    return root


def test_a_new_module_must_be_placed(tmp_path: Path) -> None:
    root = _package(tmp_path, {"types.py": "", "misc.py": "", "catalog_rows.py": "", "misc2/a.py": ""})
    assert unplaced(root) == ["misc", "misc2", "misc2.a"]


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("keys.py", "from tiercache.index import x", "keys:1 imports index"),
        ("keys.py", "import tiercache.index", "keys:1 imports index"),
        ("keys.py", "from tiercache import index", "keys:1 imports index"),
        ("keys.py", "from . import index", "keys:1 imports index"),
        ("keys.py", "def f():\n    from .index import x", "keys:2 imports index"),
        ("keys.py", "from tiercache import anything", "keys:1 imports __init__"),
        ("tiers/dram.py", "from tiercache.planner.room import x", "tiers.dram:1 imports planner.room"),
        ("tiers/dram.py", "from ..planner import room", "tiers.dram:1 imports planner.room"),
        ("tiers/__init__.py", "from ..planner import room", "tiers:1 imports planner.room"),
        ("mover/job.py", "from tiercache.planner.room import x", "mover.job:1 imports planner.room"),
        ("planner/room.py", "from tiercache.mover import Mover", "planner.room:1 imports mover"),
        ("__init__.py", "from tiercache.testing import x", "__init__:1 imports testing"),
    ],
)
def test_an_arrow_the_wrong_way_is_seen(tmp_path: Path, name: str, text: str, wrong: str) -> None:
    files = {"index.py": "", "planner/room.py": "", "mover/job.py": "", "tiers/dram.py": "", "testing/a.py": ""}
    assert wrong_arrows(_package(tmp_path, {**files, name: text})) == [wrong]


def test_right_arrows_are_not_blamed(tmp_path: Path) -> None:
    files = {
        "types.py": "import os, numpy",
        "config.py": "from tiercache.layout import a\nfrom tiercache.types import b",
        "layout.py": "from .errors import c",
        "errors.py": "",
        "mover/job.py": "from tiercache.mover import ledger\nfrom .ledger import d\nfrom tiercache.config import e",
        "mover/ledger.py": "",
        "cli.py": "from tiercache import TieredKVCache",
    }
    root = _package(tmp_path, files)
    assert (wrong_arrows(root), cycles(root)) == ([], [])


@pytest.mark.parametrize(
    ("files", "cycle"),
    [
        ({"index.py": "import tiercache.slots", "slots.py": "import tiercache.index"}, "index -> slots -> index"),
        (
            {
                "mover/a.py": "from . import b",
                "mover/b.py": "from .c import x",
                "mover/c.py": "def f():\n from . import a",
            },
            "mover.a -> mover.b -> mover.c -> mover.a",
        ),
        (
            {"cache.py": "from tiercache import x", "__init__.py": "from tiercache.cache import y"},
            "__init__ -> cache -> __init__",
        ),
    ],
)
def test_a_cycle_is_seen(tmp_path: Path, files: dict[str, str], cycle: str) -> None:
    assert cycles(_package(tmp_path, files)) == [cycle]


def test_long_files_and_functions_are_seen(tmp_path: Path) -> None:
    doc = '"""' + "\n" * 300 + '"""\n'
    body = "    x = 1\n" * 69
    files = {
        "types.py": doc + "x = 1\n" * 400,
        "keys.py": doc + "x = 1\n" * 401,
        "slots.py": "class A:\n    def f(self):\n"
        + '        """a\n        b"""\n'
        + body.replace("    x", "        x"),
        "index.py": "async def f():\n" + body + "    x = 2\n",
    }
    root = _package(tmp_path, files)
    assert long_files(root) == ["keys: 401 lines"]
    assert long_functions(root) == ["index.f: 71 lines"]


def test_vague_names_are_seen(tmp_path: Path) -> None:
    root = _package(
        tmp_path, {"types.py": "class CacheManager:\n    class Utils: ...\nclass Managed: ...\nclass Room: ..."}
    )
    assert vague_classes(root) == ["types.CacheManager", "types.Utils"]


@pytest.mark.parametrize(
    ("handler", "found"),
    [
        ("except: pass", True),
        ("except Exception: pass", True),
        ("except Exception as e: raise ValueError from e", True),
        ("except Exception: raise", True),
        ("except (OSError, BaseException): pass", True),
        ("except builtins.Exception: pass", True),
        ("except Exception: x = 'outermost frame'", True),
        ("except Exception:  # outermost frame\n    pass", False),
        ("except Exception:  # noqa: BLE001 - outermost frame\n    pass", False),
        ("except BaseException:\n    undo()\n    raise", False),
        ("except (OSError, ValueError): pass", False),
    ],
)
def test_broad_excepts_are_seen(tmp_path: Path, handler: str, found: bool) -> None:
    root = _package(tmp_path, {"types.py": f"try:\n    pass\n{handler}\n"})
    assert broad_excepts(root) == (["types:3"] if found else [])


def test_suppressing_everything_is_seen(tmp_path: Path) -> None:
    text = "with suppress(OSError): pass\nwith contextlib.suppress(Exception): pass\n"
    assert broad_excepts(_package(tmp_path, {"types.py": text})) == ["types:2"]


# --- what an import costs --------------------------------------------------------------------------------------------

FRESH = """
import importlib, json, sys, time
before = set(sys.modules)
begin = time.process_time()
for name in NAMES:
    importlib.import_module(name)
seconds = time.process_time() - begin
new = {name.partition(".")[0] for name in set(sys.modules) - before}
print(json.dumps([seconds, sorted(new - set(sys.stdlib_module_names) - {"tiercache"})]))
"""


def test_importing_the_package_is_quick_and_small(python: Callable[..., str]) -> None:
    best = float("inf")
    for _ in range(3):
        seconds, others = json.loads(python(FRESH.replace("NAMES", "['tiercache']")))
        assert set(others) <= THIRD_PARTY
        best = min(best, seconds)
    print(f"import tiercache: {best:.3f} s")
    assert best < IMPORT_S


def test_no_module_up_to_the_cache_needs_more(python: Callable[..., str]) -> None:
    wanted = modules(ROOT).keys() - OPTIONAL - {"__init__"}
    core = [f"tiercache.{name}" for name in sorted(wanted) if (row_of(name) or 0) < CORE_ROWS]
    _, others = json.loads(python(FRESH.replace("NAMES", repr(core))))
    assert set(others) <= THIRD_PARTY
    assert {"numpy", "xxhash"} <= set(others)
