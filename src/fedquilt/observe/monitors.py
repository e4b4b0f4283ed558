"""The monitors, and where their samples go: a file, Prometheus, an HTTP server.

`RoundMonitor` samples what a run uses, by round and by tier.

Where clients hold slices, a round trains one width after the other, and what the machine uses
meanwhile is that width's; what is left of a round is the server's: noise, update, evaluation.
How long clients take tells how much they hold, so this is for the owner of a run alone:
`monitor.jsonl` has mode 0600 and nothing of it is in any public line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self, TypedDict, Unpack

from fedquilt.common import checks, optional
from fedquilt.common.errors import FedquiltError
from fedquilt.common.observer import Observer
from fedquilt.common.storage import append_line, storage_errors
from fedquilt.observe.delivery import CLOSE_SECONDS, Address, Delivery, post_fields
from fedquilt.observe.meters import Sampler, network_scope
from fedquilt.observe.power import power_sources
from fedquilt.observe.runners import ProcessRunner, ThreadRunner
from fedquilt.observe.samples import (
    BYTES_RECV,
    BYTES_SENT,
    CPU,
    FORMS,
    MEMORY,
    NETWORK,
    POWER,
    VDD_CPU_GPU_CV,
    VDD_IN,
    VDD_SOC,
    DeliveryError,
    Metrics,
    MonitorError,
    Reach,
    Sample,
    SampleSeries,
    SamplingSettings,
    Sink,
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
        self._families = optional.require("prometheus_client.core", "PrometheusMonitor")
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
        client = optional.require("prometheus_client", "PrometheusMonitor")
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


SHORTEST_INTERVAL = 0.01


class ReachOptions(TypedDict, total=False):
    """The keywords of `Reach`, which every monitor takes."""

    children: bool
    network_scope: str
    loopback: bool
    sysfs: str | os.PathLike[str]


class Monitor:
    """Samples the resources that this process uses, from `start` to `stop`.

    Also a context manager.  When the sampler fails, the first of `stats`, `summary`
    and `stop` that is called afterwards raises the reason, once; `error` keeps it,
    and `stats` then has what was sampled before.
    """

    _runner_type: ClassVar[type[ThreadRunner | ProcessRunner]] = ProcessRunner

    def __init__(self, interval: float, reach: ReachOptions) -> None:
        self._interval = checks.number("interval", interval, at_least=SHORTEST_INTERVAL)
        self._reach = Reach(**reach)
        self._metrics = Metrics()
        self._series = SampleSeries()
        # start, stop and set_metrics of several threads come one after the other.
        self._control = threading.RLock()
        self._runner: ThreadRunner | ProcessRunner | None = None
        self._reported: FedquiltError | None = None

    def _sink(self) -> Callable[[], Sink]:
        """Return what opens the place where samples go; it is called in the sampler's process."""
        raise NotImplementedError

    def set_metrics(self, **metrics: bool) -> None:
        """Switch metrics on or off: `cpu`, `memory`, `network`, `power`.

        Those not named stay as they are; at first all but `power` are on.  While
        the monitor runs the change holds from now on.

        Raises
        ------
        ValueError
            There is no such metric.
        TypeError
            A value is not True or False.
        PowerUnavailableError
            The monitor runs, and the machine offers no power meter; else `start` raises it.
        """
        with self._control:
            switched = self._metrics.switched(metrics)
            if self._runner is not None and self._runner.alive:
                self._runner.switch(switched)
            self._metrics = switched

    def start(self) -> None:
        """Begin to sample; does nothing when the monitor runs already.

        Returns when the first sample's time has begun; raises when a metric cannot
        be measured or the samples cannot go where they should.  After `stop` a
        monitor can be started again and goes on with the same series.
        """
        with self._control:
            if self.running:
                return
            self.stop()
            settings = SamplingSettings(
                os.getpid(), self._interval, self._metrics, self._reach, self._sink()
            )
            self._runner = self._runner_type(settings, self._series.append)

    def stop(self) -> None:
        """Take a last sample and end; does nothing when the monitor does not run.

        Everything has ended when this returns or raises.
        """
        with self._control:
            if self._runner is not None:
                self._runner.stop()
        self._raise_failure()

    def stats(self) -> dict[str, list[float]]:
        """Return all samples, a list for each metric; can be called at any time.

        `cpu_usage` and `memory_usage` in percent, `network_bytes_sent` and
        `network_bytes_recv` in bytes since the sample before, `power_vdd_in`,
        `power_vdd_cpu_gpu_cv` and `power_vdd_soc` in mW.
        """
        self._raise_failure()
        return self._series.stats()

    def summary(self) -> dict[str, float]:
        """Return averages (percent), totals (bytes) and energies (mJ) of all samples."""
        self._raise_failure()
        return self._series.summary()

    @property
    def running(self) -> bool:
        """Whether samples are being taken."""
        return self._runner is not None and self._runner.alive

    @property
    def error(self) -> FedquiltError | None:
        """Why the last run ended early, None when it did not."""
        return None if self._runner is None else self._runner.failure

    @property
    def network_scope(self) -> str:
        """Whose traffic the network metrics count, in words."""
        return network_scope(os.getpid(), self._reach)

    def _raise_failure(self) -> None:
        failure = self.error
        if failure is not None and failure is not self._reported:
            self._reported = failure
            raise failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except FedquiltError as failure:
            if error is None:
                raise
            # What went wrong inside the block matters more.
            error.add_note(f"its monitor failed too: {failure}")


class FileMonitor(Monitor):
    """Appends samples to a text file.

    Parameters
    ----------
    file : path
        The file; its folder is made when missing.
    interval : float
        Seconds between samples.
    form : {"fedquilt", "heflwr"}
        How a line is written; `heflwr`: as HeFlwr's FileMonitor writes it.
    children, network_scope, loopback, sysfs
        How far the metrics reach; see `fedquilt.monitor.Reach`.
    """

    def __init__(
        self,
        file: str | os.PathLike[str],
        interval: float = 5,
        *,
        form: str = "fedquilt",
        **reach: Unpack[ReachOptions],
    ) -> None:
        super().__init__(interval, reach)
        self._file = os.path.abspath(checks.path("file", file))
        self._form = checks.choice("form", form, FORMS)

    def _sink(self) -> Callable[[], Sink]:
        return partial(FileSink, self._file, self._form)


class PrometheusMonitor(Monitor):
    """Serves the latest sample to Prometheus.

    Parameters
    ----------
    port : int
        The port to listen on; 0 lets the system choose, see the attribute `port`.
    interval : float
        Seconds between samples.
    address : str
        The address to listen on; "127.0.0.1" shows the metrics to this machine only,
        "0.0.0.0" to every machine that can reach it.
    children, network_scope, loopback, sysfs
        How far the metrics reach; see `fedquilt.monitor.Reach`.
    """

    def __init__(
        self,
        port: int = 8003,
        interval: float = 5,
        *,
        address: str = "127.0.0.1",
        **reach: Unpack[ReachOptions],
    ) -> None:
        super().__init__(interval, reach)
        self._port = checks.integer("port", port, at_least=0, at_most=65535)
        self._address = checks.text("address", address)

    def _sink(self) -> Callable[[], Sink]:
        return partial(PrometheusSink, self._address, self._port, self.network_scope)

    @property
    def port(self) -> int:
        """The port that was asked for or, once started, the one that is listened on."""
        port = None if self._runner is None else self._runner.port
        return self._port if port is None else port


class RemoteMonitor(Monitor):
    """Posts samples to an HTTP server, as `fedquilt.log` posts records.

    Parameters
    ----------
    host : str
        The server, "127.0.0.1:5000".
    interval : float
        Seconds between samples.
    identifier : str, optional
        Who sends; by default "remote-monitor-" and a random number.
    simple : bool
        True posts the text of a sample to `/simple_log`, False a log record with all
        numbers to `/log`.
    form : {"fedquilt", "heflwr"}
        How the text is written; `heflwr`: as HeFlwr's RemoteMonitor writes it.
    children, network_scope, loopback, sysfs
        How far the metrics reach; see `fedquilt.monitor.Reach`.
    """

    def __init__(
        self,
        host: str,
        interval: float = 5,
        identifier: str | None = None,
        simple: bool = True,
        *,
        form: str = "fedquilt",
        **reach: Unpack[ReachOptions],
    ) -> None:
        super().__init__(interval, reach)
        self._address = Address.parse(host)
        self._simple = checks.flag("simple", simple)
        self._form = checks.choice("form", form, FORMS)
        chosen = f"remote-monitor-{uuid.uuid4().hex}" if identifier is None else identifier
        self.identifier = checks.text("identifier", chosen)

    def _sink(self) -> Callable[[], Sink]:
        return partial(
            RemoteSink, self._address, self.identifier, simple=self._simple, form=self._form
        )


class ThreadFileMonitor(FileMonitor):
    __doc__ = FileMonitor.__doc__
    _runner_type = ThreadRunner


class ThreadPrometheusMonitor(PrometheusMonitor):
    __doc__ = PrometheusMonitor.__doc__
    _runner_type = ThreadRunner


class ThreadRemoteMonitor(RemoteMonitor):
    __doc__ = RemoteMonitor.__doc__
    _runner_type = ThreadRunner


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
