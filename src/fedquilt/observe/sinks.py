"""Where samples go: a file, Prometheus, an HTTP server."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from fedquilt.common import optional
from fedquilt.common.storage import storage_errors
from fedquilt.observe.delivery import CLOSE_SECONDS, Address, Delivery, post_fields
from fedquilt.observe.samples import (
    BYTES_RECV,
    BYTES_SENT,
    CPU,
    MEMORY,
    POWER,
    VDD_CPU_GPU_CV,
    VDD_IN,
    VDD_SOC,
    DeliveryError,
    MonitorError,
    Sample,
)


class FileSink:
    """Appends to a file: the date and time of the start, then a line for each sample."""

    port = None

    def __init__(self, file: str, form: str = "fedquilt") -> None:
        self._path = file
        self._heflwr = form == "heflwr"
        with storage_errors(file), contextlib.ExitStack() as opened:
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            # Buffered by lines: what was written is in the file.
            self._file = opened.enter_context(open(file, "a", 1, encoding="utf-8"))
            self._file.write(datetime.now().strftime("%Y-%m-%d %H:%M:%S\n"))
            opened.pop_all()

    def write(self, sample: Sample) -> None:
        """Append a sample; it is in the file when this returns."""
        with storage_errors(self._path):
            text = sample.heflwr_text() if self._heflwr else sample.text()
            self._file.write(f"{text}\n")

    def close(self) -> None:
        """Close the file."""
        with storage_errors(self._path):
            self._file.close()


# HeFlwr's gauges: what the latest sample measured.
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
COUNTERS = {
    BYTES_SENT: ("network_bytes_sent", "Bytes sent since the monitor started by {scope}."),
    BYTES_RECV: ("network_bytes_recv", "Bytes received since the monitor started by {scope}."),
    VDD_IN: ("energy_vdd_in_joules", "Energy since the monitor started."),
    VDD_CPU_GPU_CV: ("energy_vdd_cpu_gpu_cv_joules", "Energy since the monitor started."),
    VDD_SOC: ("energy_vdd_soc_joules", "Energy since the monitor started."),
}


class LatestSample:
    """A collector in the sense of prometheus_client; what is not measured is not shown."""

    def __init__(self, network_scope: str) -> None:
        self._scope = network_scope
        self._families = optional.load("prometheus_client.core", "PrometheusMonitor")
        self._lock = threading.Lock()
        self._latest: dict[str, float] = {}
        self._totals: dict[str, float] = {}
        self._samples = 0

    def update(self, sample: Sample) -> None:
        """Make `sample` the latest."""
        with self._lock:
            self._samples += 1
            self._latest = dict(sample.values)
            for key in COUNTERS.keys() & sample.values.keys():
                # mW times seconds are mJ.
                factor = sample.seconds / 1000.0 if key in POWER else 1.0
                self._totals[key] = self._totals.get(key, 0.0) + factor * sample.values[key]

    def collect(self) -> Iterator[Any]:
        """Yield the metric families."""
        with self._lock:
            latest, totals, samples = self._latest, dict(self._totals), self._samples
        for table, values, family in (
            (GAUGES, latest, self._families.GaugeMetricFamily),
            (COUNTERS, totals, self._families.CounterMetricFamily),
        ):
            for key, (name, text) in table.items():
                if key in values:
                    yield family(name, text.format(scope=self._scope), value=values[key])
        text = "Samples taken since the monitor started."
        yield self._families.CounterMetricFamily("monitor_samples", text, value=samples)


IDLE_SECONDS = 10.0
"""How long somebody who connects may say nothing."""


def _bear_idlers(server: Any) -> None:
    """Let a server drop connections that ask nothing or break, without a word.

    Port scanners and load balancers make them; `socketserver` prints a traceback for each,
    and keeps a thread for as long as somebody is silent.
    """
    report = server.handle_error

    def handle_error(request: Any, address: Any) -> None:
        if not isinstance(sys.exception(), OSError):
            report(request, address)

    server.handle_error = handle_error
    handler = server.RequestHandlerClass
    server.RequestHandlerClass = type(handler.__name__, (handler,), {"timeout": IDLE_SECONDS})


class PrometheusSink:
    """Serves the latest sample at `http://address:port/metrics`.

    Each has a registry and a server of its own, so monitors clash neither with one another
    nor with the metrics of the program, and the server ends with its monitor.
    """

    def __init__(self, address: str, port: int, network_scope: str) -> None:
        client = optional.load("prometheus_client", "PrometheusMonitor")
        self._latest = LatestSample(network_scope)
        registry = client.CollectorRegistry()
        registry.register(self._latest)
        try:
            self._server, self._thread = client.start_http_server(port, address, registry)
        except OSError as error:
            raise MonitorError(
                f"cannot listen on address={address!r} port={port}: {error}"
            ) from error
        _bear_idlers(self._server)

    @property
    def port(self) -> int:
        """The port it listens on, also when the system chose it."""
        return int(self._server.server_port)

    def write(self, sample: Sample) -> None:
        """Show a sample from now on."""
        self._latest.update(sample)

    def close(self) -> None:
        """Stop listening."""
        ending = threading.Thread(target=self._server.shutdown)
        ending.start()
        # The server looks every half a second whether to end; this wakes it (on Linux).
        with contextlib.suppress(OSError):
            self._server.socket.shutdown(socket.SHUT_RDWR)
        ending.join()
        self._server.server_close()
        self._thread.join()


class RemoteSink:
    """Posts every sample from a thread of its own; an outage does not stop the sampling.

    `simple` posts the line of the file; otherwise a whole log record goes out, with the
    sample's numbers as further fields.
    """

    port = None

    def __init__(
        self, address: Address, identifier: str, *, simple: bool, form: str = "fedquilt"
    ) -> None:
        self._heflwr = form == "heflwr"
        self._identifier = identifier
        self._simple = simple
        self._written = 0
        self._delivery = Delivery(address)

    def write(self, sample: Sample) -> None:
        """Queue a sample."""
        self._written += 1
        text = sample.heflwr_text(message=True) if self._heflwr else sample.text()
        record = logging.LogRecord("fedquilt.monitor", logging.INFO, __file__, 0, text, None, None)
        path, fields = post_fields(record, self._identifier, simple=self._simple)
        if not self._simple:
            fields |= {"seconds": sample.seconds, "time": sample.time, **sample.values}
        self._delivery.put(path, fields)

    def close(self) -> None:
        """Deliver what waits, for at most two seconds; raise when something is left."""
        self._delivery.close(CLOSE_SECONDS)
        lost = self._delivery.undelivered
        if lost:
            raise DeliveryError(
                f"{lost} of {self._written} samples were not delivered to "
                f"{self._delivery.address}: {self._delivery.last_error}; stats() has them all"
            )
