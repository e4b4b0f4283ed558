"""Bytes of the TCP connections of a process (Linux).

The kernel keeps, for every TCP connection, how many bytes of payload were
acknowledged and received (RFC 4898, struct tcp_info), and tells anybody who asks
over a netlink socket (sock_diag(7)); no privilege is needed.  Which connection
belongs to which process stands in /proc/<pid>/fd.

What this cannot see: UDP, and what a connection moved after the last reading before
it was closed, so a connection that opens and closes between two readings is
missed.  Long connections, such as gRPC's, are counted well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fedquilt.monitor.errors import MonitorError
from fedquilt.monitor.network import Traffic
from fedquilt.monitor.processes import ProcessTree

NETLINK_SOCK_DIAG = 4
SOCK_DIAG_BY_FAMILY = 20
NLMSG_ERROR, NLMSG_DONE = 2, 3
REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_ROOT | NLM_F_MATCH
INET_DIAG_INFO = 2
EVERY_STATE = 0xFFFFFFFF

HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
REQUEST = struct.Struct("=BBBxI48x")  # inet_diag_req_v2 with an empty socket id
MESSAGE = struct.Struct("=4B40xQ16xI")  # inet_diag_msg: ..., cookie, ..., inode
ATTRIBUTE = struct.Struct("=HH")  # rtattr: length, type
TCP_BYTES = struct.Struct("=120xQQ")  # tcp_info: ..., bytes acked, bytes received
ANSWER_SIZE = 1 << 18

SCOPE = "TCP connections of the monitored processes"


@dataclass(frozen=True)
class Connection:
    """A TCP connection: `cookie` names it for good, `inode` while a process holds it."""

    cookie: int
    inode: int
    traffic: Traffic


class ConnectionTraffic:
    """Traffic of the TCP connections of a tree of processes since the last reading."""

    def __init__(self, tree: ProcessTree) -> None:
        if sys.platform != "linux":
            raise MonitorError("network_scope='process' must be used on Linux; 'namespace' works")
        self._tree = tree
        self._before = self._counters()

    def read(self) -> Traffic:
        """Return the bytes since the last reading; a new connection counts whole."""
        now = self._counters()
        pairs = [(now[cookie], self._before.get(cookie, Traffic(0, 0))) for cookie in now]
        self._before = now
        return Traffic(
            sum(max(0, after.sent - before.sent) for after, before in pairs),
            sum(max(0, after.received - before.received) for after, before in pairs),
        )

    def _counters(self) -> dict[int, Traffic]:
        held = set(_socket_inodes(self._tree.pids()))
        return {one.cookie: one.traffic for one in connections() if one.inode in held}


def connections() -> Iterator[Connection]:
    """Yield every TCP connection of this network namespace."""
    for family in (socket.AF_INET, socket.AF_INET6):
        yield from _dump(family)


def _socket_inodes(pids: Iterable[int]) -> Iterator[int]:
    """Yield the inodes of the open sockets of some processes."""
    for pid in pids:
        # A process, or one of its files, may be gone by now.
        with contextlib.suppress(OSError):
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    kind, _, inode = os.readlink(entry.path).partition(":")
                    if kind == "socket":
                        yield int(inode.strip("[]"))


def _dump(family: int) -> Iterator[Connection]:
    """Ask the kernel for all TCP connections of one address family."""
    request = REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (INET_DIAG_INFO - 1), EVERY_STATE)
    size = HEADER.size + len(request)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as netlink:
        netlink.send(HEADER.pack(size, SOCK_DIAG_BY_FAMILY, REQUEST_DUMP, 1, 0) + request)
        while True:
            for kind, body in _messages(netlink.recv(ANSWER_SIZE)):
                if kind == NLMSG_DONE:
                    return
                if kind == NLMSG_ERROR:
                    code = struct.unpack_from("=i", body)[0]
                    raise MonitorError(f"the kernel lists no connections: {os.strerror(-code)}")
                yield _connection(body)


def _messages(answer: bytes) -> Iterator[tuple[int, bytes]]:
    """Split an answer into (type, body) pairs; messages start at multiples of four."""
    at = 0
    while at + HEADER.size <= len(answer):
        size, kind, *_ = HEADER.unpack_from(answer, at)
        yield kind, answer[at + HEADER.size : at + size]
        at += (size + 3) & ~3


def _connection(body: bytes) -> Connection:
    *_, cookie, inode = MESSAGE.unpack_from(body)
    traffic = Traffic(0, 0)
    at = MESSAGE.size
    while at + ATTRIBUTE.size <= len(body):
        size, kind = ATTRIBUTE.unpack_from(body, at)
        if kind == INET_DIAG_INFO and size >= ATTRIBUTE.size + TCP_BYTES.size:
            traffic = Traffic(*TCP_BYTES.unpack_from(body, at + ATTRIBUTE.size))
        at += max(4, (size + 3) & ~3)
    return Connection(cookie, inode, traffic)
