"""Sampling at equal intervals until told to stop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from fedquilt.monitor.meters import network_scope
from fedquilt.monitor.metrics import Metrics
from fedquilt.monitor.sampler import Sampler
from fedquilt.monitor.samples import Sample
from fedquilt.monitor.settings import Settings
from fedquilt.monitor.sinks import open_sink


class SamplingLoop:
    """Samples a process and gives every sample to `emit` and to the sink.

    Making one opens meters and sink, so what is wrong with them is known at once and
    the first sample covers everything from here on.  `run` takes a sample every
    `interval` seconds and a last, shorter one when it is told to stop, so the
    samples cover the whole time without a gap.
    """

    def __init__(self, settings: Settings, emit: Callable[[Sample], None]) -> None:
        self._interval = settings.interval
        self._emit = emit
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sampler = Sampler(settings.pid, settings.reach, settings.metrics)
        try:
            self._sink = open_sink(settings.target, network_scope(settings.pid, settings.reach))
        except BaseException:
            self._sampler.close()
            raise
        self._next = time.monotonic() + self._interval

    @property
    def port(self) -> int | None:
        """The port of the sink, None when it has none."""
        return self._sink.port

    def run(self) -> None:
        """Sample until `stop`; whatever fails is raised, and everything closed."""
        try:
            while not self._stop.wait(max(0.0, self._next - time.monotonic())):
                self._sample()
                # A sample that took too long costs its successors, never their rhythm.
                late = max(0.0, time.monotonic() - self._next)
                self._next += self._interval * (1 + late // self._interval)
            self._sample()
        except BaseException:
            with contextlib.suppress(Exception):
                self._close()
            raise
        self._close()

    def stop(self) -> None:
        """Make `run` take its last sample and return."""
        self._stop.set()

    def switch(self, metrics: Metrics) -> None:
        """Measure something else from now on; the sample until now is taken first."""
        with self._lock:
            self._take()
            self._sampler.switch(metrics)

    def _sample(self) -> None:
        with self._lock:
            self._take()

    def _take(self) -> None:
        sample = self._sampler.read()
        self._emit(sample)
        self._sink.write(sample)

    def _close(self) -> None:
        try:
            self._sampler.close()
        finally:
            self._sink.close()
