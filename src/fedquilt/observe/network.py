"""Bytes sent and received, by a network namespace or by some processes.

`NamespaceTraffic`: the kernel counts bytes for each network interface, and interfaces belong
to a network namespace: on a plain machine the whole machine, in a container usually the
container.  These counters do not tell processes apart.

`ConnectionTraffic` (Linux): the kernel keeps, for every TCP connection, how many bytes of
payload were acknowledged and received (RFC 4898, struct tcp_info), and tells anybody who
asks over a netlink socket (sock_diag(7)), which psutil does not; no privilege is needed.
Which connection belongs to which process stands in /proc/<pid>/fd.  It cannot see UDP, nor
what a connection moved between the last reading and its end.  Long connections, such as
gRPC's, are counted well.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedquilt.common import optional
from fedquilt.observe.processes import ProcessTree
from fedquilt.observe.samples import MonitorError


class Traffic(NamedTuple):
    """A pair of counters, or of differences of them."""

    sent: int
    received: int


class NamespaceTraffic:
    """Traffic of all interfaces since the last reading.

    Where traffic passes several interfaces (a bridge and the card behind it) each counts it.
    """

    def __init__(self, pid: int, *, loopback: bool, proc: str | os.PathLike[str] = "/proc") -> None:
        self._pid = pid
        self._loopback = loopback
        self._proc = Path(proc)
        self._before = self._counters()

    def read(self) -> Traffic:
        """Return the bytes since the last reading."""
        now = self._counters()
        # One that appeared has no difference yet; one that started again counts from zero.
        grown = _grown({name: now[name] for name in now if name in self._before}, self._before)
        self._before = now
        return grown

    def _counters(self) -> Mapping[str, Traffic]:
        counters = self._from_proc() if sys.platform == "linux" else _from_psutil()
        if self._loopback:
            return counters
        return {name: counter for name, counter in counters.items() if not _is_loopback(name)}

    def _from_proc(self) -> dict[str, Traffic]:
        """Parse net/dev: two heading lines, then `name: 8 receive fields 8 send fields`."""
        path = self._proc / str(self._pid) / "net" / "dev"
        try:
            lines = path.read_text().splitlines()[2:]
        except OSError as error:
            raise MonitorError(f"network counters {str(path)!r} cannot be read: {error}") from error
        counters = {}
        for line in lines:
            name, _, fields = line.rpartition(":")
            numbers = fields.split()
            counters[name.strip()] = Traffic(sent=int(numbers[8]), received=int(numbers[0]))
        return counters


def namespace_scope(pid: int, *, loopback: bool) -> str:
    """Return in words whose traffic `NamespaceTraffic` measures."""
    kept = "loopback included" if loopback else "loopback left out"
    if sys.platform != "linux":
        return f"all processes of the machine, {kept}"
    namespace = os.readlink(f"/proc/{pid}/ns/net")
    return f"all processes of the network namespace {namespace}, {kept}"


def _from_psutil() -> dict[str, Traffic]:
    counters = optional.load("psutil", "network metrics").net_io_counters(pernic=True)
    return {
        name: Traffic(sent=nic.bytes_sent, received=nic.bytes_recv)
        for name, nic in counters.items()
    }


def _grown(now: Mapping[Any, Traffic], before: Mapping[Any, Traffic]) -> Traffic:
    """Add up what counters grew by; one that is new or went back grew from zero."""
    sent = received = 0
    for key, after in now.items():
        old = before.get(key, Traffic(0, 0))
        sent += after.sent - (old.sent if old.sent <= after.sent else 0)
        received += after.received - (old.received if old.received <= after.received else 0)
    return Traffic(sent, received)


def _is_loopback(name: str) -> bool:
    return name.lower() in ("lo", "lo0") or name.lower().startswith("loopback")


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
        grown, self._before = _grown(now, self._before), now
        return grown

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
