"""Uses: what requests used and when, on the tree, for the policy, and for a level that outlives the process."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from tiercache.index import Node, Path
from tiercache.planner.state import PlannerState
from tiercache.types import NoteUse

__all__ = ["Uses"]

_Stretches = list[tuple[Node, int, int]]
_MOST_SERVED = 1024
"""Requests that found something and may yet store the rest."""


class Uses:
    """Notes uses of paths, at `state.now`. One request is one use, also where it loads first and stores later."""

    def __init__(self, state: PlannerState) -> None:
        self.state = state
        self._served: OrderedDict[int, int] = OrderedDict()
        """Requests that found the path down to the block of this ident, and store more below it: how many of them."""

    def clear(self) -> None:
        """The tree is empty again."""
        self._served.clear()

    def note(self, path: Path, new: int, known: int | None = None) -> None:
        """A request used this path, and brings `new` more blocks. known: blocks of it that were in the tree before it
        (None: all)."""
        if not path:
            return
        self._begin(new)
        stretches = [(node, 0, take) for node, take in path]
        if known is None:
            self.state.policy.again(stretches)
        else:
            old, fresh = _parted(path, known)
            self.state.policy.place(fresh)
            self.state.policy.again(old)
        self._use(stretches)
        self.tell(path)
        if new:
            node, take = path.end
            ident = node.idents.item(take - 1)
            self._served[ident] = self._served.get(ident, 0) + 1
            self._served.move_to_end(ident)
            if len(self._served) > _MOST_SERVED:
                self._served.popitem(last=False)

    def note_stored(self, path: Path, known: int, start: int) -> bool:
        """A request stored the blocks of this path from `start` on; the first `known` were in the tree before. True
        where it is the rest of a request that used them already.

        Where a request used the path down to `start` before, this is the rest of it: what was known is not used once
        more, only later than it seemed.
        """
        policy = self.state.policy
        goes_on = self._goes_on(path, start) or (start < known and self._goes_on(path, known))
        self._begin(max(0, path.blocks - known), goes_on)
        old, new = _parted(path, known)
        policy.place(new)
        if goes_on:
            policy.move(old)
            for node, begin, end in old:
                node.last_use[begin:end] = self.state.now
                self.state.residency.stale[node] = None
        else:
            policy.again(old)
            self._use(old)
        self._use(new)
        self.tell(path)
        return goes_on

    def release(self, path: Path) -> int:
        """The conversation that ends with this path is over: what only it uses goes to the cold end, with the partial
        tails of its turns. Returns blocks moved.

        Of several tails at its end, or one that was used after it went on, it cannot be told whose they are: then what
        is above them stays.
        """
        moved, below, went_on = 0, None, np.inf
        for node, take in reversed(list(path)):
            tails = [child for child in node.children.values() if child is not below]
            if node.n - take > node.partial or not all(child.partial and child.n == 1 for child in tails):
                break
            if below is None and len(tails) + node.n - take > 1:
                break
            if any(tail.last_use.item(0) > went_on for tail in tails):
                break
            went_on = node.last_use.item(0)
            for each in (node, *tails):
                each.last_use[: each.n] = -np.inf
                self.state.residency.stale[each] = None
                moved += each.n
            below = node
        return moved

    def _begin(self, new: int, goes_on: bool = False) -> None:
        self.state.policy.begin(self.state.now, new, self.state.residency.tables[0].taken, goes_on)

    def _use(self, stretches: list[tuple[Node, int, int]]) -> None:
        """These blocks are used once more, now."""
        now, stale = self.state.now, self.state.residency.stale
        self.state.policy.mark(stretches)
        for node, begin, end in stretches:
            node.last_use[begin:end] = now
            node.uses[begin:end] += 1
            stale[node] = None

    def _goes_on(self, path: Path, start: int) -> bool:
        """Is this the store of a request that was noted down to `start`? Each is asked for once."""
        above = path.shorten(start)
        if not 0 < start == above.blocks:
            return False
        node, take = above.end
        ident = node.idents.item(take - 1)
        count = self._served.pop(ident, 0)
        if count > 1:
            self._served[ident] = count - 1
        return count > 0

    def tell(self, path: Path) -> None:
        """Tell the level that outlives the process when and how often these blocks were used, and what was said."""
        state, residency = self.state, self.state.residency
        for level, spec in enumerate(state.specs):
            if not spec.persistent:
                continue
            slots = residency.index.gather(path)[level]
            there = slots >= 0
            if there.any():
                hints = path.hints()
                said, used = None if hints is None else hints[there], np.maximum(path.last_use()[there], 0.0)
                state.outbox.append(NoteUse(slots[there].astype(np.int32), used, path.uses()[there], said))


def _parted(path: Path, known: int) -> tuple[_Stretches, _Stretches]:
    """The first `known` blocks of a path, and the rest, as stretches."""
    old = [(node, 0, min(take, known - node.depth)) for node, take in path if node.depth < known]
    new = [(node, max(0, known - node.depth), take) for node, take in path if node.depth + take > known]
    return old, new
