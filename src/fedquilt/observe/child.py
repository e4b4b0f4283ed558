"""The sampler's process: `python -m fedquilt.observe.child`, started by `ProcessRunner`."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any, TextIO

from fedquilt.observe.runners import SamplingLoop, pack_error, pack_sample
from fedquilt.observe.samples import Metrics, Settings


class Channel:
    """Lines of JSON to the process that started this one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, **message: Any) -> None:
        """Send one message."""
        with self._lock:
            self._stream.write(json.dumps(message) + "\n")
            self._stream.flush()


def main() -> None:
    """Sample until told to stop, or until nobody is there to tell it."""
    # Whatever prints must not print into the messages.
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    code = 0
    try:
        _serve(Channel(stream))
    except BrokenPipeError:
        # The other process is gone; there is nobody to tell.
        code = 1
    # The thread that waits for orders cannot be woken, and would be in the way of
    # an ordinary end; everything is closed by now.
    os._exit(code)


def _serve(channel: Channel) -> None:
    """Sample, and send what happens; only a channel that leads nowhere is raised."""
    try:
        settings = Settings.from_json(sys.stdin.readline())
        loop = SamplingLoop(settings, lambda sample: channel.send(sample=pack_sample(sample)))
        channel.send(ready={"port": loop.port})
        threading.Thread(target=_obey, args=(loop, channel), daemon=True).start()
        loop.run()
    except BrokenPipeError:
        raise
    except BaseException as error:
        channel.send(failed=pack_error(error))
    else:
        channel.send(done=True)


def _obey(loop: SamplingLoop, channel: Channel) -> None:
    """Carry out what comes in; the end of the input is an order to stop too."""
    for line in sys.stdin:
        order = json.loads(line)
        if "stop" in order:
            break
        try:
            loop.switch(Metrics(**order["metrics"]))
        except Exception as error:
            channel.send(refused=pack_error(error))
        else:
            channel.send(switched=True)
    loop.stop()


if __name__ == "__main__":
    main()
