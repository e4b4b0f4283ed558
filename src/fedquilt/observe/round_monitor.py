"""What a run uses, by round and by tier: processor, memory, network and power.

Where clients hold slices, a round trains one width after the other, and what the machine uses
meanwhile is that width's; what is left of a round is the server's: noise, update, evaluation.
How long clients take tells how much they hold, so this is for the owner of a run alone:
`monitor.jsonl` has mode 0600 and nothing of it is in any public line.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from fedquilt.common.observer import Observer
from fedquilt.common.storage import append_line
from fedquilt.observe.meters import Sampler
from fedquilt.observe.power import power_sources
from fedquilt.observe.samples import CPU, MEMORY, NETWORK, POWER, Metrics, Reach, Sample

FILE = "monitor.jsonl"
TIER = "width "
"""How a step within a round begins that trains the clients of a tier."""
SERVER = "server"


class RoundMonitor(Observer):
    """Measures the rounds of one run; also a context manager, which closes the meters.

    `fedquilt.run(..., observer=RoundMonitor())` writes `monitor.jsonl` into the run's folder, one
    line a round:

    | key | unit |
    |---|---|
    | seconds | s |
    | cpu_usage | %, 100 is one core |
    | memory_usage | % of the machine's memory, the most that was seen |
    | network_bytes_sent, network_bytes_recv | bytes |
    | energy_vdd_in, energy_vdd_cpu_gpu_cv, energy_vdd_soc | mJ, where power can be measured |
    | tiers | the same for each width that trained, and for `server` |

    Parameters
    ----------
    power : bool, optional
        Whether to measure power; left out: where the machine offers it.
    """

    def __init__(self, power: bool | None = None) -> None:
        self._power = power
        self._sampler: Sampler | None = None
        self._path: Path | None = None
        self._tier: str | None = None
        self._spans: list[tuple[str | None, Sample]] = []

    def opened(self, config: Any, folder: Path) -> None:
        """Begin to measure."""
        power = bool(power_sources()) if self._power is None else self._power
        self.close()
        self._path = folder / FILE
        self._sampler = Sampler(os.getpid(), Reach(), Metrics(power=power))

    def working(self, what: str, share: float) -> None:
        """Note that a tier, or the server, begins."""
        if what.startswith(TIER) or what == SERVER:
            self._read()
            self._tier = what.removeprefix(TIER)

    def __call__(self, config: Any, line: dict[str, Any]) -> None:
        """Write what the round used."""
        self._read()
        self._tier = None
        spans, self._spans = self._spans, []
        if self._path is None or not spans:
            return
        used = summed([sample for _, sample in spans])
        names = dict.fromkeys(tier for tier, _ in spans if tier is not None)
        if names:
            used["tiers"] = {n: summed([s for tier, s in spans if tier == n]) for n in names}
        append_line(self._path, json.dumps({"round": line["round"], **used}), 0o600)

    def _read(self) -> None:
        if self._sampler is not None:
            self._spans.append((self._tier, self._sampler.read()))

    def close(self) -> None:
        """Close the meters."""
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    def __enter__(self) -> RoundMonitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def summed(samples: list[Sample]) -> dict[str, Any]:
    """Return what several samples are together.

    With value x_i over t_i seconds: processor sum x_i t_i / sum t_i, memory max x_i, bytes
    sum x_i, energy sum x_i t_i in mW s = mJ.
    """
    seconds = sum(sample.seconds for sample in samples)
    found: dict[str, Any] = {"seconds": round(seconds, 6)}
    for key in (CPU, MEMORY, *NETWORK, *POWER):
        pairs = [(s.values[key], s.seconds) for s in samples if key in s.values]
        if not pairs:
            continue
        over_time = math.fsum(value * time for value, time in pairs)
        if key == CPU:
            found[key] = round(over_time / max(seconds, 1e-9), 2)
        elif key == MEMORY:
            found[key] = round(max(value for value, _ in pairs), 4)
        elif key in NETWORK:
            found[key] = int(sum(value for value, _ in pairs))
        else:
            found[key.replace("power", "energy")] = round(over_time, 1)
    return found
