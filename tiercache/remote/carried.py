"""What carried bytes to this process: measured on its sockets and the machine's RDMA ports, never what was asked for.

A client library may take another way than the one it was told. So the bytes that came for a read are compared with what
the kernel and the network cards counted meanwhile.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Carried", "Counted", "count_bytes"]

_TCP_INFO = 11
_RECEIVED = struct.Struct("=Q")
_RECEIVED_AT = 128  # tcpi_bytes_received in Linux's struct tcp_info
_DESCRIPTORS = Path("/proc/self/fd")
_INFINIBAND = Path("/sys/class/infiniband")
_WORD = 4  # port_rcv_data counts in words of four bytes


@dataclass(frozen=True, slots=True)
class Counted:
    """Bytes received since each began to count."""

    tcp: dict[int, int]
    """Per socket of this process (its inode)."""
    rdma: int
    """Of all RDMA ports of the machine."""


@dataclass(frozen=True, slots=True)
class Carried:
    """One measured read: what it brought, and what came over TCP and over RDMA meanwhile."""

    nbytes: int
    tcp: int
    rdma: int

    @classmethod
    def between(cls, before: Counted, after: Counted, nbytes: int) -> Carried:
        """What was counted between the two, for a read of `nbytes`."""
        tcp = sum(count - before.tcp.get(inode, 0) for inode, count in after.tcp.items())
        return cls(nbytes, max(0, tcp), max(0, after.rdma - before.rdma))

    @property
    def way(self) -> str:
        """`tcp` or `rdma` where at least half of the bytes were seen there; else `memory`."""
        if self.tcp * 2 >= self.nbytes:
            return "tcp"
        return "rdma" if self.rdma * 2 >= self.nbytes else "memory"

    def __str__(self) -> str:
        return f"{self.way} ({self.nbytes} bytes read, {self.tcp} seen on TCP, {self.rdma} on RDMA)"


def count_bytes() -> Counted:
    """Bytes that this process's TCP sockets, and the machine's RDMA ports, have received. Some 10 microseconds a
    descriptor."""
    return Counted(_tcp(), _rdma())


def _tcp() -> dict[int, int]:
    received: dict[int, int] = {}
    try:
        entries = list(_DESCRIPTORS.iterdir())
    except OSError:  # no /proc, or no descriptor left to read it by
        return received
    for entry in entries:
        with suppress(OSError):  # closed meanwhile, or no socket
            link = str(entry.readlink())
            if not link.startswith("socket:["):
                continue
            with _socket_at(int(entry.name)) as end:
                if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
                    continue
                facts = end.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
                if len(facts) >= _RECEIVED_AT + _RECEIVED.size:
                    received[int(link[8:-1])] = _RECEIVED.unpack_from(facts, _RECEIVED_AT)[0]
    return received


def _socket_at(descriptor: int) -> socket.socket:
    """A second handle of a socket. OSError where there is none now."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:  # the number stands for something else by now
        os.close(own)
        raise


def _rdma() -> int:
    words = 0
    for counter in _INFINIBAND.glob("*/ports/*/counters/port_rcv_data"):
        with suppress(OSError, ValueError):
            words += int(counter.read_text())
    return words * _WORD
