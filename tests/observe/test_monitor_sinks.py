"""Where samples go: a file, a real Prometheus scrape, a real HTTP server."""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path
from types import ModuleType

import pytest
from monitor_tools import hwmon_chip, write_tree
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from fedquilt.errors import StorageError
from fedquilt.monitor import DeliveryError, MonitorError, thread_monitor
from fedquilt.observe import monitors
from fedquilt.observe.monitors import CLOSE_SECONDS, LatestSample, PrometheusSink
from fedquilt.observe.samples import Sample
from http_receiver import Receiver, wait_until

LINE = re.compile(
    r"CPU Usage: [\d.]+%, Memory Usage: [\d.]+%, Bytes Sent: \d+, Bytes Recv: \d+, "
    r"Seconds: [\d.]+"
)


def scrape(port: int) -> dict[str, float]:
    """Fetch and parse the metrics as Prometheus does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        text = answer.read().decode()
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_the_file_has_the_time_and_a_line_for_each_sample(kind: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "usage.txt"
    for _ in range(2):
        with kind.FileMonitor(file, interval=0.05) as monitor:
            wait_until(lambda: len(monitor.stats()["cpu_usage"]) >= 2)
    lines = file.read_text().splitlines()
    heads = [number for number, line in enumerate(lines) if not LINE.fullmatch(line)]
    assert len(heads) == 2
    assert heads[0] == 0
    began = [datetime.strptime(lines[head], "%Y-%m-%d %H:%M:%S") for head in heads]
    assert abs((datetime.now() - began[0]).total_seconds()) < 30
    assert len(lines) - heads[1] - 1 == len(monitor.stats()["cpu_usage"])


def test_a_relative_file_is_where_the_monitor_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monitor = thread_monitor.FileMonitor("usage.txt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with monitor:
        pass
    assert (tmp_path / "usage.txt").exists()


def test_a_full_disk_surfaces(kind: ModuleType) -> None:
    monitor = kind.FileMonitor("/dev/full")
    with pytest.raises(StorageError, match="cannot write '/dev/full': the disk is full"):
        monitor.start()
    assert not monitor.running


def test_prometheus_scrapes_the_latest_sample(kind: ModuleType, tmp_path: Path) -> None:
    write_tree(tmp_path, hwmon_chip(0, VDD_IN=(5000, 900)))
    monitor = kind.PrometheusMonitor(0, 0.05, address="127.0.0.1", sysfs=tmp_path)
    assert monitor.port == 0
    monitor.set_metrics(power=True, cpu=False)
    with monitor:
        assert monitor.port > 0
        wait_until(lambda: scrape(monitor.port)["monitor_samples_total"] >= 2)
        metrics = scrape(monitor.port)
    stats, summary = monitor.stats(), monitor.summary()
    assert metrics["memory_usage"] in stats["memory_usage"]
    assert metrics["bytes_sent"] in stats["network_bytes_sent"]
    assert metrics["bytes_recv"] in stats["network_bytes_recv"]
    assert metrics["network_bytes_recv_total"] <= summary["total_network_bytes_recv"]
    assert metrics["vdd_in"] == 4500.0
    assert 0 < metrics["energy_vdd_in_joules_total"] <= summary["total_power_vdd_in"] / 1000
    # What is not measured is not shown as zero.
    assert not {"cpu_usage", "vdd_soc"} & set(metrics)


def test_the_help_says_whose_bytes_they_are() -> None:
    latest = LatestSample("all processes of the town")
    latest.update(Sample(0.0, 1.0, {"network_bytes_sent": 5}))
    latest.update(Sample(1.0, 1.0, {"network_bytes_sent": 7, "power_vdd_in": 2000.0}))
    families = {family.name: family for family in latest.collect()}
    assert families["bytes_sent"].documentation.endswith("by all processes of the town.")
    assert families["bytes_sent"].samples[0].value == 7
    assert families["network_bytes_sent"].samples[0].value == 12
    assert families["energy_vdd_in_joules"].samples[0].value == pytest.approx(2.0)


def test_two_prometheus_monitors_do_not_clash() -> None:
    before = set(REGISTRY._names_to_collectors)
    with (
        thread_monitor.PrometheusMonitor(0, 0.05, address="127.0.0.1") as first,
        thread_monitor.PrometheusMonitor(0, 0.05, address="127.0.0.1") as second,
    ):
        assert first.port != second.port
        for monitor in (first, second):
            wait_until(lambda: "cpu_usage" in scrape(monitor.port))  # noqa: B023
    assert set(REGISTRY._names_to_collectors) == before


def test_the_port_is_free_again_after_stop(kind: ModuleType) -> None:
    port = free_port()
    monitor = kind.PrometheusMonitor(port, address="127.0.0.1")
    for _ in range(2):
        monitor.start()
        assert scrape(port) == {"monitor_samples_total": 0.0}
        monitor.stop()
        with pytest.raises(urllib.error.URLError):
            scrape(port)


def test_a_port_that_is_taken_is_named(kind: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monitor = kind.PrometheusMonitor(port, address="127.0.0.1")
        with pytest.raises(MonitorError, match=f"cannot listen on address='127.0.0.1' port={port}"):
            monitor.start()


def test_connections_that_ask_nothing_are_dropped_without_a_word(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port scan: connect and go, say half a word and go, say nothing and stay."""
    monkeypatch.setattr(monitors, "IDLE_SECONDS", 0.2, raising=False)
    with thread_monitor.PrometheusMonitor(0, address="127.0.0.1") as monitor:
        before = threading.active_count()
        with socket.create_connection(("127.0.0.1", monitor.port)) as silent:
            for said in (b"", b"GET", b"\x16\x03\x01garbage\r\n\r\n", b"GET /metrics HTTP/1.0\r\n"):
                with socket.create_connection(("127.0.0.1", monitor.port)) as scanner:
                    scanner.sendall(said)
                    linger = struct.pack("ii", 1, 0)  # closing it breaks the connection
                    scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            silent.settimeout(10)
            assert silent.recv(1) == b""
        wait_until(lambda: threading.active_count() <= before)
        assert scrape(monitor.port)["monitor_samples_total"] >= 0
    assert capfd.readouterr().err == ""


def test_prometheus_over_version_six() -> None:
    try:
        sink = PrometheusSink("::1", 0, "nobody")
    except MonitorError:
        pytest.skip("no IPv6 here")
    with urllib.request.urlopen(f"http://[::1]:{sink.port}/metrics", timeout=5) as answer:
        assert b"monitor_samples_total 0.0" in answer.read()
    sink.close()


def test_a_remote_server_gets_every_sample_as_text(kind: ModuleType, receiver: Receiver) -> None:
    with kind.RemoteMonitor(receiver.host, 0.05, identifier="client-A") as monitor:
        wait_until(lambda: len(receiver.forms) >= 2)
    assert len(receiver.forms) == len(monitor.stats()["cpu_usage"])
    for path, fields in receiver.forms:
        assert path == "/simple_log"
        assert set(fields) == {"identifier", "message"}
        assert fields["identifier"] == "client-A"
        assert LINE.fullmatch(fields["message"])


def test_a_remote_server_gets_every_sample_as_a_record(
    kind: ModuleType, receiver: Receiver
) -> None:
    with kind.RemoteMonitor(receiver.host, 5, simple=False) as monitor:
        time.sleep(0.01)
    ((path, fields),) = receiver.forms
    assert path == "/log"
    assert fields["identifier"] == monitor.identifier
    assert (fields["name"], fields["levelname"]) == ("fedquilt.monitor", "INFO")
    assert LINE.fullmatch(fields["message"])
    stats = monitor.stats()
    for key in ("cpu_usage", "memory_usage", "network_bytes_sent", "network_bytes_recv"):
        assert float(fields[key]) == stats[key][0]
    assert float(fields["seconds"]) >= 0.01
    assert abs(float(fields["time"]) - time.time()) < 30


def test_an_outage_loses_no_sample(receiver: Receiver) -> None:
    receiver.statuses = [503, 503]
    with thread_monitor.RemoteMonitor(receiver.host, 0.02, simple=False) as monitor:
        wait_until(lambda: len(receiver.forms) >= 3)
    assert [float(fields["cpu_usage"]) for _, fields in receiver.forms] == (
        monitor.stats()["cpu_usage"]
    )


def test_a_server_that_is_not_there_surfaces_and_costs_no_sample(kind: ModuleType) -> None:
    monitor = kind.RemoteMonitor(f"127.0.0.1:{free_port()}", 0.05)
    monitor.start()
    wait_until(lambda: len(monitor.stats()["cpu_usage"]) >= 2)
    began = time.monotonic()
    with pytest.raises(DeliveryError, match=r"of \d+ samples were not delivered .*refused"):
        monitor.stop()
    assert time.monotonic() - began < CLOSE_SECONDS, "there was nothing to wait for"
    assert len(monitor.stats()["cpu_usage"]) >= 3


def test_a_server_that_hangs_holds_up_stop_for_a_bounded_time(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedquilt.observe.monitors.CLOSE_SECONDS", 0.2)
    receiver.pause.clear()
    monitor = thread_monitor.RemoteMonitor(receiver.host, 0.02)
    monitor.start()
    wait_until(lambda: len(monitor.stats()["cpu_usage"]) >= 5)
    began = time.monotonic()
    with pytest.raises(DeliveryError):
        monitor.stop()
    assert 0.1 < time.monotonic() - began < 5, "half of what the server takes"
