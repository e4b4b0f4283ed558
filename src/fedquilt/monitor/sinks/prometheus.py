"""The latest sample, for Prometheus to fetch.

Each sink has a registry of its own, so monitors do not clash with one another nor
with the metrics of the application, and a server of its own, which ends with it.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from fedquilt.monitor import extras
from fedquilt.monitor.errors import MonitorError
from fedquilt.monitor.metrics import (
    BYTES_RECV,
    BYTES_SENT,
    CPU,
    MEMORY,
    VDD_CPU_GPU_CV,
    VDD_IN,
    VDD_SOC,
)
from fedquilt.monitor.samples import Sample

POLL_SECONDS = 0.05

# The seed system's gauges: what the latest sample measured.
GAUGES = {
    CPU: ("cpu_usage", "Processor load in percent, 100 is one core."),
    MEMORY: ("memory_usage", "Resident memory in percent of the machine's."),
    BYTES_SENT: ("bytes_sent", "Bytes sent in the latest sampling interval by {scope}."),
    BYTES_RECV: ("bytes_recv", "Bytes received in the latest sampling interval by {scope}."),
    VDD_IN: ("vdd_in", "Power of the machine in mW, as far as it is measured."),
    VDD_CPU_GPU_CV: ("vdd_cpu_gpu_cv", "Power of processors and GPUs in mW."),
    VDD_SOC: ("vdd_soc", "Power of memory and the rest of the chip in mW."),
}
# What only grows loses nothing when Prometheus looks less often than samples come.
BYTES = {
    BYTES_SENT: ("network_bytes_sent", "Bytes sent since the monitor started by {scope}."),
    BYTES_RECV: ("network_bytes_recv", "Bytes received since the monitor started by {scope}."),
}
ENERGY = {
    VDD_IN: ("energy_vdd_in_joules", "Energy since the monitor started."),
    VDD_CPU_GPU_CV: ("energy_vdd_cpu_gpu_cv_joules", "Energy since the monitor started."),
    VDD_SOC: ("energy_vdd_soc_joules", "Energy since the monitor started."),
}


class LatestSample:
    """A collector in the sense of prometheus_client; what is not measured is not shown."""

    def __init__(self, network_scope: str) -> None:
        self._scope = network_scope
        self._families = extras.prometheus_client().core
        self._lock = threading.Lock()
        self._latest: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._samples = 0

    def update(self, sample: Sample) -> None:
        """Make `sample` the latest."""
        with self._lock:
            self._samples += 1
            self._latest = dict(sample.values)
            for key in (*BYTES, *ENERGY):
                if key in sample.values:
                    grown = sample.values[key]
                    if key in ENERGY:
                        grown *= sample.seconds / 1000.0
                    self._totals[key] = self._totals.get(key, 0.0) + grown

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        with self._lock:
            latest, totals, samples = self._latest, dict(self._totals), self._samples
        for key, (name, text) in GAUGES.items():
            if key in latest:
                told = text.format(scope=self._scope)
                yield self._families.GaugeMetricFamily(name, told, value=latest[key])
        for key, (name, text) in {**BYTES, **ENERGY}.items():
            if key in totals:
                told = text.format(scope=self._scope)
                yield self._families.CounterMetricFamily(name, told, value=totals[key])
        text = "Samples taken since the monitor started."
        yield self._families.CounterMetricFamily("monitor_samples", text, value=samples)


class _Handler(WSGIRequestHandler):
    timeout = 5

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: Prometheus comes every few seconds."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def server_bind(self) -> None:
        """Bind without asking the name service who we are, which can take seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.socket.getsockname()[:2]
        self.setup_environ()


class _ServerV6(_Server):
    address_family = socket.AF_INET6


class PrometheusSink:
    """Serves the latest sample at `http://address:port/metrics`."""

    def __init__(self, address: str, port: int, network_scope: str) -> None:
        client = extras.prometheus_client()
        self._latest = LatestSample(network_scope)
        registry = client.CollectorRegistry()
        registry.register(self._latest)
        kind = _ServerV6 if ":" in address else _Server
        try:
            self._server = kind((address, port), _Handler)
        except OSError as error:
            raise MonitorError(
                f"cannot listen on address={address!r} port={port}: {error}"
            ) from error
        self._server.set_app(client.make_wsgi_app(registry))
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(POLL_SECONDS,),
            name="fedquilt-prometheus",
            daemon=True,
        )
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on, also when the system chose it."""
        return int(self._server.server_port)

    def write(self, sample: Sample) -> None:
        """Show a sample from now on."""
        self._latest.update(sample)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
