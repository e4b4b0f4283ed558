"""`fedquilt statement`, `ledger` and `plan`."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.experiment.api import RunResult, run_config
from run_samples import flags, tiny

Cli = Callable[..., Any]


@pytest.fixture
def certified(here: Path, uninterrupted: Callable[..., RunResult]) -> Path:
    """The folder `run` of a finished certified run with secret noise.

    It was copied from where it was made: a run's own ledger travels with it.
    """
    finished = uninterrupted(mode="certified", noise_seed=None)
    shutil.copytree(finished.folder, here / "run")  # type: ignore[arg-type]
    return here / "run"


def test_statement(cli: Cli, certified: Path) -> None:
    result = json.loads((certified / "result.json").read_text())
    assert cli("statement", "run", "--json").json() == result["statement"]
    said = cli("statement", "run")
    assert said.code == 0
    assert "every client: epsilon <= 3" in said.out
    assert 0 < result["statement"]["epsilon_max"] <= 3.0


@pytest.mark.parametrize("place", ["nowhere", "empty", "unfinished"])
def test_no_statement(cli: Cli, here: Path, certified: Path, place: str) -> None:
    (here / "empty").mkdir()
    certified.rename(here / "unfinished")
    (here / "unfinished" / "result.json").unlink()
    said = cli("statement", place)
    assert said.code == 2
    assert place in said.err
    assert "Traceback" not in said.err


@pytest.mark.parametrize("path", ["run", "run/ledger.sqlite"])
def test_ledger_show_export_and_verify(cli: Cli, certified: Path, path: str) -> None:
    result = json.loads((certified / "result.json").read_text())
    shown = cli("ledger", "show", path, "--json").json()
    (population,) = shown["populations"]
    assert population["population"] == result["ledger"]["population"]
    assert cli("ledger", "export", path).json() == shown
    text = cli("ledger", "export", path, "--csv")
    rows = list(csv.DictReader(io.StringIO(text.out)))
    assert [int(row["client"]) for row in rows] == list(range(10))
    assert [int(row["joins"]) for row in rows] == result["joins"]
    largest = max(float(row["epsilon_spent"]) for row in rows)
    assert largest == pytest.approx(result["statement"]["epsilon_max"], rel=1e-9)
    said = cli("ledger", "verify", path, "--run", "run")
    assert said.code == 0
    assert result["ledger"]["head"] in said.out
    assert cli("ledger", "verify", path, "--json").json()["ok"] is True
    table = cli("ledger", "show", path, "--most", "2")
    assert table.code == 0
    assert population["population"] in table.out


def test_a_ledger_that_was_changed_or_put_back(cli: Cli, here: Path, certified: Path) -> None:
    old = tiny(mode="certified", noise_seed=None, num_rounds=1, output_dir=str(here / "old"))
    older = run_config(old).folder
    assert older is not None
    said = cli("ledger", "verify", older / "ledger.sqlite", "--run", "run")
    assert said.code == 1
    assert "NOT WHOLE" in said.out
    content = bytearray((certified / "ledger.sqlite").read_bytes())
    place = content.rindex(b"settle")
    content[place : place + 6] = b"reserv"
    (certified / "ledger.sqlite").write_bytes(content)
    said = cli("ledger", "verify", "run")
    assert said.code in (1, 2)
    assert "Traceback" not in said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["show", "nowhere.sqlite"], "nowhere.sqlite"),
        (["show", "text.sqlite"], "text.sqlite"),
        (["show", "empty"], "empty"),
        (["show", "run", "--population", "nobody"], "nobody"),
        (["export", "run", "--csv", "--json"], "exclude each other"),
        (["verify", "run", "--run", "nowhere"], "nowhere"),
    ],
    ids=str,
)
def test_ledgers_that_cannot_be_read(
    cli: Cli, here: Path, certified: Path, arguments: list[str], words: str
) -> None:
    (here / "text.sqlite").write_text("not a ledger")
    (here / "empty").mkdir()
    said = cli("ledger", *arguments)
    assert said.code == 2
    assert words in said.words
    assert "Traceback" not in said.err
    assert not (here / "nowhere.sqlite").exists()


def test_looking_changes_nothing(cli: Cli, certified: Path) -> None:
    before = (certified / "ledger.sqlite").read_bytes()
    for command in ("show", "export", "verify"):
        assert cli("ledger", command, "run").code == 0
    assert (certified / "ledger.sqlite").read_bytes() == before


def test_plan(cli: Cli) -> None:
    record = cli("plan", "--parameters", "650", "--epsilon", "6", "--json").json()
    assert record["epsilon"] == 6.0
    text = cli("plan", "--model", "linear", "--epsilon", "6")
    assert text.code == 0
    assert "650" in text.out


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        *(("--epsilon", text) for text in ("0", "-1", "nan", "inf", "x")),
        *(("--delta", text) for text in ("0", "1", "nan", "x")),
        *(("--num-clients", text) for text in ("0", "-1", "x", "1.5")),
        *(("--num-rounds", text) for text in ("0", "-3", "x")),
        *(("--clients-per-round", text) for text in ("0", "-1", "1.5", "nan", "x", "101")),
        *(("--max-joins", text) for text in ("0", "x")),
        *(("--parameters", text) for text in ("0", "x")),
        *(("--clip-norm", text) for text in ("0", "-1", "nan")),
        ("--model", "nonesuch"),
        ("--dataset", "nonesuch"),
    ],
)
def test_plans_that_cannot_be_made(cli: Cli, here: Path, flag: str, text: str) -> None:
    said = cli("plan", flag, text)
    assert said.code == 2
    assert said.out == ""
    assert "Traceback" not in said.err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", [["show"], ["show", "--json"], ["export"], ["export", "--csv"]])
def test_an_edited_ledger_is_not_shown(cli: Cli, certified: Path, command: list[str]) -> None:
    with sqlite3.connect(certified / "ledger.sqlite") as connection:
        connection.execute("UPDATE entries SET charges = zeroblob(8) WHERE charges IS NOT NULL")
    connection.close()
    said = cli("ledger", *command, "run")
    assert said.code == 2
    assert said.out == ""
    assert "NOT WHOLE: entry 5 (reserve) was edited" in said.words
    assert "entry 5 (reserve) was edited" in cli("ledger", "verify", "run").out


@pytest.mark.usefixtures("no_figures")
def test_a_new_population_is_said_and_a_near_name_refused(cli: Cli, here: Path) -> None:
    shared = flags(mode="certified", noise_seed=None, ledger="l.sqlite", epsilon=1, allowance=6)
    said = cli("run", *shared, "--population", "clinics", "--quiet", "--statement")
    assert f"ledger    {here / 'l.sqlite'}, population clinics (both new)" in said.out
    assert "note       new: this ledger begins with this run" in said.out
    said = cli("run", *shared, "--population", "clinic", "--quiet")
    assert said.code == 2
    assert "--new-population" in said.words
    said = cli("run", *shared, "--population", "clinic", "--new-population", "--json")
    assert said.json()["ledger"]["created"] == "population"


def test_words_of_the_command_line_in_its_errors(cli: Cli, certified: Path) -> None:
    for arguments, words in (
        (["ledger", "show", "run", "--most", "-1"], "most=-1 must be >= 0"),
        (["ledger", "show", "run", "--figure", "f.gif"], "figure='f.gif' must end in"),
        (["ledger", "show", "nowhere.sqlite"], "a run with that ledger makes it"),
    ):
        said = cli(*arguments)
        assert said.code == 2
        assert words in said.words
        for foreign in ("create=True", "read_only=True", "save_path="):
            assert foreign not in said.words


def test_an_audit_without_a_word_replays(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("fedquilt.audit.replay", lambda *a, **b: asked.append(a) or [])
    said = cli("audit")
    assert said.code == 0
    assert said.out.splitlines()[-1].endswith("python tests/audit/whole_runs.py.")
    assert len(asked) == 1
    assert cli("audit", "--without-clip").code == 2
    assert "must be used with --canary" in cli("audit", "--device", "cuda").words


def test_what_one_client_has_given_away(cli: Cli, here: Path) -> None:
    options = {"ledger": "l.sqlite", "population": "clinics", "noise_seed": None, "num_rounds": 2}
    assert cli("run", *flags(mode="certified", **options), "--quiet").code == 0
    rows = list(csv.DictReader(cli("ledger", "export", "l.sqlite", "--csv").out.splitlines()))
    row = max(rows, key=lambda one: float(one["epsilon_spent"]))
    name = row["client_id"] or row["client"]
    said = cli("ledger", "show", "l.sqlite", "--client", name)
    assert said.code == 0
    assert f"client             {name}" in said.out
    assert "population         clinics" in said.out
    (record,) = cli("ledger", "show", "l.sqlite", "--client", name, "--json").json()
    assert record["epsilon_spent"] == pytest.approx(float(row["epsilon_spent"]))
    assert record["joins"] == int(row["joins"]) > 0
    near = cli("ledger", "show", "l.sqlite", "--client", name[:-1])
    assert "did you mean" in near.words
    refused = cli("ledger", "show", "l.sqlite", "--client", "nobody\x1b[31m")
    assert refused.code == 2
    assert "must be the name or id of a client" in refused.words
    assert "\x1b" not in refused.err
