"""What needs no torch does not load it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedquilt.experiment.api import run_config
from run_processes import environment
from run_samples import tiny

SCRIPT = """
import sys
import fedquilt
heavy = ("torch", "scipy", "sklearn", "matplotlib", "dp_accounting", "wandb")
assert not [name for name in (*heavy, "numpy") if name in sys.modules], "import fedquilt"
from fedquilt.cli import main
expected, sys.argv = int(sys.argv[1]), ["fedquilt", *sys.argv[2:]]
code = 0
try:
    main()
except SystemExit as ended:
    code = ended.code or 0
assert code == expected, code
loaded = [name for name in heavy if name in sys.modules]
assert not loaded, loaded
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished certified run, with a ledger of its own."""
    place = tmp_path_factory.mktemp("light")
    config = tiny(mode="certified", noise_seed=None, output_dir=str(place))
    done = run_config(config).folder
    assert done is not None
    return done


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["--help"],
        ["run", "--help"],
        ["condense", "--help"],
        ["ledger", "show", "RUN"],
        ["ledger", "export", "RUN"],
        ["ledger", "verify", "RUN"],
        ["statement", "RUN"],
        ["statement", "RUN", "--json"],
    ],
    ids=" ".join,
)
def test_no_torch_is_loaded(arguments: list[str], folder: Path) -> None:
    ended = light(0, *(str(folder) if word == "RUN" else word for word in arguments))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout


@pytest.mark.parametrize("command", ["run", "plan", "condense"])
@pytest.mark.parametrize("value", ["nan", "-1", "one"])
def test_a_number_that_is_none_is_refused_at_once(command: str, value: str) -> None:
    ended = light(2, command, "--mode", "certified", "--epsilon", value)
    assert ended.returncode == 0, ended.stderr
    assert value in ended.stderr


def light(code: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command that must end with a code, and without torch."""
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(code), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
