"""Metrics against scikit-learn, batch by batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as theirs
from torch import nn
from torch.nn import functional

from fedquilt.errors import InvalidValueError
from fedquilt.training.metrics import make_metrics, measure
from fedquilt.training.objective import Objective

N = 57
RANDOM = torch.Generator().manual_seed(6)
SCORES = torch.randn(N, 4, generator=RANDOM).round(decimals=1)  # with ties
CLASSES = torch.randint(0, 4, (N,), generator=RANDOM)
YES = (torch.randn(N, generator=RANDOM) > 0).long()
MANY = (torch.randn(N, 3, generator=RANDOM) > 0.5).long()
NUMBERS = torch.randn(N, 2, generator=RANDOM)


class Looks(nn.Module):
    """Returns its inputs: they are the outputs to be measured."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def measured(
    outputs: torch.Tensor, targets: Any, wanted: Any, loss: str = "cross_entropy", **more: Any
) -> dict[str, float]:
    objective = Objective(loss, **more)
    made = make_metrics(wanted, objective, outputs[:2], targets[:2])
    return measure(Looks(), objective, made, outputs, targets, batch_size=10)


def probabilities() -> Any:
    return SCORES.double().softmax(1).numpy()


def test_classes() -> None:
    found = measured(SCORES, CLASSES, "accuracy,top2,top_9,auroc,f1,perplexity")
    labels, guesses = CLASSES.numpy(), SCORES.argmax(1).numpy()
    assert found["accuracy"] == theirs.accuracy_score(labels, guesses)
    assert found["top2"] == pytest.approx(
        theirs.top_k_accuracy_score(labels, probabilities(), k=2), abs=0.05
    )
    assert found["top_9"] == 1.0
    assert found["auroc"] == pytest.approx(
        theirs.roc_auc_score(labels, probabilities(), multi_class="ovr")
    )
    assert found["f1"] == pytest.approx(theirs.f1_score(labels, guesses, average="macro"))
    assert found["loss"] == pytest.approx(theirs.log_loss(labels, probabilities()), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]), rel=1e-5)
    assert next(iter(found)) == "accuracy", "the headline is the first that was named"


def test_top_k_without_ties() -> None:
    scores = torch.randn(N, 4, generator=RANDOM)
    found = measured(scores, CLASSES, "top2")
    wanted = theirs.top_k_accuracy_score(CLASSES.numpy(), scores.numpy(), k=2)
    assert found["top2"] == pytest.approx(wanted)


@pytest.mark.parametrize("shape", [(N,), (N, 1), (N, 2)])
def test_yes_or_no(shape: tuple[int, ...]) -> None:
    raw = SCORES[:, 0]
    outputs = torch.stack([-raw, raw], 1) if shape == (N, 2) else raw.view(shape)
    loss = "cross_entropy" if shape == (N, 2) else "binary_cross_entropy"
    targets = YES if loss == "cross_entropy" else YES.float()
    found = measured(outputs, targets, "auroc,f1,accuracy", loss)
    guesses = (raw > 0).long().numpy()
    assert found["auroc"] == pytest.approx(theirs.roc_auc_score(YES.numpy(), raw.numpy()))
    if shape != (N, 2):  # a tie of two scores is no yes here, and the first class there
        assert found["f1"] == pytest.approx(theirs.f1_score(YES.numpy(), guesses))
        assert found["accuracy"] == pytest.approx(theirs.accuracy_score(YES.numpy(), guesses))


def test_several_labels() -> None:
    outputs = SCORES[:, :3]
    found = measured(outputs, MANY.float(), ["auroc", "f1", "accuracy"], "binary_cross_entropy")
    guesses = (outputs > 0).long().numpy()
    assert found["auroc"] == pytest.approx(
        theirs.roc_auc_score(MANY.numpy(), outputs.numpy(), average="macro")
    )
    assert found["f1"] == pytest.approx(theirs.f1_score(MANY.numpy(), guesses, average="macro"))
    assert found["accuracy"] == pytest.approx((guesses == MANY.numpy()).mean())


def test_numbers() -> None:
    found = measured(SCORES[:, :2], NUMBERS, "mse,mae", "huber")
    ours, wanted = SCORES[:, :2].numpy(), NUMBERS.numpy()
    assert found["mse"] == pytest.approx(theirs.mean_squared_error(wanted, ours))
    assert found["mae"] == pytest.approx(theirs.mean_absolute_error(wanted, ours))


def test_tokens_and_padding() -> None:
    outputs = torch.randn(20, 6, 5, generator=RANDOM)
    ids = torch.randint(0, 5, (20, 6), generator=RANDOM)
    ids[:, 4:] = -100
    found = measured(outputs, ids, "perplexity,accuracy", "token_cross_entropy")
    flat, labels = outputs[:, :4].flatten(0, 1), ids[:, :4].flatten()
    assert found["perplexity"] == pytest.approx(
        math.exp(float(functional.cross_entropy(flat, labels))), rel=1e-6
    )
    assert found["accuracy"] == pytest.approx(float((flat.argmax(1) == labels).float().mean()))
    next_one = measured(outputs, ids, "perplexity,accuracy", "next_token")
    flat, labels = outputs[:, :3].flatten(0, 1), ids[:, 1:4].flatten()
    assert next_one["perplexity"] == pytest.approx(math.exp(next_one["loss"]), rel=1e-5)
    assert next_one["accuracy"] == pytest.approx(float((flat.argmax(1) == labels).float().mean()))


def test_masks_of_images() -> None:
    outputs = torch.randn(8, 3, 4, 4, generator=RANDOM)
    mask = torch.randint(0, 3, (8, 4, 4), generator=RANDOM)
    found = measured(outputs, mask, "accuracy,f1")
    assert found["accuracy"] == pytest.approx(float((outputs.argmax(1) == mask).float().mean()))
    guesses = outputs.argmax(1).flatten().numpy()
    wanted = theirs.f1_score(mask.flatten().numpy(), guesses, average="macro")
    assert found["f1"] == pytest.approx(wanted)


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    assert len(outputs) == len(targets) == N, "a callable sees everything at once"
    return float(np.ptp(outputs.numpy()))


@pytest.mark.parametrize("given", [spread, [spread], {"spread": spread}, ["accuracy", spread]])
def test_a_callable(given: Any) -> None:
    found = measured(SCORES, CLASSES, given)
    assert found["spread"] == pytest.approx(float(SCORES.max() - SCORES.min()))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("acuracy", "did you mean 'accuracy'"),
        ("top0", "must be >= 1"),
        ({"loss": spread}, "and not 'loss'"),
        ({"Größe": spread}, "small letters"),
        ([7], "must be a name or a callable"),
    ],
)
def test_what_is_no_metric(wanted: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        make_metrics(wanted, Objective())


def test_auto_follows_the_loss() -> None:
    usual = {
        "cross_entropy": ["accuracy"], "nll": ["accuracy"], "binary_cross_entropy": ["accuracy"],
        "token_cross_entropy": ["accuracy"], "next_token": ["perplexity"],
        "mse": ["mse"], "mae": ["mae"], "huber": ["mse"], "model": [],
    }  # fmt: skip
    for loss, names in usual.items():
        assert list(make_metrics("auto", Objective(loss))) == names
    own = Objective(lambda outputs, targets: outputs.sum())
    assert list(make_metrics("auto", own, SCORES, CLASSES)) == ["accuracy"]
    assert list(make_metrics("auto", own, SCORES, NUMBERS)) == []


def test_what_cannot_be_told_is_not_a_number() -> None:
    one_class = torch.zeros(N, dtype=torch.int64)
    assert math.isnan(measured(SCORES, one_class, "auroc")["auroc"])
    nothing = torch.full((N,), -100)
    found = measured(SCORES, nothing, "accuracy,perplexity")
    assert math.isnan(found["accuracy"])
    assert math.isnan(found["perplexity"])


def test_what_an_own_metric_keeps_does_not_reach_the_next_evaluation() -> None:
    """Clients measure with it in turn, and then the server."""
    seen: list[float] = []

    def largest(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        seen.append(float(outputs.max()))
        return max(seen)

    objective = Objective("mse")
    made = make_metrics(largest, objective, None, None)
    for inputs in (torch.full((3, 1), 7.0), torch.ones(3, 1)):
        found = measure(nn.Identity(), objective, made, inputs, torch.zeros(3, 1))
        assert found["largest"] == float(inputs.max())
