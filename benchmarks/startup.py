"""How long the command takes until it does what it was asked for.

    python benchmarks/startup.py [--repeats 3] [--no-demo]

| what | limit |
|---|---|
| `fedquilt --version` | 0.3 s |
| `fedquilt run` on the digits, until its first round begins | 2 s |
| the demo (`make demo` after installation) | 15 s |

The fastest of the repeats counts: the others waited for something else on the machine.
Processor seconds stand beside it.  Runs are written to a folder in memory where there is one.
Last, what is imported until the first round of `fedquilt.run` on MNIST's network, whose dropout
draws, with compiled files and without (a machine that has just been installed).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VERSION_SECONDS, FIRST_ROUND_SECONDS, DEMO_SECONDS = 0.3, 2.0, 15.0


def first_round(words: list[str]) -> None:
    """Run the command until its first round, and print what was loaded."""
    import fedquilt.cli.run as command

    ours = command.run_or_resume

    def run_or_resume(*given: Any) -> Any:
        with command.loading():
            stop_at_first_round()
        return ours(*given)

    command.run_or_resume = run_or_resume
    sys.argv = ["fedquilt", *words]
    from fedquilt.cli import main

    main()


def first_round_in_python() -> None:
    """Run MNIST's network, whose dropout draws, until its first round."""
    import torch

    import fedquilt
    from fedquilt.models import MNISTModel

    stop_at_first_round()
    inputs, targets = torch.rand(200, 1, 28, 28), torch.arange(200) % 10
    parts = [range(first, first + 20) for first in range(0, 200, 20)]
    fedquilt.run(
        MNISTModel(10), (inputs, targets), None, parts, mode="fedavg", output_dir=None, quiet=True
    )


def stop_at_first_round() -> None:
    """Let the first round end the process, and say what was loaded until then."""
    from fedquilt.experiment import loop as training_loop

    def begun(*_: Any) -> None:
        print(json.dumps(Counter(name.split(".")[0] for name in sys.modules)))
        sys.stdout.flush()
        os._exit(0)

    training_loop.run_round = begun  # type: ignore[assignment]


def measured(command: list[str], repeats: int, cold: bool = False) -> tuple[float, float, str]:
    """Return the fewest seconds of a command, its processor seconds, and its last line."""
    best: tuple[float, float, str] | None = None
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as nothing:
            own = {"PYTHONPYCACHEPREFIX": nothing} if cold else {}
            before, began = os.times(), time.perf_counter()
            done = subprocess.run(
                command,
                check=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            )
            wall, after = time.perf_counter() - began, os.times()
        worked = sum(after[2:4]) - sum(before[2:4])
        lines = done.stdout.splitlines() or [""]
        if best is None or wall < best[0]:
            best = wall, worked, lines[-1]
    assert best is not None
    return best


def say(what: str, found: tuple[float, float, str], limit: float) -> None:
    """Print a line of the table."""
    word = "holds" if found[0] <= limit else "DOES NOT HOLD"
    print(f"| {what} | {found[0]:.2f} | {found[1]:.2f} | {limit:g} | {word} |", flush=True)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-demo", action="store_true")
    parser.add_argument("--first-round", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.first_round is not None:
        first_round(options.first_round) if options.first_round else first_round_in_python()
        return
    memory = Path("/dev/shm")
    fedquilt = [sys.executable, "-m", "fedquilt"]
    until = [sys.executable, __file__, "--first-round", "run", "--quiet"]
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        out = ["--output-dir", folder]
        print("| what | seconds | processor seconds | limit | |\n|---|---|---|---|---|")
        found = measured([*fedquilt, "--version"], options.repeats)
        say("`fedquilt --version`", found, VERSION_SECONDS)
        found = measured([*until, "--dataset", "digits", *out], options.repeats)
        say("`fedquilt run`, until the first round", found, FIRST_ROUND_SECONDS)
        if not options.no_demo:
            demo = [*fedquilt, "compare", "--config", "demo.toml", *out]
            say("the demo", measured(demo, 1), DEMO_SECONDS)
        for cold in (False, True):
            wall, worked, said = measured(until[:3], 1, cold)
            loaded = Counter(json.loads(said))
            files = "no compiled files" if cold else "compiled files"
            most = ", ".join(f"{name} {count}" for name, count in loaded.most_common(5))
            print(
                f"\nMNIST's network, {files}: {wall:.2f} s ({worked:.2f} s of a processor) until "
                f"the first round, {sum(loaded.values()):,} modules: {most}",
                flush=True,
            )


if __name__ == "__main__":
    main()
