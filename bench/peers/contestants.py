"""Who takes part, and the virtual environments that the peers live in.

Each peer has its own environment in a cache folder outside the checkout, built when it is missing or when its pinned
list changed. Everything is installed without its dependencies, from a list that names all that is needed on a CPU: so
no peer pulls gigabytes of CUDA. What a peer imports and only uses with a GPU is stood in for (`standins.py`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ALL", "HERE", "OWN", "Contestant", "Venv", "default_folder", "prepare"]

HERE = Path(__file__).resolve().parent
OWN = "tiercache"
"""The contestant that all others are compared with."""
BUILD_S = 900.0
"""The longest that one installation may take."""
LARGEST_NBYTES = 2 * 10**9
"""An environment above this is not used: it means that an index served another build than the one meant."""


@dataclass(frozen=True)
class Contestant:
    """One process of the benchmark: a driver script, in the environment of `venv` ("": this one)."""

    name: str
    script: Path
    groups: tuple[str, ...]
    venv: str = ""
    arguments: tuple[str, ...] = ()

    def command(self, folder: Path) -> list[str]:
        """What to run."""
        python = str(folder / self.venv / "bin" / "python") if self.venv else sys.executable
        return [python, str(self.script), *self.arguments]

    def environment(self) -> dict[str, str]:
        """Its environment variables: ours, with the checkout importable only where the checkout is what is measured."""
        kept = {name: value for name, value in os.environ.items() if name not in ("TIERCACHE", "PYTHONPATH")}
        return kept if self.venv else {**kept, "PYTHONPATH": str(HERE.parent.parent)}


@dataclass(frozen=True)
class Venv:
    """What became of a peer's environment."""

    status: str
    """"ready" or "absent"."""
    why: str = ""
    nbytes: int = 0


ALL = (
    Contestant(OWN, HERE / "drive_tiercache.py", ("lookup", "memory", "disk", "restart")),
    Contestant("lmcache", HERE / "drive_lmcache.py", ("lookup", "memory", "disk", "restart"), "lmcache", ("16",)),
    Contestant("lmcache-256", HERE / "drive_lmcache.py", ("lookup",), "lmcache", ("256",)),
    Contestant("sglang-rust", HERE / "drive_sglang_radix.py", ("lookup",), "sglang", ("rust",)),
    Contestant("sglang-python", HERE / "drive_sglang_radix.py", ("lookup",), "sglang", ("python",)),
    Contestant("hicache-file", HERE / "drive_hicache_file.py", ("disk", "restart"), "sglang"),
    Contestant("nixl-buffered", HERE / "drive_nixl.py", ("disk",), "nixl", ("buffered",)),
    Contestant("nixl-direct", HERE / "drive_nixl.py", ("disk",), "nixl", ("direct",)),
)


def default_folder() -> Path:
    """`$XDG_CACHE_HOME/tiercache/peers`, or below `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache" / "peers"


def prepare(name: str, folder: Path, say: Callable[[str], None]) -> Venv:
    """The peer's environment, built where it is missing or its pinned list changed; or why it is absent."""
    requirements = HERE / "requirements" / f"{name}.txt"
    wanted = hashlib.sha256(requirements.read_bytes() + sys.version.encode()).hexdigest()
    home, stamp = folder / name, folder / name / "built.json"
    try:
        built = json.loads(stamp.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        built = {}
    if built.get("wanted") == wanted:
        return Venv("ready", nbytes=built["nbytes"])
    say(f"building the environment of {name} in {home}")
    stamp.unlink(missing_ok=True)
    why = _run([sys.executable, "-m", "venv", "--clear", str(home)]) or _run(
        [str(home / "bin" / "pip"), "install", "--quiet", "--no-deps", "--requirement", str(requirements)]
    )
    if why:
        return Venv("absent", why)
    nbytes = sum(path.lstat().st_blocks * 512 for path in home.rglob("*") if not path.is_symlink())
    if nbytes > LARGEST_NBYTES:
        return Venv("absent", f"{nbytes / 1e9:.1f} GB were installed: not the CPU builds that the list means", nbytes)
    stamp.write_text(json.dumps({"wanted": wanted, "nbytes": nbytes}), encoding="utf-8")
    return Venv("ready", nbytes=nbytes)


def _run(command: list[str]) -> str:
    """ "" where it ended well, else the last line of what it said."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{Path(command[0]).name}: {error}"[:300]
    if done.returncode == 0:
        return ""
    said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return f"{Path(command[0]).name} ended with {done.returncode}: {said[-1] if said else 'no word'}"[:300]
