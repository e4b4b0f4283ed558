"""SCAFFOLD, FedDyn and FedNova against loops written from their papers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedquilt
from fedquilt.common.errors import InvalidValueError
from fedquilt.common.randomness import torch_seed
from fedquilt.config import build_config
from fedquilt.training.task import ClientVectors

SIZES = (3, 9, 14, 6)
RATE, BATCH, EPOCHS, ROUNDS, SEED = 0.3, 4, 2, 4, 7
ALPHA = 0.5


def clients() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = np.random.default_rng(2)
    made = []
    for number, size in enumerate(SIZES):
        x = draws.standard_normal((size, 5)) + number
        made.append(
            (torch.tensor(x, dtype=torch.float32), torch.tensor(draws.integers(0, 3, size)))
        )
    return made


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Linear(5, 3)


def run(correction: str, **more: Any) -> Any:
    return fedquilt.run(
        model(),
        clients(),
        test=clients()[0],
        output_dir=more.pop("output_dir", None),
        mode="fedavg",
        correction=correction,
        clients_per_round=more.pop("clients_per_round", 3),
        availability="always",
        num_rounds=more.pop("num_rounds", ROUNDS),
        local_epochs=EPOCHS,
        batch_size=BATCH,
        learning_rate=RATE,
        seed=SEED,
        eval_every=ROUNDS,
        **({"feddyn_alpha": ALPHA} if correction == "feddyn" else {}),
        **more,
    )


def gradient(w: np.ndarray[Any, Any], x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> Any:
    """The gradient of the mean cross-entropy of a linear layer, in float64."""
    scores = x @ w[:15].reshape(3, 5).T + w[15:]
    chances = np.exp(scores - scores.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(len(y)), y] -= 1
    chances /= len(y)
    return np.concatenate([(chances.T @ x).ravel(), chances.sum(0)])


def batches(client: int, round_index: int, size: int) -> list[np.ndarray[Any, Any]]:
    """The batches that every engine draws for a client."""
    shuffle = torch.Generator().manual_seed(torch_seed(SEED, "local", round_index, client))
    orders = [torch.randperm(size, generator=shuffle).numpy() for _ in range(EPOCHS)]
    return [order[k : k + BATCH] for order in orders for k in range(0, size, BATCH)]


def one_direction(steps: int, momentum: float, mu: float) -> float:
    """How far a client comes, over its rate, where every gradient is 1: FedNova's |a|_1."""
    away = buffer = 0.0
    for _ in range(steps):
        buffer = momentum * buffer + 1 - mu * away
        away += RATE * buffer
    return away / RATE


def by_hand(
    correction: str, cohorts: list[list[int]], momentum: float = 0.0, fedprox_mu: float = 0.0
) -> Any:
    data = [(x.double().numpy(), y.numpy()) for x, y in clients()]
    first = model()
    x = np.concatenate([p.detach().double().numpy().ravel() for p in first.parameters()])
    own = {k: np.zeros_like(x) for k in range(len(data))}
    server = np.zeros_like(x)
    for t, cohort in enumerate(cohorts):
        moves, control_moves, steps = {}, {}, {}
        for k in cohort:
            y, buffer = x.copy(), np.zeros_like(x)
            for batch in batches(k, t, len(data[k][1])):
                g = gradient(y, data[k][0][batch], data[k][1][batch])
                if correction == "scaffold":
                    g = g - own[k] + server
                if correction == "feddyn":
                    g = g - own[k] + ALPHA * (y - x)
                g = g + fedprox_mu * (y - x)
                buffer = momentum * buffer + g
                y = y - RATE * buffer
                steps[k] = steps.get(k, 0) + 1
            moves[k] = y - x
            if correction == "scaffold":
                new = own[k] - server + (x - y) / (steps[k] * RATE)
                control_moves[k], own[k] = new - own[k], new
            if correction == "feddyn":
                own[k] = own[k] - ALPHA * (y - x)
        mean = np.mean([moves[k] for k in cohort], axis=0)
        if correction == "scaffold":
            x = x + mean
            server = server + np.sum([control_moves[k] for k in cohort], axis=0) / len(data)
        elif correction == "feddyn":
            server = server - ALPHA * np.sum([moves[k] for k in cohort], axis=0) / len(data)
            x = np.mean([x + moves[k] for k in cohort], axis=0) - server / ALPHA
        else:
            a = {k: one_direction(steps[k], momentum, fedprox_mu) for k in cohort}
            total = sum(SIZES[k] for k in cohort)
            share = {k: SIZES[k] / total for k in cohort}
            tau = sum(share[k] * a[k] for k in cohort)
            x = x + tau * sum(share[k] * moves[k] / a[k] for k in cohort)
    return x


def weights_of(done: Any) -> Any:
    return np.concatenate([p.detach().double().numpy().ravel() for p in done.model.parameters()])


@pytest.mark.parametrize(
    ("correction", "more"),
    [
        ("scaffold", {}),
        ("feddyn", {}),
        ("fednova", {}),
        ("fednova", {"momentum": 0.6}),
        ("fednova", {"fedprox_mu": 0.4}),
    ],
)
def test_a_run_is_what_the_paper_says(correction: str, more: dict[str, Any]) -> None:
    done = run(correction, **more)
    cohorts = done.result["history"]["client_participation"]
    assert len({tuple(cohort) for cohort in cohorts}) > 1  # others, so that who waits is tested
    expected = by_hand(correction, cohorts, **more)
    assert np.allclose(weights_of(done), expected, rtol=2e-4, atol=2e-5)
    assert not np.allclose(weights_of(done), weights_of(run("none", **more)), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("correction", ["scaffold", "feddyn"])
def test_a_resumed_run_has_the_same_control_variates_to_the_bit(
    correction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedquilt.experiment import loop

    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    whole = run(correction)
    real = loop.Experiment.run_round

    def dies(self: Any, index: int) -> Any:
        if index == 2:
            raise KeyboardInterrupt
        return real(self, index)

    monkeypatch.setattr(loop.Experiment, "run_round", dies)
    with pytest.raises(KeyboardInterrupt):
        run(correction, output_dir=tmp_path)
    monkeypatch.setattr(loop.Experiment, "run_round", real)
    (folder,) = tmp_path.iterdir()
    (kept,) = folder.glob("client_vectors-*")
    assert kept.name == "client_vectors-2.safetensors"
    assert kept.stat().st_mode & 0o077 == 0
    again = fedquilt.run(model(), clients(), test=clients()[0], resume=folder)
    assert np.array_equal(weights_of(whole), weights_of(again))


def test_a_folder_that_lost_what_clients_keep_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedquilt.experiment import loop

    monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", 0.0)
    run("scaffold", output_dir=tmp_path)
    (folder,) = tmp_path.iterdir()
    (folder / "result.json").unlink()
    next(folder.glob("client_vectors-*")).unlink()
    with pytest.raises(fedquilt.errors.RunFolderError, match="cannot go on without it"):
        fedquilt.run(model(), clients(), test=clients()[0], resume=folder)


def test_a_client_whose_update_is_not_finite_keeps_its_last_vector() -> None:
    kept = ClientVectors("tests", 3, 2)
    kept.put(1, torch.tensor([1.0, 2.0]))
    kept.put(1, torch.tensor([math.nan, 2.0]))
    assert kept.state()["values"].tolist() == [[1.0, 2.0]]


def test_vectors_of_clients_are_bounded_before_anybody_trains() -> None:
    with pytest.raises(InvalidValueError, match=r"would take 37\.3"):
        ClientVectors("correction='scaffold'", 10_000, 1_000_000)


def test_vectors_of_another_run_are_refused() -> None:
    kept = ClientVectors("tests", 3, 2)
    foreign = {"clients": np.array([5]), "values": np.zeros((1, 2), np.float32)}
    with pytest.raises(ValueError, match="another run"):
        kept.load_state(foreign, torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mode": "certified", "correction": "scaffold"}, "a second vector"),
        ({"mode": "certified", "correction": "feddyn"}, "would be their noise"),
        ({"mode": "certified", "correction": "fednova"}, "how many samples clients hold"),
        ({"mode": "fedavg", "correction": "scaffold", "momentum": 0.9}, "plain SGD"),
        ({"mode": "fedavg", "correction": "feddyn", "fedprox_mu": 0.1}, "its own term"),
        ({"mode": "fedavg", "correction": "feddyn", "server_lr": 0.5}, "its own step"),
        ({"mode": "fedavg", "correction": "scaffold", "engine": "batched"}, "one by one"),
        ({"mode": "fedavg", "correction": "fednova", "aggregation": "median"}, "of means"),
    ],
)
def test_what_is_not_in_the_paper_or_would_cost_a_claim_is_refused(
    settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises(InvalidValueError, match=reason):
        build_config(settings)


def test_running_statistics_are_refused() -> None:
    norm = torch.nn.BatchNorm1d(4)
    normed = torch.nn.Sequential(torch.nn.Linear(5, 4), norm, torch.nn.Linear(4, 3))
    settings = {"mode": "fedavg", "correction": "feddyn", "output_dir": None}
    with pytest.raises(InvalidValueError, match="running_mean"):
        fedquilt.run(normed, clients(), test=clients()[0], **settings)
