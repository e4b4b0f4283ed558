"""The sampler's process: `python -m fedquilt.observe.child`, started by `ProcessRunner`."""

from __future__ import annotations

import sys
import time
import traceback
from multiprocessing.connection import Connection

from fedquilt.common.errors import FedquiltError
from fedquilt.observe.runners import SamplingLoop, as_fedquilt_error


def main() -> None:
    """Sample until told to stop, or until nobody is there to tell it."""
    pipe = Connection(int(sys.argv[1]))
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
