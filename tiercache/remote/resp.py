"""Commands to a Valkey or Redis server, and its replies (RESP2): read up to one deadline, values straight into rows.

After an exception nobody knows where the next reply begins: the connection is to be dropped.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

__all__ = ["ProtocolError", "Replies", "Reply", "ReplyError", "packed"]

_BUFFER_NBYTES = 1 << 14
_MOST_NBYTES = 512 << 20
"""The longest value that a server holds."""


class ProtocolError(OSError):
    """What came is no reply, or not the one that belongs here."""


@dataclass(frozen=True, slots=True)
class ReplyError:
    """An error that the server answered with; the connection goes on."""

    text: str

    @property
    def code(self) -> str:
        """Its first word, such as OOM."""
        return self.text.partition(" ")[0]


Reply: TypeAlias = int | bytes | ReplyError | None


class Replies:
    """The socket of one connection, and what was read from it ahead. For one thread at a time.

    Every operation ends at `until` (monotonic seconds): TimeoutError, also where something comes now and then. A
    connection that ended is a ConnectionError, nonsense a ProtocolError.
    """

    def __init__(self) -> None:
        self.until = math.inf
        self.sock: Any = None
        self._buffer = bytearray(_BUFFER_NBYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0

    def attach(self, sock: socket.socket | None) -> None:
        """Read from this socket from now on; what was read ahead from another is forgotten."""
        self.sock, self._begin, self._end = sock, 0, 0

    def left(self) -> float:
        """Seconds until the deadline, above 0. TimeoutError where it is over."""
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        return min(left, 1e6)

    @property
    def is_quiet(self) -> bool:
        """Nothing was read ahead."""
        return self._begin == self._end

    def send(self, pieces: Iterable[Any]) -> None:
        """Send bytes or memoryviews, in order."""
        for piece in pieces:
            sock = self._timed()
            sock.sendall(piece)

    def reply(self) -> Reply:
        """The next reply; a status is its text, nothing is None. Arrays are not expected."""
        kind, text = self._line()
        if kind == b"+":
            return text
        if kind == b"-":
            return ReplyError(text.decode("utf-8", "replace"))
        if kind == b":":
            return _integer(text)
        nbytes = _length(kind, text)
        if nbytes < 0:
            return None
        value = bytearray(nbytes)
        self._fill(memoryview(value))
        self._end_of_value()
        return bytes(value)

    def value_into(self, row: memoryview) -> bool | ReplyError:
        """The next reply, which is a value or nothing: whether it has exactly the bytes of `row`, and is there now."""
        kind, text = self._line()
        if kind == b"-":
            return ReplyError(text.decode("utf-8", "replace"))
        nbytes = _length(kind, text)
        if nbytes < 0:
            return False
        if nbytes == row.nbytes:
            self._fill(row)
        else:
            self._skip(nbytes)
        self._end_of_value()
        return nbytes == row.nbytes

    def _timed(self) -> Any:
        if self.sock is None:
            raise ConnectionError("the connection is closed")
        self.sock.settimeout(self.left())
        return self.sock

    def _more(self) -> None:
        """Read what there is, at least a byte, behind what was read ahead."""
        if self._begin:
            ahead = bytes(self._view[self._begin : self._end])
            self._view[: len(ahead)] = ahead
            self._begin, self._end = 0, len(ahead)
        if self._end == _BUFFER_NBYTES:
            raise ProtocolError("a line without an end")
        self._end += _received(self._timed().recv_into(self._view[self._end :]))

    def _line(self) -> tuple[bytes, bytes]:
        looked = 0
        while (at := self._buffer.find(b"\r\n", self._begin + looked, self._end)) < 0:
            looked = max(0, self._end - self._begin - 1)
            self._more()
        line = bytes(self._view[self._begin : at])
        self._begin = at + 2
        return line[:1], line[1:]

    def _fill(self, row: memoryview) -> None:
        at = min(row.nbytes, self._end - self._begin)
        row[:at] = self._view[self._begin : self._begin + at]
        self._begin += at
        while at < row.nbytes:
            at += _received(self._timed().recv_into(row[at:]))

    def _skip(self, nbytes: int) -> None:
        while nbytes:
            if self._begin == self._end:
                self._more()
            step = min(nbytes, self._end - self._begin)
            self._begin += step
            nbytes -= step

    def _end_of_value(self) -> None:
        while self._end - self._begin < 2:
            self._more()
        if bytes(self._view[self._begin : self._begin + 2]) != b"\r\n":
            raise ProtocolError("a value of another length than told")
        self._begin += 2


def packed(commands: Iterable[Sequence[Any]]) -> list[Any]:
    """Commands (words of bytes, or memoryviews) as they are sent: pieces, in which no memoryview was copied."""
    pieces: list[Any] = []
    text: list[bytes] = []
    for words in commands:
        text.append(b"*%d\r\n" % len(words))
        for word in words:
            if isinstance(word, memoryview):
                text.append(b"$%d\r\n" % word.nbytes)
                pieces += (b"".join(text), word)
                text = [b"\r\n"]
            else:
                text.append(b"$%d\r\n%b\r\n" % (len(word), word))
    return [*pieces, b"".join(text)] if text else pieces


def _received(nbytes: int) -> int:
    if nbytes == 0:
        raise ConnectionError("the connection was closed by the other side")
    return nbytes


def _integer(text: bytes) -> int:
    if not text.removeprefix(b"-").isdigit() or len(text) > 20:
        raise ProtocolError(f"{text[:40]!r} is no number")
    return int(text)


def _length(kind: bytes, text: bytes) -> int:
    if kind != b"$":
        raise ProtocolError(f"{(kind + text)[:40]!r} where a value should begin")
    nbytes = _integer(text)
    if not -1 <= nbytes <= _MOST_NBYTES:
        raise ProtocolError(f"a value of {nbytes} bytes")
    return nbytes
