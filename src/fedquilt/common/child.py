"""A process beside this one: a fresh interpreter that runs one module of the package.

Not a `multiprocessing.Process`: a fork of a process with threads or a GPU can hang, and a spawned
process imports the program's main module again, which costs seconds and needs a `__main__` guard.
(Workers that train share memory with their parent and are made in great numbers: those come from
a fork server, see `training.engines.pool`.)  Both sides talk through a pipe, so that whatever user
code prints is no message; the child ends when its pipe closes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing.connection import Connection


class ChildProcess:
    """This side of a child that runs `python -m module`; what it prints is kept for errors."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the child
        self.pipe, theirs = multiprocessing.Pipe()
        known = [*os.environ.get("PYTHONPATH", "").split(os.pathsep), *sys.path]
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in known))
        with theirs:
            self.process = subprocess.Popen(
                # -P: a module of the current folder must not be taken for one of Python's.
                [sys.executable, "-P", "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env={**os.environ, "PYTHONPATH": path, **(environment or {})},
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for this process, which ends its children
            )

    def last_words(self) -> str:
        """Return what the child has printed; empty where it is nothing, or closed."""
        with contextlib.suppress(ValueError):
            self._output.seek(0)
            return self._output.read().decode(errors="replace").strip()
        return ""

    def close(self) -> None:
        """Close the pipe, upon which the child ends."""
        self.pipe.close()
        self._output.close()


def pipe_to_parent() -> Connection:
    """Return the child's end of the pipe, whose number is its only argument."""
    number = int(sys.argv[1])
    os.set_inheritable(number, False)
    return Connection(number)
