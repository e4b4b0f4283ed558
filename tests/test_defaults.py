"""What happens when nobody says anything: the mode, who joins, what is recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.config import PRESETS, RunConfig, build_config, plain_config
from fedquilt.config.run import old_names
from fedquilt.data import load_dataset, split_clients
from fedquilt.record.folder import RunFolder
from fedquilt.setup.task import build_selector
from run_samples import flags, only_folder

pytestmark = pytest.mark.usefixtures("one_thread", "no_figures")
Cli = Callable[..., Any]
KEPT = Path(__file__).parent / "data" / "written_before" / "runs"


def held_out() -> tuple[Any, Any, list[Any]]:
    """Return training data, validation samples that no client holds, and 50 clients."""
    train, _ = load_dataset("digits")
    order = np.random.default_rng(5).permutation(len(train))
    kept, rest = order[:300], order[300:]
    clients = split_clients("dirichlet", train.targets[rest].numpy(), 50, np.random.default_rng(0))
    pairs = [(train.images[part], train.targets[part]) for part in (rest, kept)]
    return pairs[0], pairs[1], clients


def test_the_command_line_keeps_a_bound(cli: Cli, here: Path) -> None:
    """The settings were chosen on validation samples; the bar is far below what they reach."""
    record = cli("run", "--json").json()
    assert record["mode"] == "certified"
    assert 5.5 < record["statement"]["epsilon_max"] <= 6.0
    assert record["final_accuracy"] > 0.8


def test_python_keeps_a_bound_and_everybody_joins(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train, validation, clients = held_out()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    done = fedquilt.run(model, train, validation, clients, output_dir=str(tmp_path))
    assert done.result["mode"] == "certified"
    assert 5.5 < done.statement.epsilon_max <= 6.0
    assert all(len(cohort) == 50 for cohort in done.result["cohorts"])
    assert (done.final_accuracy or 0) > 0.8
    said = capfd.readouterr()
    assert said.out == ""
    assert "custom certified: all 50 clients join every round\n" in said.err
    assert "noise over the run: 0.39 of a typical update, workable\n" in said.err


def test_a_network_of_layers_without_names_runs(capfd: pytest.CaptureFixture[str]) -> None:
    """The old default asked for layers called fc."""
    train, validation, clients = held_out()
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    )
    done = fedquilt.run(model, train, validation, clients, num_rounds=2, output_dir=None)
    assert done.statement.is_bounded
    assert ", hard; first train fewer parameters: " in capfd.readouterr().err


@pytest.mark.parametrize("mode", ["fedavg", "fixed_dp", "quap_fl", "quap_fl_client"])
def test_a_named_mode_keeps_the_documents_values(mode: str) -> None:
    assert build_config({"mode": mode}) == RunConfig(mode=mode)
    assert plain_config({"mode": mode}) == RunConfig(mode=mode)
    own = build_config({"mode": mode, "dataset": "custom", "model": "custom"}, own=True)
    there = {"availability": "always", "clients_per_round": 1.0}
    assert own == RunConfig(mode=mode, dataset="custom", model="custom", **there)  # type: ignore[arg-type]


def test_the_classes_of_the_documents_keep_theirs() -> None:
    from fedquilt.framework import QuAPFLServer

    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    pairs = list(zip(*data, strict=True))
    server = QuAPFLServer(nn.Linear(2, 2), pairs, pairs, [[0, 1], [2, 3]], "mnist")
    config = server._run_config
    expected = ("quap_fl_client", "beta", 0.3, 200, 3.0, 0.01)
    found = (config.mode, config.availability, config.clients_per_round)
    assert (*found, config.num_rounds, config.epsilon, config.learning_rate) == expected


@pytest.mark.parametrize("name", sorted(path.name for path in KEPT.iterdir()))
def test_an_older_folder_means_what_it_meant(name: str, tmp_path: Path) -> None:
    """Also where the file lacks a key that there was not yet, or that somebody took out."""
    folder = Path(shutil.copytree(KEPT / name, tmp_path / name))
    config = RunFolder.open(folder).read_config()
    stated = [line.split(" = ") for line in (folder / "config.toml").read_text().splitlines()]
    renamed = old_names(type(config))
    for key, text in stated[1:]:
        assert getattr(config, renamed.get(key, key)) == json.loads(text)
    named = {renamed.get(key, key) for key, _ in stated}
    fields = type(config).__dataclass_fields__
    for key in set(fields) - named:
        assert getattr(config, key) == fields[key].default


def test_an_absent_key_of_a_record_has_the_old_default(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(KEPT / "certified_finished", tmp_path / "run"))
    file = folder / "config.toml"
    gone = ("mode =", "normalise_updates =", "epsilon =", "num_rounds =", "clip_norm =")
    lines = [line for line in file.read_text().splitlines() if not line.startswith(gone)]
    file.write_text("\n".join(lines) + "\n")
    config = RunFolder.open(folder).read_config()
    found = (config.mode, config.normalise_updates, config.epsilon, config.num_rounds)
    assert (*found, config.clip_norm) == ("quap_fl", False, 3.0, 200, 1.0)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("mode", [None, "certified", "fedavg"])
def test_a_preset_has_cohorts_of_thirty_with_a_long_tail(name: str, mode: str | None) -> None:
    config = build_config({"mode": mode} if mode else {}, preset=name)
    assert config.mode == (mode or "quap_fl")
    selector = build_selector(config, 100)
    assert selector.expected_cohort == selector.mean_cohort == 30
    joins = np.zeros(100)
    for index in range(200):
        cohort = selector.select(index).clients
        assert len(set(cohort.tolist())) == 30
        joins[cohort] += 1
    assert joins.max() > 90
    assert joins.min() < 15


def test_a_preset_of_few_clients_takes_them_all() -> None:
    config = build_config({"num_clients": 20}, preset="paper-mnist")
    assert [len(build_selector(config, 20).select(t).clients) for t in range(5)] == [20] * 5


def test_a_preset_from_python(tmp_path: Path) -> None:
    train, validation, clients = held_out()
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    done = fedquilt.run(
        *(model, train, validation, clients),
        preset="paper-mnist",
        mode="certified",
        num_rounds=3,
        output_dir=None,
        quiet=True,
    )
    assert [len(cohort) for cohort in done.result["cohorts"]] == [30] * 3
    settings = done.result["metadata"]["hyperparameters"]
    assert (settings["dataset"], settings["warmup_rounds"]) == ("custom", 0)
    assert settings["learning_rate"] == 0.005
    assert done.statement.epsilon_max <= 6.0


def test_one_client_cannot_be_hidden(cli: Cli) -> None:
    said = cli("run", "--num-clients", 1)
    assert said.code == 2
    assert "num_clients=1 must be at least 2 with mode='certified'" in said.words


LEDGER = ("--ledger", "pop.sqlite", "--population", "clinics", "--quiet")


@pytest.fixture
def clinics(cli: Cli, here: Path) -> Path:
    """A ledger whose clients have a bound."""
    options = flags(mode="certified", noise_seed=None, epsilon=3, allowance=6)
    assert cli("run", *options, *LEDGER).code == 0
    return here / "pop.sqlite"


@pytest.mark.parametrize("mode", ["fedavg", "fixed_dp", "quap_fl", "quap_fl_client"])
def test_a_mode_without_a_bound_leaves_the_ledger_alone(
    cli: Cli, here: Path, clinics: Path, mode: str
) -> None:
    shutil.rmtree(here / "results")
    before = clinics.read_bytes()
    said = cli("run", *flags(mode=mode), *LEDGER)
    assert said.code == 2
    assert "10 of 10 clients of this run have a bound in population 'clinics'" in said.words
    assert "--allow-unbounded" in said.words
    assert clinics.read_bytes() == before
    assert not (here / "results").exists()


def test_a_forgotten_mode_keeps_the_promise(cli: Cli, clinics: Path) -> None:
    assert cli("run", *flags(mode=None, noise_seed=None, epsilon=2), *LEDGER).code == 0
    (population,) = cli("ledger", "show", clinics, "--json").json()["populations"]
    assert 3.0 < population["epsilon_max"] <= 6.0


def test_everything_is_spent_when_it_is_said(cli: Cli, here: Path, clinics: Path) -> None:
    said = cli("run", *flags(mode="quap_fl"), *LEDGER, "--allow-unbounded")
    assert said.code == 0, said.err
    (population,) = cli("ledger", "show", clinics, "--json").json()["populations"]
    assert population["epsilon_max"] == "inf"
    # Whoever has no bound left has none to lose: only the others are counted.
    again = cli("run", *flags(mode="quap_fl"), *LEDGER)
    lost = len({client for line in _cohorts(here) for client in line})
    assert lost < 10
    assert f"{10 - lost} of 10 clients" in again.words


def _cohorts(here: Path) -> list[list[int]]:
    newest = max((here / "results").glob("digits_quap_fl*"))
    return json.loads((newest / "result.json").read_text())["cohorts"]  # type: ignore[no-any-return]


def test_a_ledger_that_is_new_may_begin_with_any_mode(cli: Cli, here: Path) -> None:
    """Nobody has a bound to lose there."""
    assert cli("run", *flags(mode="fedavg"), "--ledger", "new.sqlite", "--quiet").code == 0


def test_allow_unbounded_is_a_keyword_and_a_key(here: Path, cli: Cli, clinics: Path) -> None:
    text = 'mode = "fedavg"\nallow_unbounded = true\nledger = "pop.sqlite"\n'
    (here / "c.toml").write_text(text + 'population = "clinics"\n')
    options = flags(mode=None, epsilon=None, clip_norm=None, noise_seed=None)
    assert cli("run", "--config", "c.toml", *options, "--quiet").code == 0
    data = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    clients = {"north": [0, 1], "south": [2, 3]}
    run = (nn.Linear(2, 2), data, data, clients)
    shared = {"ledger": "own.sqlite", "population": "two", "num_rounds": 1, "quiet": True}
    fedquilt.run(*run, epsilon=1.0, allowance=2.0, **shared)  # type: ignore[arg-type]
    with pytest.raises(fedquilt.errors.InvalidValueError, match=r"2 of 2 clients .* have a bound"):
        fedquilt.run(*run, mode="fedavg", **shared)  # type: ignore[arg-type]
    done = fedquilt.run(*run, mode="fedavg", allow_unbounded=True, **shared)  # type: ignore[arg-type]
    assert not done.statement.is_bounded


def test_a_run_that_was_allowed_to_goes_on(cli: Cli, here: Path) -> None:
    """Consent is given once: a resumed run is not asked again."""
    options = flags(mode="quap_fl", num_rounds=2)
    assert cli("run", *options, "--ledger", "l.sqlite", "--quiet").code == 0
    folder = only_folder(here / "results")
    for name in ("result.json", "checkpoint.safetensors"):
        (folder / name).unlink()
    (folder / "rounds.jsonl").write_text("")
    assert cli("run", "--resume", folder, "--quiet").code == 0
