"""A key tier on a Valkey or Redis server. Pipelined: a batch costs about one round trip, whatever its size.

Keys are `tcblock1/<64 hex digits>`. Nothing of valkey-py is imported before a tier is made, nothing connects before
its first call, and after any trouble the next call connects again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from tiercache.remote.base import Values
from tiercache.remote.frame import FORMAT
from tiercache.remote.resp import ProtocolError, Replies, ReplyError, packed
from tiercache.remote.valkey_options import ValkeyOptions
from tiercache.types import Bools

if TYPE_CHECKING:
    from tiercache.remote.valkey_wire import Pool

__all__ = ["ValkeyOptions", "ValkeyTier"]

_log = logging.getLogger("tiercache.remote")

_T = TypeVar("_T")
_GROUP_KEYS, _GROUP_NBYTES = 256, 8 << 20
"""Commands are sent in groups of at most so many keys, and bytes of values; the next before the last is answered."""
_REFUSALS = frozenset({"OOM", "MISCONF", "READONLY", "NOREPLICAS", "NOPERM"})
"""Codes of answers to SET that say no to this write, of a server that may well go on answering reads."""
_LOAD_S = 1.0
"""How long what a server said of its memory is believed."""


class ValkeyTier:
    """See the module. Calls end by themselves about at their deadline, but for the look-up of the host's name."""

    def __init__(self, options: ValkeyOptions) -> None:
        from tiercache.remote.valkey_wire import Pool  # needs valkey-py

        self.name = "valkey"
        self.endpoint = options.endpoint
        self.refused: Counter[str] = Counter()
        """Puts that the server refused, by the code of its answer: OOM (full), MISCONF, READONLY, ..."""
        self._options = options
        self._pool: Pool = Pool(options)
        self._lock = threading.Lock()
        self._transport = "unknown"
        self._asking = threading.Lock()
        self._load: float | None = None
        self._load_until = 0.0
        self._expiry = () if options.ttl_s is None else (b"PX", b"%d" % round(options.ttl_s * 1000))

    def __repr__(self) -> str:
        return f"ValkeyTier({self.endpoint})"

    def find(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.find`."""
        answers = self._ask(keys, lambda i, key: (b"EXISTS", key), lambda replies, i: _number(replies), 0, deadline_s)
        return np.array([answer == 1 for answer in self._right(answers)], dtype=np.bool_)

    def get(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.get`. Values come from the socket into the rows, with no copy in between."""
        answers = self._ask(
            keys,
            lambda i, key: (b"GET", key),
            lambda replies, i: replies.value_into(memoryview(rows[i])),
            rows.shape[1],
            deadline_s,
        )
        answers = [False if isinstance(each, ReplyError) and each.code == "WRONGTYPE" else each for each in answers]
        return np.array(self._right(answers), dtype=np.bool_)

    def put(self, keys: Sequence[bytes], rows: Values, deadline_s: float) -> Bools:
        """See `KeyTier.put`. What the server refuses is a False, counted in `refused`."""
        answers = self._ask(
            keys,
            lambda i, key: (b"SET", key, memoryview(rows[i]), *self._expiry),
            lambda replies, i: _is_ok(replies),
            rows.shape[1],
            deadline_s,
        )
        refusals = [each for each in answers if isinstance(each, ReplyError) and each.code in _REFUSALS]
        if refusals:
            self._count(refusals)
        answers = [False if isinstance(each, ReplyError) and each.code in _REFUSALS else each for each in answers]
        return np.array(self._right(answers), dtype=np.bool_)

    def remove(self, keys: Sequence[bytes], deadline_s: float) -> Bools:
        """See `KeyTier.remove`."""
        answers = self._ask(keys, lambda i, key: (b"UNLINK", key), lambda replies, i: _number(replies), 0, deadline_s)
        return np.array([answer >= 0 for answer in self._right(answers)], dtype=np.bool_)

    def close(self) -> None:
        """See `KeyTier.close`. What the server holds stays there."""
        self._pool.close()

    def pressure(self, deadline_s: float) -> float | None:
        """How full the server says it is, 0 to 1; None where it has no limit (`maxmemory` 0) or did not say. At most
        one question a second, one at a time."""
        if time.monotonic() >= self._load_until and self._asking.acquire(blocking=False):
            try:
                self._load = self._asked_load(deadline_s)
                self._load_until = time.monotonic() + _LOAD_S
            finally:
                self._asking.release()
        return self._load

    def transport(self) -> str:
        """What the last connection was, as its socket says: "tcp", "tls", "unix"; "unknown" before there was one."""
        return self._transport

    @property
    def connections_opened(self) -> int:
        """Connections opened so far: more than `connections` of the options says that some were lost."""
        return self._pool.opened

    def _ask(
        self,
        keys: Sequence[bytes],
        command: Callable[[int, bytes], tuple[Any, ...]],
        take: Callable[[Replies, int], _T],
        value_nbytes: int,
        deadline_s: float,
    ) -> list[_T]:
        """Send a command per key, and take a reply for each, in order."""
        answers: list[_T] = []
        if not keys:
            return answers
        step = max(1, min(_GROUP_KEYS, _GROUP_NBYTES // max(1, value_nbytes)))
        commands = [command(i, b"%s/%s" % (FORMAT, key.hex().encode())) for i, key in enumerate(keys)]
        with self._pool.wire(time.monotonic() + deadline_s) as wire:
            self._transport = wire.transport
            wire.replies.send(packed(commands[:step]))
            for begin in range(0, len(keys), step):
                wire.replies.send(packed(commands[begin + step : begin + 2 * step]))
                answers.extend(take(wire.replies, i) for i in range(begin, min(begin + step, len(keys))))
        return answers

    def _right(self, answers: Sequence[_T | ReplyError]) -> list[_T]:
        """Answers without an error among them; an OSError for the first where there is one."""
        right = [answer for answer in answers if not isinstance(answer, ReplyError)]
        if len(right) < len(answers):
            error = next(answer for answer in answers if isinstance(answer, ReplyError))
            kind = PermissionError if error.code in ("NOAUTH", "NOPERM") else OSError
            raise kind(f"{self.endpoint}: {error.text}")
        return right

    def _count(self, refusals: Sequence[ReplyError]) -> None:
        with self._lock:
            new = {each.code: each.text for each in refusals if each.code not in self.refused}
            self.refused.update(each.code for each in refusals)
        for text in new.values():
            _log.warning("%s refuses writes; told once, counted from now on: %s", self.endpoint, text)
        if any(each.code == "READONLY" for each in refusals):  # its name may lead to another primary by now
            self._pool.close_idle()

    def _asked_load(self, deadline_s: float) -> float | None:
        try:
            with self._pool.wire(time.monotonic() + deadline_s) as wire:
                wire.replies.send(packed([(b"INFO", b"memory")]))
                answer = wire.replies.reply()
        except OSError:
            return None
        return _fullness(answer) if isinstance(answer, bytes) else None


def _number(replies: Replies) -> int | ReplyError:
    answer = replies.reply()
    if not isinstance(answer, int | ReplyError):
        raise ProtocolError(f"{answer!r:.40} where a number should be")
    return answer


def _is_ok(replies: Replies) -> bool | ReplyError:
    answer = replies.reply()
    if isinstance(answer, ReplyError):
        return answer
    if answer != b"OK":
        raise ProtocolError(f"{answer!r:.40} where OK should be")
    return True


def _fullness(info: bytes) -> float | None:
    lines = dict(line.split(b":", 1) for line in info.splitlines() if b":" in line)
    try:
        used, most = int(lines[b"used_memory"]), int(lines[b"maxmemory"])
    except (KeyError, ValueError):
        return None
    return min(1.0, used / most) if most > 0 else None
