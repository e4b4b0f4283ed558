"""What every source of power readings offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class PowerSource(Protocol):
    """Something that measures power.

    `read` returns milliwatts for those of the keys `power_vdd_in` (everything the
    source sees), `power_vdd_cpu_gpu_cv` (what computes) and `power_vdd_soc` (memory
    and the rest of the chip) that it knows; what it does not know is left out
    and never reported as zero.
    """

    @property
    def name(self) -> str:
        """What is measured, in a few words."""

    def read(self) -> Mapping[str, float]:
        """Return milliwatts, the mean since the last reading where counters allow it."""

    def close(self) -> None:
        """Let go of what the source holds."""


class NotOfferedError(Exception):
    """The machine does not offer this source; the text says why."""
