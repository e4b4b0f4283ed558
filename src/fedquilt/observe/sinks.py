"""Where samples go: a file, Prometheus, an HTTP server.

The latest sample, for Prometheus to fetch.

Each sink has a registry of its own, so monitors do not clash with one another nor
with the metrics of the application, and a server of its own, which ends with it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import socketserver
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from fedquilt.common.errors import StorageError
from fedquilt.observe import extras
from fedquilt.observe.delivery import Address, Delivery
from fedquilt.observe.log_handlers import record_fields
from fedquilt.observe.samples import (
    BYTES_RECV,
    BYTES_SENT,
    CPU,
    MEMORY,
    VDD_CPU_GPU_CV,
    VDD_IN,
    VDD_SOC,
    DeliveryError,
    MonitorError,
    Sample,
    Target,
)


class Sink(Protocol):
    """A place for samples."""

    @property
    def port(self) -> int | None:
        """The port it listens on, None when it does not listen."""

    def write(self, sample: Sample) -> None:
        """Take a sample."""

    def close(self) -> None:
        """End; raise when something that was written did not arrive."""


def open_sink(target: Target, network_scope: str) -> Sink:
    """Open the sink that `target` describes; `network_scope` says whose bytes it gets."""
    if target.kind == "file":
        return _open_file(target)
    if target.kind == "remote":
        return _open_remote(target)
    return _open_prometheus(target, network_scope)


def _open_file(target: Target) -> Sink:

    return FileSink(target.file)


def _open_prometheus(target: Target, network_scope: str) -> Sink:

    return PrometheusSink(target.address, target.port, network_scope)


def _open_remote(target: Target) -> Sink:

    return RemoteSink(target.host, target.identifier, simple=target.simple)


class FileSink:
    """Appends to a file: the date and time of the start, then a line for each sample."""

    port = None

    def __init__(self, file: str) -> None:
        self._path = Path(file)
        with self._storage_errors():
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115
        try:
            self._line(datetime.now().strftime("%Y-%m-%d %H:%M:%S"))
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.close()
            raise

    def write(self, sample: Sample) -> None:
        """Append a sample; it is in the file when this returns."""
        self._line(sample.text())

    def close(self) -> None:
        """Close the file."""
        with self._storage_errors():
            self._file.close()

    def _line(self, text: str) -> None:
        with self._storage_errors():
            self._file.write(f"{text}\n")
            self._file.flush()

    @contextlib.contextmanager
    def _storage_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"file={str(self._path)!r} cannot be written: {error}") from error


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


CLOSE_SECONDS = 2.0


class RemoteSink:
    """Posts every sample from a thread of its own; an outage does not stop the sampling.

    `simple` posts the fields `identifier` and `message` to `/simple_log`; otherwise a
    whole log record goes to `/log`, with the sample's numbers as further fields.
    """

    port = None

    def __init__(self, host: str, identifier: str, *, simple: bool) -> None:
        self._identifier = identifier
        self._simple = simple
        self._written = 0
        self._delivery = Delivery(Address.parse(host))

    def write(self, sample: Sample) -> None:
        """Queue a sample."""
        self._written += 1
        if self._simple:
            fields: dict[str, Any] = {"identifier": self._identifier, "message": sample.text()}
            self._delivery.put("/simple_log", fields)
        else:
            self._delivery.put("/log", self._record(sample))

    def close(self) -> None:
        """Deliver what waits, for at most two seconds; raise when something is left."""
        self._delivery.close(CLOSE_SECONDS)
        lost = self._delivery.undelivered
        if lost:
            raise DeliveryError(
                f"{lost} of {self._written} samples were not delivered to "
                f"{self._delivery.address}: {self._delivery.last_error}; stats() has them all"
            )

    def _record(self, sample: Sample) -> dict[str, Any]:
        record = logging.LogRecord(
            "fedquilt.monitor", logging.INFO, __file__, 0, sample.text(), None, None
        )
        fields = record_fields(record, self._identifier)
        return {**fields, "seconds": sample.seconds, "time": sample.time, **sample.values}
