"""The directory that holds one NVMe store, and the lock that makes it ours alone.

```
lock          flock of the owner; its text is the owner's pid
STORE         json: format version and store id
epoch         hex of the epoch, replaced by rename
slots-NN.dat  payload
catalog/      data.mdb: what is in the slots
clean         the catalog was closed in order; says which bytes it had
reading       only while a start reads the catalog: if it is left, that ended the process
```

The lock is taken before anything else is opened. Directories have mode 0700 and files 0600, whatever the umask.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections import Counter
from pathlib import Path

from tiercache.errors import CacheClosedError, ConfigError, DirectoryInUseError, FormatVersionError

__all__ = ["FORMAT_VERSION", "StoreDirectory", "filesystem_type", "read_small", "sync_directory", "write_durably"]

FORMAT_VERSION = 2
"""Of everything in the directory together: files, catalog records, checksums."""

_LOG = logging.getLogger("tiercache.directory")
_RETRY_S = 0.02
_SMALL_NBYTES = 1 << 16
_MOUNTS = Path("/proc/self/mountinfo")
_owned: set[tuple[int, int]] = set()
"""Device and inode of every lock this process holds: on NFS flock is per process, and would grant a second one."""
_owned_lock = threading.Lock()


class StoreDirectory:
    """An owned directory. Made by `open`; closing it (or the end of the process, however it ends) frees it."""

    def __init__(self, path: Path, lock_fd: int, mine: tuple[int, int], store_id: str) -> None:
        self.path = path
        self.store_id = store_id
        """128 random bits in hex, written once; the catalog repeats it. "": damaged, and opened without `create`."""
        self.fs_type = filesystem_type(path)
        self.remarks: list[str] = _filesystem_remarks(self.fs_type)
        """What a user should know of this place; each is logged once, and shown in the statistics."""
        self.counters: Counter[str] = Counter()
        """Catalogs set aside, records dropped, and so on, since this owner opened the directory."""
        self.cold_reason = ""
        """Why a catalog that was here is not used any more ("" when none was dropped)."""
        self._lock_fd: int | None = lock_fd
        self._mine = mine
        for remark in self.remarks:
            _LOG.warning("%s: %s", path, remark)

    @classmethod
    def open(cls, path: str | os.PathLike[str], wait_s: float = 3.0, create: bool = True) -> StoreDirectory:
        """Own `path`, making it (and its parents) where it is missing and `create` is true.

        Waits up to `wait_s` for another owner to go away. Without `create` only the lock file's text is changed.
        DirectoryInUseError: the other did not go. FormatVersionError: written by a version that we cannot read;
        nothing is touched. ConfigError: no directory can be had there, or without `create` there is none.
        """
        place = Path(os.path.abspath(path))  # noqa: PTH100 - not resolved; whoever changes directory changes nothing here
        try:
            _make_directory(place, create)
            fd = os.open(place / "lock", os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        except OSError as e:
            raise ConfigError("path", str(place), f"no cache directory can be opened there ({e.strerror})") from e
        try:
            mine = _take_lock(place, fd, time.monotonic() + wait_s)
        except OSError as e:
            os.close(fd)
            raise ConfigError("path", str(place), f"the cache directory cannot be locked ({e.strerror})") from e
        except BaseException:
            os.close(fd)
            raise
        try:
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return cls(place, fd, mine, _store_id(place, create))
        except OSError as e:
            _free_lock(fd, mine)
            raise ConfigError("path", str(place), f"the cache directory cannot be written ({e.strerror})") from e
        except BaseException:
            _free_lock(fd, mine)
            raise

    @property
    def catalog_path(self) -> Path:
        """Where the catalog's one file is."""
        return self.path / "catalog" / "data.mdb"

    @property
    def clean_path(self) -> Path:
        """The marker of an orderly close."""
        return self.path / "clean"

    @property
    def closed(self) -> bool:
        """True once the directory is no longer ours."""
        return self._lock_fd is None

    def free_nbytes(self) -> int:
        """Bytes that this process may still allocate on the file system."""
        facts = os.statvfs(self.path)
        return facts.f_bavail * facts.f_frsize

    def remark(self, text: str) -> None:
        """Keep and log a remark; the same one only once."""
        if text not in self.remarks:
            self.remarks.append(text)
            _LOG.warning("%s: %s", self.path, text)

    def read_epoch(self) -> bytes | None:
        """The epoch file's bytes; None where it is missing or holds nonsense. OSError where it cannot be read."""
        try:
            return bytes.fromhex(read_small(self.path / "epoch").decode("ascii").strip())
        except (FileNotFoundError, ValueError):
            return None

    def write_epoch(self, epoch: bytes) -> None:
        """Replace the epoch file; durable on return. OSError where that fails: then the old one is still there."""
        if self.closed:
            raise CacheClosedError(f"{self.path}: the directory is closed")
        write_durably(self.path / "epoch", epoch.hex().encode() + b"\n")

    def close(self) -> None:
        """Give the directory free. May be called twice."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            _free_lock(fd, self._mine)

    def abandon(self) -> None:
        """For a forked child: drop the descriptor without unlocking, which would unlock the parent too."""
        fd, self._lock_fd = self._lock_fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    def __enter__(self) -> StoreDirectory:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"StoreDirectory({str(self.path)!r}, {self.fs_type}, {'closed' if self.closed else 'open'})"


def read_small(path: Path) -> bytes:
    """The (first 64 KiB of the) file at `path`. ValueError for what is no plain file: a FIFO would keep us waiting, a
    device might never end. OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError(f"{path} is not a plain file")
        return os.read(fd, _SMALL_NBYTES)
    finally:
        os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Replace the file at `path` by one of mode 0600 with `data`: after a crash it is the old or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    finally:
        os.close(fd)
    temporary.replace(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make creations, renames and removals in `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def filesystem_type(path: Path, mountinfo: str | None = None) -> str:
    """The type ("ext4", "nfs4", ...) of the file system at `path`; "unknown" where the kernel does not say.

    `mountinfo` is the text of /proc/self/mountinfo, read where it is None.
    """
    if mountinfo is None:
        try:
            mountinfo = _MOUNTS.read_text("utf-8", "surrogateescape")
        except OSError:
            return "unknown"
    target = path.resolve()
    best, kind = -1, "unknown"
    for line in mountinfo.splitlines():
        left, found, right = line.partition(" - ")
        fields = left.split()
        if not found or len(fields) < 5:
            continue
        point = Path(fields[4].replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\"))
        if target.is_relative_to(point) and len(point.parts) >= best:
            best, kind = len(point.parts), right.split()[0]
    return kind


def _filesystem_remarks(fs_type: str) -> list[str]:
    if fs_type.startswith(("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre")):
        return [f"on a network or user-space file system ({fs_type}): locks and durability are only as good as its"]
    if fs_type == "overlay":
        return ["on an overlay file system: in a container it is gone with the container; mount a volume"]
    if fs_type in ("tmpfs", "ramfs"):
        return [f"on {fs_type}: this is memory, and gone with a reboot"]
    return []


def _make_directory(place: Path, create: bool) -> None:
    if not create:
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        return
    place.chmod(0o700)
    sync_directory(place.parent)


def _take_lock(place: Path, fd: int, until: float) -> tuple[int, int]:
    """flock `fd`, trying until the moment `until`; DirectoryInUseError afterwards. Its entry in `_owned`."""
    facts = os.fstat(fd)
    mine = (facts.st_dev, facts.st_ino)
    while True:
        with _owned_lock:
            if mine not in _owned:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass
                else:
                    _owned.add(mine)
                    return mine
        if time.monotonic() >= until:
            raise DirectoryInUseError(f"{place} is in use by {_owner(fd)}; one cache at a time may own it")
        time.sleep(_RETRY_S)


def _owner(fd: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        pid = int(os.pread(fd, 32, 0))
        return "this process" if pid == os.getpid() else f"process {pid}"
    return "another process"


def _free_lock(fd: int, mine: tuple[int, int]) -> None:
    with _owned_lock:
        _owned.discard(mine)
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    with contextlib.suppress(OSError):
        os.close(fd)


def _store_id(place: Path, create: bool) -> str:
    """Read STORE, or write it. FormatVersionError where another version wrote it."""
    path = place / "STORE"
    try:
        facts = json.loads(read_small(path))
        version, store_id = facts["format"], facts["store_id"]
    except FileNotFoundError:
        if not create:
            raise ConfigError("path", str(place), "there is no cache in this directory") from None
        version, store_id = FORMAT_VERSION, ""
    except (ValueError, KeyError, TypeError):
        _LOG.warning("%s is damaged: the store gets a new id, and what the directory holds is forgotten", path)
        version, store_id = FORMAT_VERSION, ""
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{place} has format {version!r}, this version reads {FORMAT_VERSION}: use the version that wrote it, "
            "another directory, or remove this one by hand; nothing in it was changed"
        )
    if not (isinstance(store_id, str) and store_id):
        if not create:
            return ""
        store_id = secrets.token_hex(16)
        write_durably(path, json.dumps({"format": FORMAT_VERSION, "store_id": store_id}).encode() + b"\n")
    return store_id
