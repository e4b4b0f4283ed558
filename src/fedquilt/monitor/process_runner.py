"""Sampling in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fedquilt.errors import FedquiltError
from fedquilt.monitor.errors import MonitorError
from fedquilt.monitor.metrics import Metrics
from fedquilt.monitor.runner import surfaced
from fedquilt.monitor.samples import Sample
from fedquilt.monitor.settings import Settings
from fedquilt.monitor.wire import unpack_error, unpack_sample

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
        [sys.executable, "-P", "-m", "fedquilt.monitor.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=said,
        env={**os.environ, "PYTHONPATH": path},
        encoding="utf-8",
        # Ctrl-C is for the program; it decides when its monitor ends.
        start_new_session=True,
    )
