"""Connections to a Valkey or Redis server: valkey-py opens them, with TLS, password and database; `resp` reads them.

Importing this module needs valkey-py.
"""

from __future__ import annotations

import os
import select
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from valkey.connection import AbstractConnection, Connection, SSLConnection, UnixDomainSocketConnection
from valkey.exceptions import ResponseError, ValkeyError
from valkey.exceptions import TimeoutError as LateError

from tiercache.remote.resp import Replies, ReplyError
from tiercache.remote.valkey_options import ValkeyOptions

__all__ = ["Pool", "Wire"]

_DENIED = ("WRONGPASS", "NOAUTH", "NOPERM", "ERR AUTH", "ERR invalid password")
"""How answers begin that say: not you."""


class _Parser(Replies):
    """`Replies` as valkey-py reads them while it opens a connection."""

    def on_connect(self, connection: Any) -> None:
        self.attach(connection._sock)

    def on_disconnect(self) -> None:
        self.attach(None)

    def read_response(self, disable_decoding: bool = False) -> Any:
        reply = self.reply()
        return ResponseError(reply.text) if isinstance(reply, ReplyError) else reply


class _Timed(AbstractConnection):
    """Its time-outs are what is left until the deadline of the call, for each address that a name has."""

    def __init__(self, replies: _Parser, **settings: Any) -> None:
        self.replies = replies
        super().__init__(parser_class=lambda socket_read_size: replies, **settings)

    @property
    def socket_timeout(self) -> float:
        return self.replies.left()

    @socket_timeout.setter
    def socket_timeout(self, seconds: float | None) -> None:
        pass

    @property
    def socket_connect_timeout(self) -> float:
        return self.replies.left()

    @socket_connect_timeout.setter
    def socket_connect_timeout(self, seconds: float | None) -> None:
        pass


class _TCP(_Timed, Connection):
    pass


class _TLS(_Timed, SSLConnection):
    pass


class _Unix(_Timed, UnixDomainSocketConnection):
    pass


class Wire:
    """One connection, not open at first."""

    def __init__(self, options: ValkeyOptions) -> None:
        self.replies = _Parser()
        self._endpoint = options.endpoint
        self._password = options.password
        self._connection: Any = _connection(options, self.replies)

    def open(self, until: float) -> None:
        """Connect, introduce ourselves. PermissionError, TimeoutError or ConnectionError where that fails."""
        self.replies.until = until
        try:
            self._connection.connect()
        except (ValkeyError, OSError, ValueError) as error:
            self.close()
            text = self._quotable(str(error))
            if text.startswith(_DENIED):
                raise PermissionError(f"{self._endpoint}: {text}") from None
            if time.monotonic() >= until or isinstance(error, TimeoutError | LateError):
                raise TimeoutError(f"{self._endpoint}: no connection in time") from None
            raise ConnectionError(f"{self._endpoint}: {text}") from None

    def _quotable(self, text: str) -> str:
        """An error without what we said: a server that knows no AUTH repeats the words of it, password included."""
        text = text.partition(", with args beginning with")[0]
        return text.replace(self._password, "***") if self._password else text

    @property
    def is_fresh(self) -> bool:
        """It is open, and nothing came that nobody asked for: neither its end nor a late reply."""
        sock = self.replies.sock
        if sock is None or not self.replies.is_quiet or (isinstance(sock, ssl.SSLSocket) and sock.pending()):
            return False
        poll = select.poll()
        poll.register(sock, select.POLLIN | select.POLLRDHUP)
        return not poll.poll(0)

    @property
    def transport(self) -> str:
        """What its socket is."""
        sock = self.replies.sock
        if isinstance(sock, ssl.SSLSocket):
            return "tls"
        return "unknown" if sock is None else "unix" if sock.family == socket.AF_UNIX else "tcp"

    def interrupt(self) -> None:
        """End what another thread waits for here."""
        sock = self.replies.sock
        if sock is not None:
            with suppress(OSError):  # not by TLS's own shutdown, after which another thread would send in the clear
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection."""
        self._connection.disconnect()


def _connection(options: ValkeyOptions, replies: _Parser) -> AbstractConnection:
    settings: dict[str, Any] = {
        "db": options.db,
        "username": options.username,
        "password": options.password,
        "lib_name": None,
        "lib_version": None,
    }
    kind: type[_Timed] = _Unix if options.path else _TCP
    if options.path:
        settings["path"] = options.path
    else:
        settings.update(host=options.host, port=options.port, socket_keepalive=True)
    if options.tls:
        kind = _TLS
        settings.update(ssl_ca_certs=options.ca, ssl_certfile=options.cert, ssl_keyfile=options.key)
        settings.update(ssl_check_hostname=options.check_hostname)
    return kind(replies, **settings)


class Pool:
    """At most so many connections at a time, kept open between calls, closed at the first sign of trouble."""

    def __init__(self, options: ValkeyOptions) -> None:
        self._options = options
        self._room = threading.BoundedSemaphore(options.connections)
        self._lock = threading.Lock()
        self._idle: list[Wire] = []
        self._busy: set[Wire] = set()
        self._closed = False
        self._pid = os.getpid()
        self.opened = 0
        """Connections opened so far."""

    @contextmanager
    def wire(self, until: float) -> Iterator[Wire]:
        """A connection for one exchange. Where that does not end well it is closed, and so are the idle ones: they
        may have met the same fate, and each would cost a deadline to find out."""
        if os.getpid() != self._pid:
            raise ConnectionError("these connections belong to the parent process")
        if not self._room.acquire(timeout=max(0.0, until - time.monotonic())):
            raise TimeoutError(f"{self._options.endpoint}: all {self._options.connections} connections are in use")
        wire: Wire | None = None
        try:
            wire = self._take(until)
            wire.replies.until = until
            yield wire
        except BaseException:
            self._drop([*([wire] if wire else []), *self._take_idle()])
            raise
        else:
            self._give_back(wire)
        finally:
            self._room.release()

    def _take(self, until: float) -> Wire:
        while True:
            with self._lock:
                if self._closed:
                    raise ConnectionError(f"{self._options.endpoint}: closed")
                wire = self._idle.pop() if self._idle else Wire(self._options)
                self._busy.add(wire)
            if wire.replies.sock is None:
                try:
                    wire.open(until)
                except BaseException:
                    self._drop([wire])
                    raise
                with self._lock:
                    self.opened += 1
                    closed = self._closed
                if closed:  # meanwhile, when there was nothing yet to interrupt
                    self._drop([wire])
                    raise ConnectionError(f"{self._options.endpoint}: closed")
                return wire
            if wire.is_fresh:
                return wire
            self._drop([wire])

    def close_idle(self) -> None:
        """Close connections that no call is using."""
        self._drop(self._take_idle())

    def _take_idle(self) -> list[Wire]:
        with self._lock:
            idle, self._idle = self._idle, []
        return idle

    def _give_back(self, wire: Wire) -> None:
        with self._lock:
            self._busy.discard(wire)
            if not self._closed:
                self._idle.append(wire)
                return
        wire.close()

    def _drop(self, wires: list[Wire]) -> None:
        with self._lock:
            self._busy.difference_update(wires)
        for wire in wires:
            wire.close()

    def close(self) -> None:
        """Close idle connections, and end the waiting of calls under way. May be called twice. In a forked child
        nothing: the connections are the parent's, which would lose them."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self.close_idle()
        for wire in busy:
            wire.interrupt()
