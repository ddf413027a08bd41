"""A cache's directory filled from below: payload and claims written side by side, without planner and mover.

So that a million blocks take seconds, and that blocks can lie in any slots: a load then finds them scattered, as after
a long life, and not in the order in which they were stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.fill import BLOCK_TOKENS, Ids, random_ids
from bench.payload import Payload
from tiercache import DRAM, KVLayout, Namespace, NVMe, TieredKVCache
from tiercache.catalog import Catalog, Manifest
from tiercache.checksum import checksums
from tiercache.directory import StoreDirectory
from tiercache.keys import chain_idents, root_ident, symbol_nbytes
from tiercache.tiers.fileio import aligned_rows
from tiercache.tiers.nvme import NVMeTier
from tiercache.types import ROOT, Claims, Idents, Slots

__all__ = ["Tree", "build", "open_store"]

EPOCH = b"bench"
NAMESPACE = Namespace("bench")
_WIDTH = symbol_nbytes(BLOCK_TOKENS)
_CLAIMED_AT_A_TIME = 1 << 16
_WRITTEN_AT_A_TIME = 64 << 20


@dataclass
class Tree:
    """Runs of equal length; each has `fanout` runs below it, as far as there are any."""

    runs: int
    run_blocks: int
    fanout: int = 4

    @property
    def blocks(self) -> int:
        """In all."""
        return self.runs * self.run_blocks

    @cached_property
    def ids(self) -> Ids:
        """Token ids of all runs, `int32[runs, run_blocks * 16]`."""
        rng = np.random.default_rng(self.runs)
        return random_ids(rng, self.blocks).reshape(self.runs, -1)

    def parent(self, run: int) -> int:
        """The run above; -1: none."""
        return (run - 1) // self.fanout if run else -1

    def path(self, run: int) -> list[int]:
        """The runs from the root to this one."""
        found = []
        while run >= 0:
            found.append(run)
            run = self.parent(run)
        return found[::-1]

    def prompt(self, run: int) -> Ids:
        """The tokens from the root to the end of a run."""
        return self.ids[self.path(run)].reshape(-1)

    def blocks_of(self, run: int) -> NDArray[np.int64]:
        """The same as indices of blocks."""
        return (np.array(self.path(run))[:, None] * self.run_blocks + np.arange(self.run_blocks)).reshape(-1)


def build(path: Path, tree: Tree, payload: Payload, slots: Slots, written: NDArray[np.int64] | None = None) -> None:
    """Fill a new directory with the blocks of a tree, claimed and durable, closed in order.

    slots: one per block, run by run; they are the whole capacity. written: the blocks whose bytes are there (None:
    all); the others are only claimed, and would be found wrong by a load.
    """
    layout = layout_of(payload)
    idents, parents = _idents(tree), _parent_slots(tree, slots)
    above = _parent_idents(tree, idents)
    symbols = tree.ids.tobytes()
    directory = StoreDirectory.open(path)
    try:
        manifest = Manifest(
            layout.to_dict(), layout.block_nbytes, NAMESPACE.digest.hex(), EPOCH, BLOCK_TOKENS, _WIDTH, str(NAMESPACE)
        )
        root = root_ident(NAMESPACE.digest, EPOCH)
        catalog = Catalog.open(directory, manifest, tree.blocks, root_ident=root)
        tier = NVMeTier(path, layout.block_nbytes, tree.blocks, extents=catalog.manifest.extents)
        sums = _write(tier, slots, idents, payload, np.arange(tree.blocks) if written is None else written)
        for begin in range(0, tree.blocks, _CLAIMED_AT_A_TIME):
            part = slice(begin, begin + _CLAIMED_AT_A_TIME)
            n = len(slots[part])
            catalog.starting(slots[part])
            claims = Claims(
                parents[part],
                above[part],
                symbols[begin * _WIDTH : (begin + n) * _WIDTH],
                np.full(n, 1000.0) + np.arange(begin, begin + n) // tree.run_blocks,
                np.ones(n, dtype=np.uint32),
            )
            catalog.written(slots[part], idents[part], sums[part], claims)
            assert len(catalog.commit(tier.sync)) == 0 and catalog.healthy, catalog.last_error
        assert catalog.close(clean=True) and catalog.claimed_slots == tree.blocks
        tier.close()
    finally:
        directory.close()


def layout_of(payload: Payload) -> KVLayout:
    """Of its blocks."""
    return KVLayout((payload.block_nbytes,), "uint8")


def open_store(path: Path, blocks: int, payload: Payload, dram_nbytes: int, **options: Any) -> TieredKVCache:
    """A cache over a directory with room for so many blocks. Nothing is written but by a flush, promotion copies."""
    layout = layout_of(payload)
    tiers = [DRAM(dram_nbytes), NVMe(path, blocks * layout.stride, write_after_s=None, **options)]
    return TieredKVCache(tiers, layout=layout, namespace=NAMESPACE, epoch=EPOCH, exclusive=False)


def _idents(tree: Tree) -> Idents:
    """Of all blocks, run by run."""
    ids, root = tree.ids, root_ident(NAMESPACE.digest, EPOCH)
    last: list[int] = []
    parts = []
    for run in range(tree.runs):
        above = tree.parent(run)
        part = chain_idents(ids[run].tobytes(), _WIDTH, root if above < 0 else last[above])
        last.append(int(part[-1]))
        parts.append(part)
    return np.concatenate(parts)


def _firsts(tree: Tree) -> np.ndarray:
    """Index of the block above each run's first one; -1 above the root."""
    above = np.array([tree.parent(run) for run in range(tree.runs)], dtype=np.int64)
    return np.where(above < 0, -1, (above + 1) * tree.run_blocks - 1)


def _parent_slots(tree: Tree, slots: Slots) -> Slots:
    parents = np.concatenate(([ROOT], slots[:-1])).astype(np.int32)
    firsts = _firsts(tree)
    parents[:: tree.run_blocks] = np.where(firsts < 0, ROOT, slots[firsts])
    return parents


def _parent_idents(tree: Tree, idents: Idents) -> Idents:
    above = np.concatenate((idents[:1], idents[:-1]))
    firsts = _firsts(tree)
    above[:: tree.run_blocks] = np.where(firsts < 0, np.uint64(root_ident(NAMESPACE.digest, EPOCH)), idents[firsts])
    return above


def _write(tier: NVMeTier, slots: Slots, idents: Idents, payload: Payload, written: NDArray[np.int64]) -> Idents:
    """Write the bytes of these blocks; the checksums of all blocks, 0 where nothing was written."""
    sums = np.zeros(len(slots), dtype=np.uint64)
    step = max(1, _WRITTEN_AT_A_TIME // tier.stride)
    rows = aligned_rows(step, tier.stride)
    for begin in range(0, len(written), step):
        blocks = written[begin : begin + step]
        part = rows[: len(blocks), : tier.block_nbytes]
        for row, block in zip(part, blocks.tolist(), strict=True):
            payload.fill(row[None], 0, block)
        assert tier.write(slots[blocks], rows[: len(blocks)]).all()
        sums[blocks] = checksums(part, tier.block_nbytes, idents[blocks])
    return sums
