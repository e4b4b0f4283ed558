"""How many threads torch has in this process while clients train."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class OneThread:
    """Takes all threads but one away, and gives them back.

    A thread that has helped with one operation waits for the next for milliseconds, on a core
    that others could use: workers, or whatever else runs on the machine.  With a small network
    that costs more than a second thread ever saves.  Who gives back last, of several that have
    taken, gives back what the first one found.
    """

    _holders = 0
    _found = 1

    def __init__(self) -> None:
        self._holds = False

    def begin(self) -> None:
        """Leave torch one thread; doing so again does nothing."""
        if self._holds:
            return
        if not OneThread._holders:
            OneThread._found = torch.get_num_threads()
        torch.set_num_threads(1)
        self._holds = True
        OneThread._holders += 1

    def end(self) -> None:
        """Give back; doing so again does nothing."""
        if not self._holds:
            return
        self._holds = False
        OneThread._holders -= 1
        if not OneThread._holders:
            torch.set_num_threads(OneThread._found)


@contextlib.contextmanager
def one_thread(is_small: bool) -> Iterator[None]:
    """Compute on one thread where a step is so short that a second one only costs time."""
    threads = torch.get_num_threads()
    if not is_small or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
