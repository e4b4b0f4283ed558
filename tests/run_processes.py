"""Real processes, cheap enough to start one for every moment at which to kill it.

A nursery is one process that has imported everything and trained nothing.  It
forks a child for every job, so a child starts in milliseconds and is still a
process of its own, with its own locks, signals and limits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import json
import os
import resource
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedquilt

NOBODY = 65534
_HERE = Path(__file__).resolve().parent
_SOURCE = Path(fedquilt.__file__).resolve().parents[1]
# What runs and condensations load on the way: loaded once here, not in every child.
_LOADED = (
    *("fedquilt.cli", "fedquilt.data", "fedquilt.models.features", "fedquilt.report"),
    *("safetensors.torch", "sklearn.datasets", "torch._dynamo"),
    *("scipy.special", "scipy.optimize", "dp_accounting"),
    *("PIL.Image", "PIL.ImageFont", "matplotlib.font_manager"),
)


def environment() -> dict[str, str]:
    """Return the environment of a process that finds the package and these helpers."""
    paths = os.pathsep.join([str(_SOURCE), str(_HERE)])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("FEDQUILT_")}
    return {**kept, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, negative for a signal, and what it said."""

    code: int
    out: str
    err: str


class Child:
    """A process that a nursery forked."""

    def __init__(self, nursery: Nursery, pid: int, out: Path, err: Path) -> None:
        self.pid = pid
        self._nursery = nursery
        self._out, self._err = out, err

    def kill(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self) -> Ended:
        """Return how the process ended."""
        code = self._nursery.ask({"wait": self.pid})
        return Ended(code, self._out.read_text(), self._err.read_text())


class Nursery:
    """Forks children that run the command line, with a fault if one is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        command = [sys.executable, "-c", "import run_processes; run_processes.serve()"]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
            cwd=folder,
        )

    def start(self, *arguments: object, **fault: Any) -> Child:
        """Start `fedquilt ARGUMENTS`; for the faults see `_prepare`."""
        self._count += 1
        out, err = (self._folder / f"{self._count}.{kind}" for kind in ("out", "err"))
        job = {
            "arguments": [str(argument) for argument in arguments],
            "fault": fault,
            "out": str(out),
            "err": str(err),
        }
        return Child(self, self.ask(job), out, err)

    def run(self, *arguments: object, **fault: Any) -> Ended:
        """Run `fedquilt ARGUMENTS` to its end."""
        return self.start(*arguments, **fault).wait()

    def ask(self, job: dict[str, Any]) -> int:
        """Send a line to the nursery and return the number it answers."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """End the nursery."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def serve() -> None:
    """Be the nursery: read jobs from standard input until it closes."""
    for name in _LOADED:
        importlib.import_module(name)
    import torch

    from done_once import build_commands_once, read_digits_once

    torch.set_num_threads(1)
    read_digits_once()
    build_commands_once()
    fedquilt.data.load_dataset("digits")
    with contextlib.redirect_stderr(io.StringIO()):
        _command_line(["run", "--resume", "nowhere"])  # loads what parsing needs
    for line in sys.stdin:
        job = json.loads(line)
        answer = _reap(job["wait"]) if "wait" in job else _fork(job)
        print(answer, flush=True)


def _reap(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(job: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        _redirect(job["out"], job["err"])
        _prepare(**job["fault"])
        code = _command_line(job["arguments"])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return 0


def _redirect(out: str, err: str) -> None:
    for path, number in ((os.devnull, 0), (out, 1), (err, 2)):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        opened = os.open(path, flags, 0o666)
        os.dup2(opened, number)
        os.close(opened)


def _command_line(arguments: list[str]) -> int:
    from fedquilt.cli import main

    sys.argv = ["fedquilt", *arguments]
    try:
        main()
    except SystemExit as stopped:
        return stopped.code if isinstance(stopped.code, int) else int(stopped.code is not None)
    return 0


def _prepare(
    checkpoint_seconds: float = 0.0,
    die_at: tuple[str, int] | None = None,
    largest_file: int | None = None,
    largest_file_after: int = 0,
    as_nobody: bool = False,
    figures: bool = False,
    slow_rounds: float = 0.0,
) -> None:
    """Set the stage in a child.

    checkpoint_seconds
        How often a run saves its state; every round by default.
    die_at
        (event, n): SIGKILL at the n-th event, which is 'fsync' (the bytes are
        written, not yet flushed), 'replace' (flushed, not yet renamed),
        'replaced' (just renamed), 'round' (a round is over and unrecorded),
        'torn' (half of its line is written), 'recorded' (all of it), 'reserved' or
        'settled' (the ledger has the charges of a round, or has made them final).
    largest_file, largest_file_after
        A limit on file sizes as the kernel enforces it, set after so many rounds.
    as_nobody
        Give up the rights of root.
    figures
        Draw figures; without them a child is several times faster.
    slow_rounds
        Sleep so many seconds in every round.
    """
    import fedquilt.cli.run
    import fedquilt.condense.method as condensation
    from fedquilt.experiment import loop as training_loop

    # Images are refined in a few steps: what is tested is what happens around them.
    few = functools.partial(condensation.GrowingSettings, steps=15)
    condensation.GrowingSettings = few  # type: ignore[misc, assignment]
    training_loop.CHECKPOINT_SECONDS = checkpoint_seconds
    if not figures:
        fedquilt.cli.run.draw_history = lambda finished: None
    if die_at is not None:
        _arm(*die_at)
    if largest_file is not None:
        _limit_files(largest_file, largest_file_after)
    if slow_rounds:
        _slow_down(slow_rounds)
    if as_nobody and os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def _arm(event: str, count: int) -> None:
    """Kill this process at the `count`-th event of a kind."""
    import signal

    from fedquilt.privacy.run_account import RunAccount
    from fedquilt.record.folder import RunFolder

    left = [count]

    def pass_by() -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(function: Any) -> Any:
        return lambda *arguments, **options: (pass_by(), function(*arguments, **options))[1]

    def after(function: Any) -> Any:
        return lambda *arguments, **options: (function(*arguments, **options), pass_by())[0]

    append = RunFolder.append_round

    def tear(folder: RunFolder, *given: Any) -> None:
        path = folder.path / "rounds.jsonl"
        size = path.stat().st_size if path.exists() else 0
        append(folder, *given)
        whole = path.stat().st_size
        if left[0] == 1:
            os.truncate(path, size + (whole - size) // 2)
        pass_by()

    if event == "fsync":
        os.fsync = before(os.fsync)
    elif event == "reserved":
        RunAccount.reserve = after(RunAccount.reserve)  # type: ignore[method-assign]
    elif event == "settled":
        RunAccount.settle = after(RunAccount.settle)  # type: ignore[method-assign]
    elif event == "replace":
        os.replace = before(os.replace)
    elif event == "replaced":
        os.replace = after(os.replace)
    elif event == "round":
        RunFolder.append_round = before(append)  # type: ignore[method-assign]
    elif event == "recorded":
        RunFolder.append_round = after(append)  # type: ignore[method-assign]
    else:
        assert event == "torn"
        RunFolder.append_round = tear  # type: ignore[method-assign]


def _limit_files(size: int, after_rounds: int) -> None:
    from fedquilt.experiment import loop as training_loop

    run_round = training_loop.run_round

    def limited(federation: Any, round_index: int) -> Any:
        if round_index >= after_rounds:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        return run_round(federation, round_index)

    training_loop.run_round = limited


def _slow_down(seconds: float) -> None:
    import time

    from fedquilt.experiment import loop as training_loop

    run_round = training_loop.run_round

    def slowly(federation: Any, round_index: int) -> Any:
        time.sleep(seconds)
        return run_round(federation, round_index)

    training_loop.run_round = slowly
