"""A store directory with its catalog and payload files, as the catalog's tests use them."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tiercache.catalog import Catalog, Manifest
from tiercache.checksum import checksums
from tiercache.directory import StoreDirectory
from tiercache.keys import chain_idents, root_ident, symbol_nbytes
from tiercache.tiers.fileio import OS_FILES, FileOps
from tiercache.tiers.nvme import NVMeTier
from tiercache.types import ROOT, Bools, Claims, Idents, Slots

WIDTH = symbol_nbytes(16)
NAMESPACE = bytes(range(16))
EPOCH = b"epoch-1"
BLOCK = 5000
"""Odd on purpose: no multiple of a page."""


def manifest(**changes: object) -> Manifest:
    plain = Manifest(
        layout={"block_shape": [BLOCK], "dtype": "uint8"},
        block_nbytes=BLOCK,
        namespace=NAMESPACE.hex(),
        epoch=EPOCH,
        block_tokens=16,
        symbol_nbytes=WIDTH,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


def slots(*numbers: int) -> Slots:
    return np.array(numbers, dtype=np.int32)


def symbols_of(tag: int, n: int) -> bytes:
    """n symbols that no other tag has."""
    return np.random.default_rng(tag).integers(0, 2**31, n * WIDTH // 4, dtype=np.int32).tobytes()


def payload_of(idents: Idents) -> np.ndarray:
    """The only right bytes of blocks with these idents."""
    return np.stack([np.random.default_rng(int(i)).integers(0, 256, BLOCK, dtype=np.uint8) for i in idents])


class Rig:
    """Opened by the constructor; `path` may be a copy of another rig's, as if that one had been killed."""

    def __init__(
        self,
        path: Path,
        capacity: int = 8,
        wanted: Manifest | None = None,
        durability: str = "power",
        ops: FileOps = OS_FILES,
        **options: object,
    ) -> None:
        self.path = path
        self.directory = StoreDirectory.open(path, wait_s=0.0)
        wanted = wanted or manifest()
        self.root = root_ident(bytes.fromhex(wanted.namespace), wanted.epoch)
        try:
            self.catalog = Catalog.open(
                self.directory,
                wanted,
                capacity,
                durability=durability,  # type: ignore[arg-type]
                root_ident=self.root,
                ops=ops,
                **options,  # type: ignore[arg-type]
            )
            self.tier = NVMeTier(path, wanted.block_nbytes, capacity, extents=self.catalog.manifest.extents, ops=ops)
        except BaseException:
            self.directory.close()
            raise

    def begin(self, where: Slots | Sequence[int], parent: int = ROOT, parent_ident: int | None = None, tag: int = 1):
        """A chain of blocks for the slots `where`, under a parent slot; idents and claims, nothing written."""
        where = np.asarray(where, dtype=np.int32)
        if parent_ident is None:
            parent_ident = self.root if parent == ROOT else int(self.catalog.expected(slots(parent))[0][0])
        symbols = symbols_of(tag, len(where))
        idents = chain_idents(symbols, WIDTH, parent_ident)
        parents = np.concatenate(([parent], where[:-1])).astype(np.int32)
        above = np.concatenate((np.array([parent_ident], dtype=np.uint64), idents[:-1]))
        times = np.full(len(where), 1000.0 + tag)
        return idents, Claims(parents, above, symbols, times, np.ones(len(where), dtype=np.uint32))

    def write(self, where: Sequence[int], parent: int = ROOT, parent_ident: int | None = None, tag: int = 1) -> Idents:
        """A whole job: starting, payload, written. Returns the idents."""
        place = slots(*where)
        idents, claims = self.begin(place, parent, parent_ident, tag)
        self.catalog.starting(place)
        rows = payload_of(idents)
        assert self.tier.write(place, rows).all()
        self.catalog.written(place, idents, checksums(rows, BLOCK, idents), claims)
        return idents

    def commit(self) -> list[int]:
        return sorted(self.catalog.commit(self.tier.sync).tolist())

    def close(self, clean: bool = True) -> None:
        self.catalog.close(clean)
        self.tier.close()
        self.directory.close()

    def crash_copy(self, target: Path) -> Path:
        """What a crash at this moment leaves, elsewhere."""
        shutil.copytree(self.path, target)
        return target

    def readable(self) -> Bools:
        """Per recovered block: its payload has the catalog's checksum; asserts that it then is the right payload."""
        return right_bytes(self.catalog, self.tier, self.catalog.recovered.slots, self.catalog.recovered.idents)

    def recovered(self) -> dict[int, int]:
        """Slot -> ident of what was recovered, after checking that it is a tree with the right symbols."""
        found = self.catalog.recovered
        names = [found.symbols[i * WIDTH : (i + 1) * WIDTH] for i in range(len(found.slots))]
        for i, parent in enumerate(found.parents.tolist()):
            assert parent < i
            above = self.root if parent == ROOT else int(found.idents[parent])
            assert int(chain_idents(names[i], WIDTH, above)[0]) == int(found.idents[i])
        return dict(zip(found.slots.tolist(), found.idents.tolist(), strict=True))


def right_bytes(catalog: Catalog, tier: NVMeTier, where: Slots, idents: Idents) -> Bools:
    rows = np.zeros((len(where), tier.block_nbytes), dtype=np.uint8)
    ok = tier.read(where, rows)
    known, sums = catalog.expected(where)
    assert (known == idents).all()
    ok &= checksums(rows, tier.block_nbytes, idents) == sums
    if ok.any():
        assert np.array_equal(rows[ok], payload_of(idents[ok]))
    return ok
