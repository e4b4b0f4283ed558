"""Sampling at equal intervals, in a thread or in a process of its own.

What a sampler's process and the process that started it tell each other.

Lines of JSON.  The settings come first; then `{"metrics": ...}` or `{"stop": true}` go to
the sampler, and back come `{"ready": {"port": ...}}`, `{"sample": ...}`,
`{"switched": true}`, `{"refused": error}`, and at the end `{"failed": error}` or
`{"done": true}`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

from fedquilt.common.errors import FedquiltError, InvalidValueError, StorageError
from fedquilt.observe.meters import Sampler, network_scope
from fedquilt.observe.samples import (
    DeliveryError,
    Metrics,
    MissingExtraError,
    MonitorError,
    PowerUnavailableError,
    Sample,
    Settings,
)
from fedquilt.observe.sinks import open_sink


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


_KINDS: dict[str, type[FedquiltError]] = {
    kind.__name__: kind
    for kind in (
        *(MonitorError, PowerUnavailableError, DeliveryError, MissingExtraError),
        *(StorageError, InvalidValueError),
    )
}


def pack_error(error: BaseException) -> dict[str, str]:
    """Return an error as plain data, with the place where it happened."""
    shown = surfaced(error)
    trace = "".join(traceback.format_exception(error))
    return {"kind": type(shown).__name__, "text": str(shown), "trace": trace}


def unpack_error(held: dict[str, str]) -> FedquiltError:
    """Return the error that `pack_error` packed; its trace is a note."""
    error = _KINDS.get(held["kind"], MonitorError)(held["text"])
    error.add_note(f"in the sampler's process:\n{held['trace']}")
    return error


def pack_sample(sample: Sample) -> dict[str, Any]:
    """Return a sample as plain data."""
    return asdict(sample)


def unpack_sample(held: dict[str, Any]) -> Sample:
    """Return the sample that `pack_sample` packed."""
    return Sample(**held)


ANSWER_SECONDS = 30.0
END_SECONDS = 5.0


class ProcessRunner:
    """Samples this process from another one.

    The other one is a fresh interpreter, not a fork: a fork of a process with threads
    or a GPU can hang, and a program needs no `__main__` guard this way.  It ends when
    it is told to, and also when this process ends without telling it.
    """

    def __init__(self, settings: Settings, emit: Callable[[Sample], None]) -> None:
        self.failure: FedquiltError | None = None
        self.port: int | None = None
        self._emit = emit
        self._done = False
        self._answers: queue.SimpleQueue[FedquiltError | None] = queue.SimpleQueue()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = _launch(self._said)
        self._reader = threading.Thread(target=self._read, name="fedquilt-monitor", daemon=True)
        self._reader.start()
        try:
            self._order(settings.to_json())
        except BaseException:
            self.stop()
            raise

    @property
    def alive(self) -> bool:
        """Whether it still samples."""
        return self._reader.is_alive()

    def switch(self, metrics: Metrics) -> None:
        """Measure something else from now on."""
        self._order(json.dumps({"metrics": asdict(metrics)}))

    def stop(self) -> None:
        """Take the last sample and end the process."""
        self._send(json.dumps({"stop": True}))
        self._reader.join(END_SECONDS)
        if self._reader.is_alive():
            self._process.kill()
            self._reader.join()
        # Closing a pipe that is broken already is no news.
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]
        self._said.close()

    def _order(self, line: str) -> None:
        """Send a line and wait for the answer to it; raise when it is an error."""
        self._send(line)
        try:
            answer = self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise MonitorError(
                f"the sampler's process says nothing for {ANSWER_SECONDS} s"
            ) from None
        if answer is not None:
            raise answer

    def _send(self, line: str) -> None:
        # When the process is gone, the reader says why.
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(f"{line}\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _read(self) -> None:
        """Take messages until the process ends."""
        try:
            with self._process.stdout as lines:  # type: ignore[union-attr]
                for line in lines:
                    self._take(json.loads(line))
        except Exception as error:
            self.failure = surfaced(error)
            self._process.kill()
        code = self._process.wait()
        if not self._done and self.failure is None:
            self.failure = MonitorError(
                f"the sampler's process ended with code {code}: {self._last_words()}"
            )
        self._answers.put(self.failure or MonitorError("the monitor has been stopped"))

    def _take(self, message: dict[str, Any]) -> None:
        if "sample" in message:
            self._emit(unpack_sample(message["sample"]))
        elif "ready" in message:
            self.port = message["ready"]["port"]
            self._answers.put(None)
        elif "switched" in message:
            self._answers.put(None)
        elif "refused" in message:
            self._answers.put(unpack_error(message["refused"]))
        elif "failed" in message:
            self.failure = unpack_error(message["failed"])
        else:
            self._done = True

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read().decode(errors="replace").strip()[-2000:] or "it said nothing"


def _launch(said: Any) -> subprocess.Popen[str]:
    if not sys.executable:
        raise MonitorError("process monitors must know the Python interpreter; use thread_monitor")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    return subprocess.Popen(
        # -P: a module of the current folder must not be taken for one of Python's.
        [sys.executable, "-P", "-m", "fedquilt.observe.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env={**os.environ, "PYTHONPATH": path},
        encoding="utf-8",
        # Ctrl-C is for the program; it decides when its monitor ends.
        start_new_session=True,
    )
