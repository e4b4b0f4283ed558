"""Sampling at equal intervals, in a thread or in a process of its own.

A runner begins to sample when it is made, which raises what is wrong with meters or sink.
What fails later ends the sampling and is in `failure` from then on.  The process that a
`ProcessRunner` starts is `python -m fedquilt.observe.runners`.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from fedquilt.common.child import ChildProcess, pipe_to_parent
from fedquilt.common.errors import FedquiltError
from fedquilt.observe.meters import Sampler
from fedquilt.observe.samples import Metrics, MonitorError, Sample, SamplingSettings


class SamplingLoop:
    """Samples a process and gives every sample to `emit` and to the sink.

    Making one opens meters and sink, so what is wrong with them is known at once and
    the first sample covers everything from here on.  `run` takes a sample every
    `interval` seconds and a last, shorter one at the end, so the samples cover the whole
    time without a gap.
    """

    def __init__(self, settings: SamplingSettings, emit: Callable[[Sample], None]) -> None:
        self._interval = settings.interval
        self._emit = emit
        self._lock = threading.Lock()
        with contextlib.ExitStack() as opened:
            self._sampler = Sampler(settings.pid, settings.reach, settings.metrics)
            opened.callback(self._sampler.close)
            self._sink = settings.open_sink()
            opened.pop_all()
        self._next = time.monotonic() + self._interval

    @property
    def port(self) -> int | None:
        """The port of the sink, None when it has none."""
        return self._sink.port

    def run(self, wait: Callable[[float], bool]) -> None:
        """Sample until `wait(seconds)` is True; whatever fails is raised, all is closed."""
        try:
            while not wait(max(0.0, self._next - time.monotonic())):
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

    def switch(self, metrics: Metrics) -> None:
        """Measure something else from now on; the sample until now is taken first."""
        self._sample(metrics)

    def _sample(self, switched_to: Metrics | None = None) -> None:
        with self._lock:
            sample = self._sampler.read()
            self._emit(sample)
            self._sink.write(sample)
            if switched_to is not None:
                self._sampler.switch(switched_to)

    def _close(self) -> None:
        try:
            self._sampler.close()
        finally:
            self._sink.close()


class ThreadRunner:
    """Samples in a thread of this process."""

    def __init__(self, settings: SamplingSettings, emit: Callable[[Sample], None]) -> None:
        self.failure: FedquiltError | None = None
        self._loop = SamplingLoop(settings, emit)
        self.port = self._loop.port
        self.switch = self._loop.switch
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fedquilt-monitor", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still samples."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """Take the last sample and end the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run(self._stop.wait)
        except BaseException as error:
            self.failure = as_fedquilt_error(error)


def as_fedquilt_error(error: BaseException) -> FedquiltError:
    """Return an error of a sampler as one that users can catch, with its cause."""
    if isinstance(error, FedquiltError):
        return error
    failure = MonitorError(f"the sampler failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


ANSWER_SECONDS = 30.0
END_SECONDS = 5.0


class ProcessRunner:
    """Samples this process from another one (`common.child`).

    The other one ends when it is told to, and also when this process ends without telling it.

    Settings, metrics (to switch to) and None (to stop) go to the other process; back come
    ("answer", error or port) to each of the first two, ("sample", sample), and at the end
    ("end", error or None).
    """

    def __init__(self, settings: SamplingSettings, emit: Callable[[Sample], None]) -> None:
        self.failure: FedquiltError | None = None
        self.port: int | None = None
        self._emit = emit
        self._answers: queue.SimpleQueue[FedquiltError | int | None] = queue.SimpleQueue()
        if not sys.executable:
            raise MonitorError(
                "process monitors must know the Python interpreter; use thread_monitor"
            )
        self._child = ChildProcess("fedquilt.observe.runners")
        self._reader = threading.Thread(target=self._read, name="fedquilt-monitor", daemon=True)
        self._reader.start()
        try:
            self.port = self._ask(settings)
        except BaseException:
            self.stop()
            raise

    @property
    def alive(self) -> bool:
        """Whether it still samples."""
        return self._reader.is_alive()

    def switch(self, metrics: Metrics) -> None:
        """Measure something else from now on, or raise and leave all as it was."""
        self._ask(metrics)

    def stop(self) -> None:
        """Take the last sample and end the process."""
        self._send(None)
        self._reader.join(END_SECONDS)
        if self._reader.is_alive():
            self._child.process.kill()
            self._reader.join()
        self._child.close()

    def _ask(self, order: SamplingSettings | Metrics) -> int | None:
        """Send an order and wait for the answer; raise when it is an error."""
        self._send(order)
        try:
            answer = self._answers.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise MonitorError(
                f"the sampler's process says nothing for {ANSWER_SECONDS} s"
            ) from None
        if isinstance(answer, FedquiltError):
            raise answer
        return answer

    def _send(self, order: SamplingSettings | Metrics | None) -> None:
        # When the process is gone, the reader says why.
        with contextlib.suppress(OSError):
            self._child.pipe.send(order)

    def _read(self) -> None:
        """Take messages until the process ends."""
        reported = False
        try:
            while not reported:
                kind, content = self._child.pipe.recv()
                if kind == "sample":
                    self._emit(content)
                elif kind == "answer":
                    self._answers.put(content)
                else:
                    reported, self.failure = True, content
        except (EOFError, OSError):
            pass  # it died
        except Exception as error:
            reported, self.failure = True, as_fedquilt_error(error)
            self._child.process.kill()
        code = self._child.process.wait()
        if not reported:
            said = self._child.last_words()[-2000:] or "it said nothing"
            self.failure = MonitorError(f"the sampler's process ended with code {code}: {said}")
        self._answers.put(self.failure or MonitorError("the monitor has been stopped"))


def main() -> None:
    """Sample until told to stop, or until nobody is there to tell it."""
    pipe = pipe_to_parent()
    try:
        pipe.send(("end", _serve(pipe)))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)  # the other process is gone; there is nobody to tell


def _serve(pipe: Connection) -> FedquiltError | None:
    """Sample, and send what happens; return what failed."""
    try:
        loop = SamplingLoop(pipe.recv(), lambda sample: pipe.send(("sample", sample)))
        pipe.send(("answer", loop.port))
        loop.run(lambda seconds: _obey(pipe, loop, seconds))
    except (BrokenPipeError, ConnectionResetError):
        raise
    except BaseException as error:
        return _portable(error)
    return None


def _obey(pipe: Connection, loop: SamplingLoop, seconds: float) -> bool:
    """Carry out what comes in for some seconds; return whether to stop."""
    until = time.monotonic() + seconds
    while pipe.poll(max(0.0, until - time.monotonic())):
        try:
            metrics = pipe.recv()
        except EOFError:
            return True
        if metrics is None:
            return True
        try:
            loop.switch(metrics)
        except Exception as error:
            pipe.send(("answer", _portable(error)))
        else:
            pipe.send(("answer", None))
    return False


def _portable(error: BaseException) -> FedquiltError:
    """Return an error that survives the pipe, with its trace, which would not, as a note."""
    trace = "".join(traceback.format_exception(error))
    shown = as_fedquilt_error(error)
    shown.add_note(f"in the sampler's process:\n{trace}")
    return shown


if __name__ == "__main__":
    main()
