"""A round is charged, kept and shown while the next one trains, where a device has the time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.aggregation import ServerOptimizer
from fedquilt.privacy.certified import Certified
from fedquilt.privacy.ledger import BudgetExceededError
from fedquilt.privacy.ledger.run import Run
from fedquilt.record.folder import RunFolder
from fedquilt.training.engines import LocalEngine, batched_trainer
from fedquilt.training.task import ClientUpdate

SEEDED = {"mode": "certified", "epsilon": 5.0, "noise_seed": 1}


class Early(LocalEngine):
    """Trains before anybody asks for the updates, as an engine on a device does."""

    starts_early = True
    events: list[str]

    def train(self, *args: Any, **keywords: Any) -> Iterator[ClientUpdate]:
        """Train everybody at once."""
        self.events.append("train")
        return iter(list(super().train(*args, **keywords)))


def run(folder: Path | None, early: bool, events: list[str] | None = None, **settings: Any) -> Any:
    """Run 7 rounds on made-up data, evaluated after the third, the sixth and the last."""
    random = np.random.default_rng(0)
    inputs = torch.from_numpy(random.standard_normal((48, 5), dtype=np.float32))
    targets = (inputs[:, 0] > 0).long()
    model = nn.Linear(5, 2)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)

    def engine(parts: Any) -> LocalEngine:
        kind = Early if early else LocalEngine
        made = kind(batched_trainer(parts.flat.module, parts.task, parts.local_settings))
        if isinstance(made, Early):
            made.events = [] if events is None else events
        return made

    data, parts = (inputs, targets), np.split(np.arange(48), 6)
    place = None if folder is None else str(folder)
    chosen = {"num_rounds": 7, "eval_every": 3, "output_dir": place, "quiet": True, **settings}
    return fedquilt.run(model, data, data, parts, engine=engine, **chosen)


def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list in which the run's doings are noted, in their order."""
    events: list[str] = []

    def note(owner: type, name: str) -> None:
        function = getattr(owner, name)

        def noting(*args: Any, **keywords: Any) -> Any:
            events.append(name)
            return function(*args, **keywords)

        monkeypatch.setattr(owner, name, noting)

    note(Run, "reserve")
    note(Run, "settle")
    note(RunFolder, "save_checkpoint")
    note(RunFolder, "append_round")
    return events


def lines(result: Any) -> list[dict[str, Any]]:
    text = (result.folder / "rounds.jsonl").read_text()
    found = [json.loads(line) for line in text.splitlines()]
    return [{key: line[key] for key in line if key != "seconds"} for line in found]


@pytest.mark.parametrize(
    "settings",
    [SEEDED, {"mode": "fedavg"}, {"mode": "quap_fl", "noise_seed": 1, "noise_layers": "*"}],
)
def test_the_same_run_comes_out(tmp_path: Path, settings: dict[str, Any]) -> None:
    plain, ahead = (run(tmp_path / str(early), early, **settings) for early in (False, True))
    assert lines(plain) == lines(ahead)
    assert len(lines(ahead)) == 7
    for name, tensor in plain.state_dict.items():
        assert torch.equal(tensor, ahead.state_dict[name])


def test_every_charge_is_on_disk_before_what_follows_from_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = noted(monkeypatch)
    run(tmp_path, True, events, mode="certified", epsilon=5.0)
    booked = ["settle", "append_round", "save_checkpoint"]
    # Rounds 3, 6 and 7 are evaluated, and booked before the next one trains.
    late, now = ["train", *booked, "reserve"], ["train", "reserve"]
    expected = now + late + late + booked + now + late + late + booked + now + booked
    assert events[: len(expected)] == expected


def test_a_server_of_ones_own_gets_a_release_after_its_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = noted(monkeypatch)

    class Showing(fedquilt.WholeModel):
        """Its server does something that cannot be undone with every release."""

        def __init__(self, parts: Any) -> None:
            super().__init__(parts)
            self.server = Shown("sgd", 1.0)

    class Shown(ServerOptimizer):
        def step(self, weights: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
            events.append("shown")
            return super().step(weights, update)

    run(tmp_path, True, events, method=Showing, mode="certified", epsilon=5.0)
    steps = [event for event in events if event in ("settle", "shown")]
    assert steps == ["settle", "shown"] * 7


def test_an_error_in_a_round_leaves_the_round_before_it_booked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Early.train

    def failing(self: Any, start: Any, cohort: Any, round_index: int, rate: float) -> Any:
        if round_index == 5:
            raise KeyboardInterrupt
        return train(self, start, cohort, round_index, rate)

    monkeypatch.setattr(Early, "train", failing)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, True, **SEEDED)
    monkeypatch.setattr(Early, "train", train)
    (folder,) = tmp_path.iterdir()
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 5
    resumed = run(None, True, resume=folder, **SEEDED)
    whole = run(tmp_path / "whole", False, **SEEDED)
    assert lines(resumed) == lines(whole)


def test_no_allowance_left_ends_the_run_in_time(tmp_path: Path) -> None:
    class Greedy(Certified):
        """Has enough left only until half of its budget, 1.26, is spent."""

        def has_allowance(self, remaining: Any) -> Any:
            return remaining > 0.6

    plain, ahead = (
        run(tmp_path / str(early), early, mechanism=Greedy, **SEEDED) for early in (False, True)
    )
    assert "allowance" in ahead.result["stopped"]
    assert 0 < len(lines(ahead)) < 7
    assert lines(plain) == lines(ahead)


def test_a_refused_reservation_plans_the_round_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, refused = Run.reserve, []

    def once(self: Run, round_index: int, clients: Any, charges: Any) -> Any:
        if round_index == 4 and not refused:
            refused.append(round_index)
            asked = np.asarray(charges)
            raise BudgetExceededError("taken", np.asarray(clients), asked, asked)
        return reserve(self, round_index, clients, charges)

    monkeypatch.setattr(Run, "reserve", once)
    ahead = run(tmp_path / "ahead", True, **SEEDED)
    assert refused == [4]
    monkeypatch.setattr(Run, "reserve", reserve)
    assert lines(ahead) == lines(run(tmp_path / "plain", False, **SEEDED))


def test_a_deferred_round_counts_as_an_exposure_to_the_secret_coin(tmp_path: Path) -> None:
    """The noise is calibrated for two exposures, and client 0 is available in every round."""
    available = [(index, 0) for index in range(6)] + [(5, client) for client in range(1, 6)]
    rows = "".join(f"{index},{client}\n" for index, client in available)
    (tmp_path / "who.csv").write_text("round,client\n" + rows)
    coin: dict[str, Any] = {
        "mode": "certified",
        "epsilon": 5.0,
        "selection": "poisson",
        "amplification": True,
        "clients_per_round": 3,
        "availability": str(tmp_path / "who.csv"),
        "policy": "cap",
        "max_joins": 2,
        "num_rounds": 6,
        "eval_every": 6,
    }
    plain, ahead = (run(tmp_path / str(early), early, **coin) for early in (False, True))
    assert ahead.statement.epsilon_max <= 5.0
    assert plain.result["cohorts"] == ahead.result["cohorts"]
    assert plain.statement == ahead.statement
