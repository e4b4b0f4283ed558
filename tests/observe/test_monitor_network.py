"""NetworkBytes of a network namespace, and of the connections of a process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from fedquilt.observe.meters import (
    ConnectionTraffic,
    NamespaceTraffic,
    NetworkBytes,
    ProcessTree,
    connections,
)
from fedquilt.observe.samples import MonitorError

MEGABYTE = 1_000_000

HEADING = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
"""

TALK = """
import socket
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
near.sendall(bytes(100_000))
got = 0
while got < 100_000: got += len(far.recv(65536))
print("sent", flush=True)
input()
"""


def write_counters(proc: Path, **interfaces: tuple[int, int]) -> None:
    """Write net/dev of process 1 with (received, sent) for each interface."""
    lines = [
        f"{name:>6}: {received} 9 8 7 6 5 4 3 {sent} 2 1 0 0 0 0 0\n"
        for name, (received, sent) in interfaces.items()
    ]
    file = proc / "1" / "net" / "dev"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(HEADING + "".join(lines))


def transfer(size: int) -> None:
    """Send bytes from this process to itself over loopback."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        move(near, far, size)


def move(near: socket.socket, far: socket.socket, size: int) -> None:
    """Send bytes from one socket and read them from the other."""
    left = size
    while left:
        near.sendall(bytes(min(left, 50_000)))
        block = min(left, 50_000)
        while block:
            got = len(far.recv(block))
            block -= got
            left -= got


def test_differences_of_all_interfaces(tmp_path: Path) -> None:
    write_counters(tmp_path, lo=(100, 100), eth0=(1000, 500))
    traffic = NamespaceTraffic(1, loopback=True, proc=tmp_path)
    write_counters(tmp_path, lo=(107, 107), eth0=(1030, 511))
    assert traffic.read() == NetworkBytes(sent=7 + 11, received=7 + 30)
    assert traffic.read() == NetworkBytes(0, 0)


def test_loopback_can_be_left_out(tmp_path: Path) -> None:
    write_counters(tmp_path, lo=(100, 100), eth0=(1000, 500))
    traffic = NamespaceTraffic(1, loopback=False, proc=tmp_path)
    write_counters(tmp_path, lo=(107, 107), eth0=(1030, 511))
    assert traffic.read() == NetworkBytes(sent=11, received=30)


def test_interfaces_that_come_go_and_start_again(tmp_path: Path) -> None:
    write_counters(tmp_path, eth0=(1000, 500), wlan0=(50, 50))
    traffic = NamespaceTraffic(1, loopback=True, proc=tmp_path)
    write_counters(tmp_path, eth0=(20, 10), tun0=(7000, 7000))
    assert traffic.read() == NetworkBytes(sent=10, received=20)
    write_counters(tmp_path, eth0=(20, 10), tun0=(7001, 7002))
    assert traffic.read() == NetworkBytes(sent=2, received=1)


def test_counters_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(MonitorError, match=r"network counters '.*/1/net/dev' cannot be read"):
        NamespaceTraffic(1, loopback=True, proc=tmp_path)


def test_the_namespaces_traffic_holds_a_real_transfer(kind: ModuleType, tmp_path: Path) -> None:
    with kind.FileMonitor(tmp_path / "usage.txt") as monitor:
        transfer(MEGABYTE)
    summary = monitor.summary()
    # The kernel counts headers too, and everybody else of this namespace.
    assert summary["total_network_bytes_sent"] >= MEGABYTE
    assert summary["total_network_bytes_recv"] >= MEGABYTE
    inode = os.stat("/proc/self/ns/net").st_ino
    assert monitor.network_scope == (
        f"all processes of the network namespace net:[{inode}], loopback included"
    )


def test_the_connections_of_this_process_are_counted_exactly() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
    ):
        traffic = ConnectionTraffic(ProcessTree(os.getpid(), children=False))
        move(near, far, MEGABYTE)
        time.sleep(0.05)  # the last acknowledgement may be held back for 40 ms
        assert traffic.read() == NetworkBytes(MEGABYTE, MEGABYTE)
        assert traffic.read() == NetworkBytes(0, 0)
        move(far, near, 1234)
        assert traffic.read().received == 1234


def test_version_six_connections_count_too() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("no IPv6 here")
    traffic = ConnectionTraffic(ProcessTree(os.getpid(), children=False))
    with (
        server,
        socket.create_connection(server.getsockname()[:2]) as near,
        server.accept()[0] as far,
    ):
        move(near, far, 5000)
        assert traffic.read().received == 5000


def test_other_processes_connections_count_only_when_they_are_children() -> None:
    alone = ConnectionTraffic(ProcessTree(os.getpid(), children=False))
    whole = ConnectionTraffic(ProcessTree(os.getpid(), children=True))
    with subprocess.Popen(
        [sys.executable, "-c", TALK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert whole.read().received == 100_000
        assert alone.read() == NetworkBytes(0, 0)
        child.communicate("\n")


def test_the_kernel_lists_our_connection_with_its_inode() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0],
    ):
        inodes = {one.inode for one in connections()}
        assert os.fstat(near.fileno()).st_ino in inodes
        assert os.fstat(server.fileno()).st_ino in inodes


def test_a_monitor_of_the_process_alone(kind: ModuleType, tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as near,
        server.accept()[0] as far,
        kind.FileMonitor(
            tmp_path / "usage.txt", network_scope="process", children=False
        ) as monitor,
    ):
        move(near, far, MEGABYTE)
        time.sleep(0.05)
    assert monitor.summary()["total_network_bytes_recv"] == MEGABYTE
    assert monitor.summary()["total_network_bytes_sent"] == MEGABYTE
    assert monitor.network_scope == "TCP connections of the monitored processes"
