"""What the catalog's records look like, and the LMDB file that holds them.

- `rows`: record index (8 bytes, big-endian) -> 64 slots packed as `ROW`, then 8 bytes of xxh3_64 seeded with the index.
- `symbols`: record id (likewise) -> symbol count, symbol width, symbols, then 8 bytes of xxh3_64 seeded with the id.
- `manifest`: one JSON record, and the number of the next symbol record; 8 bytes of xxh3_64 first.

The seed makes a record under a wrong key, or one that moved, as bad as a damaged one. Record ids are never used twice.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import lmdb
import numpy as np
import xxhash
from numpy.typing import NDArray

from tiercache.directory import FORMAT_VERSION
from tiercache.errors import FormatVersionError
from tiercache.keys import root_ident
from tiercache.types import HINT, Hints, Slots

__all__ = [
    "DAMAGED",
    "DISK_FULL",
    "OTHER_FORMAT",
    "READY",
    "RECORD_SLOTS",
    "ROW",
    "UNABLE",
    "Change",
    "DamagedCatalogError",
    "Manifest",
    "RowStore",
    "RowTable",
    "check_record",
    "is_damage",
    "is_disk_full",
    "map_nbytes_for",
    "pack_rows",
    "pack_symbols",
    "read_hints",
    "symbols_per_record",
    "used_nbytes",
    "write_hints",
]

ROW: Final = np.dtype(
    [
        ("parent_slot", "<i4"),
        ("parent_ident", "<u8"),
        ("ident", "<u8"),
        ("checksum", "<u8"),
        ("last_use", "<f8"),
        ("uses", "<u4"),
        ("symbol_record", "<u8"),
        ("symbol_offset", "<u2"),
        ("priority", "<i1"),
        ("expires", "<u4"),
    ]
)
"""One slot. `symbol_record` 0: nothing is claimed here. `expires`: whole wall-clock seconds, 0: never."""
RECORD_SLOTS: Final = 64
DAMAGED: Final = 3
"""Exit status of `catalog_copy`, like the next two."""
DISK_FULL: Final = 4
OTHER_FORMAT: Final = 5
UNABLE: Final = 6
READY: Final = "ready"
"""The first line that `catalog_copy` prints: it could be loaded, what follows is about the file."""
_SYMBOL_NBYTES_MAX: Final = 4064
"""Of the symbols in a record: with its frame and LMDB's page header it just fits one page of 4 KiB."""
_CRC_NBYTES = 8
_LATEST: Final = 2.0**32
_SYMBOL_HEAD = struct.Struct("<II")
_KEY = struct.Struct(">Q")
_MANIFEST_KEY = b"manifest"
_NEXT_KEY = b"next-symbol-record"
_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_META_FLAG = 0x08
_ENGINE: dict[str, Any] = {"lib_version": 0} if hasattr(lmdb.Environment, "lib_version") else {}
"""LMDB's 0.9 file format, whatever a later py-lmdb prefers: `used_nbytes` reads its meta pages."""

_IN_THE_WAY = (lmdb.MemoryError, lmdb.DiskError, lmdb.LockError, lmdb.ReadonlyError)
"""LMDB errors that say nothing of a file's content; nor does a plain lmdb.Error, one of the operating system."""

RowTable = NDArray[np.void]
"""`[n]` of dtype ROW."""


class DamagedCatalogError(Exception):
    """The catalog cannot be read; never leaves the catalog modules."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the bytes in the slots are, and how the slots lie in the files."""

    layout: Mapping[str, Any]
    """`KVLayout.to_dict()`, opaque here."""
    block_nbytes: int
    namespace: str
    """Digest of the namespace in hex."""
    epoch: bytes
    block_tokens: int
    symbol_nbytes: int
    fingerprint: str = ""
    """The namespace as text, for people."""
    ident_namespace: str = ""
    """What idents are rooted in (hex), where not in the namespace: ranks of one engine share idents, not bytes."""
    store_id: str = ""
    """Filled in by the catalog, like the next two."""
    capacity: int = 0
    extents: tuple[int, ...] = ()
    """Slots per payload file."""

    @property
    def root_ident(self) -> int:
        """The ident above all first blocks."""
        return root_ident(bytes.fromhex(self.ident_namespace or self.namespace), self.epoch)

    def to_json(self) -> bytes:
        """As stored."""
        return json.dumps(
            {
                "format": FORMAT_VERSION,
                "layout": dict(self.layout),
                "block_nbytes": self.block_nbytes,
                "namespace": self.namespace,
                "epoch": self.epoch.hex(),
                "block_tokens": self.block_tokens,
                "symbol_nbytes": self.symbol_nbytes,
                "fingerprint": self.fingerprint,
                "ident_namespace": self.ident_namespace,
                "store_id": self.store_id,
                "capacity": self.capacity,
                "extents": list(self.extents),
            }
        ).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Manifest:
        """Inverse of `to_json`. FormatVersionError for another version's, DamagedCatalogError for nonsense."""
        try:
            values = json.loads(text)
            if values.pop("format") != FORMAT_VERSION:
                raise FormatVersionError(
                    "the catalog was written in a format that this version does not know: use the version that wrote "
                    "it, or another directory; nothing was changed"
                )
            values["epoch"] = bytes.fromhex(values["epoch"])
            values["extents"] = tuple(values["extents"])
            manifest = cls(**values)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise DamagedCatalogError(f"manifest: {e}") from e
        if sum(manifest.extents) != manifest.capacity or manifest.capacity < 1:
            raise DamagedCatalogError("manifest: the extents do not add up to the capacity")
        return manifest


@dataclass(slots=True)
class Change:
    """One transaction: what of the wanted state is written."""

    clear: bool = False
    """First drop every row and symbol."""
    rows: dict[int, bytes | None] = field(default_factory=dict)
    """Packed record, or None to delete it, per record index."""
    symbols: dict[int, bytes] = field(default_factory=dict)
    symbol_deletes: set[int] = field(default_factory=set)
    next_symbol: int = 1
    manifest: Manifest | None = None


class RowStore:
    """The catalog's LMDB file. No locking of its own: one caller at a time. Raises lmdb.Error and OSError.

    Only for files that are whole (see `catalog_open`): LMDB trusts what it maps. That the file is still there, and as
    long as LMDB will read, is looked at before each transaction of an open one (DamagedCatalogError): a page past its
    end would be a SIGBUS. What nobody can see beforehand is a page that the medium does not give back any more.
    """

    def __init__(
        self, path: Path, map_nbytes: int, *, readonly: bool = False, sync: bool = True, metasync: bool = True
    ) -> None:
        self.path = path
        self._used = self._transaction = 0
        """Bytes that LMDB may read, and the number of the last transaction."""
        self._env = lmdb.open(
            str(path),
            map_size=map_nbytes,
            subdir=False,
            readonly=readonly,
            create=not readonly,
            lock=False,
            max_dbs=3,
            mode=0o600,
            sync=sync,
            metasync=metasync,
            **_ENGINE,
        )
        try:
            if not readonly:
                path.chmod(0o600)
            self._rows, self._symbols, self._manifest = (
                self._env.open_db(name, create=not readonly) for name in (b"rows", b"symbols", b"manifest")
            )
            self._inode = path.stat().st_ino
            self._note_used()
        except BaseException:
            self._env.close()
            raise

    def apply(self, change: Change) -> None:
        """Write `change` in one transaction, synced on return."""
        self._check_file()
        with self._env.begin(write=True) as txn:
            if change.clear:
                txn.drop(self._rows, delete=False)
                txn.drop(self._symbols, delete=False)
            for record in change.symbol_deletes:
                txn.delete(_KEY.pack(record), db=self._symbols)
            _put_sorted(txn, self._symbols, change.symbols.items())
            _put_sorted(txn, self._rows, ((i, v) for i, v in change.rows.items() if v is not None))
            for index, value in change.rows.items():
                if value is None:
                    txn.delete(_KEY.pack(index), db=self._rows)
            if change.manifest is not None:
                txn.put(_MANIFEST_KEY, _framed(change.manifest.to_json()), db=self._manifest)
            txn.put(_NEXT_KEY, _framed(_KEY.pack(change.next_symbol)), db=self._manifest)
        self._note_used()

    def read_manifest(self) -> tuple[Manifest, int]:
        """The manifest, and the number of the next symbol record. DamagedCatalogError, FormatVersionError."""
        with self._env.begin() as txn:
            text = _unframed(txn.get(_MANIFEST_KEY, db=self._manifest))
            following = _unframed(txn.get(_NEXT_KEY, db=self._manifest))
        if text is None or following is None or len(following) != _KEY.size:
            raise DamagedCatalogError("the manifest is missing or damaged")
        return Manifest.from_json(text), int(_KEY.unpack(following)[0])

    def records(self, name: str) -> Iterable[tuple[int, bytes]]:
        """All records of `rows` or `symbols` in order, unchecked."""
        with self._env.begin() as txn, txn.cursor(self._rows if name == "rows" else self._symbols) as cursor:
            for key, value in cursor:
                if len(key) == _KEY.size:
                    yield _KEY.unpack(key)[0], value

    def count(self, name: str) -> int:
        """How many records of `rows` or `symbols` there should be, by what LMDB says of the tree."""
        with self._env.begin() as txn:
            entries: int = txn.stat(self._rows if name == "rows" else self._symbols)["entries"]
            return entries

    def symbols(self, records: Iterable[int]) -> dict[int, bytes]:
        """The symbol records with these ids that are there, unchecked."""
        self._check_file()
        found = {}
        with self._env.begin() as txn:
            for record in records:
                value = txn.get(_KEY.pack(record), db=self._symbols)
                if value is not None:
                    found[record] = value
        return found

    def grow(self) -> int:
        """Let the file become twice as large (no transaction may be open); its new limit in bytes."""
        nbytes: int = 2 * self._env.info()["map_size"]
        self._env.set_mapsize(nbytes)
        return nbytes

    def sync(self) -> None:
        """Flush the file, for stores opened without `sync`."""
        self._env.sync(True)

    def close(self) -> None:
        """Unmap and close the file."""
        self._env.close()

    def _note_used(self) -> None:
        facts = self._env.info()
        self._used, self._transaction = (facts["last_pgno"] + 1) * self._env.stat()["psize"], facts["last_txnid"]

    def _check_file(self) -> None:
        try:
            facts = self.path.stat()
        except (FileNotFoundError, NotADirectoryError) as e:
            raise DamagedCatalogError(f"the file is gone ({e})") from e
        if facts.st_size < self._used:
            raise DamagedCatalogError(f"the file has {facts.st_size} bytes, and {self._used} are in use")
        if facts.st_ino != self._inode:  # which some network file systems change by themselves: then look into it
            if _newest(self.path) != (self._used, self._transaction):
                raise DamagedCatalogError("the file was replaced by another one")
            self._inode = facts.st_ino


def _put_sorted(txn: lmdb.Transaction, db: Any, items: Iterable[tuple[int, bytes]]) -> None:
    with txn.cursor(db) as cursor:
        cursor.putmulti([(_KEY.pack(key), value) for key, value in sorted(items)])


def write_hints(rows: RowTable, where: Slots | slice, hints: Hints) -> None:
    """Put hints into these rows. An end in time is rounded down: never later than it was asked for."""
    rows["priority"][where] = hints["priority"]
    ends = np.clip(hints["expires"], 1, _LATEST)
    rows["expires"][where] = np.where(ends < _LATEST, ends, 0).astype(np.uint32)


def read_hints(rows: RowTable) -> Hints | None:
    """What `write_hints` put there; None where nothing was said of any."""
    if not (rows["priority"].any() or rows["expires"].any()):
        return None
    hints = np.empty(len(rows), dtype=HINT)
    hints["priority"] = rows["priority"]
    hints["expires"] = np.where(rows["expires"] > 0, rows["expires"], np.inf)
    return hints


def pack_rows(index: int, rows: RowTable) -> bytes:
    """A record of `rows` (at most RECORD_SLOTS of them)."""
    body = rows.tobytes().ljust(RECORD_SLOTS * ROW.itemsize, b"\0")
    return body + xxhash.xxh3_64_digest(body, index)


def pack_symbols(record: int, symbols: bytes, width: int) -> bytes:
    """A record of `symbols`."""
    body = _SYMBOL_HEAD.pack(len(symbols) // width, width) + symbols
    return body + xxhash.xxh3_64_digest(body, record)


def check_record(name: str, key: int, value: bytes) -> bool:
    """True where a record of `rows` or `symbols` is whole, and under its own key."""
    body = memoryview(value)[:-_CRC_NBYTES]
    if name == "rows":
        if len(body) != RECORD_SLOTS * ROW.itemsize:
            return False
    else:
        if len(body) < _SYMBOL_HEAD.size:
            return False
        count, width = _SYMBOL_HEAD.unpack_from(body)
        if len(body) != _SYMBOL_HEAD.size + count * width:
            return False
    return xxhash.xxh3_64_digest(body, key) == value[-_CRC_NBYTES:]


def symbols_per_record(width: int) -> int:
    """How many symbols of `width` bytes a record holds at most: 4 KiB of them, or one."""
    return max(1, (_SYMBOL_NBYTES_MAX - _SYMBOL_HEAD.size - _CRC_NBYTES) // width)


def map_nbytes_for(capacity: int, symbol_nbytes: int) -> int:
    """Bytes to reserve for a catalog of `capacity` slots, every page of it possibly rewritten in one transaction."""
    rows = -(-capacity // RECORD_SLOTS) * 4096
    symbols = capacity * (symbol_nbytes + 48)
    return -(-((rows + symbols) * 5 // 2 + (16 << 20)) // 65536) * 65536


def used_nbytes(path: Path) -> int:
    """Length of the part of an LMDB file that its newest meta page refers to; reads 2 pages, maps nothing.

    DamagedCatalogError where the file is no LMDB file, or shorter than that (LMDB would die of SIGBUS). OSError.
    """
    return _newest(path)[0]


def _newest(path: Path) -> tuple[int, int]:
    """As `used_nbytes`, and the number of the transaction that wrote the newest meta page."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise DamagedCatalogError("not a plain file")
        size = os.fstat(fd).st_size
        head = os.pread(fd, 152, 0)
        page = _meta(head)[0]
        metas = [_meta(head), _meta(os.pread(fd, 152, page))]
    finally:
        os.close(fd)
    if any(meta[0] != page for meta in metas):
        raise DamagedCatalogError("the meta pages differ in page size")
    _, last, transaction = max(metas, key=lambda meta: meta[2])
    if size < (last + 1) * page:
        raise DamagedCatalogError(f"the file has {size} bytes, its meta page speaks of {(last + 1) * page}")
    return (last + 1) * page, transaction


def _meta(raw: bytes) -> tuple[int, int, int]:
    """Page size, last page, transaction of one meta page."""
    if len(raw) < 152:
        raise DamagedCatalogError("the file is shorter than its meta pages")
    flags = struct.unpack_from("=H", raw, 10)[0]
    magic, version = struct.unpack_from("=II", raw, 16)
    page = struct.unpack_from("=I", raw, 40)[0]
    last, transaction = struct.unpack_from("=QQ", raw, 136)
    if magic != _MAGIC or version != _DATA_VERSION or not flags & _META_FLAG:
        raise DamagedCatalogError("not an LMDB meta page")
    if page not in (1 << shift for shift in range(9, 17)) or not 1 <= last < 1 << 40:
        raise DamagedCatalogError("nonsense in an LMDB meta page")
    return page, last, transaction


def _framed(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body) + body


def _unframed(value: bytes | None) -> bytes | None:
    if value is None or xxhash.xxh3_64_digest(value[_CRC_NBYTES:]) != value[:_CRC_NBYTES]:
        return None
    return bytes(value[_CRC_NBYTES:])


def is_damage(error: Exception) -> bool:
    """True for an error that speaks of the catalog's content; False where memory, descriptors, rights or the disk were
    in the way, which says nothing of it."""
    if isinstance(error, DamagedCatalogError):
        return True
    return isinstance(error, lmdb.Error) and type(error) is not lmdb.Error and not isinstance(error, _IN_THE_WAY)


def is_disk_full(error: Exception) -> bool:
    """True for an LMDB or operating system error that says so."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, lmdb.MapFullError) or os.strerror(errno.ENOSPC) in str(error)
