"""Before a catalog is opened: is the file whole, as an orderly close left it? If not, a checked copy takes its place.

After `make_sound` a catalog file, if there is one, carries a valid `clean` marker, and LMDB may map it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import xxhash

from tiercache.catalog_rows import DISK_FULL, OTHER_FORMAT, READY, UNABLE, DamagedCatalogError, used_nbytes
from tiercache.directory import StoreDirectory, read_small, sync_directory, write_durably
from tiercache.errors import ConfigError, FormatVersionError

__all__ = [
    "COPY_LIMIT_S",
    "checked_copy",
    "drop_marker",
    "install",
    "make_sound",
    "marker_holds",
    "reading",
    "set_aside",
    "unreadable",
    "write_marker",
]

_LOG = logging.getLogger("tiercache.catalog")
COPY_LIMIT_S = 120.0
"""How long the subprocess may take; a million blocks take a few seconds."""
_KEPT_ASIDE = 2


def make_sound(directory: StoreDirectory) -> None:
    """Leave `directory` with a catalog that LMDB may map, and its marker, or with none.

    What cannot be read is renamed aside, counted and logged, and `directory.cold_reason` says so. ConfigError where the
    disk has no space for the copy, or the directory cannot be changed; FormatVersionError for another version's
    catalog. Both lose nothing.
    """
    try:
        _make_sound(directory)
    except OSError as e:
        raise ConfigError("path", str(directory.path), f"its catalog cannot be made ready ({e})") from e


def _make_sound(directory: StoreDirectory) -> None:
    path = directory.catalog_path
    _sweep(directory)
    if os.path.lexists(path.parent) and not path.parent.is_dir():
        set_aside(directory, "it is in no directory")
    if not path.exists():
        return
    try:
        used_nbytes(path)
    except DamagedCatalogError as e:
        set_aside(directory, str(e))
        return
    except OSError as e:
        raise unreadable(directory, e) from e
    if marker_holds(directory) and not _reading_path(directory).exists():
        return
    directory.counters["unclean_opens"] += 1
    place = directory.path / f"catalog.new-{secrets.token_hex(4)}"
    place.mkdir(mode=0o700)
    try:
        counts = checked_copy(path, place / "data.mdb")
    except DamagedCatalogError as e:
        shutil.rmtree(place, ignore_errors=True)
        set_aside(directory, str(e))
        return
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    if counts["bad"]:
        directory.counters["bad_records"] += counts["bad"]
        _LOG.warning("%s: %d damaged catalog records dropped", directory.path, counts["bad"])
    install(directory, place)
    write_marker(directory)


def install(directory: StoreDirectory, place: Path) -> None:
    """Put the closed catalog file in the directory `place` where the catalog belongs; after a crash old or new."""
    drop_marker(directory)
    target = directory.catalog_path
    if not target.parent.exists():
        target.parent.mkdir(mode=0o700)
        target.parent.chmod(0o700)
    (place / "data.mdb").replace(target)
    sync_directory(target.parent)
    place.rmdir()
    sync_directory(directory.path)


def checked_copy(source: Path, target: Path, limit_s: float | None = None) -> dict[str, int]:
    """Copy what is whole of `source` in a fresh interpreter, and count the records "kept" and "bad".

    DamagedCatalogError where that fails, dies or takes longer than `limit_s` (COPY_LIMIT_S); ConfigError where the disk
    is full, or the interpreter cannot run it at all; FormatVersionError for another version's catalog.
    """
    limit_s = COPY_LIMIT_S if limit_s is None else limit_s
    # -P and the path: the child finds what this process finds, and nothing in the current directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    command = [sys.executable, "-P", "-m", "tiercache.catalog_copy", str(source), str(target), str(limit_s)]
    try:
        child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except (OSError, ValueError) as e:
        raise _no_check(source, f"no process could be started: {e}") from e
    try:
        out, err = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=5.0)
        raise DamagedCatalogError(f"the check did not end within {limit_s} s") from None
    if child.returncode == DISK_FULL:
        raise ConfigError(
            "path",
            str(target.parent),
            f"the catalog must be copied after an unclean stop, which needs about {source.stat().st_blocks * 512} "
            f"bytes there; {shutil.disk_usage(target.parent).free} are free",
        )
    if child.returncode in (UNABLE, -signal.SIGKILL):  # by whoever kills when memory is short
        raise _no_check(source, f"status {child.returncode}: {err.decode('utf-8', 'replace').strip()[-200:]}")
    if child.returncode == OTHER_FORMAT:
        raise FormatVersionError(f"{source} was written in a format that this version does not know; nothing changed")
    if child.returncode != 0:
        detail = (err.decode("utf-8", "replace").strip().splitlines()[-1:] or ["no message"])[0]
        if not out.startswith(READY.encode()):
            raise _no_check(source, f"status {child.returncode}: {detail}")
        raise DamagedCatalogError(f"the check ended with status {child.returncode}: {detail}")
    try:
        counts = json.loads(out.removeprefix(READY.encode()))
        return {"kept": int(counts["kept"]), "bad": int(counts["bad"])}
    except (ValueError, KeyError, TypeError):
        raise DamagedCatalogError(f"the check said {out[:80]!r}") from None


def _no_check(source: Path, why: str) -> ConfigError:
    """The check says nothing of the catalog, for something else was in its way: keep the catalog."""
    remedy = (
        f"after an unclean stop `{sys.executable} -m tiercache.catalog_copy` must be able to run ({why}); nothing was "
        f"changed: mend that, or remove the directory to start cold"
    )
    return ConfigError("path", str(source.parent.parent), remedy)


def marker_holds(directory: StoreDirectory) -> bool:
    """True where the marker of an orderly close describes exactly the catalog file that is there."""
    try:
        marker = json.loads(read_small(directory.clean_path))
        return bool(marker == _describe(directory.catalog_path))
    except (OSError, ValueError, DamagedCatalogError):
        return False


@contextlib.contextmanager
def reading(directory: StoreDirectory) -> Iterator[None]:
    """While a catalog is read for the first time: should that end the process, the next start checks it before.

    The marker only says that the file is as it was closed; what LMDB closed may have been damaged in memory or on disk.
    """
    path = _reading_path(directory)
    path.touch(mode=0o600)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _reading_path(directory: StoreDirectory) -> Path:
    return directory.path / "reading"


def write_marker(directory: StoreDirectory) -> None:
    """Say which bytes the (closed) catalog has. OSError, DamagedCatalogError: then there is no marker."""
    write_durably(directory.clean_path, json.dumps(_describe(directory.catalog_path)).encode() + b"\n")


def drop_marker(directory: StoreDirectory) -> None:
    """From here on the catalog may change; durable on return."""
    with contextlib.suppress(FileNotFoundError):
        directory.clean_path.unlink()
        sync_directory(directory.path)


def set_aside(directory: StoreDirectory, why: str) -> None:
    """Rename the catalog away for whoever wants to look at it; the two newest such are kept. OSError."""
    _LOG.warning("%s: the catalog is unusable (%s): set aside, the start is cold", directory.path, why)
    directory.counters["catalogs_set_aside"] += 1
    directory.cold_reason = "corrupt"
    drop_marker(directory)
    directory.catalog_path.parent.rename(directory.path / f"catalog.bad-{time.time_ns()}")
    sync_directory(directory.path)
    aside = sorted(directory.path.glob("catalog.bad-*"), key=lambda path: path.name)
    for path in aside[:-_KEPT_ASIDE]:
        _remove(path)


def _remove(path: Path) -> None:
    """As far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def unreadable(directory: StoreDirectory, error: Exception) -> ConfigError:
    """What is in the way of reading the catalog says nothing of its content: it stays where it is."""
    remedy = (
        f"the catalog there cannot be read ({error}); nothing was changed: mend that, or start in another directory"
    )
    return ConfigError("path", str(directory.path), remedy)


def _describe(path: Path) -> dict[str, int | str]:
    used = used_nbytes(path)
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        left = used
        while left > 0:
            piece = file.read(min(left, 1 << 20))
            if not piece:
                raise DamagedCatalogError("the catalog became shorter")
            digest.update(piece)
            left -= len(piece)
        return {"size": os.fstat(file.fileno()).st_size, "used": used, "xxh3": digest.hexdigest()}


def _sweep(directory: StoreDirectory) -> None:
    """Remove what an interrupted start left."""
    for pattern in ("catalog.new-*", "epoch.tmp", "STORE.tmp", "clean.tmp", ".probe-*"):
        for path in directory.path.glob(pattern):
            _remove(path)
