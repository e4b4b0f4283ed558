"""What a run does when the disk, the user or a second process gets in its way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedquilt.errors import RunFolderError, RunInterrupted, StorageError
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import RunResult, resume_run, run_config
from run_processes import Nursery, environment
from run_samples import (
    assert_is_whole,
    assert_same_run,
    contents,
    flags,
    only_folder,
    rounds_saved,
    tiny,
    wait_for_lines,
)

pytestmark = pytest.mark.usefixtures("one_thread")

RICH: dict[str, Any] = {"mode": "quap_fl", "server_optimizer": "momentum", "num_rounds": 4}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that every user of the machine can reach."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


def assert_clean_failure(code: int, err: str) -> None:
    """Fail unless a process ended with one message for its user."""
    assert code == 2, err
    assert "Traceback" not in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_a_disk_that_fills_up(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    ended = nursery.run(
        *("run", *flags(**RICH, output_dir=tmp_path), "--quiet"),
        largest_file=1500,
        largest_file_after=2,
    )
    assert_clean_failure(ended.code, ended.err)
    folder = only_folder(tmp_path)
    assert f"cannot write '{folder}/" in ended.err
    assert os.strerror(errno.EFBIG) in ended.err
    assert rounds_saved(folder) == 2
    assert not list(folder.glob(".*.tmp"))
    ended = nursery.run("run", "--resume", folder, "--quiet", largest_file=1500)
    assert_clean_failure(ended.code, ended.err)
    assert rounds_saved(folder) == 2
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**RICH))


def test_a_line_that_did_not_fit(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    """The last line of rounds.jsonl is cut off by the disk; the run still goes on later."""
    ended = nursery.run(
        *("run", *flags(**RICH, output_dir=tmp_path), "--quiet"),
        largest_file=600,
        checkpoint_seconds=3600,
    )
    assert_clean_failure(ended.code, ended.err)
    folder = only_folder(tmp_path)
    assert (folder / "rounds.jsonl").stat().st_size == 600
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**RICH))


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.ENOSPC, "the disk is full"),
        (errno.EDQUOT, "the disk quota is used up"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EIO, os.strerror(errno.EIO)),
    ],
)
def test_the_message_names_place_and_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cause: str
) -> None:
    monkeypatch.setattr(training_loop, "CHECKPOINT_SECONDS", 0.0)
    calls: list[int] = []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 9:  # folder, configuration, clients.json, rounds.jsonl, a checkpoint
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(StorageError) as caught:
        run_config(tiny(output_dir=str(tmp_path)))
    folder = only_folder(tmp_path)
    assert str(caught.value) == f"cannot write '{folder}/rounds.jsonl': {cause}"
    monkeypatch.undo()
    assert rounds_saved(folder) == 1
    assert_same_run(resume_run(folder), run_config(tiny(output_dir=str(tmp_path / "other"))))


def test_a_full_disk_when_the_rounds_are_cut_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Resuming drops the rounds after the checkpoint; that write can fail as well."""
    monkeypatch.setattr(training_loop, "CHECKPOINT_SECONDS", 3600.0)
    monkeypatch.setattr(training_loop.Experiment, "finish", lambda *given: pytest.fail("stop here"))
    with pytest.raises(pytest.fail.Exception):
        run_config(tiny(output_dir=str(tmp_path)))
    folder = only_folder(tmp_path)
    before = contents(folder)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        resume_run(folder)
    assert contents(folder) == before


def test_no_folder_is_left_when_it_cannot_be_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="the disk is full"):
        run_config(tiny(output_dir=str(tmp_path / "results")))
    assert list(tmp_path.glob("results/*")) == []


def test_an_output_folder_without_permission(nursery: Nursery, open_folder: Path) -> None:
    locked = open_folder / "locked"
    locked.mkdir(mode=0o555)
    ended = nursery.run("run", *flags(output_dir=locked), "--quiet", as_nobody=True)
    assert_clean_failure(ended.code, ended.err)
    assert ended.err == f"error: cannot write '{locked}': no permission\n"
    assert list(locked.iterdir()) == []


def test_an_output_folder_that_is_a_file(nursery: Nursery, tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("mine")
    ended = nursery.run("run", *flags(output_dir=place), "--quiet")
    assert_clean_failure(ended.code, ended.err)
    assert f"cannot write '{place}'" in ended.err
    assert place.read_text() == "mine"


def test_a_run_folder_without_permission(
    nursery: Nursery, open_folder: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    ended = nursery.run(
        *("run", *flags(**RICH, output_dir=open_folder), "--quiet"), die_at=("replaced", 4)
    )
    assert ended.code == -signal.SIGKILL
    folder = only_folder(open_folder)
    before = contents(folder)
    folder.chmod(0o555)
    ended = nursery.run("run", "--resume", folder, "--quiet", as_nobody=True)
    assert_clean_failure(ended.code, ended.err)
    assert f"cannot write '{folder}': no permission" in ended.err
    assert contents(folder) == before
    folder.chmod(0o755)
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**RICH))
    folder.chmod(0o555)  # a finished run can be looked at by whoever may read it
    ended = nursery.run("run", "--resume", folder, "--json", as_nobody=True)
    assert ended.code == 0, ended.err


def test_ctrl_c_names_the_command_that_goes_on(
    tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    """The real command in the real shell, progress bar and all."""
    changes = {**RICH, "num_rounds": 300, "batch_size": 1024}
    command = [sys.executable, "-m", "fedquilt", "run", *flags(**changes, output_dir=tmp_path)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        folder = wait_for_lines(tmp_path, 5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in err
    assert f"fedquilt run --resume {folder}" in err
    assert not (folder / "result.json").exists()
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**changes))


@pytest.mark.parametrize("options", [["--quiet"], ["--json"]])
def test_ctrl_c_without_a_progress_bar(
    nursery: Nursery, tmp_path: Path, options: list[str]
) -> None:
    child = nursery.start("run", *flags(output_dir=tmp_path), *options, slow_rounds=0.1)
    folder = wait_for_lines(tmp_path, 1)
    child.kill(signal.SIGINT)
    ended = child.wait()
    assert ended.code == 130
    assert ended.out == ""
    assert ended.err == f"interrupted: continue with  fedquilt run --resume {folder}\n"
    ended = nursery.run("run", "--resume", folder, "--json")
    assert ended.code == 0
    assert ended.out.count("\n") == 1


def test_an_interrupted_run_from_python_says_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(config: object, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt

    with pytest.raises(RunInterrupted) as caught:
        run_config(tiny(output_dir=str(tmp_path)), interrupt)
    assert caught.value.folder == str(only_folder(tmp_path))
    assert isinstance(caught.value, KeyboardInterrupt)
    resumed = resume_run(only_folder(tmp_path))  # the lock was given back
    assert_same_run(resumed, run_config(tiny(output_dir=str(tmp_path / "other"))))


def test_two_processes_on_one_folder(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    first = nursery.start("run", *flags(**RICH, output_dir=tmp_path), "--quiet", slow_rounds=0.3)
    folder = wait_for_lines(tmp_path, 1)
    second = nursery.run("run", "--resume", folder, "--quiet")
    assert_clean_failure(second.code, second.err)
    assert str(folder) in second.err
    assert "in use by another process" in second.err
    with pytest.raises(RunFolderError, match="in use by another process"):
        resume_run(folder)
    assert first.wait().code == 0
    assert_is_whole(folder, uninterrupted(**RICH))


def test_the_lock_dies_with_its_process(nursery: Nursery, tmp_path: Path) -> None:
    child = nursery.start("run", *flags(**RICH, output_dir=tmp_path), "--quiet", slow_rounds=0.2)
    folder = wait_for_lines(tmp_path, 1)
    child.kill(signal.SIGKILL)
    assert child.wait().code == -signal.SIGKILL
    began = time.monotonic()
    assert resume_run(folder).result["rounds"] == RICH["num_rounds"]
    assert time.monotonic() - began < 30
