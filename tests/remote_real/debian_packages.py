"""What the tests with real processes need of Debian: found where it is, else installed, else unpacked.

`python tests/remote_real/debian_packages.py` makes all of it available and prints where it is.

Programs are looked for on PATH and in the folders of system programs, libraries by ldconfig. What is missing is
installed by apt-get where this runs as root, and elsewhere downloaded with what it depends on and unpacked into the
cache folder, outside the checkout; nothing of the system is changed then. One process at a time does so.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = {
    "redis-server": "redis-server",
    "etcd": "etcd-server",
    "nft": "nftables",
    "ip": "iproute2",
    "tc": "iproute2",
    "openssl": "openssl",
    "redis-cli": "redis-tools",
    "setpriv": "util-linux",
    "unshare": "util-linux",
}
"""Program -> the package that has it."""
LIBRARIES = {
    "libibverbs1": ("libibverbs.so.1", ("libibverbs1",)),
    "libnuma1": ("libnuma.so.1", ("libnuma1",)),
    "libcurl4": ("libcurl.so.4", ("libcurl4", "libcurl4t64")),
}
"""Name -> the file that the linker asks for, and the packages that may have it."""
_SYSTEM = ("/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
_APT_S = 600
# No service is started: the tests start their own processes.
_APT_ENV = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1", "LC_ALL": "C"}


class MissingPackageError(RuntimeError):
    """Something is not here and could not be had; the message says what to install."""


def cache_folder() -> Path:
    """Where packages are unpacked, shared by checkouts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tiercache" / "debian"


def program(name: str, cache: Path | None = None) -> Path:
    """Path of a program of PROGRAMS. MissingPackageError where it cannot be had, KeyError for another name."""
    package, home = PROGRAMS[name], cache or cache_folder()
    found = _on_path(name, home)
    if found is None:
        with locked(home / "lock"):
            found = _on_path(name, home)
            if found is None:
                _obtain([package], home)
                found = _on_path(name, home)
    if found is None:
        raise MissingPackageError(f"{name} is in none of {', '.join(_SYSTEM)} after its package {package} came")
    return found


def libraries(*names: str, cache: Path | None = None) -> list[Path]:
    """Make libraries of LIBRARIES available; folders to put on LD_LIBRARY_PATH (none where the system has all)."""
    home = cache or cache_folder()
    with locked(home / "lock"):
        for name in names:
            file, packages = LIBRARIES[name]
            if not _system_has(file) and _unpacked(file, home) is None:
                _obtain(packages, home)
    folders = []
    for name in names:
        file, packages = LIBRARIES[name]
        if not _system_has(file):
            place = _unpacked(file, home)
            if place is None:
                raise MissingPackageError(f"{file} is not to be found after one of {', '.join(packages)} came")
            folders.append(place)
    return sorted(set(folders))


def _on_path(name: str, home: Path) -> Path | None:
    where = os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM, str(home / "bin")])
    found = shutil.which(name, path=where)
    return Path(found) if found else None


def _system_has(file: str) -> bool:
    ldconfig = shutil.which("ldconfig", path=os.pathsep.join([os.environ.get("PATH", ""), *_SYSTEM]))
    if ldconfig is None:
        return False
    known = subprocess.run([ldconfig, "-p"], capture_output=True, text=True, check=False, timeout=60)
    return any(line.split()[:1] == [file] for line in known.stdout.splitlines())


def _unpacked(file: str, home: Path) -> Path | None:
    found = sorted((home / "root").glob(f"usr/lib/**/{file}")) or sorted((home / "root").glob(f"lib/**/{file}"))
    return found[0].parent if found else None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One builder at a time; the lock goes with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process builds here, waiting for it ({path})", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _obtain(packages: Sequence[str], home: Path) -> None:
    """Have one of these packages, the first that can be had."""
    tried = []
    for package in packages:
        for way in (_install, _unpack):
            try:
                way(package, home)
                return
            except (OSError, subprocess.SubprocessError) as error:
                said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
                tried.append(f"{way.__name__.strip('_')} {package}: {said[-1] if said else type(error).__name__}")
    what = " or ".join(packages)
    raise MissingPackageError(f"{what} is needed: apt-get install {packages[0]} as root ({'; '.join(tried)})")


def _apt(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=_APT_S, env=_APT_ENV, cwd=cwd, errors="replace"
    )
    return done.stdout


def _install(package: str, home: Path) -> None:
    if os.geteuid() != 0:
        raise PermissionError("not root")
    install = ("apt-get", "-qq", "install", "-y", "--no-install-recommends", package)
    try:
        _apt(*install)
    except subprocess.CalledProcessError:  # its lists of packages are old, or empty
        _apt("apt-get", "-qq", "update")
        _apt(*install)


def _unpack(package: str, home: Path) -> None:
    """Download a package and what it depends on that is not installed, and unpack it all under `home / "root"`."""
    place, root = home / "packages", home / "root"
    place.mkdir(parents=True, exist_ok=True)
    options = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    lines = _apt("apt-cache", "depends", "--recurse", *options, package).splitlines()
    names = {line.strip() for line in lines if line[:1].isalnum()}
    wanted = sorted(name for name in names if name == package or not _is_installed(name))
    _apt("apt-get", "-qq", "download", *wanted, cwd=place)
    for name in wanted:
        for file in place.glob(f"{name}_*.deb"):
            _apt("dpkg", "-x", str(file), str(root))
    _make_wrappers(home)


def _is_installed(package: str) -> bool:
    command = ["dpkg-query", "-W", "-f", "${Status}", package]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.endswith("ok installed")


def _make_wrappers(home: Path) -> None:
    """For each program that was unpacked, one in `home / "bin"` that finds its libraries (the process is the same)."""
    root, bin_ = home / "root", home / "bin"
    bin_.mkdir(exist_ok=True)
    folders = {str(file.parent) for file in root.rglob("*.so*")}
    for name in PROGRAMS:
        for place in ("usr/bin", "usr/sbin", "bin", "sbin"):
            target = root / place / name
            if target.exists():
                wrapper = bin_ / name
                wrapper.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{":".join(sorted(folders))}" exec "{target}" "$@"\n')
                wrapper.chmod(0o755)
                break


def _report(names: Iterable[str]) -> int:
    missing = 0
    for name in names:
        try:
            found = str(program(name)) if name in PROGRAMS else ":".join(map(str, libraries(name))) or "the system's"
        except MissingPackageError as error:
            missing += 1
            found = f"MISSING: {error}"
        print(f"{name:14} {found}", file=sys.stderr if found.startswith("MISSING") else sys.stdout)
    return missing


if __name__ == "__main__":
    sys.exit(1 if _report([*PROGRAMS, *LIBRARIES]) else 0)
