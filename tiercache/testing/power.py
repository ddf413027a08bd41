"""Power cuts: file operations that remember what was not synced, and what of it a power cut may take.

Nothing is cut for real. `PowerCut` passes everything on to the operating system (but for syncs, which it only notes)
and remembers what was there before; `cut` then makes a copy of the directory as it might be after a power cut at this
moment. Unsynced sectors, lengths, new and removed names are kept or lost by chance, a large write so torn in two.
"""

from __future__ import annotations

import os
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from tiercache.tiers.fileio import OsFiles

__all__ = ["PowerCut", "tear_lmdb", "tear_unsynced"]

SECTOR = 512
"""Bytes that a disk writes whole or not at all."""
_LMDB_PAGE_AT = 40


@dataclass(slots=True)
class _Unsynced:
    """What a file was at its last sync, where that differs."""

    nbytes: int
    """Its length then."""
    sectors: dict[int, bytes] = field(default_factory=dict)
    """Number of a sector -> its content then."""


class PowerCut(OsFiles):
    """`FileOps` over the directory `root`, which must exist; for small files, since old content is kept in memory.

    Of files whose names begin with one of `tracked`, content is only as durable as `fdatasync` made it; all others are
    taken for synced by whoever writes them (LMDB syncs its own). Names in a directory are as durable as
    `sync_directory` made them, whatever the file. `watch(operation)` is called before and after each operation that
    changes something, while nothing else changes; it may call `cut`.
    """

    def __init__(
        self, root: Path, *, tracked: Sequence[str] = ("slots-",), watch: Callable[[str], None] | None = None
    ) -> None:
        self.root = root
        self.lock = threading.RLock()
        """Held during every operation. Whoever changes files by other means can keep cuts away with it."""
        self.counters: Counter[str] = Counter()
        """Cuts, and of what was unsynced then: sectors kept and lost, lengths lost, directories whose names were."""
        self._tracked = tuple(tracked)
        self._watch = watch
        self._files: dict[int, _Unsynced] = {}
        self._names: dict[int, tuple[str, dict[str, int]]] = {}
        """Per directory (by inode): its name, and name -> inode of its entries, when it was synced last."""
        self._links = root.with_name(root.name + ".links")
        """Hard links, named by inode, to what was durable: content outlives its name there."""
        self._links.mkdir()
        for path in (root, *(entry for entry in root.rglob("*") if entry.is_dir())):
            self._remember_names(path)

    # -- FileOps ------------------------------------------------------------------------------------------------

    def open(self, path: str, flags: int, mode: int) -> int:
        """See FileOps. Without O_DIRECT: what is durable is a matter of bookkeeping here."""
        with self._changing("open"):
            return super().open(path, flags & ~os.O_DIRECT, mode)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See FileOps."""
        with self._changing("pwritev"):
            self._remember(fd, offset, offset + sum(buffer.nbytes for buffer in buffers))
            return super().pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        """See FileOps. What was written before is durable from now on."""
        with self._changing("fdatasync"):
            self._files.pop(os.fstat(fd).st_ino, None)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """See FileOps. Only the length: a cut takes no room away, and real room would have to be cleared."""
        with self._changing("fallocate"):
            self._remember(fd, 0, 0)
            if os.fstat(fd).st_size < nbytes:
                super().ftruncate(fd, nbytes)

    def size(self, fd: int) -> tuple[int, int]:
        """See FileOps. All of a file's length counts as allocated."""
        length, allocated = super().size(fd)
        return length, max(length, allocated)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """See FileOps."""
        with self._changing("ftruncate"):
            self._remember(fd, nbytes, os.fstat(fd).st_size)
            super().ftruncate(fd, nbytes)

    def unlink(self, path: str) -> None:
        """See FileOps."""
        with self._changing("unlink"):
            super().unlink(path)

    def sync_directory(self, path: str) -> None:
        """See FileOps. For other code's syncs too: names below `root` are durable from now on."""
        with self._changing("sync_directory"):
            if Path(path).is_relative_to(self.root):
                self._remember_names(Path(path))

    # -- for code that calls `os` itself ------------------------------------------------------------------------

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """As `os.write`."""
        with self._changing("write"):
            at = os.lseek(fd, 0, os.SEEK_CUR)
            self._remember(fd, at, at + len(data))
            return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        """As `os.fsync`: of a file."""
        self.fdatasync(fd)

    # -- the cut ------------------------------------------------------------------------------------------------

    def cut(self, target: Path, rng: Random, instead: Mapping[Path, bytes] | None = None) -> None:
        """Make the new directory `target` what a power cut now may leave of `root`. `instead`: content for some files,
        by their present paths, where the caller knows better (see `tear_lmdb`)."""
        with self.lock:
            inodes = {path.stat().st_ino: data for path, data in (instead or {}).items()}
            lost = rng.choice([0.0, 0.1, 0.5, 1.0])
            self.counters["cuts"] += 1
            self._copy_directory(self.root, target, rng, lost, inodes)

    def end(self) -> None:
        """Remove what was kept for cuts. Files may go on using it."""
        shutil.rmtree(self._links, ignore_errors=True)

    def _copy_directory(self, path: Path, target: Path, rng: Random, lost: float, inodes: Mapping[int, bytes]) -> None:
        target.mkdir(mode=0o700)
        now = {entry.name: entry.stat().st_ino for entry in os.scandir(path)}
        name, synced = self._names.get(path.stat().st_ino, (path.name, {}))
        chosen = synced if name == path.name and rng.random() < 0.5 else now
        self.counters["names_lost"] += chosen != now
        for entry, inode in chosen.items():
            present = path / entry
            if now.get(entry) == inode and present.is_dir():
                self._copy_directory(present, target / entry, rng, lost, inodes)
                continue
            source = present if now.get(entry) == inode else self._links / str(inode)
            if not source.exists():
                continue  # a directory that was removed, or moved
            if inode in inodes:
                (target / entry).write_bytes(inodes[inode])
            else:
                _copy_sparse(source, target / entry)
                self._take_from(target / entry, self._files.get(inode), rng, lost)

    def _take_from(self, path: Path, unsynced: _Unsynced | None, rng: Random, lost: float) -> None:
        """Let a copy of a file lose some of what was not synced."""
        if unsynced is None:
            return
        nbytes = path.stat().st_size
        is_cut_undone = unsynced.nbytes > nbytes and rng.random() < 0.5
        if is_cut_undone or (unsynced.nbytes < nbytes and rng.random() < 0.5):
            os.truncate(path, unsynced.nbytes)
            self.counters["lengths_lost"] += 1
        length = path.stat().st_size
        with path.open("r+b") as file:
            for sector, old in unsynced.sectors.items():
                begin = sector * SECTOR
                if begin < length and (rng.random() < lost or begin >= nbytes):
                    file.seek(begin)
                    file.write(old[: length - begin])
                    self.counters["sectors_lost"] += 1
                else:
                    self.counters["sectors_kept"] += 1

    # -- bookkeeping --------------------------------------------------------------------------------------------

    @contextmanager
    def _changing(self, operation: str) -> Iterator[None]:
        with self.lock:
            self.event(operation)
            yield
            self.event(operation)

    def event(self, name: str) -> None:
        """Call `watch`, if there is one. For other changes than those here; hold `lock`."""
        if self._watch is not None:
            self._watch(name)

    def _remember(self, fd: int, begin: int, end: int) -> None:
        """Keep the sectors that hold bytes `[begin, end)` of a tracked file, as they were at its last sync."""
        facts = os.fstat(fd)
        if not Path(f"/proc/self/fd/{fd}").readlink().name.startswith(self._tracked):
            return
        unsynced = self._files.setdefault(facts.st_ino, _Unsynced(facts.st_size))
        for sector in range(begin // SECTOR, -(-end // SECTOR)):
            if sector not in unsynced.sectors and sector * SECTOR < unsynced.nbytes:
                unsynced.sectors[sector] = os.pread(fd, SECTOR, sector * SECTOR).ljust(SECTOR, b"\0")

    def _remember_names(self, path: Path) -> None:
        names = {}
        for entry in os.scandir(path):
            names[entry.name] = inode = entry.stat().st_ino
            link = self._links / str(inode)
            if entry.is_file() and not link.exists():
                os.link(entry.path, link)
        self._names[path.stat().st_ino] = (path.name, names)


def tear_lmdb(before: bytes, after: bytes, rng: Random) -> bytes:
    """What LMDB's file may be after a power cut inside a transaction, from its content before and after that.

    LMDB writes fresh pages in any order, syncs, then writes one meta page (it fits a sector). So the file is the new
    one; or it has the old meta pages, and of the other changed pages some are new.
    """
    if rng.random() < 0.4:
        return after
    page = struct.unpack_from("=I", before, _LMDB_PAGE_AT)[0]
    old = before.ljust(len(after), b"\0")
    share = rng.choice([0.0, 0.5, 1.0])
    torn = bytearray(old)
    for begin in range(2 * page, len(after), page):
        if rng.random() < share:
            torn[begin : begin + page] = after[begin : begin + page]
    return bytes(torn)


def tear_unsynced(content: bytes, rng: Random, page: int = 4096) -> bytes:
    """What a new file may be after a power cut if nothing of it was ever synced: pages and its length kept or lost."""
    torn = bytearray(content[: rng.choice([0, len(content) // 2, len(content)])])
    share = rng.choice([0.0, 0.5, 1.0])
    for begin in range(0, len(torn), page):
        if rng.random() >= share:
            torn[begin : begin + page] = bytes(min(page, len(torn) - begin))
    return bytes(torn)


def _copy_sparse(source: Path, target: Path) -> None:
    """Copy a file without what was never written of it."""
    with source.open("rb") as old, target.open("wb") as new:
        nbytes = os.fstat(old.fileno()).st_size
        new.truncate(nbytes)
        at = 0
        while at < nbytes:
            try:
                begin = os.lseek(old.fileno(), at, os.SEEK_DATA)
            except OSError:  # only holes follow
                return
            at = os.lseek(old.fileno(), begin, os.SEEK_HOLE)
            os.pwrite(new.fileno(), os.pread(old.fileno(), at - begin, begin), begin)
