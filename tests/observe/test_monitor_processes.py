"""Processor time and memory of a process and of what it started."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from monitor_tools import burn

from fedquilt.monitor.thread_monitor import FileMonitor
from fedquilt.observe.meters import CpuAccount, CpuTimes, ProcessKey, ProcessTree
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
    size = 64 << 20
    # Straight from the kernel: the allocator may still hold what other tests gave back.
    with mmap.mmap(-1, size) as block:
        before = tree.memory_percent()
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
        grown = (tree.memory_percent() - before) * psutil.virtual_memory().total / 100
    assert grown == pytest.approx(size, rel=0.1)


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


def seconds_used(monitor: Any) -> list[float]:
    """Return the processor time that each sample saw."""
    usage, samples = monitor.stats()["cpu_usage"], monitor._series._samples
    return [share / 100 * sample.seconds for share, sample in zip(usage, samples, strict=True)]


@pytest.mark.parametrize(("interval", "count"), [(60, 1), (0.05, 3)])
def test_a_busy_process_is_seen_from_the_first_sample_on(
    kind: ModuleType, tmp_path: Path, interval: float, count: int
) -> None:
    """Against this process's own clock of processor time, however much of a core it gets."""
    monitor = kind.FileMonitor(tmp_path / "usage.txt", interval=interval, children=False)
    before = time.process_time()
    monitor.start()
    burnt = burn(0.1)
    while len(monitor.stats()["cpu_usage"]) < count - 1:
        burnt += burn(0.02)
    monitor.stop()
    spent = time.process_time() - before
    used = seconds_used(monitor)
    assert len(used) >= count
    # Another process reads this one's clock in hundredths of a second.
    assert burnt - 0.02 <= sum(used) <= spent + 0.02


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
