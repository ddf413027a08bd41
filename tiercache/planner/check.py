"""The rules that always hold, verified from scratch. Slow; used by `TieredKVCache.check` and after every test step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tiercache.index import Node
from tiercache.keys import INT32_MIN
from tiercache.planner.finds import Finds
from tiercache.planner.loads import Loads
from tiercache.planner.quota import Quota
from tiercache.planner.remote_writes import RemoteWrites
from tiercache.planner.state import PlannerState
from tiercache.slots import BAD, DETACHED, FREE, LOST, NO_OWNER, RESIDENT, WRITING, SlotState
from tiercache.types import CALLER, CopyJob, Slots

__all__ = ["check_state"]


def check_state(
    state: PlannerState,
    loads: Loads,
    finds: Finds | None,
    quota: Quota | None,
    remote_writes: RemoteWrites | None = None,
) -> list[str]:
    """Every broken rule found: slots, pins, tree, residency, credits, charges. The caller has filed all stale nodes."""
    broken: list[str] = []
    broken += _check_slots(state)
    broken += _check_fillers(state)
    sent = [] if remote_writes is None else [each for each in remote_writes.under_way.values() if not each.overdue]
    broken += _check_pins(state, loads, [each.job for each in sent])
    broken += _check_tree(state)
    broken += _check_residency(state)
    broken += _check_credits(state, loads, finds)
    broken += _check_charges(state, quota)
    if finds is not None and remote_writes is not None:
        broken += _check_key_tier(state, finds, remote_writes)
    return broken


def _check_charges(state: PlannerState, quota: Quota | None) -> Iterator[str]:
    """What is charged is counted, is within the quota, hangs below nothing that is charged more, and was not written
    to a persistent level."""
    counted = [0] * len(state.specs)
    for node in state.residency.index.nodes.values():
        if node.parent is not None and node.charge < node.parent.charge:
            yield f"node {node.id}: charge {node.charge}, its parent has {node.parent.charge}"
        for level, held in enumerate(node.held if node.charge else ()):
            counted[level] += held
    for level, spec in enumerate(state.specs):
        if counted[level] != state.residency.charged[level]:
            yield f"{spec.name}: {state.residency.charged[level]} slots are charged, {counted[level]} should be"
        most = 0 if quota is None or spec.persistent else quota.limit(level)
        if counted[level] > most:
            yield f"{spec.name}: {counted[level]} slots are charged, {most} may be"


def _check_slots(state: PlannerState) -> Iterator[str]:
    for level, table in enumerate(state.residency.tables):
        name = state.specs[level].name
        counts = np.bincount(table.state, minlength=len(SlotState))
        if counts[FREE] != table.free or counts[LOST] != table.lost:
            yield f"{name}: {counts[FREE]} free slots, {table.free} counted; lost likewise"
        if len(set(table._stack[: table.free].tolist())) != table.free:
            yield f"{name}: a slot is on the free stack twice"
        if (table.state[table._stack[: table.free]] != FREE).any():
            yield f"{name}: a slot on the free stack is not free"
        owned = table.owner != NO_OWNER
        may_own = np.isin(table.state, (WRITING, RESIDENT, BAD))
        if (owned != may_own).any():
            yield f"{name}: {int((owned != may_own).sum())} slots are owned in a state without owner, or the reverse"
        idle = np.isin(table.state, (DETACHED, LOST, WRITING)) & (table.pins == 0)
        if idle.any():
            yield f"{name}: {int(idle.sum())} slots wait for a job that does not exist"
        for slot in np.flatnonzero(owned).tolist():
            node = state.residency.index.nodes.get(int(table.owner[slot]))
            at = int(table.pos[slot])
            if node is None or at >= node.n or int(node.slots[at, level]) != slot:
                yield f"{name}: slot {slot} says it is block {at} of node {int(table.owner[slot])}, which disagrees"


def _check_fillers(state: PlannerState) -> Iterator[str]:
    expected = np.zeros(state.specs[0].capacity, dtype=np.int64)
    for flight in state.jobs.values():
        expected[state.filled(flight.job)] = flight.job.id
    if (expected != state.filler).any():
        yield f"{int((expected != state.filler).sum())} slots of the first level name a wrong job as their filler"


def _ends(state: PlannerState, loads: Loads, shared: Sequence[CopyJob]) -> Iterator[tuple[int, Slots]]:
    """Everything that should hold a pin."""
    for flight in state.jobs.values():
        yield from state.ends(flight.job)
    for load in loads.open.values():
        if not load.endpoint:
            yield 0, load.slots
        for segment in load.segments:
            if segment.source < len(state.specs):
                yield segment.source, segment.src
            if segment.also is not None:
                yield segment.also[0], segment.also[1][segment.also[1] >= 0]
    yield from state.pinned
    for job in shared:
        yield job.src_level, job.src_slots


def _check_pins(state: PlannerState, loads: Loads, shared: Sequence[CopyJob]) -> Iterator[str]:
    expected = [np.zeros(spec.capacity, dtype=np.int32) for spec in state.specs]
    for level, slots in _ends(state, loads, shared):
        np.add.at(expected[level], slots, 1)
    for level, table in enumerate(state.residency.tables):
        if (expected[level] != table.pins).any():
            slot = int(np.flatnonzero(expected[level] != table.pins)[0])
            yield f"{state.specs[level].name}: slot {slot} has {table.pins[slot]} pins, {expected[level][slot]} users"


def _check_tree(state: PlannerState) -> Iterator[str]:
    index, blocks = state.residency.index, 0
    for node_id, node in index.nodes.items():
        blocks += node.n
        width = state.residency.width
        if node.id != node_id or node.n == 0 or node.parent is None:
            yield f"node {node_id} is misfiled, empty or an orphan"
            continue
        if node.parent.children.get(node.run[:width]) is not node:
            yield f"node {node_id} is not a child of its parent"
        if node.depth != node.parent.depth + node.parent.n or node.parent.partial:
            yield f"node {node_id}: wrong depth, or its parent is a partial block"
        if node.parent.order is not None and list(node.parent.order) != sorted(node.parent.children):
            yield f"node {node.parent.id}: sorted children differ from children"
        if len(node.run) < node.n * width or _lengths(node) != {node.n}:
            yield f"node {node_id}: an array is shorter than its run"
        for level in range(state.residency.levels):
            row = node.slots[:, level]
            if node.held[level] != int((row >= 0).sum()):
                yield f"node {node_id}: held[{level}] = {node.held[level]}, has {int((row >= 0).sum())}"
            kids = sum(child.held[level] > 0 or child.kids[level] > 0 for child in node.children.values())
            if kids != node.kids[level]:
                yield f"node {node_id}: kids[{level}] = {node.kids[level]}, has {kids}"
            owned = row[row >= 0]
            if (state.residency.tables[level].owner[owned] != node_id).any():
                yield f"node {node_id}: a slot of level {level} names another owner"
        row = node.slots[:, 0]
        whole = bool((row >= 0).all() and (state.residency.tables[0].state[row] == RESIDENT).all())
        if node.whole is not None and node.whole != whole:
            yield f"node {node_id}: whole in level 0 is {whole}, remembered is {node.whole}"
        if not state.residency.expiry.knows(node):
            yield f"node {node_id}: nobody will look at it when its first block ends"
        if node.plain and (np.frombuffer(node.run, dtype=np.int32) == INT32_MIN).any():
            yield f"node {node_id} is not plain: it has a word INT32_MIN"
    if blocks != index.blocks:
        yield f"the index counts {index.blocks} blocks and has {blocks}"


def _check_residency(state: PlannerState) -> Iterator[str]:
    for node in state.residency.index.nodes.values():
        if (node.slots < 0).all(axis=1).any():
            yield f"node {node.id}: a block is in the tree and on no level"
        for level, spec in enumerate(state.specs):
            if spec.persistent and not _closed(node, level):
                yield f"node {node.id}: {spec.name} holds a block without its parent"


def _closed(node: Node, level: int) -> bool:
    """Does this level hold, with each block of the run, the block before it?"""
    there = node.slots[:, level] >= 0
    if not there.any():
        return True
    inside = bool(there[: int(there.sum())].all())
    above = node.parent
    return inside and (above is None or above.parent is None or bool(above.slots[above.n - 1, level] >= 0))


def _check_credits(state: PlannerState, loads: Loads, finds: Finds | None) -> Iterator[str]:
    levels = range(len(state.credits))
    jobs, delayed, hastened, lost = [[0 for _ in levels] for _ in range(4)]
    inbound, outbound, writes = [[0 for _ in levels] for _ in range(3)]
    for flight in state.jobs.values():
        job, slower = flight.job, max(flight.job.src_level, flight.job.dst_level)
        if flight.overdue:
            lost[slower] += 1
            continue
        if flight.delayed:
            delayed[job.src_level] += job.n
            if flight.expedited == (job.id in state.delayed[job.src_level]):
                yield f"job {job.id} waits and was told to start, or neither"
            hastened[job.src_level] += job.n * flight.expedited
            continue
        jobs[slower] += 1
        if job.src_level != CALLER:
            outbound[job.src_level] += job.n
            writes[job.src_level] += job.n * (job.kind == "write")
        if job.dst_level != CALLER:
            inbound[job.dst_level] += job.n
        if job.also_slots is not None:
            inbound[job.also_level] += int((job.also_slots >= 0).sum())
    if finds is not None:
        lost[-1] += sum(find.overdue for find in finds.under_way.values())
    names = [spec.name for spec in state.specs] + ["remote"]
    queued = [0 for _ in levels]
    for load in loads.open.values():
        for segment in load.segments:
            queued[segment.source] += len(segment.src)
    holds = [np.zeros(spec.capacity, dtype=np.int32) for spec in state.specs]
    for level, slots in [*((0, load.slots) for load in loads.open.values()), *state.pinned]:
        holds[level][slots] += 1
    for level in levels:
        credit = state.credits[level]
        found = (credit.jobs, credit.delayed, credit.hastened, credit.lost_jobs)
        right = (jobs[level], delayed[level], hastened[level], lost[level])
        if found != right:
            yield f"{names[level]}: credits {found}, in flight {right} (jobs, delayed, hastened, lost)"
        found_blocks = (credit.inbound, credit.outbound, credit.outbound_writes, credit.held)
        held = int((holds[level] > 0).sum()) if level < len(holds) else 0
        right_blocks = (inbound[level], outbound[level], writes[level], held)
        if credit.queued != queued[level]:
            yield f"{names[level]}: {credit.queued} blocks counted as queued by loads, {queued[level]} are"
        if level < len(holds) and (holds[level] != state.holds[level]).any():
            yield f"{names[level]}: a slot counts other holds than there are"
        if found_blocks != right_blocks:
            wrong = f"credits {found_blocks}, in flight {right_blocks} (blocks in, out, of these written, held)"
            yield f"{names[level]}: {wrong}"


def _check_key_tier(state: PlannerState, finds: Finds, writes: RemoteWrites) -> Iterator[str]:
    """What waits to be written is counted and bounded, and so is what is under way there."""
    waiting = sum(run.left for run in writes.runs)
    if waiting != writes.waiting_blocks or any(run.left <= 0 for run in writes.runs):
        yield f"remote: {writes.waiting_blocks} blocks are counted as waiting to be written, {waiting} are"
    most = writes.limits.queued_writes + 1, writes.limits.queued_write_blocks
    if len(writes.runs) > most[0] or waiting > most[1]:
        yield f"remote: {len(writes.runs)} runs of {waiting} blocks wait to be written, {most} may"
    if len(writes.under_way) > writes.limits.write_threads:
        yield f"remote: {len(writes.under_way)} writes, {writes.limits.write_threads} threads"
    sent = [each.job for each in writes.under_way.values() if not each.overdue]
    others = len(sent) + sum(not find.overdue for find in finds.under_way.values())
    if others != state.credits[-1].others:
        yield f"remote: {state.credits[-1].others} finds and writes are counted, {others} are under way"
    for level, spec in enumerate(state.specs):
        shared = sum(job.n for job in sent if job.src_level == level)
        if shared != state.credits[level].shared:
            yield f"{spec.name}: {state.credits[level].shared} blocks are counted as being shared, {shared} are"
    probes = sum(find.probe and not find.overdue for find in finds.under_way.values())
    if probes < state.key_breaker.probing:
        yield f"remote: {probes} probes are under way, its breaker is {state.key_breaker.state}"


def _lengths(node: Node) -> set[int]:
    """Of all arrays per block."""
    lengths = {len(each) for each in (node.idents, node.slots, node.last_use, node.uses)}
    return lengths | {len(each) for each in (node.marks, node.hints) if each is not None}
