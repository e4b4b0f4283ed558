"""Power from RAPL, Jetson sensors and NVML, against trees of files and a fake library."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from monitor_tools import hwmon_chip, iio_chip, rapl_zone, write_tree

from fedquilt.monitor import MonitorError, PowerUnavailableError, power_sources, thread_monitor
from fedquilt.observe.meters import power_meter
from fedquilt.observe.power import (
    NotOfferedError,
    Nvml,
    Rapl,
    Zone,
    combine_rails,
    find_jetson,
    find_nvml,
    find_rapl,
    open_power,
    used_uj,
)
from http_receiver import wait_until

SERVER = {
    **rapl_zone("intel-rapl:0", "package-0", 1_000_000),
    **rapl_zone("intel-rapl:0:0", "core", 5),
    **rapl_zone("intel-rapl:0:1", "dram", 2_000_000),
    **rapl_zone("intel-rapl:1", "package-1", 3_000_000),
    **rapl_zone("intel-rapl:2", "psys", 7),
    **rapl_zone("intel-rapl-mmio:0", "package-0", 1_000_000),
}


class Clock:
    """A clock that goes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeNvml(SimpleNamespace):
    """The few functions of pynvml that are used, over counters that a test moves.

    `energy` is in mJ, None for a card that does not count it; `power` in mW, None for
    one that cannot tell.
    """

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):  # noqa: N801, N818
        pass

    def __init__(self, energy: list[int | None], power: list[int | None]) -> None:
        super().__init__(energy=energy, power=power, opened=0, broken="")

    def nvmlInit(self) -> None:  # noqa: N802
        self.opened += 1
        if self.broken:
            self.opened -= 1
            raise self.NVMLError(self.broken)

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.opened -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.power)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetTotalEnergyConsumption(self, card: int) -> int:  # noqa: N802
        return self._told(self.energy[card])

    def nvmlDeviceGetPowerUsage(self, card: int) -> int:  # noqa: N802
        return self._told(self.power[card])

    def _told(self, value: int | None) -> int:
        if self.broken:
            raise self.NVMLError(self.broken)
        if value is None:
            raise self.NVMLError_NotSupported("Not Supported")
        return value


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)


def set_energy(root: Path, zone: str, energy_uj: int) -> None:
    (root / "class" / "powercap" / zone / "energy_uj").write_text(f"{energy_uj}\n")


def test_rapl_adds_packages_and_memory_and_nothing_twice(tmp_path: Path) -> None:
    found = find_rapl(write_tree(tmp_path, SERVER))
    assert found.name == "RAPL package-0, dram, package-1"
    clock = Clock()
    rapl = Rapl(found._zones, clock)
    set_energy(tmp_path, "intel-rapl:0", 1_000_000 + 60_000_000)
    set_energy(tmp_path, "intel-rapl:1", 3_000_000 + 20_000_000)
    set_energy(tmp_path, "intel-rapl:0:1", 2_000_000 + 6_000_000)
    clock.now += 2.0
    # 80 J of the packages and 6 J of memory in 2 s.
    power = rapl.read()
    assert power["power_vdd_cpu_gpu_cv"] == pytest.approx(40_000)
    assert power["power_vdd_soc"] == pytest.approx(3_000)
    assert power["power_vdd_in"] == pytest.approx(43_000)
    clock.now += 1.0
    assert rapl.read()["power_vdd_in"] == 0.0


def test_a_rapl_counter_that_wraps(tmp_path: Path) -> None:
    assert used_uj(90, 20, 100) == 30
    write_tree(tmp_path, {"energy": 262_143_000_000})
    clock = Clock()
    rapl = Rapl([Zone("package-0", tmp_path / "energy", 262_143_328_850)], clock)
    (tmp_path / "energy").write_text("1671150\n")
    clock.now += 1.0
    # 328 850 uJ to the end of the range and 1 671 150 after it: 2 W.
    assert rapl.read()["power_vdd_in"] == pytest.approx(2000.0)


def test_a_machine_without_a_memory_counter_reports_no_zero(tmp_path: Path) -> None:
    rapl = find_rapl(write_tree(tmp_path, rapl_zone("intel-rapl:0", "package-0", 5)))
    assert set(rapl.read()) == {"power_vdd_in", "power_vdd_cpu_gpu_cv"}


def test_counters_that_may_not_be_read_are_said_so(tmp_path: Path) -> None:
    write_tree(tmp_path, rapl_zone("intel-rapl:0", "package-0", 5))
    counter = tmp_path / "class" / "powercap" / "intel-rapl:0" / "energy_uj"
    counter.unlink()
    counter.mkdir()  # unreadable for everybody, root too
    with pytest.raises(NotOfferedError, match=r"must be readable .* by default root's"):
        find_rapl(tmp_path)


def test_a_jetson_orin_nano(tmp_path: Path) -> None:
    chip = hwmon_chip(3, VDD_IN=(5000, 900), VDD_CPU_GPU_CV=(5000, 240), VDD_SOC=(4992, 250))
    other = {"class/hwmon/hwmon0/name": "nvme", "class/hwmon/hwmon0/in1_label": "VDD_IN"}
    jetson = find_jetson(write_tree(tmp_path, {**other, **chip}))
    assert jetson.read() == {
        "power_vdd_in": 4500.0,
        "power_vdd_cpu_gpu_cv": 1200.0,
        "power_vdd_soc": 1248.0,
    }
    assert jetson.name == "Jetson VDD_IN, VDD_CPU_GPU_CV, VDD_SOC"


def test_a_jetson_agx_orin_has_no_input_rail(tmp_path: Path) -> None:
    first = hwmon_chip(
        2, VDD_GPU_SOC=(20_000, 200), VDD_CPU_CV=(20_000, 50), VIN_SYS_5V0=(5000, 600)
    )
    second = hwmon_chip(3, NC=(0, 0), VDDQ_VDD2_1V8AO=(5000, 100))
    power = find_jetson(write_tree(tmp_path, {**first, **second})).read()
    # Memory is fed by the 5 V rail and must not be in the sum again.
    assert power["power_vdd_in"] == pytest.approx(4000 + 1000 + 3000)
    assert power["power_vdd_cpu_gpu_cv"] == pytest.approx(4000 + 1000)
    assert power["power_vdd_soc"] == pytest.approx(500)


def test_a_jetson_agx_xavier_with_the_older_driver(tmp_path: Path) -> None:
    chips = {
        **iio_chip("1-0040", GPU=300, CPU=400, SOC=900),
        **iio_chip("1-0041", CV=10, VDDRQ=150, SYS5V=1440),
    }
    assert find_jetson(write_tree(tmp_path, chips)).read() == {
        "power_vdd_in": 3200.0,
        "power_vdd_cpu_gpu_cv": 710.0,
        "power_vdd_soc": 1050.0,
    }


def test_a_channel_that_is_switched_off_is_left_out(tmp_path: Path) -> None:
    write_tree(tmp_path, hwmon_chip(1, VDD_IN=(5000, 100), VDD_SOC=(5000, 1)))
    (tmp_path / "class" / "hwmon" / "hwmon1" / "curr2_input").unlink()
    assert find_jetson(tmp_path).read() == {"power_vdd_in": 500.0}


def test_sensors_of_other_boards_are_left_alone(tmp_path: Path) -> None:
    write_tree(tmp_path, hwmon_chip(1, VBAT=(5000, 100)))
    with pytest.raises(NotOfferedError, match=r"unknown labels \['VBAT'\]"):
        find_jetson(tmp_path)


def test_a_board_with_two_rails_for_computing() -> None:
    rails = {"POM_5V_IN": 2000.0, "POM_5V_GPU": 300.0, "POM_5V_CPU": 500.0}
    assert combine_rails(rails) == {"power_vdd_in": 2000.0, "power_vdd_cpu_gpu_cv": 800.0}


def test_nvml_takes_energy_where_it_is_counted_and_power_elsewhere() -> None:
    library = FakeNvml(energy=[10_000, None], power=[1, 75_000])
    clock = Clock()
    nvml = Nvml(library, [0, 1], clock)
    library.energy = [10_000 + 500_000, None]
    clock.now += 2.0
    # 500 J in 2 s are 250 W; the older card says 75 W.
    power = pytest.approx(325_000)
    assert nvml.read() == {"power_vdd_in": power, "power_vdd_cpu_gpu_cv": power}
    assert nvml.name == "NVML 2 GPUs"
    library.broken = "GPU is lost"
    with pytest.raises(MonitorError, match="GPU is lost"):
        nvml.read()


def test_nvml_is_opened_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml(energy=[None, 0], power=[None, 5])
    monkeypatch.setitem(sys.modules, "pynvml", library)
    found = find_nvml()
    assert found._cards == [1]
    assert library.opened == 1
    found.close()
    assert library.opened == 0


@pytest.mark.parametrize(
    ("library", "reason"),
    [
        (None, "nvidia-ml-py, which is not installed"),
        (FakeNvml([], []), "no GPU that tells its power"),
        (FakeNvml([None], [None]), "no GPU that tells its power"),
    ],
)
def test_why_there_is_no_nvml(library: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with pytest.raises(NotOfferedError, match=reason):
        find_nvml()
    assert library is None or library.opened == 0


def test_a_driver_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    library = FakeNvml([0], [0])
    library.broken = "NVML Shared Library Not Found"
    monkeypatch.setitem(sys.modules, "pynvml", library)
    with pytest.raises(NotOfferedError, match="NVML Shared Library Not Found"):
        find_nvml()


def test_processors_and_cards_are_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([None], [50_000]))
    sources = open_power(write_tree(tmp_path, SERVER))
    assert [source.name for source in sources] == ["RAPL package-0, dram, package-1", "NVML 1 GPU"]
    meter = power_meter(sources)
    power = meter.read()
    assert power["power_vdd_in"] == power["power_vdd_cpu_gpu_cv"] == 50_000
    assert power["power_vdd_soc"] == 0.0
    meter.close()


def test_a_jetsons_rails_are_used_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([0], [50_000]))
    write_tree(tmp_path, {**SERVER, **hwmon_chip(0, VDD_IN=(5000, 100))})
    assert power_sources(tmp_path) == ["Jetson VDD_IN"]


@pytest.mark.usefixtures("no_gpu")
def test_a_machine_that_offers_nothing_says_what_was_looked_for(
    kind: ModuleType, tmp_path: Path
) -> None:
    assert power_sources(tmp_path) == []
    monitor = kind.FileMonitor(tmp_path / "usage.txt", interval=0.05, sysfs=tmp_path)
    monitor.set_metrics(power=True)
    told = r"offers no power meter \(Jetson: no INA3221.*; RAPL: no package.*; NVML: "
    with pytest.raises(PowerUnavailableError, match=told):
        monitor.start()
    assert not monitor.running
    assert not (tmp_path / "usage.txt").exists()
    # The monitor works without it, and refuses while it runs too.
    monitor.set_metrics(power=False)
    with monitor:
        with pytest.raises(PowerUnavailableError):
            monitor.set_metrics(power=True)
        wait_until(lambda: monitor.stats()["cpu_usage"])
        assert monitor.running
    assert monitor.stats()["power_vdd_in"] == []


def test_a_monitor_measures_power(kind: ModuleType, tmp_path: Path) -> None:
    write_tree(tmp_path, hwmon_chip(0, VDD_IN=(5000, 900), VDD_SOC=(5000, 100)))
    monitor = kind.FileMonitor(tmp_path / "usage.txt", interval=0.05, sysfs=tmp_path)
    monitor.set_metrics(power=True, cpu=False, memory=False, network=False)
    began = time.monotonic()
    with monitor:
        wait_until(lambda: len(monitor.stats()["power_vdd_in"]) >= 3)
    seconds = time.monotonic() - began
    assert set(monitor.stats()["power_vdd_in"]) == {4500.0}
    assert monitor.stats()["power_vdd_cpu_gpu_cv"] == []
    energy = monitor.summary()["total_power_vdd_in"]
    assert 4500.0 * 0.15 <= energy <= 4500.0 * seconds
    assert monitor.summary()["total_power_vdd_soc"] == pytest.approx(energy / 9)
    assert "VDD_IN: 4500mW, VDD_SOC: 500mW" in (tmp_path / "usage.txt").read_text()


@pytest.mark.usefixtures("no_gpu")
def test_a_monitor_differences_energy(tmp_path: Path) -> None:
    write_tree(tmp_path, SERVER)
    monitor = thread_monitor.FileMonitor(tmp_path / "usage.txt", interval=5, sysfs=tmp_path)
    monitor.set_metrics(power=True)
    with monitor:
        set_energy(tmp_path, "intel-rapl:0", 1_000_000 + 60_000_000)
        set_energy(tmp_path, "intel-rapl:0:1", 2_000_000 + 6_000_000)
        time.sleep(0.1)
    # However long it took: 66 J are 66 000 mJ.
    assert monitor.summary()["total_power_vdd_in"] == pytest.approx(66_000, rel=0.05)
    assert monitor.summary()["total_power_vdd_soc"] == pytest.approx(6_000, rel=0.05)
