"""Check a store directory that no cache uses: the catalog, and with `scrub` every payload."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from numpy.typing import NDArray

from tiercache.catalog import Catalog
from tiercache.catalog_check import checked_copy, make_sound, unreadable
from tiercache.catalog_open import Loaded, load
from tiercache.catalog_rows import DamagedCatalogError, RowStore, is_damage, used_nbytes
from tiercache.checksum import checksums
from tiercache.directory import StoreDirectory
from tiercache.errors import TierCacheError
from tiercache.tiers.fileio import aligned_rows
from tiercache.tiers.nvme import NVMeTier
from tiercache.types import ROOT, Bools, Slots

__all__ = ["DirectoryReport", "check_directory"]

Progress = Callable[[int, int, str], None]
"""Called with blocks done, blocks in all, and a note."""

_READ_NBYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """What a check found. Counts are blocks, unless they say otherwise."""

    path: str
    rows: int = 0
    """In the catalog, in whole records."""
    reachable: int = 0
    """Joined to a root by parents of the right idents."""
    unreachable: int = 0
    bad_records: int = 0
    """Catalog records that were damaged; each holds up to 64 rows, or the symbols of as many."""
    payload_checked: int = 0
    payload_bad: int = 0
    """Unreadable, or with another checksum than the catalog's."""
    fixed: int = 0
    """Rows that were forgotten, to leave only what is whole."""
    bytes: int = 0
    """Allocated on disk for the whole directory."""
    cold_reason: str = ""
    """Why a cache would start cold here ("" where it would not): "new", "store", "epoch", "corrupt"."""
    problems: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """True where nothing was wrong."""
        return not self.problems

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**dataclasses.asdict(self), "problems": list(self.problems), "clean": self.clean}

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {'clean' if self.clean else 'damaged'}",
            f"  {self.reachable} blocks, {self.bytes} bytes on disk",
        ]
        if self.payload_checked:
            lines.append(f"  {self.payload_checked} payloads read, {self.payload_bad} bad")
        lines += [f"  {problem}" for problem in self.problems]
        if self.fixed:
            lines.append(f"  fixed: {self.fixed} blocks forgotten")
        return "\n".join(lines)


@dataclass(slots=True, eq=False)
class _Finding:
    """What is known of a catalog so far."""

    loaded: Loaded | None
    bad_records: int
    cold_reason: str
    problems: list[str]
    bad: NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, dtype=np.bool_))
    """Per block of the tree: its payload is bad."""
    checked: int = 0


def check_directory(
    path: str | Path, fix: bool = False, scrub: bool = False, progress: Progress | None = None, wait_s: float = 3.0
) -> DirectoryReport:
    """Look at the store in `path`, whose lock is held meanwhile.

    Without `fix` nothing is changed (but the pid in the lock file): a copy of the catalog is read. With `scrub` every
    payload is read and compared with its checksum. With `fix` rows that are not whole are forgotten with all that hangs
    on them, and a catalog that cannot be read is set aside. The report says what was found, also where it was fixed.

    DirectoryInUseError, FormatVersionError, ConfigError (no store there, no space for the copy,
    or something in the way that says nothing of the catalog).
    """
    with StoreDirectory.open(path, wait_s=wait_s, create=False) as directory:
        # Beside the catalog, under a name that the next start removes: it holds token ids, and a kill leaves it there.
        with tempfile.TemporaryDirectory(prefix="catalog.new-", dir=directory.path) as scratch:
            finding = _read_catalog(directory, Path(scratch) / "data.mdb")
        loaded = finding.loaded
        report = DirectoryReport(
            path=str(directory.path),
            bad_records=finding.bad_records,
            bytes=sum(file.lstat().st_blocks * 512 for file in directory.path.rglob("*")),
        )
        if loaded is not None:
            reachable = len(loaded.tree.slots)
            if scrub:
                _read_payload(directory, loaded, finding, progress)
            report = replace(
                report,
                rows=reachable + loaded.forgotten,
                reachable=reachable,
                unreachable=loaded.forgotten,
                payload_checked=finding.checked,
                payload_bad=int(np.count_nonzero(finding.bad)),
            )
        fixed = _fix(directory, finding) if fix else 0
    return replace(report, fixed=fixed, cold_reason=finding.cold_reason, problems=tuple(finding.problems))


def _read_catalog(directory: StoreDirectory, copy: Path) -> _Finding:
    """Copy what is whole of the catalog, and read the copy."""
    path = directory.catalog_path
    if not path.exists():
        return _Finding(None, 0, "new", [])
    try:
        used_nbytes(path)
        bad = checked_copy(path, copy)["bad"]
        store = RowStore(copy, used_nbytes(copy), readonly=True)
        try:
            manifest, next_symbol = store.read_manifest()
            root = manifest.root_ident
            loaded = load(store, manifest, next_symbol, root)
        finally:
            store.close()
    except (DamagedCatalogError, lmdb.Error, OSError, ValueError) as e:
        if isinstance(e, TierCacheError):
            raise
        if isinstance(e, (lmdb.Error, OSError)) and not is_damage(e):
            raise unreadable(directory, e) from e
        return _Finding(None, 0, "corrupt", [f"the catalog cannot be read: {e}"])
    problems = []
    if bad:
        problems.append(f"{bad} damaged records in the catalog")
    if loaded.forgotten:
        problems.append(f"{loaded.forgotten} blocks are not reachable from a root")
    reason = ""
    if manifest.store_id != directory.store_id:
        reason = "store"
        problems.append("the catalog belongs to another store")
    elif manifest.epoch != directory.read_epoch():
        reason = "epoch"
        problems.append("the catalog and the epoch file disagree")
    return _Finding(loaded, bad, reason, problems)


def _read_payload(directory: StoreDirectory, loaded: Loaded, finding: _Finding, progress: Progress | None) -> None:
    """Read every payload of the tree, in the order of the slots, and compare checksums."""
    manifest, n = loaded.manifest, len(loaded.tree.slots)
    bad = np.zeros(n, dtype=np.bool_)
    tier = NVMeTier(directory.path, manifest.block_nbytes, manifest.capacity, extents=manifest.extents, files="read")
    try:
        order = np.argsort(loaded.tree.slots)
        step = max(1, _READ_NBYTES // tier.stride)
        rows = aligned_rows(min(step, max(1, n)), tier.stride)
        for begin in range(0, n, step):
            part = order[begin : begin + step]
            slots = loaded.tree.slots[part]
            expected = loaded.rows[slots]
            buffer = rows[: len(part)]
            ok = tier.read(slots, buffer)
            ok &= checksums(buffer, manifest.block_nbytes, expected["ident"]) == expected["checksum"]
            bad[part] = ~ok
            if progress is not None:
                progress(begin + len(part), n, f"{int(np.count_nonzero(bad))} bad")
    finally:
        tier.close()
    finding.bad, finding.checked = bad, n
    if bad.any():
        finding.problems.append(f"{int(np.count_nonzero(bad))} payloads are not what the catalog says")


def _fix(directory: StoreDirectory, finding: _Finding) -> int:
    """Forget what is not whole; how many rows."""
    loaded = finding.loaded
    if not finding.problems or finding.cold_reason in ("store", "epoch"):
        return 0  # nothing to do, or the next cache makes a new catalog anyway
    if loaded is None:
        make_sound(directory)
        return 0
    manifest = loaded.manifest
    root = manifest.root_ident
    catalog = Catalog.open(directory, manifest, manifest.capacity, root_ident=root)
    gone = _with_descendants(finding.bad, loaded.tree.parents) if finding.checked else np.empty(0, dtype=np.bool_)
    lost: Slots = loaded.tree.slots[gone] if finding.checked else np.empty(0, dtype=np.int32)
    catalog.forget(lost)
    catalog.commit(lambda: True)
    catalog.close()
    return loaded.forgotten + len(lost)


def _with_descendants(bad: Bools, parents: NDArray[np.int64]) -> Bools:
    """`bad`, and all that hangs on it; parents come before their children."""
    gone: list[bool] = bad.tolist()
    for i, parent in enumerate(parents.tolist()):
        if parent != ROOT and gone[parent]:
            gone[i] = True
    return np.array(gone, dtype=np.bool_)
