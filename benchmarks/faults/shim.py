"""Building the shim and arming it in a process that has it preloaded."""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("shim.c")


class NoCompilerError(Exception):
    """There is no C compiler, or the shim cannot be built with it."""


class Action(enum.IntEnum):
    """What happens at a system call."""

    NOTHING = 0
    KILL_BEFORE = 1
    KILL_AFTER = 2
    KILL_HALF = 3
    FAIL = 4


@dataclass(frozen=True)
class Fault:
    """A fault at the `nth` call: a kill, a kill and a power cut, or an error."""

    name: str
    action: Action
    error: int = 0
    forever: bool = False
    cut: str = ""
    nth: int = 0


FAULTS = (
    Fault("kill before a call", Action.KILL_BEFORE),
    Fault("kill after a call", Action.KILL_AFTER),
    Fault("kill after half a write", Action.KILL_HALF),
    Fault("power cut, all unsynced lost", Action.KILL_AFTER, cut="all"),
    Fault("power cut, some unsynced lost", Action.KILL_AFTER, cut="some"),
    Fault("power cut in a write", Action.KILL_HALF, cut="some"),
    Fault("disk full once", Action.FAIL, errno.ENOSPC),
    Fault("disk full from then on", Action.FAIL, errno.ENOSPC, forever=True),
    Fault("I/O error once", Action.FAIL, errno.EIO),
    Fault("I/O error from then on", Action.FAIL, errno.EIO, forever=True),
)


def build(folder: Path) -> Path:
    """Compile the shim into `folder`; raise `NoCompilerError` where that cannot be done."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux"):
        raise NoCompilerError("faults at system calls need Linux and a C compiler (cc)")
    target = folder / "fault_shim.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(target), str(_SOURCE), "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoCompilerError(f"{' '.join(command)} failed:\n{done.stderr}")
    return target


def preloaded(library: Path, command: Sequence[str]) -> int:
    """Run a command with the shim before the C library; return its exit code."""
    return subprocess.run(command, env={**os.environ, "LD_PRELOAD": str(library)}).returncode


def arm(folder: Path, log: Path, fault: Fault | None) -> None:
    """Watch a folder from now on, in this process only; None counts the calls."""
    fault = fault or Fault("", Action.NOTHING)
    _shim().fault_watch(
        str(folder).encode(),
        str(log).encode(),
        ctypes.c_long(fault.nth),
        int(fault.action),
        fault.error,
        int(fault.forever),
    )


def calls() -> int:
    """Return how many calls were counted."""
    return int(_shim().fault_count())


def hits() -> int:
    """Return how many calls failed."""
    return int(_shim().fault_hits())


def _shim() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    for name in ("fault_count", "fault_hits"):
        getattr(library, name).restype = ctypes.c_long
    return library
