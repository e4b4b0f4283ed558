"""NVML: power of NVIDIA cards, through the package nvidia-ml-py."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from fedquilt.monitor.errors import MonitorError
from fedquilt.monitor.metrics import VDD_CPU_GPU_CV, VDD_IN
from fedquilt.monitor.power.source import NotOfferedError


class Nvml:
    """Power of all cards of the machine.

    Cards since Volta count the millijoules since the driver was loaded, which gives
    the mean since the last reading; older ones only tell their power now.
    """

    def __init__(
        self, nvml: Any, cards: list[Any], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._nvml = nvml
        self._clock = clock
        self._cards = cards
        self._energy = [_energy_mj(nvml, card) for card in cards]
        self._time = clock()

    @property
    def name(self) -> str:
        """How many cards are read."""
        return f"NVML {len(self._cards)} GPU" + ("s" if len(self._cards) > 1 else "")

    def read(self) -> Mapping[str, float]:
        """Return milliwatts: ΔmJ / Δs, or the power now."""
        try:
            energy = [_energy_mj(self._nvml, card) for card in self._cards]
            now = self._clock()
            power = sum(
                self._milliwatts(card, before, after, now - self._time)
                for card, before, after in zip(self._cards, self._energy, energy, strict=True)
            )
        except self._nvml.NVMLError as error:
            raise MonitorError(f"a GPU's power can no longer be read: {error}") from error
        self._energy, self._time = energy, now
        return {VDD_IN: power, VDD_CPU_GPU_CV: power}

    def _milliwatts(
        self, card: Any, before: int | None, after: int | None, seconds: float
    ) -> float:
        if before is None or after is None:
            return float(self._nvml.nvmlDeviceGetPowerUsage(card))
        return (after - before) / max(seconds, 1e-9)

    def close(self) -> None:
        """Give the library back."""
        self._nvml.nvmlShutdown()


def _energy_mj(nvml: Any, card: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetTotalEnergyConsumption(card))
    except nvml.NVMLError_NotSupported:
        return None


def find_nvml() -> Nvml:
    """Return the machine's cards, or say why there are none."""
    try:
        import pynvml
    except ImportError:
        raise NotOfferedError("the package nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NotOfferedError(str(error)) from error
    try:
        cards = _cards_with_power(pynvml)
        if cards:
            return Nvml(pynvml, cards)
        reason = "no GPU that tells its power"
    except pynvml.NVMLError as error:
        reason = str(error)
    pynvml.nvmlShutdown()
    raise NotOfferedError(reason)


def _cards_with_power(nvml: Any) -> list[Any]:
    cards = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    return [card for card in cards if _tells_power(nvml, card)]


def _tells_power(nvml: Any, card: Any) -> bool:
    try:
        nvml.nvmlDeviceGetPowerUsage(card)
    except nvml.NVMLError:
        return False
    return True
