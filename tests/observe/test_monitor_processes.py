"""Processor time and memory of a process and of what it started."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from monitor_tools import burn, busy_thread

from fedquilt.monitor.thread_monitor import FileMonitor
from fedquilt.observe.processes import CpuAccount, CpuTimes, ProcessKey, ProcessTree
from fedquilt.observe.samples import MonitorError

ROOT, CHILD, OTHER = ProcessKey(1, 0.0), ProcessKey(2, 1.0), ProcessKey(3, 1.0)

BURN = """
import time
while time.process_time() < {seconds}: sum(range(1000))
print("burnt", flush=True)
{then}
"""


def burner(seconds: float, then: str = "") -> subprocess.Popen[str]:
    """Start a child that uses some processor time."""
    script = BURN.format(seconds=seconds, then=then)
    return subprocess.Popen(
        [sys.executable, "-S", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_time_of_those_who_are_there_grows() -> None:
    account = CpuAccount({ROOT: CpuTimes(10.0, 3.0), CHILD: CpuTimes(5.0, 0.0)})
    now = {ROOT: CpuTimes(10.5, 3.0), CHILD: CpuTimes(5.25, 0.0), OTHER: CpuTimes(2.0, 0.0)}
    # A new child counts from its beginning.
    assert account.used(now) == pytest.approx(0.5 + 0.25 + 2.0)
    assert account.used(now) == 0.0


def test_an_ended_child_counts_what_was_not_counted_before() -> None:
    account = CpuAccount({ROOT: CpuTimes(10.0, 3.0), CHILD: CpuTimes(5.0, 1.0)})
    # It used 0.75 s more and was reaped with its whole life: 5.75 + 1 of its own child.
    assert account.used({ROOT: CpuTimes(10.0, 3.0 + 6.75)}) == pytest.approx(0.75)


def test_a_child_that_lived_between_two_readings_counts_whole() -> None:
    account = CpuAccount({ROOT: CpuTimes(10.0, 0.0)})
    assert account.used({ROOT: CpuTimes(10.1, 4.0)}) == pytest.approx(4.1)


def test_a_child_that_ends_within_a_reading_is_not_counted_twice() -> None:
    account = CpuAccount({ROOT: CpuTimes(0.0, 0.0), CHILD: CpuTimes(100.0, 0.0)})
    assert account.used({ROOT: CpuTimes(0.1, 0.0)}) == pytest.approx(0.1)
    assert account.used({ROOT: CpuTimes(0.2, 100.5)}) == pytest.approx(0.1 + 0.5)


def test_a_child_that_left_the_tree_hides_nothing_later() -> None:
    account = CpuAccount({ROOT: CpuTimes(0.0, 0.0), CHILD: CpuTimes(100.0, 0.0)})
    assert account.used({ROOT: CpuTimes(0.5, 0.0)}) == pytest.approx(0.5)
    assert account.used({ROOT: CpuTimes(1.0, 0.0)}) == pytest.approx(0.5)
    assert account.used({ROOT: CpuTimes(1.0, 2.0)}) == pytest.approx(2.0)


def test_a_reused_number_is_another_process() -> None:
    account = CpuAccount({ProcessKey(2, 1.0): CpuTimes(9.0, 0.0)})
    assert account.used({ProcessKey(2, 5.0): CpuTimes(0.5, 0.0)}) == pytest.approx(0.5)


def test_the_processor_time_of_this_process_is_exact() -> None:
    tree = ProcessTree(os.getpid(), children=False)
    account = CpuAccount(tree.cpu_times())
    began = time.process_time()
    burn(0.05)
    used = account.used(tree.cpu_times())
    assert used == pytest.approx(time.process_time() - began, abs=0.005)
    assert used >= 0.05


def test_children_count_alive_and_after_their_end() -> None:
    tree = ProcessTree(os.getpid(), children=True)
    alone = ProcessTree(os.getpid(), children=False)
    account, own = CpuAccount(tree.cpu_times()), CpuAccount(alone.cpu_times())
    with burner(0.2, "input(); burn = time.process_time() + 0.1\n" + BURN_MORE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "burnt\n"
        alive = account.used(tree.cpu_times()) - own.used(alone.cpu_times())
        assert alive == pytest.approx(0.2, abs=0.05)
        assert child.pid in tree.pids()
        child.communicate("\n")
    ended = account.used(tree.cpu_times()) - own.used(alone.cpu_times())
    assert ended == pytest.approx(0.1, abs=0.05)


BURN_MORE = "while time.process_time() < burn: sum(range(1000))"


def test_memory_is_resident_memory_by_the_machines() -> None:
    tree = ProcessTree(os.getpid(), children=False)
    before = tree.memory_percent()
    block = bytearray(os.urandom(1)) * (64 << 20)
    grown = (tree.memory_percent() - before) * psutil.virtual_memory().total / 100
    assert grown == pytest.approx(len(block), rel=0.1)


def test_memory_of_children_is_added() -> None:
    others = sum(child.memory_info().rss for child in psutil.Process().children(recursive=True))
    with burner(0.0, "block = b'x' * (64 << 20); print('held', flush=True); input()") as child:
        assert child.stdout is not None
        child.stdout.readline()
        child.stdout.readline()
        total = psutil.virtual_memory().total / 100
        whole = ProcessTree(os.getpid(), children=True).memory_percent() * total
        alone = ProcessTree(os.getpid(), children=False).memory_percent() * total
        added = whole - alone - others
        assert added == pytest.approx(psutil.Process(child.pid).memory_info().rss, rel=0.1)
        assert added > 64 << 20
        child.communicate("\n")


def test_a_process_that_is_not_there_is_named() -> None:
    with burner(0.0) as child:
        tree = ProcessTree(child.pid, children=True)
    with pytest.raises(MonitorError, match=f"the monitored process {child.pid} has ended"):
        tree.members()
    with pytest.raises(MonitorError, match=f"pid={child.pid} must be a running process"):
        ProcessTree(child.pid, children=True)


def test_a_busy_thread_is_seen_from_the_first_sample_on(kind: ModuleType, tmp_path: Path) -> None:
    monitor = kind.FileMonitor(tmp_path / "usage.txt", interval=0.1, children=False)
    with busy_thread():
        monitor.start()
        clock, processor = time.monotonic(), time.process_time()
        time.sleep(0.3)
        monitor.stop()
        clock, processor = time.monotonic() - clock, time.process_time() - processor
    usage = monitor.stats()["cpu_usage"]
    assert len(usage) >= 3
    assert usage[0] > 20.0
    # An independent clock agrees on the load of the whole time.
    assert monitor.summary()["avg_cpu_usage"] == pytest.approx(100 * processor / clock, rel=0.15)


def test_an_idle_process_is_seen_idle(tmp_path: Path) -> None:
    with FileMonitor(tmp_path / "usage.txt", interval=5, children=False) as monitor:
        time.sleep(0.2)
    assert monitor.summary()["avg_cpu_usage"] < 20.0


def test_the_samplers_own_process_is_left_out(tmp_path: Path) -> None:
    from fedquilt.monitor.process_monitor import FileMonitor as ProcessFileMonitor

    others = set(psutil.Process().children())
    with ProcessFileMonitor(tmp_path / "usage.txt", interval=0.01) as monitor:
        (sampler,) = set(psutil.Process().children()) - others
        before = time.process_time()
        time.sleep(0.5)
        own = time.process_time() - before
        spent = sum(sampler.cpu_times()[:2])
    assert len(monitor.stats()["cpu_usage"]) > 5
    used = monitor.summary()["avg_cpu_usage"] / 100 * 0.5
    assert used < own + spent  # the sampler's start alone costs more than what it watches
