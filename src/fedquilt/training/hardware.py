"""The machine that clients train on: its cores, torch's threads, freed memory, GPU streams.

A number that is fetched from a GPU waits for everything queued before it in the same stream.
While clients train there, the host can finish the last round's records if its reads go through
a side stream, which waits only for the event the records are about.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

import torch

# Parameters of mallopt(3), and their defaults in glibc.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_DEFAULTS = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_KEEPING = {_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0}


def usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def one_thread(wanted: bool = True) -> Iterator[None]:
    """Limit torch to one thread within, where that is wanted.

    A thread that has helped with one operation spins for milliseconds while it waits for the
    next, on a core that others could use: workers, or whatever else runs on the machine.  With a
    small network that costs more than a second thread ever saves.
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


@contextlib.contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Let glibc keep large freed blocks for the next use instead of giving them back.

    Activations of megabytes come and go with every layer.  glibc maps large blocks anew and
    unmaps them when they are freed, so that all their pages are cleared again each time.
    Yields whether it could be done; elsewhere than on glibc nothing happens.  Afterwards the
    defaults are back, and what is free is given back.
    """
    if not keep_freed_memory():
        yield False
        return
    try:
        yield True
    finally:
        keep_freed_memory(False)


def keep_freed_memory(wanted: bool = True) -> bool:
    """Let glibc keep freed memory from now on, or no longer; return whether it could be done."""
    libc = _glibc()
    if libc is None:
        return False
    for name, value in (_KEEPING if wanted else _DEFAULTS).items():
        libc.mallopt(name, value)
    if not wanted:
        libc.malloc_trim(0)
    return True


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018 (other C libraries have no such function)
    except (OSError, AttributeError):
        return None
    return libc


def warm_up_gpu(name: str) -> None:
    """Start a GPU and its compiler in the background, while data are read.

    Errors are raised where the device is used.
    """
    if name.startswith("cuda") or name == "auto":
        threading.Thread(target=_warm_up, name="warm up the GPU", daemon=True).start()


def _warm_up() -> None:
    with contextlib.suppress(Exception):
        if torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            image = torch.ones(1, 1, 4, 4, device="cuda")
            torch.nn.functional.conv2d(image, image)  # loads the libraries of layers
            from triton.runtime.cache import triton_key

            triton_key()  # reads all of Triton, once in a process


def record_event(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all that is queued so far; None without a GPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


@contextlib.contextmanager
def on_side_stream(since: torch.cuda.Event | None, device: torch.device) -> Iterator[None]:
    """Run on a stream of its own that waits for an event, and not for what was queued after it.

    What is read within must not be changed by what was queued after the event.
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
