"""Commands that are stopped from outside: Ctrl-C, SIGTERM, a worker that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedquilt.common.errors import WorkerError
from fedquilt.experiment import loop as training_loop
from fedquilt.experiment.api import RunResult, resume_run
from run_processes import Nursery, environment
from run_samples import assert_is_whole, flags, wait_for_lines

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.processes]

CONDENSE = (
    *("--dataset", "digits", "--model", "convnet-32", "--num-clients", "3", "--num-rounds", "9"),
    *("--ipc", "1", "--dc-iterations", "3", "--model-epochs", "1", "--model-n", "1"),
    "--quiet",
)


def test_sigterm_is_answered_like_ctrl_c(
    nursery: Nursery, tmp_path: Path, uninterrupted: Callable[..., RunResult]
) -> None:
    changes = {"mode": "certified"}
    arguments = ("run", *flags(**changes, output_dir=tmp_path), "--quiet")
    child = nursery.start(*arguments, slow_rounds=0.1)
    folder = wait_for_lines(tmp_path, 1)
    child.kill(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == 143
    assert ended.err == f"interrupted: continue with  fedquilt run --resume {folder}\n"
    resume_run(folder)
    assert_is_whole(folder, uninterrupted(**changes))


def test_sigterm_ends_a_condensation_that_can_go_on(nursery: Nursery, tmp_path: Path) -> None:
    arguments = ("condense", *CONDENSE, "--output-dir", tmp_path)
    child = nursery.start(*arguments, slow_rounds=0.1)
    folder = wait_for_lines(tmp_path, 1)
    child.kill(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == 143, ended
    assert ended.err == f"interrupted: continue with  fedquilt condense --resume {folder}\n"


def test_sigterm_ends_a_comparison_in_one_line(nursery: Nursery, tmp_path: Path) -> None:
    settings = flags(mode=None, output_dir=tmp_path)
    arguments = ("compare", *settings, "--modes", "certified", "--seeds", "0,1", "--quiet")
    child = nursery.start(*arguments, slow_rounds=0.1)
    deadline = time.monotonic() + 60
    while not (found := list(tmp_path.glob("*/*/rounds.jsonl"))) and time.monotonic() < deadline:
        time.sleep(0.01)
    child.kill(signal.SIGTERM)
    ended = child.wait()
    assert ended.code == 143, ended
    again = f"continue with  fedquilt run --resume {found[0].parent}"
    assert ended.err == f"interrupted: {again}\n"


@pytest.mark.slow
def test_sigterm_ends_an_audit_in_one_line(nursery: Nursery) -> None:
    child = nursery.start("audit", "--canary", "--trials", "100000")
    time.sleep(2.0)
    child.kill(signal.SIGTERM)
    ended = child.wait()
    assert (ended.code, ended.err) == (143, "interrupted: nothing was kept\n")


def started(tmp_path: Path) -> subprocess.Popen[str]:
    """Start a run with worker processes in a process group of its own."""
    changes = {"mode": "fedavg", "noise_seed": None, "num_rounds": 999, "engine": "processes"}
    arguments = flags(**changes, output_dir=tmp_path)
    return subprocess.Popen(
        [sys.executable, "-m", "fedquilt", "run", *arguments, "--quiet"],
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_fork_server(process: subprocess.Popen[str]) -> None:
    """Return a moment after the fork server has started: it imports torch then."""
    parent, deadline = psutil.Process(process.pid), time.monotonic() + 60
    while time.monotonic() < deadline:
        if any("forkserver" in " ".join(child.cmdline()) for child in parent.children()):
            time.sleep(0.4)
            return
        time.sleep(0.01)
    raise AssertionError("no fork server was started")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopped_while_the_fork_server_loads(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """The signal goes to the whole group, as the keys of a terminal do."""
    with started(tmp_path) as process:
        wait_for_fork_server(process)
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == code
    (folder,) = tmp_path.iterdir()
    assert err == f"interrupted: continue with  fedquilt run --resume {folder}\n"


@pytest.mark.slow
def test_sigterm_to_the_whole_group_is_no_failure_of_a_worker(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        folder = wait_for_lines(tmp_path, 2)
        os.killpg(process.pid, signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.count("\n")) == (143, 1), err
    assert str(folder) in err


def test_a_killed_worker_is_an_error_that_says_how_to_go_on(
    cli: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_round = training_loop.run_round

    def lose_a_worker(federation: Any, index: int) -> Any:
        if index == 2:
            raise WorkerError("worker process 1 was ended by SIGKILL with work in hand")
        return run_round(federation, index)

    monkeypatch.setattr(training_loop, "run_round", lose_a_worker)
    ended = cli("run", *flags(output_dir=tmp_path), "--quiet")
    (folder,) = tmp_path.iterdir()
    assert ended.code == 2
    assert "was ended by SIGKILL with work in hand" in ended.err
    assert f"continue with  fedquilt run --resume {folder}\n" in ended.err


def test_ctrl_c_while_commands_are_built_is_no_traceback(
    cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("typer.main.get_command", interrupted)
    said = cli("--version")
    assert (said.code, said.out, said.err) == (130, "", "")


def test_ctrl_c_after_the_last_word_interrupts_nothing() -> None:
    code = (
        "import os, signal, sys; from fedquilt.cli import program\n"
        "sys.argv = ['fedquilt', '--version']\n"
        "try: program()\n"
        "finally: os.kill(os.getpid(), signal.SIGINT)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("fedquilt ")
