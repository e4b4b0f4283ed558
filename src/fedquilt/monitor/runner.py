"""What runs a sampling loop, and the one that does it in a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from fedquilt.errors import FedquiltError
from fedquilt.monitor.errors import MonitorError
from fedquilt.monitor.loop import SamplingLoop
from fedquilt.monitor.metrics import Metrics
from fedquilt.monitor.samples import Sample
from fedquilt.monitor.settings import Settings


class Runner(Protocol):
    """A sampling loop that is running somewhere from the moment the runner is made.

    Making one raises what is wrong with meters or sink.  What fails later ends the
    loop and is in `failure` from then on.
    """

    def __init__(self, settings: Settings, emit: Callable[[Sample], None]) -> None:
        """Open everything and begin to sample."""

    @property
    def alive(self) -> bool:
        """Whether it still samples."""

    @property
    def failure(self) -> FedquiltError | None:
        """Why it ended, None when it did not or was told to."""

    @property
    def port(self) -> int | None:
        """The port of the sink, None when it has none."""

    def switch(self, metrics: Metrics) -> None:
        """Measure something else from now on, or raise and leave all as it was."""

    def stop(self) -> None:
        """Take the last sample and end; nothing is left behind when this returns."""


class ThreadRunner:
    """Samples in a thread of this process."""

    def __init__(self, settings: Settings, emit: Callable[[Sample], None]) -> None:
        self.failure: FedquiltError | None = None
        self._loop = SamplingLoop(settings, emit)
        self._thread = threading.Thread(target=self._run, name="fedquilt-monitor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still samples."""
        return self._thread.is_alive()

    @property
    def port(self) -> int | None:
        """The port of the sink, None when it has none."""
        return self._loop.port

    def switch(self, metrics: Metrics) -> None:
        """Measure something else from now on."""
        self._loop.switch(metrics)

    def stop(self) -> None:
        """Take the last sample and end the thread."""
        self._loop.stop()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as error:
            self.failure = surfaced(error)


def surfaced(error: BaseException) -> FedquiltError:
    """Return an error of a sampler as one that users can catch, with its cause."""
    if isinstance(error, FedquiltError):
        return error
    failure = MonitorError(f"the sampler failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure
