"""Clients of whom nothing arrives: not in the sum, not charged; nobody at all: no release."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt import ClientUpdate, MethodParts
from fedquilt.population import Cohort
from fedquilt.privacy.ledger import Ledger

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long()
USUAL: dict[str, Any] = {
    "mode": "certified",
    "num_rounds": 2,
    "clients_per_round": 1.0,
    "availability": "always",
    "policy": "worst_case",
    "epsilon": 8.0,
}
PARTS = [range(i * 10, i * 10 + 10) for i in range(4)]


class Unreliable:
    """Trains nobody really: everybody who answers sends the same small step."""

    def __init__(self, answers: dict[int, Sequence[int]]) -> None:
        self.answers = answers

    def __call__(self, parts: MethodParts) -> Unreliable:
        self.size = parts.flat.vector.numel()
        return self

    def train(
        self, start: torch.Tensor, cohort: Any, round_index: int, learning_rate: float
    ) -> Iterator[ClientUpdate]:
        for client in map(int, cohort):
            if client in self.answers.get(round_index, range(4)):
                yield ClientUpdate(client, torch.full((self.size,), 0.01), 10, 0.5)

    def close(self) -> None:
        pass


def run(folder: Path, answers: dict[int, Sequence[int]], **options: Any) -> Any:
    model = nn.Linear(4, 2)
    nn.init.zeros_(model.weight)
    return fedquilt.run(
        model,
        (X, Y),
        (X, Y),
        PARTS,
        output_dir=str(folder),
        engine=Unreliable(answers),
        **_used({**USUAL, **options}),
    )


def _used(settings: dict[str, Any]) -> dict[str, Any]:
    """Leave out what does nothing in the mode, and clip at 1 as it is, in any mode that clips."""
    mode = settings["mode"]
    if mode == "certified":
        settings = {"clip_norm": 1.0, "normalise_updates": False, **settings}
    idle = {
        "certified": {"noise_layers"},
        "fixed_dp": {"policy"},
        "quap_fl": {"policy"},
        "fedavg": {"policy", "epsilon", "noise_layers"},
    }
    return {key: value for key, value in settings.items() if key not in idle[mode]}


def spent(result: Any) -> Any:
    with Ledger.open(result.folder / "ledger.sqlite") as ledger:
        return np.asarray(ledger.populations()[0].spent())


@pytest.mark.parametrize(
    "options", [{}, {"mode": "fixed_dp", "noise_layers": "all", "epsilon": 1.0}]
)
def test_who_sent_nothing_is_not_charged(tmp_path: Path, options: dict[str, Any]) -> None:
    result = run(tmp_path, {0: [0, 2]}, **options)
    charges = spent(result)
    assert charges[1] == charges[3] == pytest.approx(charges[0] / 2)
    assert charges[0] == charges[2] > 0
    assert result.statement.is_bounded
    assert result.result["cohorts"] == [[0, 1, 2, 3]] * 2


def test_the_divisor_of_a_certified_round_does_not_follow_who_came(tmp_path: Path) -> None:
    all_came = run(tmp_path / "a", {}, noise_seed=1, num_rounds=1)
    half = run(tmp_path / "b", {0: [0, 1]}, noise_seed=1, num_rounds=1)
    nobody_noise = run(tmp_path / "c", {0: [0]}, noise_seed=1, num_rounds=1)

    def moved(one: Any, other: Any) -> float:
        return float((one.state_dict["weight"] - other.state_dict["weight"]).mean())

    # Each step of 0.01 is divided by the same public number, 4.
    assert moved(all_came, half) == pytest.approx(2 * 0.01 / 4, rel=1e-4)
    assert moved(half, nobody_noise) == pytest.approx(0.01 / 4, rel=1e-4)


@pytest.mark.parametrize("mode", ["certified", "fixed_dp", "fedavg", "quap_fl"])
def test_a_round_without_anybody_leaves_model_and_ledger_alone(tmp_path: Path, mode: str) -> None:
    model = nn.Linear(4, 2)
    result = fedquilt.run(
        model,
        (X, Y),
        (X, Y),
        PARTS,
        output_dir=str(tmp_path),
        engine=Unreliable({0: [], 1: []}),
        **_used(
            {
                "mode": mode,
                "num_rounds": 2,
                "epsilon": 1.0,
                "noise_layers": "all",
                "availability": "always",
                "clients_per_round": 1.0,
            }
        ),
    )
    assert torch.equal(result.state_dict["weight"], model.weight)
    assert [line["absent"] for line in lines(result)] == [[0, 1, 2, 3]] * 2
    if mode in ("certified", "fixed_dp"):
        assert (spent(result) == 0).all()


def lines(result: Any) -> list[dict[str, Any]]:
    import json

    text = (result.folder / "rounds.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_bounded_run_says_who_was_absent(tmp_path: Path) -> None:
    first, second = lines(run(tmp_path, {1: [3]}))
    assert "absent" not in first
    assert second["absent"] == [0, 1, 2]


def test_a_secret_cohort_is_told_by_the_arrays_and_not_by_what_is_in_them() -> None:
    everybody = np.arange(3)
    assert not Cohort(everybody, everybody).is_secret
    assert Cohort(everybody.copy(), everybody).is_secret


def test_without_an_account_nothing_is_charged_at_infinity_for_who_sent_nothing(
    tmp_path: Path,
) -> None:
    """A run without a bound puts at infinity those who had a part in its releases."""
    ledger = tmp_path / "ledger.sqlite"
    run(
        tmp_path / "runs",
        {0: [0, 2], 1: [0, 2]},
        mode="fedavg",
        ledger=str(ledger),
        population="four",
    )
    with Ledger.open(ledger) as opened:
        epsilons = opened.populations()[0].epsilons()
    assert np.isinf(epsilons).tolist() == [True, False, True, False]
