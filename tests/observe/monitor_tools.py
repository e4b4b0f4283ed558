"""Load to measure, and trees of files that look like a machine's sensors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path


def burn(seconds: float) -> float:
    """Keep a core busy for some seconds of processor time; return how many it took."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        sum(range(1000))
    return time.thread_time() - began


@contextmanager
def wakefulness() -> Iterator[list[float]]:
    """Measure, beside what is tested, how many seconds late a thread wakes from its sleep."""
    enough, late = threading.Event(), [0.0]

    def sleep() -> None:
        while not enough.is_set():
            began = time.monotonic()
            time.sleep(0.01)
            late.append(time.monotonic() - began - 0.01)

    thread = threading.Thread(target=sleep)
    thread.start()
    try:
        yield late
    finally:
        enough.set()
        thread.join()


def write_tree(root: Path, files: Mapping[str, object]) -> Path:
    """Write files with their contents under `root`."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")
    return root


def rapl_zone(zone: str, name: str, energy_uj: int, range_uj: int = 10**12) -> dict[str, object]:
    """The files of one RAPL zone."""
    folder = f"class/powercap/{zone}"
    return {
        f"{folder}/name": name,
        f"{folder}/energy_uj": energy_uj,
        f"{folder}/max_energy_range_uj": range_uj,
    }


def hwmon_chip(number: int, **rails: tuple[int, int]) -> dict[str, object]:
    """The files of one INA3221 of the kernel's own driver; rails are (mV, mA)."""
    folder = f"class/hwmon/hwmon{number}"
    files: dict[str, object] = {f"{folder}/name": "ina3221"}
    for channel, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
        files[f"{folder}/in{channel}_label"] = label
        files[f"{folder}/in{channel}_input"] = millivolts
        files[f"{folder}/curr{channel}_input"] = milliamperes
    return files


def iio_chip(address: str, **rails: int) -> dict[str, object]:
    """The files of one INA3221 of NVIDIA's older driver; rails are mW."""
    folder = f"bus/i2c/drivers/ina3221x/{address}/iio:device0"
    files: dict[str, object] = {}
    for channel, (label, milliwatts) in enumerate(rails.items()):
        files[f"{folder}/rail_name_{channel}"] = label
        files[f"{folder}/in_power{channel}_input"] = milliwatts
    return files
