"""The meters that are switched on, read together."""

from __future__ import annotations

import time
from dataclasses import asdict

from fedquilt.monitor.meters import Meter, openers
from fedquilt.monitor.metrics import Metrics
from fedquilt.monitor.samples import Sample
from fedquilt.monitor.settings import Reach


class Sampler:
    """Takes samples of a process; the first one covers the time since it was made."""

    def __init__(self, pid: int, reach: Reach, metrics: Metrics) -> None:
        self._openers = openers(pid, reach)
        self._meters: dict[str, Meter] = {}
        self.switch(metrics)
        self._time = time.monotonic()

    def switch(self, metrics: Metrics) -> None:
        """Open and close meters; when one cannot be opened, all stays as it was."""
        wanted = [name for name, on in asdict(metrics).items() if on]
        added: dict[str, Meter] = {}
        try:
            for name in wanted:
                if name not in self._meters:
                    added[name] = self._openers[name]()
        except BaseException:
            _close(added)
            raise
        dropped = {name: meter for name, meter in self._meters.items() if name not in wanted}
        kept = {name: meter for name, meter in self._meters.items() if name in wanted}
        self._meters = {**kept, **added}
        _close(dropped)

    def read(self) -> Sample:
        """Return a sample over the time since the last one."""
        values: dict[str, float] = {}
        for meter in self._meters.values():
            values.update(meter.read())
        now = time.monotonic()
        seconds, self._time = now - self._time, now
        return Sample(time.time(), seconds, values)

    def close(self) -> None:
        """Close every meter."""
        meters, self._meters = self._meters, {}
        _close(meters)


def _close(meters: dict[str, Meter]) -> None:
    for meter in meters.values():
        meter.close()
