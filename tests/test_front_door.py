"""What `fedquilt.run` is given: forms that are taken, mistakes that cost no epsilon."""

from __future__ import annotations

import io
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.errors import InvalidValueError
from fedquilt.experiment import preflight
from fedquilt.privacy.ledger import Ledger

X = torch.randn(80, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
TRAIN, TEST = (X[:60], Y[:60]), (X[60:], Y[60:])
CLIENTS = [list(range(start, 60, 6)) for start in range(6)]
QUICK: dict[str, Any] = {"num_rounds": 2, "output_dir": None, "quiet": True}


def train(model: Any = None, test: Any = TEST, clients: Any = CLIENTS, **given: Any) -> Any:
    model = nn.Linear(6, 2) if model is None else model
    return fedquilt.run(model, TRAIN, test, clients, **{**QUICK, **given})


def test_paths_and_devices_are_taken_as_they_are(tmp_path: Path) -> None:
    done = train(
        output_dir=tmp_path, ledger=tmp_path / "clients.sqlite", population="people",
        device=torch.device("cpu"),
    )  # fmt: skip
    assert done.folder is not None
    assert done.folder.parent == tmp_path
    assert (tmp_path / "clients.sqlite").exists()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Linear, "call the class"),
        (lambda x: x, r"must be an instance of torch\.nn\.Module"),
        (nn.LazyLinear(2), "call it once on a sample"),
        (nn.Linear(6, 2).double(), r"use model\.float\(\)"),
    ],
    ids=["class", "function", "lazy", "float64"],
)
def test_what_is_no_model_is_refused_with_what_to_do(model: Any, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        train(model)


def test_a_number_of_clients_is_no_split() -> None:
    with pytest.raises(InvalidValueError, match="split_clients deals samples"):
        train(clients=10)


def failing(outputs: Any, targets: Any) -> float:
    return 1 / 0


def wordy(outputs: Any, targets: Any) -> Any:
    return "very good"


@pytest.mark.parametrize("metric", [failing, wordy])
def test_a_metric_that_fails_costs_nothing(metric: Any, tmp_path: Path) -> None:
    ledger = tmp_path / "clients.sqlite"
    train(
        output_dir=str(tmp_path),
        ledger=str(ledger),
        population="people",
        allowance=8.0,
        epsilon=2.0,
    )
    before = spent(ledger)
    with pytest.raises(InvalidValueError, match=f"metric '{metric.__name__}' must return a number"):
        train(
            output_dir=str(tmp_path), ledger=str(ledger), population="people", allowance=8.0,
            epsilon=2.0, metrics={metric.__name__: metric},
        )  # fmt: skip
    assert spent(ledger) == before


def spent(path: Path) -> Any:
    with Ledger.open(path) as ledger:
        found: dict[str, Any] = ledger.export()
    return found["populations"]


def test_an_observer_of_one_argument_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="a function of the configuration and a finished"):
        train(output_dir=str(tmp_path), observer=lambda line: None)
    assert not list(tmp_path.iterdir())


def test_a_run_that_measures_nothing_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fedquilt"):
        assert train(test=None).metrics == {}
    assert "nothing will be measured" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="fedquilt"):
        train(test=None, client_test_fraction=0.3)
    assert "nothing will be measured" not in caplog.text


def test_without_a_test_set_it_is_said_where_the_measures_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    done = train(test=None, client_test_fraction=0.3, quiet=False)
    assert "what clients measure is for the owner (client_metrics)" in capsys.readouterr().err
    assert done.metrics == {}
    assert str(done.statement) == done.statement.as_text()
    assert len(done.client_metrics) == len(CLIENTS)
    train(test=None, client_test_fraction=0.3, quiet=False, mode="fedavg")
    assert "client_metrics" not in capsys.readouterr().err, "there their mean is in the history"


def test_the_owner_hears_of_missing_values_before_anything_is_spent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holed = X[:60].clone()
    holed[[0, 7], 2] = float("nan")  # of clients 0 and 1
    monkeypatch.setattr(preflight.sys.stderr, "isatty", lambda: True, raising=False)
    names = {f"clinic-{number}": part for number, part in enumerate(CLIENTS)}
    fedquilt.run(
        nn.Linear(6, 2), (holed, Y[:60]), TEST, names, num_rounds=1, output_dir=None, progress=False
    )
    said = capsys.readouterr().err
    assert "2 of 6 clients hold samples with NaN or infinity (clinic-0, clinic-1)" in said


def test_who_counted_for_nothing_is_called_by_name() -> None:
    holed = X[:60].clone()
    holed[0, 2] = float("nan")
    names = {f"clinic-{number}": part for number, part in enumerate(CLIENTS)}
    for given, called in ((names, "not finite: clinic-0"), (CLIENTS, "not finite: number 0")):
        done = fedquilt.run(
            nn.Linear(6, 2), (holed, Y[:60]), TEST, given, num_rounds=1, output_dir=None, quiet=True
        )
        assert done.for_owner[-1].endswith(called)


def test_the_owner_hears_of_missing_values_in_python_and_in_a_notebook(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    holed = X[:60].clone()
    holed[0, 2] = float("nan")
    given = (nn.Linear(6, 2), (holed, Y[:60]), TEST, CLIENTS)
    done = fedquilt.run(*given, num_rounds=1, output_dir=None, progress=False)
    missing, unheard = done.for_owner
    assert missing.startswith("1 of 6 clients hold samples with NaN or infinity (0)")
    assert unheard.startswith("1 client counted for nothing")
    assert "NaN" not in "".join((*capsys.readouterr(), str(done.result), repr(done)))
    notebook = types.SimpleNamespace(get_ipython=object)
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    fedquilt.run(*given, num_rounds=1, output_dir=None, progress=False)
    assert "for the owner alone: 1 of 6 clients hold" in capsys.readouterr().err


def test_the_owner_is_told_above_the_bar_of_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it draws, rich stands in for the error stream, and says that it is no terminal."""
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    holed = X[:60].clone()
    holed[0, 2] = float("nan")
    fedquilt.run(
        nn.Linear(6, 2),
        (holed, Y[:60]),
        TEST,
        CLIENTS,
        num_rounds=1,
        output_dir=None,
        progress=True,
    )
    said = terminal.getvalue()
    assert "\x1b[" in said, "a bar was drawn"
    assert "for the owner alone: 1 of 6 clients hold" in said
    assert "for the owner alone: 1 client counted for" in said


def test_an_abbreviation_is_understood() -> None:
    with pytest.raises(InvalidValueError, match="did you mean 'learning_rate'"):
        fedquilt.run(nn.Linear(6, 2), (X, Y), TEST, CLIENTS, lr=0.1)


def test_modules_of_the_documents_need_no_import_of_their_own() -> None:
    assert fedquilt.errors.InvalidValueError is InvalidValueError
    assert fedquilt.framework.QuAPFLServer
