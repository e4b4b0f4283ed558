"""The monitors: what is common to all, and the three places where samples can go."""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import ClassVar, Self, TypedDict, Unpack

from fedquilt.common import checks
from fedquilt.common.errors import FedquiltError
from fedquilt.observe.delivery import Address
from fedquilt.observe.meters import network_scope
from fedquilt.observe.runners import ProcessRunner, ThreadRunner
from fedquilt.observe.samples import FORMS, Metrics, Reach, Series, Settings, Sink
from fedquilt.observe.sinks import FileSink, PrometheusSink, RemoteSink

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

    _runner_type: ClassVar[type[ThreadRunner | ProcessRunner]]

    def __init__(self, interval: float, reach: ReachOptions) -> None:
        self._interval = checks.number("interval", interval, at_least=SHORTEST_INTERVAL)
        self._reach = Reach(**reach)
        self._metrics = Metrics()
        self._series = Series()
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
            settings = Settings(
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
