"""Start, stop, failure: what is promised about the life of a monitor."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from monitor_tools import rapl_zone, wakefulness, write_tree

from fedquilt.errors import FedquiltError, MissingPackageError
from fedquilt.monitor import MonitorError, process_monitor, thread_monitor
from http_receiver import wait_until
from run_processes import environment

ABANDON = """
import sys, time
from fedquilt.monitor.process_monitor import FileMonitor
monitor = FileMonitor(sys.argv[1], interval=0.05)
monitor.start()
print(monitor._runner._child.process.pid, flush=True)
{then}
"""


def run_python(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def has_ended(pid: int) -> bool:
    """Whether a process has ended, even if nobody has asked for its exit code yet."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_stop_is_prompt_and_a_short_run_has_its_sample(kind: ModuleType, tmp_path: Path) -> None:
    monitor = kind.FileMonitor(tmp_path / "usage.txt", interval=60)
    began = time.monotonic()
    monitor.start()
    time.sleep(0.1)
    stopping = time.monotonic()
    monitor.stop()
    ended = time.monotonic()
    assert ended - stopping < 6, "a tenth of the interval"
    assert not monitor.running
    stats = monitor.stats()
    for key in ("cpu_usage", "memory_usage", "network_bytes_sent", "network_bytes_recv"):
        assert len(stats[key]) == 1
    assert stats["memory_usage"][0] > 0
    (sample,) = monitor._series._samples
    assert 0.1 <= sample.seconds <= ended - began


def test_prometheus_stops_promptly_too(kind: ModuleType) -> None:
    monitor = kind.PrometheusMonitor(0, interval=60, address="127.0.0.1")
    monitor.start()
    began = time.monotonic()
    monitor.stop()
    assert time.monotonic() - began < 6, "a tenth of the interval"


def test_samples_come_at_equal_intervals(tmp_path: Path) -> None:
    monitor = thread_monitor.FileMonitor(tmp_path / "usage.txt", interval=0.1)
    with wakefulness() as late, monitor:
        wait_until(lambda: len(monitor.stats()["cpu_usage"]) >= 5)
    times = [sample.time for sample in monitor._series._samples]
    # The fifth is 0.4 s after the first: lateness does not add up.
    assert times[4] - times[0] == pytest.approx(0.4, abs=0.05 + max(late))


def test_start_and_stop_again_and_again(kind: ModuleType, tmp_path: Path) -> None:
    monitor = kind.FileMonitor(tmp_path / "usage.txt")
    monitor.stop()
    assert monitor.stats()["cpu_usage"] == []
    monitor.start()
    runner = monitor._runner
    monitor.start()
    assert monitor._runner is runner
    time.sleep(0.01)
    monitor.stop()
    monitor.stop()
    assert len(monitor.stats()["cpu_usage"]) == 1
    with monitor:
        time.sleep(0.01)
    assert len(monitor.stats()["cpu_usage"]) == 2


def test_stats_can_be_read_while_it_runs(kind: ModuleType, tmp_path: Path) -> None:
    with kind.FileMonitor(tmp_path / "usage.txt", interval=0.05) as monitor:
        wait_until(lambda: len(monitor.stats()["cpu_usage"]) >= 2)
        assert monitor.summary()["avg_memory_usage"] > 0
        assert monitor.running


def test_metrics_can_be_switched_while_it_runs(kind: ModuleType, tmp_path: Path) -> None:
    monitor = kind.FileMonitor(tmp_path / "usage.txt", interval=5)
    monitor.set_metrics(network=False)
    with monitor:
        time.sleep(0.01)
        monitor.set_metrics(cpu=False, network=True)
        assert len(monitor.stats()["cpu_usage"]) == 1
        time.sleep(0.01)
    stats = monitor.stats()
    assert (len(stats["cpu_usage"]), len(stats["memory_usage"])) == (1, 2)
    assert len(stats["network_bytes_sent"]) == 1


def failing_monitor(kind: ModuleType, tmp_path: Path) -> thread_monitor.FileMonitor:
    """A running monitor whose power counter vanishes after some samples."""
    write_tree(tmp_path, rapl_zone("intel-rapl:0", "package-0", 5))
    monitor: thread_monitor.FileMonitor = kind.FileMonitor(
        tmp_path / "usage.txt", interval=0.05, sysfs=tmp_path
    )
    monitor.set_metrics(power=True)
    monitor.start()
    wait_until(lambda: monitor.stats()["cpu_usage"])
    (tmp_path / "class" / "powercap" / "intel-rapl:0" / "energy_uj").unlink()
    wait_until(lambda: not monitor.running)
    return monitor


def test_a_failing_sampler_surfaces_on_stop(kind: ModuleType, tmp_path: Path) -> None:
    monitor = failing_monitor(kind, tmp_path)
    with pytest.raises(MonitorError, match=r"a RAPL counter can no longer be read: .*energy_uj"):
        monitor.stop()
    # Told once; the samples from before are there, and the reason too.
    monitor.stop()
    assert len(monitor.stats()["cpu_usage"]) >= 1
    assert isinstance(monitor.error, MonitorError)


@pytest.mark.parametrize("call", ["stats", "summary", "start"])
def test_a_failing_sampler_surfaces_elsewhere_too(call: str, tmp_path: Path) -> None:
    monitor = failing_monitor(thread_monitor, tmp_path)
    with pytest.raises(MonitorError, match="a RAPL counter can no longer be read"):
        getattr(monitor, call)()
    monitor.stop()


def test_an_unforeseen_error_surfaces_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor = thread_monitor.FileMonitor(tmp_path / "usage.txt", interval=0.02)
    monitor.start()

    def broken(self: object) -> float:
        raise ZeroDivisionError("sensor on fire")

    monkeypatch.setattr("fedquilt.observe.meters.ProcessTree.memory_percent", broken)
    wait_until(lambda: not monitor.running)
    with pytest.raises(MonitorError, match="ZeroDivisionError: sensor on fire") as raised:
        monitor.stop()
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_a_killed_sampler_surfaces(tmp_path: Path) -> None:
    others = set(psutil.Process().children())
    monitor = process_monitor.FileMonitor(tmp_path / "usage.txt", interval=0.05)
    monitor.start()
    (sampler,) = set(psutil.Process().children()) - others
    sampler.kill()
    wait_until(lambda: not monitor.running)
    with pytest.raises(MonitorError, match="the sampler's process ended with code -9"):
        monitor.stats()


def test_a_sampler_that_cannot_start_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monitor = process_monitor.FileMonitor(tmp_path / "usage.txt")
    # Without its path the other interpreter does not find what it needs.
    monkeypatch.setenv("PYTHONHOME", str(tmp_path))
    with pytest.raises(MonitorError, match=r"ended with code 1: .*[Pp]ython") as raised:
        monitor.start()
    assert "it said nothing" not in str(raised.value)


def test_an_error_of_the_block_is_not_hidden(tmp_path: Path) -> None:
    monitor = failing_monitor(thread_monitor, tmp_path)
    mine = KeyError("mine")
    monitor.__exit__(KeyError, mine, None)
    assert any("its monitor failed too: a RAPL counter" in note for note in mine.__notes__)
    assert not monitor.running


def test_a_context_manager_surfaces_a_failure(tmp_path: Path) -> None:
    write_tree(tmp_path, rapl_zone("intel-rapl:0", "package-0", 5))
    monitor = thread_monitor.FileMonitor(tmp_path / "usage.txt", interval=5, sysfs=tmp_path)
    monitor.set_metrics(power=True)
    counter = tmp_path / "class" / "powercap" / "intel-rapl:0" / "energy_uj"
    with pytest.raises(FedquiltError, match="a RAPL counter"), monitor:
        counter.unlink()


def test_a_sampler_ends_with_a_program_that_is_killed(tmp_path: Path) -> None:
    with run_python(ABANDON.format(then="time.sleep(60)"), str(tmp_path / "usage.txt")) as program:
        assert program.stdout is not None
        sampler = int(program.stdout.readline())
        assert not has_ended(sampler)
        # Ctrl-C of the terminal reaches the program's group, not its sampler.
        assert os.getpgid(sampler) != os.getpgid(program.pid)
        program.send_signal(signal.SIGKILL)
    wait_until(lambda: has_ended(sampler))


def test_a_sampler_ends_with_a_program_that_forgot_to_stop_it(tmp_path: Path) -> None:
    usage = tmp_path / "usage.txt"
    waits = "while open(sys.argv[1]).read().count(chr(10)) < 3: time.sleep(0.02)"
    usage.touch()
    with run_python(ABANDON.format(then=waits), str(usage)) as program:
        output, errors = program.communicate()
    wait_until(lambda: has_ended(int(output)))
    assert program.returncode == 0
    assert errors == ""
    assert len(usage.read_text().splitlines()) > 2


@pytest.mark.parametrize(
    ("module", "make"),
    [
        ("psutil", lambda: thread_monitor.FileMonitor("unused.txt")),
        ("prometheus_client", lambda: thread_monitor.PrometheusMonitor(0, address="127.0.0.1")),
    ],
)
def test_a_missing_package_names_the_extra(
    module: str, make: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(sys.modules):
        if name.split(".")[0] == module:
            monkeypatch.setitem(sys.modules, name, None)
    monitor = make()  # type: ignore[operator]
    package = module.replace("_", "-")
    told = rf"needs the package {package}, .* pip install 'fedquilt\[monitor\]'"
    with pytest.raises(MissingPackageError, match=told):
        monitor.start()


def test_importing_loads_nothing_optional() -> None:
    script = (
        "import sys, fedquilt.monitor, fedquilt.observe.runners, fedquilt.log\n"
        "print([m for m in ('psutil', 'prometheus_client', 'pynvml', 'torch', 'numpy')"
        " if m in sys.modules])"
    )
    with run_python(script) as program:
        assert program.communicate() == ("[]\n", "")
