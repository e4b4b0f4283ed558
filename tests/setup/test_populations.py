"""Whole runs on one ledger: who is known again, what is said about it, what is refused."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.cli.run import closing_lines
from fedquilt.common.observer import Observer
from fedquilt.data import ImageDataset
from fedquilt.errors import InvalidValueError, RunFolderError, RunInterrupted
from fedquilt.experiment.api import RunResult, resume_run, run_config
from fedquilt.privacy import run_account
from fedquilt.privacy.ledger import (
    BudgetExceededError,
    Ledger,
    LedgerConflictError,
    LedgerCorruptError,
    population_name,
)
from fedquilt.record import folder as run_folder
from fedquilt.record.folder import RunFolder
from fedquilt.setup import build_task as assemble_problem
from run_samples import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CERTIFIED: dict[str, Any] = {
    "mode": "certified",
    "noise_seed": None,
    "clients_per_round": 1.0,
    "num_rounds": 2,
    "num_clients": 6,
    "allowance": 6.0,
    "epsilon": 3.0,
}
WRITERS = 5
STOPS = {"early_stopping": True, "target_accuracy": 1.0}


def certify(folder: Path, **changes: Any) -> RunResult:
    chosen = {"ledger": str(folder / "clients.sqlite"), **changes}
    return run_config(tiny(**{**CERTIFIED, **chosen, "output_dir": str(folder / "runs")}))


def names(folder: Path) -> list[str]:
    with Ledger.open(folder / "clients.sqlite", read_only=True) as ledger:
        assert ledger.verify().ok
        return [population.info.name for population in ledger.populations()]


def spent(path: Path, population: str) -> dict[str, float]:
    with Ledger.open(path, read_only=True) as ledger:
        assert ledger.verify().ok
        found = ledger.population(population)
        return dict(zip(found.ids(), found.spent().tolist(), strict=True))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small data set that says who wrote each sample."""
    draws = torch.Generator().manual_seed(0)
    labels = torch.arange(60) % 10
    groups = np.repeat(np.arange(100, 100 + WRITERS), 12)
    data = ImageDataset(torch.rand(60, 1, 8, 8, generator=draws), labels, "digits", 10, groups)
    monkeypatch.setattr(assemble_problem, "load_dataset", lambda *given, **named: (data, data))


@pytest.mark.usefixtures("written")
def test_writers_are_the_same_people_at_every_seed(tmp_path: Path) -> None:
    people = {"partition": "writer", "num_clients": None}
    for seed, epsilon in ((0, 4.0), (1, 3.0)):
        certify(tmp_path, **people, seed=seed, epsilon=epsilon)
    with pytest.raises(BudgetExceededError, match=r"any client .* \(client 'writer:100' has"):
        certify(tmp_path, **people, seed=2, epsilon=4.0)
    assert names(tmp_path) == ["digits-writers"]
    with Ledger.open(tmp_path / "clients.sqlite", read_only=True) as ledger:
        assert ledger.populations()[0].epsilons().max() <= 6.0


@pytest.mark.usefixtures("written")
def test_some_of_the_writers_are_among_all_of_them(tmp_path: Path) -> None:
    certify(tmp_path, partition="writer", num_clients=2, seed=1)
    few = spent(tmp_path / "clients.sqlite", "digits-writers")
    assert len(few) == 2
    second = certify(tmp_path, partition="writer", num_clients=None, seed=2)
    everybody = spent(tmp_path / "clients.sqlite", "digits-writers")
    assert set(everybody) == {f"writer:{100 + k}" for k in range(WRITERS)}
    assert all(everybody[client] > amount for client, amount in few.items())
    assert second.result["ledger"]["created"] is None
    assert second.result["ledger"]["enrolled"] == 3
    assert any("3 of the clients were charged in no" in note for note in second.statement.notes)


@pytest.mark.parametrize(
    "changes", [{"dirichlet_alpha": 9.0}, {"classes_per_client": 5}, {"eval_every": 1}], ids=str
)
def test_what_a_split_ignores_makes_no_other_clients(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    certify(tmp_path, partition="iid", epsilon=5.0)
    with pytest.raises(BudgetExceededError):
        certify(tmp_path, partition="iid", epsilon=5.0, **changes)
    assert len(names(tmp_path)) == 1


@pytest.mark.parametrize(
    "changes",
    [STOPS, {"seed": 1}, {"partition": "shards"}, {"num_clients": 7}],
    ids=str,
)
def test_who_holds_other_samples_is_another_client(tmp_path: Path, changes: dict[str, Any]) -> None:
    first = certify(tmp_path, partition="iid")
    other = certify(tmp_path, **{"partition": "iid", **changes})
    found = names(tmp_path)
    assert len(set(found)) == 2
    assert all(name.startswith("digits-") for name in found)
    assert [r.result["ledger"]["created"] for r in (first, other)] == ["ledger", "population"]


def test_a_validation_fraction_without_a_split_is_ignored(tmp_path: Path) -> None:
    certify(tmp_path)
    certify(tmp_path, validation_fraction=0.3)
    assert len(names(tmp_path)) == 1


def test_a_name_is_no_word_for_other_clients(tmp_path: Path) -> None:
    certify(tmp_path, population="clinics")
    with pytest.raises(InvalidValueError, match=r"none of the 6 clients .* 'clinics'"):
        certify(tmp_path, population="clinics", seed=1)
    certify(tmp_path, population="clinics", seed=1, new_population=True)
    assert len(spent(tmp_path / "clients.sqlite", "clinics")) == 12


def test_a_population_of_an_older_ledger_is_found_and_continued(tmp_path: Path) -> None:
    split = {"kind": "dirichlet", "alpha": 0.5, "classes": 2}
    name = population_name("digits", split, 0, 6)
    with Ledger.open(tmp_path / "clients.sqlite", create=True) as ledger:
        ledger.population(name, num_clients=6, epsilon=6.0, delta=1e-5)
    certify(tmp_path)
    assert names(tmp_path) == [name]
    with Ledger.open(tmp_path / "clients.sqlite", read_only=True) as ledger:
        assert (ledger.population(name).spent() > 0).all()


def older_ledger(folder: Path, name: str) -> None:
    """Make a population as ledgers of schema 1 have them: by number."""
    with Ledger.open(folder / "clients.sqlite", create=True) as ledger:
        ledger.population(name, num_clients=6, epsilon=6.0, delta=1e-5)


OLDER = population_name("digits", {"kind": "iid", "alpha": 0.5, "classes": 2}, 0, 6)


@pytest.mark.parametrize("changes", [{"dirichlet_alpha": 0.3}, {"population": "zebra"}], ids=str)
@pytest.mark.parametrize("name", [OLDER, "clinics"])
def test_what_an_older_split_ignored_makes_no_new_population(
    tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    older_ledger(tmp_path, name)
    with pytest.raises(InvalidValueError, match=f"and '{name}' is, which knows its 6 clients by"):
        certify(tmp_path, partition="iid", **changes)
    assert names(tmp_path) == [name]
    certify(tmp_path, partition="iid", **changes, new_population=True)
    assert len(names(tmp_path)) == 2


def test_an_older_population_of_another_split_is_no_hindrance(tmp_path: Path) -> None:
    older_ledger(tmp_path, OLDER.replace("digits", "mnist"))
    certify(tmp_path, partition="iid")
    assert len(names(tmp_path)) == 2


def test_an_older_population_is_preferred(tmp_path: Path) -> None:
    older_ledger(tmp_path, OLDER)
    certify(tmp_path, partition="iid", dirichlet_alpha=0.3, new_population=True)
    assert certify(tmp_path, partition="iid").result["ledger"]["population"] == OLDER


@pytest.mark.parametrize("adopted", [False, True])
def test_a_stopped_run_of_an_older_population_goes_on(tmp_path: Path, adopted: bool) -> None:
    older_ledger(tmp_path, OLDER)
    place = {"ledger": str(tmp_path / "clients.sqlite"), "output_dir": str(tmp_path / "runs")}
    folder = stopped(run_config, tiny(**{**CERTIFIED, **place, "partition": "iid"}))
    if adopted:
        _, problem = assemble_problem.build_task(tiny(**{**CERTIFIED, "partition": "iid"}))
        assert problem.roster.ids is not None
        with Ledger.open(tmp_path / "clients.sqlite") as ledger:
            population = ledger.population(OLDER)
            population.adopt_ids(problem.roster.ids)
            population.enrol(["somebody else"])
    else:
        certify(tmp_path, partition="iid", dirichlet_alpha=0.3, new_population=True)
    result = resume_run(folder)
    assert result.result["ledger"]["population"] == OLDER
    assert result.result["rounds"] == 2


# One client, one account


@pytest.mark.parametrize("name", [None, "hospitals"])
def test_another_name_is_no_fresh_allowance(tmp_path: Path, name: str | None) -> None:
    certify(tmp_path, population="clinics", epsilon=5.0)
    with pytest.raises(InvalidValueError, match=r"client 'digits:\w+' is not .* is in 'clinics'"):
        certify(tmp_path, population=name, epsilon=5.0)
    assert names(tmp_path) == ["clinics"]
    certify(tmp_path, population=name, new_population=True)
    certify(tmp_path, population=name)
    assert len(names(tmp_path)) == 2


def test_a_client_is_in_one_population(tmp_path: Path) -> None:
    own(tmp_path, {"a": [0], "b": [1]})
    own(tmp_path, {"x": [0], "y": [1]}, population="zebras")
    for population, clients in (("others", {"z": [0], "B": [1]}), ("zebras", {"x": [0], "b": [1]})):
        with pytest.raises(InvalidValueError, match=r"client '[bB]' is not .* is in 'wards'"):
            own(tmp_path, clients, population=population)
    assert list(spent(tmp_path / "own.sqlite", "zebras")) == ["x", "y"]
    own(tmp_path, {"x": [0], "b": [1]}, population="zebras", new_population=True)
    assert list(spent(tmp_path / "own.sqlite", "zebras")) == ["x", "y", "b"]


def test_splits_that_share_a_client_share_its_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = [np.arange(first, first + 20) for first in range(0, 140, 20)]
    for dealt in (parts[:6], parts[1:]):
        monkeypatch.setattr(assemble_problem, "split_clients", lambda *given, d=dealt, **named: d)
        if dealt[0] is parts[0]:
            certify(tmp_path)
            continue
        with pytest.raises(InvalidValueError, match=r"is not in population .* is in 'digits-6-"):
            certify(tmp_path)
    assert len(names(tmp_path)) == 1


def test_ids_that_read_alike_are_one_client(tmp_path: Path) -> None:
    own(tmp_path, {"Zürich": [0], "Bern": [1]})
    for clients in ({"Zürich": [0], "bern": [1]}, {"Zürich": [0], "Be rn": [1]}):
        with pytest.raises(LedgerConflictError, match="and 'Bern' is, which differs"):
            own(tmp_path, clients)
    with pytest.raises(InvalidValueError, match="composed form"):
        own(tmp_path, {"Zu\u0308rich": [0], "Bern": [1]})
    assert list(spent(tmp_path / "own.sqlite", "wards")) == ["Zürich", "Bern"]
    own(tmp_path, {"Zürich": [0], "bern": [1]}, new_population=True)
    own(tmp_path, {"1": [0], "01": [1]}, population="numbers")


# A refused run leaves nothing behind


def kinds(path: Path) -> list[str]:
    with Ledger.open(path, read_only=True) as ledger:
        return [entry["kind"] for entry in ledger.export()["entries"]]


def test_an_epsilon_above_the_allowance_fixes_no_allowance(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"epsilon=3.0 .* <= allowance=2.0"):
        certify(tmp_path, population="clinics", allowance=2.0)
    assert not (tmp_path / "clients.sqlite").exists()
    certify(tmp_path, population="clinics")
    with pytest.raises(InvalidValueError, match=r"epsilon=7.0 .* must be <= 6.0"):
        certify(tmp_path, population="clinics", allowance=None, epsilon=7.0)


def test_an_epsilon_that_cannot_be_counted_is_not_entered(tmp_path: Path) -> None:
    certify(tmp_path, population="clinics")
    before = kinds(tmp_path / "clients.sqlite")
    tiny_delta = {"delta": 1e-200, "allowance": None, "seed": 1}
    for epsilon in (1e-200, 1e-300):
        with pytest.raises(InvalidValueError, match="an amount that can be counted"):
            certify(tmp_path, population="zebra", epsilon=epsilon, **tiny_delta)
    assert kinds(tmp_path / "clients.sqlite") == before
    certify(tmp_path, population="clinics")


AMPLIFIED = {"amplification": True, "selection": "poisson", "policy": "worst_case"}


def test_a_refused_amplification_leaves_nothing_behind(tmp_path: Path) -> None:
    own(tmp_path, {"a": [0], "b": [1]}, epsilon=1.0, allowance=3.0)
    before = kinds(tmp_path / "own.sqlite")
    settings = {**AMPLIFIED, "if_exhausted": "sit_out", "allowance": None, "clients_per_round": 1}
    with pytest.raises(InvalidValueError, match="needs clients with an untouched account"):
        own(tmp_path, {"a": [0], "n": [1]}, **settings)
    assert kinds(tmp_path / "own.sqlite") == before


def test_whoever_was_charged_first_in_this_run_is_new(tmp_path: Path) -> None:
    """Clients that an earlier run entered and never charged began with this one."""
    own(tmp_path, {"a": [0], "b": [1]})
    with Ledger.open(tmp_path / "own.sqlite") as ledger:
        ledger.population("wards").enrol(["n1", "n2"])
    result = own(tmp_path, {"a": [0], "n1": [1], "n2": [2]}, epsilon=1.0)
    assert result.result["ledger"]["enrolled"] == 2
    assert any("new: 2 of the clients were" in note for note in result.statement.notes)


# What a run says about its ledger


def test_a_weak_lifetime_is_called_weak(tmp_path: Path) -> None:
    first, second = (
        certify(tmp_path, population="clinics", epsilon=9.0, allowance=40.0) for _ in range(2)
    )
    weak = [[n for n in r.statement.notes if "lifetime epsilon" in n] for r in (first, second)]
    assert not weak[0]
    assert weak[1][0].startswith("caution: lifetime epsilon 1")
    assert not any("caution: epsilon" in note for note in second.statement.notes)


def test_the_statement_says_what_the_whole_life_cost(tmp_path: Path) -> None:
    first, second = (certify(tmp_path, population="clinics") for _ in range(2))
    path = (tmp_path / "clients.sqlite").resolve()
    lifetime = second.result["ledger"]["lifetime_epsilon_max"]
    assert 3.0 < lifetime <= 6.0
    start = f"lifetime: over all runs of ledger {path}, population 'clinics', every client has "
    (said,) = [note for note in second.statement.notes if note.startswith("lifetime")]
    assert said.startswith(start + "epsilon <= ")
    assert lifetime <= float(said.split("<= ")[1]) < lifetime + 0.01
    assert f"note       {said}" in second.statement.as_text()
    assert ("lifetime", said.removeprefix("lifetime: ")) in closing_lines(second)
    assert fedquilt.load(second.folder).statement == second.statement  # type: ignore[arg-type]
    assert second.summary()["ledger"]["lifetime_epsilon_max"] == lifetime
    new = [any(note.startswith("new: ") for note in r.statement.notes) for r in (first, second)]
    assert new == [True, False]
    trusted = ["what they took on trust" in run.statement.as_text() for run in (first, second)]
    assert trusted == [False, True]


def test_a_lifetime_without_a_bound_is_said(tmp_path: Path) -> None:
    certify(tmp_path, mode="fedavg", clients_per_round=1)
    strict = certify(tmp_path, if_exhausted="sit_out")
    assert strict.statement.is_bounded
    assert any("some client has no bound" in note for note in strict.statement.notes)


def test_a_run_on_its_own_says_nothing_of_a_lifetime(tmp_path: Path) -> None:
    result = certify(tmp_path, ledger=None)
    assert result.result["ledger"]["created"] == "ledger"
    assert not any("lifetime" in note for note in result.statement.notes)


@pytest.mark.parametrize("name", ["clinic", "Clinics", "clinics2", "CLINICS", "clincis"])
def test_a_misspelt_population_is_refused(tmp_path: Path, name: str) -> None:
    certify(tmp_path, population="clinics")
    with pytest.raises(InvalidValueError, match="and 'clinics' is"):
        certify(tmp_path, population=name)
    assert names(tmp_path) == ["clinics"]
    certify(tmp_path, population=name, new_population=True)
    certify(tmp_path, population=name)
    certify(tmp_path, population="hospitals", new_population=True)
    assert names(tmp_path) == ["clinics", name, "hospitals"]


def test_blanks_around_a_population_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="must not begin or end with blanks"):
        certify(tmp_path, population="clinics ")
    certify(tmp_path, population="clinics")
    with pytest.raises(InvalidValueError, match="and 'clinics' is"):
        certify(tmp_path, population="clinics ")


@pytest.mark.parametrize("name", ["client.sqlite", "Clients.sqlite", "clients.db"])
def test_a_misspelt_ledger_is_refused(tmp_path: Path, name: str) -> None:
    certify(tmp_path)
    (tmp_path / "cliente.sqlite").write_text("no ledger")
    with pytest.raises(InvalidValueError, match=r"and 'clients.sqlite' does"):
        certify(tmp_path, ledger=str(tmp_path / name))
    assert not (tmp_path / name).exists()
    certify(tmp_path, ledger=str(tmp_path / name), new_population=True)
    certify(tmp_path, ledger=str(tmp_path / "wards.sqlite"))


@pytest.mark.parametrize("state", ["at rest", "locked", "left by a kill"])
def test_other_files_of_the_same_stem_hide_no_ledger(tmp_path: Path, state: str) -> None:
    certify(tmp_path)
    for suffix in ("toml", "csv", "txt", "a", "z"):
        (tmp_path / f"clients.{suffix}").touch()
    connection = sqlite3.connect(tmp_path / "clients.sqlite", isolation_level=None)
    if state != "at rest":
        connection.execute("BEGIN EXCLUSIVE")
        connection.execute("UPDATE entries SET time = 'x'")
    if state == "left by a kill":
        journal = (tmp_path / "clients.sqlite-journal").read_bytes()
        connection.execute("ROLLBACK")
        (tmp_path / "clients.sqlite-journal").write_bytes(journal)
    with pytest.raises(InvalidValueError, match=r"and 'clients.sqlite' does"):
        certify(tmp_path, ledger=str(tmp_path / "client.sqlite"))
    connection.close()


def test_a_run_does_not_believe_an_edited_ledger(tmp_path: Path) -> None:
    certify(tmp_path, epsilon=5.0)
    with sqlite3.connect(tmp_path / "clients.sqlite") as connection:
        connection.execute("UPDATE entries SET charges=zeroblob(8) WHERE charges IS NOT NULL")
    connection.close()
    with pytest.raises(LedgerCorruptError, match="NOT WHOLE: entry 5"):
        certify(tmp_path, epsilon=5.0)


def test_a_population_of_another_adjacency_is_refused(tmp_path: Path) -> None:
    values = {"num_clients": 6, "epsilon": 6.0, "delta": 1e-5}
    with Ledger.open(tmp_path / "clients.sqlite", create=True) as ledger:
        ledger.population("clinics", adjacency="replace_one", **values)
    with pytest.raises(LedgerConflictError, match="has adjacency='replace_one', not 'zero_out'"):
        certify(tmp_path, population="clinics")


# A user's own clients

IDS = ["north", "south", "east"]
OWN: dict[str, Any] = {
    "mode": "certified",
    "availability": "always",
    "num_rounds": 2,
    "local_epochs": 1,
    "clients_per_round": 1.0,
    "epsilon": 3.0,
    "allowance": 6.0,
    "output_dir": None,
}
PARTS = {"north": [0, 1, 2], "south": [3, 4], "east": [5, 6, 7, 8]}


def own(folder: Path, clients: Any, **changes: Any) -> RunResult:
    draws = torch.Generator().manual_seed(1)
    data = (torch.rand(20, 4, generator=draws), torch.arange(20) % 2)
    torch.manual_seed(0)
    settings = {**OWN, "ledger": str(folder / "own.sqlite"), "population": "wards", **changes}
    if settings["ledger"] is None:
        del settings["population"]
    return fedquilt.run(nn.Linear(4, 2), data, data, clients, **settings)


def test_own_clients_are_found_by_id(tmp_path: Path) -> None:
    own(tmp_path, list(PARTS.values()), client_ids=IDS)
    first = spent(tmp_path / "own.sqlite", "wards")
    own(tmp_path, {"east": [1], "west": [2, 3]})
    second = spent(tmp_path / "own.sqlite", "wards")
    assert list(second) == [*IDS, "west"]
    assert second["north"] == first["north"] > 0
    assert second["east"] > first["east"]
    assert second["west"] == second["east"] - first["east"]
    with pytest.raises(BudgetExceededError, match=r"1 of 2 clients .* \(client 'east' has"):
        own(tmp_path, {"newer": [3], "east": [4, 5]}, epsilon=5.0)
    result = own(tmp_path, {"new": [3], "east": [4, 5]}, epsilon=5.0, if_exhausted="sit_out")
    assert result.result["joins"] == [2, 0]


def test_the_order_of_clients_says_nothing(tmp_path: Path) -> None:
    """The same people in another order were once given a fresh allowance by their places."""
    own(tmp_path, {"a": [0], "b": [1]}, availability=one_client(tmp_path, 0), epsilon=5.0)
    with pytest.raises(BudgetExceededError, match="client 'a' has"):
        own(tmp_path, {"b": [1], "a": [0]}, availability=one_client(tmp_path, 1), epsilon=5.0)


def one_client(folder: Path, client: int) -> str:
    """Return an availability trace in which only one client is ever there."""
    path = folder / f"only {client}.csv"
    path.write_text(f"round,client\n0,{client}\n1,{client}\n")
    return str(path)


@pytest.mark.parametrize(
    ("clients", "ids", "message"),
    [
        ([[0], [1]], ["a", "a"], "client id 'a' must be given only once"),
        ([[0], [1]], ["a"], "one id for each of 2 clients; it holds 1"),
        ({"a": [0]}, ["a"], "client_ids must be left out"),
        ({3: [0]}, None, "client id 3 must be a text"),
    ],
)
def test_wrong_ids(tmp_path: Path, clients: Any, ids: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        own(tmp_path, clients, client_ids=ids)
    assert not (tmp_path / "own.sqlite").exists()


def test_ids_and_places_are_not_mixed(tmp_path: Path) -> None:
    own(tmp_path, [[0], [1]])
    with pytest.raises(LedgerConflictError, match="made without client ids"):
        own(tmp_path, {"a": [0], "b": [1]})
    own(tmp_path, {"a": [0], "b": [1]}, population="named", new_population=True)
    with pytest.raises(LedgerConflictError, match="knows its 2 clients by id"):
        own(tmp_path, [[0], [1]], population="named")


@pytest.mark.parametrize("named", [False, True])
def test_own_data_need_a_name_for_a_ledger_that_outlives_the_run(
    tmp_path: Path, named: bool
) -> None:
    clients = {"a": [0], "b": [1]} if named else [[0], [1]]
    with pytest.raises(InvalidValueError, match="population must be named"):
        own(tmp_path, clients, population=None)


class Stop:
    """An observer that interrupts the run after its first round."""

    def __call__(self, config: object, line: dict[str, Any]) -> None:
        if line["round"] == 0:
            raise KeyboardInterrupt


def stopped(call: Any, *given: Any, **named: Any) -> Path:
    """Return the folder of a run that was interrupted after its first round."""
    with pytest.raises(RunInterrupted) as interrupted:
        call(*given, **named, observer=Stop())
    assert interrupted.value.folder is not None
    return Path(interrupted.value.folder)


@pytest.mark.parametrize("ledger", ["own.sqlite", None])
def test_a_run_is_resumed_with_the_clients_it_was_begun_with(
    tmp_path: Path, ledger: str | None
) -> None:
    place = {"ledger": None if ledger is None else str(tmp_path / ledger)}
    folder = stopped(own, tmp_path, PARTS, output_dir=str(tmp_path / "runs"), **place)
    permuted = dict(reversed(PARTS.items()))
    others: list[Any] = [
        *(permuted, {**PARTS, "east": [5, 6]}, dict(zip("abc", PARTS.values(), strict=True))),
        list(PARTS.values()),
    ]
    for clients in others:
        with pytest.raises(RunFolderError, match="begun with other clients"):
            own(tmp_path, clients, resume=folder, output_dir=str(tmp_path / "runs"), **place)
    said = own(tmp_path, PARTS, resume=folder, output_dir=str(tmp_path / "runs"), **place)
    assert said.result["rounds"] == 2


# Copies of a run that was stopped


def stopped_run(folder: Path) -> Path:
    config = tiny(**{**CERTIFIED, "output_dir": str(folder), "num_rounds": 3})
    return stopped(run_config, config)


def test_a_copy_of_a_run_that_went_on_is_refused(tmp_path: Path) -> None:
    folder = stopped_run(tmp_path)
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert resume_run(folder).statement.is_bounded
    with pytest.raises(RunFolderError, match=r"is behind: the same run has gone on in .*digits_"):
        resume_run(copy)
    shutil.rmtree(folder)
    with pytest.raises(RunFolderError, match="is behind"):
        resume_run(copy)


def test_the_original_is_refused_when_its_copy_went_on(tmp_path: Path) -> None:
    folder = stopped_run(tmp_path)
    shutil.copytree(folder, tmp_path / "copy")
    resume_run(tmp_path / "copy")
    with pytest.raises(RunFolderError, match=r"is behind: the same run has gone on in .*copy'"):
        resume_run(folder)


def test_a_copy_is_refused_while_the_run_goes_on(tmp_path: Path) -> None:
    refusals = []

    class Copying(Observer):
        def opened(self, config: object, folder: Path) -> None:
            self.folder = folder

        def __call__(self, config: object, line: dict[str, Any]) -> None:
            if line["round"] == 0:
                shutil.copytree(self.folder, tmp_path / "copy")
                with pytest.raises(RunFolderError, match="is a copy of a run that is going on"):
                    resume_run(tmp_path / "copy")
                refusals.append(1)

    config = tiny(**{**CERTIFIED, "output_dir": str(tmp_path / "runs")})
    run_config(config, Copying())
    assert refusals == [1]


def test_a_run_that_was_moved_goes_on(tmp_path: Path) -> None:
    folder = stopped_run(tmp_path / "here")
    moved = tmp_path / "there"
    shutil.move(folder, moved)
    result = resume_run(moved)
    assert result.result["rounds"] == 3
    (note,) = [note for note in result.statement.notes if note.startswith("resumed with")]
    assert "by another user, on another machine or with another state folder" in note


def test_without_a_state_folder_the_copy_is_not_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the statement says: the witness is of one user on one machine."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    folder = stopped_run(tmp_path / "runs")
    shutil.copytree(folder, tmp_path / "copy")
    for one in (folder, tmp_path / "copy"):
        result = resume_run(one)
        assert result.statement.is_bounded
        (note,) = [note for note in result.statement.notes if note.startswith("resumed with")]
        assert "leaves out what any copy of that folder released" in note


def test_the_note_of_a_run_is_its_owners(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    stopped_run(tmp_path / "runs")
    (note,) = run_account.state_folder().iterdir()
    assert note.stat().st_mode & 0o777 == 0o600


NOTES = [b"{", b"\0" * 64, b"[]", b'{"head": 3}', b'{"head": "a"}}', b"[" * 9999]


@pytest.mark.parametrize("text", NOTES, ids=range(len(NOTES)))
def test_a_note_that_cannot_be_read_is_no_absent_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: bytes
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = stopped_run(tmp_path / "runs")
    (note,) = run_account.state_folder().iterdir()
    note.write_bytes(text)
    with pytest.raises(RunFolderError, match=r"cannot be read .*delete the note"):
        resume_run(folder)
    note.unlink()
    assert resume_run(folder).statement.is_bounded


def test_a_shorter_note_leaves_nothing_of_a_longer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that was moved to a shorter path is killed in the middle of its note."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def killed(*given: object) -> None:
        raise KeyboardInterrupt

    with Ledger.open(tmp_path / "newer.sqlite", create=True) as newer:
        for place in (tmp_path / ("x" * 60), tmp_path / "y"):
            witness = run_account.open_witness("run", place)
            assert witness is not None
            if place.name == "y":
                monkeypatch.setattr(os, "ftruncate", killed)
            with contextlib.suppress(KeyboardInterrupt):
                witness.note(newer.head())
            witness.close()
    witness = run_account.open_witness("run", tmp_path / "y")
    assert witness is not None
    behind = pytest.raises(RunFolderError, match=r"is behind: the same run has gone on in '.*y'")
    with Ledger.open(tmp_path / "older.sqlite", create=True) as older, behind:
        witness.check(older)
    witness.close()


def test_a_run_killed_after_its_ledger_was_made_can_be_resumed(tmp_path: Path) -> None:
    pid = os.fork()
    if not pid:
        RunFolder.write_account = lambda *given: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore
        run_config(tiny(**{**CERTIFIED, "output_dir": str(tmp_path)}))
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    (folder,) = tmp_path.iterdir()
    assert resume_run(folder).result["ledger"]["created"] == "ledger"


def test_room_for_a_note_that_a_power_cut_left_blank_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first release there is nothing that a copy could have gone on with."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    with Ledger.open(tmp_path / "ledger.sqlite", create=True) as ledger:
        for left in (b"\0" * 4096, b" " * 512 + b"\0" * 3584):
            witness = run_account.open_witness("run", tmp_path)
            assert witness is not None
            witness.path.write_bytes(left)
            witness.check(ledger)
            witness.note(ledger.head())
            witness.path.write_bytes(witness.path.read_bytes()[:512] + bytes(3584))
            witness.check(ledger)
            assert ledger.head().encode() in witness.path.read_bytes()[:512]
            witness.close()


def test_a_note_of_a_long_path_fits_into_what_a_power_cut_cannot_tear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    witness = run_account.open_witness("run", tmp_path / ("x" * 250) / ("y" * 250))
    assert witness is not None
    witness.note("a" * 64)
    assert len(witness.path.read_bytes().strip()) <= 512
    witness.close()


# Runs that have lost the note of their account, or never had one


OF_THE_OWNER = ("ledger.json", "clients.json", "ledger.sqlite", "private.jsonl")


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "own"])
@pytest.mark.parametrize("saved", [True, False], ids=["checkpoint", "rounds"])
def test_a_run_that_lost_what_only_its_owner_may_read_makes_no_claim(
    tmp_path: Path, shared: bool, saved: bool
) -> None:
    """A copy by somebody else has no files of mode 0600: what its rounds cost is unknown."""
    chosen = {**CERTIFIED, "output_dir": str(tmp_path / "runs"), "num_rounds": 3}
    ledger = tmp_path / "clients.sqlite"
    chosen |= {"ledger": str(ledger), "allowance": 8.0} if shared else {"allowance": None}
    folder = stopped(run_config, tiny(**chosen))
    before = ledger.read_bytes() if shared else b""
    lost = [*OF_THE_OWNER, *([] if saved else ["checkpoint.safetensors"])]
    for name in lost:
        (folder / name).unlink(missing_ok=True)
    assert (folder / "rounds.jsonl").stat().st_size
    with pytest.raises(RunFolderError, match=r"no ledger\.json, .*: restore ledger\.json"):
        resume_run(folder)
    assert (ledger.read_bytes() if shared else b"") == before
    assert not (folder / "ledger.sqlite").exists()


def spent_in(path: Path) -> list[float]:
    with Ledger.open(path, read_only=True) as ledger:
        return [float(value) for one in ledger.populations() for value in one.spent()]


def test_two_runs_of_one_ledger_do_not_go_on_with_the_account_of_each_other(tmp_path: Path) -> None:
    """What a run has released is charged to its own account: another's would leave it out."""
    ledger = tmp_path / "clients.sqlite"
    chosen = {**CERTIFIED, "num_rounds": 3, "ledger": str(ledger), "allowance": 8.0}
    first, second = (
        stopped(run_config, tiny(**chosen, output_dir=str(tmp_path / name))) for name in "ab"
    )
    notes = [(folder / "ledger.json").read_bytes() for folder in (first, second)]
    before = spent_in(ledger)
    for folder, note in zip((second, first), notes, strict=True):
        (folder / "ledger.json").write_bytes(note)
        with pytest.raises(RunFolderError, match=r"the checkpoint beside it is of .*: restore"):
            resume_run(folder)
    assert spent_in(ledger) == before
    (first / "ledger.json").write_bytes(notes[0])
    assert resume_run(first).result["rounds"] == 3


def test_the_ledger_of_another_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = stopped_run(tmp_path)
    for name in ("ledger.json", "rounds.jsonl", "private.jsonl", "checkpoint.safetensors"):
        (folder / name).unlink()
    with pytest.raises(RunFolderError, match="has charges of another run"):
        resume_run(folder)


def test_a_received_configuration_names_no_ledger(tmp_path: Path) -> None:
    """Whoever resumes a folder has not said that its ledger may be charged."""
    certify(tmp_path, population="people")
    ledger = tmp_path / "clients.sqlite"
    config = tiny(mode="fedavg", num_clients=6, ledger=str(ledger), population="people")
    folder = RunFolder.create(config.replace(allow_unbounded=True), str(tmp_path / "received"))
    folder.close()
    before = ledger.read_bytes()
    known = r"no ledger\.json, by which that ledger knows it: restore ledger\.json"
    with pytest.raises(RunFolderError, match=known):
        resume_run(folder.path)
    folder.write_account({"run_id": "made-up", "ledger": str(ledger)})
    with pytest.raises(RunFolderError, match="does not contain the run 'made-up'"):
        resume_run(folder.path)
    assert ledger.read_bytes() == before


def killed_at(function: str, config: Any) -> None:
    """Begin a run in a process that dies when it comes to a function of its folder."""
    pid = os.fork()
    if not pid:
        setattr(run_folder, function, lambda *given: os.kill(os.getpid(), signal.SIGKILL))
        setattr(RunFolder, function, lambda *given: os.kill(os.getpid(), signal.SIGKILL))
        run_config(config)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("mode", ["fedavg", "certified"])
@pytest.mark.parametrize("function", ["write_config_file", "write_clients"])
def test_a_first_start_that_was_killed_is_resumed_or_begun_anew(
    tmp_path: Path, mode: str, function: str
) -> None:
    chosen = {"mode": mode, "num_clients": 6, "clients_per_round": 1.0, "num_rounds": 1}
    chosen |= {"ledger": str(tmp_path / "new.sqlite"), "population": "w", "new_population": True}
    config = tiny(**{**chosen, "noise_seed": None, "output_dir": str(tmp_path / "runs")})
    killed_at(function, config)
    (folder,) = (tmp_path / "runs").iterdir()
    assert (folder / "config.toml").exists() == (function == "write_clients")
    if (folder / "config.toml").exists():
        assert resume_run(folder).result["rounds"] == 1
    else:
        assert run_config(config).result["rounds"] == 1
    charged = spent(tmp_path / "new.sqlite", "w").values()
    assert all(np.isfinite(value) == (mode == "certified") and value > 0 for value in charged)
