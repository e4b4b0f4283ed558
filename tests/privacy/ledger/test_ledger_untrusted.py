"""Ledgers from elsewhere: hostile bodies, snapshots, heads, names, and claims of size."""

from __future__ import annotations

import json
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.privacy.ledger import Ledger, LedgerCorruptError, LedgerError
from fedquilt.privacy.ledger.entries import COLUMNS, GENESIS, Entry
from fedquilt.report.views import planned_cost
from run_processes import environment

Cli = Callable[..., Any]
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A ledger with a population, a settled round and an open one."""
    place = tmp_path / "l.sqlite"
    with Ledger.open(place, create=True) as ledger:
        population = ledger.population("digits", num_clients=5, epsilon=6.0, delta=1e-5)
        run = population.start_run("first", epsilon=3.0)
        run.settle(run.reserve(0, [1, 4], 0.01), "release")
        run.reserve(1, [2], 0.01)
    return place


def change(path: Path, sql: str, *values: object, chained: bool = True) -> None:
    """Edit a ledger, and make the hashes fit again."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(sql, values)
    if chained:
        previous, last = GENESIS, 0
        for row in connection.execute(f"SELECT {', '.join(COLUMNS)} FROM entries").fetchall():
            previous, last = Entry(*row).chained(previous), row[0]
            connection.execute("UPDATE entries SET hash = ? WHERE seq = ?", (previous, last))
        connection.execute("UPDATE head SET seq = ?, hash = ?", (last, previous))
    connection.close()


def body_of(path: Path, kind: str) -> dict[str, Any]:
    """Return the body of the first entry of a kind."""
    connection = sqlite3.connect(path)
    (text,) = connection.execute("SELECT body FROM entries WHERE kind = ?", (kind,)).fetchone()
    connection.close()
    body: dict[str, Any] = json.loads(text)
    return body


def set_body(path: Path, kind: str, text: str) -> None:
    """Give the entries of a kind another body."""
    change(path, "UPDATE entries SET body = ? WHERE kind = ?", text, kind)


@pytest.mark.parametrize("kind", ["population", "run"])
@pytest.mark.parametrize("text", [DEEP, "9" * 6000, "[]", "null", "{}", '{"epsilon": 1e999}'])
def test_bodies_that_are_none(cli: Cli, path: Path, kind: str, text: str) -> None:
    set_body(path, kind, text)
    said = cli("ledger", "verify", path)
    assert said.code == 1
    assert f"is not a {kind}" in said.out
    with Ledger.open(path, read_only=True) as ledger, pytest.raises(LedgerCorruptError):
        [population.runs() for population in ledger.populations()]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("allowance_mu2", "Infinity"),
        ("allowance_mu2", "1e999"),
        ("num_clients", "2.5"),
        ("num_clients", '"5"'),
        ("num_clients", "100000001"),
        ("delta", "1"),
        ("epsilon", "true"),
        ("adjacency", "[]"),
        ("named", '"yes"'),
    ],
)
def test_values_of_a_population(path: Path, key: str, value: str) -> None:
    body = {**body_of(path, "population"), key: "@"}
    set_body(path, "population", json.dumps(body).replace('"@"', value))
    with Ledger.open(path, read_only=True) as ledger:
        with pytest.raises(LedgerCorruptError, match="is not a population"):
            ledger.populations()
        assert not ledger.verify().ok


@pytest.mark.parametrize("seq", ["text", -1, 2**63 - 1, 1.5, None])
def test_snapshots_and_heads_of_no_entry(cli: Cli, path: Path, seq: object) -> None:
    if seq is not None:
        row = ("INSERT INTO snapshots VALUES (2, ?, x'', x'', x'', '[]')", seq)
        change(path, *row, chained=False)
        for command in ("show", "export", "verify"):
            said = cli("ledger", command, path)
            assert said.code in (1, 2)
            assert "Traceback" not in said.err
        change(path, "DELETE FROM snapshots", chained=False)
    change(path, "UPDATE head SET seq = ?", seq or 2**63 - 1, chained=False)
    assert cli("ledger", "show", path).code == 2
    assert cli("ledger", "verify", path).code == 1


@pytest.mark.parametrize("column", ["run", "round"])
def test_rounds_of_nothing(path: Path, column: str) -> None:
    change(path, f"UPDATE entries SET {column} = NULL WHERE kind = 'reserve'")
    with Ledger.open(path) as ledger, pytest.raises(LedgerError, match="names no round of a run"):
        ledger.populations()


def test_names_are_printed_without_their_escapes(cli: Cli, path: Path) -> None:
    change(path, "UPDATE entries SET name = ? WHERE kind = 'run'", "\x1b]0;title\x07")
    for command in (["show"], ["export"], ["export", "--csv"], ["show", "--json"], ["verify"]):
        said = cli("ledger", *command, path)
        assert said.code == 0
        assert "title" in said.out or command == ["verify"]
        assert "\x1b" not in said.out + said.err
        assert "\x07" not in said.out + said.err


def test_a_name_is_no_formula_in_a_figure(cli: Cli, here: Path) -> None:
    with Ledger.open(here / "l.sqlite", create=True) as ledger:
        ledger.population("$\\bad{$", num_clients=5, epsilon=6.0, delta=1e-5)
    assert cli("ledger", "show", "l.sqlite", "--figure", "f.png").code == 0


READ = """
import resource, sys
from fedquilt.cli import main
used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    main()
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used, file=sys.stderr)
"""


@pytest.mark.parametrize("command", ["show", "verify", "export", "backup"])
def test_clients_that_are_only_claimed_cost_no_memory(path: Path, command: str) -> None:
    set_body(path, "population", json.dumps({**body_of(path, "population"), "num_clients": 10**8}))
    more = [str(path.parent / "copy")] if command == "backup" else []
    ended = subprocess.run(
        [sys.executable, "-c", READ, "ledger", command, str(path), *more],
        capture_output=True,
        text=True,
        env=environment(),
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 31, 1 << 31)),
    )
    assert ended.returncode == 0, ended.stderr
    assert int(ended.stderr.split()[-1]) < 200_000  # kB; one balance each would be 800,000


def test_large_populations_list_who_was_ever_there(path: Path) -> None:
    set_body(path, "population", json.dumps({**body_of(path, "population"), "num_clients": 10**8}))
    with Ledger.open(path, read_only=True) as ledger:
        (population,) = ledger.populations()
        assert [row.client for row in population.rows()] == [1, 2, 4]
        assert [row.client for row in population.rows(most=4)] == [1, 4, 0, 2]
        summary = population.summary()
    assert (summary.clients, summary.joined, summary.reserved) == (10**8, 2, 1)
    assert summary.epsilon_median == 0.0
    assert 0 < summary.epsilon_max < 1


def test_a_population_that_nobody_has_joined_is_shown(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "none.sqlite"
    with Ledger.open(place, create=True) as ledger:
        ledger.population("none", client_ids=["ann"], epsilon=2.0, delta=1e-5)
    change(place, "DELETE FROM entries WHERE kind = 'members'")
    assert cli("ledger", "show", place).code == 0
    with Ledger.open(place, read_only=True) as ledger:
        (population,) = ledger.populations()
        summary = population.summary()
    assert (summary.clients, summary.epsilon_median, summary.epsilon_max) == (0, 0.0, 0.0)
    assert planned_cost(place, "none", 1.0)["cannot"] == 0
