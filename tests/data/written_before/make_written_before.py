"""Write the run folders and ledgers of this folder with whatever fedquilt is on the path.

They were written once, by an older version of the code, and are kept: that code made
promises which newer code has to keep.  Never write the existing ones again; a new form
on disk gets folders of its own, written by the version that introduced it.

    PYTHONPATH=OLD/src python make_written_before.py FOLDER

Every run of FOLDER/runs was either finished or killed (SIGKILL) just after the line of
its third round, with a checkpoint after every round: two rounds are kept, one is torn
off.  FOLDER/ends holds the weights that the same code reaches uninterrupted.
FOLDER/ledger.sqlite took the charges of two runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fedquilt.run_folder import RunFolder
from safetensors.torch import save_file

import fedquilt
import fedquilt.cli
import fedquilt.cli.run
from fedquilt import training_loop

# No layer of these models draws random numbers.
RUN: dict[str, Any] = {
    "dataset": "digits",
    "model": "linear",
    "num_clients": 8,
    "clients_per_round": 4,
    "availability": "always",
    "num_rounds": 4,
    "local_epochs": 1,
    "eval_every": 2,
    "noise_seed": 11,
}
CERTIFIED = {**RUN, "mode": "certified", "clipping": "quantile", "server_optimizer": "momentum"}
SECRET = {**CERTIFIED, "noise_seed": None}  # a seed protects nobody: only this has an epsilon
FEDAVG = {**RUN, "mode": "fedavg", "noise_seed": None}
SLICES = {**FEDAVG, "model": "mlp", "method": "heterofl", "tiers": "1,1/2,1/16"}
CONDENSED = {
    "dataset": "digits",
    "num_clients": 4,
    "num_rounds": 4,
    "eval_every": 2,
    "ipc": 1,
    "model_epochs": 2,
}
GROUPED = {
    **CONDENSED,
    "model": "linear",
    "embed_layer": "fc",
    "dc_iterations": 3,
    "model_n": 1,
    "min_group": 4,
}
BOUNDED = {
    **CONDENSED,
    "mode": "certified",
    "mean_rounds": 2,
    "drawings": 40,
    "epsilon": 6.0,
    "noise_seed": 5,
}
RUNS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "fedavg_finished": ("run", FEDAVG, True),
    "certified_finished": ("run", SECRET, True),
    "certified_secret_interrupted": ("run", SECRET, False),
    "certified_interrupted": ("run", CERTIFIED, False),
    "heterofl_interrupted": ("run", SLICES, False),
    "condensation_interrupted": ("condense", GROUPED, False),
    "certified_condensation_interrupted": ("condense", BOUNDED, False),
}


def command_line(command: str, parent: str, **settings: Any) -> None:
    """Call `fedquilt COMMAND` with these settings."""
    typed = [command, "--quiet", "--output-dir", parent]
    for key, value in settings.items():
        typed += [f"--{key.replace('_', '-')}", str(value)] if value is not None else []
    typed += ["--baselines", "none"] if command == "condense" else []
    sys.argv = ["fedquilt", *typed]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        fedquilt.cli.main()


def in_a_child(work: Callable[[], None]) -> int:
    """Return the exit code of a process that does it; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_after_the_line(number: int) -> None:
    """Kill this process once so many rounds are in rounds.jsonl."""
    append, left = RunFolder.append_round, [number]

    def append_and_die(folder: RunFolder, *given: Any) -> None:
        append(folder, *given)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    RunFolder.append_round = append_and_die  # type: ignore[method-assign]


def without_pictures(folder: Path) -> None:
    """Delete figures, which nothing reads, to keep the folder small."""
    for path in (*folder.rglob("*.png"), *folder.rglob("*.gif"), *folder.rglob("*.pdf")):
        path.unlink()


def make(name: str, target: Path) -> None:
    """Write one run and the weights at its end."""
    command, settings, finished = RUNS[name]
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        command_line(command, "whole", **settings)
        (whole,) = Path("whole").iterdir()
        kept = whole
        if not finished:

            def work() -> None:
                die_after_the_line(3)
                command_line(command, "results", **settings)

            code = in_a_child(work)
            assert code == -signal.SIGKILL, code
            (kept,) = Path("results").iterdir()
        if finished or settings is not SECRET:  # which never ends twice in the same place
            save_file(fedquilt.load(whole).state_dict, target / "ends" / f"{name}.safetensors")
        without_pictures(kept)
        shutil.copytree(kept, target / "runs" / name)


def make_ledger(target: Path) -> None:
    """Write a ledger of its own that two runs were charged to."""
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        for seed in (0, 1):
            own = {"ledger": "ledger.sqlite", "population": "eight", "allowance": 4.0}
            command_line("run", "results", **{**SECRET, **own, "epsilon": 1.5, "seed": seed})
        shutil.copy("ledger.sqlite", target)


def main() -> None:
    """Write everything."""
    target = Path(sys.argv[1]).resolve()
    torch.set_num_threads(1)
    training_loop.CHECKPOINT_SECONDS = 0.0
    fedquilt.cli.run.draw_history = lambda finished: None
    (target / "ends").mkdir(parents=True)
    with tempfile.TemporaryDirectory() as state:
        os.environ["XDG_STATE_HOME"] = state
        for name in RUNS:
            make(name, target)
        make_ledger(target)


if __name__ == "__main__":
    main()
