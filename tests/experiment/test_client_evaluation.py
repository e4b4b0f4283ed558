"""Clients that evaluate the model on samples of their own, with and without a bound."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt
from fedquilt.common.spread import client_spread, grouped
from fedquilt.errors import InvalidValueError, RunInterrupted
from fedquilt.experiment.api import RunResult
from fedquilt.experiment.client_evaluation import SENSITIVITY, contribution
from fedquilt.privacy.ledger import Ledger
from fedquilt.privacy.noise import SecretNoise
from fedquilt.privacy.run_account import EvaluationShare
from fedquilt.setup.task import hold_back
from fedquilt.training import evaluate
from gaussian_oracle import exact_epsilon

pytestmark = pytest.mark.usefixtures("one_thread")

SETTINGS: dict[str, Any] = {
    "mode": "certified",
    "availability": "always",
    "clients_per_round": 1.0,
    "num_rounds": 4,
    "eval_every": 2,
    "local_epochs": 1,
    "epsilon": 3.0,
    "client_test_fraction": 0.25,
    "output_dir": None,
}
PARTS = {name: list(range(8 * k, 8 * k + 8)) for k, name in enumerate("abcde")}


def data(seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(seed)
    inputs = torch.rand(60, 4, generator=draws)
    return inputs, (inputs[:, 0] > inputs[:, 1]).long()


def run(
    clients: Any = PARTS,
    samples: Any = None,
    test: Any = None,
    model: type[nn.Linear] = nn.Linear,
    **changes: Any,
) -> RunResult:
    torch.manual_seed(0)
    train = data() if samples is None else samples
    return fedquilt.run(model(4, 2), train, test, clients, **settings(**changes))


def settings(**changes: Any) -> dict[str, Any]:
    """Return the settings of a run: without noise an epsilon says nothing."""
    merged = {**SETTINGS, **changes}
    return {k: v for k, v in merged.items() if k != "epsilon" or merged["mode"] != "fedavg"}


# What clients hold back


def test_a_client_keeps_at_least_one_sample_to_train_on() -> None:
    parts = [np.arange(size) + 100 * k for k, size in enumerate((0, 1, 2, 8))]
    train, held = hold_back(parts, 0.9, seed=3)
    assert [len(part) for part in held] == [0, 0, 1, 7]
    for part, first, second in zip(parts, train, held, strict=True):
        assert sorted([*first, *second]) == sorted(part)
    again = hold_back(parts[3:] * 4, 0.9, seed=3)[1]
    assert np.array_equal(again[3] - 300, held[3] - 300), "only its own number and samples count"


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        ([[50]], "one list for each of 2 clients; it holds 1"),
        ([[50], [9]], r"client_tests\[1\] must hold samples that the client does not train on"),
        ([[50], [50]], "must not both hold sample 50"),
        ([[9], []], "must not both hold sample 9"),
        ({"z": [50]}, r"client_tests\['z'\] must belong to one of the clients"),
    ],
)
def test_wrong_client_tests(tests: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        run({"a": [0, 1], "b": [8, 9]}, client_tests=tests, client_test_fraction=0.0)


def test_settings_that_do_not_fit() -> None:
    for changes, message in (
        ({"client_tests": [[50 + k] for k in range(5)]}, "must be 0 beside client_tests"),
        (
            {"mode": "fedavg", "evaluation_share": 0.1},
            "evaluation_share=0.1 must be left out .* it is for mode 'certified'",
        ),
        ({"client_test_fraction": 0.0, "evaluation_share": 0.1}, "needs samples that clients hold"),
        (
            {"noise_seed": 1, "evaluation_share": 0.1},
            "must be 0 with amplification or a noise_seed",
        ),
    ):
        with pytest.raises(InvalidValueError, match=message):
            run(**changes)


# Without a bound


def test_fedavg_without_a_test_set_shows_what_clients_see(tmp_path: Path) -> None:
    result = run(mode="fedavg", output_dir=str(tmp_path), learning_rate=0.5)
    assert result.final_accuracy is None
    rows = result.client_metrics
    assert rows is not None
    assert [row["name"] for row in rows] == list(PARTS)
    assert {row["examples"] for row in rows} == {2}
    assert result.model is not None
    inputs, targets = data()
    _, held = hold_back([np.asarray(part) for part in PARTS.values()], 0.25, seed=0)
    for row, part in zip(rows, held, strict=True):
        accuracy, loss = evaluate(result.model, inputs[part], targets[part])
        assert row["accuracy"] == pytest.approx(accuracy)
        assert row["loss"] == pytest.approx(loss, rel=1e-5)
        assert sum(found["examples"] for found in row["classes"].values()) == 2
    history = result.result["history"]
    assert history["evaluation_rounds"] == [2, 4]
    assert history["test_accuracy"] == [None, None]
    mean = float(np.mean([row["accuracy"] for row in rows]))
    assert history["client_accuracy"][-1] == pytest.approx(mean)
    assert result.folder is not None
    again = fedquilt.load(result.folder, nn.Linear(4, 2))
    assert again.client_metrics == rows


@pytest.mark.parametrize("engine", ["sequential", "batched"])
def test_looking_changes_nothing(engine: str) -> None:
    plainly = {"mode": "fedavg", "client_test_fraction": 0.0, "engine": engine}
    given = {name: [50 + k] for k, name in enumerate(PARTS)}
    looked = run(**plainly, client_tests=given, eval_every=1)
    plain = run(**plainly)
    assert looked.client_metrics is not None
    for name, tensor in plain.state_dict.items():
        assert torch.equal(looked.state_dict[name], tensor)


def test_nobody_evaluates_without_any_samples_for_it() -> None:
    result = run(mode="fedavg", client_test_fraction=0.0)
    assert result.client_metrics is None
    assert result.result["history"]["evaluation_rounds"] == []


def test_each_client_looks_at_its_own_slice(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2))
    result = fedquilt.run(
        model,
        data(),
        None,
        PARTS,
        **settings(mode="fedavg", method="heterofl", tiers="1,1/4"),
    )
    rows = result.client_metrics
    assert rows is not None
    assert {row["width"] for row in rows} == {"1", "1/4"}
    for row in rows:
        assert 0 <= row["own_accuracy"] <= 1
        assert math.isfinite(row["own_loss"])
        if row["width"] == "1":
            assert row["own_accuracy"] == row["accuracy"]
    assert any(row["own_loss"] != pytest.approx(row["loss"]) for row in rows)


# With a bound


def public_text(folder: Path) -> str:
    files = [path for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) != 0o600]
    return "".join(path.read_bytes().decode("latin-1") for path in files)


def test_without_a_share_nothing_of_it_is_public(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    result = run(output_dir=str(tmp_path), observer=lambda config, line: seen.append(line))
    assert result.folder is not None
    assert result.client_metrics is not None
    private = result.folder / "client_metrics.jsonl"
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert [json.loads(line)["rounds"] for line in private.read_text().splitlines()] == [2, 4]
    keys = {key for line in seen for key in line}
    assert not any("client_accuracy" in key or "test" in key for key in keys), keys
    text = public_text(result.folder)
    assert '"client_accuracy"' not in text
    assert '"accuracy":' not in text
    assert "noised_client_accuracy" not in json.dumps(result.result["history"])


def test_a_share_pays_for_a_noised_mean(tmp_path: Path) -> None:
    ledger = str(tmp_path / "l.sqlite")
    result = run(evaluation_share=0.2, ledger=ledger, population="wards", allowance=3.0)
    history = result.result["history"]
    assert len(history["noised_client_accuracy"]) == 2
    assert all(0 <= value <= 1 for value in history["noised_client_accuracy"])
    assert any("noised mean of what clients measure" in note for note in result.statement.notes)
    assert "client_accuracy" not in history
    with Ledger.open(ledger, read_only=True) as opened:
        assert opened.verify().ok
        population = opened.population("wards")
        spent = population.spent()
        exact = [exact_epsilon(math.sqrt(mu2), 1e-5) for mu2 in spent]
    assert result.statement.epsilon_max == pytest.approx(max(exact), rel=1e-6)
    assert max(exact) <= 3.0 * (1 + 1e-9)
    spent_after = history["epsilon_spent"][-1]["worst"]
    assert spent_after == result.statement.epsilon_max, "the evaluation after the round included"
    # The noise is what was paid for: S^2 / sigma^2 = q B / E, with B of epsilon 3.
    from fedquilt.privacy.accounting import gaussian_mu

    cost = 0.2 * gaussian_mu(3.0, 1e-5) ** 2 / 2
    told = history["noised_client_accuracy"][0]
    std = SENSITIVITY / math.sqrt(cost) / 5 * math.hypot(1, 2 * told - 1)
    assert history["noised_client_accuracy_std"][0] == pytest.approx(std, rel=1e-6)


def test_who_is_there_takes_part_picked_or_not(tmp_path: Path) -> None:
    trace = tmp_path / "there.csv"
    rows = [f"{t},{k}" for t in range(4) for k in range(4)]
    trace.write_text("\n".join(["round,client", *rows]) + "\n")
    ledger = str(tmp_path / "l.sqlite")
    result = run(
        availability=str(trace), clients_per_round=1, evaluation_share=0.2, ledger=ledger,
        population="wards",
    )  # fmt: skip
    assert sum(result.result["joins"]) == 4
    with Ledger.open(ledger, read_only=True) as opened:
        spent = opened.population("wards").spent()
    assert (spent[:4] > 0).all(), "four are there, of whom one is picked"
    assert spent[4] == 0, "the fifth is never there"


@pytest.mark.parametrize("rounds", [1, 3, 4, 10])
@pytest.mark.parametrize("every", [1, 2, 3, 10, 50])
def test_evaluations_are_counted(rounds: int, every: int) -> None:
    share = EvaluationShare(0.3, rounds, every)
    happen = [d - 1 for d in range(1, rounds + 1) if d % every == 0 or d == rounds]
    for index in range(rounds + 2):
        assert share.left(index) == sum(t >= index for t in happen)
    assert share.kept_back(0) == pytest.approx(0.3)
    assert share.kept_back(rounds) == 0


class Silent(SecretNoise):
    """No noise, so that two worlds can be compared."""

    def normal(self, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.zeros(size)


WORLDS = ["nothing", "nan", "right", "wrong", "one"]


def world(
    kind: str, victim: str = "c"
) -> tuple[dict[str, list[int]], tuple[torch.Tensor, torch.Tensor]]:
    """Return the federation with other data at one client."""
    parts, (inputs, targets) = dict(PARTS), data()
    if kind == "nothing":
        parts[victim] = []
    elif kind == "one":
        parts[victim] = [50]
    else:
        mine = torch.tensor(parts[victim])
        inputs[mine] = float("nan") if kind == "nan" else inputs[mine]
        right = (inputs[mine, 0] > inputs[mine, 1]).long()
        targets[mine] = 1 - right if kind == "wrong" else right
    return parts, (inputs, targets)


class Centred(nn.Linear):
    """Its class keeps a mean of the outputs that it saw in training."""

    centre = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if self.training:
            Centred.centre = 0.5 * self.centre + 20 * out.detach().mean(0)
        return out - self.centre


def released(
    kind: str, monkeypatch: pytest.MonkeyPatch, victim: str = "c", **changes: Any
) -> tuple[list[np.ndarray[Any, Any]], list[float], dict[str, Any]]:
    """Return the sums that evaluations noise, what each client paid, and the public lines."""
    from fedquilt.experiment import client_evaluation

    sums: list[np.ndarray[Any, Any]] = []

    class Watched(Silent):
        def stream(self, *keys: int) -> Any:
            return self

    monkeypatch.setattr(client_evaluation, "noise_source", lambda seed: Watched())
    original = client_evaluation.contribution
    added: list[np.ndarray[Any, Any]] = []

    def watched(measure: float | None) -> Any:
        added.append(original(measure))
        return added[-1]

    monkeypatch.setattr(client_evaluation, "contribution", watched)
    parts, samples = world(kind, victim)
    # A rate of almost zero: the model is the same in all worlds, and only evaluations differ.
    settings = {"evaluation_share": 0.3, "learning_rate": 1e-30, "clip_norm": 1e-30, **changes}
    lines: list[dict[str, Any]] = []
    run(parts, samples, observer=lambda config, line: lines.append(dict(line)), **settings)
    per_release = len(PARTS)
    for start in range(0, len(added), per_release):
        sums.append(np.sum(added[start : start + per_release], axis=0))
    norms = [float(np.linalg.norm(v)) for v in added]
    return sums, norms, lines[-1]


@pytest.mark.parametrize(
    ("adjacency", "model", "victim"),
    [("zero_out", nn.Linear, "c"), ("replace_one", nn.Linear, "c"), ("zero_out", Centred, "e")],
)
def test_neighbouring_worlds(
    monkeypatch: pytest.MonkeyPatch, adjacency: str, model: type[nn.Linear], victim: str
) -> None:
    """No data at a client move a sum further than its charge says, were it the last to train."""
    Centred.centre = torch.zeros(2)
    options = {"adjacency": adjacency, "model": model}
    found = {kind: released(kind, monkeypatch, victim, **options) for kind in WORLDS}
    base = found["nothing"]
    assert len(base[0]) == 2
    furthest = 0.0
    for kind in WORLDS:
        sums, norms, line = found[kind]
        assert len(sums) == 2
        assert max(norms) <= SENSITIVITY * (1 + 1e-12)
        for ours, theirs in zip(sums, base[0], strict=True):
            assert np.linalg.norm(ours - theirs) <= SENSITIVITY * (1 + 1e-12)
        for other in WORLDS:
            for ours, theirs in zip(sums, found[other][0], strict=True):
                furthest = max(furthest, float(np.linalg.norm(ours - theirs)))
        private = {"noised_client_accuracy", "noised_client_accuracy_std"}
        assert {k: v for k, v in line.items() if k not in private} == {
            k: v for k, v in base[2].items() if k not in private
        }
    assert furthest <= 2 * SENSITIVITY


@pytest.mark.parametrize("measure", [None, math.nan, math.inf, -3.0, 0.0, 0.5, 1.0, 7.0])
def test_a_contribution_is_bounded(measure: float | None) -> None:
    vector = contribution(measure)
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) <= SENSITIVITY * (1 + 1e-15)
    if measure is None or not math.isfinite(measure):
        assert not vector.any(), "what nothing adds"


def test_the_noise_is_as_strong_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []

    class Counted(SecretNoise):
        def normal(self, size: int) -> np.ndarray[Any, np.dtype[np.float64]]:
            drawn.append(size)
            return super().normal(size)

    from fedquilt.experiment import client_evaluation

    monkeypatch.setattr(client_evaluation, "noise_source", lambda seed: Counted())
    run(evaluation_share=0.3)
    assert drawn == [2, 2], "two numbers an evaluation, and both are noised"


class Stop:
    """An observer that interrupts the run after its second round, which is evaluated."""

    def __call__(self, config: object, line: dict[str, Any]) -> None:
        if line["round"] == 1:
            raise KeyboardInterrupt


def test_a_resumed_run_does_not_publish_an_evaluation_twice(tmp_path: Path) -> None:
    with pytest.raises(RunInterrupted) as interrupted:
        run(evaluation_share=0.3, output_dir=str(tmp_path), observer=Stop())
    folder = Path(str(interrupted.value.folder))
    before = json.loads((folder / "rounds.jsonl").read_text().splitlines()[1])
    result = run(resume=folder)
    after = json.loads((folder / "rounds.jsonl").read_text().splitlines()[1])
    assert before == after
    assert "noised_client_accuracy" in before
    with Ledger.open(folder / "ledger.sqlite", read_only=True) as ledger:
        population = ledger.populations()[0]
        joins = [row.joins for row in population.rows()]
    assert joins == [6] * 5, "four rounds and two evaluations, each charged once"
    assert result.statement.epsilon_max <= 3.0


# How measures are spread


def test_spread_by_hand() -> None:
    values = [0.2, 0.4, 0.6, 0.8]
    told = client_spread([*values, None, math.nan], "x")
    pairs = sum(abs(a - b) for a in values for b in values)
    assert told["x"] == pytest.approx(0.5)
    assert told["x_gini"] == pytest.approx(pairs / (2 * 16 * 0.5))
    assert told["x_worst_decile"] == pytest.approx(0.2)
    assert client_spread([None], "x") == {}
    assert client_spread([0.0, 0.0], "x")["x_gini"] == 0.0
    twenty = client_spread([k / 20 for k in range(20)], "x")
    assert twenty["x_worst_decile"] == pytest.approx((0 + 1 / 20) / 2)


def test_groups_by_hand() -> None:
    rows = [{"client": k, "accuracy": k / 4} for k in range(4)]
    told = grouped(rows, {"few": [0, 1], "many": [2, 3], "none": []})
    assert told["few"]["mean"] == pytest.approx(0.125)
    assert told["many"]["mean"] == pytest.approx(0.625)
    assert "none" not in told


# Other metrics than accuracy


def of_two_classes() -> tuple[torch.Tensor, torch.Tensor]:
    """Return samples of which client "a" holds one class alone."""
    inputs, targets = data()
    targets[:8] = 1
    return inputs, targets


def test_every_client_measures_the_metrics_that_were_asked_for(tmp_path: Path) -> None:
    given = {name: [*part[:4]] for name, part in PARTS.items()}
    held = {name: [*part[4:]] for name, part in PARTS.items()}
    result = run(
        given, of_two_classes(), mode="fedavg", metrics="auroc,f1", client_tests=held,
        client_test_fraction=0.0, output_dir=str(tmp_path),
    )  # fmt: skip
    rows, history = result.client_metrics, result.result["history"]
    assert rows is not None
    assert rows[0]["auroc"] is None, "one class has no AUROC"
    told = [row["auroc"] for row in rows if row["auroc"] is not None]
    assert told
    assert all(0 <= value <= 1 for value in told)
    assert all(0 <= row["f1"] <= 1 and 0 <= row["accuracy"] <= 1 for row in rows)
    assert history["client_auroc"][-1] == pytest.approx(float(np.mean(told)))
    assert history["client_f1"][-1] == pytest.approx(float(np.mean([row["f1"] for row in rows])))
    assert history["client_auroc_worst_decile"][-1] == pytest.approx(min(told))
    assert result.folder is not None
    again = fedquilt.load(result.folder, nn.Linear(4, 2))
    assert again.client_metrics == rows


def test_under_a_bound_no_other_metric_is_public(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []
    result = run(
        metrics="accuracy,auroc", output_dir=str(tmp_path),
        observer=lambda config, line: seen.append(line),
    )  # fmt: skip
    assert result.folder is not None
    assert result.client_metrics is not None
    assert all("auroc" in row for row in result.client_metrics)
    assert not any("auroc" in key for line in seen for key in line)
    text = public_text(result.folder)
    assert "client_auroc" not in text
    assert '"auroc":' not in text


def test_where_lower_is_better_the_worst_have_most() -> None:
    told = client_spread([0.2, 0.4, 0.9], "client_mse", lower_is_better=True)
    assert told["client_mse_worst_decile"] == pytest.approx(0.9)
    rows = [{"client": k, "mse": value} for k, value in enumerate((0.2, 0.4, 0.9))]
    assert grouped(rows, {"all": [0, 1, 2]}, "mse")["all"]["mean_worst_decile"] == 0.9
