"""Run folders and ledgers that older code wrote: read, verified, taken up again.

`data/written_before/make_written_before.py` says how they came to be.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import fedquilt
from run_samples import rounds_without_clock

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")

Cli = Callable[..., Any]
KEPT = Path(__file__).parents[1] / "data" / "written_before"
FINISHED = ("fedavg_finished", "certified_finished")
INTERRUPTED = {
    "certified_interrupted": "run",
    "heterofl_interrupted": "run",
    "condensation_interrupted": "condense",
    "certified_condensation_interrupted": "condense",
}
SECRET = "certified_secret_interrupted"  # secret noise, so it ends elsewhere each time
# The folders were written with AVX-512; elsewhere sums are added up in another order.
ROUNDS_ALIKE = torch.backends.cpu.get_cpu_capability() == "AVX512"


def copied(name: str, here: Path) -> Path:
    """Return a copy of a run folder; reading alone may add files to it."""
    return Path(shutil.copytree(KEPT / "runs" / name, here / name))


def assert_ends_as_before(result: fedquilt.RunResult, name: str) -> None:
    """Fail unless the weights are those of the older code, up to the rounding of a machine."""
    end = load_file(KEPT / "ends" / f"{name}.safetensors")
    assert result.state_dict.keys() == end.keys()
    for key, tensor in end.items():
        torch.testing.assert_close(result.state_dict[key], tensor, rtol=1e-4, atol=1e-6)


def assert_same_round(now: dict[str, Any], before: dict[str, Any]) -> None:
    """Fail unless a round says all that it said before, and may be more.

    To the bit where the machine rounds as the one that wrote it.
    """
    for key, value in before.items():
        if isinstance(value, float) and not ROUNDS_ALIKE:
            assert now[key] == pytest.approx(value, rel=1e-5), key
        else:
            assert now[key] == value, key


def is_refused_elsewhere(said: Any) -> bool:
    """Tell whether a seeded run was rightly refused: its round was added up in another order.

    Under the same noise, two sums that differ in their last bits would show what is between them.
    """
    refused = said.code == 2 and "data, code or machine changed" in said.err
    return refused and not ROUNDS_ALIKE


def largest_epsilon(cli: Cli, place: Path) -> float:
    """Return the largest epsilon that a client has spent, once the ledger is verified."""
    assert cli("ledger", "verify", place).code == 0
    (population,) = cli("ledger", "show", place, "--json").json()["populations"]
    return float(population["epsilon_max"])


@pytest.fixture(autouse=True)
def _no_run_of_another_test(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give every test a state folder: several tests resume copies of one run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


def test_every_folder_is_tested() -> None:
    assert {path.name for path in (KEPT / "runs").iterdir()} == {*FINISHED, *INTERRUPTED, SECRET}
    assert {path.stem for path in (KEPT / "ends").iterdir()} == {*FINISHED, *INTERRUPTED}


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_run_is_read(cli: Cli, here: Path, name: str) -> None:
    folder = copied(name, here)
    result = fedquilt.load(folder)
    assert_ends_as_before(result, name)
    written = json.loads((KEPT / "runs" / name / "result.json").read_text())
    assert result.result["cohorts"] == written["cohorts"]
    assert result.result["history"]["test_accuracy"] == written["history"]["test_accuracy"]
    assert cli("statement", folder, "--json").json() == written["statement"]


@pytest.mark.parametrize(("name", "command"), INTERRUPTED.items())
def test_an_interrupted_run_goes_on(cli: Cli, here: Path, name: str, command: str) -> None:
    folder = copied(name, here)
    before = rounds_without_clock(folder)
    assert len(before) == 3
    said = cli(command, "--resume", folder, "--quiet")
    after = rounds_without_clock(folder)[:3]
    if is_refused_elsewhere(said):
        assert after == before[: len(after)], "what is kept is left as it was"
        return
    assert said.code == 0, said.err
    for now, old in zip(after, before, strict=True):
        assert_same_round(now, old)
    result = fedquilt.load(folder)
    assert len(result.result["cohorts"]) == 4
    assert_ends_as_before(result, name)


@pytest.mark.parametrize("name", [name for name in INTERRUPTED if "certified" in name])
def test_the_ledger_of_a_seeded_run_stays_whole(cli: Cli, here: Path, name: str) -> None:
    folder = copied(name, here)
    before = largest_epsilon(cli, folder)
    assert 0 < before < math.inf
    said = cli(INTERRUPTED[name], "--resume", folder, "--quiet")
    assert cli("ledger", "verify", folder, "--run", folder).code == 0
    if is_refused_elsewhere(said):
        assert largest_epsilon(cli, folder) >= before
        return
    assert said.code == 0, said.err
    assert largest_epsilon(cli, folder) == math.inf, "a seed protects nobody"


def test_the_ledger_of_a_finished_run_is_read(cli: Cli, here: Path) -> None:
    folder = copied("certified_finished", here)
    assert cli("ledger", "verify", folder, "--run", folder).code == 0
    claimed = fedquilt.load(folder).statement.epsilon_max
    assert 0 < claimed <= 3.0
    assert largest_epsilon(cli, folder) == pytest.approx(claimed, rel=1e-6)


def test_a_certified_run_goes_on_within_its_epsilon(cli: Cli, here: Path) -> None:
    folder = copied(SECRET, here)
    before = largest_epsilon(cli, folder)
    assert 0 < before < 3.0
    said = cli("run", "--resume", folder, "--quiet")
    assert said.code == 0, said.err
    assert cli("ledger", "verify", folder, "--run", folder).code == 0
    claimed = fedquilt.load(folder).statement.epsilon_max
    assert before < claimed <= 3.0
    assert largest_epsilon(cli, folder) == pytest.approx(claimed, rel=1e-6)


def test_a_byte_changed_since_is_found(cli: Cli, here: Path) -> None:
    path = Path(shutil.copy(KEPT / "ledger.sqlite", here))
    content = path.read_bytes()
    assert b'"epsilon":1.5' in content
    path.write_bytes(content.replace(b'"epsilon":1.5', b'"epsilon":1.4'))
    assert cli("ledger", "verify", path).code == 1


def test_a_ledger_of_two_runs_takes_a_third(cli: Cli, here: Path) -> None:
    path = Path(shutil.copy(KEPT / "ledger.sqlite", here))
    before = largest_epsilon(cli, path)
    assert 1.5 < before < 3.0
    (population,) = cli("ledger", "show", path, "--json").json()["populations"]
    assert (population["population"], len(population["runs"])) == ("eight", 2)
    typed = ("--model", "linear", "--num-clients", 8, "--num-rounds", 2, "--local-epochs", 1)
    common = ("run", *typed, "--mode", "certified", "--ledger", path, "--population", "eight")
    refused = cli(*common, "--epsilon", 3.9, "--quiet")
    assert refused.code == 2
    assert largest_epsilon(cli, path) == before
    third = cli(*common, "--epsilon", 1.0, "--quiet")
    assert third.code == 0, third.err
    (population,) = cli("ledger", "show", path, "--json").json()["populations"]
    assert len(population["runs"]) == 3
    assert before < largest_epsilon(cli, path) <= 4.0
