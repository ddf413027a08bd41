"""Copy a catalog record by record, in a process of its own: `python -m tiercache.catalog_copy SRC DST SECONDS`.

After an unclean stop nobody knows what LMDB would do with the file: it may die of a signal, or never come back. Here it
may. Only records that are whole, under their own key, reach the copy, whose B-trees are new. The first line it prints
says that it could be loaded. Exit status 0: one more line, of JSON, says how many records were kept and dropped. 3:
unreadable. 4: no space for the copy. 5: another format version. 6: something else was in the way (memory, rights, ...).
"""

from __future__ import annotations

import json
import signal
import sys
from itertools import islice
from pathlib import Path

import lmdb

from tiercache.catalog_rows import (
    DAMAGED,
    DISK_FULL,
    OTHER_FORMAT,
    READY,
    UNABLE,
    Change,
    DamagedCatalogError,
    RowStore,
    check_record,
    is_damage,
    is_disk_full,
    used_nbytes,
)
from tiercache.errors import FormatVersionError

__all__ = ["copy", "main"]

_BATCH = 4096
"""Records per transaction."""


def copy(source: Path, target: Path) -> dict[str, int]:
    """Copy the whole records of `source` to a new file `target`, durable on return; counts of kept and dropped ones.

    DamagedCatalogError, FormatVersionError, lmdb.Error, OSError.
    """
    used = used_nbytes(source)
    old = RowStore(source, used, readonly=True)
    new = RowStore(target, 3 * used + (16 << 20), sync=False)
    counts = {"kept": 0, "bad": 0}
    try:
        manifest, next_symbol = old.read_manifest()
        new.apply(Change(manifest=manifest, next_symbol=next_symbol))
        for name in ("rows", "symbols"):
            records, missing = iter(old.records(name)), old.count(name)
            while batch := list(islice(records, _BATCH)):
                whole = {key: value for key, value in batch if check_record(name, key, value)}
                counts["kept"] += len(whole)
                counts["bad"] += len(batch) - len(whole)
                missing -= len(batch)
                change = Change(next_symbol=next_symbol)
                if name == "rows":
                    change.rows.update(whole)
                else:
                    change.symbols.update(whole)
                new.apply(change)
            counts["bad"] += max(0, missing)  # where a page of the tree lost its records, none of them was seen
        new.sync()
    finally:
        old.close()
        new.close()
    return counts


def main(arguments: list[str]) -> int:
    """Run `copy` with a time limit that holds although the starter is gone."""
    source, target, seconds = arguments
    print(READY, flush=True)
    signal.setitimer(signal.ITIMER_REAL, float(seconds))
    try:
        counts = copy(Path(source), Path(target))
    except FormatVersionError:
        return OTHER_FORMAT
    except (DamagedCatalogError, lmdb.Error, OSError, MemoryError) as e:
        print(e or "no memory", file=sys.stderr)
        return DISK_FULL if is_disk_full(e) else DAMAGED if is_damage(e) else UNABLE
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
