"""Metrics that are switched, samples as text, and the arithmetic of stats and summary."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from fedquilt.errors import InvalidValueError
from fedquilt.monitor.thread_monitor import FileMonitor, PrometheusMonitor, RemoteMonitor
from fedquilt.observe.delivery import Address
from fedquilt.observe.samples import KEYS, Metrics, Reach, Sample, SampleSeries, SamplingSettings


def test_the_defaults_are_the_documented_ones() -> None:
    assert Metrics() == Metrics(cpu=True, memory=True, network=True, power=False)


def test_metrics_not_named_stay_as_they_are() -> None:
    first = Metrics().switched({"cpu": False})
    assert first.switched({"power": True}) == Metrics(False, True, True, True)


@pytest.mark.parametrize("flags", [{"gpu": True}, {"cpu": False, "gpus": True}])
def test_an_unknown_metric_is_a_value_error(flags: dict[str, bool]) -> None:
    monitor = FileMonitor("unused.txt")
    with pytest.raises(ValueError, match=r"metric='gpus?' must be one of 'cpu', 'memory'"):
        monitor.set_metrics(**flags)
    assert monitor._metrics == Metrics()


@pytest.mark.parametrize("value", [1, "yes", None, 0.0])
def test_a_value_that_is_no_truth_value_is_a_type_error(value: object) -> None:
    monitor = FileMonitor("unused.txt")
    with pytest.raises(TypeError, match=r"memory=.* must be True or False"):
        monitor.set_metrics(cpu=False, memory=value)  # type: ignore[arg-type]
    assert monitor._metrics == Metrics()


def test_stats_and_summary_by_hand() -> None:
    series = SampleSeries()
    series.append(Sample(1.0, 2.0, {"cpu_usage": 50.0, "network_bytes_sent": 7}))
    series.append(
        Sample(3.0, 0.5, {"cpu_usage": 100.0, "network_bytes_sent": 3, "power_vdd_in": 4000.0})
    )
    stats = series.stats()
    assert tuple(stats) == KEYS
    assert stats["cpu_usage"] == [50.0, 100.0]
    assert stats["network_bytes_sent"] == [7, 3]
    assert stats["power_vdd_in"] == [4000.0]
    assert stats["power_vdd_soc"] == []
    summary = series.summary()
    # (50 * 2 + 100 * 0.5) / 2.5 = 60; 4000 mW for half a second are 2000 mJ.
    assert summary["avg_cpu_usage"] == pytest.approx(60.0)
    assert summary["total_network_bytes_sent"] == 10
    assert summary["total_power_vdd_in"] == pytest.approx(2000.0)
    assert math.isnan(summary["avg_memory_usage"])
    assert set(summary) == {
        *("avg_cpu_usage", "avg_memory_usage"),
        *("total_network_bytes_sent", "total_network_bytes_recv"),
        *("total_power_vdd_in", "total_power_vdd_cpu_gpu_cv", "total_power_vdd_soc"),
    }


def test_what_stats_returns_is_the_callers_own() -> None:
    series = SampleSeries()
    series.append(Sample(1.0, 1.0, {"cpu_usage": 1.0}))
    series.stats()["cpu_usage"].clear()
    assert series.stats()["cpu_usage"] == [1.0]


def test_the_text_of_a_sample() -> None:
    values = {"network_bytes_sent": 14399, "cpu_usage": 12.345, "power_vdd_in": 4999.6}
    assert Sample(0.0, 5.0, values).text() == (
        "CPU Usage: 12.35%, Bytes Sent: 14399, VDD_IN: 5000mW, Seconds: 5.00"
    )


def test_settings_survive_the_way_to_another_process() -> None:
    monitor = RemoteMonitor("h:1", identifier="é\n'", simple=False, sysfs=Path("/s"))
    settings = SamplingSettings(7, 0.5, Metrics(power=True), monitor._reach, monitor._sink())
    arrived = pickle.loads(pickle.dumps(settings))
    assert arrived.reach == Reach(sysfs=Path("/s"))
    assert arrived.open_sink.keywords == {"simple": False, "form": "fedquilt"}
    assert arrived.open_sink.args == (Address("http", "h", 1), "é\n'")
    assert replace(arrived, open_sink=settings.open_sink) == settings


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: FileMonitor("x", interval=0), "interval=0 must be >= 0.01"),
        (lambda: FileMonitor("x", interval="5"), "interval='5' must be a number"),  # type: ignore[arg-type]
        (lambda: FileMonitor(""), "file='' must be a path"),
        (lambda: FileMonitor("x", children=1), "children=1 must be True or False"),  # type: ignore[arg-type]
        (lambda: FileMonitor("x", network_scope="host"), "network_scope='host' must be one of"),
        (lambda: PrometheusMonitor(port=70000), "port=70000 must be"),
        (lambda: PrometheusMonitor(port=True), "port=True must be a whole number"),
        (lambda: PrometheusMonitor(address=""), "address='' must be"),
        (lambda: RemoteMonitor("nowhere:port"), "host='nowhere:port' must be"),
        (lambda: RemoteMonitor("h:1", identifier=""), "identifier='' must be"),
        (lambda: RemoteMonitor("h:1", simple=None), "simple=None must be"),  # type: ignore[arg-type]
    ],
)
def test_bad_arguments_are_named(make: object, told: str) -> None:
    with pytest.raises(InvalidValueError) as raised:
        make()  # type: ignore[operator]
    assert str(raised.value).startswith(told)


def test_a_remote_monitor_names_itself() -> None:
    first, second = RemoteMonitor("h:1"), RemoteMonitor("h:1")
    assert first.identifier.startswith("remote-monitor-")
    assert len(first.identifier) == len("remote-monitor-") + 32
    assert first.identifier != second.identifier
