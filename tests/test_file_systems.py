"""Runs on file systems that lack something: hard links, locks, a temporary folder."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from fedquilt.errors import StorageError
from fedquilt.experiment.api import resume_run, run_config, run_in_memory
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.run_account import RunAccount
from fedquilt.record.folder import RunFolder
from fedquilt.training.engines.pool import SharedTensor
from run_processes import environment
from run_samples import flags, folder_of, only_folder, tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, *places: tuple[Any, str]) -> None:
    """Let some functions fail as system calls do."""

    def call(*given: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    for module, name in places:
        monkeypatch.setattr(module, name, call)


def test_a_certified_run_needs_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FAT, exFAT, SMB and many FUSE mounts have none."""
    refuse(monkeypatch, errno.EPERM, (os, "link"))
    folder = folder_of(run_config(tiny(mode="certified", output_dir=str(tmp_path))))
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_run_without_locks_warns_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Nobody else uses the folder, and nobody is said to."""
    refuse(monkeypatch, number, (fcntl, "flock"), (fcntl, "lockf"))
    config = tiny(mode="fedavg", output_dir=str(tmp_path))
    with pytest.warns(UserWarning, match=r"has no file locks.*nothing keeps a second process"):
        folder = folder_of(run_config(config))
    (folder / "result.json").unlink()
    with pytest.warns(UserWarning, match="has no file locks"):
        resume_run(folder)
    assert (folder / "result.json").exists()


def test_any_other_error_of_a_lock_is_said_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(run_config(tiny(mode="fedavg", output_dir=str(tmp_path))))
    refuse(monkeypatch, errno.EIO, (fcntl, "flock"))
    with pytest.raises(StorageError, match="Input/output error"):
        RunFolder.open(folder).acquire()


@pytest.fixture
def no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container whose only writable place is the output folder."""

    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)


@pytest.mark.usefixtures("no_temporary_folder")
@pytest.mark.parametrize("mode", ["fedavg", "certified"])
def test_a_run_with_a_folder_needs_no_temporary_one(tmp_path: Path, mode: str) -> None:
    assert run_config(tiny(mode=mode, output_dir=str(tmp_path))).result["rounds"] == 4


WITHOUT = """
import os, sys, tempfile
sys.modules["dill"] = None  # torch imports it where it is installed, and it asks for a folder
def nowhere():
    raise FileNotFoundError(2, "No usable temporary directory found")
tempfile.gettempdir = nowhere
from fedquilt.cli import main
main()
"""


def test_nor_does_one_whose_cost_torch_counts(tmp_path: Path) -> None:
    """Counting imports torch's compiler, which wants a folder for a cache; so does nobody else."""
    changes = {"mode": "fedavg", "method": "heterofl", "model": "digits", "tiers": "1,1/2"}
    settings = flags(**changes, noise_seed=None, num_rounds=1, output_dir=tmp_path)
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT, "run", *settings, "--json"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.usefixtures("no_temporary_folder")
def test_worker_processes_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    context = multiprocessing.get_context("spawn")
    refuse(monkeypatch, errno.EROFS, (type(context), "RawArray"))
    with pytest.raises(StorageError, match=r"needs 12 bytes of shared memory.*Read-only.*TMPDIR"):
        SharedTensor(context, (3,), torch.float32)


@pytest.mark.usefixtures("no_temporary_folder")
def test_a_ledger_in_memory_says_that_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_in_memory(tiny(mode="fedavg")).result["rounds"] == 4
    with pytest.raises(StorageError, match=r"needs a temporary folder.*TMPDIR"):
        run_in_memory(tiny(mode="certified"))


def test_a_killed_run_leaves_no_temporary_folder(tmp_path: Path) -> None:
    for name in ("runs", "tmp"):
        (tmp_path / name).mkdir()
    pid = os.fork()
    if pid == 0:
        tempfile.tempdir = str(tmp_path / "tmp")
        RunAccount.reserve = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        run_config(tiny(mode="certified", output_dir=str(tmp_path / "runs")))
        os._exit(70)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert list((tmp_path / "tmp").iterdir()) == []
    resume_run(only_folder(tmp_path / "runs"))
