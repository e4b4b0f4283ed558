"""What a run uses by round and tier, and HeFlwr's form of a line."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Said
from fedquilt.common.errors import InvalidValueError, RunFolderError
from fedquilt.monitor import RoundMonitor
from fedquilt.monitor.thread_monitor import FileMonitor
from fedquilt.observe.monitors import summed
from fedquilt.observe.samples import CPU, MEMORY, VDD_IN, Sample
from fedquilt.report.training_figure import plot_usage, read_usage

SMALL = ("--num-clients", "6", "--clients-per-round", "6", "--num-rounds", "2", "--model", "mlp")


@pytest.mark.parametrize("mode", ["fedavg", "certified"])
def test_a_monitored_run_is_measured_by_round_and_tier(cli: Callable[..., Said], mode: str) -> None:
    said = cli(
        *("run", "--monitor", "--method", "heterofl", "--tiers", "1,1/2", "--mode", mode, *SMALL),
        *("--availability", "always", "--local-epochs", "1", "--json"),
    ).json()
    folder = Path(said["output"])
    rounds = read_usage(folder)
    assert [entry["round"] for entry in rounds] == [0, 1]
    for entry in rounds:
        assert set(entry["tiers"]) == {"1", "1/2", "server"}
        parts = sum(tier["seconds"] for tier in entry["tiers"].values())
        assert 0 < parts <= entry["seconds"] + 1e-5
        assert entry["memory_usage"] > 0
        assert {"cpu_usage", "network_bytes_sent", "network_bytes_recv"} <= entry.keys()
    for name in ("monitor.jsonl", "monitor.png"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert "cpu_usage" not in (folder / "rounds.jsonl").read_text()
    assert "cpu_usage" not in (folder / "result.json").read_text()


def test_without_the_option_nothing_is_measured(tmp_path: Path) -> None:
    assert read_usage(tmp_path) == []
    assert plot_usage(tmp_path) is None
    (tmp_path / "monitor.jsonl").write_text("nonsense\n")
    with pytest.raises(RunFolderError, match="no measured round"):
        read_usage(tmp_path)


def test_samples_are_summed_over_time() -> None:
    samples = [
        Sample(0.0, 1.0, {CPU: 100.0, MEMORY: 2.0, VDD_IN: 3000.0}),
        Sample(0.0, 3.0, {CPU: 20.0, MEMORY: 1.0, VDD_IN: 1000.0}),
    ]
    assert summed(samples) == {
        "seconds": 4.0,
        "cpu_usage": 40.0,
        "memory_usage": 2.0,
        "energy_vdd_in": 6000.0,
    }


def test_a_run_in_memory_has_no_place_for_it() -> None:
    lines: list[dict[str, Any]] = [{"round": 0}]
    with RoundMonitor(power=False) as monitor:
        for line in lines:
            monitor(None, line)  # nothing was opened: nothing is written


def test_lines_in_the_form_of_heflwr(tmp_path: Path) -> None:
    values = {CPU: 12.5, MEMORY: 0.25, "network_bytes_sent": 3.0, "network_bytes_recv": 4.0}
    power = {VDD_IN: 4747.0, "power_vdd_cpu_gpu_cv": 5.0, "power_vdd_soc": 6.0}
    sample = Sample(0.0, 5.0, {**values, **power})
    assert sample.heflwr_text() == (
        "CPU Usage: 12.5%, Memory Usage: 0.25%, Bytes Sent: 3, Bytes Recv: 4, "
        "VDD In: 4747, VDD Cpu_Gpu_Cv: 5, VDD Soc: 6, "
    )
    assert sample.heflwr_text(message=True).startswith("Cpu Usage: 12.5%, Memory Usage: 0.25%, ")
    file = tmp_path / "usage.txt"
    with FileMonitor(file, interval=5, form="heflwr"):
        pass
    head, line = file.read_text().splitlines()[:2]
    assert len(head) == 19
    assert line.startswith("CPU Usage: ")
    assert line.endswith(", ")
    assert "Seconds" not in line
    with pytest.raises(InvalidValueError, match="form='other' must be one of"):
        FileMonitor(file, form="other")
    assert json.dumps(line)
