"""Host and GPU side by side: what is queued there, and what the host reads meanwhile.

A number that is fetched from a GPU waits for everything that was queued before it in the
same stream.  While clients train there, the host can keep the last round's books, if what it
reads goes through a stream of its own, which waits only for the moment the books are about.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch


def wake(name: str) -> None:
    """Begin to start a GPU, and its compiler, while something else goes on: data are read.

    Whatever is wrong with them is said where they are needed.
    """
    if name.startswith("cuda") or name == "auto":
        threading.Thread(target=_wake, name="wake the GPU", daemon=True).start()


def _wake() -> None:
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            image = torch.ones(1, 1, 4, 4, device="cuda")
            torch.nn.functional.conv2d(image, image)  # loads the libraries of layers
            from triton.runtime.cache import triton_key

            triton_key()  # reads all of Triton, once in a process


def moment(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that tells when all that is queued so far is done; None without a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def aside(since: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Do things as of a moment, without waiting for what was queued after it.

    What is read within must not be changed by what was queued after the moment.
    """
    if since is None:
        yield
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(since)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()
