"""What `QuAPFLServer` says, claims, records and writes."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_framework import EVERYBODY, INPUTS, LABELS, PARTS, SMALL, Pairs, make_net, server

from fedquilt.config import OUTPUT_CONFIG
from fedquilt.errors import InvalidValueError
from fedquilt.framework import QuAPFLServer
from fedquilt.report import plot_training_history
from fedquilt.report.paper_figures import consumption_by_group

BOUNDED = {"mode": "fixed_dp", "noise_layers": "all", "noise_seed": None, "epsilon_total": 3.0}


def made(**given: Any) -> QuAPFLServer:
    config = {**SMALL, **given.pop("config", {})}
    return QuAPFLServer(make_net(), Pairs(), Pairs(), PARTS, "toy", config=config, **given)


# Speaking


def test_settings_at_the_start_and_a_line_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    speaker = made()
    said = capsys.readouterr().err
    for words in (
        *("mode: quap_fl_client", "learning_rate: 0.1", "max_clip: 10.0", "epsilon_total: 3000.0"),
        *("epsilon_base: 1000.000000", "max_agg_norm: 10000", "all 10 clients join every round"),
    ):
        assert words in said
    speaker.train()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", accuracy")[0] for line in lines] == [
        f"toy quap_fl_client: round {n} of 3, 10 clients" for n in (1, 2, 3)
    ]


def test_silence(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="fedquilt"):
        made(verbose=False).train()
    assert capsys.readouterr() == ("", "")
    assert caplog.text == ""
    with pytest.raises(ValueError, match="verbose"):
        made(verbose="no")


def test_a_logger_that_is_heard_is_told_instead(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    own = logging.getLogger("a-test")
    for given, name in (({"logger": own}, "a-test"), ({}, "fedquilt")):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger=name):
            made(**given).train()
        assert "epsilon_base: 1000.000000" in caplog.text
        assert caplog.text.count(", accuracy") == 3
        assert {record.name for record in caplog.records} == {name}
    assert capsys.readouterr().err == ""


def test_a_run_with_a_bound_does_not_tell_its_pace(capsys: pytest.CaptureFixture[str]) -> None:
    """A line after every round would say how long it took, which its record withholds."""
    made(config={**BOUNDED, "num_rounds": 30, "eval_every": 30}).train()
    assert capsys.readouterr().err.count(" of 30") == 10


# Claiming


def test_the_documents_modes_claim_nothing() -> None:
    for config in ({}, {"noise_strategy": "full"}, {"noise_strategy": "none"}):
        trained = made(config=config, verbose=False)
        history = trained.train()
        assert math.isinf(trained.statement.epsilon_max)
        assert history.statement == trained.statement
    assert "no noise" in trained.statement.notes[0]


def test_a_flat_budget_on_everything_has_a_bound_unless_steps_are_somebodys_own() -> None:
    class Chooser(QuAPFLServer):
        def select_clients(self, round_t: int) -> list[int]:
            return [int(LABELS[round_t])]

    plain = server(**BOUNDED)
    plain.train()
    assert 0 < plain.statement.epsilon_max < 3.0
    spent = plain.statement.epsilon_max
    plain.train()
    assert plain.statement.epsilon_max > spent, "a second training costs too"
    plain.update_global_model(plain.local_training(0, 0))
    assert math.isinf(plain.statement.epsilon_max), "a raw update went into the model"
    own = server(Chooser, **BOUNDED)
    own.train()
    assert math.isinf(own.statement.epsilon_max)
    assert "select_clients" in own.statement.notes[0]


# Recording


@pytest.mark.parametrize("strategy", [{}, {"noise_strategy": "full"}, {"mode": "fixed_dp"}])
def test_a_limit_that_bites_is_recorded_as_applied(
    strategy: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    free = server(**strategy, num_rounds=1, epsilon_total=1.0, max_agg_norm=1e9)
    bound = server(**strategy, num_rounds=1, epsilon_total=1.0, max_agg_norm=0.05)
    start = flat_of(free)
    wide, narrow = free.train(), bound.train()
    assert "agg_scale" not in wide
    (scale,) = narrow["agg_scale"]
    assert 0 < scale < 1
    for key in ("sigma", "noise_norm", "signal_norm"):
        whole, cut = wide["noise_stats"][0][key], narrow["noise_stats"][0][key]
        assert cut == pytest.approx(whole * scale, rel=1e-4)
    rate = 0.1 if strategy else 1.0
    assert np.linalg.norm(flat_of(bound) - start) == pytest.approx(0.05 * rate, rel=1e-3)
    assert "shortened to" in capsys.readouterr().err
    assert any("shortened the noised update in 1 of 1" in n for n in bound.statement.notes)
    assert not any("shortened" in note for note in free.statement.notes)


def flat_of(made: QuAPFLServer) -> np.ndarray:
    return np.concatenate([p.detach().numpy().ravel() for p in made.model.parameters()])


def test_every_clients_own_budget_is_in_the_history() -> None:
    class Turns(QuAPFLServer):
        def select_clients(self, round_t: int) -> list[int]:
            return [0, 1] if round_t else [0]

    turns = server(Turns, num_rounds=4, epsilon_total=4.0)
    history = turns.train()
    assert history["client_participation"] == [[0], [0, 1], [0, 1], [0, 1]]
    rates = [[1.0], [1.0, 1 / 2], [1.0, 2 / 3], [1.0, 3 / 4]]
    for own, mean, at in zip(
        history["client_budgets"], history["privacy_budgets"], rates, strict=True
    ):
        assert own == pytest.approx([1 + 0.5 * math.exp(-2 * rate) for rate in at])
        assert np.mean(own) == pytest.approx(mean)
    top, _ = consumption_by_group(history, 10, 0.1)
    assert top.members.tolist() == [0]
    assert top.mean[-1] == pytest.approx(4 * (1 + 0.5 * math.exp(-2)))
    shared = {key: value for key, value in history.items() if key != "client_budgets"}
    assert consumption_by_group(shared, 10, 0.1)[0].mean[-1] > top.mean[-1]


# Stopping


def test_training_stops_at_the_target_on_validation_data() -> None:
    config = {
        "noise_strategy": "none",
        "num_rounds": 60,
        "learning_rate": 0.5,
        "early_stopping": True,
        "target_accuracy": 0.6,
    }
    stopped = made(config=config, validation=(INPUTS[:30], LABELS[:30]), verbose=False)
    history = stopped.train()
    assert 1 <= len(history["clip_values"]) < 60
    module = stopped.model.eval()
    found = (module(INPUTS[:30]).argmax(1) == LABELS[:30]).float().mean().item()
    assert found >= 0.6
    with pytest.raises(InvalidValueError, match="early_stopping=True needs validation="):
        made(config=config)
    with pytest.raises(InvalidValueError, match="needs target_accuracy"):
        made(config={"early_stopping": True}, validation=Pairs())


# Writing


def test_output_config_says_what_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = server(**EVERYBODY)
    history = trained.train()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setitem(OUTPUT_CONFIG, "output_dir", "here")
    monkeypatch.setitem(OUTPUT_CONFIG, "log_dir", "there")
    assert trained.save_results() == ["here/toy_seed4.json", "there/toy_seed4.log"]
    data = json.loads(Path("here/toy_seed4.json").read_text())
    assert data["history"]["clip_values"] == history["clip_values"]
    assert data["statement"]["epsilon_max"] == "inf"
    assert "round 3 of 3" in Path("there/toy_seed4.log").read_text()
    drawn = plot_training_history(history, "toy", 4)
    assert Path(drawn).parent == Path("here")
    monkeypatch.setitem(OUTPUT_CONFIG, "save_plots", False)
    monkeypatch.setitem(OUTPUT_CONFIG, "save_results", False)
    assert (trained.save_results(), plot_training_history(history, "toy", 4)) == ([], "")
    monkeypatch.setitem(OUTPUT_CONFIG, "save_plots", True)
    assert plot_training_history(history, "toy", 4, {"enabled": False}) == ""
    assert len(list(Path("here").iterdir())) == 2


def test_what_is_written_of_a_run_with_a_bound_is_public(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trained = server(**BOUNDED)
    trained.train()
    path, _ = trained.save_results()
    history = json.loads(Path(path).read_text())["history"]
    assert history["train_loss"] == [None] * 3
    assert all(stats["signal_norm"] is None for stats in history["noise_stats"])
