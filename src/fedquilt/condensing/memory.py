"""Keeping freed memory at hand on a CPU."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Parameters of mallopt(3), and their defaults in glibc.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
_USUAL = {_TRIM_THRESHOLD: 128 * 1024, _MMAP_MAX: 65536}
_KEEPING = {_TRIM_THRESHOLD: 2**31 - 1, _MMAP_MAX: 0}


@contextmanager
def freed_memory_kept() -> Iterator[bool]:
    """Let glibc keep large freed blocks for the next use instead of giving them back.

    The activations of a batch are tens of megabytes.  glibc maps every block above
    32 MiB anew and unmaps it when it is freed, so that each matching step pays for
    having all its pages cleared again; that made a step on all classes at once slower
    than a loop over them.  Yields whether it could be done; elsewhere than on glibc
    nothing happens.  Afterwards the defaults are back, and what is free is given back.
    """
    libc = _glibc()
    if libc is None:
        yield False
        return
    for name, value in _KEEPING.items():
        libc.mallopt(name, value)
    try:
        yield True
    finally:
        for name, value in _USUAL.items():
            libc.mallopt(name, value)
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.gnu_get_libc_version  # noqa: B018 (other C libraries have no such function)
    except (OSError, AttributeError):
        return None
    return libc
