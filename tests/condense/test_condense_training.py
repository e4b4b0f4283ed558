"""Training on the synthetic set, against a softmax regression in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedquilt.condense.augment import Augmentation
from fedquilt.condense.training import TrainingSettings, train_on
from fedquilt.errors import InvalidValueError
from fedquilt.models.networks import ConvNet

NONE = Augmentation("none")
LABELS = torch.tensor([1, 1, 4, 4, 7, 7, 7, 4])  # not contiguous; the model has nine outputs


def images() -> torch.Tensor:
    values = np.random.default_rng(0).normal(size=(8, 1, 2, 3))
    return torch.from_numpy(values)


def linear() -> nn.Module:
    model = nn.Sequential(nn.Flatten(), nn.Linear(6, 9)).double()
    with torch.no_grad():
        weights = np.random.default_rng(1).normal(size=(9, 6))
        model[1].weight.copy_(torch.from_numpy(weights))
        model[1].bias.copy_(torch.arange(9) / 10)
    return model


def train(model: nn.Module, seed: int = 0, augmentation: Augmentation = NONE, **changes: Any):
    settings = TrainingSettings(**{"epochs": 7, **changes})
    source = np.random.default_rng(seed)
    return train_on(model, images().to(_dtype(model)), LABELS, settings, augmentation, source)


def _dtype(model: nn.Module) -> torch.dtype:
    return next(model.parameters()).dtype


def regression(rates: list[float], momentum: float, decay: float) -> tuple[Any, Any, float]:
    """Full-batch softmax regression: v <- m v + (g + d w), w <- w - rate v."""
    start = linear()[1]
    w, b = start.weight.detach().numpy().copy(), start.bias.detach().numpy().copy()
    x, target = images().numpy().reshape(8, 6), np.eye(9)[LABELS.numpy()]
    v_w, v_b, losses = np.zeros_like(w), np.zeros_like(b), []
    for rate in rates:
        scores = x @ w.T + b
        p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
        losses.append(-(target * np.log(p)).sum(axis=1).mean())
        slope = (p - target) / 8
        v_w = momentum * v_w + slope.T @ x + decay * w
        v_b = momentum * v_b + slope.sum(axis=0) + decay * b
        w, b = w - rate * v_w, b - rate * v_b
    return w, b, float(np.mean(losses))


@pytest.mark.parametrize(
    ("epochs", "drop", "rates"),
    [
        (1, True, [0.3]),
        (2, True, [0.3, 0.03]),
        (7, True, [0.3] * 3 + [0.03] * 4),
        (8, True, [0.3] * 4 + [0.03] * 4),
        (4, False, [0.3] * 4),
    ],
)
def test_weights_and_loss_are_those_of_numpy(epochs: int, drop: bool, rates: list[float]) -> None:
    """The rate falls tenfold, once, half way; momentum and decay are SGD's."""
    model = linear()
    loss = train(
        model,
        epochs=epochs,
        schedule="step" if drop else "constant",
        learning_rate=0.3,
        momentum=0.8,
        weight_decay=0.05,
    )
    w, b, expected = regression(rates, 0.8, 0.05)
    np.testing.assert_allclose(model[1].weight.detach().numpy(), w, rtol=1e-10)
    np.testing.assert_allclose(model[1].bias.detach().numpy(), b, rtol=1e-10)
    assert loss == pytest.approx(expected)


def test_rate_falls_once_whatever_the_number_of_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.SGD.step

    def watched(self: torch.optim.SGD, *arguments: Any) -> Any:
        rates.extend(group["lr"] for group in self.param_groups)
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.SGD, "step", watched)
    train(linear(), epochs=6, batch_size=3, learning_rate=0.2)
    assert rates == pytest.approx([0.2] * 9 + [0.02] * 9)


def test_every_image_is_seen_once_an_epoch_in_changing_order() -> None:
    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = linear()
            self.seen: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += x[:, 0, 0, 0].tolist()
            return self.inner(x)

    model = Watched()
    train(model, epochs=3, batch_size=3)
    epochs = [model.seen[at : at + 8] for at in (0, 8, 16)]
    assert len(model.seen) == 24
    assert all(sorted(epoch) == sorted(images()[:, 0, 0, 0].tolist()) for epoch in epochs)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("augmentation", [NONE, Augmentation("color_crop_flip")])
def test_loss_falls_and_equal_generators_train_alike(augmentation: Augmentation) -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(12, 1, 8, 8))).float()
    labels = torch.tensor([2, 5, 8]).repeat(4)
    x += labels[:, None, None, None]
    x[:, :, :4] -= labels[:, None, None, None] * 2.0
    results = []
    for seed in (0, 0, 1):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = ConvNet((1, 8, 8), 9, width=4, depth=2)
        losses = [
            train_on(
                model,
                x,
                labels,
                TrainingSettings(epochs=epochs, batch_size=4, learning_rate=0.05),
                augmentation,
                np.random.default_rng(seed),
            )
            for epochs in (1, 25, 1)
        ]
        assert losses[2] < 0.75 * losses[0]
        results.append((losses, model.classifier.weight))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][1], results[2][1])


def test_model_ends_in_evaluation_mode_and_images_stay() -> None:
    model, x = linear(), images()
    told: list[int] = []
    train_on(
        model, x, LABELS, TrainingSettings(epochs=2), NONE, np.random.default_rng(0), told.append
    )
    assert not model.training
    assert torch.equal(x, images())
    assert told == [1, 2]


def test_frozen_weights_stay() -> None:
    model = linear()
    model[1].bias.requires_grad_(False)
    train(model, weight_decay=0.1)
    assert torch.equal(model[1].bias, linear()[1].bias)
    assert not torch.equal(model[1].weight, linear()[1].weight)


def test_augmentation_changes_what_is_learnt() -> None:
    plain, augmented = linear(), linear()
    train(plain)
    train(augmented, augmentation=Augmentation("color"))
    assert not torch.allclose(plain[1].weight, augmented[1].weight, rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"epochs": 0}, "model_epochs=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"learning_rate": 0.0}, "model_lr=0"),
    ],
)
def test_wrong_settings_are_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidValueError, match=name):
        TrainingSettings(**change)
