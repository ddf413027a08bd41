"""The start of an engine's planner: which epoch it is, and what its ranks found."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass

from tiercache.assembly import make_planner
from tiercache.integrations.vllm_config import ConnectorSettings
from tiercache.integrations.vllm_epoch import EpochFile
from tiercache.integrations.vllm_events import BlockEvents
from tiercache.integrations.vllm_messages import SYMBOL_NBYTES, Hello
from tiercache.integrations.vllm_ranks import agree
from tiercache.planner import Planner
from tiercache.types import Slots

__all__ = ["Start", "start"]

_log = logging.getLogger("tiercache.vllm")


@dataclass(frozen=True, slots=True)
class Start:
    """What an engine begins with."""

    planner: Planner
    cold_reason: str
    """Why nothing was found, "" where something was, or nothing persists."""
    lacking: Slots | None
    """Slots that the ranks are to forget."""


def start(
    engine: ConnectorSettings,
    hellos: Mapping[int, Hello],
    file: EpochFile,
    digest: bytes,
    events: BlockEvents | None,
    now: float,
    was_reset: bool = False,
) -> Start:
    """A planner over what all ranks have, in the epoch of their files, or in a new one: of the operator's tag, else a
    nonce. Writes the engine's epoch file where that changes. ConfigError where the ranks do not fit.

    was_reset: there was a reset before the ranks introduced themselves.
    """
    known, tag = file.read(), _tag(engine, file, was_reset)
    agreed = agree(hellos, known)
    same = agreed.epoch is not None and tag in (None, agreed.epoch) and (known is not None or file.path is None)
    epoch = agreed.epoch if same and agreed.epoch is not None else tag or os.urandom(16)
    planner = make_planner(engine.settings, agreed.specs, SYMBOL_NBYTES, epoch, digest)
    planner.state.residency.listener = events
    if not same:
        file.write(epoch, engine.tag if engine.tag != epoch else None)
        planner.new_epoch(epoch, now)
        return Start(planner, agreed.reason or "epoch", None)
    if agreed.recovered is None:
        return Start(planner, agreed.reason, None)
    planner.restore(agreed.recovered)
    return Start(planner, agreed.reason, agreed.lacking if len(agreed.lacking) else None)


def _tag(engine: ConnectorSettings, file: EpochFile, was_reset: bool) -> bytes | None:
    """The epoch that engines share, unless a reset left it, or might have."""
    tag = engine.tag
    if tag is None or was_reset:
        return None
    if file.is_damaged():
        why = f"may have been left by a reset, for {file.path} cannot be read"
    elif tag in file.left():
        why = "was left by a reset"
    else:
        return tag
    _log.warning(
        "the epoch %r %s: the remote tier finds nothing that others put there. "
        "Give all engines of the same weights a new one.",
        tag.decode(errors="replace"),
        why,
    )
    return None
