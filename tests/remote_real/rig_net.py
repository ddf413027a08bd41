"""A TCP proxy that misbehaves as told, from one moment to the next: slow, late, cut off, silent, wrong in a bit."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from types import TracebackType

__all__ = ["Proxy"]

_CHUNK = 1 << 16
_LOOK_S = 0.005
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of 0 s: closing sends a RST."""


class Proxy:
    """Passes bytes between whoever connects to `port` on loopback and a server on loopback. Without any fault set it is
    the server. Attributes may be set at any time, from any thread; "down" is from the server to the client.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.delay_s = 0.0
        """Before each chunk that goes down."""
        self.rate: float | None = None
        """Bytes per second that go down."""
        self.hangs = False
        """Connections are taken, and nothing passes."""
        self.refuses = False
        """Connections end as soon as they began."""
        self.hang_after: int | None = None
        """So many bytes more go down, then it hangs."""
        self.cut_after: int | None = None
        """So many bytes more go down, then all connections are reset, and it is well again."""
        self.flip_every = {"down": 0, "up": 0}
        """A bit of one byte in so many on average, at random, is flipped; 0: none."""
        self.passed = {"down": 0, "up": 0}
        self.flipped = {"down": 0, "up": 0}
        self.accepted = 0
        self._random = random.Random(1)
        self._lock = threading.Lock()
        self._socks: set[socket.socket] = set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    def heal(self) -> None:
        """Forget every fault."""
        self.delay_s, self.rate, self.hangs, self.refuses = 0.0, None, False, False
        self.hang_after = self.cut_after = None
        self.flip_every = {"down": 0, "up": 0}

    def cut(self) -> None:
        """Reset every connection now."""
        with self._lock:
            socks, self._socks = self._socks, set()
        for sock in socks:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RD)  # wakes whoever reads it; closing alone does not
            sock.close()

    def close(self) -> None:
        """End all of it. May be called twice."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            server = None
            with contextlib.suppress(OSError):
                server = None if self.refuses else socket.create_connection(("127.0.0.1", self.target), 5)
            if server is None:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                client.close()
                continue
            server.settimeout(None)
            for sock in (client, server):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._socks |= {client, server}
            for ends in ((server, client, "down"), (client, server, "up")):
                thread = threading.Thread(target=self._pump, args=ends, name="proxy", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while chunk := bytearray(source.recv(self._size(way))):
                self._flip(chunk, way)
                if way == "down":
                    time.sleep(self.delay_s + (len(chunk) / self.rate if self.rate else 0.0))
                    chunk = self._past_faults(sink, chunk)
                self._send(sink, chunk, way)
        for sock in (source, sink):
            with self._lock:
                self._socks.discard(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _size(self, way: str) -> int:
        if way == "down" and self.rate is not None:
            return max(1, min(_CHUNK, int(self.rate / 50)))
        return _CHUNK

    def _past_faults(self, sink: socket.socket, chunk: bytearray) -> bytearray:
        """Send what comes before `hang_after` and `cut_after`, and let the fault happen; what is left of the chunk."""
        for name in ("hang_after", "cut_after"):
            with self._lock:
                left = getattr(self, name)
                if left is None:
                    continue
                first, chunk = chunk[:left], chunk[left:]
                setattr(self, name, left - len(first) or None)
            self._send(sink, first, "down")
            if left == len(first) and name == "cut_after":
                self.cut()
            elif left == len(first):
                self.hangs = True
        return chunk

    def _send(self, sink: socket.socket, chunk: bytearray, way: str) -> None:
        while self.hangs and not self._closed:
            time.sleep(_LOOK_S)
        sink.sendall(chunk)
        self.passed[way] += len(chunk)

    def _flip(self, chunk: bytearray, way: str) -> None:
        every = self.flip_every[way]
        flips, rest = divmod(len(chunk), every) if every else (0, 0)
        for _ in range(flips + (every > 0 and self._random.random() < rest / every)):
            chunk[self._random.randrange(len(chunk))] ^= 1 << self._random.randrange(8)
            self.flipped[way] += 1

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
