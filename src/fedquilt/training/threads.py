"""How many threads torch has in this process while clients train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Leave torch one thread meanwhile, where that is wanted.

    A thread that has helped with one operation waits for the next for milliseconds, on a core
    that others could use: workers, or whatever else runs on the machine.  With a small network
    that costs more than a second thread ever saves.
    """
    threads = torch.get_num_threads()
    if not wanted or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
