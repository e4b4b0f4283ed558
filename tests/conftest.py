"""What the tests of whole runs share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from browser import chrome, visit  # noqa: F401
from command_line import cli, here, no_figures  # noqa: F401
from done_once import build_commands_once, read_digits_once
from examples import use_profile
from fedquilt.config import RunConfig
from fedquilt.experiment.api import RunResult, run_config
from run_processes import Nursery
from run_samples import tiny

# A shell starts background jobs with Ctrl-C ignored, and children inherit that; the tests
# that interrupt children need it back.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# As in `make test`: faster for small models, and a fork beside threads of torch would hang.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))

# Runs note in the user's state folder how far they came; those of tests do so elsewhere.
_STATE = tempfile.TemporaryDirectory()
os.environ["XDG_STATE_HOME"] = _STATE.name


def _temporary_folders_in_memory() -> None:
    """Waiting for a disk is most of what killed runs do, and no test pulls the plug."""
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > ROOM:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(memory))


ROOM = 2**29  # ten times what all tests together leave
_temporary_folders_in_memory()
read_digits_once()
build_commands_once()
use_profile()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts processes, and pages in a browser as slow: tiers are chosen by marks.

    The longest test of a deployment begins first, so that nobody waits for it in the end.
    """
    items.sort(key=lambda item: "masks_deploy" not in item.nodeid)
    for item in items:
        used = getattr(item, "fixturenames", ())
        if "nursery" in used:
            item.add_marker(pytest.mark.processes)
        if "chrome" in used:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """A source of real processes."""
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.close()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums over several threads may round differently from those of a child."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunResult]:
    """Run a configuration to its end, once for all tests that compare with it."""
    finished: dict[RunConfig, RunResult] = {}

    def run(**changes: Any) -> RunResult:
        config = tiny(**changes)
        if config not in finished:
            folder = str(tmp_path_factory.mktemp("whole"))
            finished[config] = run_config(config.replace(output_dir=folder))
        return finished[config]

    return run
