"""A mover that moves nothing: every copy succeeds, at once and in no time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tiercache.types import CopyJob, JobResult, MoverMessage, PlannerMessage

__all__ = ["NullMover"]


class NullMover:
    """Answers each job through `deliver` while it is submitted; other messages need no answer."""

    def __init__(self, deliver: Callable[[PlannerMessage], None], block_nbytes: int) -> None:
        self._deliver = deliver
        self._block_nbytes = block_nbytes

    def submit(self, messages: Sequence[MoverMessage]) -> None:
        """Take messages in order."""
        for message in messages:
            if isinstance(message, CopyJob):
                ok = np.ones(message.n, dtype=np.bool_)
                self._deliver(JobResult(message.id, ok, message.n * self._block_nbytes, 0.0))
