"""The shim of the fault campaign, built once for the tests that need system calls to fail."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import pytest

from run_processes import environment

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
needs_shim = pytest.mark.skipif(
    not sys.platform.startswith("linux") or not shutil.which("cc"),
    reason="faults at system calls need Linux and a C compiler",
)


def load(name: str) -> ModuleType:
    """Load a module of `benchmarks/faults`."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / "faults" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@functools.cache
def library() -> Path:
    """Build the shim."""
    folder = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    built: Path = load("shim").build(folder)
    return built


def denying(link: int = 0, flock: int = 0, fcntl: int = 0) -> dict[str, str]:
    """Return the environment of a process in which some calls fail with an error number."""
    settings = {"FAULT_LINK": link, "FAULT_FLOCK": flock, "FAULT_FCNTL": fcntl}
    given = {name: str(number) for name, number in settings.items() if number}
    return {**environment(), **given, "LD_PRELOAD": str(library())}
