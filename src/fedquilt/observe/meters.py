"""What processes use: processor time, memory, network traffic; all metrics read together.

A meter measures from the moment it is made; each reading begins where the last ended.

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
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedquilt.common import optional
from fedquilt.observe.power import PowerSource, open_power
from fedquilt.observe.samples import (
    BYTES_RECV,
    BYTES_SENT,
    CPU,
    MEMORY,
    Metrics,
    MonitorError,
    Reach,
    Sample,
)


class ProcessKey(NamedTuple):
    """A process; the time it was created tells a reused number apart."""

    pid: int
    created: float


class CpuTimes(NamedTuple):
    """Seconds of processor time since a process began.

    `own` is its own; `reaped` that of the children which ended and were waited
    for, with all they had reaped themselves.
    """

    own: float
    reaped: float


class CpuAccount:
    """Seconds of processor time that a tree used between two readings.

    A member that is still there adds what its own time grew by.  One that has
    ended since shows up, with its whole life, in the reaped time of its parent; the
    part that earlier readings counted is taken off again:

        used = Σ_alive Δown + max(0, Σ_alive Δreaped − Σ_ended (own + reaped)_before)

    A process can end in the middle of a reading, seen neither alive nor reaped.
    Then the maximum cuts off something that the next reading needs, so it is kept
    for that one; a member that left the tree for good is forgotten after it.
    """

    def __init__(self, first: Mapping[ProcessKey, CpuTimes]) -> None:
        self._before = dict(first)
        self._carried = 0.0

    def used(self, now: Mapping[ProcessKey, CpuTimes]) -> float:
        """Return the seconds used since the last reading."""
        nothing = CpuTimes(0.0, 0.0)
        own = reaped = 0.0
        for key, times in now.items():
            before = self._before.get(key, nothing)
            own += max(0.0, times.own - before.own)
            reaped += max(0.0, times.reaped - before.reaped)
        ended = sum(sum(times) for key, times in self._before.items() if key not in now)
        balance = reaped - ended + self._carried
        self._carried = min(0.0, reaped - ended)
        self._before = dict(now)
        return own + max(0.0, balance)


class ProcessTree:
    """The monitored process and, if wished, everything it started.

    The process that does the sampling is left out when it is not the monitored
    one: the cost of looking is not part of what is looked at.
    """

    def __init__(self, pid: int, *, children: bool) -> None:
        self._psutil = optional.require("psutil", "CPU and memory metrics")
        self._children = children
        self._pid = pid
        self._sampler = os.getpid() if os.getpid() != pid else None
        try:
            self._root = self._psutil.Process(pid)
        except self._psutil.NoSuchProcess as error:
            raise MonitorError(f"pid={pid} must be a running process; there is none") from error

    def members(self) -> list[Any]:
        """Return the psutil processes of the tree, the root first."""
        if not self._root.is_running():
            raise MonitorError(f"the monitored process {self._pid} has ended")
        descendants = self._root.children(recursive=True) if self._children else []
        return [self._root, *(one for one in descendants if one.pid != self._sampler)]

    def cpu_times(self) -> dict[ProcessKey, CpuTimes]:
        """Return the processor time of every member.

        The time of ended children is read for all members before anybody's own
        time: a child that is seen alive afterwards cannot have been in it.
        """
        reaped = {}
        for member in self.members():
            with self._unless_gone():
                reaped[member] = self._reaped_seconds(member)
        times = {}
        for member, seconds in reaped.items():
            with self._unless_gone():
                key = ProcessKey(member.pid, member.create_time())
                times[key] = CpuTimes(_own_seconds(member), seconds)
        return times

    def memory_percent(self) -> float:
        """Return resident memory of all members in percent of the machine's.

        Pages that members share are counted once for each of them.
        """
        resident = 0
        for member in self.members():
            with self._unless_gone():
                resident += member.memory_info().rss
        return 100.0 * resident / float(self._psutil.virtual_memory().total)

    def pids(self) -> list[int]:
        """Return the process numbers of the members."""
        return [member.pid for member in self.members()]

    def _reaped_seconds(self, member: Any) -> float:
        if not self._children:
            return 0.0
        times = member.cpu_times()
        return float(getattr(times, "children_user", 0.0) + getattr(times, "children_system", 0.0))

    def _unless_gone(self) -> contextlib.suppress:
        """Leave out a member that ended meanwhile, or that belongs to somebody else."""
        return contextlib.suppress(self._psutil.NoSuchProcess, self._psutil.AccessDenied)


def _own_seconds(member: Any) -> float:
    """Return the processor time of one process, without its children.

    Linux has a clock for every process, exact to the nanosecond where /proc counts
    in steps of 10 ms; its number is what clock_getcpuclockid(3) returns.
    """
    if sys.platform == "linux":
        try:
            return time.clock_gettime((~member.pid << 3) | 2)
        except OSError:
            pass
    times = member.cpu_times()
    return float(times.user + times.system)


class NetworkBytes(NamedTuple):
    """A pair of counters, or of differences of them."""

    sent: int
    received: int


class NamespaceTraffic:
    """NetworkBytes of all interfaces since the last reading.

    Where traffic passes several interfaces (a bridge and the card behind it) each counts it.
    """

    def __init__(self, pid: int, *, loopback: bool, proc: str | os.PathLike[str] = "/proc") -> None:
        self._pid = pid
        self._loopback = loopback
        self._proc = Path(proc)
        self._before = self._counters()

    def read(self) -> NetworkBytes:
        """Return the bytes since the last reading."""
        now = self._counters()
        # One that appeared has no difference yet; one that started again counts from zero.
        grown = _grown({name: now[name] for name in now if name in self._before}, self._before)
        self._before = now
        return grown

    def _counters(self) -> Mapping[str, NetworkBytes]:
        counters = self._from_proc() if sys.platform == "linux" else _from_psutil()
        if self._loopback:
            return counters
        return {name: counter for name, counter in counters.items() if not _is_loopback(name)}

    def _from_proc(self) -> dict[str, NetworkBytes]:
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
            counters[name.strip()] = NetworkBytes(sent=int(numbers[8]), received=int(numbers[0]))
        return counters


def namespace_scope(pid: int, *, loopback: bool) -> str:
    """Return in words whose traffic `NamespaceTraffic` measures."""
    kept = "loopback included" if loopback else "loopback left out"
    if sys.platform != "linux":
        return f"all processes of the machine, {kept}"
    namespace = os.readlink(f"/proc/{pid}/ns/net")
    return f"all processes of the network namespace {namespace}, {kept}"


def _from_psutil() -> dict[str, NetworkBytes]:
    counters = optional.require("psutil", "network metrics").net_io_counters(pernic=True)
    return {
        name: NetworkBytes(sent=nic.bytes_sent, received=nic.bytes_recv)
        for name, nic in counters.items()
    }


def _grown(now: Mapping[Any, NetworkBytes], before: Mapping[Any, NetworkBytes]) -> NetworkBytes:
    """Add up what counters grew by; one that is new or went back grew from zero."""
    sent = received = 0
    for key, after in now.items():
        old = before.get(key, NetworkBytes(0, 0))
        sent += after.sent - (old.sent if old.sent <= after.sent else 0)
        received += after.received - (old.received if old.received <= after.received else 0)
    return NetworkBytes(sent, received)


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
    traffic: NetworkBytes


class ConnectionTraffic:
    """NetworkBytes of the TCP connections of a tree of processes since the last reading."""

    def __init__(self, tree: ProcessTree) -> None:
        if sys.platform != "linux":
            raise MonitorError("network_scope='process' must be used on Linux; 'namespace' works")
        self._tree = tree
        self._before = self._counters()

    def read(self) -> NetworkBytes:
        """Return the bytes since the last reading; a new connection counts whole."""
        now = self._counters()
        grown, self._before = _grown(now, self._before), now
        return grown

    def _counters(self) -> dict[int, NetworkBytes]:
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
    traffic = NetworkBytes(0, 0)
    at = MESSAGE.size
    while at + ATTRIBUTE.size <= len(body):
        size, kind = ATTRIBUTE.unpack_from(body, at)
        if kind == INET_DIAG_INFO and size >= ATTRIBUTE.size + TCP_BYTES.size:
            traffic = NetworkBytes(*TCP_BYTES.unpack_from(body, at + ATTRIBUTE.size))
        at += max(4, (size + 3) & ~3)
    return Connection(cookie, inode, traffic)


@dataclass(frozen=True)
class Meter:
    """What reads the values of a metric by the keys of `stats`, and what ends it."""

    read: Callable[[], Mapping[str, float]]
    close: Callable[[], None] = lambda: None


def openers(pid: int, reach: Reach) -> dict[str, Callable[[], Meter]]:
    """Return what makes the meter of each metric."""

    def tree() -> ProcessTree:
        return ProcessTree(pid, children=reach.children)

    return {
        "cpu": lambda: cpu_meter(tree()),
        "memory": lambda: memory_meter(tree()),
        "network": lambda: network_meter(
            ConnectionTraffic(tree())
            if reach.network_scope == "process"
            else NamespaceTraffic(pid, loopback=reach.loopback)
        ),
        "power": lambda: power_meter(open_power(reach.sysfs)),
    }


def cpu_meter(tree: ProcessTree) -> Meter:
    """Processor time by wall-clock time in percent; 100 is one core all the time."""
    account, before = CpuAccount(tree.cpu_times()), time.monotonic()

    def read() -> Mapping[str, float]:
        nonlocal before
        used, now = account.used(tree.cpu_times()), time.monotonic()
        seconds, before = now - before, now
        return {CPU: 100.0 * used / max(seconds, 1e-9)}

    return Meter(read)


def memory_meter(tree: ProcessTree) -> Meter:
    """Resident memory in percent of the machine's, now."""
    return Meter(lambda: {MEMORY: tree.memory_percent()})


def network_meter(traffic: NamespaceTraffic | ConnectionTraffic) -> Meter:
    """Bytes sent and received since the last reading."""
    return Meter(lambda: dict(zip((BYTES_SENT, BYTES_RECV), traffic.read(), strict=True)))


def network_scope(pid: int, reach: Reach) -> str:
    """Return in words whose traffic is measured when `pid` is monitored."""
    if reach.network_scope == "process":
        return SCOPE
    return namespace_scope(pid, loopback=reach.loopback)


def power_meter(sources: list[PowerSource]) -> Meter:
    """Milliwatts of some sources, added up by the public keys."""

    def read() -> Mapping[str, float]:
        power: dict[str, float] = {}
        for source in sources:
            for key, milliwatts in source.read().items():
                power[key] = power.get(key, 0.0) + milliwatts
        return power

    def close() -> None:
        for source in sources:
            source.close()

    return Meter(read, close)


class Sampler:
    """Takes samples of a process; the first one covers the time since it was made."""

    def __init__(self, pid: int, reach: Reach, metrics: Metrics) -> None:
        self._openers = openers(pid, reach)
        self._meters: dict[str, Meter] = {}
        self.switch(metrics)
        self._time = time.monotonic()

    def switch(self, metrics: Metrics) -> None:
        """Open and close meters; when one cannot be opened, all stays as it was."""
        wanted = [name for name, on in asdict(metrics).items() if on]
        added: dict[str, Meter] = {}
        try:
            for name in wanted:
                if name not in self._meters:
                    added[name] = self._openers[name]()
        except BaseException:
            _close(added)
            raise
        dropped = {name: meter for name, meter in self._meters.items() if name not in wanted}
        kept = {name: meter for name, meter in self._meters.items() if name in wanted}
        self._meters = {**kept, **added}
        _close(dropped)

    def read(self) -> Sample:
        """Return a sample over the time since the last one."""
        values: dict[str, float] = {}
        for meter in self._meters.values():
            values.update(meter.read())
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        return Sample(time.time(), seconds, values)

    def close(self) -> None:
        """Close every meter."""
        meters, self._meters = self._meters, {}
        _close(meters)


def _close(meters: dict[str, Meter]) -> None:
    for meter in meters.values():
        meter.close()
