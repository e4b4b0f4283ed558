"""What the tests of the monitors share: both kinds, a receiver, and nothing left over."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import ModuleType

import psutil
import pytest

from fedquilt.monitor import process_monitor, thread_monitor
from http_receiver import Receiver, wait_until


@pytest.fixture(autouse=True)
def nothing_left_over() -> Iterator[None]:
    """Every test ends with the threads and processes that it began with.

    But for the one thread that wandb keeps for the life of a process, whichever test starts it.
    """

    def running() -> set[threading.Thread]:
        return {one for one in threading.enumerate() if not one.name.startswith("wandb-Asyncio")}

    threads = running()
    processes = set(psutil.Process().children(recursive=True))
    yield
    wait_until(lambda: running() <= threads)
    wait_until(lambda: set(psutil.Process().children(recursive=True)) <= processes)


@pytest.fixture(params=[thread_monitor, process_monitor], ids=["thread", "process"])
def kind(request: pytest.FixtureRequest) -> ModuleType:
    """The module of monitors that sample in a thread, then that in a process."""
    module: ModuleType = request.param
    return module


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """An HTTP server that keeps what it is sent."""
    receiver = Receiver()
    yield receiver
    receiver.close()
